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
The ground as bird's-eye images around the ego, painted once per instant for all cameras.

Five rectangles of one atlas hold the same ground at different resolutions; a camera's constant
remap picks the rectangle by its pixel footprint, so each view costs one `remap`. Rows run along
x (ahead), columns along -y (right).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import math
import operator

import cv2
import numpy as np

from rspec_planner.world.scene import Paint

SUB = 4  # fixed-point bits of the rasteriser
TIE = 1e-6  # keeps exact halves from rounding by the last bit of a matrix product
GRASS = (92, 124, 66)
_SHADOW = (47.0, 47.0, 50.0)
_TILE = 512  # texture pixels; 8 per metre, so the pattern repeats after 64 m
_TEXTURE_LEVELS = 20
_TEXTURE_MEAN = _TEXTURE_LEVELS // 2


@dataclass(frozen=True)
class Level:
    """One rectangle of the atlas: rows and columns, metres per pixel, where it lies."""

    x0: float  # metres ahead of the ego at its first row
    along: float  # metres per row
    across: float  # metres per column
    rows: int
    cols: int
    row: int  # position in the atlas
    col: int

    @property
    def x_range(self) -> tuple[float, float]:
        """Return the span along x, metres."""
        return self.x0, self.x0 + self.rows * self.along

    @property
    def half_width(self) -> float:
        """Return the reach to either side, metres."""
        return self.cols * self.across / 2


NEAR = Level(-7.0, 0.0625, 0.0625, 320, 320, 0, 0)
TELE_NEAR = Level(13.0, 0.25, 0.0625, 160, 320, 0, 320)
TELE_FAR = Level(50.0, 1.2, 0.125, 160, 320, 160, 320)
MIDDLE = Level(-20.0, 0.25, 0.25, 640, 640, 320, 0)
FAR = Level(-20.0, 0.5, 0.5, 320, 320, 960, 0)
#: levels that are painted; FAR is the middle one at half size
PAINTED = (NEAR, MIDDLE, TELE_NEAR, TELE_FAR)
ROWS, COLS = 1280, 640
GRASS_PIXEL = (480.0, 1120.0)  # column, row of a spot that is always bare


