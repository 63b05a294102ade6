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
"""Shapes of things that stand: lights, signs, cones, barriers, gates, trees, houses."""

from __future__ import annotations

import math

from rspec_planner.world.look import Look
from rspec_planner.world.shapes import FRONT, LEFT, Part, REAR, RIGHT, Sketch

_STEEL = (112.0, 116.0, 120.0)
_HOUSING = (20.0, 22.0, 24.0)
_WHITE = (242.0, 242.0, 240.0)
_SIGN_RED = (204.0, 28.0, 36.0)
_REFLECT = 0.45  # share of light that a reflective sign keeps at night
_DARK_LENS = (44.0, 46.0, 44.0)
_LENSES = (('red', (255.0, 36.0, 30.0)), ('amber', (255.0, 186.0, 20.0)),
           ('green', (50.0, 255.0, 120.0)))


def _signal_head(sketch: Sketch, look: Look, top: float, lens: float) -> None:
    """Add a three-lens head whose upper edge is at `top`, facing -x."""
    pitch, rim = lens * 1.2, lens * 0.35
    height, width = 3 * pitch + rim, lens * 1.75
    z = top - height / 2
    sketch.prism(_HOUSING, (0.0, 0.0, 0.26, width), top - height, top)
    sketch.plate((228.0, 228.0, 224.0), REAR, -0.135, 0.0, z, width, height)
    sketch.plate(_HOUSING, REAR, -0.14, 0.0, z, width - 0.1, height - 0.1)
    for row, (name, colour) in enumerate(_LENSES):
        centre = top - rim / 2 - pitch * (row + 0.5)
        if look.lamp == name:
            sketch.plate([c * 0.55 for c in colour], REAR, -0.15, 0.0, centre,
                         width - 0.14, pitch, 1.0)
            sketch.disc(colour, REAR, -0.16, 0.0, centre, lens * 1.12, 1.0)
        else:
            sketch.plate(_DARK_LENS, REAR, -0.15, 0.0, centre, lens * 0.85, lens * 0.85)


def traffic_light(look: Look) -> tuple[Part, ...]:
    """Return a pole with a head at the top and a lower one that close cameras still see."""
    top = max(look.height, 3.6)
    sketch = Sketch()
    sketch.prism(_STEEL, (0.16, 0.0, 0.16, 0.16), 0.0, top - 0.4)
    if top >= 4.6:
        _signal_head(sketch, look, 3.15, 0.34)
    _signal_head(sketch, look, top, 0.42)
    return (sketch.part((0.0, 0.0, 0.5, 0.5), shadow=False),)


def stop_sign(look: Look) -> tuple[Part, ...]:
    """Return a red octagon with a white rim and bar, grey from behind."""
    size = max(0.9, look.width)
    z = max(look.height, size + 0.6) - size / 2
    sketch = Sketch()
    sketch.prism(_STEEL, (0.05, 0.0, 0.08, 0.08), 0.0, z)
    sketch.disc((140.0, 142.0, 145.0), FRONT, 0.0, 0.0, z, size)
    sketch.disc(_WHITE, REAR, 0.0, 0.0, z, size, _REFLECT)
    sketch.disc(_SIGN_RED, REAR, -0.01, 0.0, z, size * 0.88, _REFLECT)
    for i in range(4):  # four letters as blocks
        sketch.plate(_WHITE, REAR, -0.02, size * (0.255 - 0.17 * i), z, size * 0.12,
                     size * 0.28, _REFLECT)
    return (sketch.part((0.0, 0.0, 0.3, size), shadow=False),)


