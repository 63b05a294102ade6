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
The world of `rspec bench faults`: clock, cameras and odometry to tamper with, and ears.

All stamps come from a clock of its own that is published on /clock. The ego drives along x, so
that a pose says at which time it was true: a plan whose first point does not fit its stamp was
relabelled, whatever else is wrong with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
import math
import threading
import time
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from nav_msgs.msg import Odometry
import numpy as np
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, Image
from trajectory_msgs.msg import MultiDOFJointTrajectory

from rspec_planner.command_line import camera_topic, info_topic, ODOMETRY_TOPIC
from rspec_planner.errors import LONGEST
from rspec_planner.live.bench_processes import scene
from rspec_planner.live.fault_node import CAMERAS
from rspec_planner.model.config import CameraConfig
from rspec_planner.ros_conversions import (
    camera_info_message,
    image_message,
    ns_to_stamp,
    odometry_message,
    stamp_to_ns,
)
from rspec_planner.world.rig import Rig

ROOT = '/planning/rspec_planner'
SPEED_MPS = 8.0
POINTS = 65
FRAMES = 7
_ODOMETRY_TICKS, _FRAME_TICKS = 2, 10  # of 10 ms
_TICK_S = 0.01
_MEMORY_S = 120.0  # diagnostics are kept so long
_ZERO_NS = 1_700_000_000_000_000_000

ImageHook = Callable[[str, Image], list[tuple[str, Any]]]
OdometryHook = Callable[[Odometry], list[Any]]


def place_at(stamp_ns: int) -> float:
    """Return the ego's x at a stamp, metres."""
    return SPEED_MPS * ((stamp_ns - _ZERO_NS) / 1e9)


@dataclass
class Heard:
    """What the node said, with the monotonic time of arrival."""

    plans: list[tuple[float, int]] = field(default_factory=list)  # arrival, stamp
    invalid: list[str] = field(default_factory=list)
    relabelled: list[str] = field(default_factory=list)
    stops: int = 0
    unreadable: int = 0  # diagnostics with control characters or a megabyte
    diagnostics: deque[tuple[float, DiagnosticArray]] = field(default_factory=deque)
    processing: dict[str, tuple[float, float]] = field(default_factory=dict)  # t0 -> arrival, ms


def defect(message: MultiDOFJointTrajectory) -> str:
    """Return why nobody should drive a trajectory, or ''."""
    rows = [(t.translation.x, t.translation.y, t.translation.z, t.rotation.w, v.linear.x,
             v.angular.z, a.linear.x)
            for p in message.points
            for t, v, a in [(p.transforms[0], p.velocities[0], p.accelerations[0])]]
    if len(rows) != POINTS:
        return f'{len(rows)} points'
    values = np.array(rows)
    if not np.isfinite(values).all():
        return 'not finite'
    steps = np.linalg.norm(np.diff(values[:, :3], axis=0), axis=1)
    if steps.max() > 10.0 or np.abs(steps - 0.1 * values[1:, 4]).max() > 1.0:
        return f'jump of {steps.max():.1f} m'
    lateral = np.abs(values[:, 4] * values[:, 5]).max()  # speed times yaw rate
    return f'{lateral:.0f} m/s^2 sideways' if lateral > 9.8 else ''


def readable(status: DiagnosticStatus) -> bool:
    """Tell whether all texts of a status are short lines, whatever a sender put into a field."""
    return all(len(text) <= 4 * LONGEST and text.isprintable()
               for text in (status.message, *(item.value for item in status.values)))


