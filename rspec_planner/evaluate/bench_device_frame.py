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
How long whole frames of the device-resident planner take, image to actions.

Streaming: four new images, twelve whose features are kept, a prompt with random words, decoding
at a forced accepted length, all flow steps. Random weights; see `bench_decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rspec_planner.engine.cuda_graph import FrameRunner, STAGES
from rspec_planner.engine.cuda_vision import Encoder
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.bench import hardware, percentiles
from rspec_planner.evaluate.bench_baseline import measure_original
from rspec_planner.evaluate.bench_decode import (
    allocated,
    Bed,
    BUDGET,
    precision,
    schedules,
)
from rspec_planner.evaluate.bench_workload import bench_prompt, BenchPrompt, Schedule

#: frames' worth of random images that take turns
IMAGE_SETS = 8


@dataclass
class FrameWay:
    """One way of planning a frame and its times."""

    schedule: Schedule
    reuse: bool = False  # the text rides in the prefill as a guess that is right throughout
    device_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in STAGES})
    mismatches: int = 0
    syncs: int = 0
    iterations: int = 0

    def plan(self, bed: Bed, runner: FrameRunner, prompt: BenchPrompt, text: Sequence[int],
             index: int) -> Tensor:
        """Plan one frame whose text is known; return its actions."""
        started = perf_counter()
        bed.begin(prompt, len(text), text if self.reuse else (), text[-1])
        bed.play(text, () if self.reuse else self.schedule.committed[index])
        runner.run()
        result = bed.frame.frame.result()
        self.wall_ms.append(1e3 * (perf_counter() - started))
        self.mismatches += result.generated != tuple(text)
        self.syncs = max(self.syncs, runner.host_syncs)
        self.iterations += len(result.committed)
        if runner.mode != 'eager':
            spent = runner.stage_ms
            self.device_ms.append(sum(spent.values()))
            for name, value in spent.items():
                self.stages[name].append(value)
        return result.actions

    def report(self) -> dict[str, Any]:
        """Return percentiles in milliseconds."""
        return {**percentiles(self.device_ms or self.wall_ms), 'wall': percentiles(self.wall_ms),
                'stages': {name: percentiles(times) for name, times in self.stages.items()},
                'iterations_per_frame': round(self.iterations / max(len(self.wall_ms), 1), 2),
                'token_mismatches': self.mismatches, 'host_syncs_per_frame': self.syncs}


class Features:
    """The features before a frame, so that every way encodes the same four images."""

    def __init__(self, bed: Bed) -> None:
        self._live = (bed.frame.prefill.features, bed.frame.prefill.deepstack)
        self._kept = tuple(torch.empty_like(x) for x in self._live)

    def keep(self) -> None:
        """Remember them."""
        for kept, live in zip(self._kept, self._live):
            kept.copy_(live)

    def restore(self) -> None:
        """Put them back."""
        for kept, live in zip(self._kept, self._live):
            live.copy_(kept)


def bench_device_frame(profile: str, device: str, frames: int = 50, *, loop: str = '',
                       lengths: Sequence[float] = (4.6, 7.4), trace: Path | None = None,
                       samples: int = 1, block: int = 16, eager: int = 3, pdl: bool = False,
                       fp8: bool = False) -> dict[str, Any]:
    """
    Time whole frames; the top-level `p50` and `p99` are those of the first accepted length.

    Arguments as for `bench_decode`; samples: candidate trajectories of one prefill.
    """
    if frames < 1:
        raise ConfigurationError(f'frames {frames}: must be at least 1')
    loop = loop or ('while' if device != 'cpu' else 'eager')
    bed = Bed.make(profile, device, block, samples)
    before = _eager(bed, eager) if fp8 else None  # it needs the matrices
    bed = bed.quantised() if fp8 else bed
    planned = schedules(frames, block, lengths, trace)
    ways = {name: FrameWay(schedule) for name, schedule in planned.items()}
    ways['whole text reused'] = FrameWay(next(iter(planned.values())), reuse=True)
    grown, repeated = _measure(bed, ways, loop, frames, pdl)
    original = before or _eager(bed, eager)
    reports = {name: way.report() for name, way in ways.items()}
    main = reports[next(iter(ways))]
    return {'profile': profile, 'device': device, 'hardware': hardware(torch.device(device)),
            'torch': torch.__version__, 'precision': precision(bed),
            'weights': 'random', 'accepted_lengths': 'forced', 'frames': frames, 'loop': loop,
            'samples': samples, 'pdl': pdl, 'p50': main['p50'], 'p99': main['p99'],
            'ways': reports, 'allocations_after_warmup': grown,
            'nondeterministic_frames': repeated, 'eager': original,
            **({} if bed.fp8 is None else {'fp8': bed.fp8.report()}),
            **({} if original is None else {'frame_speedup_vs_original': {
                name: round(original['frame_ms'] / way['p50'], 2)
                for name, way in reports.items()}})}


def _eager(bed: Bed, frames: int) -> dict[str, Any] | None:
    """Return the times of transformers, None for no frames."""
    return measure_original(bed.target, bench_prompt(bed.target.cfg, 0), 17, frames) \
        if frames else None


def _measure(bed: Bed, ways: dict[str, FrameWay], loop: str, frames: int,
             pdl: bool) -> tuple[int, int]:
    """Plan every frame in every way; return allocations and frames that came out differently."""
    target, frame = bed.target, bed.frame.frame
    cameras, features = target.cfg.cameras, Features(bed)
    encoder = Encoder(target, bed.frame.prefill)
    images = torch.randint(256, (IMAGE_SETS, *encoder.images.shape), dtype=torch.uint8,
                           device=target.device)
    assert len(cameras.names) == encoder.images.shape[0]
    prompt = bench_prompt(target.cfg, 0)
    bed.begin(prompt, BUDGET)
    with torch.inference_mode():
        features.keep()
    runner = FrameRunner(bed.frame, loop, encode=encoder, pdl=pdl)
    bed.begin(prompt, BUDGET)
    plain = FrameRunner(bed.frame.plain(target), loop, pdl=pdl)
    frame.noise.normal_()
    saved, grown, differing = torch.zeros_like(frame.numbers), 0, 0
    for index in range(frames):
        prompt = bench_prompt(target.cfg, index)
        encoder.images.copy_(images[index % IMAGE_SETS])
        before = allocated(target.device)
        features.keep()
        bed.begin(prompt, BUDGET)
        runner.prefill()
        saved.copy_(frame.numbers)
        for way in ways.values():
            frame.numbers.copy_(saved)
            frame.at(Slot.LIMIT).fill_(way.schedule.tokens[index])
            plain.decode()
            text = frame.result().generated
            features.restore()
            actions = way.plan(bed, runner, prompt, text, index)
            if index % 10 == 0:  # the same frame again, bit for bit
                features.restore()
                again = FrameWay(way.schedule, way.reuse).plan(bed, runner, prompt, text, index)
                differing += not torch.equal(actions, again)
            features.restore()
            bed.begin(prompt, BUDGET)
            runner.prefill()
        if index:
            grown += allocated(target.device) - before
    return grown, differing
