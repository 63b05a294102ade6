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
The processes of `rspec bench node`: cameras, and the node with a planner that takes no time.

Frames are made up and encoded beforehand, so that the cameras cost what publishing costs. Run
as `python -m rspec_planner.live.bench_processes cameras|node ...`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
import json
import sys
import time
from typing import Any

import cv2
from nav_msgs.msg import Odometry
import numpy as np
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import CompressedImage, Image

from rspec_planner.command_line import camera_topic, ODOMETRY_TOPIC
from rspec_planner.decode.stats import DecodeStats
from rspec_planner.live.session import ros_node, stop_on_signals
from rspec_planner.model.config import CameraConfig, tiny, TokenIds
from rspec_planner.node import RspecPlanner
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plan import Plan, PLAN_POINTS, Reasoning, StageTimes, Verdict
from rspec_planner.process import run_node
from rspec_planner.ros_conversions import (
    compressed_image_message,
    image_message,
    ns_to_stamp,
    odometry_message,
)

#: as many pixels as the shipped model sees, in the shape of 1080p
CAMERAS = CameraConfig(height=216, width=384)
#: no multiple of the cameras' rates, so that samples come at every time after a frame
ODOMETRY_HZ = 97.0
DISTINCT_FRAMES = 7  # frames 0.1 s apart must differ at 10 to 60 Hz, or the camera is frozen
SPEED_MPS = 10.0


class InstantPlanner:
    """Plans straight on at the observed speed, in no time worth mentioning."""

    def __init__(self) -> None:
        ids = TokenIds(*range(len(TokenIds.__dataclass_fields__)))
        self.profile = replace(tiny(ids, 1000), cameras=CAMERAS)
        self.tokenizer = None  # no prompt either
        self.precision = 'none'
        self.executors = {'backend': 'none'}

    def plan(self, observation: Observation) -> Plan:
        """Return the plan; its time counts as postprocessing."""
        started = time.perf_counter()
        speeds = np.full(PLAN_POINTS, observation.speed_mps)
        poses = np.zeros((PLAN_POINTS, 4))
        poses[:, 0] = observation.speed_mps * 0.1 * np.arange(PLAN_POINTS)
        zeros = np.zeros(PLAN_POINTS)
        plan = Plan(observation.t0_ns, poses, speeds, zeros, zeros, poses[None], speeds[None],
                    observation.ego_pose_at_t0, observation.odometry_frame,
                    Reasoning((1,), 'nothing is planned here', True, DecodeStats(1, (1,))),
                    StageTimes(), Verdict(True), dict(observation.ages_ms))
        return replace(plan, times=StageTimes(
            postprocess_ms=1e3 * (time.perf_counter() - started)))

    def reset(self) -> None:
        """Hold nothing from earlier frames."""


def scene(width: int, height: int, seed: int) -> np.ndarray:
    """Return (height, width, 3) RGB that compresses like a street: smooth areas and texture."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 40 + 1, width // 40 + 1, 3), dtype=np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.int16)
    texture = cv2.resize(random.integers(-8, 8, (height // 4, width // 4), dtype=np.int16),
                         (width, height), interpolation=cv2.INTER_LINEAR)
    return np.asarray(np.clip(smooth + texture[..., None], 0, 255), dtype=np.uint8)


def frame_messages(encoding: str, width: int, height: int) -> list[Any]:
    """Return some frames as messages, 'jpeg' or 'raw'."""
    make = compressed_image_message if encoding == 'jpeg' else image_message
    return [make(scene(width, height, seed), 0, 'camera') for seed in range(DISTINCT_FRAMES)]


class Cameras:
    """Publishers of four cameras and the odometry."""

    def __init__(self, node: Node, encoding: str, width: int, height: int) -> None:
        self._node = node
        kind: Any = CompressedImage if encoding == 'jpeg' else Image
        suffix = '/compressed' if encoding == 'jpeg' else ''
        self._publishers = [node.create_publisher(
            kind, camera_topic(name) + suffix, qos_profile_sensor_data) for name in CAMERAS.names]
        self._odometry = node.create_publisher(Odometry, ODOMETRY_TOPIC, 50)
        self._frames = frame_messages(encoding, width, height)
        self.frame_bytes = len(self._frames[0].data)
        self.frames_ms: dict[int, float] = {}  # t0 -> until the last camera was handed over
        self.inputs_ms: dict[int, float] = {}  # t0 -> until odometry of t0 or later was, too
        self._newest_t0_ns = 0

    def matched(self) -> bool:
        """Return whether somebody listens to every topic."""
        return all(p.get_subscription_count() for p in (*self._publishers, self._odometry))

    def publish_frames(self, index: int) -> None:
        """Publish one frame of each camera under one stamp, now."""
        started, stamp_ns = time.perf_counter(), self._node.get_clock().now().nanoseconds
        message = self._frames[index % len(self._frames)]
        message.header.stamp = ns_to_stamp(stamp_ns)
        for publisher in self._publishers:
            publisher.publish(message)
        self.frames_ms[stamp_ns] = 1e3 * (time.perf_counter() - started)
        self._newest_t0_ns = stamp_ns

    def publish_odometry(self) -> None:
        """Publish the ego on its way along x, now."""
        stamp_ns = self._node.get_clock().now().nanoseconds
        pose = np.eye(4)
        pose[0, 3] = SPEED_MPS * (stamp_ns % 10**15) / 1e9
        self._odometry.publish(odometry_message(stamp_ns, pose, SPEED_MPS))
        t0_ns = self._newest_t0_ns
        if t0_ns and t0_ns not in self.inputs_ms:
            now_ns = self._node.get_clock().now().nanoseconds
            self.inputs_ms[t0_ns] = max(self.frames_ms[t0_ns], (now_ns - t0_ns) / 1e6)


def run_cameras(options: argparse.Namespace) -> int:
    """Publish for `seconds` once the node listens; report the frames as the last line."""
    with stop_on_signals() as stopped, ros_node('bench_cameras') as (node, _):
        cameras = Cameras(node, options.encoding, options.width, options.height)
        while not stopped.is_set() and not cameras.matched():
            time.sleep(0.05)
        stopped.wait(1.0)  # readers match a little later than writers
        frames, samples = 0, 0
        start = time.monotonic()
        while not stopped.is_set() and (now := time.monotonic() - start) < options.seconds:
            if now >= samples / ODOMETRY_HZ:
                cameras.publish_odometry()
                samples += 1
            if now >= frames / options.rate:
                cameras.publish_frames(frames)
                frames += 1
            due = min(samples / ODOMETRY_HZ, frames / options.rate)
            time.sleep(max(0.0, start + due - time.monotonic()))
        stopped.wait(1.0)  # the last messages leave while the participant still lives
    print(json.dumps({'frames': frames, 'frame_bytes': cameras.frame_bytes,
                      'odometry': samples, 'frames_ms': cameras.frames_ms,
                      'inputs_ms': cameras.inputs_ms}), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two processes."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ['node']:
        return run_node(lambda full: RspecPlanner(lambda parameters: InstantPlanner(),
                                                  arguments=full), given[1:])
    parser = argparse.ArgumentParser(prog='bench_processes cameras')
    parser.add_argument('--encoding', choices=('jpeg', 'raw'), default='jpeg')
    parser.add_argument('--rate', type=float, default=10.0)
    parser.add_argument('--seconds', type=float, default=10.0)
    parser.add_argument('--width', type=int, default=1920)
    parser.add_argument('--height', type=int, default=1080)
    return run_cameras(parser.parse_args(given[1:]))


if __name__ == '__main__':
    sys.exit(main())
