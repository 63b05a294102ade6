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
Flat-faced shapes that the renderer draws: quads with a colour, gathered into convex parts.

A part's quads are listed in drawing order: of two visible faces, the later one covers the
earlier one. Frame of a shape: origin at the footprint centre on the ground, x forward, y left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import math

import numpy as np

#: directions a plate can face, radians from +x
FRONT, LEFT, REAR, RIGHT = 0.0, math.pi / 2, math.pi, -math.pi / 2

Rect = tuple[float, float, float, float]  # centre x, centre y, length, width
Rgb = Sequence[float]

_FACES = ((0, 1, 5, 4), (1, 2, 6, 5), (2, 3, 7, 6), (3, 0, 4, 7), (4, 5, 6, 7))
_OCTAGON = math.tan(math.pi / 8)  # half an edge of an octagon with inner radius 1


@dataclass(frozen=True)
class Part:
    """One roughly convex piece of an object, n quads in drawing order."""

    quads: np.ndarray  # (n, 4, 3) float64, counter-clockwise seen from outside, metres
    normals: np.ndarray  # (n, 3) float64, unit, outward
    colours: np.ndarray  # (n, 3) float64 RGB
    glow: np.ndarray  # (n,) float64: 0 lit by the scene, 1 shines by itself
    footprint: np.ndarray  # (4, 2) float64 corners that order parts among each other
    shadow: bool  # True: darkens the ground under the footprint


class Sketch:
    """Collects quads and turns them into a `Part`."""

    def __init__(self) -> None:
        self._quads: list[Sequence[Sequence[float]]] = []
        self._colours: list[Rgb] = []
        self._glow: list[float] = []

    def quad(self, colour: Rgb, corners: Sequence[Sequence[float]], glow: float = 0.0) -> None:
        """Add one face by its corners, counter-clockwise seen from outside."""
        self._add(corners, colour, glow)

    def _add(self, quad: Sequence[Sequence[float]], colour: Rgb, glow: float) -> None:
        self._quads.append(quad)
        self._colours.append(colour)
        self._glow.append(glow)

    def prism(self, colour: Rgb, bottom: Rect, z0: float, z1: float,
              top: Rect | None = None, glow: float = 0.0) -> None:
        """Add a box from z0 to z1; `top` tapers or shears it. The floor face is left out."""
        corners = []
        for (x, y, length, width), z in ((bottom, z0), (top or bottom, z1)):
            half_l, half_w = length / 2, width / 2
            corners += [(x - half_l, y - half_w, z), (x + half_l, y - half_w, z),
                        (x + half_l, y + half_w, z), (x - half_l, y + half_w, z)]
        for face in _FACES:
            self._add([corners[i] for i in face], colour, glow)

    def plate(self, colour: Rgb, facing: float, x: float, y: float, z: float,
              width: float, height: float, glow: float = 0.0, top_width: float = -1.0) -> None:
        """Add one upright face centred at (x, y, z), seen only from the side it faces."""
        rx, ry = -math.sin(facing), math.cos(facing)
        low, high = width / 2, (width if top_width < 0 else top_width) / 2
        z0, z1 = z - height / 2, z + height / 2
        self._add([(x - rx * low, y - ry * low, z0), (x + rx * low, y + ry * low, z0),
                   (x + rx * high, y + ry * high, z1), (x - rx * high, y - ry * high, z1)],
                  colour, glow)

    def disc(self, colour: Rgb, facing: float, x: float, y: float, z: float,
             diameter: float, glow: float = 0.0) -> None:
        """Add an upright octagon, three quads."""
        inner = diameter * _OCTAGON
        cap = (diameter - inner) / 2
        self.plate(colour, facing, x, y, z, diameter, inner, glow)
        self.plate(colour, facing, x, y, z - (inner + cap) / 2, inner, cap, glow, diameter)
        self.plate(colour, facing, x, y, z + (inner + cap) / 2, diameter, cap, glow, inner)

    def part(self, footprint: Rect, shadow: bool = True) -> Part:
        """Return what was added so far; the quads come in the order of the calls."""
        quads = np.array(self._quads, np.float64)
        normals = np.cross(quads[:, 2] - quads[:, 0], quads[:, 3] - quads[:, 1])
        normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
        x, y, length, width = footprint
        signs = np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])
        corners = np.array([x, y]) + signs * np.array([length, width])
        return Part(quads, normals, np.array(self._colours, np.float64),
                    np.array(self._glow, np.float64), corners, shadow)
