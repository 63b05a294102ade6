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
"""Messages read from their bytes: the fields are those of rclpy, nothing is copied."""

from __future__ import annotations

import numpy as np
import pytest

from rspec_planner.errors import InputError
from rspec_planner.planner.serialized import read_message

IMAGE, COMPRESSED = 'sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage'


def wire(message):
    return pytest.importorskip('rclpy.serialization', reason='rclpy is not installed '
                               '(requirements-ros.txt)').serialize_message(message)


def test_an_image_is_read_as_rclpy_wrote_it_and_without_a_copy():
    conversions = pytest.importorskip('rspec_planner.ros_conversions', exc_type=ImportError)
    pixels = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    data = wire(conversions.image_message(pixels, 12_000_000_034, 'front_wide', 'bgr8'))
    image = read_message(IMAGE, data)
    assert (image.header.stamp.sec, image.header.stamp.nanosec) == (12, 34)
    assert (image.header.frame_id, image.encoding) == ('front_wide', 'bgr8')
    assert (image.height, image.width, image.step) == (6, 8, 24)
    assert image.data.tobytes() == pixels[..., ::-1].tobytes()
    assert not image.data.flags.owndata


def test_a_compressed_image_is_read_as_rclpy_wrote_it():
    conversions = pytest.importorskip('rspec_planner.ros_conversions', exc_type=ImportError)
    message = conversions.compressed_image_message(np.zeros((8, 8, 3), np.uint8), 5, 'a')
    read = read_message(COMPRESSED, wire(message))
    assert read.data.tobytes() == bytes(message.data) and read.format == message.format


@pytest.mark.parametrize('cut', [0, 3, 20, -1])
def test_other_bytes_are_refused_by_name(cut):
    conversions = pytest.importorskip('rspec_planner.ros_conversions', exc_type=ImportError)
    data = wire(conversions.image_message(np.zeros((4, 4, 3), np.uint8), 5, 'a'))
    with pytest.raises(InputError, match=f'bytes are no {IMAGE}: .*check the publisher'):
        read_message(IMAGE, data[:cut])
