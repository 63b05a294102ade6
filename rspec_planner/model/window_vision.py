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
Vision tower of Qwen2.5-VL (arXiv 2502.13923): pairs of video frames in, visual tokens out.

RMSNorm, SwiGLU with biases, an axial rotary instead of learned positions, and attention within
windows of 112 x 112 pixels but for a few blocks, whose patches see their whole frame. Windows
count from the frame's upper left corner; those at the right and lower edge may be smaller.
Module names give the state-dict keys of `visual.*` in released checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.model.autovla_config import WindowVisionConfig
from rspec_planner.model.image import patchify
from rspec_planner.model.layer import RmsNorm
from rspec_planner.model.rope import merge_order, rotate, vision_cos_sin

NORM_EPS = 1e-6
#: mean and deviation of the colours in 0 .. 1 that Qwen2.5-VL was trained with (those of CLIP)
COLOUR_MEAN = (0.48145466, 0.4578275, 0.40821073)
COLOUR_STD = (0.26862954, 0.26130258, 0.27577711)


def patchify_pairs(frames: Tensor, patch: int = 14, merge: int = 2) -> Tensor:
    """
    Cut pairs of RGB frames into normalised patch rows.

    frames: (N, T, H, W, 3) uint8, T frames of one temporal patch, oldest first; H and W
    multiples of patch * merge. Returns (N, P, 3 * T * patch * patch) fp32, values ordered
    channel, time, row, column; the merge x merge patches of one token follow each other.
    """
    count, times = frames.shape[:2]
    single = patchify(frames.flatten(0, 1), patch, 1, merge)
    mean, std = (torch.tensor(x, device=frames.device).view(3, 1)
                 for x in (COLOUR_MEAN, COLOUR_STD))
    values = single.view(count, times, -1, 3, patch * patch)  # of -1 .. 1
    values = (values * (0.5 / std)).add_((0.5 - mean) / std)
    return values.permute(0, 2, 3, 1, 4).flatten(2)


class PairEmbed(nn.Module):
    """A 3-D convolution with stride = kernel and no bias, computed as one matrix product."""

    def __init__(self, cfg: WindowVisionConfig) -> None:
        super().__init__()
        kernel = (cfg.temporal_patch_size, cfg.patch_size, cfg.patch_size)
        self.proj = nn.Conv3d(cfg.in_channels, cfg.hidden_size, kernel, stride=kernel, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """Return (N, P, hidden) of patch rows (N, P, channels * time * patch * patch)."""
        weight = self.proj.weight.flatten(1)
        return functional.linear(patches.to(weight.dtype), weight)


class WindowAttention(nn.Module):
    """Multi-head attention among the patches of one pair of frames that a mask lets through."""

    def __init__(self, cfg: WindowVisionConfig) -> None:
        super().__init__()
        self.num_heads = cfg.num_heads
        self.qkv = nn.Linear(cfg.hidden_size, 3 * cfg.hidden_size)
        self.proj = nn.Linear(cfg.hidden_size, cfg.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None) -> Tensor:
        """Return (N, P, hidden); visible: (P, P) bool, None for all."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=visible)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class WindowMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) with biases."""

    def __init__(self, cfg: WindowVisionConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, P, hidden)."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class WindowBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, cfg: WindowVisionConfig) -> None:
        super().__init__()
        self.norm1 = RmsNorm(cfg.hidden_size, NORM_EPS)
        self.norm2 = RmsNorm(cfg.hidden_size, NORM_EPS)
        self.attn = WindowAttention(cfg)
        self.mlp = WindowMlp(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None) -> Tensor:
        """Return (N, P, hidden)."""
        x = x + self.attn(self.norm1(x), cos, sin, visible)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PairMerger(nn.Module):
    """Join each merge group of normed patches into one token of the decoder's width."""

    def __init__(self, cfg: WindowVisionConfig) -> None:
        super().__init__()
        self.group = cfg.spatial_merge_size ** 2
        joined = cfg.hidden_size * self.group
        self.ln_q = RmsNorm(cfg.hidden_size, NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(joined, joined), nn.GELU(),
                                 nn.Linear(joined, cfg.out_hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, P / group, out_hidden) of (N, P, hidden)."""
        out: Tensor = self.mlp(self.ln_q(x).unflatten(1, (-1, self.group)).flatten(2))
        return out


@dataclass(frozen=True)
class PairConstants:
    """What depends only on the patch grid."""

    cos: Tensor  # (P, head_dim) fp32
    sin: Tensor  # (P, head_dim) fp32
    same_window: Tensor  # (P, P) bool


def same_window(rows: int, cols: int, merge: int, window: int,
                device: torch.device | None = None) -> Tensor:
    """Return (P, P) bool: patches, in tower order, of one window of `window` patches a side."""
    row, col = merge_order(rows, cols, merge, device)
    window_id = (row // window) * cols + col // window
    return window_id[:, None] == window_id


class WindowVisionTower(nn.Module):
    """Patch rows of N pairs of frames to N x T visual tokens."""

    def __init__(self, cfg: WindowVisionConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.patch_embed = PairEmbed(cfg)
        self.blocks = nn.ModuleList(WindowBlock(cfg) for _ in range(cfg.depth))
        self.merger = PairMerger(cfg)
        self._grids: dict[tuple[int, int, torch.device], PairConstants] = {}

    def grid_constants(self, grid: tuple[int, int], device: torch.device) -> PairConstants:
        """Return the tables of one patch grid, computed once per grid and device."""
        key = (*grid, device)
        if key not in self._grids:
            cfg = self.cfg
            merge, unit = cfg.spatial_merge_size, cfg.patch_size * cfg.spatial_merge_size
            window = cfg.window_size // unit * merge
            with torch.inference_mode(False):  # the tables must stay usable for training
                self._grids[key] = PairConstants(
                    *vision_cos_sin(*grid, cfg.hidden_size // cfg.num_heads, merge, device),
                    same_window(*grid, merge, window, device))
        return self._grids[key]

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """
        Encode N pairs of frames of one size.

        patches: (N, P, values) from `patchify_pairs`; grid: patch rows and columns.
        Returns features (N, T, out_hidden). A masked attention over all P patches instead of one
        per window costs 4 P H operations a patch beside 24 H^2 of the products: 6 % at the 480
        patches and width 1,280 of AutoVLA, for uneven windows without padding.
        """
        constants = self.grid_constants(grid, patches.device)
        x = self.patch_embed(patches)
        for index, block in enumerate(self.blocks):
            whole = index in self.cfg.full_attention_layers
            x = block(x, constants.cos, constants.sin, None if whole else constants.same_window)
        out: Tensor = self.merger(x)
        return out
