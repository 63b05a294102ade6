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
Drive the embedded world in real time and publish what its sensors see on real ROS topics.

A thread renders one frame set ahead; the main thread publishes on an absolute schedule, so that
rendering never shifts a stamp: images and camera_info at 10 Hz, odometry at 100 Hz. A stamp is
the wall clock at which the world stood like this. Frames are published after the odometry of
their instant, and the anchor camera last, because it makes the planner plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
import json
from pathlib import Path
import queue
import sys
import threading
import time
from typing import Any

import cv2
from nav_msgs.msg import Odometry
import numpy as np
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import String

from rspec_planner.errors import ConfigurationError, RspecError
from rspec_planner.live.session import ros_node, stop_on_signals
from rspec_planner.ros_conversions import (
    BASE_FRAME,
    camera_info_message,
    compressed_image_message,
    image_message,
    local_matrices,
    ns_to_stamp,
    odometry_message,
    transform_message,
)
from rspec_planner.world.rig import Rig

ANCHOR = 'front_wide'
NAVIGATION_TOPIC = '/planning/rspec_planner/input/navigation_text'
FRAME_NS = 100_000_000
ODOMETRY_PER_FRAME = 10  # 100 Hz
MAP_FRAME = 'map'
JPEG_QUALITY = 95
SLIP_S = 0.25  # a machine this far behind gets a later schedule instead of ever older stamps
ENCODINGS = ('jpeg', 'rgb8')
QUEUE_FRAMES = 3
SETTLE_S = 0.3  # a reader may match a little later than its writer

BEST_EFFORT = QoSProfile(depth=10, reliability=ReliabilityPolicy.BEST_EFFORT)
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


@dataclass
class Punctuality:
    """How well the schedule was kept; lateness is counted at the images, milliseconds."""

    late_ms: list[float] = field(default_factory=list)
    slips: int = 0  # times the schedule had to be moved
    odometry: int = 0

    def summary(self) -> dict[str, Any]:
        """Return counts and percentiles, ready for JSON."""
        late = np.array(self.late_ms or [0.0])
        return {'frames': len(self.late_ms), 'odometry': self.odometry, 'slips': self.slips,
                'late_ms': {f'p{q}': round(float(np.percentile(late, q)), 2)
                            for q in (50, 95, 100)}}


def optical_frame(name: str) -> str:
    """Return the frame id of a camera: z forward, x right."""
    return f'{name}_optical'


def ego_matrix(ego: Any) -> np.ndarray:
    """Return the (4, 4) pose of an ego state (x, y, yaw) in the map."""
    return np.asarray(local_matrices(np.array([[ego.x, ego.y, 0.0, ego.yaw]]))[0])


