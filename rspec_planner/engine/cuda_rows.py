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
Decoder layers over a fixed small number of rows, every position read from device memory.

Nine kernels a layer and no other operation: projections, rotary and K/V write, attention in two
parts, output, sum and norm, gated MLP, sum and the next layer's norm; as few as five where
`select.fuse` joined some. Split products leave their parts to the kernel behind them, which adds
them and the residual up. The same rows serve a verify, a draft's block, a flow step and the tail
of a prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn, Tensor

from rspec_planner.engine.kernels.select import Kernels
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.config import TextConfig
from rspec_planner.model.layer import DecoderLayer, NO_QK_NORM
from rspec_planner.model.rope import flat_cos_sin

#: most parts of a product, and most rows whose products come in parts (`kernels.linear`)
MAX_PARTS, MOST_APART = 8, 128
MATRICES = ('qkv', 'out', 'gate_up', 'down')


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight (N, K) as float8_e4m3fn and the factors (N,) fp32 that give it back."""
    scale = weight.abs().amax(dim=1).float().clamp(min=1e-12) / torch.finfo(
        torch.float8_e4m3fn).max
    return (weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class LayerWeights:
    """The matrices of one packed layer, each (out, in), and its norms."""

    input_norm: Tensor
    qkv: Tensor
    norms: tuple[Tensor, Tensor]  # of queries and keys, (d,) each
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    scales: Mapping[str, Tensor] = field(default_factory=dict)  # of fp8 matrices, per channel

    def fp8(self) -> LayerWeights:
        """Return a copy whose matrices are e4m3 with one fp32 factor for each output channel."""
        made = {name: quantise(getattr(self, name)) for name in MATRICES}
        matrices: dict[str, Any] = {name: matrix for name, (matrix, _) in made.items()}
        return replace(self, scales={name: scale for name, (_, scale) in made.items()},
                       **matrices)

    @staticmethod
    def of(layer: nn.Module) -> LayerWeights:
        """Return the weights of a layer; EngineError before `pack`."""
        packed = cast('DecoderLayer', layer).packed
        if packed is None:
            raise EngineError('a layer is not packed: call pack() after the last move')
        if packed.qk_norm is None or packed.qkv_bias is not None:
            raise ConfigurationError(NO_QK_NORM)
        return LayerWeights(packed.input_norm, packed.qkv.t(),
                            (packed.qk_norm[0], packed.qk_norm[packed.heads]), packed.out.t(),
                            packed.post_norm, packed.gate_up.t(), packed.down.t())


@dataclass(frozen=True)
class RowShape:
    """Sizes of the rows that run together."""

    samples: int  # Z
    rows: int  # W of each sample
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    hidden: int
    eps: float
    width: int = 0  # the widest rows that must round as these do

    @staticmethod
    def of(cfg: TextConfig, rows: int, width: int = 0) -> RowShape:
        """Return the shape of `rows` text rows."""
        return RowShape(1, rows, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim,
                        cfg.intermediate_size, cfg.hidden_size, cfg.rms_norm_eps, width)


def half_tables(rows: int, head_dim: int, theta: float,
                device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin (rows, d / 2) fp32 of positions 0 .. rows - 1."""
    cos, sin = flat_cos_sin(torch.arange(rows, device=device), head_dim, theta)
    half = head_dim // 2
    return cos[:, :half].contiguous(), sin[:, :half].contiguous()


