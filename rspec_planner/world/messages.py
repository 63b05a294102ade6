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
Messages for bags: the types of the bag library, not those of a ROS installation.

Only what more than one writer needs; a message with one writer is built there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from rspec_planner.world.bag import message


class MovingEgo(Protocol):
    """What odometry needs of an ego state."""

    x: float
    y: float
    yaw: float
    speed: float
    curvature: float


def make_header(stamp_ns: int, frame_id: str) -> Any:
    """Return a header; integer arithmetic, because floats lose nanoseconds."""
    seconds, nanoseconds = divmod(stamp_ns, 10**9)
    stamp = message('builtin_interfaces/Time', sec=seconds, nanosec=nanoseconds)
    return message('std_msgs/Header', stamp=stamp, frame_id=frame_id)


def vector(x: float = 0.0, y: float = 0.0, z: float = 0.0) -> Any:
    """Return a Vector3."""
    return message('geometry_msgs/Vector3', x=x, y=y, z=z)


def quaternion_message(quaternion: Iterable[float]) -> Any:
    """Return a Quaternion of x, y, z, w."""
    x, y, z, w = map(float, quaternion)
    return message('geometry_msgs/Quaternion', x=x, y=y, z=z, w=w)


def pose_message(position: Iterable[float], quaternion: Iterable[float]) -> Any:
    """Return a Pose of position (3,) and quaternion x, y, z, w."""
    x, y, z = map(float, position)
    return message('geometry_msgs/Pose', position=message('geometry_msgs/Point', x=x, y=y, z=z),
                   orientation=quaternion_message(quaternion))


def transform_of(position: Iterable[float], quaternion: Iterable[float]) -> Any:
    """Return a Transform of position (3,) and quaternion x, y, z, w."""
    return message('geometry_msgs/Transform', translation=vector(*map(float, position)),
                   rotation=quaternion_message(quaternion))


def transform_message(header: Any, child: str, position: Iterable[float],
                      quaternion: Iterable[float]) -> Any:
    """Return the TransformStamped of `child` in the header's frame."""
    return message('geometry_msgs/TransformStamped', header=header, child_frame_id=child,
                   transform=transform_of(position, quaternion))


def twist_message(forward: float, turning: float = 0.0) -> Any:
    """Return a Twist along x and about z of the vehicle."""
    return message('geometry_msgs/Twist', linear=vector(x=float(forward)),
                   angular=vector(z=float(turning)))


def odometry_message(header: Any, ego: MovingEgo, quaternion: Iterable[float]) -> Any:
    """Return Odometry: pose of base_link in the header's frame, twist in base_link."""
    return message(
        'nav_msgs/Odometry', header=header, child_frame_id='base_link',
        pose=message('geometry_msgs/PoseWithCovariance', covariance=np.zeros(36),
                     pose=pose_message((ego.x, ego.y, 0.0), quaternion)),
        twist=message('geometry_msgs/TwistWithCovariance', covariance=np.zeros(36),
                      twist=twist_message(ego.speed, ego.speed * ego.curvature)))


def quaternion_of(rotation: np.ndarray) -> np.ndarray:
    """Return the unit quaternion x, y, z, w with w >= 0 of a rotation matrix (3, 3)."""
    # The eigenvector method needs no case distinction and no division by a small number.
    r = np.asarray(rotation, np.float64)
    k = np.array([
        [r[0, 0] - r[1, 1] - r[2, 2], r[1, 0] + r[0, 1], r[2, 0] + r[0, 2], r[2, 1] - r[1, 2]],
        [r[1, 0] + r[0, 1], r[1, 1] - r[0, 0] - r[2, 2], r[2, 1] + r[1, 2], r[0, 2] - r[2, 0]],
        [r[2, 0] + r[0, 2], r[2, 1] + r[1, 2], r[2, 2] - r[0, 0] - r[1, 1], r[1, 0] - r[0, 1]],
        [r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1], np.trace(r)]]) / 3.0
    largest = np.linalg.eigh(k)[1][:, -1]
    return np.asarray(np.copysign(1.0, largest[3]) * largest)
