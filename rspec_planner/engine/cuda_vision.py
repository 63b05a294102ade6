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
Encoding of the images that are new in a frame, and the features of those seen before.

The tower attends within one image, so the features of an earlier frame's images stay exact. They
lie camera-major, oldest first, as the prompt wants them: a new frame moves every camera's
features one place back and puts the new ones last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from rspec_planner.engine.cuda_decoder import Prefill, PREFILL_ATTENTION
from rspec_planner.engine.kernels.select import Kernels
from rspec_planner.model.image import patchify
from rspec_planner.model.target import Target
from rspec_planner.model.vision import gelu_tanh, LAYER_NORM_EPS, VisionBlock, VisionTower


class Tower:
    """
    `VisionTower` between whose products one pass over memory remains each.

    Says what the tower says up to the order of its sums: a residual is added while the next norm
    is taken, queries and keys are turned where they lie, and what never changes (positions,
    tables) is made once.
    """

    def __init__(self, tower: VisionTower, grid: tuple[int, int], kernels: Kernels,
                 device: torch.device) -> None:
        self._tower, self._kernels = tower, kernels
        constants = tower.grid_constants(grid, device)
        self._tables = constants.cos.contiguous(), constants.sin.contiguous()
        with torch.inference_mode():
            self._positions = tower.positions(constants)

    def __call__(self, patches: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return features (N, T, H) and those of each DeepStack layer; see `VisionTower`."""
        tower, cfg = self._tower, self._tower.cfg
        embedded = tower.patch_embed(patches)
        shape, x = embedded.shape, embedded.add_(self._positions.to(embedded.dtype))
        x = x.flatten(0, 1)
        normed, pending, deepstack = torch.empty_like(x), None, []
        for index, each in enumerate(tower.blocks):
            block = cast(VisionBlock, each)
            self._norm(x, pending, block.norm1, normed)
            mixed = self._mix(block, normed.view(shape))
            self._norm(x, block.attn.proj(mixed), block.norm2, normed)
            pending = block.mlp.linear_fc2(gelu_tanh(block.mlp.linear_fc1(normed)))
            if index in cfg.deepstack_layers:
                x.add_(pending)
                pending = None
                merge = tower.deepstack_merger_list[cfg.deepstack_layers.index(index)]
                deepstack.append(merge(x.view(shape)))
        if pending is not None:
            x.add_(pending)
        return tower.merger(x.view(shape)), deepstack

    def _norm(self, x: Tensor, add: Tensor | None, norm: torch.nn.LayerNorm, out: Tensor) -> None:
        self._kernels.add_norm(x, add, norm.weight, norm.bias, out, LAYER_NORM_EPS)

    def _mix(self, block: VisionBlock, normed: Tensor) -> Tensor:
        """Return the attention (N * P, hidden) among the patches of each image."""
        heads = block.attn.num_heads
        qkv = block.attn.qkv(normed).unflatten(-1, (3, heads, -1))
        q, k = qkv.new_empty((2, *qkv.shape[:2], *qkv.shape[3:]))
        self._kernels.turn(qkv, self._tables, q, k)
        with sdpa_kernel(PREFILL_ATTENTION, set_priority=True):
            mixed = functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), qkv[:, :, 2].transpose(1, 2))
        return mixed.transpose(1, 2).reshape(-1, normed.shape[-1])


class Encoder:
    """Fills a prefill's features from `images` (cameras, H, W, 3) uint8 RGB, one per camera."""

    def __init__(self, target: Target, prefill: Prefill) -> None:
        cameras = target.cfg.cameras
        self._target = target
        self.tower: Callable[[Tensor], tuple[Tensor, list[Tensor]]] = Tower(
            target.vision, target.cfg.patch_grid, prefill.kernels, target.device)
        count, frames = len(cameras.names), cameras.frames
        self.images = torch.zeros((count, cameras.height, cameras.width, 3), dtype=torch.uint8,
                                  device=target.device)
        place = (count, frames, target.cfg.tokens_per_image, target.cfg.text.hidden_size)
        self._features = prefill.features.view(place)
        self._deepstack = prefill.deepstack.view(-1, *place)

    def __call__(self) -> None:
        """Enqueue the tower and the move."""
        target = self._target
        vision = target.cfg.vision
        patches = patchify(self.images, vision.patch_size, vision.temporal_patch_size,
                           vision.spatial_merge_size)
        features, deepstack = self.tower(patches)
        for place in range(self._features.shape[1] - 1):  # one after the other: no room for both
            self._features[:, place] = self._features[:, place + 1]
            self._deepstack[:, :, place] = self._deepstack[:, :, place + 1]
        self._features[:, -1] = features
        for place, part in zip(self._deepstack, deepstack):
            place[:, -1] = part
