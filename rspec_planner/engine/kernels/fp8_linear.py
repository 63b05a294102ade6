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
Products of 1 to 128 rows whose both operands are e4m3: half the bytes of `linear`.

The shape of `linear`: BN columns a program, K whole or in SPLIT parts that the last program adds
up in a fixed order, the number of rows an argument and the tile fixed by `width`, so that a
row's bits do not depend on its neighbours. The weight is the left operand and the rows are the
right one, because Hopper's fp8 instruction (wgmma m64nNk32) wants 64 rows on the left; with 16
rows there, Triton converts both operands to fp16 for an older one. Its sums keep fewer bits than
fp32 has, so each DEPTH columns of K are summed apart and added in fp32 (DeepSeek-V3 report,
arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from torch import Tensor
import triton
import triton.language as tl

from rspec_planner.engine.kernels.launch import options
from rspec_planner.engine.kernels.linear import (
    _merge,
    _most_shared,
    _walk,
    fitted,
    MAX_SPLIT,
    Plan,
    row_tile,
    scratch,
)

#: (columns, K, row tile, gated) -> plan, filled by `cuda_fp8_tune`
PLANS8: dict[tuple[int, int, int, bool], Plan] = {}
#: columns of a tile: what the left operand of the fp8 instruction has at least
COLUMNS = 64
#: columns of K that are summed in the matrix units
DEPTH = tl.constexpr(128)


def plan8(columns: int, depth: int, bm: int, gated: bool) -> Plan:
    """Return the plan of a product, tuned or a default for a GPU of 132 multiprocessors."""
    key = (columns, depth, bm, gated)
    if key in PLANS8:
        return PLANS8[key]
    bk = 256 if depth % 256 == 0 and bm < 64 else 64 if depth % 128 else 128
    split = 1
    while (split < MAX_SPLIT and not gated and triton.cdiv(columns, COLUMNS) * split < 132
           and depth // (2 * split) >= 512):
        split *= 2
    return Plan(COLUMNS, bk, split, 3 if gated else 4)


@triton.jit(do_not_specialize=['M'])
def _product8(x, rows_scale, weight, scale, residual, out, parts, counters,
              x_stride, residual_stride, out_stride, M,
              N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              BK: tl.constexpr, SPLIT: tl.constexpr, RESIDUAL: tl.constexpr,
              GATED: tl.constexpr, PDL: tl.constexpr):
    tile, part = tl.program_id(0), tl.program_id(1)
    rows, cols = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    TILES: tl.constexpr = (K + BK - 1) // BK
    PER: tl.constexpr = (TILES + SPLIT - 1) // SPLIT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    CARE: tl.constexpr = BK if BK < DEPTH else DEPTH
    acc, up = _walk(x, weight, x_stride, rows, cols, part * PER,
                    tl.minimum(part * PER + PER, TILES), M, N, K, BM, BN, BK, GATED, CARE)
    mine = True
    if SPLIT > 1:
        mine, acc = _merge(acc, parts, counters, tile, part, rows, cols, N, BM, BN, SPLIT)
    if mine:
        ok = (rows < M)[:, None] & (cols < N)[None, :]
        factor = tl.load(rows_scale + rows, mask=rows < M, other=0.0)[:, None]
        acc *= factor * tl.load(scale + cols, mask=cols < N, other=0.0)[None, :]
        if GATED:
            up *= factor * tl.load(scale + N + cols, mask=cols < N, other=0.0)[None, :]
            acc = acc / (1.0 + tl.exp(-acc)) * up
        if RESIDUAL:
            acc += tl.load(residual + rows[:, None] * residual_stride + cols[None, :], mask=ok,
                           other=0.0).to(tl.float32)
        tl.store(out + rows[:, None] * out_stride + cols[None, :],
                 acc.to(out.dtype.element_ty), mask=ok)


def product8(x: Tensor, rows: Tensor, weight: Tensor, columns: Tensor, out: Tensor, *,
             residual: Tensor | None = None, gated: bool = False, width: int = 0,
             plan: Plan | None = None) -> None:
    """Fill out (M, N), see `fp8_reference.product8`; at most `linear.MAX_ROWS` rows."""
    count, depth = x.shape
    wide, bm = out.shape[1], row_tile(max(count, width))
    plan = fitted(plan or plan8(wide, depth, bm, gated), bm, gated, 1, _most_shared(x.device))
    held = scratch(x.device)
    _product8[(triton.cdiv(wide, plan.bn), plan.split)](
        x, rows, weight, columns, residual, out, held.parts, held.counters, x.stride(0),
        residual.stride(0) if residual is not None else 0, out.stride(0), count, N=wide, K=depth,
        BM=bm, BN=plan.bn, BK=plan.bk, SPLIT=plan.split, RESIDUAL=residual is not None,
        GATED=gated, num_warps=plan.warps, num_stages=plan.stages, **options())
