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
channel order is stated at each conversion. Bayer patterns are refused: their names differ
between drivers and libraries, and a wrong guess looks plausible.
"""

from __future__ import annotations

import cv2
import numpy as np

from rspec_planner.errors import InputError

#: encoding -> (bytes per pixel, OpenCV conversion to RGB or None when already RGB)
_ENCODINGS: dict[str, tuple[int, int | None]] = {
    'rgb8': (3, None),
    'bgr8': (3, cv2.COLOR_BGR2RGB),
    'rgba8': (4, cv2.COLOR_RGBA2RGB),
    'bgra8': (4, cv2.COLOR_BGRA2RGB),
    'mono8': (1, cv2.COLOR_GRAY2RGB),
    'uyvy': (2, cv2.COLOR_YUV2RGB_UYVY),
    'yuv422': (2, cv2.COLOR_YUV2RGB_UYVY),
    'yuyv': (2, cv2.COLOR_YUV2RGB_YUY2),
    'yuv422_yuy2': (2, cv2.COLOR_YUV2RGB_YUY2),
}

#: what `decode_image` accepts, in the spelling of sensor_msgs/image_encodings
ENCODINGS = tuple(_ENCODINGS)

_JPEG_MAGIC = b'\xff\xd8'
_JPEG_END = b'\xff\xd9'
_PNG_MAGIC = b'\x89PNG\r\n\x1a\n'
_PNG_END = b'IEND'


def decode_image(encoding: str, height: int, width: int, step: int,
                 data: bytes | bytearray | memoryview | np.ndarray) -> np.ndarray:
    """
    Decode the fields of a raw Image message to (height, width, 3) uint8 RGB.

    `step` is the length of one row in bytes and may exceed the pixels (padding is skipped).
    For `rgb8` the result is a read-only view of `data` and costs no copy.
    Raises InputError naming the field that is wrong.
    """
    if encoding not in _ENCODINGS:
        raise InputError(f"image encoding '{encoding}' is not supported; publish one of "
                         f'{", ".join(ENCODINGS)} or a CompressedImage (jpeg, png)')
    bytes_per_pixel, conversion = _ENCODINGS[encoding]
    if height <= 0 or width <= 0:
        raise InputError(f'image size {width}x{height} is empty; check the camera driver')
    if step < width * bytes_per_pixel:
        raise InputError(f"image step {step} is shorter than one row of {width} '{encoding}' "
                         f'pixels ({width * bytes_per_pixel} bytes); fix step or encoding')
    if bytes_per_pixel == 2 and width % 2:
        raise InputError(f"image width {width} is odd, which '{encoding}' cannot hold; "
                         'publish an even width')
    flat = np.frombuffer(data, np.uint8)
    if flat.size != height * step:
        raise InputError(f'image data holds {flat.size} bytes, height x step is '
                         f'{height} x {step} = {height * step}; check the camera driver')
    rows = flat.reshape(height, step)[:, :width * bytes_per_pixel]
    pixels = rows.reshape(height, width, bytes_per_pixel)
    if conversion is None:
        pixels.flags.writeable = False
        return pixels
    return cv2.cvtColor(np.ascontiguousarray(pixels), conversion)


def decode_compressed(data: bytes | bytearray | memoryview | np.ndarray) -> np.ndarray:
    """
    Decode JPEG or PNG bytes to (height, width, 3) uint8 RGB.

    The kind is read from the first bytes, because CompressedImage.format is free text.
    Raises InputError for anything else and for a file that stops early: OpenCV would fill
    the missing part with grey and the planner would drive on it.
    """
    flat = np.frombuffer(data, np.uint8)
    head = flat[:8].tobytes()
    if head.startswith(_JPEG_MAGIC):
        complete = _JPEG_END in flat.tobytes()
    elif head == _PNG_MAGIC:
        complete = _PNG_END in flat[-64:].tobytes()
    else:
        raise InputError(f'compressed image of {flat.size} bytes starts with '
                         f"'{head[:4].hex(' ')}', which is neither JPEG nor PNG; "
                         'publish jpeg or png')
    image = cv2.imdecode(flat, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION) \
        if complete else None
    if image is None:
        raise InputError(f'compressed image of {flat.size} bytes is truncated or damaged; '
                         'check the recording or the image transport')
    return image
