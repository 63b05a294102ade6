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
The size at which the model sees a frame, and the way there that Qwen3-VL was trained with.

Qwen's image processor brings every image to whole merge groups of patches within a range of
areas, which may stretch it a little: 1920x1080 becomes 576x320, 1920x1208 becomes 544x320.
"""

from __future__ import annotations

from dataclasses import replace
import math

import numpy as np
from numpy.typing import NDArray

from rspec_planner.errors import InputError
from rspec_planner.model.config import CameraConfig

Pixels = NDArray[np.uint8]

#: pixels of one visual token along a side: patch size times merge size
TOKEN_PIXELS = 32
#: longest side over shortest that the processor takes
MAX_RATIO = 200


def smart_size(height: int, width: int, step: int = TOKEN_PIXELS, least: int = 163_840,
               most: int = 196_608) -> tuple[int, int]:
    """
    Return the rows and columns that Qwen's image processor resizes to.

    Both are multiples of `step`; `least` and `most` bound the area. Sides are rounded half to
    even; where the area then leaves the range, both original sides are scaled by the root of the
    ratio and floored or ceiled. InputError for an empty or absurdly thin image.
    """
    if min(height, width) < 1 or max(height, width) > MAX_RATIO * min(height, width):
        raise InputError(f'image size {width}x{height}: sides must differ by less than a factor '
                         f'of {MAX_RATIO}; check the camera driver')
    rows, cols = (round(side / step) * step for side in (height, width))
    if rows * cols > most:
        scale = math.sqrt(height * width / most)
        rows, cols = (max(step, math.floor(side / scale / step) * step)
                      for side in (height, width))
    elif rows * cols < least:
        scale = math.sqrt(least / (height * width))
        rows, cols = (math.ceil(side * scale / step) * step for side in (height, width))
    return rows, cols


def for_source(cameras: CameraConfig, height: int, width: int) -> CameraConfig:
    """Return `cameras` at the size that frames of height x width pixels are brought to."""
    rows, cols = smart_size(height, width, TOKEN_PIXELS, cameras.min_pixels, cameras.max_pixels)
    return replace(cameras, height=rows, width=cols)


def size_fault(cameras: CameraConfig, height: int, width: int, tolerance: float) -> str:
    """
    Return why the model must not see a frame of height x width pixels, '' if it may.

    'bicubic': the processor would have brought it to another size. 'area': its aspect ratio
    differs by more than `tolerance`, relative, so that angles would mean something else.
    """
    if cameras.resize == 'bicubic':
        return _other_size(cameras, height, width)
    ratio = (width / height) / (cameras.width / cameras.height) if height and width else 0.0
    return '' if abs(ratio - 1.0) <= tolerance else (
        f'{width}x{height} pixels, expected the aspect ratio of '
        f'{cameras.width}x{cameras.height}; crop upstream')


def _other_size(cameras: CameraConfig, height: int, width: int) -> str:
    """Return '' where the processor brings height x width to the size of `cameras`."""
    try:
        found = for_source(cameras, height, width)
    except InputError as error:
        return str(error)
    return '' if found == cameras else (
        f'{width}x{height} pixels become {found.width}x{found.height} for this model, which is '
        f'loaded for {cameras.width}x{cameras.height}; crop upstream')


def resize_bicubic(image: Pixels, height: int, width: int) -> Pixels:
    """
    Return (height, width, 3) uint8 of an RGB image, bicubic with an antialiasing support.

    It is the operator behind torchvision's resize of a uint8 tensor, which the released models
    were given: equal to it in every bit, and to Pillow's within one grey level.
    """
    if image.shape[:2] == (height, width):
        return image
    import torch  # here, because a node reads parameters and frames before it needs PyTorch
    from torch.nn import functional
    planes = torch.from_numpy(image if image.flags.writeable else image.copy())
    resized = functional.interpolate(planes.permute(2, 0, 1)[None], (height, width),
                                     mode='bicubic', antialias=True, align_corners=False)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())
