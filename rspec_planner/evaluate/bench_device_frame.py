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
How long whole frames of the device-resident planner take, image to actions, and whether they hold.

Streaming: four new images, twelve whose features are kept, a prompt with random words, decoding
at a forced accepted length, all flow steps. Random weights; see `bench_decode`.

A few frames share a prompt: the ways in turn, each planned twice. One decoding of it token by
token in the same kernels is what all of them must say. Before the second frame of a way everything
that an earlier frame left behind is overwritten with values that would show; text and actions must
come out bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
import hashlib
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from rspec_planner.engine.cuda_fp8_vision import encoder_of
from rspec_planner.engine.cuda_frame import FrameResult
from rspec_planner.engine.cuda_graph import FrameRunner, STAGES
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
from rspec_planner.evaluate.gpu_state import watched

#: frames' worth of random images that take turns
IMAGE_SETS = 8
#: frames of one prompt, two of each way; decoding it token by token costs as much as two frames
GROUP = 8
REUSED = 'whole text reused'
#: where the text of the last frame is verified
REUSE_IN = ('verify', 'prefill')


@dataclass
class FrameWay:
    """One way of planning a frame and its times."""

    schedule: Schedule
    reuse: bool = False  # the text is a guess that is right throughout
    device_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in STAGES})
    mismatches: int = 0
    syncs: int = 0
    iterations: int = 0
    tokens: int = 0

    def plan(self, bed: Bed, runner: FrameRunner, prompt: BenchPrompt, text: Sequence[int],
             index: int) -> FrameResult:
        """Plan one frame of the prompt `index`, whose text is known."""
        started = perf_counter()
        bed.begin(prompt, len(text), text if self.reuse else (), text[-1])
        bed.play(text, () if self.reuse else self.schedule.committed[index])
        runner.run()
        result = bed.frame.frame.result()
        self.wall_ms.append(1e3 * (perf_counter() - started))
        self.mismatches += result.generated != tuple(text)
        self.syncs = max(self.syncs, runner.host_syncs)
        self.iterations += len(result.committed)
        self.tokens += sum(result.committed)
        spent = runner.stage_ms
        self.device_ms.append(sum(spent.values()))
        for name, value in spent.items():
            self.stages[name].append(value)
        return result

    def report(self) -> dict[str, Any]:
        """Return percentiles in milliseconds; no times where no frame was planned."""
        if not self.wall_ms:
            return {'frames': 0}
        count = len(self.wall_ms)
        return {**percentiles(self.device_ms), 'frames': len(self.wall_ms),
                'wall': percentiles(self.wall_ms),
                'stages': {name: percentiles(times) for name, times in self.stages.items()},
                'iterations_per_frame': round(self.iterations / count, 2),
                'accepted_length': round(self.tokens / max(self.iterations, 1), 3),
                'token_mismatches': self.mismatches, 'host_syncs_per_frame': self.syncs}


class Features:
    """The features before a frame, so that every frame of a prompt encodes the same images."""

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


@dataclass
class Counts:
    """What went wrong, over all frames."""

    grown: int = 0  # allocations of device memory behind the first frames
    repeated: int = 0  # frames that were planned again
    differing: int = 0  # of these, how many did not come out bit for bit
    compared: int = 0  # ways that planned a prompt behind another way
    apart: int = 0  # of these, how many gave other actions, texts being equally long


