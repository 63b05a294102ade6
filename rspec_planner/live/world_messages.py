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
Sensor messages of the embedded world, built from arrays and ego states.

Frames follow REP 103 and 105: `map` and `base_link` x forward, y left, z up; camera frames are
optical (z forward). Payloads are `array.array`, which rclpy takes over without copying lists.
"""

from __future__ import annotations

import array
import math
from typing import Any

from builtin_interfaces.msg import Time
import cv2
from geometry_msgs.msg import TransformStamped
from nav_msgs.msg import Odometry
import numpy as np
from sensor_msgs.msg import CameraInfo, CompressedImage, Image

from rspec_planner.errors import InputError

POSITION_VARIANCE = 0.01  # m^2, what the world claims of its own odometry


def stamp_message(stamp_ns: int) -> Time:
    """Split nanoseconds into a Time message, exactly."""
    seconds, nanoseconds = divmod(stamp_ns, 1_000_000_000)
    return Time(sec=seconds, nanosec=nanoseconds)


def image_message(image: np.ndarray) -> Image:
    """Wrap an (H, W, 3) uint8 RGB array; the header stays empty."""
    height, width = image.shape[:2]
    message = Image(height=height, width=width, encoding='rgb8', step=width * 3)
    message.data = array.array('B', np.ascontiguousarray(image).tobytes())
    return message


def compressed_message(image: np.ndarray, quality: int) -> CompressedImage:
    """Encode an (H, W, 3) uint8 RGB array as JPEG; the header stays empty."""
    done, data = cv2.imencode('.jpg', cv2.cvtColor(image, cv2.COLOR_RGB2BGR),
                              [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise InputError(f'JPEG encoder refused an image of shape {image.shape}; use (H, W, 3)')
    return CompressedImage(format='rgb8; jpeg compressed bgr8',
                           data=array.array('B', data.tobytes()))


def camera_info_message(rig: Any, name: str, stamp_ns: int) -> CameraInfo:
    """Describe one pinhole camera of the rig; its frame is `<name>_optical`."""
    intrinsics = np.asarray(rig.intrinsics[name], np.float64)
    message = CameraInfo(height=rig.height, width=rig.width, distortion_model='plumb_bob',
                         d=[0.0] * 5, k=intrinsics.ravel(), r=np.eye(3).ravel(),
                         p=np.hstack([intrinsics, np.zeros((3, 1))]).ravel())
    message.header.stamp = stamp_message(stamp_ns)
    message.header.frame_id = f'{name}_optical'
    return message


def odometry_message(ego: Any, stamp_ns: int, frame: str, child_frame: str) -> Odometry:
    """Describe the ego (x, y, yaw, speed, curvature); the twist is in the child frame."""
    message = Odometry(child_frame_id=child_frame)
    message.header.stamp = stamp_message(stamp_ns)
    message.header.frame_id = frame
    pose, twist = message.pose.pose, message.twist.twist
    pose.position.x, pose.position.y = float(ego.x), float(ego.y)
    pose.orientation.z = math.sin(ego.yaw / 2)
    pose.orientation.w = math.cos(ego.yaw / 2)
    twist.linear.x = float(ego.speed)
    twist.angular.z = float(ego.speed * ego.curvature)
    message.pose.covariance[0] = message.pose.covariance[7] = POSITION_VARIANCE
    return message


def transform_message(pose: Any, stamp_ns: int, frame: str,
                      child_frame: str) -> TransformStamped:
    """Describe an ego state or a (4, 4) matrix as frame <- child_frame."""
    message = TransformStamped(child_frame_id=child_frame)
    message.header.stamp = stamp_message(stamp_ns)
    message.header.frame_id = frame
    transform = message.transform
    if isinstance(pose, np.ndarray):
        position, quaternion = pose[:3, 3], quaternion_xyzw(pose[:3, :3])
    else:
        position = np.array([pose.x, pose.y, 0.0])
        quaternion = np.array([0.0, 0.0, math.sin(pose.yaw / 2), math.cos(pose.yaw / 2)])
    for axis, value in zip('xyz', position):
        setattr(transform.translation, axis, float(value))
    for axis, value in zip('xyzw', quaternion):
        setattr(transform.rotation, axis, float(value))
    return message


def quaternion_xyzw(rotation: np.ndarray) -> np.ndarray:
    """Return the unit quaternion (x, y, z, w) of a rotation matrix, w never negative."""
    # the eigenvector form has no branch and no division by a small number
    (a, b, c), (d, e, f), (g, h, i) = np.asarray(rotation, np.float64)
    symmetric = np.array([[a - e - i, b + d, c + g, h - f],
                          [b + d, e - a - i, f + h, c - g],
                          [c + g, f + h, i - a - e, d - b],
                          [h - f, c - g, d - b, a + e + i]])
    quaternion = np.linalg.eigh(symmetric)[1][:, -1]
    return np.asarray(quaternion if quaternion[3] >= 0 else -quaternion)