class Rows:
    """Buffers and launches of one layer after the other."""

    def __init__(self, shape: RowShape, kernels: Kernels, tables: tuple[Tensor, Tensor],
                 dtype: torch.dtype) -> None:
        self.shape, self.kernels, self._tables = shape, kernels, tables
        count, device = shape.samples * shape.rows, tables[0].device

        def buffer(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.hidden, self._normed = (buffer(count, shape.hidden) for _ in range(2))
        self._middle = buffer(count, shape.hidden)
        heads = shape.heads + 2 * shape.kv_heads
        self._qkv = buffer(shape.samples, shape.rows, heads, shape.head_dim)
        self._q = buffer(shape.samples, shape.rows, shape.heads, shape.head_dim)
        self.mixed = buffer(count, shape.heads * shape.head_dim)
        self._gated = buffer(count, shape.intermediate)
        columns = max(shape.hidden, heads * shape.head_dim)
        self._parts = torch.zeros(MAX_PARTS * min(count, MOST_APART) * columns, device=device,
                                  dtype=torch.promote_types(dtype, torch.float32))

    def layer(self, weights: LayerWeights, x: Tensor, out: Tensor, slot: Tensor, angle: Tensor,
              held: tuple[Tensor, Tensor], view: dict[str, Any],
              behind: LayerWeights | None = None, ready: bool = False) -> None:
        """
        Run one layer from x to out, both (Z * W, H); out may be x.

        slot, angle: see `reference.rotate`; held: keys and values that receive the rows.
        view: what the rows see, arguments of `reference.attend`. behind: the layer that runs
        next on out and is then `ready`: its first norm is taken here.
        """
        if not self.in_parts(weights):
            self.project(weights, x)
            self.rotate(weights, slot, angle, held)
            self.attend(view)
            self.finish(weights, x, out)
            return
        if not ready:
            self.kernels.norm(x, weights.input_norm, self._normed, self.shape.eps)
        if self.kernels.mix is None:
            self.enter(weights, slot, angle, held)
            self.attend(view)
        else:
            self.mix(weights, slot, angle, view)
        self.leave(weights, x)
        self.widen(weights)
        self.narrow(weights, out, behind)

    def in_parts(self, weights: LayerWeights) -> bool:
        """Return whether a layer's products come in parts; not fp8's, nor the library's."""
        return not weights.scales and len(self.hidden) <= MOST_APART

    def enter(self, weights: LayerWeights, slot: Tensor, angle: Tensor,
              held: tuple[Tensor, Tensor]) -> None:
        """Project the normed rows, turn queries and keys, write keys and values."""
        qkv = self._apart(self._normed, weights.qkv)
        self.kernels.rotate(qkv.view(-1, *self._qkv.shape), weights.norms, self._tables, slot,
                            angle, self._q, *held, self.shape.eps)

    def mix(self, weights: LayerWeights, slot: Tensor, angle: Tensor, view: dict[str, Any]
            ) -> None:
        """Project the normed rows, and fill `mixed` with what they see of all and of them."""
        assert self.kernels.mix is not None
        qkv = self._apart(self._normed, weights.qkv)
        self.kernels.mix(qkv.view(-1, *self._qkv.shape), weights.norms, self._tables, slot, angle,
                         self.mixed, self.shape.eps, **view)

    def leave(self, weights: LayerWeights, x: Tensor) -> None:
        """Project what the queries saw, add x (Z * W, H), and norm the sum."""
        self._close(self.mixed, weights.out, x, self._middle, weights.post_norm)

    def widen(self, weights: LayerWeights) -> None:
        """Run the gated part of the MLP on the normed rows."""
        self.kernels.linear(self._normed, weights.gate_up, self._gated, gated=True,
                            width=self.shape.width)

    def narrow(self, weights: LayerWeights, out: Tensor, behind: LayerWeights | None) -> None:
        """Run the rest of the MLP into out (Z * W, H), and take the norm of the layer behind."""
        self._close(self._gated, weights.down, self._middle, out,
                    None if behind is None else behind.input_norm)

    def _apart(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the parts (S, Z * W, N) of a product."""
        room = self._room(x, weight)
        return room[:self.kernels.product(x, weight, room, width=self.shape.width)]

    def _room(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return room (MAX_PARTS, Z * W, N) for the parts of a product."""
        return self._parts[:MAX_PARTS * len(x) * len(weight)].view(-1, len(x), len(weight))

    def _close(self, x: Tensor, weight: Tensor, residual: Tensor, total: Tensor,
               norm: Tensor | None) -> None:
        """Add a product and residual up, and leave the norm of the sum in `_normed`."""
        if self.kernels.close is not None:
            self.kernels.close(x, weight, self._room(x, weight), residual, total, norm,
                               self._normed, self.shape.eps, width=self.shape.width)
            return
        self.kernels.gather(self._apart(x, weight), residual, total, norm, self._normed,
                            self.shape.eps)

    def project(self, weights: LayerWeights, x: Tensor) -> None:
        """Norm x and project queries, keys and values."""
        self.kernels.linear(x, weights.qkv, self._qkv.view(len(x), -1), norm=weights.input_norm,
                            eps=self.shape.eps, scale=weights.scales.get('qkv'),
                            width=self.shape.width)

    def rotate(self, weights: LayerWeights, slot: Tensor, angle: Tensor,
               held: tuple[Tensor, Tensor]) -> None:
        """Turn queries and keys, write keys and values."""
        self.kernels.rotate(self._qkv, weights.norms, self._tables, slot, angle, self._q, *held,
                            self.shape.eps)

    def attend(self, view: dict[str, Any]) -> None:
        """Fill `mixed` (Z * W, heads * d) with what the queries see."""
        self.kernels.attend(self._q, self.mixed, **view)

    def finish(self, weights: LayerWeights, x: Tensor, out: Tensor) -> None:
        """Run the part of a layer behind its attention, whose result is in `mixed`."""
        kernels, eps, width = self.kernels, self.shape.eps, self.shape.width
        scales = weights.scales
        kernels.linear(self.mixed, weights.out, self._middle, residual=x,
                       scale=scales.get('out'), width=width)
        kernels.linear(self._middle, weights.gate_up, self._gated, norm=weights.post_norm,
                       eps=eps, gated=True, scale=scales.get('gate_up'), width=width)
        kernels.linear(self._gated, weights.down, out, residual=self._middle,
                       scale=scales.get('down'), width=width)
