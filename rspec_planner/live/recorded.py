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
Read a recorded drive back: the plans with the frames they were made from, and the figures.

ROS-free. Everything is joined by t0; only the stage times, whose messages carry no stamp, are
joined by their arrival next to the plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
import json
from pathlib import Path
from typing import Any

import numpy as np

from rspec_planner.decode.stats import DecodeStats
from rspec_planner.errors import InputError
from rspec_planner.planner.images import decode_compressed, decode_image
from rspec_planner.planner.plan import Plan, Reasoning, StageTimes, Verdict
from rspec_planner.planner.timing import STAGES
from rspec_planner.world.bag import BagReader

NAMESPACE = '/planning/rspec_planner'
MARKER_TOPIC = f'{NAMESPACE}/debug/marker'
TRUTH_TOPIC = '/world/ground_truth/coc_stamped'


@dataclass
class RecordedDrive:
    """What a recorder heard of one drive, images excepted."""

    bag: Path
    trajectories: dict[int, Any] = field(default_factory=dict)  # t0_ns -> message
    texts: dict[int, str] = field(default_factory=dict)  # t0_ns -> reasoning
    arrivals: dict[int, int] = field(default_factory=dict)  # t0_ns -> log time of the reasoning
    numbers: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # below debug/
    markers: dict[int, list[Any]] = field(default_factory=dict)  # t0_ns -> markers for RViz
    truth: dict[int, dict[str, str]] = field(default_factory=dict)  # stamp -> text, family
    diagnostics: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)

    @property
    def stamps(self) -> list[int]:
        """Return the t0 of every complete plan, in order."""
        return sorted(self.trajectories.keys() & self.texts.keys())

    def samples(self, name: str) -> list[float]:
        """Return the values of one debug number, for example 'processing_time_ms'."""
        return [value for _, value in self.numbers.get(name, [])]

    def status_values(self, task: str) -> Mapping[str, str]:
        """Return the last diagnostic values of a task."""
        return self.diagnostics.get(task, ('', {}))[1]

    def plan(self, t0_ns: int) -> Plan:
        """Return a recorded plan in the ego frame at its t0."""
        poses, matrix = _ego_poses(self.trajectories[t0_ns])
        points = self.trajectories[t0_ns].points
        speeds = np.array([p.velocities[0].linear.x for p in points])
        rates = np.array([p.velocities[0].angular.z for p in points])
        accelerations = np.array([p.accelerations[0].linear.x for p in points])
        iterations = round(self._near('speculation/iterations', t0_ns))
        length = self._near('speculation/mean_accepted_length', t0_ns)
        # only the mean is published, so the iterations are told as equal ones
        committed = _split_evenly(round(iterations * length), iterations) if iterations else ()
        stats = DecodeStats(iterations, committed,
                            reused=round(self._near('speculation/reused_tokens', t0_ns)))
        times = {f'{s}_ms': self._near(f'{s}/processing_time_ms', t0_ns) for s in STAGES}
        return Plan(t0_ns, poses, speeds, accelerations, rates / np.maximum(speeds, 1e-3),
                    poses[None], speeds[None], matrix,
                    self.trajectories[t0_ns].header.frame_id,
                    Reasoning((), self.texts[t0_ns], True, stats),
                    StageTimes(**times), Verdict(True))

    def _near(self, name: str, t0_ns: int) -> float:
        """Return the number that arrived closest to the reasoning of a plan, else 0."""
        series = self.numbers.get(name, [])
        if not series:
            return 0.0
        at = self.arrivals[t0_ns]
        i = bisect_left(series, (at, -np.inf))
        return min(series[max(0, i - 1):i + 1], key=lambda item: abs(item[0] - at))[1]