class Feed:
    """Publishes the inputs from a thread; hooks tamper with them."""

    def __init__(self, node: Node, cameras: CameraConfig = CAMERAS) -> None:
        """Make the publishers; frames have the size of `cameras`."""
        self.node, self.heard = node, Heard()
        self.image_hook: ImageHook | None = None
        self.odometry_hook: OdometryHook | None = None
        self.clock_offset_ns, self.clock_runs = 0, True
        self.sent: set[int] = set()  # stamps of anchor frames
        self._frames = [image_message(scene(cameras.width, cameras.height, seed), 0, 'camera')
                        for seed in range(FRAMES)]
        self._publishers: dict[tuple[str, str], Any] = {}
        self._clock = node.create_publisher(Clock, '/clock', 10)
        self._odometry = node.create_publisher(Odometry, ODOMETRY_TOPIC, 50)
        rig = Rig(width=cameras.width, height=cameras.height)
        self.infos = {name: camera_info_message(rig.intrinsics[name], cameras.width,
                                                cameras.height, 0, f'{name}_optical')
                      for name in CAMERAS.names}
        self._now_ns = _ZERO_NS
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name='feed', daemon=True)
        node.create_subscription(MultiDOFJointTrajectory, f'{ROOT}/output/trajectory',
                                 self._on_plan, 50)
        node.create_subscription(MultiDOFJointTrajectory, f'{ROOT}/output/stop_trajectory',
                                 self._on_stop, 50)
        node.create_subscription(DiagnosticArray, '/diagnostics', self._on_diagnostics, 100)

    def start(self) -> None:
        """Begin to publish."""
        for name in CAMERAS.names:
            self.publisher(Image, camera_topic(name))
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(5.0)

    @property
    def now_ns(self) -> int:
        """Return the time on /clock."""
        return self._now_ns + self.clock_offset_ns

    def publisher(self, kind: type[Any], topic: str) -> Any:
        """Return a publisher, made on first use."""
        key = (kind.__name__, topic)
        if key not in self._publishers:
            self._publishers[key] = self.node.create_publisher(kind, topic,
                                                               qos_profile_sensor_data)
        return self._publishers[key]

    def _run(self) -> None:
        start, tick = time.monotonic(), 0
        while not self._stopping.is_set():
            if self.clock_runs:
                self._now_ns += round(_TICK_S * 1e9)
                self._clock.publish(Clock(clock=ns_to_stamp(self.now_ns)))
            self._publish(tick)
            tick += 1
            late = time.monotonic() - (start + tick * _TICK_S)
            if late > 0.5:  # the machine stalled: go on from here, no burst
                start += late
            self._stopping.wait(max(0.0, -late))

    def _publish(self, tick: int) -> None:
        stamp_ns = self.now_ns
        if tick % _ODOMETRY_TICKS == 0:
            pose = np.eye(4)
            pose[0, 3] = place_at(stamp_ns)
            message = odometry_message(stamp_ns, pose, SPEED_MPS)
            hook = self.odometry_hook
            for changed in [message] if hook is None else hook(message):
                self._odometry.publish(changed)
        if tick % _FRAME_TICKS == 0:
            for name in sorted(CAMERAS.names, key=lambda name: name == CAMERAS.anchor):
                self._publish_frame(name, tick // _FRAME_TICKS, stamp_ns)

    def _publish_frame(self, name: str, count: int, stamp_ns: int) -> None:
        base = self._frames[(count + CAMERAS.names.index(name)) % FRAMES]
        message = Image(header=base.header, height=base.height, width=base.width,
                        encoding=base.encoding, step=base.step, data=base.data)
        message.header.stamp = ns_to_stamp(stamp_ns)
        message.header.frame_id = f'{name}_optical'
        hook = self.image_hook
        for target, changed in [(name, message)] if hook is None else hook(name, message):
            if target == CAMERAS.anchor and isinstance(changed, Image):
                self.sent.add(stamp_to_ns(changed.header.stamp))
            topic = camera_topic(target)
            suffix = '' if isinstance(changed, (Image, bytes)) else '/compressed'
            kind = Image if isinstance(changed, (Image, bytes)) else type(changed)
            self.publisher(kind, topic + suffix).publish(changed)
        if count % 5 == 0:
            info = self.infos[name]
            info.header.stamp = ns_to_stamp(stamp_ns)
            self.publisher(CameraInfo, info_topic(name)).publish(info)

    def _on_plan(self, message: MultiDOFJointTrajectory) -> None:
        stamp_ns = stamp_to_ns(message.header.stamp)
        wrong = defect(message)
        if wrong:
            self.heard.invalid.append(wrong)
            return
        apart = abs(message.points[0].transforms[0].translation.x - place_at(stamp_ns))
        if stamp_ns not in self.sent or apart > 0.5:
            self.heard.relabelled.append(f'stamp {stamp_ns}, {apart:.1f} m from its place')
            return
        self.heard.plans.append((time.monotonic(), stamp_ns))

    def _on_stop(self, message: MultiDOFJointTrajectory) -> None:
        self.heard.stops += 1

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        now, kept = time.monotonic(), self.heard.diagnostics
        kept.append((now, message))
        while now - kept[0][0] > _MEMORY_S:
            kept.popleft()
        for status in message.status:
            self.heard.unreadable += not readable(status)
            if status.name.endswith(': latency'):
                values = {item.key: item.value for item in status.values}
                if 'processing_time_ms' in values:
                    self.heard.processing[values['t0_ns']] = (
                        now, float(values['processing_time_ms']))

    def said(self, since_s: float, until_s: float = math.inf) -> dict[str, str]:
        """Return the newest `task.key` values and every message heard between two times."""
        found: dict[str, str] = {}
        for arrived, array in list(self.heard.diagnostics):
            if since_s <= arrived <= until_s:
                for status in array.status:
                    task = status.name.partition(': ')[2]
                    found[f'{task}: {status.message}'] = '!'
                    found.update({f'{task}.{v.key}': v.value for v in status.values})
        return found
