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
"""The vision stage as a graph: images of one fixed size, so that positions are constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from rspec_planner.engine.stage_layers import blank, joined_heads, Stage, Tables
from rspec_planner.engine.stage_ops import attention
from rspec_planner.engine.stages import StageShapes
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.target import Target
from rspec_planner.model.vision import PatchEmbed, VisionAttention, VisionBlock, VisionMlp


class VisionStage(Stage):
    """
    N images to visual tokens, see `torch_executor.vision_executor`.

    inputs: 'images' (N, H, W, 3) uint8 RGB. outputs: 'features' (N, T, hidden), 'deepstack'
    (D, N, T, hidden).
    """

    name = 'vision'

    def __init__(self, target: Target, shapes: StageShapes) -> None:
        super().__init__()
        self.vision, self.cfg, self.shapes = target.vision, target.cfg, shapes
        device = torch.device('cpu')  # constants have values even where weights have none
        constants = target.vision.grid_constants(target.cfg.patch_grid, device)
        half = constants.cos.shape[-1] // 2
        self._cos, self._sin = (table[:, :half].contiguous()[None]
                                for table in (constants.cos, constants.sin))
        self._corners, self._weights = constants.corners, constants.weights

    def examples(self) -> dict[str, Tensor]:
        """Return the inputs, see `Stage.examples`."""
        cameras = self.cfg.cameras
        return {'images': blank(self.shapes.images, cameras.height, cameras.width, 3,
                                dtype=torch.uint8)}

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, see the class."""
        vision = self.vision
        x = _embed(vision.patch_embed, patches(inputs['images'], self.cfg))
        x = x + self._positions().to(x.dtype)
        count = x.shape[0]
        tables = Tables(self._cos.expand(count, -1, -1), self._sin.expand(count, -1, -1))
        deepstack = []
        for index, module in enumerate(vision.blocks):
            block = cast('VisionBlock', module)
            x = x + _attend(block.attn, block.norm1(x), tables)
            x = x + _mlp(block.mlp, block.norm2(x))
            if index in vision.cfg.deepstack_layers:
                tap = vision.cfg.deepstack_layers.index(index)
                deepstack.append(vision.deepstack_merger_list[tap](x))
        return {'features': vision.merger(x), 'deepstack': torch.stack(deepstack)}

    def _positions(self) -> Tensor:
        """Return the learned table resampled to the patch grid, (P, hidden)."""
        table = self.vision.pos_embed.weight
        corners = functional.embedding(self._corners, table)
        return (corners * self._weights.to(table.dtype)[..., None]).sum(0)


def _embed(module: PatchEmbed, rows: Tensor) -> Tensor:
    """Return (N, P, hidden) of still images: the same rows fill every time slot of the kernel."""
    weight = module.proj.weight.sum(2).flatten(1)
    return functional.linear(rows.to(weight.dtype), weight, module.proj.bias)


def _mlp(module: VisionMlp, x: Tensor) -> Tensor:
    """Return (N, P, hidden), the approximated GELU in one node."""
    out: Tensor = module.linear_fc2(functional.gelu(module.linear_fc1(x), approximate='tanh'))
    return out


def _attend(attn: VisionAttention, x: Tensor, tables: Tables) -> Tensor:
    """Return the attention result (N, P, hidden) of normed x; each image sees itself."""
    joined = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k, v = joined.unbind(0)
    out: Tensor = attn.proj(joined_heads(attention(tables.turn(q), tables.turn(k), v)))
    return out


def patches(images: Tensor, cfg: ProfileConfig) -> Tensor:
    """
    Return patch rows (N, P, 3 * patch * patch) fp32 of images (N, H, W, 3) uint8.

    They are those of `image.patchify` with one time slot.

    Bytes are widened first: inference engines rearrange no bytes.
    """
    vision = cfg.vision
    count, height, width, channels = images.shape
    patch, merge = vision.patch_size, vision.spatial_merge_size
    rows, cols = height // (patch * merge), width // (patch * merge)
    values = images.to(torch.float32) * (2.0 / 255.0) - 1.0
    values = values.view(count, rows, merge, patch, cols, merge, patch, channels)
    values = values.permute(0, 1, 4, 2, 5, 7, 3, 6)
    return values.reshape(count, rows * cols * merge * merge, channels * patch * patch)
