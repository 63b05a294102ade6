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
"""The order in which convex footprints must be drawn, far to near, seen from one point."""

from __future__ import annotations

import heapq

import numpy as np

_TOUCH = 1e-6  # metres by which touching footprints may overlap


def draw_order(footprints: np.ndarray, eye: np.ndarray) -> list[int]:
    """
    Return the indices of `footprints` (n, 4, 2), counter-clockwise, so that later covers earlier.

    Two disjoint convex footprints have a separating edge: the one on the far side of it from
    `eye` (2,) goes first. Overlapping footprints and the rare cycles fall back to the distance.
    """
    count = len(footprints)
    relative = footprints - eye
    distance = np.sqrt((relative.mean(axis=1) ** 2).sum(axis=1))
    first, second = _bearing_pairs(relative)
    later: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for i, j in zip(*_constraints(footprints, relative, first, second)):
        later[i].append(j)
        waiting[j] += 1
    return _topological(distance.tolist(), later, waiting)


def _bearing_pairs(relative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index pairs i < j whose bearings overlap; others cannot cover each other."""
    bearing = np.arctan2(relative[:, :, 1], relative[:, :, 0])
    low, high = bearing.min(axis=1), bearing.max(axis=1)
    wrapped = high - low > np.pi  # straddles straight behind: let it meet everything
    low[wrapped], high[wrapped] = -np.pi, np.pi
    overlap = (low[:, None] <= high[None]) & (low[None] <= high[:, None])
    first, second = np.nonzero(np.triu(overlap, 1))
    return first, second


def _constraints(footprints: np.ndarray, relative: np.ndarray, first: np.ndarray,
                 second: np.ndarray) -> tuple[list[int], list[int]]:
    """Return (before, after) lists: before[k] must be drawn before after[k]."""
    edges = np.roll(footprints, -1, axis=1) - footprints
    normals = np.stack([edges[..., 1], -edges[..., 0]], axis=-1)
    normals /= np.maximum(np.sqrt((normals ** 2).sum(-1, keepdims=True)), 1e-9)
    eye_outside = -(normals * relative).sum(-1) > 0  # (n, 4): the eye is beyond this edge
    before: list[np.ndarray] = []
    after: list[np.ndarray] = []
    decided = np.zeros(len(first), bool)
    for a, b in ((first, second), (second, first)):
        gaps = footprints[b][:, None] - footprints[a][:, :, None]  # (p, edge of a, corner of b, 2)
        separated = ((gaps * normals[a][:, :, None]).sum(-1) >= -_TOUCH).all(axis=2)
        a_first = (separated & eye_outside[a]).any(axis=1) & ~decided
        b_first = (separated & ~eye_outside[a]).any(axis=1) & ~decided & ~a_first
        before += [a[a_first], b[b_first]]
        after += [b[a_first], a[b_first]]
        decided |= a_first | b_first
    return np.concatenate(before).tolist(), np.concatenate(after).tolist()


def _topological(distance: list[float], later: list[list[int]],
                 waiting: list[int]) -> list[int]:
    """Return an order that keeps the constraints, the farthest ready one first."""
    ready = [(-distance[i], i) for i, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    pending = {i for i, n in enumerate(waiting) if n > 0}
    order: list[int] = []
    while ready or pending:
        if not ready:  # a cycle: break it at the farthest
            farthest = max(pending, key=lambda i: (distance[i], -i))
            pending.discard(farthest)
            heapq.heappush(ready, (-distance[farthest], farthest))
        _, i = heapq.heappop(ready)
        order.append(i)
        for j in later[i]:
            waiting[j] -= 1
            if waiting[j] == 0 and j in pending:
                pending.discard(j)
                heapq.heappush(ready, (-distance[j], j))
    return order