class FrameSource(threading.Thread):
    """Render and encode frame sets ahead of their time; `take` hands them out in order."""

    def __init__(self, drive: Any, names: Sequence[str], encoding: str) -> None:
        super().__init__(name='world-render', daemon=True)
        self._drive, self._names, self._encoding = drive, names, encoding
        self._queue: queue.Queue[tuple[Any, list[Any]] | BaseException] = queue.Queue(QUEUE_FRAMES)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Step the drive until `stop`; an error travels through the queue to the publisher."""
        try:
            while not self._stopped.is_set():
                frame = self._drive.frame()
                self._put((frame, [self._encode(name, image) for name, image
                                   in zip(self._names, frame.images)]))
                self._drive.step()
        except Exception as error:  # noqa: B902 - reraised by take()
            self._put(error)

    def take(self) -> tuple[Any, list[Any]]:
        """Return the next frame and its four image messages, without stamps."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """Ask the thread to end; it ends before its next frame."""
        self._stopped.set()

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue

    def _encode(self, name: str, image: np.ndarray) -> Any:
        if self._encoding == 'jpeg':
            return compressed_image_message(image, 0, optical_frame(name), quality=JPEG_QUALITY)
        return image_message(image, 0, optical_frame(name))


class WorldPublisher:
    """The sensors of the ego: four cameras, odometry, transforms, and the expert's reasoning."""

    def __init__(self, node: Node, rig: Rig, encoding: str, stopped: threading.Event) -> None:
        if encoding not in ENCODINGS:
            raise ConfigurationError(f"encoding '{encoding}' is unknown; use one of "
                                     f'{", ".join(ENCODINGS)}')
        self.rig = rig
        self._node, self._stopped = node, stopped
        self.punctuality = Punctuality()
        kind: Any = CompressedImage if encoding == 'jpeg' else Image
        suffix = 'image_raw/compressed' if encoding == 'jpeg' else 'image_raw'
        self._images = {name: node.create_publisher(
            kind, f'/sensing/camera/{name}/{suffix}', BEST_EFFORT) for name in rig.names}
        self._infos = {name: node.create_publisher(
            CameraInfo, f'/sensing/camera/{name}/camera_info', BEST_EFFORT) for name in rig.names}
        self._odometry = node.create_publisher(Odometry, '/localization/kinematic_state', 50)
        self._coc = node.create_publisher(String, '/world/ground_truth/coc', 10)
        self._coc_stamped = node.create_publisher(String, '/world/ground_truth/coc_stamped', 10)
        self._command = node.create_publisher(String, NAVIGATION_TOPIC, LATCHED)
        self._commanded = ''
        self._tf = self._transforms()

    def subscribers(self) -> int:
        """Return the smallest number of subscriptions over the camera topics."""
        return min(p.get_subscription_count() for p in self._images.values())

    def drive(self, source: FrameSource, seconds: float) -> None:
        """Publish until `seconds` of world time have passed (0: until stopped)."""
        first = source.take()
        start_ns = self._node.get_clock().now().nanoseconds
        start = time.monotonic()
        frames = round(seconds * 1e9 / FRAME_NS) if seconds > 0 else None
        index = 0
        while not self._stopped.is_set() and (frames is None or index < frames):
            frame, images = first if index == 0 else source.take()
            behind = time.monotonic() - start - index * FRAME_NS / 1e9
            if behind > SLIP_S:
                start, start_ns = start + behind, start_ns + int(behind * 1e9)
                self.punctuality.slips += 1
            self._frame_period(frame, images, start, start_ns, index)
            index += 1

    def _frame_period(self, frame: Any, images: list[Any], start: float, start_ns: int,
                      index: int) -> None:
        """Publish one frame set at its instant and the odometry until the next one."""
        for sub in range(ODOMETRY_PER_FRAME):
            offset_ns = index * FRAME_NS + sub * FRAME_NS // ODOMETRY_PER_FRAME
            due = start + offset_ns / 1e9
            while (wait := due - time.monotonic()) > 0:
                time.sleep(wait)
            self._publish_ego(frame.ego.at(sub * 0.1 / ODOMETRY_PER_FRAME), start_ns + offset_ns)
            if sub == 0:
                self._publish_frame(frame, images, start_ns + offset_ns)
                self.punctuality.late_ms.append((time.monotonic() - due) * 1e3)

    def _publish_ego(self, ego: Any, stamp_ns: int) -> None:
        self._odometry.publish(odometry_message(
            stamp_ns, ego_matrix(ego), ego.speed, ego.speed * ego.curvature, MAP_FRAME))
        self.punctuality.odometry += 1

    def _publish_frame(self, frame: Any, images: list[Any], stamp_ns: int) -> None:
        """Publish the frame set of one instant, the anchor camera last."""
        if self._tf is not None:
            message = transform_message(stamp_ns, ego_matrix(frame.ego), MAP_FRAME, BASE_FRAME)
            self._tf[0].publish(self._tf[1](transforms=[message]))
        if frame.navigation_text != self._commanded:
            self._commanded = frame.navigation_text
            self._command.publish(String(data=self._commanded))
        order = sorted(zip(self.rig.names, images), key=lambda pair: pair[0] == ANCHOR)
        for name, message in order:
            self._infos[name].publish(camera_info_message(
                self.rig.intrinsics[name], self.rig.width, self.rig.height, stamp_ns,
                optical_frame(name)))
            message.header.stamp = ns_to_stamp(stamp_ns)
            self._images[name].publish(message)
        text = frame.reasoning or ''
        self._coc.publish(String(data=text))
        self._coc_stamped.publish(String(data=json.dumps(
            {'t0_ns': stamp_ns, 'text': text, 'family': frame.family})))

    def _transforms(self) -> tuple[Any, Any] | None:
        """Publish the camera mounts once; return the /tf publisher, None without tf2_msgs."""
        try:
            from tf2_msgs.msg import TFMessage
        except ImportError:
            self._node.get_logger().info(
                'tf2_msgs is not installed: /tf and /tf_static stay silent')
            return None
        now_ns = self._node.get_clock().now().nanoseconds
        mounts = [transform_message(now_ns, self.rig.extrinsics[name], BASE_FRAME,
                                    optical_frame(name)) for name in self.rig.names]
        self._tf_static = self._node.create_publisher(TFMessage, '/tf_static', LATCHED)
        self._tf_static.publish(TFMessage(transforms=mounts))
        return self._node.create_publisher(TFMessage, '/tf', 50), TFMessage


