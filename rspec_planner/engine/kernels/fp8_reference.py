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
The fp8 kernels as plain PyTorch: quantising passes, and products of e4m3 operands.

Same rules as `reference`. A product of two e4m3 numbers has at most eight bits and its exponent
lies within 2^-18 .. 2^17, so fp64 adds thousands of them without rounding: the products here
are exact, and a row's result cannot depend on how many rows run beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
#: a row of zeros still needs a factor
LEAST = 1e-12


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _store(wide: Tensor, out: Tensor, scale: Tensor) -> None:
    factor = (wide.abs().amax(-1) / LARGEST).clamp(min=LEAST)
    scale.copy_(factor)
    out.copy_((wide / factor[:, None]).to(E4M3))


def norm8(x: Tensor, out: Tensor, scale: Tensor, *, weight: Tensor | None = None,
          eps: float = 0.0, bias: Tensor | None = None, delta: Tensor | None = None,
          shift: Tensor | None = None) -> None:
    """
    Fill out (M, N) e4m3 and scale (M,) fp32, so that out * scale is the norm of x (M, N).

    weight (N,): of an RMSNorm, or with bias (N,) of a LayerNorm; None quantises x as it is.
    delta (M, N), shift (N,): added to x first, which keeps the sum.
    """
    if delta is not None:
        x.copy_(_wide(x) + _wide(delta) + (0.0 if shift is None else _wide(shift)))
    wide = _wide(x)
    if bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    if weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(weight)
    if bias is not None:
        wide = wide + _wide(bias)
    _store(wide, out, scale)


def gate8(joined: Tensor, out: Tensor, scale: Tensor) -> None:
    """Fill out (M, N) e4m3 and scale (M,) with silu(gate) * up of joined (M, 2 N)."""
    gate, up = _wide(joined).chunk(2, dim=-1)
    _store(functional.silu(gate) * up, out, scale)


def gelu8(x: Tensor, shift: Tensor, out: Tensor, scale: Tensor) -> None:
    """Fill out (M, N) e4m3 and scale (M,) with the tanh-approximated GELU of x + shift (N,)."""
    _store(functional.gelu(_wide(x) + _wide(shift), approximate='tanh'), out, scale)


def rescale(product: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Multiply product (M, N) in place by rows (M,) and columns (N,), fp32 factors."""
    product.copy_(_wide(product) * rows[:, None] * columns)


def turn(qkv: Tensor, shift: Tensor, tables: tuple[Tensor, Tensor], heads: int) -> None:
    """
    Add shift (3 C,) to qkv (M, 3 C) and turn the first two thirds, in place.

    tables: cos and sin (P, d) fp32, both halves alike; row m takes row m modulo P.
    """
    cos, sin = (table[:, :table.shape[1] // 2].repeat(len(qkv) // len(table), 1)[:, None, None]
                for table in tables)
    wide = (_wide(qkv) + _wide(shift)).view(len(qkv), 3, heads, -1)
    low, high = wide[:, :2].chunk(2, dim=-1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    qkv.copy_(torch.cat((turned, wide[:, 2:]), dim=1).flatten(1))


def product8(x: Tensor, rows: Tensor, weight: Tensor, columns: Tensor, out: Tensor, *,
             residual: Tensor | None = None, gated: bool = False, width: int = 0) -> None:
    """
    Fill out (M, N) with x (M, K) e4m3 times weight (N, K) e4m3 transposed, scaled back.

    rows (M,), columns (rows of weight,): fp32 factors. residual, gated, width: see
    `reference.linear`.
    """
    exact = (x.double() @ weight.double().t()).float()
    product = exact * rows[:, None] * columns
    if gated:
        gate, up = product.chunk(2, dim=-1)
        product = functional.silu(gate) * up
    if residual is not None:
        product = product + _wide(residual)
    out.copy_(product)
