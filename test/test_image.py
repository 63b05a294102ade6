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
import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessorPil

from rspec_planner.model.image import patchify
from rspec_planner.model.rope import merge_order


def test_every_value_lands_where_its_pixel_says():
    images = torch.randint(0, 256, (2, 64, 96, 3), dtype=torch.uint8)
    patches = patchify(images)
    assert patches.shape == (2, 24, 1536) and patches.dtype == torch.float32
    row, col = merge_order(4, 6, 2)
    cube = patches.view(2, 24, 3, 2, 16, 16)
    for index in range(24):
        top, left = 16 * int(row[index]), 16 * int(col[index])
        pixels = images[:, top:top + 16, left:left + 16].permute(0, 3, 1, 2).double()
        want = ((pixels / 255 - 0.5) / 0.5).float()
        for time in range(2):
            torch.testing.assert_close(cube[:, index, :, time], want, rtol=0, atol=2e-7)


def test_values_span_minus_one_to_one():
    black = patchify(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))
    white = patchify(torch.full((1, 32, 32, 3), 255, dtype=torch.uint8))
    assert (black == -1).all()
    torch.testing.assert_close(white, torch.ones_like(white))


def test_matches_the_image_processor_of_the_reference():
    images = torch.randint(0, 256, (2, 64, 96, 3), dtype=torch.uint8)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, temporal_patch_size=2, do_resize=False,
        image_mean=[0.5] * 3, image_std=[0.5] * 3)
    out = processor(images=[np.asarray(i) for i in images], return_tensors='pt')
    assert out['image_grid_thw'].tolist() == [[1, 4, 6]] * 2
    torch.testing.assert_close(patchify(images).flatten(0, 1), out['pixel_values'],
                               rtol=0, atol=1e-6)


def test_a_size_off_the_grid_is_refused_by_name():
    with pytest.raises(ValueError, match='48x96'):
        patchify(torch.zeros(1, 48, 96, 3, dtype=torch.uint8))
