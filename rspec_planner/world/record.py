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
Record a drive through the embedded world as a rosbag2 bag.

Four cameras with their CameraInfo at 10 Hz, odometry and /tf at 100 Hz, /tf_static and the
expert's reasoning. The same arguments give the same bytes. Log times equal stamps, so a bag
holds no transport delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
import heapq
import math
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.bag import BagWriter, message
from rspec_planner.world.messages import (
    make_header,
    MovingEgo,
    odometry_message,
    quaternion_of,
    transform_message,
)
from rspec_planner.world.rig import Rig

ODOMETRY_TOPIC = '/localization/kinematic_state'
REASONING_TOPIC = '/world/ground_truth/coc'
NAVIGATION_TOPIC = '/planning/rspec_planner/input/navigation_text'
ENCODINGS = ('jpeg', 'png', 'raw')
FRAME_NS = 100_000_000
#: a camera may be early or late by less than half a frame, or frames would change order
MAX_OFFSET_MS = 40.0
MAX_SECONDS = 86_400.0


class EgoState(MovingEgo, Protocol):
    """An ego that `at` moves on exactly, `dt` in seconds."""

    def at(self, dt: float) -> EgoState:
        """Return the state `dt` seconds later."""


class Frame(Protocol):
    """One instant of a drive."""

    images: Any
    ego: Any
    family: str
    reasoning: str
    navigation_text: str


class Drive(Protocol):
    """A drive that goes on by 0.1 s per step."""

    def frame(self) -> Any:
        """Return the present instant."""

    def step(self) -> None:
        """Go on by 0.1 s."""


@dataclass(frozen=True)
class RecordOptions:
    """
    How a drive becomes messages.

    Raises ConfigurationError naming the field that is out of range.
    """

    encoding: str = 'jpeg'  # 'jpeg', 'png' (CompressedImage) or 'raw' (Image, rgb8)
    odometry_hz: float = 100.0
    phase_ms: Mapping[str, float] = field(default_factory=dict)  # camera -> constant lateness
    jitter_ms: float = 0.0  # standard deviation of image stamps, cut off at three of them
    drop: float = 0.0  # share of camera frames that are lost, 0 .. 1
    clock: bool = False  # also record /clock
    reasoning: bool = True  # also record the expert's reasoning
    start_ns: int = 1_767_225_600_000_000_000  # stamp of the first frame
    seed: int = 0  # of jitter and drops
    jpeg_quality: int = 90

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ConfigurationError(f"encoding '{self.encoding}' is unknown; use one of "
                                     f'{", ".join(ENCODINGS)}')
        if not 10.0 <= self.odometry_hz <= 1000.0:
            raise ConfigurationError(f'odometry rate {self.odometry_hz:g} Hz is out of range; '
                                     'use 10 to 1000')
        if not 0.0 <= self.drop < 1.0:
            raise ConfigurationError(f'drop {self.drop:g} is not a share; use 0 to below 1')
        for phase in (0.0, *self.phase_ms.values()):
            latest = abs(phase) + 3 * self.jitter_ms
            if not (self.jitter_ms >= 0.0 and latest <= MAX_OFFSET_MS):  # also refuses nan
                raise ConfigurationError(
                    f'phase plus three times jitter reaches {latest:g} ms; stay within '
                    f'0 to {MAX_OFFSET_MS:g} ms')


@dataclass(frozen=True)
class Recording:
    """What was written."""

    bag: Path
    messages: int
    scenarios: tuple[str, ...]  # families in order of appearance, without repeats


def image_topic(camera: str) -> str:
    """Return the topic of a camera's raw images; compressed ones add `/compressed`."""
    return f'/sensing/camera/{camera}/image_raw'


def camera_frame(camera: str) -> str:
    """Return the frame_id of a camera's optical frame."""
    return f'{camera}_optical'


