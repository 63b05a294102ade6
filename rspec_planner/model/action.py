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
Action expert: a narrower decoder that reads the target's KV cache and predicts a velocity.

Layer i of the expert attends to the keys and values of layer i of the text decoder, followed
by its own 64 rows; the 64 rows see each other in both directions. Waypoints are told apart
only by the rotary. Module names give the state-dict keys of `expert.*`, `action_in_proj.*` and
`action_out_proj.*` in released checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
import math
from typing import Any

import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.model.config import ExpertConfig, ProfileConfig
from rspec_planner.model.layer import attend, DecoderLayer, fold_mask, RmsNorm, runners

IN_PROJ_EPS = 1e-5
ACTION_DIMS = 2  # acceleration, curvature


class FourierEncoder(nn.Module):
    """
    A scalar as sines and cosines of log-spaced frequencies, scaled to unit variance.

    `freqs` (1, feats / 2) is a buffer outside the state dict: half precision would move the
    phase by degrees. A loader of a checkpoint that stores it assigns it.
    """

    freqs: Tensor

    def __init__(self, feats: int, max_freq: float) -> None:
        super().__init__()
        self.max_freq = max_freq
        self.bands = feats // 2
        self.register_buffer('freqs', torch.empty(1, self.bands), persistent=False)
        self.reset_frequencies()

    def reset_frequencies(self, device: torch.device | None = None) -> None:
        """Rebuild the frequencies 1 .. max_freq in fp32, on `device` if given."""
        exponent = torch.linspace(0, math.log10(self.max_freq), self.bands, dtype=torch.float64,
                                  device=device or self.freqs.device)
        self.freqs = (10.0 ** exponent).to(torch.float32)[None]

    def _apply(self, fn: Any, recurse: bool = True) -> FourierEncoder:
        exact = self.freqs
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.freqs.dtype != exact.dtype:  # a cast of the module spares the frequencies
            self.freqs = exact.to(self.freqs.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., feats) fp32 of scalars (...)."""
        phase = x.float()[..., None] * self.freqs[0] * (2 * math.pi)
        return torch.cat((phase.sin(), phase.cos()), dim=-1) * math.sqrt(2.0)


class Trunk(nn.Module):
    """Linear, SiLU, RMSNorm repeated, then a last linear."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        modules: list[nn.Module] = []
        for inner, outer in zip(sizes[:-2], sizes[1:-1]):
            modules += [nn.Linear(inner, outer), nn.SiLU(), RmsNorm(outer, IN_PROJ_EPS)]
        self.trunk = nn.Sequential(*modules, nn.Linear(sizes[-2], sizes[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., sizes[-1])."""
        out: Tensor = self.trunk(x)
        return out


class ActionInProj(nn.Module):
    """Noisy action and time of each waypoint as one expert row."""

    def __init__(self, cfg: ExpertConfig) -> None:
        super().__init__()
        feats = cfg.num_fourier_feats
        self.sinus = nn.ModuleList(
            FourierEncoder(feats, cfg.max_freq) for _ in range(ACTION_DIMS))
        self.timestep_fourier_encoder = FourierEncoder(feats, cfg.max_freq)
        inner = [cfg.in_proj_hidden_size] * cfg.in_proj_layers
        self.encoder = Trunk([feats * (ACTION_DIMS + 1), *inner, cfg.hidden_size])
        self.norm = nn.LayerNorm(cfg.hidden_size, eps=IN_PROJ_EPS)

    def forward(self, noisy: Tensor, t: Tensor) -> Tensor:
        """Return (B, W, hidden) of actions (B, W, 2) and times (B,), in the weights' dtype."""
        features = [encode(noisy[..., i]) for i, encode in enumerate(self.sinus)]
        time = self.timestep_fourier_encoder(t)[:, None].expand(-1, noisy.shape[1], -1)
        joined = torch.cat((*features, time), dim=-1).to(self.norm.weight.dtype)
        out: Tensor = self.norm(self.encoder(joined))
        return out


@dataclass(frozen=True)
class ExpertContext:
    """
    Target keys and values laid out for many flow steps over one frame.

    keys, values: (L, B, kv_heads, C + W, d); rows 0 .. C - 1 are the target's, the last W are
    scratch that every step overwrites. mask: additive (B, 1, 1, C + W) or None.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    length: int  # C


class ActionExpert(nn.Module):
    """Velocity of the flow for 64 normalised (acceleration, curvature) pairs."""

    def __init__(self, cfg: ProfileConfig) -> None:
        super().__init__()
        expert = cfg.expert
        self.waypoints = cfg.action_space.n_waypoints
        self.layers = nn.ModuleList(
            DecoderLayer(cfg.text, expert.hidden_size, expert.num_heads,
                         expert.intermediate_size) for _ in range(cfg.text.num_layers))
        self.norm = RmsNorm(expert.hidden_size, cfg.text.rms_norm_eps)
        self.action_in_proj = ActionInProj(expert)
        self.action_out_proj = nn.Linear(expert.hidden_size, ACTION_DIMS)

    def reset_frequencies(self, device: torch.device) -> None:
        """Rebuild the buffers that no checkpoint of ours stores."""
        for module in self.modules():
            if isinstance(module, FourierEncoder):
                module.reset_frequencies(device)

    def prepare(self, keys: Tensor, values: Tensor,
                context_mask: Tensor | None = None) -> ExpertContext:
        """
        Lay out the context of one frame once, for inference over many steps.

        keys, values: (L, B, kv_heads, C, d), only rows that the expert may see, or all rows
        with context_mask (B, C) bool, True where visible.
        """
        length = keys.shape[3]
        wide = [torch.empty((*x.shape[:3], length + self.waypoints, x.shape[4]),
                            dtype=x.dtype, device=x.device) for x in (keys, values)]
        wide[0][:, :, :, :length] = keys
        wide[1][:, :, :, :length] = values
        return ExpertContext(wide[0], wide[1], self._mask(context_mask, keys.dtype), length)

    def _mask(self, context_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask over context and own rows; own rows are all visible."""
        if context_mask is None:
            return None
        visible = functional.pad(context_mask, (0, self.waypoints), value=True)
        return fold_mask(visible[:, None, None], 1, dtype)

    def velocity(self, noisy: Tensor, t: Tensor, context: ExpertContext, cos: Tensor,
                 sin: Tensor) -> Tensor:
        """Return (B, W, 2) fp32 like `forward`, on a prepared context (no gradients)."""
        x = self.action_in_proj(noisy, t)
        layers, sin = runners(self.layers, sin)
        for layer, keys, values in zip(layers, context.keys.unbind(0), context.values.unbind(0)):
            q, k, v = layer.project(x, cos, sin)
            keys[:, :, context.length:] = k
            values[:, :, context.length:] = v
            x = layer.finish(x, attend(q, keys, values, context.mask).to(x.dtype))
        return self._read_out(x)

    def _read_out(self, x: Tensor) -> Tensor:
        out: Tensor = self.action_out_proj(self.norm(x))
        return out.float()

    def forward(self, noisy: Tensor, t: Tensor, keys: Tensor, values: Tensor, cos: Tensor,
                sin: Tensor, context_mask: Tensor | None = None) -> Tensor:
        """
        Return the velocity (B, W, 2) fp32.

        noisy: (B, W, 2) normalised actions; t: (B,) in [0, 1], 0 is noise.
        keys, values: (L, B, kv_heads, C, d) of the target, C whole rows.
        cos, sin: (W, d) or (B, W, d) of positions offset + rope_delta + 0 .. W - 1.
        context_mask: (B, C) bool, True where a context row is visible; None shows all.
        """
        mask = self._mask(context_mask, noisy.dtype)
        x = self.action_in_proj(noisy, t)
        layers, sin = runners(self.layers, sin)
        for index, layer in enumerate(layers):
            q, k, v = layer.project(x, cos, sin)
            mixed = attend(q, torch.cat((keys[index].to(k.dtype), k), dim=2),
                           torch.cat((values[index].to(v.dtype), v), dim=2),
                           None if mask is None else mask.to(q.dtype))
            x = layer.finish(x, mixed.to(x.dtype))
        return self._read_out(x)
