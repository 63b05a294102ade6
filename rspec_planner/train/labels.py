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
Auxiliary labels that the world knows for free; heads trained on them are dropped at export.

A tower that must discover objects through word losses alone needs many more clips; telling it
what stands in each merged patch costs one small linear layer.
"""

from __future__ import annotations

import math

import numpy as np

from rspec_planner.world.clip import Clip
from rspec_planner.world.rig import Rig
from rspec_planner.world.scene import AGENT_KINDS

#: 0 is background, k + 1 is AGENT_KINDS[k]
OBJECT_CLASSES = len(AGENT_KINDS) + 1
TOKEN_PX = 32  # side of a merged patch
#: row of `Clip.agents` and `Clip.history` that belongs to each of the four frames
FRAME_ROWS = (12, 13, 14, 15)
_HEIGHTS = {'car': 1.5, 'van': 2.2, 'truck': 3.2, 'bus': 3.1, 'emergency': 2.2, 'cyclist': 1.7,
            'adult': 1.75, 'child': 1.2, 'dog': 0.6, 'deer': 1.5, 'cone': 0.75, 'barrier': 1.0,
            'traffic_light': 5.4, 'stop_sign': 2.6, 'bus_stop': 2.8, 'crossing_gate': 3.0,
            'tree': 5.0, 'building': 8.0, 'pole': 5.0}
_SCENERY = ('tree', 'building', 'pole')
_NEAR = 0.5  # metres; a corner nearer than this has no useful pixel


def object_grid(clip: Clip, rig: Rig) -> np.ndarray:
    """
    Return what stands in each merged patch, (16, tokens per image) uint8, camera-major.

    A patch gets the nearest agent whose projected box touches it. Kinds of scenery are left
    out. Clips without agents give zeros.
    """
    rows, cols = rig.height // TOKEN_PX, rig.width // TOKEN_PX
    grid = np.zeros((len(rig.names), len(FRAME_ROWS), rows, cols), np.uint8)
    if clip.agents.shape[1] == 0:
        return grid.reshape(-1, rows * cols)
    for frame, row in enumerate(FRAME_ROWS):
        kinds, corners = _boxes(clip.agents[row], clip.history[row])
        order = np.argsort(-np.abs(corners[:, :, :2]).sum(-1).mean(-1))  # far first
        for camera, name in enumerate(rig.names):
            uv, front = _project(corners, rig, name)
            for index in order:
                _fill(grid[camera, frame], uv[index], front[index], int(kinds[index]) + 1)
    return grid.reshape(-1, rows * cols)


def _boxes(agents: np.ndarray, ego: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return kinds (n,) and box corners (n, 8, 3) in the ego frame of that instant."""
    kinds = agents[:, 6].astype(int)
    known = [k for k in range(len(kinds)) if AGENT_KINDS[kinds[k]] not in _SCENERY
             and np.isfinite(agents[k]).all()]
    agents, kinds = agents[known], kinds[known]
    heights = np.array([_HEIGHTS[AGENT_KINDS[k]] for k in kinds])
    signs = np.array([(a, b, c) for a in (-.5, .5) for b in (-.5, .5) for c in (0., 1.)])
    local = signs[None] * np.stack((agents[:, 3], agents[:, 4], heights), -1)[:, None]
    cos, sin = np.cos(agents[:, 2])[:, None], np.sin(agents[:, 2])[:, None]
    x = agents[:, 0, None] + cos * local[..., 0] - sin * local[..., 1] - ego[0]
    y = agents[:, 1, None] + sin * local[..., 0] + cos * local[..., 1] - ego[1]
    c, s = math.cos(float(ego[3])), math.sin(float(ego[3]))
    return kinds, np.stack((c * x + s * y, -s * x + c * y, local[..., 2]), -1)


def _project(corners: np.ndarray, rig: Rig, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (n, 8, 2) and which corners are far enough in front (n, 8)."""
    pose = rig.extrinsics[name]
    rays = (corners - pose[:3, 3]) @ pose[:3, :3]
    front = rays[..., 2] > _NEAR
    depth = np.where(front, rays[..., 2], 1.0)[..., None]
    return (rays @ rig.intrinsics[name].T)[..., :2] / depth, front


def _fill(grid: np.ndarray, uv: np.ndarray, front: np.ndarray, value: int) -> None:
    """Mark the patches that the pixel box of the visible corners touches."""
    if not front.any():
        return
    rows, cols = grid.shape
    low, high = uv[front].min(0) / TOKEN_PX, uv[front].max(0) / TOKEN_PX
    left, top = max(math.floor(low[0]), 0), max(math.floor(low[1]), 0)
    right, bottom = min(math.floor(high[0]), cols - 1), min(math.floor(high[1]), rows - 1)
    if left <= right and top <= bottom:
        grid[top:bottom + 1, left:right + 1] = value
