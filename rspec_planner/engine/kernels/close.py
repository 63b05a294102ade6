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
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,misc"
"""
A split product whose last blocks add its parts and a residual up, and norm the sum.

One row each, see `arrive`. The norm's sum is that of `rows.gather` by as many warps.
"""

from __future__ import annotations

from torch import Tensor
import triton
import triton.language as tl

from rspec_planner.engine.kernels.arrive import arrivals, arrive, multiprocessors, wait
from rspec_planner.engine.kernels.launch import options
from rspec_planner.engine.kernels.linear import (
    _most_shared,
    _walk,
    fitted,
    Plan,
    plan_of,
    row_tile,
)
from rspec_planner.engine.kernels.rows import _sum_row

#: most blocks that divide a sum
SUMMERS = 64


@triton.jit(do_not_specialize=['M', 'shares'])
def _close(x, weight, parts, residual, total, norm, out, counter, eps,
           x_stride, residual_stride, total_stride, M, shares,
           N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           BK: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    tile, part = tl.program_id(0), tl.program_id(1)
    rows, cols = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    TILES: tl.constexpr = (K + BK - 1) // BK
    PER: tl.constexpr = (TILES + SPLIT - 1) // SPLIT
    COUNT: tl.constexpr = (N + BN - 1) // BN * SPLIT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc, _ = _walk(x, weight, x_stride, rows, cols, part * PER,
                   tl.minimum(part * PER + PER, TILES), M, N, K, BM, BN, BK, False)
    spot = (part * M + rows)[:, None] * N + cols[None, :]
    tl.store(parts + spot, acc, mask=(rows < M)[:, None] & (cols < N)[None, :])
    share, goal, seen = arrive(counter, COUNT, shares)
    if share >= 0:
        wait(counter, goal, seen)
        for row in range(share, M, shares):
            _sum_row(parts, residual, total, norm, out, row, eps, residual_stride, total_stride,
                     M * N, N, WIDE, SPLIT, '.cg')  # parts of other blocks


def close(x: Tensor, weight: Tensor, parts: Tensor, residual: Tensor, total: Tensor,
          norm: Tensor | None, out: Tensor, eps: float, *, width: int = 0,
          plan: Plan | None = None) -> None:
    """Fill total (M, N) and out (M, N), see `reference.close`; parts (S, M, N) is room."""
    rows, depth = x.shape
    columns, bm = len(weight), row_tile(max(rows, width))
    plan = fitted(plan or plan_of(columns, depth, bm, False), bm, False, x.element_size(),
                  _most_shared(x.device))
    grid = triton.cdiv(columns, plan.bn), plan.split
    shares = max(1, min(rows, SUMMERS, grid[0] * grid[1], multiprocessors(x.device) - 1))
    _close[grid](
        x, weight, parts, residual, total, norm, out,
        arrivals(x.device, 'product', grid[0] * grid[1], 1), eps, x.stride(0), residual.stride(0),
        total.stride(0), rows, shares, N=columns, K=depth, BM=bm, BN=plan.bn, BK=plan.bk,
        SPLIT=plan.split, WIDE=triton.next_power_of_2(columns), num_warps=plan.warps,
        num_stages=plan.stages, **options())
