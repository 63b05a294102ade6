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
The camera rig of the embedded world: four pinhole cameras, rigidly mounted.

Ego frame: rear-axle centre on the ground, x forward, y left, z up. Camera optical frame: x right,
y down, z forward. Pixel centres lie at integer coordinates, so cx = (width - 1) / 2, as in
`sensor_msgs/CameraInfo`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
import math

import numpy as np

from rspec_planner.errors import ConfigurationError

MOUNT_X = 1.6  # metres ahead of the rear axle, all cameras
MOUNT_Z = 1.5  # metres above the ground

# (name, yaw left, pitch down, horizontal field of view), degrees. The tele camera looks slightly
# up: its frame then spans 5.6 deg below to 9.6 deg above the horizon, which keeps brake lamps
# in view from 8 m on and a lamp 5.2 m high from 22 m on.
_MOUNTS = (
    ('cross_left', 55.0, 3.0, 120.0),
    ('front_wide', 0.0, 3.0, 120.0),
    ('cross_right', -55.0, 3.0, 120.0),
    ('front_tele', 0.0, -2.0, 30.0),
)
_BEHIND = 1e-6  # metres: a point closer to the image plane than this has no pixel


@dataclass(frozen=True)
class Rig:
    """
    Four cameras at one point of the ego; `height_offset` and `pitch_offset` move all of them.

    Raises ConfigurationError for sizes below 16 px, offsets beyond 1 m or 0.2 rad.
    """

    width: int = 384  # pixels
    height: int = 192
    height_offset: float = 0.0  # metres, up
    pitch_offset: float = 0.0  # radians, positive looks down

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.width < 16 or self.height < 16:
            raise ConfigurationError(
                f'camera size {self.width}x{self.height} is too small; use at least 16x16')
        if not abs(self.height_offset) <= 1.0:
            raise ConfigurationError(
                f'height_offset {self.height_offset} m is out of range; use -1 .. 1 m')
        if not abs(self.pitch_offset) <= 0.2:
            raise ConfigurationError(
                f'pitch_offset {self.pitch_offset} is out of range; use -0.2 .. 0.2 radians')

    @property
    def names(self) -> tuple[str, ...]:
        """Return the camera names in rendering order."""
        return tuple(mount[0] for mount in _MOUNTS)

    @property
    def position(self) -> np.ndarray:
        """Return the optical centre that all cameras share, (3,) in the ego frame."""
        return np.array([MOUNT_X, 0.0, MOUNT_Z + self.height_offset])

    @cached_property
    def intrinsics(self) -> dict[str, np.ndarray]:
        """Return K (3, 3) in pixels for each camera name."""
        result = {}
        for name, _, _, fov in _MOUNTS:
            focal = self.width / 2.0 / math.tan(math.radians(fov) / 2.0)
            result[name] = np.array([
                [focal, 0.0, (self.width - 1) / 2.0],
                [0.0, focal, (self.height - 1) / 2.0],
                [0.0, 0.0, 1.0]])
        return result

    @cached_property
    def extrinsics(self) -> dict[str, np.ndarray]:
        """Return the (4, 4) transform ego <- camera optical frame for each camera name."""
        optical = np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
        result = {}
        for name, yaw_deg, pitch_deg, _ in _MOUNTS:
            yaw, pitch = math.radians(yaw_deg), math.radians(pitch_deg) + self.pitch_offset
            cy, sy, cp, sp = math.cos(yaw), math.sin(yaw), math.cos(pitch), math.sin(pitch)
            turn = np.array([[cy, -sy, 0.0], [sy, cy, 0.0], [0.0, 0.0, 1.0]])
            tilt = np.array([[cp, 0.0, sp], [0.0, 1.0, 0.0], [-sp, 0.0, cp]])
            pose = np.eye(4)
            pose[:3, :3] = turn @ tilt @ optical
            pose[:3, 3] = self.position
            result[name] = pose
        return result

    def project(self, name: str, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """
        Project (n, 3) ego-frame points into camera `name`.

        Return (uv (n, 2) pixels, in_front (n,) bool); uv is meaningless where not in front.
        Raises ConfigurationError for an unknown camera.
        """
        if name not in self.intrinsics:
            raise ConfigurationError(
                f'camera {name!r} is unknown; use one of {", ".join(self.names)}')
        pose = self.extrinsics[name]
        rays = (np.asarray(points, np.float64).reshape(-1, 3) - pose[:3, 3]) @ pose[:3, :3]
        depth = rays[:, 2]
        in_front = depth > _BEHIND
        pixels = (rays @ self.intrinsics[name].T)[:, :2]
        return pixels / np.where(in_front, depth, 1.0)[:, None], in_front
