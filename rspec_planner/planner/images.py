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
Turn image bytes into RGB arrays; knows message fields but no message package.

Everything behind this module is RGB, uint8, rows top to bottom. OpenCV thinks in BGR, so the
channel order is stated at each conversion. YUV is BT.601 with video range, as cameras send it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from rspec_planner.errors import InputError

Pixels = NDArray[np.uint8]
Bytes = bytes | bytearray | memoryview | Pixels


@dataclass(frozen=True)
class _Layout:
    """How one encoding lays out its bytes."""

    conversion: int | None  # OpenCV conversion to RGB; None when already RGB
    bytes_per_pixel: int = 1  # of the first plane
    block: tuple[int, int] = (1, 1)  # rows and columns of pixels that share a colour sample
    smallest: int = 1  # width and height below which OpenCV cannot interpolate

    def row_bytes(self, width: int) -> int:
        """Return the bytes of one row; a shared sample at the edge is stored whole."""
        columns = self.block[1]
        return -(-width // columns) * columns * self.bytes_per_pixel

    def rows(self, height: int) -> int:
        """Return the rows of all planes together."""
        return height + -(-height // 2) if self.block[0] == 2 else height


# A pattern is named after its first two rows from the left in sensor_msgs/image_encodings.
# OpenCV's two-letter names start at the second row and column, its four-letter names agree.
_LAYOUTS = {
    'rgb8': _Layout(None, 3),
    'bgr8': _Layout(cv2.COLOR_BGR2RGB, 3),
    'rgba8': _Layout(cv2.COLOR_RGBA2RGB, 4),
    'bgra8': _Layout(cv2.COLOR_BGRA2RGB, 4),
    'mono8': _Layout(cv2.COLOR_GRAY2RGB),
    'uyvy': _Layout(cv2.COLOR_YUV2RGB_UYVY, 2, (1, 2)),
    'yuv422': _Layout(cv2.COLOR_YUV2RGB_UYVY, 2, (1, 2)),
    'yuyv': _Layout(cv2.COLOR_YUV2RGB_YUY2, 2, (1, 2)),
    'yuv422_yuy2': _Layout(cv2.COLOR_YUV2RGB_YUY2, 2, (1, 2)),
    'nv12': _Layout(cv2.COLOR_YUV2RGB_NV12, 1, (2, 2)),
    'nv21': _Layout(cv2.COLOR_YUV2RGB_NV21, 1, (2, 2)),
    'bayer_rggb8': _Layout(cv2.COLOR_BayerRGGB2RGB, smallest=3),
    'bayer_bggr8': _Layout(cv2.COLOR_BayerBGGR2RGB, smallest=3),
    'bayer_gbrg8': _Layout(cv2.COLOR_BayerGBRG2RGB, smallest=3),
    'bayer_grbg8': _Layout(cv2.COLOR_BayerGRBG2RGB, smallest=3),
}

#: what `decode_image` accepts, in the spelling of sensor_msgs/image_encodings (and nv12, which
#: hardware decoders send)
ENCODINGS = tuple(_LAYOUTS)

_JPEG_MAGIC = b'\xff\xd8'
_JPEG_END = b'\xff\xd9'
_PNG_MAGIC = b'\x89PNG\r\n\x1a\n'
_PNG_END = b'IEND'
#: bytes at the end of a file in which its end mark must lie; writers pad to block sizes
_TAIL = 4096
#: frame headers (SOF) of JPEG; C4, C8 and CC are other segments
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: OpenCV's names say GRAYSCALE; these bits only set the size, IMREAD_COLOR_RGB sets the colour
_REDUCED = {2: cv2.IMREAD_REDUCED_GRAYSCALE_2, 4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
            8: cv2.IMREAD_REDUCED_GRAYSCALE_8}


def decode_message(message: Any, at_least: tuple[int, int] | None = None) -> Pixels:
    """
    Decode an Image or CompressedImage of any ROS library to (H, W, 3) uint8 RGB.

    `at_least` (rows, columns) is the size that is needed, see `decode_compressed`. Raises
    InputError naming what cannot be read.
    """
    if hasattr(message, 'encoding'):
        return decode_image(message.encoding, message.height, message.width, message.step,
                            memoryview(message.data))
    return decode_compressed(memoryview(message.data), at_least)


def decode_image(encoding: str, height: int, width: int, step: int, data: Bytes) -> Pixels:
    """
    Decode the fields of a raw Image message to (height, width, 3) uint8 RGB.

    `step` is the length of one row in bytes and may exceed the pixels (padding is skipped); both
    planes of nv12 and nv21 have it. Odd sizes are whole as long as the last colour sample is.
    For `rgb8` the result is a read-only view of `data` and costs no copy.
    Raises InputError naming the field that is wrong.
    """
    layout = _LAYOUTS.get(encoding)
    if layout is None:
        raise InputError(f"image encoding '{encoding}' is not supported; publish one of "
                         f'{", ".join(ENCODINGS)} or a CompressedImage (jpeg, png)')
    if height <= 0 or width <= 0:
        raise InputError(f'image size {width}x{height} is empty; check the camera driver')
    if min(height, width) < layout.smallest:
        raise InputError(f"image size {width}x{height} is too small for '{encoding}', which "
                         f'needs {layout.smallest}x{layout.smallest}; check the camera driver')
    row_bytes, rows = layout.row_bytes(width), layout.rows(height)
    if step < row_bytes:
        raise InputError(f"image step {step} is shorter than one row of {width} '{encoding}' "
                         f'pixels ({row_bytes} bytes); fix step or encoding')
    flat = np.frombuffer(data, np.uint8)
    if flat.size != rows * step:
        raise InputError(f"image data holds {flat.size} bytes, {height} rows of '{encoding}' "
                         f'with step {step} are {rows} x {step} = {rows * step}; check the '
                         'camera driver')
    return _to_rgb(layout, flat.reshape(rows, step)[:, :row_bytes], height, width)


def _to_rgb(layout: _Layout, plane: Pixels, height: int, width: int) -> Pixels:
    """Convert rows (rows, row_bytes) without padding."""
    if layout.block[0] == 2:
        luma, colour = plane[:height], plane[height:]
        whole = luma if height % 2 == 0 else np.vstack([luma, luma[-1:]])
        pixels = np.vstack([whole, colour])  # OpenCV takes even sizes only
    else:
        pixels = plane.reshape(height, -1, layout.bytes_per_pixel)
    if layout.conversion is None:
        pixels.flags.writeable = False
        return pixels
    rgb = cv2.cvtColor(np.ascontiguousarray(pixels), layout.conversion)
    return np.ascontiguousarray(rgb[:height, :width], dtype=np.uint8)


def decode_compressed(data: Bytes, at_least: tuple[int, int] | None = None) -> Pixels:
    """
    Decode JPEG or PNG bytes to (height, width, 3) uint8 RGB.

    With `at_least` (rows, columns) a JPEG is decoded at 1/2, 1/4 or 1/8 of its size as long as
    that is not smaller: 1080p for 576x320 takes 7 instead of 12 ms, resizing included.
    The kind is read from the first bytes, because CompressedImage.format is free text.
    Raises InputError for anything else and for a file that stops early. OpenCV 5 refuses those
    itself; a version that fills the missing part with grey would let the planner drive on it.
    """
    flat = np.frombuffer(data, np.uint8)
    head = flat[:8].tobytes()
    reduction = 1
    if head.startswith(_JPEG_MAGIC):
        complete = _JPEG_END in flat[-_TAIL:].tobytes()
        if at_least is not None:
            reduction = _reduction(_jpeg_size(flat), at_least)
    elif head == _PNG_MAGIC:
        complete = _PNG_END in flat[-_TAIL:].tobytes()
    else:
        raise InputError(f'compressed image of {flat.size} bytes starts with '
                         f"'{head[:4].hex(' ')}', which is neither JPEG nor PNG; "
                         'publish jpeg or png')
    colour = _REDUCED.get(reduction, 0) | cv2.IMREAD_COLOR_RGB
    image = cv2.imdecode(flat, colour | cv2.IMREAD_IGNORE_ORIENTATION) if complete else None
    if image is None:
        raise InputError(f'compressed image of {flat.size} bytes is truncated or damaged; '
                         'check the recording or the image transport')
    return np.asarray(image, dtype=np.uint8)


def _jpeg_size(flat: Pixels) -> tuple[int, int]:
    """Return rows and columns from the frame header, (0, 0) when there is none."""
    at = 2
    while at + 9 <= flat.size and flat[at] == 0xFF:
        marker = int(flat[at + 1])
        if marker in _JPEG_FRAMES:
            rows, columns = (int(flat[at + k]) << 8 | int(flat[at + k + 1]) for k in (5, 7))
            return rows, columns
        # a marker may be preceded by any number of fill bytes
        at += 1 if marker == 0xFF else 2 + (int(flat[at + 2]) << 8 | int(flat[at + 3]))
    return 0, 0


def _reduction(size: tuple[int, int], at_least: tuple[int, int]) -> int:
    """Return the largest of 1, 2, 4, 8 that keeps `size` at or above `at_least`."""
    fits = [factor for factor in _REDUCED
            if all(have // factor >= need for have, need in zip(size, at_least))]
    return max(fits, default=1)
