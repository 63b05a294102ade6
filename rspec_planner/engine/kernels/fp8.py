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
Rows to e4m3 with one factor each, in the pass that norms or gates them anyway.

A row's factor is its largest magnitude over 448, the largest e4m3 number, so it is known only
when the whole row is; one program therefore holds one row. Everything between two products of an
fp8 prefill is one of these passes: the residual is added where the next norm reads it, since a
scaled product cannot accumulate into its output in bf16.
"""

from __future__ import annotations

from torch import Tensor
import triton
import triton.language as tl

from rspec_planner.engine.kernels.launch import options

_LARGEST = tl.constexpr(448.0)
#: a row of zeros still needs a factor
_LEAST = tl.constexpr(1e-12)
_WARP_COLUMNS = 1024


def _warps(columns: int) -> int:
    """Return warps for one row: 32 elements a thread at most."""
    return max(4, min(16, triton.next_power_of_2(columns) // _WARP_COLUMNS))


@triton.jit
def _store(wide, out, scale, row, cols, ok, N: tl.constexpr):
    factor = tl.maximum(tl.max(tl.abs(wide), 0) / _LARGEST, _LEAST)
    tl.store(scale + row, factor)
    tl.store(out + row * N + cols, (wide / factor).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _norm8(x, delta, shift, weight, bias, out, scale, eps, x_stride, N: tl.constexpr,
           BN: tl.constexpr, DELTA: tl.constexpr, SHIFT: tl.constexpr, NORM: tl.constexpr,
           CENTRE: tl.constexpr, PDL: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    ok = cols < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide = tl.load(x + row * x_stride + cols, mask=ok, other=0.0).to(tl.float32)
    if DELTA:
        wide += tl.load(delta + row * N + cols, mask=ok, other=0.0).to(tl.float32)
        if SHIFT:
            wide += tl.load(shift + cols, mask=ok, other=0.0).to(tl.float32)
        kept = wide.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + cols, kept, mask=ok)
        wide = kept.to(tl.float32)
    if CENTRE:
        wide = tl.where(ok, wide - tl.sum(wide, 0) / N, 0.0)
    if NORM:
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
        wide *= tl.load(weight + cols, mask=ok, other=0.0).to(tl.float32)
    if CENTRE:
        wide += tl.load(bias + cols, mask=ok, other=0.0).to(tl.float32)
    _store(wide, out, scale, row, cols, ok, N)


def norm8(x: Tensor, out: Tensor, scale: Tensor, *, weight: Tensor | None = None,
          eps: float = 0.0, bias: Tensor | None = None, delta: Tensor | None = None,
          shift: Tensor | None = None) -> None:
    """Fill out (M, N) e4m3 and scale (M,), see `fp8_reference.norm8`."""
    rows, columns = x.shape
    _norm8[(rows,)](x, delta, shift, weight, bias, out, scale, eps, x.stride(0), N=columns,
                    BN=triton.next_power_of_2(columns), DELTA=delta is not None,
                    SHIFT=shift is not None, NORM=weight is not None, CENTRE=bias is not None,
                    num_warps=_warps(columns), **options())


@triton.jit
def _gate8(joined, out, scale, N: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    ok = cols < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    spot = joined + row * 2 * N + cols
    gate = tl.load(spot, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(spot + N, mask=ok, other=0.0).to(tl.float32)
    _store(gate / (1.0 + tl.exp(-gate)) * up, out, scale, row, cols, ok, N)


def gate8(joined: Tensor, out: Tensor, scale: Tensor) -> None:
    """Fill out (M, N) e4m3 and scale (M,), see `fp8_reference.gate8`."""
    rows, columns = out.shape
    _gate8[(rows,)](joined, out, scale, N=columns, BN=triton.next_power_of_2(columns),
                    num_warps=_warps(columns), **options())


@triton.jit
def _gelu8(x, shift, out, scale, N: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    ok = cols < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide = tl.load(x + row * N + cols, mask=ok, other=0.0).to(tl.float32)
    wide += tl.load(shift + cols, mask=ok, other=0.0).to(tl.float32)
    # (1 + tanh u) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    turn = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    _store(wide / (1.0 + tl.exp(-turn)), out, scale, row, cols, ok, N)


def gelu8(x: Tensor, shift: Tensor, out: Tensor, scale: Tensor) -> None:
    """Fill out (M, N) e4m3 and scale (M,), see `fp8_reference.gelu8`."""
    rows, columns = x.shape
    _gelu8[(rows,)](x, shift, out, scale, N=columns, BN=triton.next_power_of_2(columns),
                    num_warps=_warps(columns), **options())


@triton.jit
def _rescale(product, rows, columns, N: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    spot, ok = product + row * N + cols, cols < N
    wide = tl.load(spot, mask=ok, other=0.0).to(tl.float32)
    wide *= tl.load(rows + row) * tl.load(columns + cols, mask=ok, other=0.0)
    tl.store(spot, wide.to(product.dtype.element_ty), mask=ok)


def rescale(product: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Multiply product (M, N) in place, see `fp8_reference.rescale`."""
    _rescale[(len(product), triton.cdiv(product.shape[1], 4096))](
        product, rows, columns, N=product.shape[1], BN=4096, num_warps=8, **options())


@triton.jit
def _turn(qkv, shift, cos, sin, patches, HEADS: tl.constexpr, HALF: tl.constexpr,
          HB: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, cols = tl.arange(0, HB), tl.arange(0, BH)
    WIDTH: tl.constexpr = HEADS * 2 * HALF
    spot = heads[:, None] * 2 * HALF + cols[None, :]
    ok = (heads < HEADS)[:, None] & (cols < HALF)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    base = qkv + row * 3 * WIDTH + part * WIDTH + spot
    low = tl.load(base, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(base + HALF, mask=ok, other=0.0).to(tl.float32)
    low += tl.load(shift + part * WIDTH + spot, mask=ok, other=0.0).to(tl.float32)
    high += tl.load(shift + part * WIDTH + spot + HALF, mask=ok, other=0.0).to(tl.float32)
    if part < 2:
        angle = (row % patches) * 2 * HALF + cols
        c = tl.load(cos + angle, mask=cols < HALF, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=cols < HALF, other=0.0)[None, :]
        low, high = low * c - high * s, high * c + low * s
    tl.store(base, low.to(qkv.dtype.element_ty), mask=ok)
    tl.store(base + HALF, high.to(qkv.dtype.element_ty), mask=ok)


def turn(qkv: Tensor, shift: Tensor, tables: tuple[Tensor, Tensor], heads: int) -> None:
    """Add the bias to qkv and turn queries and keys in place, see `fp8_reference.turn`."""
    half = qkv.shape[1] // (6 * heads)
    _turn[(len(qkv), 3)](qkv, shift, tables[0], tables[1], len(tables[0]), HEADS=heads,
                         HALF=half, HB=triton.next_power_of_2(heads),
                         BH=triton.next_power_of_2(half), num_warps=4, **options())
