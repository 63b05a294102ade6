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

Streaming is what the node does: a draft proposes, the last reasoning is verified in the prefill,
and the features of frames seen before are kept, so four of sixteen images are new. Stateless
decodes every frame from its first token, autoregressive also without a draft, and cold encodes
every image in every frame. The four take turns every few frames, so that a machine whose speed
drifts favours none. Rendering is outside the clock.

All must say what the autoregressive planner says, and cold must drive what stateless drives, bit
for bit: they differ only in what is computed again. On a GPU the autoregressive planner's products
are cut for as many rows as the draft's block, so that they round alike.
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
from rspec_planner.planner.checkpoints import (
    existing_device,
    folder_profile,
    open_checkpoint,
    open_draft,
)
from rspec_planner.planner.drafts import checkpoint_folder, EMBEDDED_NAMES
from rspec_planner.planner.history import to_local
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.pipeline import Planner
from rspec_planner.world.drive import Drive, DriveFrame
from rspec_planner.world.rig import Rig
from rspec_planner.world.scenarios import FAMILIES

STAGES = ('preprocess', 'encode', 'prefill', 'decode', 'action', 'postprocess')
WARM_UP = 5  # frames before the measured ones
TURN = 10  # frames; the first of each turn finds the processor's caches cold
HISTORY, FRAMES = 16, 4
STEP_NS = 100_000_000
PRECISIONS = {'float32': 'fp32', 'bfloat16': 'bf16'}


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
    """Return p50, p95 and p99 of milliseconds, rounded to microseconds; nothing of none."""
    if not values:
        return {}
    found = np.percentile(values, [50, 95, 99])
    return {name: round(float(v), 3) for name, v in zip(('p50', 'p95', 'p99'), found)}


