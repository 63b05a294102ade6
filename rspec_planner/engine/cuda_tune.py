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
Choose how the small products are cut on the GPU at hand, before anything is captured.

Every candidate runs over the weights of all layers in turn inside a graph, so that the weights
come from memory and not from a cache, as they do in a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
import json
from pathlib import Path

import torch
from torch import Tensor

from rspec_planner.engine.cuda_graph import capture, device_ms
from rspec_planner.engine.kernels.linear import (
    default_plan,
    linear,
    MAX_SPLIT,
    MEASURED,
    Plan,
    PLANS,
    row_tile,
    SHARED,
    shared_bytes,
)
from rspec_planner.engine.kernels.linear import product as apart
from rspec_planner.engine.kernels.rows import gather
from rspec_planner.errors import EngineError

REPEATS = 5
#: programs of a launch that are worth trying on a GPU of about 132 multiprocessors
_FEW, _MANY = 96, 800


@dataclass(frozen=True)
class Product:
    """One kind of product: the weights of all layers that have it, and its options."""

    name: str
    weights: Sequence[Tensor]
    rows: int
    norm: bool = False
    gated: bool = False
    apart: bool = False  # its parts are left to the kernel behind it

    @property
    def columns(self) -> int:
        """Return N."""
        return len(self.weights[0]) // (2 if self.gated else 1)

    @property
    def key(self) -> tuple[int, int, int, bool]:
        """Return the key of its plan."""
        return self.columns, self.weights[0].shape[1], row_tile(self.rows), self.gated

    @property
    def floor_us(self) -> float:
        """Return the bytes of one weight, in microseconds of 4.26 TB/s (H200, measured)."""
        weight = self.weights[0]
        return weight.numel() * weight.element_size() / 4.26e6


def candidates(product: Product, limit: int = 7) -> list[Plan]:
    """Return the plans worth a measurement, the default first, then cuts, then depths."""
    columns, depth, bm, gated = product.key
    found, deeper = [default_plan(columns, depth, bm, gated)], []
    for bn in (16, 32, 64, 128):
        for split in (1, 2, 4, 8):
            programs = -(-columns // bn) * split
            if (gated and (split > 1 or bn > 64)) or not _FEW <= programs <= _MANY:
                continue
            if bm >= 64 and bn < 32:
                continue
            bk = 64 if bm * 2 + bn * (1 + gated) > 256 or depth % 128 else 128
            deep = 6 if bn * bk * (1 + gated) <= 4096 else 4
            found.append(Plan(bn, bk, split, deep))
            if gated:  # short enough for two programs on a multiprocessor
                found.append(Plan(bn, bk, split, 3))
            deeper.append(Plan(bn, bk, split, deep + 1, 8 if bm >= 64 else 4))
    size = product.weights[0].element_size()
    return [plan for plan in dict.fromkeys(found + deeper)
            if shared_bytes(plan, bm, gated, size) < SHARED][:limit]


def measure(product: Product, plan: Plan) -> float:
    """Return the microseconds of one product under a plan; infinity where it does not fit."""
    weight = product.weights[0]
    x = torch.randn((product.rows, weight.shape[1]), device=weight.device).to(weight.dtype)
    out = torch.empty((product.rows, product.columns), dtype=weight.dtype, device=weight.device)
    norm = torch.ones_like(x[0]) if product.norm else None

    ones = torch.ones_like(out[0])
    parts = torch.empty((MAX_SPLIT if product.apart else 0, *out.shape), device=x.device)

    def run() -> None:
        for each in product.weights:
            if product.apart:
                count = apart(x, each, parts, plan=plan)
                gather(parts[:count], out, out, ones, out, 1e-6)
                continue
            linear(x, each, out, norm=norm, eps=1e-6, gated=product.gated, plan=plan)

    try:
        run()
    except Exception as error:  # the compiler's own kinds: shared memory, registers
        if 'OutOfResources' in type(error).__name__:
            return float('inf')
        raise
    return median_us(run) / len(product.weights)


def median_us(run: Callable[[], None]) -> float:
    """Return the median microseconds of launches that have run before, captured in a graph."""
    graph = capture(run)
    times = sorted(device_ms(graph.replay) for _ in range(REPEATS))
    return 1e3 * times[REPEATS // 2]


def tune(products: Sequence[Product], limit: int = 7) -> list[dict[str, object]]:
    """
    Choose the fastest plan of each product; return what was measured, the best first.

    On the GPU that the built-in plans were measured on, in whole frames, they stay.
    """
    report: list[dict[str, object]] = []
    for product in products:
        if product.key in MEASURED and 'H200' in torch.cuda.get_device_name():
            report.append({'product': product.name, 'key': list(product.key),
                           'built_in': asdict(MEASURED[product.key])})
            continue
        found = sorted((measure(product, plan), index, plan)
                       for index, plan in enumerate(candidates(product, limit)))
        PLANS[product.key] = found[0][2]
        report.append({'product': product.name, 'key': list(product.key),
                       'floor_us': round(product.floor_us, 2),
                       'plans': [{'us': round(us, 2), **asdict(plan)} for us, _, plan in found]})
    return report


def save_plans(path: Path) -> None:
    """Write the plans in use as JSON."""
    rows = [{'key': list(key), **asdict(plan)} for key, plan in PLANS.items()]
    path.write_text(json.dumps(rows, indent=1) + '\n', encoding='utf-8')


def load_plans(path: Path) -> None:
    """Read what `save_plans` wrote; EngineError for anything else."""
    try:
        for row in json.loads(path.read_text(encoding='utf-8')):
            columns, depth, bm, gated = row.pop('key')
            PLANS[columns, depth, bm, gated] = Plan(**row)
    except (ValueError, TypeError, KeyError) as error:
        raise EngineError(f'{path}: not a file of plans ({error}); write it anew by tuning'
                          ) from None
