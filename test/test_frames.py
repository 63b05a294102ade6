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
"""Averaging down against exact block means, and decoding of several frames at once."""

from __future__ import annotations

import threading

import cv2
import numpy as np
import pytest

from rspec_planner.model.config import CameraConfig
from rspec_planner.planner.frames import averaged_down, CameraFrame, FrameDecoder, FrameFault
from rspec_planner.planner.images import decode_compressed

CAMERAS = CameraConfig(height=32, width=64)


def ramp(height, width):
    """Return a picture that is linear in both directions, one colour each."""
    y, x = np.mgrid[:height, :width]
    return np.stack([200 * (y + 0.5) / height, 200 * (x + 0.5) / width,
                     np.full((height, width), 70)], axis=-1).round().astype(np.uint8)


@pytest.mark.parametrize('factor', [1, 2, 3, 4, 5, 8])
def test_whole_factors_are_block_means(factor):
    image = np.random.default_rng(factor).integers(
        0, 256, (32 * factor, 64 * factor, 3), dtype=np.uint8)
    means = image.reshape(32, factor, 64, factor, 3).mean(axis=(1, 3))
    assert np.abs(averaged_down(image, 32, 64) - means).max() <= 0.51


@pytest.mark.parametrize('size', [(1080, 1920), (540, 961), (97, 193), (33, 66), (1000, 2000)])
def test_any_size_keeps_every_place_where_it_is(size):
    assert np.abs(averaged_down(ramp(*size), 32, 64).astype(int) - ramp(32, 64)).max() <= 2


def test_nothing_finer_than_a_pixel_comes_through():
    stripes = np.zeros((320, 640, 3), np.uint8)
    stripes[:, ::2] = 200
    assert np.abs(averaged_down(stripes, 32, 64).astype(int) - 100).max() <= 1


@pytest.mark.parametrize('factor', [5, 8])
def test_a_jpeg_at_a_reduced_size_is_close_to_block_means(factor):
    random = np.random.default_rng(factor)
    coarse = random.integers(0, 256, (9, 17, 3), dtype=np.uint8)
    image = cv2.resize(coarse, (64 * factor, 32 * factor), interpolation=cv2.INTER_CUBIC)
    good, data = cv2.imencode('.jpg', image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
    seen = averaged_down(decode_compressed(data.tobytes(), (32, 64)), 32, 64)
    means = image.reshape(32, factor, 64, factor, 3).mean(axis=(1, 3))
    assert good and np.sqrt(np.mean((seen - means) ** 2)) < 1.6


def test_the_first_camera_that_fails_is_named():
    def broken(what):
        def decode():
            raise ValueError(what)
        return decode
    good = CameraFrame(ramp(32, 64))
    decoder = FrameDecoder(CAMERAS, 0.02)
    with pytest.raises(FrameFault, match='camera b: early'):
        decoder.stack({'a': [good], 'b': [CameraFrame(broken('early'))],
                       'c': [CameraFrame(broken('late'))]})


def test_cameras_are_decoded_side_by_side():
    together = threading.Barrier(2, timeout=5.0)

    def decode():
        together.wait()  # breaks unless another camera is being decoded at the same time
        return ramp(32, 64)
    decoder = FrameDecoder(CAMERAS, 0.02)
    if decoder.threads < 2:
        pytest.skip('one processor: nothing runs side by side')
    images = decoder.stack({name: [CameraFrame(decode)] for name in ('a', 'b')})
    assert images.shape == (2, 1, 32, 64, 3)