def run_world(drive: Any, rig: Rig, *, seconds: float, encoding: str = 'jpeg',
              ready_file: str = '', subscribers: int = 0,
              subscriber_timeout_s: float = 60.0) -> dict[str, Any]:
    """
    Publish a drive in real time; return frame and odometry counts and lateness.

    With `subscribers` the drive starts when every camera topic has that many subscriptions.
    Raises ConfigurationError when they do not appear in time.
    """
    cv2.setNumThreads(1)  # the other core belongs to the planner
    with stop_on_signals() as stopped, ros_node('world_publisher') as (node, _):
        publisher = WorldPublisher(node, rig, encoding, stopped)
        source = FrameSource(drive, rig.names, encoding)
        source.start()
        try:
            if ready_file:
                Path(ready_file).touch()
            deadline = time.monotonic() + subscriber_timeout_s
            while publisher.subscribers() < subscribers and not stopped.wait(0.02):
                if time.monotonic() > deadline:
                    raise ConfigurationError(
                        f'camera topics have {publisher.subscribers()} of {subscribers} '
                        f'subscribers after {subscriber_timeout_s:.0f} s; start the node first, '
                        'in the same domain')
            stopped.wait(SETTLE_S)
            publisher.drive(source, seconds)
            # the last messages leave while the participant still lives
            stopped.wait(0.2)
        finally:
            source.stop()
            source.join(timeout=5.0)
    return publisher.punctuality.summary()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog='world_publisher', description=__doc__.split('\n')[1])
    parser.add_argument('--seconds', type=float, default=0.0, help='0 drives until interrupted')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--scenario', default='', help='families, comma separated; empty: all')
    parser.add_argument('--encoding', choices=ENCODINGS, default='jpeg')
    parser.add_argument('--ready-file', default='', help='created when the publishers exist')
    parser.add_argument('--subscribers', type=int, default=0,
                        help='wait for this many subscriptions per camera before driving')
    return parser.parse_args(argv)


def world_drive(families: Sequence[str], seed: int, rig: Rig) -> Any:
    """Return the endless drive of the embedded world."""
    from rspec_planner.world.drive import Drive
    return Drive(families, seed, rig=rig)


def main(argv: Sequence[str] | None = None,
         make_drive: Callable[[Sequence[str], int, Rig], Any] = world_drive) -> int:
    """Run the publisher as a process; print one JSON line at the end."""
    options = arguments(argv)
    try:
        families = tuple(f for f in options.scenario.split(',') if f)
        rig = Rig()
        summary = run_world(
            make_drive(families, options.seed, rig), rig, seconds=options.seconds,
            encoding=options.encoding, ready_file=options.ready_file,
            subscribers=options.subscribers)
        print(json.dumps(summary), flush=True)
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
