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
Physical action tokens (AutoVLA, arXiv 2506.13757): a codebook of motions of the vehicle's outline.

Each entry says where the four corners of the vehicle are at the steps of half a second, in the
frame of the vehicle at the entry's start: x forward, y left, metres; corners front left, front
right, rear right, rear left. The layout is that of SMART (arXiv 2405.15677), from which the
public AutoVLA code takes it. A trajectory is the chain of its entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as parse_safetensors
from safetensors.numpy import save as format_safetensors

from rspec_planner.errors import ConfigurationError, InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: in a folder of its own: what lies beside the weights counts as weights
CODEBOOK_FILE = 'codebook/contours.safetensors'
TENSOR = 'contours'
#: outline of the vehicle that the public code matches with, metres
LENGTH_M, WIDTH_M = 4.8, 2.0


def wrap(angle: Floats) -> Floats:
    """Return angles (...) rad in [-pi, pi)."""
    wrapped: Floats = (angle + np.pi) % (2.0 * np.pi) - np.pi
    return wrapped


def outline(poses: Floats, length: float = LENGTH_M, width: float = WIDTH_M) -> Floats:
    """Return the corners (..., 4, 2) of a vehicle whose middle is at poses (..., 3)."""
    corners = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) * (length / 2, width / 2)
    return _place(corners, poses[..., None, :])


def outline_poses(corners: Floats) -> Floats:
    """Return poses (..., 3), x, y, yaw, of outlines (..., 4, 2): their middle and left side."""
    left = corners[..., 0, :] - corners[..., 3, :]
    return np.concatenate([corners.mean(-2), np.arctan2(left[..., 1:], left[..., :1])], axis=-1)


def _place(points: Floats, frame: Floats) -> Floats:
    """Return points (..., 2) of the frame (..., 3) x, y, yaw in the frame's own parent."""
    cos, sin = np.cos(frame[..., 2]), np.sin(frame[..., 2])
    x, y = points[..., 0], points[..., 1]
    return np.stack([frame[..., 0] + cos * x - sin * y,
                     frame[..., 1] + sin * x + cos * y], axis=-1)


def compose(frame: Floats, pose: Floats) -> Floats:
    """Return pose (..., 3), given in a frame (..., 3), in the frame's own parent."""
    return np.concatenate([_place(pose[..., :2], frame), wrap(frame[..., 2:] + pose[..., 2:])],
                          axis=-1)


@dataclass(frozen=True)
class ActionCodebook:
    """
    K entries of S outlines at equal times; outline 0 is the start, the last one the end.

    contours: (K, S, 4, 2), metres; see the module.
    """

    contours: Floats

    def __post_init__(self) -> None:
        """Raise ConfigurationError for a shape or numbers that are no motions."""
        shape = self.contours.shape
        if len(shape) != 4 or shape[0] < 1 or shape[1] < 2 or shape[2:] != (4, 2):
            raise ConfigurationError(f'codebook of shape {shape}: it must be (K, S, 4, 2), '
                                     'S >= 2 outlines of four corners')
        if not np.isfinite(self.contours).all():
            raise ConfigurationError('codebook with numbers that are not finite: restore it')
        left = self.contours[:, :, 0] - self.contours[:, :, 3]
        if float(np.linalg.norm(left, axis=-1).min()) < 1e-3:
            raise ConfigurationError('codebook with an outline without a left side: corners '
                                     'run front left, front right, rear right, rear left')

    @property
    def size(self) -> int:
        """Return K."""
        return int(self.contours.shape[0])

    @property
    def steps(self) -> int:
        """Return how many poses an entry adds to a path."""
        return int(self.contours.shape[1]) - 1

    def path(self, actions: Sequence[int] | Ints) -> Floats:
        """
        Return the poses (n * steps + 1, 3), x, y, yaw, that n entries lead through from 0.

        Every `steps`-th pose is the end of an entry, and all that the public code keeps.
        InputError for an entry that the codebook lacks.
        """
        chosen = np.asarray(actions, dtype=np.int64)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.size:
            raise InputError(f'actions {chosen.min()} .. {chosen.max()}: the codebook has '
                             f'0 .. {self.size - 1}')
        poses = [np.zeros((1, 3))]
        for motion in outline_poses(self.contours[chosen, 1:]):
            poses.append(compose(poses[-1][-1:], motion))
        return np.concatenate(poses)

    def actions(self, ends: Floats) -> Ints:
        """
        Return the entries (n,) int64 that follow poses (n, 3) best, each the end of one entry.

        As in the public code: the entry whose last outline has the least sum of corner distances
        to the pose's outline is taken, and the next one starts where it ended.
        """
        frame, found = np.zeros(3), []
        motions = outline_poses(self.contours[:, -1])
        for corners in outline(ends):
            placed = _place(self.contours[:, -1], np.broadcast_to(frame, (self.size, 1, 3)))
            distance = np.linalg.norm(placed - corners, axis=-1).sum(-1)
            found.append(int(distance.argmin()))
            frame = compose(frame, motions[found[-1]])
        return np.array(found, dtype=np.int64)

    def write(self, directory: str | Path) -> Path:
        """Write codebook/contours.safetensors into a folder and return its path."""
        path = Path(directory) / CODEBOOK_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(format_safetensors({TENSOR: self.contours.astype(np.float32)}))
        return path


def read_codebook(directory: str | Path, size: int | None = None) -> ActionCodebook:
    """Return the codebook of a folder, of `size` entries; ConfigurationError names the fault."""
    path = Path(directory) / CODEBOOK_FILE
    try:
        tensors = parse_safetensors(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f'{path}: no codebook ({error}); store the contours '
                                 f"(K, S, 4, 2) as tensor '{TENSOR}'") from None
    if set(tensors) != {TENSOR}:
        raise ConfigurationError(f"{path}: tensors {sorted(tensors)}, expected '{TENSOR}' alone")
    codebook = ActionCodebook(tensors[TENSOR].astype(np.float64))
    if size is not None and codebook.size != size:
        raise ConfigurationError(f'{path}: {codebook.size} entries, the profile has {size} '
                                 'action tokens; use the codebook that the model was trained with')
    return codebook


def arc_codebook(speeds: Sequence[float], curvatures: Sequence[float], seconds: float = 0.5,
                 steps: int = 5) -> ActionCodebook:
    """
    Return the codebook of circular arcs: every speed (m/s) with every curvature (1/m).

    A standing vehicle has one entry whatever its curvature; it comes first.
    """
    pairs = [(0.0, 0.0), *((v, k) for v in speeds if v > 0 for k in curvatures)]
    travelled = np.array([v for v, _ in pairs])[:, None] * np.linspace(0, seconds, steps + 1)
    yaw = travelled * np.array([k for _, k in pairs])[:, None]
    chord = travelled * np.sinc(yaw / (2.0 * np.pi))  # of an arc of length s and angle yaw
    poses = np.stack([chord * np.cos(yaw / 2), chord * np.sin(yaw / 2), yaw], axis=-1)
    return ActionCodebook(outline(poses))
