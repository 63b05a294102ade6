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
All Euler steps of the action expert over the frame's cache.

The context's length is a number on the device and the waypoints' own keys and values lie apart
from it, so that N candidates share one cache without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rspec_planner.engine.cuda_frame import FrameBuffers
from rspec_planner.engine.cuda_rows import half_tables, LayerWeights, Rows, RowShape
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.select import Kernels
from rspec_planner.model.action import ActionInProj, FourierEncoder
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache


class Flow:
    """Carries the frame's noise to its actions."""

    def __init__(self, target: Target, kernels: Kernels, frame: FrameBuffers, cache: KVCache,
                 steps: int, layers: Sequence[LayerWeights] | None = None) -> None:
        """layers: others than the expert's own, such as fp8 copies."""
        text, expert = target.cfg.text, target.expert
        samples, waypoints, _ = frame.noise.shape
        self._frame, self._cache, self._kernels, self._steps = frame, cache, kernels, steps
        self.layers = list(layers) if layers is not None else [
            LayerWeights.of(layer) for layer in expert.layers]
        shape = RowShape(samples, waypoints, target.cfg.expert.num_heads, text.num_kv_heads,
                         text.head_dim, target.cfg.expert.intermediate_size,
                         target.cfg.expert.hidden_size, text.rms_norm_eps)
        tables = half_tables(cache.capacity + waypoints, text.head_dim, text.rope_theta,
                             target.device)
        self.rows = Rows(shape, kernels, tables, target.dtype)
        own = (samples, text.num_kv_heads, waypoints, text.head_dim)
        keys, values = (torch.zeros(own, dtype=target.dtype, device=target.device)
                        for _ in range(2))
        self.own = keys, values  # of the waypoints, overwritten in every layer
        self._entry = _Entry(expert.action_in_proj, steps, target.dtype)
        self._norm = expert.norm.weight.detach()
        self._out = expert.action_out_proj
        self._eps = text.rms_norm_eps

    def use(self, kernels: Kernels) -> None:
        """Run other kernels from now on."""
        self._kernels = self.rows.kernels = kernels

    def __call__(self) -> None:
        """Enqueue all steps."""
        actions = self._frame.actions
        actions.copy_(self._frame.noise)
        for step in range(self._steps):
            actions.add_(self._velocity(actions, step), alpha=1.0 / self._steps)

    def view(self, index: int) -> dict[str, Any]:
        """Return what the waypoints see in a layer, arguments of `reference.attend`."""
        frame, cache = self._frame, self._cache
        return {'start': frame.at(Slot.CONTEXT), 'own': self.own, 'causal': False,
                'own_low': frame.at(Slot.ZERO),
                'cache': (cache.keys[index, 0], cache.values[index, 0])}

    def _velocity(self, noisy: Tensor, step: int) -> Tensor:
        """Return the velocity (Z, W, 2) fp32 at one of the steps' times."""
        frame, x = self._frame, self._entry(noisy, step)
        for index, weights in enumerate(self.layers):
            behind = self.layers[index + 1] if index + 1 < len(self.layers) else None
            self.rows.layer(weights, x, self.rows.hidden, frame.at(Slot.ZERO),
                            frame.at(Slot.CONTEXT_ANGLE), self.own, self.view(index), behind,
                            ready=index > 0)
            x = self.rows.hidden
        normed = torch.empty_like(x)
        self._kernels.norm(x, self._norm, normed, self._eps)
        out: Tensor = self._out(normed)
        return out.float().view_as(noisy)


class _Entry:
    """`ActionInProj` with the features of every step's time made in advance."""

    def __init__(self, proj: ActionInProj, steps: int, dtype: torch.dtype) -> None:
        self._proj, self._dtype = proj, dtype
        encoders = [encoder for encoder in proj.sinus if isinstance(encoder, FourierEncoder)]
        self._turns = torch.stack([encoder.freqs[0] for encoder in encoders]) * (2 * math.pi)
        device = self._turns.device
        times = torch.arange(steps, dtype=torch.float32, device=device) / steps
        with torch.inference_mode():
            self._times = proj.timestep_fourier_encoder(times)

    def __call__(self, noisy: Tensor, step: int) -> Tensor:
        """Return (Z * W, hidden) of actions (Z, W, 2)."""
        phase = noisy[..., None] * self._turns
        waves = torch.stack((phase.sin(), phase.cos()), dim=-2) * math.sqrt(2.0)
        rows = waves.flatten(-3).flatten(0, 1)
        time = self._times[step].expand(len(rows), -1)
        joined = torch.cat((rows, time), dim=-1).to(self._dtype)
        hidden = self._proj.encoder(joined)
        return functional.layer_norm(hidden, hidden.shape[-1:], self._proj.norm.weight,
                                     self._proj.norm.bias, self._proj.norm.eps)
