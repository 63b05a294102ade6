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
"""What the tests of the node share: a fake planner, made-up inputs, and a node in process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
import os
import threading
import time
from typing import Any

import numpy as np

from rspec_planner.decode.state import DecodeStats
from rspec_planner.live.processes import free_domain_id
from rspec_planner.model.config import CameraConfig, ProfileConfig, tiny, TokenIds
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plan import Plan, PLAN_POINTS, Reasoning, StageTimes, Verdict
from rspec_planner.transport import apply_fastdds_environment

TEXT = 'cruising straight, keep the lane because the road ahead is free'
CAMERAS = CameraConfig(height=32, width=64)
T0 = 1_700_000_000_123_456_789
_IDS = {name: i for i, name in enumerate(TokenIds.__dataclass_fields__)}


def fake_profile() -> ProfileConfig:
    return replace(tiny(TokenIds(**_IDS), 100), cameras=CAMERAS)


def fake_plan(observation: Observation, *, accepted: bool = True, samples: int = 2) -> Plan:
    """Return a straight plan at the observed speed; the last candidate is the chosen one."""
    times = np.arange(PLAN_POINTS) * 0.1
    poses = np.zeros((PLAN_POINTS, 4))
    poses[:, 0] = observation.speed_mps * times
    candidates = np.stack([poses + [0.0, 0.1 * (samples - 1 - k), 0.0, 0.0]
                           for k in range(samples)])
    speeds = np.full(PLAN_POINTS, observation.speed_mps)
    return Plan(
        t0_ns=observation.t0_ns, poses=poses, speeds=speeds, accelerations=np.zeros(PLAN_POINTS),
        curvatures=np.full(PLAN_POINTS, 0.01), candidates=candidates,
        candidate_speeds=np.stack([speeds] * samples), ego_pose_at_t0=observation.ego_pose_at_t0,
        odometry_frame=observation.odometry_frame,
        reasoning=Reasoning((1, 2, 3), TEXT, True, DecodeStats(2, (1, 1), log_probability=-0.125)),
        times=StageTimes(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
        verdict=Verdict(True) if accepted else Verdict(False, 'start_jump', '9.0 m, limit 2.0 m'),
        ages_ms=dict(observation.ages_ms))


def turned(yaw: float, x: float = 100.0, y: float = -20.0, z: float = 1.0) -> Any:
    """Return a pose (4, 4) in the map."""
    from rspec_planner.ros_conversions import local_matrices
    return local_matrices(np.array([[x, y, z, yaw]]))[0]


def plan_at(pose: Any, speed: float = 4.0) -> Plan:
    """Return the fake plan at T0 for an ego at `pose` (4, 4)."""
    stamps = np.zeros((4, 4), np.int64)
    return fake_plan(Observation(T0, ('a',) * 4, np.zeros((4, 4, 2, 2, 3), np.uint8), stamps,
                                 np.tile(np.eye(4), (16, 1, 1)), pose, 'map', speed))


class FakePlanner:
    """Stands in for the model; `before` runs inside plan() and may block or raise."""

    def __init__(self) -> None:
        self.profile = fake_profile()
        self.tokenizer = None
        self.precision = 'float32'
        self.executors = {'backend': 'torch'}
        self.observations: list[Observation] = []
        self.resets = 0
        self.accept = True
        self.before: Callable[[Observation], None] = lambda observation: None
        self.threads: set[str] = set()

    def plan(self, observation: Observation) -> Plan:
        self.threads.add(threading.current_thread().name)
        self.before(observation)
        self.observations.append(observation)
        return fake_plan(observation, accepted=self.accept)

    def reset(self) -> None:
        self.resets += 1


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> Any:
    """Wait for a condition that another thread makes true; fail with its name."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f'{what} did not happen within {timeout_s} s'
        time.sleep(0.005)
    return value


def private_domain() -> None:
    """Keep this test process apart from every other ROS process of the machine."""
    os.environ['ROS_DOMAIN_ID'] = str(free_domain_id())
    os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
    apply_fastdds_environment()


