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
"""Image augmentation on the device, the same for all images of a clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """Largest changes; zero switches one off."""

    shift_px: int = 4  # whole pixels, the edge is repeated
    brightness: float = 0.12  # of the full range [-1, 1]
    contrast: float = 0.15
    noise: float = 0.02  # standard deviation in [-1, 1]


def shift_images(images: Tensor, limit: int) -> Tensor:
    """Return images (B, V, H, W, 3) uint8, each clip moved by up to `limit` pixels."""
    if limit <= 0:
        return images
    batch, _, height, width, _ = images.shape
    move = torch.randint(-limit, limit + 1, (2, batch, 1), device=images.device)
    rows = (torch.arange(height, device=images.device) + move[0]).clamp(0, height - 1)
    cols = (torch.arange(width, device=images.device) + move[1]).clamp(0, width - 1)
    clip = torch.arange(batch, device=images.device)[:, None, None]
    return images[clip, :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2, 4)


def augment_patches(patches: Tensor, clips: int, strength: Augmentation) -> Tensor:
    """
    Return patches (clips * V, P, n) in [-1, 1] with other light and some noise.

    Brightness and contrast are drawn once per clip: frames of one clip must stay comparable.
    """
    values = patches.view(clips, -1, *patches.shape[1:])
    shape = (clips, 1, 1, 1)
    gain = 1.0 + strength.contrast * (2 * torch.rand(shape, device=patches.device) - 1)
    offset = strength.brightness * (2 * torch.rand(shape, device=patches.device) - 1)
    values = values * gain + offset
    if strength.noise > 0.0:
        values = values.add_(torch.randn_like(values), alpha=strength.noise)
    return torch.clamp_(values, -1.0, 1.0).flatten(0, 1)