def frame_count(seconds: float) -> int:
    """Return how many frames a drive has; raises ConfigurationError for an impossible length."""
    if not 0.1 <= seconds <= MAX_SECONDS:
        raise ConfigurationError(f'seconds {seconds:g} is out of range; use 0.1 to '
                                 f'{MAX_SECONDS:g}')
    return round(seconds * 10.0)


def record_world(path: Path, drive: Drive, seconds: float, options: RecordOptions, *,
                 rig: Rig | None = None, storage: str = '', overwrite: bool = False,
                 progress: Callable[[], object] | None = None) -> Recording:
    """
    Drive for `seconds` and write everything that the sensors saw.

    `progress` is called once per frame. Raises InputError when the bag cannot be written.
    """
    frames = frame_count(seconds)
    scene = _Messages(rig or Rig(), options)
    families: list[str] = []
    with BagWriter(path, storage=storage, overwrite=overwrite) as bag:
        for topic, kind in scene.topics().items():
            bag.add_topic(topic, kind, latched=topic == '/tf_static')
        bag.write('/tf_static', options.start_ns, scene.mounting())
        waiting: list[tuple[int, int, str, Any]] = []  # heap by log time, then by arrival
        count = 0
        for index in range(frames):
            frame = drive.frame()
            if frame.family and frame.family not in families:
                families.append(frame.family)
            begin_ns = options.start_ns + index * FRAME_NS
            for stamp_ns, topic, content in scene.frame(frame, begin_ns, index == frames - 1):
                heapq.heappush(waiting, (max(stamp_ns, options.start_ns), count, topic, content))
                count += 1
            # nothing that is still to come can be earlier than this
            _flush(bag, waiting, begin_ns + FRAME_NS - round(MAX_OFFSET_MS * 1e6))
            drive.step()
            if progress is not None:
                progress()
        _flush(bag, waiting, None)
    return Recording(path, bag.messages, tuple(families))


def _flush(bag: BagWriter, waiting: list[tuple[int, int, str, Any]],
           before_ns: int | None) -> None:
    """Write the messages of the heap that are older than a time (None: all)."""
    while waiting and (before_ns is None or waiting[0][0] < before_ns):
        stamp_ns, _, topic, content = heapq.heappop(waiting)
        bag.write(topic, stamp_ns, content)


