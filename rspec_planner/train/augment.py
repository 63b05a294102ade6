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

    pitch_deg: float = 1.2  # of the whole rig: a tele camera moves by many pixels, a wide by few
    yaw_deg: float = 0.4
    shift_px: int = 2  # of all images alike, on top
    brightness: float = 0.12  # of the full range [-1, 1]
    contrast: float = 0.15
    noise: float = 0.02  # standard deviation in [-1, 1]


def draw_shifts(clips: int, focal_px: Tensor, strength: Augmentation) -> Tensor:
    """
    Return row and column moves (2, clips, V) int64 of the V images of each clip.

    focal_px (V,): turning a camera by an angle moves its picture by focal length times angle.
    """
    device = focal_px.device
    largest = torch.tensor([strength.pitch_deg, strength.yaw_deg], device=device)
    angle = torch.deg2rad(largest)[:, None] * (2 * torch.rand(2, clips, device=device) - 1)
    shift = strength.shift_px * (2 * torch.rand(2, clips, device=device) - 1)
    moves: Tensor = (angle[..., None] * focal_px + shift[..., None]).round().long()
    return moves


def shift_images(images: Tensor, moves: Tensor) -> Tensor:
    """Return images (B, V, H, W, 3) uint8 moved by (2, B, V) pixels, edges repeated."""
    batch, views, height, width, _ = images.shape
    device = images.device
    rows = (torch.arange(height, device=device) + moves[0, :, :, None]).clamp(0, height - 1)
    cols = (torch.arange(width, device=device) + moves[1, :, :, None]).clamp(0, width - 1)
    clip = torch.arange(batch, device=device)[:, None, None, None]
    view = torch.arange(views, device=device)[:, None, None]
    return images[clip, view, rows[..., None], cols[..., None, :]]


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
