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
Every choice of launches that do the work of two (`select.fuse`), paired, on the GPU at hand.

python3 -m rspec_planner.evaluate.bench_fused runs each part in a process of its own, since blocks
that would wait for ever must not take the rest along. `check`: do the bits repeat, are they those
of the launches apart, has a row alone those it has among 16. `times`: verify of 16, one token and
ten flow steps, every way in turns. `texts`: does the loop say something else than one token a
forward. Random weights. One JSON line a part, a table last. `--profile tiny --device cpu` runs the
references: correctness only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
import json
import subprocess
import sys
from time import perf_counter
import traceback
from typing import Any

import torch
from torch import Tensor

from rspec_planner.engine.cuda_graph import capture, Launches
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.select import fuse, FUSIBLE, Kernels
from rspec_planner.evaluate.bench import hardware, percentiles
from rspec_planner.evaluate.bench_decode import Bed, bench_decode, BUDGET, weight_bytes
from rspec_planner.evaluate.bench_workload import bench_prompt

#: parts in their order, and the seconds after which each is given up
PARTS = {'check': 200, 'times': 240, 'texts': 120}
REPEATS, FLOWS = 60, 20
#: bytes a second of a large copy, H200 (docs/performance.md), for the ratio to the floor
BANDWIDTH = 4.2e12


@dataclass(frozen=True)
class Variant:
    """One way of launching a layer."""

    launches: tuple[str, ...] = ()
    gather_warps: int = 0  # of the gather that is a launch of its own, 0 for the built-in ones
    joiners: int = 0  # most blocks that divide a join, 0 for the built-in number
    cuts: dict[str, tuple[int, int, int, int, int]] = field(default_factory=dict)
    like: str = 'today'  # the variant whose bits it must have, empty for none

    def kernels(self, plain: Kernels) -> Kernels:
        """Return this variant's kernels."""
        if self.gather_warps and plain.gather.__module__.endswith('rows'):
            plain = replace(plain, gather=partial(plain.gather, warps=self.gather_warps))
        return fuse(plain, self.launches)

    @contextmanager
    def in_use(self, cuda: bool) -> Iterator[None]:
        """Launch, or capture, with this variant's cuts and joiners in this block."""
        if not cuda:
            yield
            return
        from rspec_planner.engine.kernels import attention, mix
        cuts, joiners = dict(attention.CUTS), mix.JOINERS
        attention.CUTS.update({name: attention.Cut(*cut) for name, cut in self.cuts.items()})
        mix.JOINERS = self.joiners or joiners
        try:
            yield
        finally:
            attention.CUTS.update(cuts)
            mix.JOINERS = joiners


ALL = tuple(FUSIBLE)
#: a sum by the product's four warps rounds otherwise than one by eight: 'gather4' is its twin
VARIANTS = {
    'today': Variant(), 'gather4': Variant(gather_warps=4, like=''),
    'join': Variant(('join',)), 'join, one block': Variant(('join',), joiners=1),
    'turn': Variant(('turn',)), 'join turn': Variant(('join', 'turn')),
    'sums': Variant(('sums',), like='gather4'),
    'join sums': Variant(('join', 'sums'), like='gather4'),
    'turn sums': Variant(('turn', 'sums'), like='gather4'),
    'all': Variant(ALL, like='gather4'),
    **{f'all, {cut}': Variant(ALL, cuts={'causal': cut}, like='')
       for cut in ((192, 64, 16, 4, 3), (128, 64, 16, 4, 4))},
    **{f'all, {cut}': Variant(ALL, cuts={'all': cut}, like='')
       for cut in ((256, 64, 64, 8, 3), (256, 64, 32, 4, 3), (384, 64, 32, 4, 3),
                   (512, 64, 64, 8, 3))}}


