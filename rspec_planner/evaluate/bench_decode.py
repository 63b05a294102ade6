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
How long the device-resident loop reasons, paired with the same kernels one token at a time.

Random weights of a profile's shapes; accepted lengths are forced (`bench_workload`). For every
frame one prefill is decoded in every way from the same cache, and every text must equal that of
decoding one token a forward. On a CPU the same launches run eagerly: correctness only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rspec_planner.engine.cuda_fp8 import Fp8Weights, layer_bytes, quantise_target
from rspec_planner.engine.cuda_graph import capture, device_ms, FrameRunner
from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_random import random_draft, random_target
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.bench import hardware, percentiles
from rspec_planner.evaluate.bench_baseline import features_of, measure_dflash, measure_original
from rspec_planner.evaluate.bench_workload import (
    bench_prompt,
    BenchPrompt,
    fixed_schedule,
    LONGEST,
    matches,
    MEAN_TOKENS,
    Schedule,
    traced_schedule,
)
from rspec_planner.evaluate.gpu_state import watched
from rspec_planner.model.checkpoint import load_target
from rspec_planner.model.config import alpamayo_r1, ProfileConfig
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.target import Target
from rspec_planner.planner.drafts import EMBEDDED

PROFILES = ('tiny', 'alpamayo-r1')
#: most tokens of a text, and rows of a prompt's guess
BUDGET, GUESS_ROOM = LONGEST, 31
MAX_ROUNDS = 64


def profile_config(name: str) -> ProfileConfig:
    """Return the shapes of a profile; ConfigurationError for an unknown one."""
    if name not in PROFILES:
        raise ConfigurationError(f"profile '{name}': use one of {', '.join(PROFILES)}")
    return alpamayo_r1() if name == 'alpamayo-r1' else load_target(EMBEDDED / 'tiny').cfg


@dataclass
class Bed:
    """A random target with its draft and buffers, on one device."""

    target: Target
    draft: Dflash
    frame: DeviceFrame
    script: Tensor
    right: Tensor
    fp8: Fp8Weights | None = None
    reuse_in: str = ''

    @staticmethod
    def make(profile: str, device: str, block: int = 16, samples: int = 1,
             fp8: bool = False, reuse_in: str = '', fused: Collection[str] = ()) -> Bed:
        """
        Return a bed; its draft has two layers, a window of 8 and a reduced head.

        fp8: see `quantised`. reuse_in: where frames verify a guess, 'verify' or 'prefill'.
        fused: see `select.fuse`.
        """
        place, cfg = torch.device(device), profile_config(profile)
        dtype = torch.bfloat16 if place.type == 'cuda' else torch.float32
        target = random_target(cfg, place, dtype)
        draft = random_draft(target, block=block)
        return Bed._over(target, draft, samples, quantise_target(target) if fp8 else None,
                         reuse_in, fused)

    def quantised(self, **options: Any) -> Bed:
        """
        Return a bed over the same target in fp8; this one is spent, for its matrices are freed.

        options: of `quantise_target`.
        """
        return Bed._over(self.target, self.draft, self.frame.frame.noise.shape[0],
                         quantise_target(self.target, **options), self.reuse_in)

    @staticmethod
    def _over(target: Target, draft: Dflash, samples: int, fp8: Fp8Weights | None,
              reuse_in: str = '', fused: Collection[str] = ()) -> Bed:
        cfg, place = target.cfg, target.device
        room = GUESS_ROOM if reuse_in == 'prefill' else 0
        rows = len(bench_prompt(cfg, 0).ids) + room
        rows += -rows % 64
        frame = DeviceFrame(target, prompt_rows=rows, budget=BUDGET, draft=draft,
                            guess_room=room, samples=samples, fp8=fp8,
                            narrow_guess=reuse_in == 'verify', fused=fused)
        script = torch.zeros(BUDGET, dtype=torch.int64, device=place)
        right = torch.zeros(MAX_ROUNDS, dtype=torch.int64, device=place)
        frame.replay(script, right)
        features, deepstack = features_of(target)
        frame.prefill.features.copy_(features)
        frame.prefill.deepstack.copy_(deepstack)
        return Bed(target, draft, frame, script, right, fp8, reuse_in)

    def begin(self, prompt: BenchPrompt, limit: int, guess: Sequence[int] = (),
              end_id: int | None = None) -> None:
        """Begin a frame."""
        self.frame.begin(prompt.ids, prompt.positions, prompt.rope_delta, limit, guess, end_id)

    def play(self, text: Sequence[int], committed: Sequence[int]) -> None:
        """Let the next frame propose a text, right as often as a schedule says."""
        self.script[:len(text)] = torch.tensor(text)
        self.right.copy_(matches(committed, self.draft.cfg.block, MAX_ROUNDS))