class _Samples:
    """Times of one way of planning."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.totals: list[float] = []
        self.stages: dict[str, list[float]] = {name: [] for name in STAGES}
        self.tokens: list[int] = []
        self.iterations: list[int] = []
        self.syncs: list[int | None] = []
        self.allocations = 0
        self.said: list[tuple[int, ...]] = []
        self.driven: list[bytes] = []

    def plan(self, observation: Observation, measured: bool) -> None:
        """Plan one frame; keep its times unless it is warm-up."""
        before = _allocated(self.planner)
        started = time.perf_counter()
        plan = self.planner.plan(observation)
        spent = 1e3 * (time.perf_counter() - started)
        self.said.append(plan.reasoning.token_ids)
        self.driven.append(plan.candidates.tobytes() + plan.speeds.tobytes())
        if not measured:
            return
        self.allocations += _allocated(self.planner) - before
        self.syncs.append(self.planner.host_syncs)
        self.totals.append(spent)
        self.tokens.append(len(plan.reasoning.token_ids))
        self.iterations.append(plan.reasoning.stats.iterations)
        for name in STAGES:
            self.stages[name].append(getattr(plan.times, f'{name}_ms'))

    def mismatches(self, texts: list[tuple[int, ...]]) -> int:
        """Return how many frames, warm-up included, do not say these texts."""
        return sum(a != b for a, b in zip(self.said, texts))

    def report(self) -> dict[str, Any]:
        """Return percentiles of whole frames and of their stages, milliseconds."""
        return {**percentiles(self.totals), 'mean': round(float(np.mean(self.totals)), 3),
                'stages': {name: percentiles(values) for name, values in self.stages.items()},
                'tokens': round(float(np.mean(self.tokens)), 2),
                'iterations': round(float(np.mean(self.iterations)), 2)}


def _allocated(planner: Planner) -> int:
    """Return how often device memory was allocated so far; 0 without a GPU."""
    if planner.device.type != 'cuda':
        return 0
    return int(torch.cuda.memory_stats(planner.device)['allocation.all.allocated'])


def _folder(profile: str, checkpoint: str | Path | None) -> Path:
    """Return the folder to open; ConfigurationError where it holds another profile."""
    if checkpoint is None:
        name = profile or EMBEDDED_NAMES[0]
        return checkpoint_folder(name)
    held = folder_profile(checkpoint).name
    if profile not in ('', held):
        raise ConfigurationError(f"profile '{profile}': {checkpoint} holds {held}; leave "
                                 '--profile out, or give another folder')
    return Path(checkpoint)


def _ways(directory: Path, device: str, draft: str, loop: str, tokens: int | None,
          reuse_in: str) -> dict[str, _Samples]:
    """Return the planners that are compared, by name; they share one target and one draft."""
    target, tokenizer = open_checkpoint(directory, existing_device(device))
    routine = open_draft(None if draft == 'none' else draft, directory, target)
    widest = 0 if routine is None else routine.cfg.block
    options: dict[str, dict[str, Any]] = {
        'streaming': {'draft': routine, 'reuse': True, 'guess_in': reuse_in},
        'stateless': {'draft': routine},
        'autoregressive': {'widest': widest},
        'cold': {'draft': routine, 'use_vision_cache': False}}
    return {name: _Samples(Planner(target, tokenizer, loop=loop, max_reasoning_tokens=tokens,
                                   **option))
            for name, option in options.items()}


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


def bench_frame(profile: str = '', device: str = 'cpu', frames: int = 40, *,
                checkpoint: str | Path | None = None, seed: int = 0, draft: str = 'default',
                loop: str = '', warm_up: int = WARM_UP, tokens: int | None = None,
                reuse_in: str = 'verify') -> dict[str, Any]:
    """
    Time whole frames of a profile; `p50` at the top is that of streaming frames, in ms.

    profile: '' takes the checkpoint's, or tiny. frames: measured frames, after `warm_up` others.
    checkpoint: a folder in place of the profile's embedded weights. draft: 'none' for a
    checkpoint without one. loop: see `planner.device_stages`, by default 'while' on a GPU and
    'host' elsewhere. tokens: budget of a reasoning, by default the profile's; random weights
    spend all of it. reuse_in: see `DeviceStages`. Raises ConfigurationError for a count below 1
    and for a folder of another profile.

    token_mismatches counts frames that say something else than the autoregressive way, of all
    ways and of each, nondeterministic_frames those that cold and stateless do not drive alike;
    warm-up is included in both.
    """
    if frames < 1:
        raise ConfigurationError(f'frames {frames}: must be at least 1')
    loop = loop or ('host' if device == 'cpu' else 'while')
    ways = _ways(_folder(profile, checkpoint), device, draft, loop, tokens, reuse_in)
    streaming = ways['streaming'].planner
    cameras = streaming.profile.cameras
    observations = list(drive_observations(frames + warm_up, cameras.width, cameras.height,
                                           cameras.names, seed))
    for first in range(0, len(observations), TURN):
        for way in ways.values():
            for index, observation in enumerate(observations[first:first + TURN], start=first):
                way.plan(observation, index >= warm_up)
    plain = ways['autoregressive'].said
    found = {name: {**way.report(), 'token_mismatches': way.mismatches(plain)}
             for name, way in ways.items()}
    place = torch.device(device)
    return {'profile': streaming.profile.name, 'device': device, 'hardware': hardware(place),
            'processors': len(os.sched_getaffinity(0)), 'threads': torch.get_num_threads(),
            'precision': streaming.precision, 'frames': frames, 'draft': streaming.draft_name,
            'p50': found['streaming']['p50'], 'tokens': found['streaming']['tokens'],
            'torch': torch.__version__, 'loop': loop, **_agreement(ways), **found}


def _agreement(ways: dict[str, _Samples]) -> dict[str, Any]:
    """Return how the ways differ, and what the streaming one asked of host and memory."""
    streaming, plain = ways['streaming'], ways['autoregressive']
    syncs = [count for count in streaming.syncs if count is not None]
    return {'token_mismatches': sum(way.mismatches(plain.said) for way in ways.values()),
            'nondeterministic_frames': sum(
                a != b for a, b in zip(ways['cold'].driven, ways['stateless'].driven)),
            'host_syncs_per_frame': max(syncs) if syncs else None,
            'allocations_after_warmup': streaming.allocations}
