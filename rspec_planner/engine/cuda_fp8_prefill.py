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
The prefill over e4m3 weights: every product takes rows that the pass before it quantised.

A layer's last product is not added to its input at once: the next norm reads both, adds, and
keeps the sum, which saves a pass over memory. Attention and K/V stay in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rspec_planner.engine.cuda_decoder import DeviceTaps, Prefill
from rspec_planner.engine.cuda_fp8 import Fp8Weights, quantised
from rspec_planner.engine.cuda_frame import FrameBuffers
from rspec_planner.engine.cuda_rows import LayerWeights
from rspec_planner.engine.kernels.fp8_reference import E4M3
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.select import Kernels
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache


class Fp8Prefill(Prefill):
    """A `Prefill` whose wide products have e4m3 operands; kernels: those of the weights."""

    def __init__(self, target: Target, kernels: Kernels, frame: FrameBuffers, cache: KVCache,
                 taps: DeviceTaps, guess: int, tail: int, weights: Fp8Weights) -> None:
        super().__init__(target, kernels, frame, cache, taps, guess, tail, weights.text)
        self._parts, self._product = weights.parts, weights.wide
        self._layer = 0
        self._delta: Tensor | None = None  # what the last layer adds to its input

    def _project(self, weights: LayerWeights, hidden: Tensor, tables: tuple[Tensor, Tensor],
                 index: int) -> Tensor:
        """Complete hidden, write keys and values of all rows; return the queries."""
        cfg, zero = self.cfg, self.frame.at(Slot.ZERO)
        small, factors = quantised(hidden, self._parts, weight=weights.input_norm,
                                   eps=cfg.rms_norm_eps, delta=self._delta)
        self._delta, self._layer = None, index
        made = self._product(small, factors, weights.qkv, weights.scales['qkv'])
        qkv = made.view(1, len(hidden), -1, cfg.head_dim)
        q = qkv.new_empty((1, len(hidden), cfg.num_heads, cfg.head_dim))
        self.kernels.rotate(qkv, weights.norms, tables, zero, zero, q, self.cache.keys[index],
                            self.cache.values[index], cfg.rms_norm_eps)
        return q

    def _finish(self, weights: LayerWeights, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Return hidden, which lacks the layer's last product unless the layer is tapped."""
        parts, product, scales = self._parts, self._product, weights.scales
        made = product(*quantised(mixed, parts), weights.out, scales['out'])
        small, factors = quantised(hidden, parts, weight=weights.post_norm,
                                   eps=self.cfg.rms_norm_eps, delta=made)
        joined = product(small, factors, weights.gate_up, scales['gate_up'])
        gated = torch.empty((len(joined), joined.shape[1] // 2), dtype=E4M3,
                            device=joined.device)
        parts.gate8(joined, gated, factors)
        self._delta = product(gated, factors, weights.down, scales['down'])
        if self.taps.column(self._layer) is not None:
            hidden.add_(self._delta)
            self._delta = None
        return hidden