@dataclass
class Way:
    """One way of decoding and its times."""

    runner: FrameRunner
    schedule: Schedule | None  # None: one token a forward
    times: list[float] = field(default_factory=list)
    mismatches: int = 0
    tokens: int = 0
    iterations: int = 0
    syncs: int = 0

    def decode(self, bed: Bed, saved: Tensor, text: Sequence[int], index: int) -> tuple[int, ...]:
        """Decode a prefilled frame; count its time and whether it said `text` (if any)."""
        frame = bed.frame.frame
        frame.numbers.copy_(saved)
        if self.schedule is not None:
            bed.play(text, self.schedule.committed[index])
        if text:  # it ends the context itself, as a trained target's does
            frame.at(Slot.END_ID).fill_(text[-1])
        self.times.append(self.runner.decode())
        result = frame.result()
        self.mismatches += bool(text) and result.generated != tuple(text)
        self.tokens += sum(result.committed)
        self.iterations += len(result.committed)
        self.syncs = max(self.syncs, self.runner.host_syncs)
        return result.generated

    def report(self) -> dict[str, Any]:
        """Return percentiles in milliseconds, L, and differences from the reference."""
        return {**percentiles(self.times), 'accepted_length': round(
            self.tokens / max(self.iterations, 1), 3), 'iterations_per_frame': round(
            self.iterations / max(len(self.times), 1), 2), 'token_mismatches': self.mismatches,
            'host_syncs': self.syncs}


def precision(bed: Bed) -> str:
    """Return what weights and activations are kept in."""
    plain = str(bed.target.dtype).split('.')[-1]
    return plain if bed.fp8 is None else f'{plain}, matrices of text and expert fp8'