class Atlas:
    """Paints the levels; keeps the stacked vertices of the last list of paints."""

    def __init__(self) -> None:
        self.image = np.empty((ROWS, COLS, 3), np.uint8)
        self._bare_near = np.empty((NEAR.rows, NEAR.cols, 3), np.uint8)
        self._bare_near[:] = GRASS
        self._bare = np.empty((MIDDLE.rows, MIDDLE.cols, 3), np.uint8)
        self._bare[:] = [c - _TEXTURE_MEAN for c in GRASS]
        texture = np.random.RandomState(0).randint(0, 4 * _TEXTURE_LEVELS, (_TILE, _TILE))
        smooth = cv2.GaussianBlur(texture.astype(np.uint8), (3, 3), 0)
        grain = np.clip(smooth.astype(np.int32) - 3 * _TEXTURE_LEVELS // 2, 0, _TEXTURE_LEVELS)
        self._texture = np.repeat(grain.astype(np.uint8)[:, :, None], 3, axis=2)
        self.image[:] = self._bare[0, 0]
        self._paints: tuple[Paint, ...] = ()
        self._vertices = np.zeros((0, 2))
        self._starts = np.zeros(0, np.int64)
        self._colours: list[tuple[float, float, float]] = []

    def draw(self, paints: Sequence[Paint], pose: tuple[float, float, float],
             shadows: np.ndarray, wetness: float) -> None:
        """
        Paint everything around the ego `pose` (x, y, yaw in the world).

        `shadows` (n, 4, 2) are footprints in the ego frame; `wetness` 0..1 darkens the road.
        """
        self._stack(paints)
        x, y, yaw = pose
        c, s = math.cos(yaw), math.sin(yaw)
        local = (self._vertices - (x, y)) @ np.array([[c, -s], [s, c]])
        local = np.concatenate([local, shadows.reshape(-1, 2)])
        count = len(shadows)
        starts = np.concatenate([self._starts,
                                 len(self._vertices) + 4 * np.arange(count)]).astype(np.int64)
        dim = 1.0 - 0.3 * wetness
        colours = [(r * dim, g * dim, b * dim) for r, g, b in self._colours] + [_SHADOW] * count
        bounds = ((np.minimum.reduceat(local, starts), np.maximum.reduceat(local, starts))
                  if len(starts) else (np.zeros((0, 2)), np.zeros((0, 2))))
        for level in PAINTED:
            self._draw_level(level, local, starts, bounds, colours)
        self._grain(x, y, c, s)
        middle = self.image[MIDDLE.row:MIDDLE.row + MIDDLE.rows]
        half = self.image[FAR.row:FAR.row + FAR.rows, :FAR.cols]
        cv2.pyrDown(middle, dst=half)

    def _stack(self, paints: Sequence[Paint]) -> None:
        """Stack the vertices of `paints` unless they are the ones of the last call."""
        if len(paints) == len(self._paints) and all(map(operator.is_, paints, self._paints)):
            return
        self._paints = tuple(paints)
        lengths = [len(paint.polygon) for paint in paints]
        self._starts = np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, np.int64)
        self._vertices = (np.concatenate([paint.polygon for paint in paints])
                          if lengths else np.zeros((0, 2)))
        self._colours = [paint.colour for paint in paints]

    def _draw_level(self, level: Level, local: np.ndarray, starts: np.ndarray,
                    bounds: tuple[np.ndarray, np.ndarray],
                    colours: Sequence[tuple[float, ...]]) -> None:
        """Fill the polygons that touch `level`, in order."""
        view = self.image[level.row:level.row + level.rows, level.col:level.col + level.cols]
        near = level is NEAR
        bare = self._bare_near if near else self._bare[:level.rows, :level.cols]
        np.copyto(view, bare)  # ten times faster than assigning a colour
        low, high = bounds
        x0, x1 = level.x_range
        hit = ((high[:, 0] > x0) & (low[:, 0] < x1) & (high[:, 1] > -level.half_width)
               & (low[:, 1] < level.half_width))
        pixels = np.stack([level.cols / 2 - local[:, 1] / level.across,
                           (local[:, 0] - level.x0) / level.along], axis=-1)
        fixed = np.floor(pixels * (1 << SUB) + (0.5 + TIE)).astype(np.int32)
        ends = np.append(starts[1:], len(local))
        mean = 0.0 if near else float(_TEXTURE_MEAN)
        for i in np.flatnonzero(hit).tolist():
            r, g, b = colours[i]
            cv2.fillPoly(view, [fixed[starts[i]:ends[i]]],
                         (max(0.0, r - mean), max(0.0, g - mean), max(0.0, b - mean)),
                         cv2.LINE_AA, SUB)

    def _grain(self, x: float, y: float, c: float, s: float) -> None:
        """Subtract the world-fixed texture from the near level; elsewhere it averages out."""
        scale = _TILE / 64.0
        step = NEAR.along * scale
        columns = np.arange(NEAR.cols, dtype=np.float32)
        rows = np.arange(NEAR.rows, dtype=np.float32)
        side = NEAR.cols / 2 * NEAR.across
        u0 = ((x + NEAR.x0 * c - side * s) % 64.0) * scale
        v0 = ((y + NEAR.x0 * s + side * c) % 64.0) * scale
        map_x = np.add.outer(rows * np.float32(step * c), columns * np.float32(step * s))
        map_y = np.add.outer(rows * np.float32(step * s), columns * np.float32(-step * c))
        map_x += np.float32(u0)
        map_y += np.float32(v0)
        grain = cv2.remap(self._texture, map_x, map_y, cv2.INTER_NEAREST,
                          borderMode=cv2.BORDER_WRAP)
        view = self.image[:NEAR.rows, :NEAR.cols]
        cv2.subtract(view, grain, dst=view)


def atlas_coordinates(x: np.ndarray, y: np.ndarray, footprint: np.ndarray,
                      tele: bool) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the atlas (column, row) float32 that shows ground points (x, y) of the ego frame.

    `footprint` is the ground length of a pixel in metres; points outside map to bare ground.
    """
    columns = np.full(x.shape, GRASS_PIXEL[0], np.float32)
    rows = np.full(x.shape, GRASS_PIXEL[1], np.float32)
    todo = np.ones(x.shape, bool)
    order = [(TELE_NEAR, math.inf), (TELE_FAR, math.inf)] if tele else [(NEAR, 0.5)]
    for level, coarsest in [*order, (MIDDLE, 1.6), (FAR, math.inf)]:
        margin_x, margin_y = 2 * level.along, 2 * level.across
        x0, x1 = level.x_range
        here = (todo & (footprint < coarsest) & (x > x0 + margin_x) & (x < x1 - margin_x)
                & (abs(y) < level.half_width - margin_y))
        columns[here] = (level.col + level.cols / 2 - y / level.across)[here]
        rows[here] = (level.row + (x - level.x0) / level.along)[here]
        todo &= ~here
    return columns, rows