class Bench:
    """A prefilled frame whose verify, one-token step and flow run any variant's kernels."""

    def __init__(self, profile: str, device: str) -> None:
        self.bed = bed = Bed.make(profile, device)
        self.cuda = device != 'cpu'
        bed.begin(bench_prompt(bed.target.cfg, 0), BUDGET)
        self.frame = frame = bed.frame
        self.one = frame.plain(bed.target)
        self.plain = frame.kernels
        numbers = frame.frame.numbers
        with torch.inference_mode():
            frame.prefill()
            frame.kernels.begin(numbers, frame.frame.tokens, None, frame.verify.ids, (-1, -1))
            frame.verify.ids.random_(1000)
            self.one.verify.ids.copy_(frame.verify.ids[:1])
            numbers[Slot.CONTEXT] = numbers[Slot.P] + 18
            numbers[Slot.CONTEXT_ANGLE] = numbers[Slot.CONTEXT] + numbers[Slot.ROPE_DELTA]
            frame.frame.noise.normal_()
        self.start = int(numbers[Slot.START])

    def use(self, variant: Variant) -> None:
        """Run a variant from now on."""
        kernels = variant.kernels(self.plain)
        for part in (self.frame.verify, self.one.verify, self.frame.flow):
            part.use(kernels)

    def results(self) -> list[Tensor]:
        """Run everything over poisoned rows; return copies of all that it wrote."""
        frame, cache = self.frame, self.frame.cache
        rows = slice(self.start, self.start + len(frame.verify.ids))
        for held in (cache.keys, cache.values):
            held[:, :, :, rows] = float('nan') if self.cuda else 1e4
        for held in frame.flow.own:
            held.fill_(float('nan'))
        frame.verify()
        found = [frame.verify.best, frame.verify.runner.hidden, cache.keys[:, :, :, rows],
                 cache.values[:, :, :, rows]]
        found = [each.clone() for each in found]
        self.one.verify()
        found += [self.one.verify.best.clone(), self.one.verify.runner.hidden.clone()]
        frame.flow()
        return found + [frame.frame.actions.clone(), frame.flow.rows.hidden.clone()]

    def alone(self) -> int:
        """Return how many rows of a verify have other bits one token a forward."""
        frame, numbers = self.frame, self.frame.frame.numbers
        frame.verify()
        together, ids = frame.verify.runner.hidden.clone(), frame.verify.ids.clone()
        kept = numbers.clone()
        differ = 0
        for row in range(len(ids)):
            self.one.verify.ids.copy_(ids[row:row + 1])
            self.one.verify()
            differ += not torch.equal(self.one.verify.runner.hidden[0], together[row])
            numbers[Slot.START] += 1
            numbers[Slot.ANGLE] += 1
        numbers.copy_(kept)
        self.one.verify.ids.copy_(ids[:1])
        return differ


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the largest relative distance of what was written."""
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-9))
               for a, b in zip(one, other) if a.dtype.is_floating_point)


def part_check(bench: Bench) -> dict[str, Any]:
    """Compare every variant with its twin, itself and its own rows alone."""
    kept: dict[str, list[Tensor]] = {}
    found: dict[str, Any] = {}
    for name, variant in VARIANTS.items():
        with variant.in_use(bench.cuda), torch.inference_mode():
            try:
                bench.use(variant)
                results = bench.results()
                again = sum(not _same(results, bench.results()) for _ in range(4))
                found[name] = {'runs_that_differ': again, 'rows_that_differ_alone': bench.alone()}
            except Exception as error:  # the others must go on
                traceback.print_exc()
                found[name] = {'error': f'{type(error).__name__}: {error}'[:300]}
                continue
        if name in ('today', 'gather4'):
            kept[name] = results
        if variant.like:
            found[name]['bits_equal'] = _same(results, kept[variant.like])
        found[name]['apart_from_today'] = _apart(results, kept['today'])
        print(f'# {name}: {json.dumps(found[name])}', flush=True)
    return found


def _graph(bench: Bench, body: Callable[[], None]) -> Any:
    """Return a part that replays a body."""
    if not bench.cuda:
        return Launches(body)
    with torch.inference_mode():
        body()
    torch.cuda.synchronize()
    return capture(body)


def _timed(bench: Bench, part: Any) -> float:
    """Return the milliseconds of one replay."""
    if not bench.cuda:
        started = perf_counter()
        part.replay()
        return 1e3 * (perf_counter() - started)
    begin, end = (torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                  for _ in range(2))
    begin.record()
    part.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def part_times(bench: Bench, without: Sequence[str] = ()) -> dict[str, Any]:
    """Time every variant but some, one behind the other in every turn."""
    parts: dict[str, dict[str, Any]] = {'verify16': {}, 'one_token': {}, 'flow10': {}}
    for name, variant in VARIANTS.items():
        if name in without:
            continue
        with variant.in_use(bench.cuda):
            try:
                bench.use(variant)
                made = [_graph(bench, body) for body in (
                    bench.frame.verify, bench.one.verify, bench.frame.flow)]
            except Exception as error:  # the compiler's own kinds: shared memory, registers
                print(f'# {name}: {type(error).__name__}: {error}'[:300], flush=True)
                continue
            for graphs, graph in zip(parts.values(), made):
                graphs[name] = graph
    times = {part: {name: list[float]() for name in graphs} for part, graphs in parts.items()}
    for turn in range((REPEATS + 3) if bench.cuda else 1):
        for part, graphs in parts.items():
            if part == 'flow10' and turn >= FLOWS + 3:
                continue
            for name, graph in graphs.items():
                spent = _timed(bench, graph)
                if turn >= 3 or not bench.cuda:
                    times[part][name].append(spent)
    floor = 1e3 * weight_bytes(bench.bed)['verify'] / BANDWIDTH
    return {'hardware': hardware(bench.bed.target.device), 'verify_floor_ms': floor,
            'ms': {part: {name: _paired(spent, ways['today']) for name, spent in ways.items()}
                   for part, ways in times.items()},
            'kernels': _kernels(bench, without)}


def _paired(spent: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Return percentiles, and the median of the differences from the first way in each turn."""
    apart = sorted(a - b for a, b in zip(spent, base))
    return {**percentiles(list(spent)), 'to_today': apart[len(apart) // 2]}


def _kernels(bench: Bench, without: Sequence[str]) -> dict[str, Any]:
    """Return the kernels of a verify and of a flow, by the profiler."""
    from rspec_planner.evaluate.bench_sweep import kernels_of
    found: dict[str, Any] = {}
    for name in ('today', 'all') if bench.cuda else ():
        if name in without:
            continue
        bench.use(VARIANTS[name])
        for part, body in (('verify16', bench.frame.verify), ('flow10', bench.frame.flow)):
            found[f'{part}, {name}'] = kernels_of(body, 9)
    return found


def part_texts(profile: str, device: str) -> dict[str, Any]:
    """Decode frames with all launches fused, and compare with one token a forward."""
    found = bench_decode(profile, device, 20 if device != 'cpu' else 2, lengths=(4.6,), eager=0,
                         loops=('while',) if device != 'cpu' else ('eager',), fused=FUSIBLE)
    told = ('ways', 'verify_over_floor', 'flow_ms', 'draft_block_ms', 'target_step_ms',
            'allocations_after_warmup')
    return {name: found[name] for name in told}


def table(found: dict[str, Any]) -> Iterator[str]:
    """Return the lines of the table of times and bits."""
    told, checked = found.get('times', {}).get('ms', {}), found.get('check', {})
    heads = ''.join(f'{part + " p50 p99 to today":>30s}' for part in told)
    yield f'{"way":34s}{heads}  bits'
    for name in VARIANTS:
        cells = (told[part].get(name) for part in told)
        shown = ''.join('' if cell is None else
                        f'{cell["p50"]:12.3f}{cell["p99"]:9.3f}{cell["to_today"]:+9.3f}'
                        for cell in cells)
        yield f'{name:34s}{shown}  {json.dumps(checked.get(name, {}))}'


def run_part(name: str, profile: str, device: str, without: Sequence[str]) -> dict[str, Any]:
    """Run one part in this process."""
    if name == 'texts':
        return part_texts(profile, device)
    bench = Bench(profile, device)
    return part_check(bench) if name == 'check' else part_times(bench, without)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, or those named; return how many failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[1])
    parser.add_argument('parts', nargs='*', choices=[[], *PARTS], default=[])
    parser.add_argument('--profile', default='alpamayo-r1')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--out', help='a JSON file that receives everything')
    parser.add_argument('--without', default='', help='variants to leave out, between semicolons')
    parser.add_argument('--here', help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.here:
        print('=' + json.dumps(run_part(
            given.here, given.profile, given.device, given.without.split(';')), default=str),
            flush=True)
        return 0
    found: dict[str, Any] = {}
    for name in given.parts or PARTS:
        command = [sys.executable, '-m', 'rspec_planner.evaluate.bench_fused', '--here', name,
                   '--profile', given.profile, '--device', given.device,
                   '--without', ';'.join([given.without, *_unsound(found.get('check'))])]
        found[name] = _child(command, PARTS[name])
        print(json.dumps({'part': name, **found[name]}), flush=True)
    if given.out:
        with open(given.out, 'w', encoding='utf-8') as file:
            json.dump(found, file, indent=1)
    print('\n'.join(table(found)))
    return sum('error' in part for part in found.values())


def _unsound(checked: dict[str, Any] | None) -> list[str]:
    """Return the variants that failed a check, or that it did not reach."""
    return [] if checked is None else [
        name for name in VARIANTS if 'runs_that_differ' not in checked.get(name, {})]


def _child(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return what a process printed behind '=', passing the rest on."""
    try:
        done = subprocess.run(command, timeout=seconds, check=False, stdout=subprocess.PIPE,
                              text=True)
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b''
        text = said if isinstance(said, str) else said.decode()
        print(text, flush=True)
        reached = (line[2:].split(': ', 1) for line in text.splitlines()
                   if line.startswith('# ') and line.endswith('}'))
        return {'error': f'not done after {seconds:g} s',
                **{name: json.loads(told) for name, told in reached}}
    told = done.stdout.splitlines()
    print('\n'.join(line for line in told if not line.startswith('=')), flush=True)
    answers = [line[1:] for line in told if line.startswith('=')]
    if done.returncode or not answers:
        return {'error': f'exit code {done.returncode}'}
    result: dict[str, Any] = json.loads(answers[-1])
    return result


if __name__ == '__main__':
    sys.exit(main())