def bus_stop(look: Look) -> tuple[Part, ...]:
    """Return a blue sign on a pole, with a glass shelter when the footprint has room."""
    sketch = Sketch()
    length, width = look.length, look.width
    post_x = 0.0
    if length >= 1.2 and width >= 1.0:
        glass, post = (150.0, 176.0, 186.0), 0.1
        for y in (-width / 2 + post, width / 2 - post):
            sketch.prism(_STEEL, (length / 2 - post, y, post, post), 0.0, 2.25)
        sketch.prism(glass, (0.0, 0.1 - width / 2, length * 0.9, 0.05), 0.3, 2.1)
        sketch.prism((70.0, 78.0, 86.0), (0.0, 0.0, length, width), 2.25, 2.4)
        post_x = -length / 2 - 0.3
    top = max(look.height, 2.6)
    sketch.prism(_STEEL, (post_x, 0.0, 0.08, 0.08), 0.0, top)
    for facing, x in ((REAR, post_x - 0.06), (FRONT, post_x + 0.06)):
        sketch.plate((30.0, 84.0, 190.0), facing, x, 0.0, top - 0.4, 0.7, 0.8, _REFLECT)
        sketch.plate(_WHITE, facing, x * 1.01, 0.0, top - 0.35, 0.42, 0.3, _REFLECT)
    return (sketch.part((0.0, 0.0, max(look.length, 0.3), max(look.width, 0.6))),)


def cone(look: Look) -> tuple[Part, ...]:
    """Return a traffic cone with a white band."""
    h, base = look.height, max(look.width, 0.36)

    def ring(z: float) -> tuple[float, float, float, float]:
        size = base * 0.72 * (1.0 - z / h) + 0.06
        return (0.0, 0.0, size, size)

    sketch = Sketch()
    sketch.prism((34.0, 34.0, 36.0), (0.0, 0.0, base, base), 0.0, h * 0.07)
    cuts = ((0.07, 0.38, look.colour, 0.1), (0.38, 0.64, _WHITE, _REFLECT),
            (0.64, 1.0, look.colour, 0.1))
    for low, high, colour, glow in cuts:
        sketch.prism(colour, ring(low * h), low * h, high * h, ring(high * h), glow)
    return (sketch.part((0.0, 0.0, base, base)),)


def barrier(look: Look) -> tuple[Part, ...]:
    """Return a board with red and white stripes on two legs."""
    length, width, h = look.length, look.width, look.height
    sketch = Sketch()
    for end in (1.0, -1.0):
        x, y = (0.0, end * width * 0.4) if width >= length else (end * length * 0.4, 0.0)
        sketch.prism((60.0, 60.0, 62.0), (x, y, 0.12, 0.12), 0.0, h * 0.5)
    sketch.prism(_WHITE, (0.0, 0.0, length, width), h * 0.4, h, glow=0.1)
    for span, pair in ((width, ((REAR, -length / 2), (FRONT, length / 2))),
                       (length, ((RIGHT, -width / 2), (LEFT, width / 2)))):
        stripes = max(1, round(span / 0.6))
        for facing, off in pair:
            for i in range(stripes):
                along = (i + 0.5 - stripes / 2) * span / stripes
                x, y = (off * 1.01, along) if span == width and facing in (REAR, FRONT) \
                    else (along, off * 1.01)
                sketch.plate((214.0, 36.0, 30.0), facing, x, y, h * 0.7, span / stripes * 0.5,
                             h * 0.58, _REFLECT)
    return (sketch.part((0.0, 0.0, length, width)),)


def crossing_gate(look: Look) -> tuple[Part, ...]:
    """Return a mast with a white cross, two lamps and an arm that turns up when open."""
    span = max(look.width, look.length, 3.0)
    mast_y = -span / 2
    mast = Sketch()
    mast.prism(_STEEL, (0.0, mast_y, 0.16, 0.16), 0.0, 3.4)
    mast.plate(_WHITE, REAR, -0.1, mast_y, 3.1, 1.1, 0.2, _REFLECT)
    mast.plate(_WHITE, REAR, -0.1, mast_y, 3.1, 0.2, 1.1, _REFLECT)
    mast.plate(_HOUSING, REAR, -0.11, mast_y, 2.2, 1.2, 0.56)
    for side, name in ((1.0, 'a'), (-1.0, 'b')):
        lit = look.lamp == name
        mast.disc(_LENSES[0][1] if lit else (70.0, 20.0, 20.0), REAR, -0.12,
                  mast_y + side * 0.3, 2.2, 0.44, 1.0 if lit else 0.0)
    arm = Sketch()
    pieces = max(4, round(span / 0.7))
    turn = look.open * math.pi / 2
    c, s = math.cos(turn), math.sin(turn)
    for i in range(pieces):
        low, high = span * i / pieces, span * (i + 1) / pieces
        colour = (214.0, 36.0, 30.0) if i % 2 == 0 else _WHITE
        corners = [(mast_y + along * c - off * s, 1.0 + along * s + off * c)
                   for along, off in ((low, -0.09), (high, -0.09), (high, 0.09), (low, 0.09))]
        arm.quad(colour, [(-0.15, y, z) for y, z in reversed(corners)], _REFLECT)
        arm.quad(colour, [(-0.1, y, z) for y, z in corners], _REFLECT)
    return (arm.part((-0.2, 0.0, 0.1, span), shadow=False),
            mast.part((0.0, mast_y, 0.2, 0.6), shadow=False))


