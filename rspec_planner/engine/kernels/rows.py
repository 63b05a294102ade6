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
"""What stands between products, one pass over memory each."""

from __future__ import annotations

from torch import Tensor
import triton
import triton.language as tl

from rspec_planner.engine.kernels.launch import options


@triton.jit
def _norm(x, weight, out, eps, x_stride, out_stride, N: tl.constexpr, BN: tl.constexpr,
          PDL: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide = tl.load(x + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    factor = tl.load(weight + cols, mask=cols < N, other=0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    wide *= factor  # loaded in front of the sum's barrier, which no load passes
    tl.store(out + row * out_stride + cols, wide.to(out.dtype.element_ty), mask=cols < N)


def norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """Fill out (M, N) with the RMSNorm of x (M, N), see `reference.norm`."""
    rows, columns = x.shape
    _norm[(rows,)](x, weight, out, eps, x.stride(0), out.stride(0), N=columns,
                   BN=triton.next_power_of_2(columns), num_warps=8, **options())


@triton.jit
def _sum_row(parts, residual, total, weight, out, row, eps, residual_stride, total_stride,
             part_stride, N: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
             CACHE: tl.constexpr):
    """Add parts and residual of one row up and norm the sum; CACHE: where parts are read from."""
    cols = tl.arange(0, BN)
    ok = cols < N
    wide = tl.load(parts + row * N + cols, mask=ok, other=0.0, cache_modifier=CACHE)
    for part in tl.static_range(1, PARTS):
        wide += tl.load(parts + part * part_stride + row * N + cols, mask=ok, other=0.0,
                        cache_modifier=CACHE)
    wide += tl.load(residual + row * residual_stride + cols, mask=ok, other=0.0).to(tl.float32)
    if weight is not None:
        factor = tl.load(weight + cols, mask=ok, other=0.0).to(tl.float32)
    kept = wide.to(total.dtype.element_ty)
    tl.store(total + row * total_stride + cols, kept, mask=ok)
    if weight is not None:
        wide = kept.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
        wide *= factor
        tl.store(out + row * N + cols, wide.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _gather(parts, residual, total, weight, out, eps, residual_stride, total_stride,
            part_stride, N: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
            PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _sum_row(parts, residual, total, weight, out, row, eps, residual_stride, total_stride,
             part_stride, N, BN, PARTS, '')


def gather(parts: Tensor, residual: Tensor, total: Tensor, weight: Tensor | None, out: Tensor,
           eps: float, *, warps: int = 8) -> None:
    """Fill total (M, N) and out (M, N), see `reference.gather`; warps decide its rounding."""
    count, rows, columns = parts.shape
    _gather[(rows,)](parts, residual, total, weight, out, eps, residual.stride(0),
                     total.stride(0), parts.stride(0), N=columns,
                     BN=triton.next_power_of_2(columns), PARTS=count, num_warps=warps, **options())


@triton.jit
def _add_rows(x, index, add, N: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    more = tl.load(add + row * N + cols, mask=cols < N, other=0.0)
    spot = x + tl.load(index + row) * N + cols
    tl.store(spot, tl.load(spot, mask=cols < N, other=0.0) + more, mask=cols < N)


def add_rows(x: Tensor, index: Tensor, add: Tensor) -> None:
    """Add to some rows of x (S, N) in its place, see `reference.add_rows`."""
    rows, columns = add.shape
    _add_rows[(rows, triton.cdiv(columns, 2048))](x, index, add, N=columns, BN=2048, num_warps=4,
                                                  **options())


@triton.jit
def _gate(joined, out, N: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    spot = joined + row * 2 * N + cols
    gate = tl.load(spot, mask=cols < N, other=0.0).to(tl.float32)
    up = tl.load(spot + N, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + cols, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty),
             mask=cols < N)


def gate(joined: Tensor, out: Tensor) -> None:
    """Fill out (M, N) with silu(gate) * up of joined (M, 2 N), see `reference.gate`."""
    rows, columns = out.shape
    _gate[(rows, triton.cdiv(columns, 2048))](joined, out, N=columns, BN=2048, num_warps=8,
                                              **options())
