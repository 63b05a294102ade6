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
"""Shapes of people, animals and cyclists; limbs swing with the gait."""

from __future__ import annotations

from rspec_planner.world.look import Look
from rspec_planner.world.shapes import LEFT, Part, RIGHT, Sketch

SKIN = (222.0, 178.0, 148.0)
TROUSERS = (38.0, 42.0, 62.0)
HAIR = (52.0, 38.0, 28.0)
_TYRE = (22.0, 22.0, 24.0)


def _person(look: Look, satchel: bool) -> tuple[Part, ...]:
    """Return a walking figure; its stride and lean grow when it runs."""
    h = look.height
    hip, neck = h * 0.48, h * 0.82
    stride = look.swing * h * (0.3 if look.running else 0.21)
    lean = h * 0.08 if look.running else 0.0
    girth = h * 0.15
    sketch = Sketch()
    for side in (1.0, -1.0):
        y, foot = side * h * 0.065, side * stride
        sketch.prism(TROUSERS, (foot, y, girth * 0.75, girth * 0.62), 0.0, hip,
                     (0.0, y, girth * 0.8, girth * 0.7))
        sketch.prism((225.0, 225.0, 225.0), (foot + girth * 0.2, y, girth, girth * 0.6),
                     0.0, h * 0.05)
        arm = -foot * 0.9
        sketch.prism(SKIN, (arm, side * h * 0.17, h * 0.07, h * 0.06), hip * 0.95, neck * 0.97,
                     (lean, side * h * 0.13, h * 0.08, h * 0.07))
    sketch.prism(look.colour, (0.0, 0.0, girth, h * 0.24), hip * 0.94, neck,
                 (lean, 0.0, girth * 1.05, h * 0.28))
    if satchel:
        sketch.prism((250.0, 214.0, 40.0), (-girth * 0.8, 0.0, girth * 0.7, h * 0.22),
                     h * 0.52, h * 0.78)
    head = (lean * 1.3, 0.0, h * 0.125, h * 0.12)
    sketch.prism(SKIN, head, h * 0.84, h * 0.97)
    sketch.prism(HAIR, (head[0] - 0.01, 0.0, h * 0.14, h * 0.135), h * 0.94, h)
    return (sketch.part((0, 0, max(look.length, 0.4), max(look.width, 0.4))),)


def adult(look: Look) -> tuple[Part, ...]:
    """Return an adult."""
    return _person(look, satchel=False)


def child(look: Look) -> tuple[Part, ...]:
    """Return a child with a bright satchel."""
    return _person(look, satchel=True)


def _four_legs(sketch: Sketch, look: Look, coat: tuple[float, ...], back: float) -> None:
    """Add legs that swing in diagonal pairs, up to the height `back`."""
    for end in (1.0, -1.0):
        for side in (1.0, -1.0):
            x, y = end * look.length * 0.36, side * look.width * 0.3
            foot = end * side * look.swing * look.length * 0.16
            thick = look.width * 0.26
            sketch.prism(coat, (x + foot, y, thick, thick), 0.0, back,
                         (x, y, thick * 1.4, thick))


def _coat(look: Look, fur: tuple[float, float, float]) -> tuple[float, ...]:
    """Return a natural fur colour with a tint of the agent's own colour."""
    return tuple(0.75 * base + 0.25 * own for base, own in zip(fur, look.colour))


def dog(look: Look) -> tuple[Part, ...]:
    """Return a dog: long low body, head, raised tail."""
    length, width, h = look.length, look.width, look.height
    coat = _coat(look, (152.0, 106.0, 62.0))
    sketch = Sketch()
    _four_legs(sketch, look, coat, h * 0.5)
    sketch.prism(coat, (-length * 0.48, 0, 0.06, 0.06), h * 0.7, h * 1.05,
                 (-length * 0.6, 0, 0.05, 0.05))
    sketch.prism(coat, (0, 0, length * 0.86, width * 0.8), h * 0.42, h * 0.82)
    sketch.prism((230.0, 225.0, 215.0), (length * 0.3, 0, length * 0.2, width * 0.82),
                 h * 0.4, h * 0.62)
    sketch.prism(coat, (length * 0.5, 0, length * 0.3, width * 0.6), h * 0.7, h * 1.1)
    sketch.prism(HAIR, (length * 0.66, 0, length * 0.1, width * 0.4), h * 0.72, h * 0.88)
    return (sketch.part((0, 0, length, max(width, 0.3))),)


