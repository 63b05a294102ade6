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
"""Where cameras sit on the vehicle, from the static transforms of /tf_static."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rspec_planner.planner.history import rotation_matrices

Floats = NDArray[np.float64]


def transform_matrix(translation: Sequence[float], quaternion_xyzw: Sequence[float]) -> Floats:
    """Return the (4, 4) transform parent <- child of a TransformStamped's numbers."""
    matrix = np.eye(4)
    matrix[:3, :3] = rotation_matrices(np.array([quaternion_xyzw], dtype=np.float64))[0]
    matrix[:3, 3] = translation
    return matrix


class StaticFrames:
    """A tree of frames that do not move against each other."""

    def __init__(self) -> None:
        self._parents: dict[str, tuple[str, Floats]] = {}

    def add(self, parent: str, child: str, matrix: Floats) -> None:
        """Set the pose (4, 4) parent <- child; a newer one replaces it."""
        self._parents[child.lstrip('/')] = parent.lstrip('/'), matrix

    def pose(self, frame: str, root: str) -> Floats | None:
        """Return root <- frame (4, 4), None when no chain of transforms connects them."""
        frame, pose = frame.lstrip('/'), np.eye(4)
        for _ in range(len(self._parents) + 1):
            if frame == root:
                return pose
            if frame not in self._parents:
                return None
            frame, step = self._parents[frame]
            pose = step @ pose
        return None  # a loop
