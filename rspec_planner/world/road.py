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
Roads: a centreline of piecewise curvature, its lanes, and the paint on the ground.

Road coordinates: station s along the ego lane's centre, d to its left; metres.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import math

import numpy as np

from rspec_planner.world.scene import Colour, Paint

STEP = 0.5  # metres between the stations that a path stores

ASPHALT: Colour = (86, 86, 84)
SHOULDER: Colour = (150, 146, 132)
WHITE: Colour = (236, 236, 232)
YELLOW: Colour = (232, 196, 60)
PAVEMENT: Colour = (172, 166, 158)
CYCLE_PATH: Colour = (150, 84, 72)


class Path:
    """A planar curve of piecewise-constant curvature, sampled every half metre."""

    def __init__(self, pieces: Sequence[tuple[float, float]], x: float = 0.0, y: float = 0.0,
                 heading: float = 0.0) -> None:
        """Lay `pieces` (length m, curvature 1/m) one after the other from a start pose."""
        self.curvatures = np.concatenate(
            [np.full(max(1, round(length / STEP)), curvature) for length, curvature in pieces])
        turn = self.curvatures * STEP
        self.headings = heading + np.concatenate([[0.0], np.cumsum(turn)])
        middle = self.headings[:-1] + turn / 2.0
        chord = STEP * np.sinc(turn / 2.0 / np.pi)
        self.xs = x + np.concatenate([[0.0], np.cumsum(chord * np.cos(middle))])
        self.ys = y + np.concatenate([[0.0], np.cumsum(chord * np.sin(middle))])
        self.length = STEP * len(self.curvatures)
        self._nodes = list(zip(self.xs.tolist(), self.ys.tolist(), self.headings.tolist(),
                               [*self.curvatures.tolist(), float(self.curvatures[-1])]))

    def pose(self, s: float, d: float = 0.0) -> tuple[float, float, float]:
        """Return x, y and heading at road coordinates (s, d); ends are extended straight."""
        i = min(max(int(s / STEP), 0), len(self._nodes) - 1)
        x, y, heading, curvature = self._nodes[i]
        along = s - i * STEP
        if along >= 0.0 and i < len(self._nodes) - 1:
            middle = heading + 0.5 * curvature * along
            heading += curvature * along
        else:
            middle = heading
        return (x + along * math.cos(middle) - d * math.sin(heading),
                y + along * math.sin(middle) + d * math.cos(heading), heading)

    def curvature(self, s: float) -> float:
        """Return the curvature at station s, 1/m, left positive."""
        return float(self._nodes[min(max(int(s / STEP), 0), len(self._nodes) - 1)][3])

    def points(self, s: np.ndarray, d: np.ndarray | float) -> np.ndarray:
        """Return (n, 2) world points at stations `s` (n,) and offsets `d`."""
        nodes = np.arange(len(self.xs)) * STEP
        inside = np.clip(s, 0.0, self.length)
        beyond = s - inside
        heading = np.interp(inside, nodes, self.headings)
        x = np.interp(inside, nodes, self.xs) + beyond * np.cos(heading) - d * np.sin(heading)
        y = np.interp(inside, nodes, self.ys) + beyond * np.sin(heading) + d * np.cos(heading)
        return np.stack([x, y], axis=-1)

    def project(self, x: float, y: float, s: float) -> tuple[float, float, float]:
        """Return (s, d, heading of the path) of a world point near station `s`."""
        for _ in range(3):
            px, py, heading = self.pose(s)
            along = (x - px) * math.cos(heading) + (y - py) * math.sin(heading)
            across = (y - py) * math.cos(heading) - (x - px) * math.sin(heading)
            s += along / max(0.3, 1.0 - self.curvature(s) * across)
        px, py, heading = self.pose(s)
        return s, (y - py) * math.cos(heading) - (x - px) * math.sin(heading), heading

    def strip(self, start: float, end: float, right: float, left: float,
              step: float = 2.0) -> np.ndarray:
        """Return the (n, 2) outline between offsets `right` and `left` over [start, end]."""
        count = max(2, int(math.ceil((end - start) / step)) + 1)
        s = np.linspace(start, end, count)
        return np.concatenate([self.points(s, right), self.points(s[::-1], left)])


@dataclass(frozen=True)
class Layout:
    """Lanes around the ego lane; d = 0 is the middle of the ego lane."""

    width: float = 3.5  # of every lane, metres
    left: int = 0  # lanes of our direction on the left of the ego lane
    right: int = 0  # lanes of our direction on the right of it
    oncoming: int = 1  # lanes of the other direction
    shoulder: float = 2.6  # paved strip beside the outer lanes, metres
    path: bool = False  # a cycle path on the right, beyond the shoulder

    @property
    def right_edge(self) -> float:
        """Return d of the right edge of the lanes (negative)."""
        return -self.width * (0.5 + self.right)

    @property
    def divider(self) -> float:
        """Return d of the line between our direction and the other one."""
        return self.width * (0.5 + self.left)

    @property
    def left_edge(self) -> float:
        """Return d of the left edge of all lanes."""
        return self.divider + self.width * self.oncoming

    def edge(self, side: str) -> float:
        """Return d of the outer edge of the lanes on 'left' or 'right'."""
        return self.left_edge if side == 'left' else self.right_edge


