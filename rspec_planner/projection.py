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
Where points on the ground land in a camera, and where a camera's pixels lie on the ground.

Flat ground at z = 0 of the ego frame (rear axle, x forward, y left, z up); pinhole cameras in
the optical convention (z forward, x right, y down).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import cv2
import numpy as np

NEAR_M = 0.4  # a point closer to the image plane than this has no usable pixel


class CameraRig(Protocol):
    """What a picture needs of a rig; the world's own rig has it."""

    @property
    def names(self) -> Sequence[str]:
        """Return the camera names in image order."""

    @property
    def intrinsics(self) -> Mapping[str, np.ndarray]:
        """Return K (3, 3) per camera, pixels of the model-size image."""

    @property
    def extrinsics(self) -> Mapping[str, np.ndarray]:
        """Return the (4, 4) transform ego <- camera optical per camera."""


def to_camera(points: np.ndarray, ego_from_camera: np.ndarray) -> np.ndarray:
    """Move ego-frame points (..., 3) into the camera's optical frame."""
    rotation, origin = ego_from_camera[:3, :3], ego_from_camera[:3, 3]
    return np.asarray((points - origin) @ rotation)


def project(points: np.ndarray, rig: CameraRig, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Project ego-frame points (..., 3); return pixels (..., 2) and depth (...), metres."""
    in_camera = to_camera(points, rig.extrinsics[name])
    depth = in_camera[..., 2]
    pixels = in_camera @ np.asarray(rig.intrinsics[name]).T
    safe = np.where(np.abs(depth) < 1e-6, 1e-6, depth)
    return pixels[..., :2] / safe[..., None], depth


def densify(poses: np.ndarray, values: np.ndarray,
            step_m: float) -> tuple[np.ndarray, np.ndarray]:
    """Resample a path (n, 2) and a value per point at most `step_m` apart along its length."""
    lengths = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(poses, axis=0).T))])
    keep = np.concatenate([[True], np.diff(lengths) > 1e-4])
    lengths, poses, values = lengths[keep], poses[keep], values[keep]
    if len(lengths) < 2:
        return poses, values
    at = np.linspace(0.0, lengths[-1], max(2, int(np.ceil(lengths[-1] / step_m)) + 1))
    path = np.stack([np.interp(at, lengths, poses[:, k]) for k in range(2)], -1)
    return path, np.interp(at, lengths, values)


def ribbon_edges(path: np.ndarray, width_m: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the left and right edge (n, 3) of a band of `width_m` along a path (n, 2)."""
    tangent = np.gradient(path, axis=0)
    tangent /= np.maximum(np.hypot(*tangent.T)[:, None], 1e-9)
    normal = np.stack([-tangent[:, 1], tangent[:, 0]], -1) * width_m / 2.0
    ground = np.zeros((len(path), 1))
    return np.hstack([path + normal, ground]), np.hstack([path - normal, ground])


def ground_view(images: np.ndarray, rig: CameraRig, x: np.ndarray,
                y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Look straight down: colour of the ground points (x, y) of shape (h, w), ego frame.

    Every point takes the camera that sees it with the most pixels per metre. Returns RGB
    (h, w, 3) uint8 and a mask (h, w) uint8, 255 where some camera sees the point.
    """
    points = np.stack([x, y, np.zeros_like(x)], -1)
    height, width = images.shape[1:3]
    view = np.zeros((*x.shape, 3), np.uint8)
    best = np.zeros(x.shape, np.float32)
    for image, name in zip(images, rig.names):
        pixels, depth = project(points, rig, name)
        u, v = pixels[..., 0], pixels[..., 1]
        seen = (depth > NEAR_M) & (u >= 0) & (u <= width - 1) & (v >= 0) & (v <= height - 1)
        detail = np.where(seen, np.asarray(rig.intrinsics[name])[0, 0] / np.maximum(depth, 0.1),
                          0.0).astype(np.float32)
        sampled = cv2.remap(image, u.astype(np.float32), v.astype(np.float32), cv2.INTER_LINEAR)
        chosen = detail > best
        view[chosen] = sampled[chosen]
        best[chosen] = detail[chosen]
    return view, np.where(best > 0, 255, 0).astype(np.uint8)