def read_drive(bag: Path) -> RecordedDrive:
    """Read everything but the images; raises InputError when no plan was recorded."""
    drive = RecordedDrive(bag)
    with BagReader(bag) as reader:
        topics = tuple(t for t in reader.topics if t.startswith(f'{NAMESPACE}/debug/')
                       and reader.topics[t] == 'std_msgs/msg/Float64')
        for item in reader.read((*topics, f'{NAMESPACE}/output/trajectory',
                                 f'{NAMESPACE}/output/reasoning_stamped', MARKER_TOPIC,
                                 '/diagnostics', TRUTH_TOPIC)):
            _take(drive, item.topic, item.log_ns, item.content)
    if not drive.stamps:
        raise InputError(f'bag {bag} holds no plan below {NAMESPACE}/output; record it while '
                         'the node is active')
    return drive


def frames_at(bag: Path, cameras: Sequence[str],
              stamps: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
    """
    Yield (stamp, images (C, H, W, 3) uint8 RGB) for stamps of which every camera has a frame.

    Frames are decoded only when their stamp is asked for.
    """
    wanted = set(stamps)
    waiting: dict[int, dict[str, np.ndarray]] = {}
    with BagReader(bag) as reader:
        owners = {topic: camera for topic in reader.topics for camera in cameras
                  if topic.startswith(f'/sensing/camera/{camera}/image_raw')}
        for item in reader.read(tuple(owners)):
            stamp = item.content.header.stamp
            stamp_ns = int(stamp.sec) * 10**9 + int(stamp.nanosec)
            if stamp_ns not in wanted:
                continue
            found = waiting.setdefault(stamp_ns, {})
            found[owners[item.topic]] = _pixels(item.content)
            if len(found) == len(cameras):
                yield stamp_ns, np.stack([found[camera] for camera in cameras])
                del waiting[stamp_ns]


def _take(drive: RecordedDrive, topic: str, log_ns: int, content: Any) -> None:
    """File one message under its topic."""
    if topic.endswith('/output/trajectory'):
        stamp = content.header.stamp
        drive.trajectories[int(stamp.sec) * 10**9 + int(stamp.nanosec)] = content
    elif topic.endswith('/output/reasoning_stamped'):
        data = json.loads(content.data)
        drive.texts[int(data['t0_ns'])] = str(data['text'])
        drive.arrivals[int(data['t0_ns'])] = log_ns
    elif topic == MARKER_TOPIC:
        stamp = content.markers[0].header.stamp
        drive.markers[int(stamp.sec) * 10**9 + int(stamp.nanosec)] = list(content.markers)
    elif topic == TRUTH_TOPIC:
        data = json.loads(content.data)
        drive.truth[int(data['t0_ns'])] = data
    elif topic == '/diagnostics':
        for status in content.status:
            owner, _, task = status.name.partition(': ')
            if owner == 'rspec_planner':
                drive.diagnostics[task] = (status.message,
                                           {v.key: v.value for v in status.values})
    else:
        name = topic.removeprefix(f'{NAMESPACE}/debug/')
        drive.numbers.setdefault(name, []).append((log_ns, float(content.data)))


def _ego_poses(trajectory: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, 4) x, y, z, yaw seen from point 0, and point 0 as a (4, 4) matrix."""
    transforms = [point.transforms[0] for point in trajectory.points]
    position = np.array([[t.translation.x, t.translation.y, t.translation.z]
                         for t in transforms])
    q = np.array([[t.rotation.x, t.rotation.y, t.rotation.z, t.rotation.w] for t in transforms])
    yaw = np.arctan2(2 * (q[:, 3] * q[:, 2] + q[:, 0] * q[:, 1]),
                     1 - 2 * (q[:, 1] ** 2 + q[:, 2] ** 2))
    cosine, sine = np.cos(yaw[0]), np.sin(yaw[0])
    turn = np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = turn, position[0]
    heading = (yaw - yaw[0] + np.pi) % (2 * np.pi) - np.pi
    return np.column_stack([(position - position[0]) @ turn, heading]), matrix


def _split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Return `parts` integers that add up to `total` and differ by at most one."""
    low, more = divmod(total, parts)
    return tuple(low + 1 if i < more else low for i in range(parts))


def _pixels(content: Any) -> np.ndarray:
    """Return RGB pixels of an Image or CompressedImage."""
    if hasattr(content, 'encoding'):
        return decode_image(content.encoding, content.height, content.width, content.step,
                            content.data)
    return decode_compressed(content.data)