def repeat(bed: Bed, body: Callable[[], None], repeats: int = 30) -> dict[str, float]:
    """Return percentiles of a part's milliseconds, captured where there is a GPU."""
    cuda, times = bed.target.device.type == 'cuda', []
    with torch.inference_mode():
        body()
    run = capture(body).replay if cuda else body
    for _ in range(repeats if cuda else 2):
        if cuda:
            times.append(device_ms(run))
        else:
            started = perf_counter()
            with torch.inference_mode():
                run()
            times.append(1e3 * (perf_counter() - started))
    return percentiles(times)


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes; 0 without a GPU."""
    if device.type != 'cuda':
        return 0.0
    source = torch.empty(2 ** 31, dtype=torch.uint8, device=device)
    into, best = torch.empty_like(source), 0.0
    for _ in range(8):
        best = max(best, 2e3 * source.numel() / device_ms(lambda: into.copy_(source)))
    return best


def weight_bytes(bed: Bed) -> dict[str, int]:
    """Return the bytes of weights that one verify, and one flow step, must read."""
    tokens, head = bed.target.cfg.tokens, bed.target.text.lm_head.weight
    gap = min(tokens.forbidden_end, len(head)) - tokens.forbidden_start
    text, flow = (sum(map(layer_bytes, layers)) for layers in (
        bed.frame.verify.layers, bed.frame.flow.layers))
    return {'verify': text + (len(head) - gap) * head.shape[1] * head.element_size(),
            'flow_step': flow}


def parts(bed: Bed) -> dict[str, Any]:
    """Return the times of single parts beside the times of reading their weights once."""
    frame, plain = bed.frame, bed.frame.plain(bed.target)
    assert frame.draft is not None
    with torch.inference_mode():  # the context is the prompt
        frame.prefill()
        for each in (frame, plain):
            frame.kernels.begin(frame.frame.numbers, frame.frame.tokens, None, each.verify.ids,
                                (-1, -1))
    speed = bandwidth(bed.target.device)
    need = weight_bytes(bed)
    floors = {name: 1e3 * count / speed if speed else 0.0 for name, count in need.items()}
    found = {'verify': repeat(bed, frame.verify), 'step': repeat(bed, plain.verify),
             'draft': repeat(bed, frame.draft), 'flow': repeat(bed, frame.flow, 8)}
    verify, step, draft = (found[name]['p50'] for name in ('verify', 'step', 'draft'))
    return {'copy_bytes_per_s': speed, 'weight_floor_ms': floors['verify'],
            'flow_floor_ms': floors['flow_step'] * bed.target.cfg.flow.num_steps,
            f'verify{bed.draft.cfg.block}_ms': verify, 'target_step_ms': step,
            'verify_over_floor': verify / floors['verify'] if speed else 0.0,
            'draft_block_ms': draft, 'c': draft / step, 'flow_ms': found['flow']['p50'],
            'parts': found}


def schedules(frames: int, block: int, lengths: Sequence[float],
              trace: Path | None) -> dict[str, Schedule]:
    """Return the schedules to measure, by name."""
    found = {f'L={length:g}': fixed_schedule(frames, length, block) for length in lengths}
    if trace is not None:
        found['trace'] = traced_schedule(trace, frames)
    return found


def bench_decode(profile: str = 'tiny', device: str = 'cpu', frames: int = 20, *,
                 loops: Sequence[str] = (), lengths: Sequence[float] = (4.6, 7.4),
                 trace: Path | None = None, block: int = 16, eager: int = 3, pdl: bool = False,
                 fp8: bool = False, fused: Collection[str] = ()) -> dict[str, Any]:
    """
    Time reasoning alone; every key in milliseconds unless it says otherwise.

    loops: ways to run the loop, see `engine.cuda_graph`; the first one also decodes without a
    draft. eager: frames of the transformers baseline, 0 leaves it out. trace: see
    `traced_schedule`. pdl: capture with programmatic dependent launch. fp8: prefill, verify and
    flow read e4m3 weights, whose reading is the floor; `fp8_difference` says what that changes.
    fused: launches of a layer that others do, see `select.fuse`.
    """
    if frames < 1:
        raise ConfigurationError(f'frames {frames}: must be at least 1')
    bed = Bed.make(profile, device, block, fused=fused)
    loops = loops or (('while', 'sync', 'pipelined') if device != 'cpu' else ('eager',))
    prompt = bench_prompt(bed.target.cfg, 0)
    before = _baselines(bed, prompt, eager) if fp8 else None  # they need the matrices
    bed, difference = against_fp8(bed) if fp8 else (bed, None)
    bed.begin(prompt, BUDGET)
    found = parts(bed)
    planned = schedules(frames, block, lengths, trace)
    ways = _ways(bed, prompt, loops, planned, pdl)
    with watched(device) as state:
        reports, prefill, grown = _measure(bed, ways, planned, frames)
    original, published = before or _baselines(bed, prompt, eager)
    return {'profile': profile, 'device': device, 'hardware': hardware(torch.device(device)),
            'torch': torch.__version__, 'precision': precision(bed),
            'weights': 'random', 'accepted_lengths': 'forced', 'frames': frames,
            'prompt_tokens': len(prompt.ids), 'pdl': pdl, 'fused': sorted(fused), **found,
            'prefill_ms': percentiles(prefill), 'ways': reports,
            'allocations_after_warmup': grown, 'gpu_state': state, 'eager': original,
            'dflash_package': published,
            **({} if bed.fp8 is None else {'fp8': bed.fp8.report(), 'fp8_difference': difference}),
            **_ratios(reports, original)}


def _baselines(bed: Bed, prompt: BenchPrompt, frames: int
               ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the times of transformers and of the published loop, None for no frames."""
    if not frames:
        return None, None
    return (measure_original(bed.target, prompt, 17, frames),
            measure_dflash(bed.target, bed.draft, prompt, 17))


