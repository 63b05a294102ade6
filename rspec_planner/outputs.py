# Copyright 2026 rspec_planner authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""
Publishers of the node: plans, reasoning, candidates, pictures and times.

The types of some topics depend on `output.message_set`, see message_sets.py; topics that cost
time to fill are filled while somebody subscribes.
"""

from __future__ import annotations

import json
import math
from typing import Any

from nav_msgs.msg import Path
from rclpy.event_handler import PublisherEventCallbacks
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions
from sensor_msgs.msg import PointCloud2
from std_msgs.msg import String
from visualization_msgs.msg import MarkerArray

from rspec_planner.cycle import CycleResult
from rspec_planner.hold_ups import HoldUps
from rspec_planner.markers import plan_markers
from rspec_planner.message_sets import AutowareMessages, load_message_set
from rspec_planner.overlay_publisher import OverlayPublisher
from rspec_planner.parameters import NodeParameters
from rspec_planner.planner.plan import Plan
from rspec_planner.planner.timing import STAGES
from rspec_planner.ros_conversions import candidate_cloud
from rspec_planner.wire import path_bytes, trajectory_bytes


def output_qos() -> QoSProfile:
    """
    Return a new profile: only the newest plan is of interest.

    New each time, because rclpy writes QoS overrides into the profile that it is given.
    """
    return QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE,
                      durability=DurabilityPolicy.VOLATILE)


def quiet_events() -> PublisherEventCallbacks:
    """
    Return no event callbacks at all.

    rclpy adds two by default, and each one is asked for its state at every wake-up of the
    executor: with 17 publishers that took more time than the messages (measured at 100 Hz
    odometry). A reliable and volatile publisher suits every subscriber but a latched one.
    """
    return PublisherEventCallbacks(use_default_callbacks=False)


#: numbers below ~/debug/speculation/
SPECULATION = ('iterations', 'mean_accepted_length', 'tokens_per_second', 'reused_tokens',
               'draft_ms', 'verify_ms', 'confidence')


class Outputs:
    """
    All publishers of plans; created at configure, silent until the node is active.

    Raises ConfigurationError when a package of the message set is not installed.
    """

    def __init__(self, node: LifecycleNode, parameters: NodeParameters,
                 overlay: OverlayPublisher | None = None) -> None:
        self._node = node
        self.parameters = parameters
        self.hold_ups = HoldUps()
        self._overlay = overlay
        self._messages = load_message_set(parameters.output.message_set)
        self._publishers: list[Any] = []
        self._last_trajectory: Any = None  # Autoware's is written into again and again
        self._undrawn: Plan | None = None
        self._path = self._create(Path, '~/output/path')
        self._trajectory = self._create(self._messages.trajectory_type, '~/output/trajectory')
        self._stop = self._create(self._messages.trajectory_type, '~/output/stop_trajectory')
        self._reasoning = self._create(self._messages.text_type, '~/output/reasoning')
        self._stamped = self._create(String, '~/output/reasoning_stamped')
        self._marker = self._create(MarkerArray, '~/debug/marker')
        self._cloud = self._create(PointCloud2, '~/debug/candidates')
        if isinstance(self._messages, AutowareMessages):
            self._candidates = self._create(self._messages.candidates_type,
                                            '~/output/trajectories')
            # below the topic that subscribers of the trajectory know, wherever it is mapped to
            self._published_time = self._create(
                self._messages.published_time_type,
                f'{node.resolve_topic_name("~/output/trajectory")}/debug/published_time')
        names = ['processing_time_ms', 'pipeline_latency_ms', 'cyclic_time_ms',
                 *(f'{stage}/processing_time_ms' for stage in STAGES),
                 *(f'speculation/{name}' for name in SPECULATION)]
        self._numbers = {name: self._create(self._messages.number_type, f'~/debug/{name}')
                         for name in names}

    def publish_plan(self, plan: Plan) -> None:
        """Publish a plan, new or repeated, under its own t0."""
        with self.hold_ups.watch():
            self._publish_plan(plan)

    def publish_stop(self, plan: Plan) -> None:
        """Publish a controlled stop; it shares no topic with plans."""
        self._stop.publish(self._messages.trajectory(plan, self.parameters.output.frame))

    def publish_times(self, result: CycleResult) -> None:
        """Publish the times of a finished cycle that has a new plan."""
        plan = result.plan
        if plan is None:
            return
        self._number('processing_time_ms', result.processing_ms)
        self._number('pipeline_latency_ms', result.pipeline_latency_ms)
        if result.cyclic_ms is not None:
            self._number('cyclic_time_ms', result.cyclic_ms)
        if self.parameters.debug.stage_times:
            for stage in STAGES:
                self._number(f'{stage}/processing_time_ms', getattr(plan.times, f'{stage}_ms'))
        for name, value in speculation_numbers(plan).items():
            self._number(f'speculation/{name}', value)

    def destroy(self) -> None:
        """Take the publishers off the graph, for cleanup."""
        if self._overlay is not None:
            self._overlay.destroy()
        for publisher in self._publishers:
            self._node.destroy_lifecycle_publisher(publisher)

    def _publish_plan(self, plan: Plan) -> None:
        frame, text = self.parameters.output.frame, plan.reasoning.text
        if isinstance(self._messages, AutowareMessages):
            self._publish_autoware(self._messages, plan, frame)
        else:
            self._trajectory.publish(trajectory_bytes(plan, frame))
        self._path.publish(path_bytes(plan, frame))
        self._reasoning.publish(self._messages.text(plan.t0_ns, text))
        self._stamped.publish(String(data=json.dumps({'t0_ns': plan.t0_ns, 'text': text})))
        self._undrawn = plan

    def _publish_autoware(self, messages: AutowareMessages, plan: Plan, frame: str) -> None:
        """Publish Autoware's trajectory and, right behind it, what only Autoware has."""
        self._last_trajectory = messages.trajectory(plan, frame, self._last_trajectory)
        self._trajectory.publish(self._last_trajectory)
        if self._published_time.get_subscription_count() > 0:
            self._published_time.publish(messages.published_time(plan, frame, self._now_ns()))
        self._candidates.publish(messages.candidates(plan, frame))

    def publish_debug(self) -> None:
        """Publish what is for eyes of the plan just published, while somebody looks."""
        plan, self._undrawn = self._undrawn, None
        if plan is None:
            return
        frame, debug = self.parameters.output.frame, self.parameters.debug
        if debug.marker and self._marker.get_subscription_count() > 0:
            self._marker.publish(plan_markers(plan, frame, 1 / self.parameters.planning.rate_hz,
                                              self.parameters.vehicle))
        if self._cloud.get_subscription_count() > 0:
            self._cloud.publish(candidate_cloud(plan, frame))
        if debug.image_overlay and self._overlay is not None:
            self._overlay.offer(plan)

    def _number(self, name: str, value: float) -> None:
        self._numbers[name].publish(self._messages.number(self._now_ns(), value))

    def _now_ns(self) -> int:
        return int(self._node.get_clock().now().nanoseconds)

    def _create(self, kind: type[Any], topic: str) -> Any:
        publisher = self._node.create_lifecycle_publisher(
            kind, topic, output_qos(), event_callbacks=quiet_events(),
            qos_overriding_options=QoSOverridingOptions.with_default_policies())
        self._publishers.append(publisher)
        return publisher


def speculation_numbers(plan: Plan) -> dict[str, float]:
    """
    Return the numbers below ~/debug/speculation/ of a plan.

    A plan whose whole reasoning was reused had no iteration, and so has no accepted length; one
    of a loop that does not tell how sure the target was has no confidence.
    """
    stats = plan.reasoning.stats
    values = {'iterations': stats.iterations, 'mean_accepted_length': stats.accepted_length,
              'tokens_per_second': tokens_per_second(plan), 'reused_tokens': stats.reused,
              'draft_ms': stats.draft_ms, 'verify_ms': stats.verify_ms,
              'confidence': stats.confidence}
    if math.isnan(stats.confidence):  # the device-resident loop does not tell
        del values['confidence']
    if not stats.iterations:
        del values['mean_accepted_length'], values['tokens_per_second']
    return values


def tokens_per_second(plan: Plan) -> float:
    """Return tokens committed by iterations per second of decoding; 0 without any."""
    seconds = plan.times.decode_ms / 1e3
    return sum(plan.reasoning.stats.committed) / seconds if seconds > 0 else 0.0
