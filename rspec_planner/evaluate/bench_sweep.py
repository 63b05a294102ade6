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
Try what cannot be tuned product by product: plans in place, cuts of attention.

Every variant is a whole verify or a whole flow in a graph, so that what one kernel leaves in the
cache for the next counts. What a part's kernels take, by name, comes from the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, ProfilerActivity

from rspec_planner.engine.cuda_graph import capture
from rspec_planner.engine.cuda_vision import Encoder
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.evaluate.bench import hardware
from rspec_planner.evaluate.bench_decode import Bed, BUDGET, repeat
from rspec_planner.evaluate.bench_kernels import products
from rspec_planner.evaluate.bench_workload import bench_prompt

#: chunk, step, rows, warps, stages
CUTS = {'causal': ((256, 64, 16, 4, 3), (384, 64, 16, 4, 3), (512, 64, 16, 4, 4),
                   (256, 32, 16, 4, 4), (192, 64, 16, 4, 3), (256, 64, 16, 4, 4)),
        'all': ((512, 64, 32, 4, 3), (512, 64, 32, 4, 4), (448, 64, 32, 4, 3),
                (384, 64, 32, 4, 3), (512, 128, 32, 4, 3), (512, 128, 32, 8, 3),
                (512, 64, 64, 8, 3), (768, 64, 32, 4, 4), (512, 32, 32, 4, 4))}


def bench_sweep(name: str = 'alpamayo-r1', device: str = 'cuda',
                plans: Path | None = None) -> dict[str, Any]:
    """Return milliseconds of every variant of verify and flow, and the kernels of each part."""
    from rspec_planner.engine.cuda_tune import load_plans, tune
    if plans is not None and plans.is_file():
        load_plans(plans)
    bed = Bed.make(name, device)
    bed.begin(bench_prompt(bed.target.cfg, 0), BUDGET)
    frame = bed.frame
    begun = frame.frame.numbers.clone()

    def prefill() -> None:
        """Begin the same frame again: each prefill moves the anchor, in the end too far."""
        frame.frame.numbers.copy_(begun)
        frame.prefill()

    with torch.inference_mode():
        prefill()
        frame.kernels.begin(frame.frame.numbers, frame.frame.tokens, None, frame.verify.ids,
                            (-1, -1))
        frame.frame.at(Slot.CONTEXT).copy_(frame.frame.at(Slot.P) + 18)
        frame.frame.at(Slot.CONTEXT_ANGLE).copy_(
            frame.frame.at(Slot.CONTEXT) + frame.frame.at(Slot.ROPE_DELTA))
    encoder = Encoder(bed.target, frame.prefill)
    parts: dict[str, Callable[[], None]] = {'verify': frame.verify, 'flow': frame.flow}
    found: dict[str, Any] = {'hardware': hardware(torch.device(device)),
                             'before': {part: _ms(bed, work, 8) for part, work in parts.items()}}
    found['tuned'] = tune([product for product in products(bed) if product.apart], limit=8)
    found['tuned_ms'] = {part: _ms(bed, work, 8) for part, work in parts.items()}
    found['cuts'] = cuts(bed, parts)
    found['after_ms'] = {part: _ms(bed, work, 8) for part, work in parts.items()}
    found['encode_ms'] = repeat(bed, encoder)['p50']
    found['prefill_ms'] = repeat(bed, prefill)['p50']
    fused, encoder.tower = encoder.tower, lambda patches: bed.target.vision(
        patches, bed.target.cfg.patch_grid)
    found['encode_module_ms'] = repeat(bed, encoder)['p50']
    encoder.tower = fused
    found['kernels'] = {part: kernels_of(work) for part, work in {
        **parts, 'prefill': prefill, 'encode': encoder, 'draft': frame.draft}.items()
        if work is not None}
    return found


def _ms(bed: Bed, work: Callable[[], None], repeats: int) -> float:
    try:
        return round(repeat(bed, work, repeats)['p50'], 3)
    except Exception as error:  # the compiler's own kinds: shared memory, registers
        return float('nan') if 'Resources' in str(type(error)) else _raise(error)


def _raise(error: Exception) -> float:
    raise error


def cuts(bed: Bed, parts: dict[str, Callable[[], None]]) -> dict[str, dict[str, float]]:
    """Return milliseconds by the cut of attention; the fastest stays in use."""
    from rspec_planner.engine.kernels import attention
    found: dict[str, dict[str, float]] = {'verify': {}, 'flow': {}}
    for kind, part in (('causal', 'verify'), ('all', 'flow')):
        best = (float('inf'), attention.CUTS[kind])
        for cut in CUTS[kind]:
            attention.CUTS[kind] = attention.Cut(*cut)
            spent = _ms(bed, parts[part], 8)
            found[part][str(cut)] = spent
            if spent < best[0]:
                best = spent, attention.CUTS[kind]
        attention.CUTS[kind] = best[1]
    return found


@contextmanager
def _profiled() -> Iterator[Any]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield profiler
        torch.cuda.synchronize()


def kernels_of(work: Callable[[], None], most: int = 14) -> Sequence[tuple[str, int, float]]:
    """Return name, calls and microseconds in all of a part's kernels, the longest first."""
    with torch.inference_mode():
        work()
    graph = capture(work)
    graph.replay()
    torch.cuda.synchronize()
    with _profiled() as profiler:
        graph.replay()
    rows = [(event.key[:90], event.count, round(float(event.device_time_total), 1))
            for event in profiler.key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:most]