def bench_device_frame(profile: str, device: str, frames: int = 50, *, loop: str = '',
                       lengths: Sequence[float] = (4.6, 7.4), trace: Path | None = None,
                       samples: int = 1, block: int = 16, eager: int = 3, pdl: bool = False,
                       fp8: bool = False, reuse_in: str = 'verify',
                       per_prompt: int = GROUP) -> dict[str, Any]:
    """
    Time whole frames; the top-level `p50` and `p99` are those of the first accepted length.

    frames: of all ways together, per_prompt to a prompt, an even number. samples: candidate
    trajectories of one prefill. reuse_in: where a reused text is verified, one of REUSE_IN.
    Other arguments as for `bench_decode`.
    """
    if frames < 1:
        raise ConfigurationError(f'frames {frames}: must be at least 1')
    if per_prompt < 2 or per_prompt % 2:
        raise ConfigurationError(f'per_prompt {per_prompt}: must be even, every frame runs twice')
    if reuse_in not in REUSE_IN:
        raise ConfigurationError(f"reuse_in '{reuse_in}': use one of {', '.join(REUSE_IN)}")
    loop = loop or ('while' if device != 'cpu' else 'sync')
    bed = Bed.make(profile, device, block, samples, reuse_in=reuse_in)
    before = _eager(bed, eager) if fp8 else None  # it needs the matrices
    bed = bed.quantised(vision=True) if fp8 else bed
    planned = schedules(-(-frames // per_prompt), block, lengths, trace)
    ways = {name: FrameWay(schedule) for name, schedule in planned.items()}
    ways[REUSED] = FrameWay(next(iter(planned.values())), reuse=True)
    course = _Course(bed, ways, loop, pdl)
    with watched(device) as state:
        counts = course.measure(frames, per_prompt)
    original = before or _eager(bed, eager)
    reports = {name: way.report() for name, way in ways.items()}
    main = reports[next(iter(ways))]
    return {'profile': profile, 'device': device, 'hardware': hardware(torch.device(device)),
            'torch': torch.__version__, 'precision': precision(bed),
            'weights': 'random', 'accepted_lengths': 'forced', 'frames': frames,
            'prompts': -(-frames // per_prompt), 'loop': loop, 'samples': samples, 'pdl': pdl,
            'reuse_in': reuse_in, 'p50': main['p50'], 'p99': main['p99'], 'ways': reports,
            'token_mismatches': sum(way.mismatches for way in ways.values()),
            'host_syncs_per_frame': max(way.syncs for way in ways.values()),
            'allocations_after_warmup': counts.grown,
            'repeated_frames': counts.repeated, 'nondeterministic_frames': counts.differing,
            'ways_compared': counts.compared, 'ways_with_other_actions': counts.apart,
            'poison': str(poison_value(device)), 'gpu_state': state, 'eager': original,
            **({} if bed.fp8 is None else {'fp8': bed.fp8.report()}),
            **({} if original is None else {'frame_speedup_vs_original': {
                name: round(original['frame_ms'] / way['p50'], 2)
                for name, way in reports.items() if way['frames']}})}


def _eager(bed: Bed, frames: int) -> dict[str, Any] | None:
    """Return the times of transformers, None for no frames."""
    return measure_original(bed.target, bench_prompt(bed.target.cfg, 0), 17, frames) \
        if frames else None


def poison_value(device: str) -> float:
    """
    Return what leftovers are overwritten with.

    Kernels never load what no row sees. The references of a CPU weigh it with 0, and 0 times NaN
    is NaN; there a large finite value must do.
    """
    return float('nan') if device != 'cpu' else 1e4


def digest(result: FrameResult) -> bytes:
    """Return what identifies text and actions, bit for bit."""
    made = hashlib.sha256(repr(result.generated).encode())
    made.update(result.actions.numpy().tobytes())
    return made.digest()


class _Course:
    """Plans the frames one after the other."""

    def __init__(self, bed: Bed, ways: dict[str, FrameWay], loop: str, pdl: bool) -> None:
        self.bed, self.ways = bed, list(ways.values())
        target = bed.target
        self._features = Features(bed)
        self._encoder = encoder_of(target, bed.frame.prefill, bed.fp8)
        self._images = torch.randint(256, (IMAGE_SETS, *self._encoder.images.shape),
                                     dtype=torch.uint8, device=target.device)
        self._features.keep()
        prompt = bench_prompt(target.cfg, 0)
        bed.begin(prompt, BUDGET)
        self._runner = FrameRunner(bed.frame, loop, encode=self._encoder, pdl=pdl)
        bed.begin(prompt, BUDGET)
        self._plain = FrameRunner(bed.frame.plain(target), loop, pdl=pdl)
        bed.frame.frame.noise.normal_()
        self._poison = poison_value(target.device.type)
        self.counts = Counts()

    def measure(self, frames: int, per_prompt: int) -> Counts:
        """Plan so many frames in all."""
        for index in range(-(-frames // per_prompt)):
            prompt = bench_prompt(self.bed.target.cfg, index)
            self._features.restore()
            self._encoder.images.copy_(self._images[index % IMAGE_SETS])
            text = self._reference(prompt, index)
            left, made = min(frames - index * per_prompt, per_prompt), dict[int, set[bytes]]()
            for turn in range(0, left, 2):
                way = self.ways[(index * per_prompt // 2 + turn // 2) % len(self.ways)]
                found = self._plan(way, prompt, text, index, min(left - turn, 2))
                made.setdefault(way.schedule.tokens[index], set()).add(found)
                self.counts.compared += turn > 0
            self.counts.apart += sum(len(found) - 1 for found in made.values())
        return self.counts

    def _reference(self, prompt: BenchPrompt, index: int) -> tuple[int, ...]:
        """Return what decoding token by token says, as long as any way needs it."""
        self.bed.begin(prompt, max(way.schedule.tokens[index] for way in self.ways))
        self._runner.prefill()
        self._plain.decode()
        return self.bed.frame.frame.result().generated

    def _plan(self, way: FrameWay, prompt: BenchPrompt, text: tuple[int, ...], index: int,
              times: int) -> bytes:
        """Plan a frame once or twice, leftovers poisoned in between; return its digest."""
        said, found = text[:way.schedule.tokens[index]], list[bytes]()
        for turn in range(times):
            self._features.restore()
            if turn:
                for tensor in self.bed.frame.stale():
                    tensor.fill_(self._poison)
            before = self._allocated()
            found.append(digest(way.plan(self.bed, self._runner, prompt, said, index)))
            if index:
                self.counts.grown += self._allocated() - before
        self.counts.repeated += len(found) - 1
        self.counts.differing += len(set(found)) - 1
        return found[0]

    def _allocated(self) -> int:
        return allocated(self.bed.target.device)