def road_paints(path: Path, layout: Layout, start: float, end: float,
                gaps: Sequence[tuple[float, float]] = ()) -> list[Paint]:
    """Return paint of a road over [start, end]; `gaps` are stations without any marking."""
    lo, hi = layout.right_edge, layout.left_edge
    paints = [
        Paint(path.strip(start, end, lo - layout.shoulder - 1.6, hi + layout.shoulder + 1.6),
              PAVEMENT, 'shoulder'),
        Paint(path.strip(start, end, lo - layout.shoulder, hi + layout.shoulder), ASPHALT, 'road'),
    ]
    if layout.path:
        right = lo - layout.shoulder - 2.4
        paints.append(Paint(path.strip(start, end, right, right + 2.2), CYCLE_PATH, 'path'))
    spans, begin = [], start
    for gap_start, gap_end in sorted(gaps):
        if gap_start > begin:
            spans.append((begin, gap_start))
        begin = max(begin, gap_end)
    if end > begin:
        spans.append((begin, end))
    for first, last in spans:
        for d in (lo, hi):
            paints.append(Paint(path.strip(first, last, d - 0.08, d + 0.08), WHITE, 'marking'))
        if layout.oncoming:
            d = layout.divider
            paints.append(Paint(path.strip(first, last, d - 0.08, d + 0.08), YELLOW, 'marking'))
    paints += _dashes(path, layout, spans)
    return paints


def _dashes(path: Path, layout: Layout, spans: Sequence[tuple[float, float]]) -> list[Paint]:
    """Return the broken lines between lanes of one direction."""
    offsets = [layout.width * (i + 0.5) for i in range(-layout.right, layout.left)]
    offsets += [layout.divider + layout.width * i for i in range(1, layout.oncoming)]
    paints = []
    for first, last in spans:
        starts = np.arange(math.ceil(first / 9.0) * 9.0, last - 3.0, 9.0)
        for d in offsets:
            corners = [path.points(starts + along, d + across)
                       for along, across in ((0, -.07), (3, -.07), (3, .07), (0, .07))]
            for polygon in np.stack(corners, axis=1):
                paints.append(Paint(polygon, WHITE, 'marking'))
    return paints


def stop_line(path: Path, s: float, right: float, left: float) -> Paint:
    """Return a stop line whose near edge is at station s."""
    return Paint(path.strip(s, s + 0.5, right, left), WHITE, 'stop_line')


def crosswalk(path: Path, s: float, right: float, left: float, depth: float = 3.0) -> list[Paint]:
    """Return zebra stripes over [s, s + depth] between two offsets."""
    starts = np.arange(right + 0.25, left - 0.5, 1.0)
    return [Paint(path.strip(s, s + depth, d, d + 0.5), WHITE, 'crosswalk') for d in starts]


def arrow(path: Path, s: float, turn: str) -> list[Paint]:
    """Return a lane arrow, 4 m long from station s; turn is 'left', 'right' or 'ahead'."""
    def outline(points: Sequence[tuple[float, float]]) -> np.ndarray:
        local = np.array(points)
        return path.points(s + local[:, 0], local[:, 1])
    if turn == 'ahead':
        shapes = [[(0, -.1), (2.6, -.1), (2.6, .1), (0, .1)], [(2.6, -.4), (4, 0), (2.6, .4)]]
    else:
        k = 1.0 if turn == 'left' else -1.0
        shapes = [[(0, -.1), (3, -.1), (3, .1), (0, .1)],
                  [(2.8, 0), (3.1, 0), (3.1, k * .5), (2.8, k * .5)],
                  [(2.4, k * .5), (3.5, k * .5), (2.95, k * 1.3)]]
    return [Paint(outline(shape), WHITE, 'arrow') for shape in shapes]


def inside(polygon: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Tell which of (n, 2) points lie inside a polygon (m, 2), by the even-odd rule."""
    x, y = points[:, 0, None], points[:, 1, None]
    ax, ay = polygon[:, 0], polygon[:, 1]
    bx, by = np.roll(ax, -1), np.roll(ay, -1)
    crosses = (ay > y) != (by > y)
    with np.errstate(divide='ignore', invalid='ignore'):
        at = ax + (y - ay) / (by - ay) * (bx - ax)
    return np.asarray((crosses & (x < at)).sum(axis=1) % 2 == 1)
