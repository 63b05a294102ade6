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
The persistent kernel beside the nine launches a layer, on the GPU at hand, R1 shapes.

python3 -m rspec_planner.evaluate.bench_persistent runs every part in a process of its own, since
a kernel that fails takes its process's GPU context with it. Random weights. One JSON line a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
import json
import subprocess
import sys
from time import perf_counter
import traceback
from typing import Any

import torch
from torch import Tensor

from rspec_planner.engine.cuda_graph import capture, device_ms
from rspec_planner.engine.cuda_persistent import (
    Context,
    CudaLaunch,
    FIRST,
    multiprocessors,
    PersistentFlow,
    PersistentLayers,
    PersistentVerify,
    PHASES,
)
from rspec_planner.engine.cuda_rows import half_tables, LayerWeights, Rows, RowShape
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.persistent import HEAD_DIM, PersistentPlan
from rspec_planner.engine.kernels.select import kernels_for, REFERENCE
from rspec_planner.model.config import alpamayo_r1

#: parts in their order, and the seconds after which each is given up
PARTS = {'toy': 90, 'flow': 90, 'verify': 90, 'product': 150}
CONTEXT, CAPACITY, EPS, REPEATS = 3006, 3200, 1e-6, 20


@cache
def _launch(plan: PersistentPlan, trace: bool = False, free: bool = False) -> CudaLaunch:
    """Compile a kernel once, and tell what the compiler says of it."""
    started = perf_counter()
    launch = CudaLaunch(plan, trace, free)
    told = ' '.join(launch.report.split('Function properties')[-1].split())
    print(f'# compiled in {perf_counter() - started:.1f} s: {told}', flush=True)
    return launch


class Case:
    """Random layers over a random cache, through either kind of kernels."""

    def __init__(self, plan: PersistentPlan, layers: int, rows: int, context: int,
                 capacity: int, device: str = 'cuda') -> None:
        """Draw everything."""
        self.plan, self.rows = plan, rows
        torch.manual_seed(0)

        def drawn(*sizes: int, scale: float = 1.0) -> Tensor:
            return torch.randn(sizes, device=device, dtype=torch.bfloat16) * scale

        def layer() -> LayerWeights:
            hidden, middle, wide = plan.hidden, plan.intermediate, plan.heads * HEAD_DIM
            columns = wide + 2 * plan.kv_heads * HEAD_DIM
            norms = [1 + drawn(size, scale=0.1) for size in (hidden, hidden, HEAD_DIM, HEAD_DIM)]
            return LayerWeights(
                norms[0], drawn(columns, hidden, scale=hidden ** -0.5), (norms[2], norms[3]),
                drawn(hidden, wide, scale=wide ** -0.5), norms[1],
                drawn(2 * middle, hidden, scale=hidden ** -0.5),
                drawn(hidden, middle, scale=middle ** -0.5))

        self.layers = [layer() for _ in range(layers)]
        self.caches = [(drawn(plan.kv_heads, capacity, HEAD_DIM),
                        drawn(plan.kv_heads, capacity, HEAD_DIM)) for _ in range(layers)]
        self.start = torch.tensor([context], device=device)
        self.angle, self.zero = self.start - 2000 * (context > 2000), self.start * 0
        self.tables = half_tables(capacity + rows, HEAD_DIM, 5e6, torch.device(device))
        self.own = None if plan.causal else (drawn(1, plan.kv_heads, plan.rows, HEAD_DIM),
                                             drawn(1, plan.kv_heads, plan.rows, HEAD_DIM))
        self.x = drawn(rows, plan.hidden)

    @cached_property
    def _packed(self) -> PersistentLayers:
        own = None if self.own is None else (self.own[0][0], self.own[1][0])
        context = Context(self.caches, self.tables, self.start, self.angle, own)
        return PersistentLayers(self.plan, self.layers, context, self.rows, EPS,
                                _launch(self.plan), trace=True)

    def persistent(self, layers: int, *, trace: bool = False,
                   free: bool = False) -> PersistentLayers:
        """Return the persistent kernel over the first layers, see `machine_code`."""
        runner = self._packed.first(layers, _launch(self.plan, trace, free))
        runner.hidden[:self.rows] = self.x
        return runner

    def plain(self, layers: int, exact: bool = False) -> tuple[Tensor, Callable[[], None]]:
        """Return rows and the call that runs them; exact: in fp32 through the references."""
        plan, dtype = self.plan, torch.float32 if exact else torch.bfloat16
        shape = RowShape(1, self.rows, plan.heads, plan.kv_heads, HEAD_DIM, plan.intermediate,
                         plan.hidden, EPS, 16 if plan.causal else 0)
        rows = Rows(shape, REFERENCE if exact else kernels_for(self.x.device), self.tables, dtype)
        own = None if self.own is None else tuple(x.to(dtype) for x in self.own)

        def run() -> None:
            for index in range(layers):
                weights, cache = self.layers[index], self.caches[index]
                if exact:
                    weights, cache = _wide(weights), (cache[0].float(), cache[1].float())
                view: dict[str, Any] = {'start': self.start, 'cache': cache}
                held = cache[0][None], cache[1][None]
                if own is not None:
                    view.update(own=own, causal=False, own_low=self.zero)
                    held = own[0], own[1]
                behind = self.layers[index + 1] if index + 1 < layers and not exact else None
                rows.layer(weights, rows.hidden, rows.hidden,
                           self.start if own is None else self.zero, self.angle, held, view,
                           behind, ready=index > 0 and not exact)

        rows.hidden.copy_(self.x)
        return rows.hidden, run

    def apart(self, layers: int, exact: bool = False) -> dict[str, float]:
        """Return how far the ways end up from another, relative norms."""
        runner = self.persistent(layers)
        runner()
        torch.cuda.synchronize()
        found, results = runner.hidden[:self.rows].double(), dict[str, Tensor]()
        for name, way in {'triton': False, **({'reference': True} if exact else {})}.items():
            hidden, run = self.plain(layers, way)
            run()
            results[name] = hidden.double()
        told = {f'persistent_to_{name}': _error(found, result)
                for name, result in results.items()}
        if exact:
            told['triton_to_reference'] = _error(results['triton'], results['reference'])
        return told


