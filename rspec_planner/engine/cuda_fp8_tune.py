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
Choose how the small fp8 products are cut on the GPU at hand, see `cuda_tune`.

An fp8 weight has half the bytes, so a plan that fits a bf16 product leaves too little in flight
here: the plans are measured apart, over the weights of all layers in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
import json
from pathlib import Path

import torch
from torch import Tensor

from rspec_planner.engine.cuda_fp8 import FASTEST, ROWS
from rspec_planner.engine.cuda_tune import median_us
from rspec_planner.engine.kernels.fp8_linear import COLUMNS, plan8, PLANS8, product8
from rspec_planner.engine.kernels.fp8_reference import E4M3
from rspec_planner.engine.kernels.linear import Plan, row_tile, SHARED, shared_bytes
from rspec_planner.errors import EngineError

#: programs of a launch worth trying on about 132 multiprocessors
_FEW, _MANY = 96, 540
#: shared memory of a program that shares its multiprocessor with another, and of one that does not
_HALF, _WHOLE = SHARED // 2 - 2048, SHARED - 2048
_DEEPEST = 8


@dataclass(frozen=True)
class Fp8Product:
    """One kind of product: the e4m3 weights of all layers that have it, with their factors."""

    name: str
    weights: Sequence[Tensor]
    scales: Sequence[Tensor]
    rows: int
    gated: bool = False

    @property
    def key(self) -> tuple[int, int, int, bool]:
        """Return the key of its plan."""
        weight = self.weights[0]
        return len(weight) // (1 + self.gated), weight.shape[1], row_tile(self.rows), self.gated

    @property
    def floor_us(self) -> float:
        """Return the bytes of one weight, in microseconds of 4.26 TB/s (H200, measured)."""
        return self.weights[0].numel() / 4.26e6


def candidates(key: tuple[int, int, int, bool], limit: int = 6) -> list[Plan]:
    """Return the plans worth a measurement, the default first."""
    columns, depth, bm, gated = key
    found = [plan8(*key)]
    for room in (_HALF, _WHOLE):
        for split in (1, 2, 4, 8):
            programs = -(-columns // COLUMNS) * split
            if (gated and split > 1) or not _FEW <= programs <= _MANY:
                continue
            if room == _WHOLE and programs > 264:
                continue
            for bk in (256, 128, 64):
                if depth % bk or (bk == 64 and depth % 128 == 0):
                    continue
                one = shared_bytes(Plan(COLUMNS, bk, split, 1), bm, gated, 1)
                stages = min(room // one, _DEEPEST, depth // (bk * split))
                if stages >= 2:
                    found.append(Plan(COLUMNS, bk, split, stages))
    return list(dict.fromkeys(found))[:limit]


def measure(product: Fp8Product, plan: Plan) -> float:
    """Return the microseconds of one product under a plan; infinity where it does not fit."""
    columns, depth, _, _ = product.key
    device = product.weights[0].device
    x = torch.randn((product.rows, depth), device=device).to(E4M3)
    rows = torch.ones(product.rows, device=device)
    out = torch.empty((product.rows, columns), dtype=torch.bfloat16, device=device)

    def run() -> None:
        for weight, scale in zip(product.weights, product.scales):
            product8(x, rows, weight, scale, out, gated=product.gated, plan=plan)

    try:
        run()
    except Exception as error:  # the compiler's own kinds: shared memory, registers
        if 'OutOfResources' in type(error).__name__:
            return float('inf')
        raise
    return median_us(run) / len(product.weights)


def tune(products: Sequence[Fp8Product], limit: int = 6) -> list[dict[str, object]]:
    """Choose the fastest plan of each product; return what was measured, the best first."""
    report: list[dict[str, object]] = []
    for product in products:
        found = sorted((measure(product, plan), index, plan)
                       for index, plan in enumerate(candidates(product.key, limit)))
        PLANS8[product.key] = found[0][2]
        report.append({'product': product.name, 'key': list(product.key),
                       'floor_us': round(product.floor_us, 2),
                       'plans': [{'us': round(us, 2), **asdict(plan)} for us, _, plan in found]})
    return report


def save_plans(path: Path) -> None:
    """Write the plans in use, and which rows are fastest, as JSON."""
    rows = [{'key': list(key), **asdict(plan)} for key, plan in PLANS8.items()]
    path.write_text(json.dumps({'rows': FASTEST, 'plans': rows}, indent=1) + '\n',
                    encoding='utf-8')


def load_plans(path: Path) -> None:
    """Read what `save_plans` wrote; EngineError for anything else."""
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
        chosen = {name: ROWS[ROWS.index(found['rows'][name])] for name in FASTEST}
        plans = {(columns, depth, bm, gated): Plan(**row) for row in found['plans']
                 for columns, depth, bm, gated in [row.pop('key')]}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f'{path}: not a file of fp8 plans ({error}); write it anew by rspec '
                          'bench fp8 --plans') from None
    FASTEST.update(chosen)
    PLANS8.update(plans)