class NodeRig:
    """A node with a fake planner, a peer that feeds and listens, one spinning thread."""

    def __init__(self, arguments: Sequence[str] = (), load: Callable[..., Any] | None = None,
                 reliable_inputs: bool = False, latched_inputs: bool = False) -> None:
        import rclpy
        from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

        from rspec_planner.command_line import ros_arguments
        from rspec_planner.node import RspecPlanner
        from rspec_planner.process import event_executor
        self.planner = FakePlanner()
        full = ros_arguments(list(arguments))
        self.node = RspecPlanner(load or (lambda parameters: self.planner), arguments=full,
                                 cli_args=full, use_global_arguments=False)
        self.peer = rclpy.create_node('peer', use_global_arguments=False)
        self.input_qos = QoSProfile(
            depth=200,
            reliability=ReliabilityPolicy.RELIABLE if reliable_inputs
            else ReliabilityPolicy.BEST_EFFORT,
            durability=DurabilityPolicy.TRANSIENT_LOCAL if latched_inputs
            else DurabilityPolicy.VOLATILE)
        self.executor = event_executor()
        self.executor.add_node(self.node)
        self.executor.add_node(self.peer)
        self._odometry_sent = 0
        self.received: dict[str, list[Any]] = {}
        self._publishers: dict[tuple[str, str], Any] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._spin, daemon=True)

    def start(self) -> None:
        self.listen()
        assert self.node.start()
        self._thread.start()

    def _spin(self) -> None:
        while not self._stopping:
            self.executor.spin_once(timeout_sec=0.05)

    def close(self) -> None:
        self._stopping = True
        if self._thread.ident is not None:
            self._thread.join(10)
        self.executor.shutdown()
        self.node.close()
        self.peer.destroy_node()

    def listen(self) -> None:
        from diagnostic_msgs.msg import DiagnosticArray
        from nav_msgs.msg import Path
        from std_msgs.msg import String
        from trajectory_msgs.msg import MultiDOFJointTrajectory
        from visualization_msgs.msg import MarkerArray
        root = '/planning/rspec_planner'
        for topic, kind in ((f'{root}/output/path', Path), ('/diagnostics', DiagnosticArray),
                            (f'{root}/output/trajectory', MultiDOFJointTrajectory),
                            (f'{root}/output/reasoning', String),
                            (f'{root}/output/reasoning_stamped', String),
                            (f'{root}/debug/marker', MarkerArray)):
            self.subscribe(kind, topic)

    def subscribe(self, kind: type[Any], topic: str) -> list[Any]:
        messages = self.received.setdefault(topic.rsplit('/', 1)[-1], [])
        self.peer.create_subscription(kind, topic, messages.append, 100)
        return messages

    def publisher(self, kind: type[Any], topic: str) -> Any:
        key = (kind.__name__, topic)
        if key not in self._publishers:
            publisher = self.peer.create_publisher(kind, topic, self.input_qos)
            self._publishers[key] = publisher
            wait_until(lambda: publisher.get_subscription_count() > 0 and self._matched(topic),
                       f'match on {topic}')
        return self._publishers[key]

    def _matched(self, topic: str) -> bool:
        """Return whether the node's side knows the publisher too; before, messages are lost."""
        mine = [subscription for subscription in self.node._made.inputs._subscriptions
                if subscription.topic_name == topic]
        return all(subscription.get_publisher_count() > 0 for subscription in mine)

    def settle(self) -> None:
        """Wait until the node has handled every odometry message sent so far."""
        wait_until(lambda: self.node._watch.states()[-1].received >= self._odometry_sent,
                   f'the odometry ({self._odometry_sent} messages)')

    def image(self, name: str, stamp_ns: int, encoding: str = 'rgb8') -> None:
        from sensor_msgs.msg import Image

        from rspec_planner.ros_conversions import image_message
        pixels = np.full((CAMERAS.height, CAMERAS.width, 3), 90, np.uint8)
        message = image_message(pixels, stamp_ns, name)
        message.encoding = encoding
        self.publisher(Image, f'/sensing/camera/{name}/image_raw').publish(message)

    def odometry(self, stamp_ns: int, speed: float = 5.0, **changes: Any) -> None:
        from nav_msgs.msg import Odometry

        from rspec_planner.ros_conversions import odometry_message
        pose = np.eye(4)
        pose[0, 3] = speed * (stamp_ns % 10**15) / 1e9
        message = odometry_message(stamp_ns, pose, speed)
        for name, value in changes.items():
            if name == 'x':
                message.pose.pose.position.x = value
            elif name == 'orientation':
                message.pose.pose.orientation = value
            else:
                setattr(message, name, value)
        self.publisher(Odometry, '/localization/kinematic_state').publish(message)
        self._odometry_sent += 1

    def drive(self, t0_ns: int, *, cameras: Sequence[str] = CAMERAS.names,
              encoding: str = 'rgb8', odometry: bool = True, frames: int = 4) -> int:
        """Publish everything that a plan at t0 needs, the anchor's newest frame last."""
        self._await_listeners()
        if odometry:
            for step in range(34, -1, -1):
                self.odometry(t0_ns - step * 50_000_000)
            self.settle()
        for step in range(frames - 1, -1, -1):
            for name in sorted(cameras, key=lambda name: name == CAMERAS.anchor):
                self.image(name, t0_ns - step * 100_000_000, encoding)
        return t0_ns

    def _await_listeners(self) -> None:
        """Wait until the node knows who listens to its plans; before, they go to nobody."""
        if self.node._made is None:
            return
        outputs = self.node._made.outputs
        heard = {subscription.topic_name for subscription in self.peer.subscriptions}
        publishers = [publisher for publisher in (
            outputs._path, outputs._trajectory, outputs._reasoning, outputs._stamped,
            outputs._marker) if publisher is not None and publisher.topic_name in heard]
        wait_until(lambda: all(publisher.get_subscription_count() > 0 for publisher in
                               publishers), 'match of the outputs')

    def forget_sent(self) -> None:
        """Count only odometry that is sent from now on."""
        self._odometry_sent = self.node._watch.states()[-1].received

    def forget_publishers(self) -> None:
        """Take the inputs off the graph, so that the next drive waits for new matches."""
        for publisher in self._publishers.values():
            self.peer.destroy_publisher(publisher)
        self._publishers.clear()
        self._odometry_sent = 0

    def path_at(self, t0_ns: int, timeout_s: float = 10.0) -> Any:
        """Wait for the path stamped t0."""
        from rspec_planner.ros_conversions import stamp_to_ns
        return wait_until(lambda: next(
            (path for path in list(self.received['path'])
             if stamp_to_ns(path.header.stamp) == t0_ns), None), f'plan at {t0_ns}', timeout_s)

    def status(self, task: str, holds: Callable[[Any], bool], what: str) -> Any:
        """Wait for a diagnostic status of a task that fulfils a condition."""
        name = f'rspec_planner: {task}'
        return wait_until(lambda: next(
            (status for array in reversed(list(self.received['diagnostics']))
             for status in array.status if status.name == name and holds(status)), None), what)


def values_of(status: Any) -> dict[str, str]:
    """Return the key values of a diagnostic status."""
    return {item.key: item.value for item in status.values}


#: tests stamp their inputs some seconds ago, so that several drives fit into one test; the
#: frames of one instant come further apart on a loaded machine than the shipped wait allows;
#: and their pictures are all the same
PATIENT = ('sync.max_input_age_ms:=10000.0', 'deadline.max_pipeline_latency_ms:=10000.0',
           'sync.image_wait_ms:=200.0', 'cameras.content_check:=ignore')


@contextmanager
def running(*arguments: str, **options: Any) -> Iterator[NodeRig]:
    """Run a configured and active node around a test."""
    parameters = [part for argument in (*PATIENT, *arguments)
                  for part in (('-p', argument) if not argument.startswith('-') else (argument,))]
    rig = NodeRig(['--ros-args', *parameters], **options)
    try:
        rig.start()
        yield rig
    finally:
        rig.close()