def tree(look: Look) -> tuple[Part, ...]:
    """Return a tree: trunk and a crown of three tapered tiers."""
    h, width = look.height, max(look.width, look.length)
    leaf = tuple(float(c) for c in look.colour)
    sketch = Sketch()
    sketch.prism((96.0, 74.0, 52.0), (0, 0, width * 0.14, width * 0.14), 0.0, h * 0.4)
    tiers = ((0.28, 0.5, 0.7, 1.0, 0.84), (0.5, 0.78, 1.0, 0.8, 0.95), (0.78, 1.0, 0.8, 0.3, 1.08))
    for low, high, wide, narrow, tone in tiers:
        sketch.prism([c * tone for c in leaf], (0, 0, width * wide, width * wide), h * low,
                     h * high, (0, 0, width * narrow, width * narrow))
    return (sketch.part((0.0, 0.0, width, width)),)


def building(look: Look) -> tuple[Part, ...]:
    """Return a house: window bands on each floor, a darker roof edge."""
    length, width, h = look.length, look.width, look.height
    wall = tuple(float(c) for c in look.colour)
    pane, glow = ((222.0, 190.0, 120.0), 0.5) if look.night else ((64.0, 76.0, 92.0), 0.0)
    sketch = Sketch()
    sketch.prism(wall, (0.0, 0.0, length, width), 0.0, h)
    floors = max(1, int((h - 1.0) / 3.0))
    for facing, x, y, span in ((REAR, -length / 2 - 0.02, 0.0, width),
                               (FRONT, length / 2 + 0.02, 0.0, width),
                               (LEFT, 0.0, width / 2 + 0.02, length),
                               (RIGHT, 0.0, -width / 2 - 0.02, length)):
        for floor in range(floors):
            z = (floor + 0.55) * h / floors
            sketch.plate(pane, facing, x, y, z, span * 0.88, h / floors * 0.4, glow)
        columns = max(1, min(4, int(span / 3.0)))
        for i in range(1, columns):  # piers cut the bands into windows
            along = span * (i / columns - 0.5)
            px, py = (x, along) if facing in (REAR, FRONT) else (along, y)
            sketch.plate(wall, facing, px * 1.001, py * 1.001, h * 0.5, span * 0.08, h * 0.9)
    sketch.prism([c * 0.6 for c in wall], (0.0, 0.0, length + 0.3, width + 0.3), h, h + 0.25)
    return (sketch.part((0.0, 0.0, length, width)),)


def pole(look: Look) -> tuple[Part, ...]:
    """Return a lamp post; its head shines at night."""
    h, width = look.height, max(0.12, min(look.width, 0.3))
    sketch = Sketch()
    sketch.prism(look.colour, (0.0, 0.0, width, width), 0.0, h)
    sketch.prism((255.0, 226.0, 160.0) if look.night else (190.0, 192.0, 194.0),
                 (0.0, 0.0, 0.7, 0.3), h, h + 0.14, glow=1.0 if look.night else 0.0)
    return (sketch.part((0.0, 0.0, 0.3, 0.3), shadow=False),)
