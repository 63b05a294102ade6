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
"""What stands between the products of the vision tower, one pass over memory each."""

from __future__ import annotations

from torch import Tensor
import triton
import triton.language as tl

from rspec_planner.engine.kernels.launch import options


@triton.jit
def _add_norm(x, add, weight, bias, out, eps, N: tl.constexpr, BN: tl.constexpr,
              PDL: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    ok = cols < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide = tl.load(x + row * N + cols, mask=ok, other=0.0)
    if add is not None:
        wide += tl.load(add + row * N + cols, mask=ok, other=0.0)
        tl.store(x + row * N + cols, wide, mask=ok)
    wide = wide.to(tl.float32)
    factor = tl.load(weight + cols, mask=ok, other=0.0).to(tl.float32)
    shift = tl.load(bias + cols, mask=ok, other=0.0).to(tl.float32)
    wide = tl.where(ok, wide - tl.sum(wide, 0) / N, 0.0)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    tl.store(out + row * N + cols, (wide * factor + shift).to(out.dtype.element_ty), mask=ok)


def add_norm(x: Tensor, add: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor,
             eps: float) -> None:
    """Add to x (M, N) in its place and fill out with its LayerNorm, see `reference.add_norm`."""
    rows, columns = x.shape
    _add_norm[(rows,)](x, add, weight, bias, out, eps, N=columns,
                       BN=triton.next_power_of_2(columns), num_warps=4, **options())


@triton.jit
def _turn(qkv, cos, sin, q, k, patches, HEADS: tl.constexpr, D: tl.constexpr,
          HB: tl.constexpr, DB: tl.constexpr, PDL: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = D // 2
    heads, half = tl.arange(0, HB), tl.arange(0, DB)
    ok = (heads < HEADS)[:, None] & (half < HALF)[None, :]
    spot = heads[:, None] * D + half[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = qkv + (row * 3 + part) * HEADS * D + spot
    x = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    table = (row % patches) * D + half
    c = tl.load(cos + table, mask=half < HALF, other=0.0)[None, :]
    s = tl.load(sin + table, mask=half < HALF, other=0.0)[None, :]
    if part == 0:
        to = q + row * HEADS * D + spot
    else:
        to = k + row * HEADS * D + spot
    tl.store(to, (x * c - y * s).to(q.dtype.element_ty), mask=ok)
    tl.store(to + HALF, (y * c + x * s).to(q.dtype.element_ty), mask=ok)


def turn(qkv: Tensor, tables: tuple[Tensor, Tensor], q: Tensor, k: Tensor) -> None:
    """Fill q and k (N, P, heads, d) with the turned parts of qkv, see `reference.turn`."""
    images, patches, _, heads, dim = qkv.shape
    _turn[(images * patches, 2)](qkv, *tables, q, k, patches, HEADS=heads, D=dim,
                                 HB=triton.next_power_of_2(heads),
                                 DB=triton.next_power_of_2(dim // 2), num_warps=4, **options())
