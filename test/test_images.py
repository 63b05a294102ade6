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
from rspec_planner.planner.images import decode_compressed, decode_image

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


def yuv_to_rgb(y, u, v):
    """Return the RGB of BT.601 with video range, the closed form of ITU-R BT.601-7."""
    y, u, v = (np.asarray(c, float) for c in (y, u, v))
    luma = 255 / 219 * (y - 16)
    rgb = [luma + 1.402 * 255 / 224 * (v - 128),
           luma - (0.114 * 1.772 * (u - 128) + 0.299 * 1.402 * (v - 128)) * 255 / 224 / 0.587,
           luma + 1.772 * 255 / 224 * (u - 128)]
    return np.clip(np.stack(rgb, axis=-1), 0, 255)


def yuv_planes(height, width, rows):
    """Return luma (height, width) and two colour planes, one sample per `rows` x 2 pixels."""
    rng = np.random.default_rng(height * width)
    small = (-(-height // rows), -(-width // 2))
    return (rng.integers(16, 236, (height, width), dtype=np.uint8),
            rng.integers(90, 170, small, dtype=np.uint8),
            rng.integers(90, 170, small, dtype=np.uint8))


def spread(plane, height, width, rows):
    """Return a colour plane at full size: each sample holds for its block of pixels."""
    return plane.repeat(rows, axis=0).repeat(2, axis=1)[:height, :width]


def padded(rows, padding):
    """Return rows with a padding that no decoder may look at, as step and bytes."""
    full = np.pad(rows, ((0, 0), (0, padding)), constant_values=201)
    return full.shape[1], full.tobytes()


SIZES = [(1, 2), (2, 4), (5, 8), (6, 9), (7, 7), (1, 1)]


@pytest.mark.parametrize('height, width', SIZES)
@pytest.mark.parametrize('padding', [0, 3, 1000])
@pytest.mark.parametrize('encoding', ['uyvy', 'yuv422', 'yuyv', 'yuv422_yuy2'])
def test_yuv422_is_the_closed_form(encoding, height, width, padding):
    luma, u, v = yuv_planes(height, width, 1)
    even = np.pad(luma, ((0, 0), (0, width % 2)), mode='edge')
    first, second = even[:, 0::2], even[:, 1::2]
    order = (u, first, v, second) if encoding in ('uyvy', 'yuv422') else (first, u, second, v)
    step, data = padded(np.stack(order, axis=-1).reshape(height, -1), padding)
    out = decode_image(encoding, height, width, step, data)
    expected = yuv_to_rgb(luma, spread(u, height, width, 1), spread(v, height, width, 1))
    assert out.shape == (height, width, 3)
    assert np.abs(out - expected).max() <= 2


@pytest.mark.parametrize('height, width', SIZES)
@pytest.mark.parametrize('padding', [0, 3, 1000])
@pytest.mark.parametrize('encoding', ['nv12', 'nv21'])
def test_yuv420_is_the_closed_form(encoding, height, width, padding):
    luma, u, v = yuv_planes(height, width, 2)
    colour = np.stack((u, v) if encoding == 'nv12' else (v, u), axis=-1).reshape(len(u), -1)
    even = np.pad(luma, ((0, 0), (0, width % 2)), mode='edge')
    step, data = padded(np.vstack([even, colour]), padding)
    out = decode_image(encoding, height, width, step, data)
    expected = yuv_to_rgb(luma, spread(u, height, width, 2), spread(v, height, width, 2))
    assert out.shape == (height, width, 3)
    assert np.abs(out - expected).max() <= 2


def mosaic(rgb, pattern):
    """Return the one colour per pixel that a sensor with this pattern sees."""
    raw = np.empty(rgb.shape[:2], np.uint8)
    for place, colour in enumerate(pattern):
        window = np.s_[place // 2::2, place % 2::2]
        raw[window] = rgb[window + ('rgb'.index(colour),)]
    return raw


@pytest.mark.parametrize('pattern', ['rggb', 'bggr', 'gbrg', 'grbg'])
@pytest.mark.parametrize('height, width', [(8, 10), (7, 9), (3, 3), (8, 9)])
@pytest.mark.parametrize('padding', [0, 5])
def test_bayer_is_exact_on_a_plane_of_each_colour(pattern, height, width, padding):
    y, x = np.mgrid[:height, :width]
    rgb = np.stack([40 + 4 * x, 200 - 6 * y, 120 + 2 * x - 2 * y], axis=-1).astype(np.uint8)
    step, data = padded(mosaic(rgb, pattern), padding)
    out = decode_image(f'bayer_{pattern}8', height, width, step, data)
    assert np.array_equal(out[1:-1, 1:-1], rgb[1:-1, 1:-1])  # the edge repeats its neighbour
    flat = np.full_like(rgb, (200, 120, 30))
    step, data = padded(mosaic(flat, pattern), padding)
    assert np.array_equal(decode_image(f'bayer_{pattern}8', height, width, step, data), flat)


def test_rgb8_is_a_view_that_cannot_be_written():
    data = bytearray(RGB.tobytes())
    out = decode_image('rgb8', 6, 10, 30, data)
    assert np.shares_memory(out, np.frombuffer(data, np.uint8))
    assert not out.flags.writeable


@pytest.mark.parametrize('arguments, names', [
    (('bayer_rggb16', 6, 10, 20, b''), "'bayer_rggb16'"),
    (('bayer_rggb8', 2, 10, 10, b'\0' * 20), '10x2'),
    (('RGB8', 6, 10, 30, RGB.tobytes()), "'RGB8'"),
    (('', 6, 10, 30, RGB.tobytes()), "''"),
    (('rgb8', 0, 10, 30, b''), '10x0'),
    (('rgb8', 6, 0, 30, b''), '0x6'),
    (('rgb8', 6, 10, 29, b'\0' * 174), 'step 29'),
    (('rgb8', 6, 10, 30, b'\0' * 179), '179 bytes'),
    (('rgb8', 6, 10, 30, b'\0' * 181), '181 bytes'),
    (('yuyv', 6, 9, 18, b'\0' * 108), "9 'yuyv' pixels (20 bytes)"),
    (('nv12', 6, 10, 10, b'\0' * 60), '9 x 10 = 90'),
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


def jpeg(picture, *options):
    return cv2.imencode('.jpg', picture[..., ::-1], options)[1].tobytes()


def smooth(height, width):
    return cv2.resize(RGB, (width, height), interpolation=cv2.INTER_CUBIC)


@pytest.mark.parametrize('suffix', ['.png', '.jpg'])
def test_truncated_files_are_refused(suffix):
    data = cv2.imencode(suffix, smooth(120, 200))[1].tobytes()
    for keep in (9, len(data) // 2, len(data) - 20):
        with pytest.raises(InputError, match='truncated'):
            decode_compressed(data[:keep])


def with_thumbnail(data, thumbnail):
    """Return a JPEG that holds another one in its header, as cameras write it."""
    segment = b'\xff\xe1' + (len(thumbnail) + 2).to_bytes(2, 'big') + thumbnail
    return data[:2] + segment + data[2:]


def test_a_decoder_that_fills_up_what_is_missing_does_not_hide_it(monkeypatch):
    data = jpeg(smooth(400, 600))
    whole = with_thumbnail(data, jpeg(smooth(60, 80)))
    assert decode_compressed(whole).shape == (400, 600, 3)
    grey = np.full((400, 600, 3), 128, np.uint8)
    monkeypatch.setattr(cv2, 'imdecode', lambda *arguments: grey)
    assert decode_compressed(whole) is grey
    for cut in (2, 200, len(data) // 2):  # the end mark of the thumbnail is not that of the file
        with pytest.raises(InputError, match='truncated'):
            decode_compressed(whole[:-cut])


def test_padding_behind_the_file_is_no_damage():
    assert decode_compressed(jpeg(RGB) + b'\0' * 500).shape == RGB.shape


@pytest.mark.parametrize('options', [
    (), (cv2.IMWRITE_JPEG_PROGRESSIVE, 1), (cv2.IMWRITE_JPEG_RST_INTERVAL, 4)])
def test_a_jpeg_is_reduced_as_long_as_it_stays_large_enough(options):
    data = jpeg(smooth(400, 600), *options)
    full = decode_compressed(data)
    for needed, shape in (((400, 600), (400, 600)), ((201, 300), (400, 600)),
                          ((200, 300), (200, 300)), ((100, 120), (100, 150)),
                          ((1, 1), (50, 75))):
        out = decode_compressed(data, needed)
        assert out.shape == (*shape, 3)
        expected = cv2.resize(full, shape[::-1], interpolation=cv2.INTER_AREA)
        assert np.abs(out.astype(int) - expected).mean() < 2.0


def test_the_size_is_found_behind_fill_bytes_and_comments():
    data = jpeg(smooth(160, 320))
    commented = data[:2] + b'\xff\xff\xff\xfe\x00\x06\xff\xc0AB' + data[2:]
    assert decode_compressed(commented, (80, 160)).shape == (80, 160, 3)


def test_grey_files_come_out_with_three_channels():
    grey = smooth(32, 48)[..., 0]
    for suffix in ('.png', '.jpg'):
        out = decode_compressed(cv2.imencode(suffix, grey)[1].tobytes())
        assert out.shape == (32, 48, 3)
        assert np.ptp(out, axis=2).max() == 0


@pytest.mark.parametrize('data', [b'', b'\0', b'GIF89a......', b'\xff\xd8'])
def test_other_bytes_are_refused(data):
    with pytest.raises(InputError):
        decode_compressed(data)
