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
How long one frame takes, stage by stage, on consecutive frames of a drive.

Streaming: the planner keeps the features of frames it has seen, so four of sixteen images are
new. Cold: every image is encoded in every frame. Rendering is outside the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
import os
from pathlib import Path
import platform
import time
from typing import Any

import numpy as np
import torch

from rspec_planner.errors import ConfigurationError
from rspec_planner.planner.history import to_local
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.pipeline import Planner
from rspec_planner.world.drive import Drive, DriveFrame
from rspec_planner.world.rig import Rig
from rspec_planner.world.scenarios import FAMILIES

STAGES = ('preprocess', 'encode', 'prefill', 'decode', 'action', 'postprocess')
WARM_UP = 5
HISTORY, FRAMES = 16, 4
STEP_NS = 100_000_000


def drive_observations(frames: int, width: int, height: int, cameras: tuple[str, ...],
                       seed: int = 0) -> Iterator[Observation]:
    """Yield observations of consecutive frames, 0.1 s apart, of one drive."""
    rig = Rig(width=width, height=height)
    drive = Drive(FAMILIES, seed, rig=rig)
    window: deque[DriveFrame] = deque(maxlen=HISTORY)
    given = 0
    while given < frames:
        window.append(drive.frame())
        drive.step()
        if len(window) == HISTORY:
            yield observation_of(list(window), rig, cameras)
            given += 1


def observation_of(window: list[DriveFrame], rig: Rig, cameras: tuple[str, ...]) -> Observation:
    """Return the planner's input at the last of 16 neighbouring frames."""
    order = [rig.names.index(name) for name in cameras]
    recent = [frame.images for frame in window[-FRAMES:] if frame.images is not None]
    images = np.stack(recent, axis=1)[order]
    t0_ns = round(window[-1].time_s * 1e9)
    stamps = t0_ns + STEP_NS * np.arange(1 - FRAMES, 1, dtype=np.int64)
    poses = np.tile(np.eye(4), (len(window), 1, 1))
    for pose, frame in zip(poses, window):
        cos, sin = np.cos(frame.ego.yaw), np.sin(frame.ego.yaw)
        pose[:2, :2] = [[cos, -sin], [sin, cos]]
        pose[:2, 3] = frame.ego.x, frame.ego.y
    return Observation(
        t0_ns=t0_ns, camera_names=cameras, images=np.ascontiguousarray(images),
        image_stamps_ns=np.tile(stamps, (len(cameras), 1)),
        ego_poses=to_local(poses, poses[-1]), ego_pose_at_t0=poses[-1], odometry_frame='map',
        speed_mps=window[-1].ego.speed, navigation_text=window[-1].navigation_text)


def percentiles(values: list[float]) -> dict[str, float]:
    """Return p50, p95 and p99, rounded to microseconds."""
    found = np.percentile(values, [50, 95, 99]) if values else np.zeros(3)
    return {name: round(float(v), 3) for name, v in zip(('p50', 'p95', 'p99'), found)}


def _measure(planner: Planner, observations: list[Observation]) -> dict[str, Any]:
    """Return percentiles of whole frames and of their stages, milliseconds."""
    totals: list[float] = []
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    tokens: list[int] = []
    for index, observation in enumerate(observations):
        started = time.perf_counter()
        plan = planner.plan(observation)
        spent = 1e3 * (time.perf_counter() - started)
        if index < WARM_UP:
            continue
        totals.append(spent)
        tokens.append(len(plan.reasoning.token_ids))
        for name in STAGES:
            stages[name].append(getattr(plan.times, f'{name}_ms'))
    return {**percentiles(totals), 'mean': round(float(np.mean(totals)), 3),
            'stages': {name: percentiles(values) for name, values in stages.items()},
            'tokens': round(float(np.mean(tokens)), 2)}


def hardware(device: torch.device) -> str:
    """Return the processor's or the GPU's name."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    try:
        with open('/proc/cpuinfo', encoding='utf-8') as file:
            names = [line.split(':', 1)[1].strip() for line in file
                     if line.startswith('model name')]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def bench_frame(profile: str = 'tiny', device: str = 'cpu', frames: int = 40, *,
                checkpoint: str | Path | None = None, seed: int = 0) -> dict[str, Any]:
    """
    Time whole frames of a profile; `p50` at the top is that of streaming frames, in ms.

    frames: measured frames, after five of warm-up. checkpoint: a folder in place of the
    profile's embedded weights. Raises ConfigurationError for a count below 1.
    """
    if frames < 1:
        raise ConfigurationError(f'frames {frames}: must be at least 1')
    source = profile if checkpoint is None else checkpoint
    streaming = Planner.load(source, device=device)
    cold = Planner.load(source, device=device, use_vision_cache=False)
    cameras = streaming.profile.cameras
    observations = list(drive_observations(frames + WARM_UP, cameras.width, cameras.height,
                                           cameras.names, seed))
    found = {'streaming': _measure(streaming, observations),
             'cold': _measure(cold, observations)}
    place = torch.device(device)
    return {'profile': streaming.profile.name, 'device': device, 'hardware': hardware(place),
            'processors': len(os.sched_getaffinity(0)), 'threads': torch.get_num_threads(),
            'precision': 'fp32', 'frames': frames, 'p50': found['streaming']['p50'],
            'tokens': found['streaming']['tokens'], 'torch': torch.__version__, **found}