def deer(look: Look) -> tuple[Part, ...]:
    """Return a deer: long legs, pale tail, upright neck with antlers."""
    length, width, h = look.length, look.width, look.height
    coat = _coat(look, (140.0, 98.0, 58.0))
    sketch = Sketch()
    _four_legs(sketch, look, coat, h * 0.48)
    sketch.prism(coat, (-length * 0.06, 0, length * 0.74, width * 0.85), h * 0.42, h * 0.7)
    sketch.prism((240.0, 236.0, 226.0), (-length * 0.45, 0, 0.08, width * 0.5), h * 0.46, h * 0.66)
    sketch.prism(coat, (length * 0.3, 0, length * 0.14, width * 0.4), h * 0.6, h * 0.9,
                 (length * 0.38, 0, length * 0.12, width * 0.36))
    sketch.prism(coat, (length * 0.44, 0, length * 0.24, width * 0.36), h * 0.82, h * 0.96)
    for side in (1.0, -1.0):
        sketch.prism((206.0, 192.0, 160.0), (length * 0.37, side * 0.1, 0.06, 0.05), h * 0.95,
                     h * 1.2, (length * 0.3, side * 0.3, 0.05, 0.05))
    return (sketch.part((0, 0, length, max(width, 0.3))),)


def cyclist(look: Look) -> tuple[Part, ...]:
    """Return a bicycle and its rider; the legs pedal with the gait."""
    half, h = look.length / 2, look.height
    wheel = 0.68
    sketch = Sketch()
    for x in (-half + wheel / 2, half - wheel / 2):
        for facing in (LEFT, RIGHT):
            sketch.disc(_TYRE, facing, x, 0.0, wheel / 2, wheel)
            sketch.disc((150.0, 152.0, 155.0), facing, x, 0.0, wheel / 2, wheel * 0.72)
        sketch.prism(_TYRE, (x, 0.0, wheel * 0.5, 0.06), 0.0, wheel)
    sketch.prism((200.0, 40.0, 44.0), (0.0, 0.0, look.length * 0.5, 0.06), 0.5, 0.62)
    sketch.prism(_TYRE, (half - 0.42, 0.0, 0.06, 0.55), 0.95, 1.02)
    for side in (1.0, -1.0):
        pedal = side * look.swing * 0.17
        sketch.prism(TROUSERS, (pedal, side * 0.11, 0.14, 0.12), 0.3 + 0.12 * (1 + pedal * 3),
                     0.95, (-0.18, side * 0.09, 0.18, 0.15))
    if look.night:
        sketch.plate((255.0, 40.0, 30.0), 3.14159265, -half, 0.0, 0.6, 0.14, 0.14, 1.0)
    sketch.prism(look.colour, (-0.2, 0.0, 0.26, 0.36), 0.9, h * 0.84,
                 (0.06, 0.0, 0.28, 0.44))
    for side in (1.0, -1.0):
        sketch.prism(look.colour, (half - 0.42, side * 0.24, 0.1, 0.08), 0.98, h * 0.8,
                     (0.08, side * 0.22, 0.12, 0.1))
    sketch.prism(SKIN, (0.12, 0.0, 0.2, 0.19), h * 0.84, h * 0.95)
    sketch.prism((245.0, 245.0, 245.0), (0.1, 0.0, 0.28, 0.24), h * 0.93, h)
    return (sketch.part((0, 0, look.length, max(look.width, 0.5))),)
