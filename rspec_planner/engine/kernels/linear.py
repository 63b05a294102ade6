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
Matrix products of 1 to 128 rows, whose time is that of reading the weights once.

A program owns BN columns and walks through K, or through one of SPLIT parts of it. The parts of
`product` are added up by whoever reads them (a norm, a rotation); in `linear` the last program to
arrive adds them. The order is fixed in both, so that the result never depends on who came last.
The number of rows is an argument and no constant, and `width` fixes the tile: one compiled
product serves every number of rows, so that a row's bits cannot depend on its neighbours. An
RMSNorm in front is a pass of its own; inside the loop it cost more than it saved
(docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
import triton
import triton.language as tl
from triton.runtime import driver

from rspec_planner.engine.kernels.launch import options
from rspec_planner.engine.kernels.rows import gate
from rspec_planner.engine.kernels.rows import norm as rms_norm


@dataclass(frozen=True)
class Plan:
    """How a product is cut: columns and depth of a tile, parts of K, pipeline depth, warps."""

    bn: int
    bk: int = 128
    split: int = 1
    stages: int = 4
    warps: int = 4


Key = tuple[int, int, int, bool]
#: (columns, K, row tile, gated) -> plan of the R1 shapes: the fastest whole verify and flow on an
#: H200. The fastest products one by one made a slower verify there (docs/performance.md).
MEASURED: dict[Key, Plan] = {
    (6144, 4096, 16, False): Plan(32, 128, 1, 6),
    (4096, 4096, 16, False): Plan(32, 128, 2, 4),
    (12_288, 4096, 16, True): Plan(32, 128, 1, 3),
    (4096, 12_288, 16, False): Plan(32, 128, 2, 6),
    (4096, 20_480, 16, False): Plan(32, 128, 2, 6),
    (4096, 2048, 64, False): Plan(32, 128, 1, 6),
    (2048, 2048, 64, False): Plan(32, 128, 2, 6),
    (8256, 2048, 64, True): Plan(64, 128, 1, 4),
    (2048, 8256, 64, False): Plan(32, 64, 4, 6),
}
#: plans in use; `tune` adds others, elsewhere `default_plan` decides
PLANS: dict[Key, Plan] = dict(MEASURED)
MAX_SPLIT = 8
MAX_ROWS = 128
#: columns of the widest product that may be split, and so the size of the scratch
_SPLIT_COLUMNS = 16_384
#: bytes of shared memory that a program of an H100 or H200 may use, where no GPU can be asked
SHARED = 232_448


class Scratch:
    """Partial sums and arrival counters; one per stream, since products follow one another."""

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(MAX_SPLIT * 128 * _SPLIT_COLUMNS, device=device)
        self.counters = torch.zeros(_SPLIT_COLUMNS, dtype=torch.int32, device=device)


_SCRATCH: dict[torch.device, Scratch] = {}


def scratch(device: torch.device) -> Scratch:
    """Return the scratch of a device; made before any capture, because warm-up runs first."""
    if device not in _SCRATCH:
        _SCRATCH[device] = Scratch(device)
    return _SCRATCH[device]


def row_tile(rows: int) -> int:
    """Return BM for a number of rows: a power of two, 16 or more, as matrix units want it."""
    return max(16, triton.next_power_of_2(rows))


def shared_bytes(plan: Plan, bm: int, gated: bool, size: int = 2) -> int:
    """Return the bytes of a plan's pipeline, whose elements have `size` bytes."""
    return plan.stages * plan.bk * (bm + plan.bn * (1 + gated)) * size


def fitted(plan: Plan, bm: int, gated: bool, size: int, most: int) -> Plan:
    """Return the plan, its pipeline shortened and then its depth halved until it fits."""
    while shared_bytes(plan, bm, gated, size) > most - 1024 and plan.bk > 16:
        if plan.stages > 2:
            plan = replace(plan, stages=plan.stages - 1)
        else:
            plan = replace(plan, bk=plan.bk // 2)
    return plan


@cache
def _most_shared(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use, as Triton counts them."""
    if device.type != 'cuda':
        return SHARED
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)['max_shared_mem'])


def default_plan(columns: int, depth: int, bm: int, gated: bool) -> Plan:
    """Return a plan that gives every multiprocessor of a large GPU one or two programs."""
    bn = 64 if columns >= 64 * 128 else 32
    if bm >= 64:
        bn = 64
    if gated:
        bn = max(16, bn // 2)
    split = 1
    while (split < MAX_SPLIT and columns <= _SPLIT_COLUMNS and not gated
           and triton.cdiv(columns, bn) * split * 2 <= 264 and depth // (2 * split) >= 512):
        split *= 2
    return Plan(bn, bk=64 if bm >= 64 or depth % 128 else 128, split=split)


def plan_of(columns: int, depth: int, bm: int, gated: bool) -> Plan:
    """Return the plan in use for a product."""
    return PLANS.get((columns, depth, bm, gated)) or default_plan(columns, depth, bm, gated)


@triton.jit
def _walk(x, weight, x_stride, rows, cols, first, last, M,
          N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr, GATED: tl.constexpr, CARE: tl.constexpr = 0):
    """
    Return the products of depth tiles first .. last - 1.

    CARE: 0, or for e4m3 operands how many columns the matrix units sum; the weight is the left
    operand then.
    """
    FULL: tl.constexpr = K % BK == 0 and N % BN == 0
    HIGH: tl.constexpr = BN if CARE else BM
    WIDE: tl.constexpr = BM if CARE else BN
    row_ok, col_ok = (rows < M)[:, None], (cols < N)[:, None]
    acc, up = tl.zeros((HIGH, WIDE), tl.float32), tl.zeros((HIGH, WIDE), tl.float32)
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)
        spot = weight + cols.to(tl.int64)[:, None] * K + k[None, :]
        k_ok = (k < K)[None, :]
        if FULL:
            w = tl.load(spot)
            a = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=row_ok, other=0.0)
        else:
            w = tl.load(spot, mask=col_ok & k_ok, other=0.0)
            a = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=row_ok & k_ok, other=0.0)
        acc = _dot(a, w, acc, CARE)
        if GATED:
            if FULL:
                w = tl.load(spot + N * K)
            else:
                w = tl.load(spot + N * K, mask=col_ok & k_ok, other=0.0)
            up = _dot(a, w, up, CARE)
    if CARE:
        return tl.trans(acc), tl.trans(up)
    else:
        return acc, up


@triton.jit
def _dot(a, w, acc, CARE: tl.constexpr):
    """Add the product of rows a and columns w to acc, see `_walk`."""
    if CARE:
        return tl.dot(w, tl.trans(a), acc, max_num_imprecise_acc=CARE)
    else:
        return tl.dot(a, tl.trans(w.to(a.dtype)), acc, input_precision='ieee')


@triton.jit
def _merge(acc, parts, counters, tile, part, rows, cols,
           N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """Hand in one part; return whether it was the last, and then the sum of all parts."""
    ok = (cols < N)[None, :]
    spot = rows[:, None] * N + cols[None, :]
    tl.store(parts + part * BM * N + spot, acc, mask=ok)
    tl.debug_barrier()
    mine = tl.atomic_add(counters + tile, 1) == SPLIT - 1
    if mine:
        acc = tl.zeros((BM, BN), tl.float32)
        for other in range(SPLIT):  # past the level-1 cache: others wrote these
            acc += tl.load(parts + other * BM * N + spot, mask=ok, other=0.0,
                           cache_modifier='.cg')
        tl.store(counters + tile, 0)
    return mine, acc


@triton.jit
def _prefetch(weight, cols, first, N: tl.constexpr, K: tl.constexpr, LINES: tl.constexpr):
    """Ask for the first lines of each column while the kernel before is still running."""
    k = tl.minimum(first + tl.arange(0, LINES) * 64, K - 1)  # 128 bytes of bf16
    spot = weight + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    tl.inline_asm_elementwise('prefetch.global.L2 [$1]; mov.b32 $0, 0;', '=r,l',
                              [spot.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=['M'])
def _product(x, weight, scale, residual, out, parts, counters,
             x_stride, residual_stride, out_stride, M,
             N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
             RESIDUAL: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
             APART: tl.constexpr, PDL: tl.constexpr):
    tile, part = tl.program_id(0), tl.program_id(1)
    rows, cols = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    TILES: tl.constexpr = (K + BK - 1) // BK
    PER: tl.constexpr = (TILES + SPLIT - 1) // SPLIT
    if PDL:
        _prefetch(weight, cols, part * PER * BK, N, K, 8)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc, up = _walk(x, weight, x_stride, rows, cols, part * PER,
                    tl.minimum(part * PER + PER, TILES), M, N, K, BM, BN, BK, GATED)
    mine = True
    if APART:
        mine = False
        spot = (part * M + rows)[:, None] * N + cols[None, :]
        tl.store(out + spot, acc, mask=(rows < M)[:, None] & (cols < N)[None, :])
    elif SPLIT > 1:
        mine, acc = _merge(acc, parts, counters, tile, part, rows, cols, N, BM, BN, SPLIT)
    if mine:
        ok = (rows < M)[:, None] & (cols < N)[None, :]
        if SCALED:
            acc *= tl.load(scale + cols, mask=cols < N, other=0.0)[None, :]
        if GATED:
            if SCALED:
                up *= tl.load(scale + N + cols, mask=cols < N, other=0.0)[None, :]
            acc = acc / (1.0 + tl.exp(-acc)) * up
        if RESIDUAL:
            acc += tl.load(residual + rows[:, None] * residual_stride + cols[None, :], mask=ok,
                           other=0.0).to(tl.float32)
        tl.store(out + rows[:, None] * out_stride + cols[None, :],
                 acc.to(out.dtype.element_ty), mask=ok)


def linear(x: Tensor, weight: Tensor, out: Tensor, *, norm: Tensor | None = None,
           eps: float = 0.0, residual: Tensor | None = None, gated: bool = False,
           scale: Tensor | None = None, width: int = 0, plan: Plan | None = None) -> None:
    """
    Fill out (M, N), see `reference.linear`; above MAX_ROWS rows through the library's product.

    width: the tile of so many rows, where M is fewer.
    """
    if norm is not None:
        normed = torch.empty_like(x, memory_format=torch.contiguous_format)
        rms_norm(x, norm, normed, eps)
        x = normed
    rows, depth = x.shape
    if max(rows, width) > MAX_ROWS:
        _library(x, weight, out, residual, gated, scale)
        return
    columns, bm = out.shape[1], row_tile(max(rows, width))
    plan = fitted(plan or plan_of(columns, depth, bm, gated), bm, gated, x.element_size(),
                  _most_shared(x.device))
    held = scratch(x.device)
    grid = (triton.cdiv(columns, plan.bn), plan.split)
    _product[grid](
        x, weight, scale, residual, out, held.parts, held.counters,
        x.stride(0), residual.stride(0) if residual is not None else 0, out.stride(0), rows,
        N=columns, K=depth, BM=bm, BN=plan.bn, BK=plan.bk, SPLIT=plan.split,
        RESIDUAL=residual is not None, GATED=gated,
        SCALED=scale is not None, APART=False,
        num_warps=plan.warps, num_stages=plan.stages, **options())


def product(x: Tensor, weight: Tensor, parts: Tensor, *, width: int = 0,
            plan: Plan | None = None) -> int:
    """Fill the first parts of (S, M, N), see `reference.product`; M or width up to MAX_ROWS."""
    rows, depth = x.shape
    columns, bm = len(weight), row_tile(max(rows, width))
    plan = fitted(plan or plan_of(columns, depth, bm, False), bm, False, x.element_size(),
                  _most_shared(x.device))
    _product[(triton.cdiv(columns, plan.bn), plan.split)](
        x, weight, None, None, parts, None, None, x.stride(0), 0, 0, rows,
        N=columns, K=depth, BM=bm, BN=plan.bn, BK=plan.bk, SPLIT=plan.split, RESIDUAL=False,
        GATED=False, SCALED=False, APART=True, num_warps=plan.warps, num_stages=plan.stages,
        **options())
    return plan.split


def _library(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None, gated: bool,
             scale: Tensor | None) -> None:
    """Fill out (M, N) where arithmetic, not memory, is the limit."""
    product = torch.mm(x, weight.to(x.dtype).t())
    if scale is not None:
        product = (product * scale).to(x.dtype)
    if gated:
        gate(product, out)
    else:
        out.copy_(product if residual is None else product.add_(residual))
