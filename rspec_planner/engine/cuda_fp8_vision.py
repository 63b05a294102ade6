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
The vision tower over e4m3 weights, in the manner of `cuda_fp8_prefill`.

Blocks alone are quantised, 71 % of the tower's weights; the patch embedding and the mergers stay
as they are. Biases are added where the next pass reads a product, because the library's scaled
product need not take one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from rspec_planner.engine.cuda_decoder import Prefill, PREFILL_ATTENTION
from rspec_planner.engine.cuda_fp8 import Block, Fp8Weights, Matrix, quantised
from rspec_planner.engine.cuda_vision import Encoder
from rspec_planner.engine.kernels.fp8_reference import E4M3
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.target import Target
from rspec_planner.model.vision import LAYER_NORM_EPS, VisionTower


def encoder_of(target: Target, prefill: Prefill, weights: Fp8Weights | None) -> Encoder:
    """Return the encoder of a target, over e4m3 blocks where its tower was quantised."""
    encoder = Encoder(target, prefill)
    if weights is not None and weights.vision:
        encoder.tower = Fp8Tower(target.vision, target.cfg.patch_grid, weights)
    return encoder


class Fp8Tower:
    """`VisionTower` over e4m3 blocks, see `cuda_vision.Tower`."""

    def __init__(self, tower: VisionTower, grid: tuple[int, int], weights: Fp8Weights) -> None:
        """Raise ConfigurationError for weights without a tower."""
        if not weights.vision:
            raise ConfigurationError('the tower was not quantised: quantise_target(vision=True)')
        self._tower, self._parts = tower, weights.parts
        self._product = weights.wide
        device = tower.pos_embed.weight.device
        constants = tower.grid_constants(grid, device)
        self._tables = constants.cos.contiguous(), constants.sin.contiguous()
        with torch.inference_mode():
            self._positions = tower.positions(constants)
        self._blocks = weights.vision

    def __call__(self, patches: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return features (N, T, H) and those of each DeepStack layer, see `VisionTower`."""
        tower, cfg = self._tower, self._tower.cfg
        embedded = tower.patch_embed(patches)
        shape, x = embedded.shape, embedded.add_(self._positions.to(embedded.dtype))
        x = x.flatten(0, 1)
        pending: dict[str, Any] = {}  # what the last block adds to x: a product and its bias
        deepstack = []
        for index, block in enumerate(self._blocks):
            mixed = self._mix(block, self._norm(x, block.norms[0], pending), shape)
            made = self._multiply(quantised(mixed, self._parts), block.proj)
            entry = self._norm(x, block.norms[1], {'delta': made, 'shift': block.proj.bias})
            pending = {'delta': self._widen(block, entry), 'shift': block.fc2.bias}
            if index in cfg.deepstack_layers:
                _add(x, pending)
                pending = {}
                merge = tower.deepstack_merger_list[cfg.deepstack_layers.index(index)]
                deepstack.append(merge(x.view(shape)))
        if pending:
            _add(x, pending)
        return tower.merger(x.view(shape)), deepstack

    def _norm(self, x: Tensor, norm: nn.LayerNorm, pending: dict[str, Any]
              ) -> tuple[Tensor, Tensor]:
        """Complete x in its place; return its norm in e4m3 with its factors."""
        return quantised(x, self._parts, weight=norm.weight, bias=norm.bias, eps=LAYER_NORM_EPS,
                         **pending)

    def _multiply(self, rows: tuple[Tensor, Tensor], matrix: Matrix) -> Tensor:
        return self._product(*rows, matrix.weight, matrix.scale)

    def _mix(self, block: Block, rows: tuple[Tensor, Tensor], shape: torch.Size) -> Tensor:
        """Return the attention (N * P, hidden) among the patches of each image."""
        qkv = self._multiply(rows, block.qkv)
        self._parts.turn(qkv, block.qkv.bias, self._tables, block.heads)
        parts = qkv.view(*shape[:2], 3, block.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        with sdpa_kernel(PREFILL_ATTENTION, set_priority=True):
            mixed = functional.scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).reshape(len(qkv), -1)

    def _widen(self, block: Block, rows: tuple[Tensor, Tensor]) -> Tensor:
        """Return the MLP's last product, its bias still to be added."""
        wide = self._multiply(rows, block.fc1)
        small = torch.empty(wide.shape, dtype=E4M3, device=wide.device)
        factors = torch.empty(len(wide), device=wide.device)
        self._parts.gelu8(wide, block.fc1.bias, small, factors)
        return self._multiply((small, factors), block.fc2)


def _add(x: Tensor, pending: dict[str, Any]) -> None:
    """Add a product and its bias to x in its place."""
    x.add_(pending['delta']).add_(pending['shift'])