class _Messages:
    """Builds the messages of one frame; holds the random state of jitter and drops."""

    def __init__(self, rig: Rig, options: RecordOptions) -> None:
        self._rig = rig
        self._options = options
        self._random = np.random.default_rng(options.seed)
        self._suffix = '' if options.encoding == 'raw' else '/compressed'

    def topics(self) -> dict[str, str]:
        """Return topic -> type of everything that `frame` yields, and /tf_static."""
        kind = 'sensor_msgs/Image' if self._options.encoding == 'raw' else \
            'sensor_msgs/CompressedImage'
        topics = {'/tf_static': 'tf2_msgs/TFMessage', '/tf': 'tf2_msgs/TFMessage',
                  ODOMETRY_TOPIC: 'nav_msgs/Odometry', NAVIGATION_TOPIC: 'std_msgs/String'}
        for camera in self._rig.names:
            topics[image_topic(camera) + self._suffix] = kind
            topics[_info_topic(camera)] = 'sensor_msgs/CameraInfo'
        if self._options.reasoning:
            topics[REASONING_TOPIC] = 'std_msgs/String'
        if self._options.clock:
            topics['/clock'] = 'rosgraph_msgs/Clock'
        return topics

    def mounting(self) -> Any:
        """Return /tf_static: base_link to each camera."""
        header = make_header(self._options.start_ns, 'base_link')
        return message('tf2_msgs/TFMessage', transforms=[
            transform_message(header, camera_frame(camera), pose[:3, 3],
                              quaternion_of(pose[:3, :3]))
            for camera, pose in self._rig.extrinsics.items()])

    def frame(self, frame: Frame, begin_ns: int,
              last: bool) -> Iterator[tuple[int, str, Any]]:
        """Yield (log time, topic, message) from this frame up to the next one."""
        # before the cameras, so that a plan for this instant knows it
        yield begin_ns, NAVIGATION_TOPIC, message('std_msgs/String', data=frame.navigation_text)
        yield from self._odometry(frame.ego, begin_ns, last)
        if self._options.reasoning and frame.reasoning:  # silent on free road
            yield begin_ns, REASONING_TOPIC, message('std_msgs/String', data=frame.reasoning)
        for camera, image in zip(self._rig.names, frame.images):
            late_ms = self._options.phase_ms.get(camera, 0.0) + self._jitter_ms()
            stamp_ns = begin_ns + round(late_ms * 1e6)
            if self._random.random() < self._options.drop:
                continue
            header = make_header(stamp_ns, camera_frame(camera))
            yield stamp_ns, image_topic(camera) + self._suffix, self._image(header, image)
            yield stamp_ns, _info_topic(camera), self._info(header, camera)

    def _jitter_ms(self) -> float:
        limit = 3.0 * self._options.jitter_ms
        return float(np.clip(self._random.normal() * self._options.jitter_ms, -limit, limit))

    def _odometry(self, ego: EgoState, begin_ns: int,
                  last: bool) -> Iterator[tuple[int, str, Any]]:
        """Yield odometry, /tf and /clock on a fixed grid that starts with the recording."""
        period_ns = round(1e9 / self._options.odometry_hz)
        since_ns = begin_ns - self._options.start_ns
        stamp_ns = begin_ns + (-since_ns) % period_ns
        while stamp_ns < begin_ns + FRAME_NS and (not last or stamp_ns == begin_ns):
            state = ego.at((stamp_ns - begin_ns) * 1e-9)
            header = make_header(stamp_ns, 'map')
            turn = (0.0, 0.0, math.sin(state.yaw / 2.0), math.cos(state.yaw / 2.0))
            if self._options.clock:
                yield stamp_ns, '/clock', message('rosgraph_msgs/Clock', clock=header.stamp)
            yield stamp_ns, ODOMETRY_TOPIC, odometry_message(header, state, turn)
            yield stamp_ns, '/tf', message('tf2_msgs/TFMessage', transforms=[
                transform_message(header, 'base_link', (state.x, state.y, 0.0), turn)])
            stamp_ns += period_ns

    def _image(self, header: Any, image: np.ndarray) -> Any:
        """Return an Image or CompressedImage of an RGB picture (H, W, 3) uint8."""
        height, width = image.shape[:2]
        if self._options.encoding == 'raw':
            return message('sensor_msgs/Image', header=header, height=height, width=width,
                           encoding='rgb8', is_bigendian=0, step=3 * width,
                           data=np.ascontiguousarray(image).reshape(-1))
        jpeg = self._options.encoding == 'jpeg'
        settings = [cv2.IMWRITE_JPEG_QUALITY, self._options.jpeg_quality] if jpeg else \
            [cv2.IMWRITE_PNG_COMPRESSION, 1]
        _, data = cv2.imencode('.jpg' if jpeg else '.png',
                               cv2.cvtColor(image, cv2.COLOR_RGB2BGR), settings)
        return message('sensor_msgs/CompressedImage', header=header,
                       format=f'rgb8; {self._options.encoding} compressed bgr8', data=data)

    def _info(self, header: Any, camera: str) -> Any:
        """Return the pinhole CameraInfo of a camera."""
        k = self._rig.intrinsics[camera]
        whole = message('sensor_msgs/RegionOfInterest', x_offset=0, y_offset=0, height=0,
                        width=0, do_rectify=False)
        return message('sensor_msgs/CameraInfo', header=header, height=self._rig.height,
                       width=self._rig.width, distortion_model='plumb_bob', d=np.zeros(5),
                       k=k.reshape(-1), r=np.eye(3).reshape(-1),
                       p=np.hstack([k, np.zeros((3, 1))]).reshape(-1), binning_x=0,
                       binning_y=0, roi=whole)


def _info_topic(camera: str) -> str:
    return f'/sensing/camera/{camera}/camera_info'
