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
"""From camera pixels to the patch rows that the vision tower reads."""

from __future__ import annotations

import torch
from torch import Tensor


def patchify(images: Tensor, patch: int = 16, temporal: int = 2, merge: int = 2) -> Tensor:
    """
    Cut RGB images into normalised patch rows.

    images: (N, H, W, 3) uint8, H and W multiples of patch * merge.
    Returns (N, P, 3 * temporal * patch * patch) fp32 in [-1, 1], values ordered channel, time,
    row, column; the merge x merge patches of one token follow each other. A still image is
    repeated `temporal` times, because the patch kernel has a time axis.
    """
    count, height, width, channels = images.shape
    if height % (patch * merge) or width % (patch * merge):
        raise ValueError(f'image {height}x{width} is not a multiple of {patch * merge}')
    rows, cols = height // (patch * merge), width // (patch * merge)
    blocks = images.view(count, rows, merge, patch, cols, merge, patch, channels)
    # rearrange bytes, not floats: a quarter of the memory traffic
    blocks = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6).contiguous()
    values = blocks.to(torch.float32).mul_(2.0 / 255.0).sub_(1.0)
    values = values.view(count, rows * cols * merge * merge, channels, 1, patch * patch)
    return values.expand(-1, -1, -1, temporal, -1).flatten(2)
