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
Visual features of frames that an earlier plan has already seen.

Exact, because the tower attends within one image only. A stamp alone does not identify a frame
(a bag may loop, two clips may share stamps), so the pixels are compared as well.

All memory is taken with the first image: as many images as two observations have, since what the
next one shares with the last lies among these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
import torch
from torch import Tensor

_KEEP_NS = 1_000_000_000


@dataclass(frozen=True)
class FrameFeatures:
    """Output of the vision stage for one image."""

    features: Tensor  # (T, hidden)
    deepstack: Tensor  # (D, T, hidden)


class VisionCache:
    """Features by camera and stamp, for frames within a second of the newest t0."""

    def __init__(self, room: int) -> None:
        """Keep up to `room` images; the one that was not used for longest makes way."""
        self._room = room
        self._entries: dict[tuple[str, int], tuple[NDArray[np.uint8], FrameFeatures]] = {}
        self._spare: list[FrameFeatures] = []

    def __len__(self) -> int:
        return len(self._entries)

    def knows(self, camera: str, stamp_ns: int) -> bool:
        """Return whether an image of this camera and stamp was kept; its pixels may differ."""
        return (camera, stamp_ns) in self._entries

    def get(self, camera: str, stamp_ns: int, image: NDArray[np.uint8]) -> FrameFeatures | None:
        """Return the features of this very image (H, W, 3), None when it is new."""
        entry = self._entries.get((camera, stamp_ns))
        if entry is None or not np.array_equal(entry[0], image):
            return None
        self._entries[camera, stamp_ns] = self._entries.pop((camera, stamp_ns))  # the newest use
        return entry[1]

    def put(self, camera: str, stamp_ns: int, image: NDArray[np.uint8],
            features: FrameFeatures) -> None:
        """Keep an image, by reference, and a copy of its features."""
        if not self._entries and not self._spare:
            self._spare = [_room_for(features) for _ in range(self._room)]
        if (camera, stamp_ns) in self._entries:
            self._spare.append(self._entries.pop((camera, stamp_ns))[1])
        elif not self._spare:
            self._spare.append(self._entries.pop(next(iter(self._entries)))[1])
        kept = self._spare.pop()
        kept.features.copy_(features.features)
        kept.deepstack.copy_(features.deepstack)
        self._entries[camera, stamp_ns] = (image, kept)

    def prune(self, t0_ns: int) -> None:
        """Forget frames more than a second away from t0 on either side."""
        for key in [key for key in self._entries if abs(key[1] - t0_ns) > _KEEP_NS]:
            self._spare.append(self._entries.pop(key)[1])

    def clear(self) -> None:
        """Forget everything."""
        self._spare += [features for _, features in self._entries.values()]
        self._entries.clear()


def _room_for(features: FrameFeatures) -> FrameFeatures:
    """Return memory for the features of one image."""
    return FrameFeatures(*(torch.empty(each.shape, dtype=each.dtype, device=each.device)
                           for each in (features.features, features.deepstack)))
