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
Vision tower: images in, visual tokens and DeepStack features out.

Structure of the Qwen3-VL tower (arXiv 2511.21631): learned positions resampled bilinearly,
axial rotary, full attention within one image, 2x2 merge, and a few blocks whose output is
merged on its own and later added inside the decoder (DeepStack, arXiv 2406.04334).
Module names give the state-dict keys of `vlm.model.visual.*` in released checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
import math

import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.model.config import VisionConfig
from rspec_planner.model.rope import merge_order, rotate, vision_cos_sin

LAYER_NORM_EPS = 1e-6
_GELU = 2.0 * math.sqrt(2.0 / math.pi)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh-approximated GELU of x, elementwise."""
    if x.device.type != 'cpu' or torch.is_grad_enabled():
        return functional.gelu(x, approximate='tanh')
    # (1 + tanh u) / 2 = sigmoid(2 u): half the time of the library's tanh on a CPU
    gate = (x * x).mul_(_GELU * 0.044715).add_(_GELU).mul_(x)
    return gate.sigmoid_().mul_(x)


class PatchEmbed(nn.Module):
    """A 3-D convolution with stride = kernel, computed as one matrix product."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        kernel = (cfg.temporal_patch_size, cfg.patch_size, cfg.patch_size)
        self.proj = nn.Conv3d(cfg.in_channels, cfg.hidden_size, kernel, stride=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        """
        Return (N, P, hidden) of patch rows (N, P, channels * time * patch * patch).

        Rows of one time slot stand for a still image, which fills all slots of the kernel.
        """
        kernel = self.proj.weight
        if patches.shape[-1] * kernel.shape[2] == kernel[0].numel():
            kernel = kernel.sum(2)
        weight = kernel.flatten(1)
        return functional.linear(patches.to(weight.dtype), weight, self.proj.bias)


class VisionAttention(nn.Module):
    """Multi-head attention among the patches of one image."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.num_heads = cfg.num_heads
        self.qkv = nn.Linear(cfg.hidden_size, 3 * cfg.hidden_size)
        self.proj = nn.Linear(cfg.hidden_size, cfg.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return (N, P, hidden); images never see each other because they are batch rows."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class VisionMlp(nn.Module):
    """Two linears around a tanh-approximated GELU."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(cfg.hidden_size, cfg.intermediate_size)
        self.linear_fc2 = nn.Linear(cfg.intermediate_size, cfg.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, P, hidden)."""
        out: Tensor = self.linear_fc2(gelu_tanh(self.linear_fc1(x)))
        return out


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(cfg.hidden_size, eps=LAYER_NORM_EPS)
        self.norm2 = nn.LayerNorm(cfg.hidden_size, eps=LAYER_NORM_EPS)
        self.attn = VisionAttention(cfg)
        self.mlp = VisionMlp(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return (N, P, hidden)."""
        x = x + self.attn(self.norm1(x), cos, sin)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchMerger(nn.Module):
    """
    Join each merge group of patches into one token of the decoder's width.

    The main merger normalises single patches; the DeepStack mergers normalise the joined
    group (`after_regroup`). Both use the exact GELU, unlike the blocks.
    """

    def __init__(self, cfg: VisionConfig, after_regroup: bool) -> None:
        super().__init__()
        self.group = cfg.spatial_merge_size ** 2
        self.after_regroup = after_regroup
        joined = cfg.hidden_size * self.group
        self.norm = nn.LayerNorm(joined if after_regroup else cfg.hidden_size,
                                 eps=LAYER_NORM_EPS)
        self.linear_fc1 = nn.Linear(joined, joined)
        self.linear_fc2 = nn.Linear(joined, cfg.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, P / group, out_hidden) of (N, P, hidden)."""
        if not self.after_regroup:
            x = self.norm(x)
        x = x.reshape(x.shape[0], x.shape[1] // self.group, -1)
        if self.after_regroup:
            x = self.norm(x)
        out: Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(x)))
        return out


@dataclass(frozen=True)
class GridConstants:
    """What depends only on the patch grid: rotary tables and the resampling of positions."""

    cos: Tensor  # (P, head_dim) fp32
    sin: Tensor  # (P, head_dim) fp32
    corners: Tensor  # (4, P) int64, rows of the learned table
    weights: Tensor  # (4, P) fp32, bilinear weights of the corners


def _bilinear(rows: int, cols: int, merge: int, side: int,
              device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 4 table rows and weights of every patch; grid corners meet table corners."""
    row, col = merge_order(rows, cols, merge, device)
    y = torch.linspace(0, side - 1, rows, device=device)[row]
    x = torch.linspace(0, side - 1, cols, device=device)[col]
    y0, x0 = y.long(), x.long()
    y1, x1 = (y0 + 1).clamp(max=side - 1), (x0 + 1).clamp(max=side - 1)
    fy, fx = y - y0, x - x0
    corners = torch.stack((y0 * side + x0, y0 * side + x1, y1 * side + x0, y1 * side + x1))
    weights = torch.stack(((1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx))
    return corners, weights


class VisionTower(nn.Module):
    """Patch rows of N images to N x T visual tokens, plus DeepStack features."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.patch_embed = PatchEmbed(cfg)
        self.pos_embed = nn.Embedding(cfg.num_position_embeddings, cfg.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(cfg) for _ in range(cfg.depth))
        self.merger = PatchMerger(cfg, after_regroup=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(cfg, after_regroup=True) for _ in cfg.deepstack_layers)
        self._grids: dict[tuple[int, int, torch.device], GridConstants] = {}

    def grid_constants(self, grid: tuple[int, int], device: torch.device) -> GridConstants:
        """Return the tables of one patch grid, computed once per grid and device."""
        key = (*grid, device)
        if key not in self._grids:
            merge = self.cfg.spatial_merge_size
            head_dim = self.cfg.hidden_size // self.cfg.num_heads
            side = math.isqrt(self.cfg.num_position_embeddings)
            with torch.inference_mode(False):  # the tables must stay usable for training
                self._grids[key] = GridConstants(
                    *vision_cos_sin(*grid, head_dim, merge, device),
                    *_bilinear(*grid, merge, side, device))
        return self._grids[key]

    def positions(self, constants: GridConstants) -> Tensor:
        """Return the learned table resampled to the patch grid, (P, hidden)."""
        corners = self.pos_embed.weight[constants.corners]
        return (corners * constants.weights.to(corners.dtype)[..., None]).sum(0)

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
        """
        Encode N images of one size.

        patches: (N, P, values) from `patchify`; grid: patch rows and columns, P = rows * cols.
        Returns features (N, T, out_hidden) and one (N, T, out_hidden) per DeepStack layer,
        in the order in which the decoder adds them.
        """
        constants = self.grid_constants(grid, patches.device)
        x = self.patch_embed(patches)
        x = x + self.positions(constants).to(x.dtype)
        deepstack = []
        for index, block in enumerate(self.blocks):
            x = block(x, constants.cos, constants.sin)
            if index in self.cfg.deepstack_layers:
                tap = self.cfg.deepstack_layers.index(index)
                deepstack.append(self.deepstack_merger_list[tap](x))
        return self.merger(x), deepstack