def against_fp8(bed: Bed, frames: int = 8) -> tuple[Bed, dict[str, Any]]:
    """Return the bed in fp8, and how far what it says and drives is from before."""
    from rspec_planner.evaluate.fp8_difference import difference, Reader
    prompts = [bench_prompt(bed.target.cfg, index) for index in range(frames)]
    reader = Reader(bed.target)
    expected = [reader.answers(prompt) for prompt in prompts]
    del reader  # it holds the matrices
    small = bed.quantised()
    reader = Reader(small.target, small.fp8)
    found = [reader.answers(prompt, before.text) for prompt, before in zip(prompts, expected)]
    return small, difference(small.target.cfg, expected, found)


def _ways(bed: Bed, prompt: BenchPrompt, loops: Sequence[str], planned: dict[str, Schedule],
          pdl: bool) -> dict[str, Way]:
    """Return what is compared; the first way is the reference."""
    runners = {}
    for loop in loops:
        bed.begin(prompt, BUDGET)
        runners[loop] = FrameRunner(bed.frame, loop, pdl=pdl)
    bed.begin(prompt, BUDGET)
    plain = bed.frame.plain(bed.target)
    ways = {'one token': Way(FrameRunner(plain, loops[0], pdl=pdl), None)}
    for name, schedule in planned.items():
        ways.update({f'{name}, {loop}': Way(runner, schedule) for loop, runner in
                     runners.items()})
    return ways


def allocated(device: torch.device) -> int:
    """Return how often device memory was allocated so far."""
    if device.type != 'cuda':
        return 0
    return int(torch.cuda.memory_stats(device)['allocation.all.allocated'])


def _measure(bed: Bed, ways: dict[str, Way], planned: dict[str, Schedule], frames: int
             ) -> tuple[dict[str, Any], list[float], int]:
    """
    Decode every frame in every way, in turns; return reports, prefill times, allocations.

    The text comes from decoding one token a forward, whose time is not counted, so that no way
    alone follows the prefill or closes a context that its text did not end.
    """
    numbers, first, *others = bed.frame.frame.numbers, *ways.values()
    saved = torch.zeros_like(numbers)
    prefill, grown = [], 0
    for index in range(frames):
        prompt = bench_prompt(bed.target.cfg, index)
        texts = {tokens: () for tokens in {plan.tokens[index] for plan in planned.values()}}
        bed.begin(prompt, BUDGET)
        before = allocated(bed.target.device)
        prefill.append(others[0].runner.prefill())
        saved.copy_(numbers)
        for tokens in texts:
            saved[Slot.LIMIT] = tokens
            said = Way(first.runner, None).decode(bed, saved, (), index)
            saved[Slot.LIMIT] = len(said)
            for way in (first, *others):
                if way.schedule is None or way.schedule.tokens[index] == tokens:
                    way.decode(bed, saved, said, index)
        if index:
            grown += allocated(bed.target.device) - before
    return {name: way.report() for name, way in ways.items()}, prefill, grown


def _ratios(reports: dict[str, Any], original: dict[str, Any] | None) -> dict[str, Any]:
    """Return speed-ups of every way against one token a forward, in graphs and eager."""
    plain = reports['one token']['p50']
    found: dict[str, Any] = {'reasoning_speedup_vs_graphed_ar': {
        name: round(plain / way['p50'], 2) for name, way in reports.items()}}
    if original is not None:
        per_text = original['per_token_ms'] * MEAN_TOKENS
        found['reasoning_speedup_vs_eager'] = {
            name: round(per_text / way['p50'], 2) for name, way in reports.items()}
    return found