def _wide(weights: LayerWeights) -> LayerWeights:
    return replace(weights, input_norm=weights.input_norm.float(), qkv=weights.qkv.float(),
                   norms=(weights.norms[0].float(), weights.norms[1].float()),
                   out=weights.out.float(), post_norm=weights.post_norm.float(),
                   gate_up=weights.gate_up.float(), down=weights.down.float())


def _error(found: Tensor, expected: Tensor) -> float:
    value = float((found - expected).norm() / expected.norm())
    return value if value == value else float('inf')


def timed(ways: Mapping[str, Callable[[], None]], repeats: int = REPEATS) -> dict[str, Any]:
    """Return milliseconds of each way, captured, p50 and p99, in turns."""
    graphs = {}
    for name, body in ways.items():
        with torch.inference_mode():
            body()
        torch.cuda.synchronize()
        graphs[name] = capture(body)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 3):
        for name, graph in graphs.items():
            spent = device_ms(graph.replay)
            if turn >= 3:
                times[name].append(spent)
    return {name: {'p50': round(sorted(each)[len(each) // 2], 4), 'p99': round(max(each), 4)}
            for name, each in times.items()}


def phases(runner: PersistentLayers) -> dict[str, Any]:
    """Return cycles a layer of each phase of block 0: waited, worked, of it for weights, rows."""
    runner()
    torch.cuda.synchronize()
    assert runner.trace is not None
    marks = runner.trace.cpu()
    layers = marks[1:].view(-1, len(PHASES), marks.shape[1]).double().mean(0)
    told = {name: [round(float(count)) for count in (row[1] - row[0], row[2] - row[1], *row[3:])]
            for name, row in zip(PHASES, layers)}
    return {'cycles': int(marks[-1, 2] - marks[0, 0]), FIRST: int(marks[0, 2] - marks[0, 0]),
            'waited_worked_weights_rows': told}


def part_toy() -> dict[str, Any]:
    """Compare two layers of small shapes with fp32 arithmetic."""
    found = {}
    for name, plan, rows in (('flow', PersistentPlan.of(64, 256, 4, 2, 192, False, 8), 64),
                             ('verify', PersistentPlan.of(16, 128, 8, 2, 192, True, 9), 5)):
        found[name] = Case(plan, 2, rows, 131, 320).apart(2, exact=True)
    return found


def r1_plan(name: str) -> PersistentPlan:
    """Return the plan of a flow step or of a verify of 16 rows on this GPU."""
    cfg, blocks = alpamayo_r1(), multiprocessors(torch.device('cuda'))
    if name == 'flow':
        expert = cfg.expert
        return PersistentPlan.of(64, expert.hidden_size, expert.num_heads, cfg.text.num_kv_heads,
                                 expert.intermediate_size, False, blocks)
    text = cfg.text
    return PersistentPlan.of(16, text.hidden_size, text.num_heads, text.num_kv_heads,
                             text.intermediate_size, True, blocks)


def part_layers(name: str) -> dict[str, Any]:
    """Compare and time all layers of a flow step or of a verify, and nothing around them."""
    plan = r1_plan(name)
    case = Case(plan, 36, plan.rows, CONTEXT, CAPACITY)
    steps: dict[str, Callable[[], Any]] = {
        'one_layer': lambda: case.apart(1, exact=True),
        'all_layers': lambda: case.apart(36),
        'runs_that_differ': lambda: _unlike(case),
        'ms': lambda: timed({'triton': case.plain(36)[1], 'persistent': case.persistent(36)}),
        'phases': lambda: phases(case.persistent(36, trace=True)),
        'ms_without_barriers': lambda: timed({'free': case.persistent(36, free=True)})}
    if name == 'verify':
        steps['rows_that_differ_alone'] = lambda: _alone(case)
    found: dict[str, Any] = {'plan': str(plan)}
    for step, run in steps.items():
        found[step] = _tried(run)
        print(f'# {name} {step}: {json.dumps(found[step])}', flush=True)
        torch.cuda.empty_cache()
    return found


def _tried(run: Callable[[], Any]) -> Any:
    """Return what a step gave, or how it failed."""
    try:
        with torch.inference_mode():
            return run()
    except Exception as error:  # the other steps must go on
        traceback.print_exc()
        return f'{type(error).__name__}: {error}'


def _unlike(case: Case) -> int:
    """Return how many of 20 runs on the same rows do not have the bits of the first."""
    runner, seen = case.persistent(len(case.layers)), list[Tensor]()
    for _ in range(REPEATS):
        runner.hidden[:case.rows] = case.x
        runner()
        seen.append(runner.hidden.clone())
    return sum(not torch.equal(seen[0], other) for other in seen)


def _alone(case: Case) -> dict[str, Any]:
    """Return how many rows of a block have other bits alone, and by how much at most."""
    runner = case.persistent(len(case.layers))
    runner()
    together, start, angle = runner.hidden.clone(), case.start.clone(), case.angle.clone()
    one = runner.with_rows(1, {})
    differ, apart = 0, 0.0
    for row in range(case.rows):
        case.start.copy_(start + row)
        case.angle.copy_(angle + row)
        one.hidden[:1] = case.x[row]
        one()
        differ += not torch.equal(one.hidden[0], together[row])
        apart = max(apart, float((one.hidden[0].float() - together[row].float()).abs().max()))
    case.start.copy_(start)
    case.angle.copy_(angle)
    return {'rows': case.rows, 'differ': differ, 'most_apart': apart}


def part_product() -> dict[str, Any]:
    """Time the verify and the whole flow of the product, head and entry included."""
    from rspec_planner.evaluate.bench_decode import Bed, BUDGET, parts
    from rspec_planner.evaluate.bench_workload import bench_prompt
    bed = Bed.make('alpamayo-r1', 'cuda')
    bed.begin(bench_prompt(bed.target.cfg, 0), BUDGET)
    found: dict[str, Any] = {'before': parts(bed)}
    frame = bed.frame
    with torch.inference_mode():
        numbers = frame.frame.numbers
        numbers[Slot.CONTEXT] = numbers[Slot.P] + 1
        numbers[Slot.CONTEXT_ANGLE] = numbers[Slot.CONTEXT] + numbers[Slot.ROPE_DELTA]
        frame.frame.noise.normal_()
        frame.verify.ids.random_(1000)
        verify, flow = PersistentVerify(frame.verify), PersistentFlow(frame.flow)
        frame.verify()
        best = frame.verify.best.clone()
        taps = frame.verify._staged.double()
        verify()
        found['choices_equal'] = int((verify.best == best).sum())
        found['taps_apart'] = _error(verify._staged.double(), taps)
        frame.flow()
        actions = frame.frame.actions.double()
        flow()
        found['actions_apart'] = _error(frame.frame.actions.double(), actions)
    found['verify_ms'] = timed({'triton': frame.verify, 'persistent': verify})
    found['flow10_ms'] = timed({'triton': frame.flow, 'persistent': flow})
    floors = found['before']
    found['verify_over_floor'] = found['verify_ms']['persistent']['p50'] / floors[
        'weight_floor_ms']
    found['flow_over_floor'] = found['flow10_ms']['persistent']['p50'] / floors['flow_floor_ms']
    return found


def run_part(name: str) -> dict[str, Any]:
    """Run one part in this process."""
    started = perf_counter()
    run = {'toy': part_toy, 'product': part_product}.get(name, lambda: part_layers(name))
    found = _tried(run)
    told = found if isinstance(found, dict) else {'error': found}
    return {'part': name, 'seconds': round(perf_counter() - started, 1), **told}


def main(names: Sequence[str]) -> int:
    """Run the parts named, all without a name; `--here` runs one in this process."""
    if names[:1] == ['--here']:
        print(json.dumps(run_part(names[1]), default=str), flush=True)
        return 0
    failed = 0
    for name in names or list(PARTS):
        try:
            code = subprocess.run([sys.executable, '-m', __spec__.name, '--here', name],
                                  timeout=PARTS[name], check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            failed += 1
            print(json.dumps({'part': name, 'error': f'exit code {code}'}), flush=True)
    return failed


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
