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
import cv2
import numpy as np
import pytest

from rspec_planner.errors import InputError
from rspec_planner.planner.images import decode_compressed, decode_image, ENCODINGS

RGB = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)


@pytest.mark.parametrize('encoding, array', [
    ('rgb8', RGB),
    ('bgr8', RGB[..., ::-1]),
    ('rgba8', np.dstack([RGB, np.full((6, 10), 9, np.uint8)])),
    ('bgra8', np.dstack([RGB[..., ::-1], np.full((6, 10), 9, np.uint8)])),
])
@pytest.mark.parametrize('padding', [0, 5])
def test_colour_encodings_come_out_as_the_same_rgb(encoding, array, padding):
    rows = array.reshape(6, -1)
    padded = np.pad(rows, ((0, 0), (0, padding)), constant_values=77)
    out = decode_image(encoding, 6, 10, padded.shape[1], padded.tobytes())
    assert np.array_equal(out, RGB)


def test_mono_is_repeated_over_the_channels():
    out = decode_image('mono8', 6, 10, 10, RGB[..., 0].tobytes())
    assert np.array_equal(out, np.repeat(RGB[..., :1], 3, axis=2))


@pytest.mark.parametrize('encoding, luma_first', [
    ('uyvy', False), ('yuv422', False), ('yuyv', True), ('yuv422_yuy2', True)])
def test_yuv_places_luma_where_the_encoding_says(encoding, luma_first):
    luma = np.array([[16, 235, 16, 235]], np.uint8)
    chroma = np.full_like(luma, 128)
    pair = (luma, chroma) if luma_first else (chroma, luma)
    out = decode_image(encoding, 1, 4, 8, np.stack(pair, axis=-1).tobytes())
    assert np.array_equal(out[0, :, 1] > 128, [False, True, False, True])
    assert np.ptp(out.astype(int), axis=2).max() <= 2  # neutral chroma stays grey


def test_rgb8_is_a_view_that_cannot_be_written():
    data = bytearray(RGB.tobytes())
    out = decode_image('rgb8', 6, 10, 30, data)
    assert np.shares_memory(out, np.frombuffer(data, np.uint8))
    assert not out.flags.writeable


@pytest.mark.parametrize('arguments, names', [
    (('bayer_rggb8', 6, 10, 10, b''), "'bayer_rggb8'"),
    (('RGB8', 6, 10, 30, RGB.tobytes()), "'RGB8'"),
    (('', 6, 10, 30, RGB.tobytes()), "''"),
    (('rgb8', 0, 10, 30, b''), '10x0'),
    (('rgb8', 6, 0, 30, b''), '0x6'),
    (('rgb8', 6, 10, 29, b'\0' * 174), 'step 29'),
    (('rgb8', 6, 10, 30, b'\0' * 179), '179 bytes'),
    (('rgb8', 6, 10, 30, b'\0' * 181), '181 bytes'),
    (('yuyv', 6, 9, 18, b'\0' * 108), 'width 9'),
])
def test_bad_fields_are_named_in_one_line(arguments, names):
    with pytest.raises(InputError) as caught:
        decode_image(*arguments)
    assert names in str(caught.value)
    assert '\n' not in str(caught.value)


def test_png_round_trip_is_exact_and_rgb():
    data = cv2.imencode('.png', RGB[..., ::-1])[1].tobytes()
    assert np.array_equal(decode_compressed(data), RGB)


def test_jpeg_keeps_the_channel_order():
    red = np.zeros((16, 16, 3), np.uint8)
    red[..., 0] = 200
    data = cv2.imencode('.jpg', red[..., ::-1])[1].tobytes()
    assert np.abs(decode_compressed(data).astype(int) - red).max() < 8


@pytest.mark.parametrize('suffix', ['.png', '.jpg'])
def test_truncated_files_are_refused(suffix):
    picture = cv2.resize(RGB, (200, 120))
    data = cv2.imencode(suffix, picture)[1].tobytes()
    for keep in (9, len(data) // 2, len(data) - 20):
        with pytest.raises(InputError, match='truncated'):
            decode_compressed(data[:keep])


@pytest.mark.parametrize('data', [b'', b'\0', b'GIF89a......', b'\xff\xd8'])
def test_other_bytes_are_refused(data):
    with pytest.raises(InputError):
        decode_compressed(data)


def test_every_listed_encoding_decodes():
    for encoding in ENCODINGS:
        step = 4 * 4
        assert decode_image(encoding, 2, 4, step, b'\x80' * 2 * step).shape == (2, 4, 3)
