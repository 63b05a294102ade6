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
"""Sizes and pixels against the image processor that the released models were trained with."""

from __future__ import annotations

import importlib

from hypothesis import assume, given, settings
from hypothesis import strategies as st
import numpy as np
from PIL import Image
import pytest
import torch
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from rspec_planner.errors import InputError
from rspec_planner.model.config import alpamayo_r1, CameraConfig
from rspec_planner.model.image import patchify
from rspec_planner.model.image_size import for_source, resize_bicubic, size_fault, smart_size
from rspec_planner.planner.frames import CameraFrame, FrameDecoder, FrameFault

OPTIONS = {'patch_size': 16, 'merge_size': 2, 'temporal_patch_size': 2,
           'image_mean': [0.5] * 3, 'image_std': [0.5] * 3, 'min_pixels': 163_840,
           'max_pixels': 196_608}
SIDES = st.tuples(st.integers(40, 1300), st.integers(40, 2100))
CAMERAS = alpamayo_r1().cameras


@pytest.mark.parametrize('source, resized, tokens', [
    ((1080, 1920), (320, 576), 180), ((900, 1600), (320, 576), 180),
    ((720, 1280), (320, 576), 180), ((560, 1008), (320, 576), 180),
    ((1208, 1920), (320, 544), 170), ((480, 640), (384, 512), 192),
    ((600, 800), (384, 512), 192), ((1536, 2048), (384, 512), 192),
    ((1024, 1024), (416, 416), 169), ((320, 576), (320, 576), 180)])
def test_published_sizes(source, resized, tokens):
    assert smart_size(*source) == resized
    found = for_source(CAMERAS, *source)
    assert (found.height, found.width) == resized
    assert resized[0] * resized[1] // 32 ** 2 == tokens


@given(st.integers(1, 5000), st.integers(1, 5000))
@settings(max_examples=1000, deadline=None)
def test_sizes_are_those_of_transformers(height, width):
    assume(max(height, width) <= 200 * min(height, width))
    assert smart_size(height, width) == smart_resize(height, width, 32, 163_840, 196_608)


@pytest.mark.parametrize('size', [(0, 10), (10, 0), (1, 201)])
def test_an_absurd_size_is_refused(size):
    with pytest.raises(InputError, match=f'{size[1]}x{size[0]}'):
        smart_size(*size)


def picture(size, seed):
    """Return edges, gradients and noise, which resampling treats differently."""
    rng = np.random.default_rng(seed)
    rows, cols = np.mgrid[:size[0], :size[1]]
    waves = 127 + 120 * np.sin(rows / 3.7) * np.cos(cols / 5.3)
    image = np.stack([waves, 255.0 * (rows + cols > sum(size) / 2),
                      rng.integers(0, 256, size)], axis=-1)
    return image.astype(np.uint8)


def patches(image):
    """Return the patch rows of one frame on our way."""
    resized = resize_bicubic(image, *smart_size(*image.shape[:2]))
    return patchify(torch.from_numpy(resized[None]))[0], resized.shape


def slow_patches(image, **options):
    """Return what transformers' processor over Pillow makes of one image, and its grid."""
    out = Qwen2VLImageProcessorPil(**OPTIONS, **options)(images=[image], return_tensors='pt')
    return out['pixel_values'], out['image_grid_thw'].tolist()


@given(SIDES, st.integers(0, 2 ** 31))
@settings(max_examples=25, deadline=None)
def test_patches_are_those_of_the_slow_processor_at_any_size(size, seed):
    """
    Pillow 13 filters rows or columns first, whichever is cheaper; before, rows came first.

    The order shows where the first pass overshoots and is clamped, by up to 24 grey levels on
    noise, so Pillow is called once per axis, rows first as torchvision does and Pillow did.
    """
    assume(max(size) <= 8 * min(size))
    image = picture(size, seed)
    ours, (rows, cols, _) = patches(image)
    once = Image.fromarray(image).resize((cols, size[0]), Image.Resampling.BICUBIC)
    twice = np.asarray(once.resize((cols, rows), Image.Resampling.BICUBIC))
    theirs, grid = slow_patches(twice, do_resize=False)
    assert grid == slow_patches(image)[1] == [[1, rows // 16, cols // 16]]
    levels = (ours - theirs).abs() * 127.5
    # two fixed-point filters, each rounding after either pass
    assert float(levels.max()) < 2.01
    assert float((levels > 0.5).float().mean()) < 0.02


@pytest.mark.parametrize('size', [(1080, 1920), (900, 1600), (720, 1280), (560, 1008),
                                  (1208, 1920), (480, 640), (600, 800), (1536, 2048)])
def test_patches_are_those_of_the_slow_processor_at_camera_sizes(size):
    image = picture(size, 1)
    theirs, _ = slow_patches(image)
    levels = (patches(image)[0] - theirs).abs() * 127.5
    assert float(levels.max()) < 1.01
    assert float((levels > 0.5).float().mean()) < 0.02


def fast_processor():
    """Return transformers' processor over torchvision, if there is one for this PyTorch."""
    try:
        importlib.import_module('torchvision')
        from transformers import Qwen2VLImageProcessor
    except (ImportError, RuntimeError) as error:
        pytest.skip(f'torchvision is not usable beside this PyTorch: {error}')
    return Qwen2VLImageProcessor(**OPTIONS)


def test_patches_are_those_of_the_fast_processor():
    processor = fast_processor()
    rng = np.random.default_rng(0)
    for seed in range(40):
        image = picture((int(rng.integers(200, 1300)), int(rng.integers(200, 2100))), seed)
        ours, _ = patches(image)
        out = processor(images=[torch.from_numpy(image).permute(2, 0, 1)], return_tensors='pt')
        torch.testing.assert_close(ours, out['pixel_values'], rtol=0, atol=1e-6)


def test_a_frame_at_the_size_of_the_model_is_untouched():
    image = picture((320, 576), 0)
    assert resize_bicubic(image, 320, 576) is image


def test_a_read_only_frame_is_resized_all_the_same():
    image = picture((640, 1152), 0)
    want = resize_bicubic(image, 320, 576)
    image.flags.writeable = False
    assert np.array_equal(resize_bicubic(image, 320, 576), want)


def test_frames_of_the_profile_go_this_way():
    image = picture((1080, 1920), 0)
    decoder = FrameDecoder(CAMERAS, 0.02)
    found = decoder.stack({'front_wide': [CameraFrame(image)]})[0, 0]
    decoder.close()
    assert np.array_equal(found, resize_bicubic(image, 320, 576))


@pytest.mark.parametrize('size', [(1208, 1920), (480, 640), (1024, 1024), (0, 5)])
def test_a_size_that_the_model_reads_otherwise_is_named(size):
    decoder = FrameDecoder(CAMERAS, 0.5)
    with pytest.raises(FrameFault, match=f'camera front_wide: .*{size[1]}x{size[0]}') as fault:
        decoder.stack({'front_wide': [CameraFrame(np.zeros((*size, 3), np.uint8))]})
    decoder.close()
    assert fault.value.reason == 'image_wrong_size'


def test_the_aspect_ratio_still_decides_for_averaged_frames():
    cameras = CameraConfig()
    assert size_fault(cameras, 384, 768, 0.02) == ''
    assert 'aspect ratio of 384x192' in size_fault(cameras, 400, 768, 0.02)
    assert size_fault(cameras, 400, 768, 0.05) == ''


def test_a_jpeg_is_decoded_whole_for_the_bicubic_way():
    assert CAMERAS.decode_size is None
    assert CameraConfig().decode_size == (192, 384)
