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
Publishers of the node: plans, reasoning, markers and times.

`common` needs only the common message packages. `autoware` adds Autoware's own messages, which
are imported here and nowhere else, when that set is asked for.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from nav_msgs.msg import Path
from rclpy.event_handler import PublisherEventCallbacks
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions
from std_msgs.msg import Float64, String
from trajectory_msgs.msg import MultiDOFJointTrajectory
from visualization_msgs.msg import MarkerArray

from rspec_planner.cycle import CycleResult
from rspec_planner.errors import ConfigurationError
from rspec_planner.markers import plan_markers
from rspec_planner.parameters import NodeParameters
from rspec_planner.planner.plan import Plan
from rspec_planner.planner.timing import STAGES
from rspec_planner.ros_conversions import plan_path, plan_trajectory

AUTOWARE_PACKAGES = ('autoware_planning_msgs', 'autoware_internal_planning_msgs',
                     'autoware_internal_debug_msgs')


def check_message_set(message_set: str) -> None:
    """Raise ConfigurationError that names what the message set needs and does not find."""
    if message_set == 'common':
        return
    for package in AUTOWARE_PACKAGES:
        try:
            importlib.import_module(f'{package}.msg')
        except ImportError:
            raise ConfigurationError(
                f"'output.message_set' is 'autoware' but the package '{package}' is not "
                "installed; source an Autoware workspace or set it to 'common'") from None
    raise ConfigurationError(
        "'output.message_set' is 'autoware', which this version cannot publish yet; "
        "set it to 'common'")


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
               'draft_ms', 'verify_ms')


class Outputs:
    """All publishers of plans; created at configure, silent until the node is active."""

    def __init__(self, node: LifecycleNode, parameters: NodeParameters) -> None:
        self._node = node
        self.parameters = parameters
        self._path = self._create(Path, '~/output/path')
        self._trajectory = self._create(MultiDOFJointTrajectory, '~/output/trajectory')
        self._reasoning = self._create(String, '~/output/reasoning')
        self._stamped = self._create(String, '~/output/reasoning_stamped')
        self._marker = self._create(MarkerArray, '~/debug/marker')
        names = ['processing_time_ms', 'pipeline_latency_ms', 'cyclic_time_ms',
                 *(f'{stage}/processing_time_ms' for stage in STAGES),
                 *(f'speculation/{name}' for name in SPECULATION)]
        self._numbers = {name: self._create(Float64, f'~/debug/{name}') for name in names}

    def publish_plan(self, plan: Plan) -> None:
        """Publish a plan, new or repeated, under its own t0."""
        frame = self.parameters.output.frame
        self._path.publish(plan_path(plan, frame))
        self._trajectory.publish(plan_trajectory(plan, frame))
        self._reasoning.publish(String(data=plan.reasoning.text))
        self._stamped.publish(String(data=json.dumps(
            {'t0_ns': plan.t0_ns, 'text': plan.reasoning.text})))
        if self.parameters.debug.marker and self._marker.get_subscription_count() > 0:
            self._marker.publish(plan_markers(plan, frame, 1 / self.parameters.planning.rate_hz,
                                              self.parameters.vehicle))

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
        for publisher in (self._path, self._trajectory, self._reasoning, self._stamped,
                          self._marker, *self._numbers.values()):
            self._node.destroy_lifecycle_publisher(publisher)

    def _number(self, name: str, value: float) -> None:
        self._numbers[name].publish(Float64(data=float(value)))

    def _create(self, kind: type[Any], topic: str) -> Any:
        return self._node.create_lifecycle_publisher(
            kind, topic, output_qos(), event_callbacks=quiet_events(),
            qos_overriding_options=QoSOverridingOptions.with_default_policies())


def speculation_numbers(plan: Plan) -> dict[str, float]:
    """
    Return the numbers below ~/debug/speculation/ of a plan.

    A plan whose whole reasoning was reused had no iteration, and so has no accepted length.
    """
    stats = plan.reasoning.stats
    values = {'iterations': stats.iterations, 'mean_accepted_length': stats.accepted_length,
              'tokens_per_second': tokens_per_second(plan), 'reused_tokens': stats.reused,
              'draft_ms': stats.draft_ms, 'verify_ms': stats.verify_ms}
    if not stats.iterations:
        del values['mean_accepted_length'], values['tokens_per_second']
    return values


def tokens_per_second(plan: Plan) -> float:
    """Return tokens committed by iterations per second of decoding; 0 without any."""
    seconds = plan.times.decode_ms / 1e3
    return sum(plan.reasoning.stats.committed) / seconds if seconds > 0 else 0.0
