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
"""Shapes of motor vehicles: bodies, wheels, windows, lamps that light."""

from __future__ import annotations

from rspec_planner.world.look import Look
from rspec_planner.world.shapes import FRONT, LEFT, Part, REAR, Rgb, RIGHT, Sketch

GLASS = (58.0, 68.0, 80.0)
TYRE = (24.0, 24.0, 26.0)
HUB = (120.0, 122.0, 125.0)
SKIRT = (30.0, 30.0, 32.0)
BRAKE_ON = (255.0, 46.0, 36.0)
BRAKE_RIM = (255.0, 120.0, 96.0)
TAIL_OFF = (112.0, 22.0, 24.0)
TAIL_NIGHT = (150.0, 18.0, 16.0)
AMBER = (255.0, 172.0, 20.0)
HEADLIGHT = (236.0, 238.0, 236.0)
_PROUD = 0.012  # metres that a plate stands off the body


def shade(colour: Rgb, factor: float) -> Rgb:
    """Return `colour` times `factor`, within 0..255."""
    return tuple(min(255.0, channel * factor) for channel in colour)


def _wheels(sketch: Sketch, look: Look, half_width: float, front_x: float, rear_x: float,
            diameter: float) -> None:
    """Add the wheels of both sides; the front ones turn with the steering."""
    for side, facing in ((1.0, LEFT), (-1.0, RIGHT)):
        y = side * (half_width + _PROUD)
        for x, turn in ((rear_x, 0.0), (front_x, look.steer)):
            sketch.disc(TYRE, facing + turn, x, y, diameter / 2, diameter)
            sketch.plate(HUB, facing + turn, x, y + side * 0.01, diameter / 2,
                         diameter * 0.4, diameter * 0.4)


def _rear_lamps(sketch: Sketch, look: Look, x: float, half_width: float, z: float,
                width: float, height: float, third_z: float) -> None:
    """Add tail, brake, third and indicator lamps on the rear face at `x`."""
    x -= _PROUD
    inset = half_width - width / 2 - 0.03
    for side in (1.0, -1.0):
        if look.brake:
            sketch.plate(BRAKE_RIM, REAR, x, side * inset, z, width + 0.08, height + 0.08, 1.0)
            sketch.plate(BRAKE_ON, REAR, x, side * inset, z, width, height, 1.0)
        else:
            sketch.plate(TAIL_NIGHT if look.night else TAIL_OFF, REAR, x, side * inset, z,
                         width, height, 1.0 if look.night else 0.0)
        if look.left if side > 0 else look.right:
            sketch.plate(AMBER, REAR, x, side * (half_width - 0.16), z - height / 2 - 0.13,
                         0.34, 0.22, 1.0)
    if look.brake:
        sketch.plate(BRAKE_ON, REAR, x, 0.0, third_z, 0.8, 0.13, 1.0)


def _front_lamps(sketch: Sketch, look: Look, x: float, half_width: float, z: float) -> None:
    """Add headlights and front indicators on the front face at `x`."""
    x += _PROUD
    for side in (1.0, -1.0):
        y = side * (half_width - 0.24)
        if look.night:
            sketch.plate((255.0, 250.0, 225.0), FRONT, x, y, z, 0.46, 0.34, 1.0)
        else:
            sketch.plate(HEADLIGHT, FRONT, x, y, z, 0.36, 0.18)
        if look.left if side > 0 else look.right:
            sketch.plate(AMBER, FRONT, x, side * (half_width - 0.14), z + 0.24, 0.28, 0.2, 1.0)


def _side_indicators(sketch: Sketch, look: Look, x: float, half_width: float, z: float) -> None:
    """Add the repeaters on both flanks."""
    if look.left:
        sketch.plate(AMBER, LEFT, x, half_width + _PROUD, z, 0.32, 0.22, 1.0)
    if look.right:
        sketch.plate(AMBER, RIGHT, x, -half_width - _PROUD, z, 0.32, 0.22, 1.0)


def car(look: Look) -> tuple[Part, ...]:
    """Return a saloon: low body, tapered dark cabin, coloured roof."""
    length, width, height = look.length, look.width, look.height
    half_l, half_w, belt = length / 2, width / 2, height * 0.6
    sketch = Sketch()
    sketch.prism(SKIRT, (0, 0, length * 0.96, width * 0.94), 0.05, 0.32)
    sketch.prism(look.colour, (0, 0, length, width), 0.26, belt,
                 (0, 0, length * 0.97, width * 0.96))
    _wheels(sketch, look, half_w, length * 0.31, -length * 0.3, 0.66)
    sketch.plate((205.0, 205.0, 200.0), REAR, -half_l - _PROUD, 0, 0.5, 0.5, 0.12)
    _rear_lamps(sketch, look, -half_l, half_w, belt - 0.16, 0.46, 0.2, belt + 0.1)
    _front_lamps(sketch, look, half_l, half_w, belt - 0.2)
    sketch.plate(SKIRT, FRONT, half_l + _PROUD, 0, 0.42, width * 0.5, 0.14)
    _side_indicators(sketch, look, length * 0.34, half_w, belt - 0.12)
    cabin = (-length * 0.09, 0.0, length * 0.62, width * 0.9)
    roof = (-length * 0.11, 0.0, length * 0.4, width * 0.74)
    sketch.prism(GLASS, cabin, belt, height - 0.07, roof)
    sketch.prism(look.colour, roof, height - 0.07, height)
    if look.brake:
        sketch.plate(BRAKE_ON, REAR, -length * 0.37, 0, belt + 0.12, 0.8, 0.12, 1.0)
    return (sketch.part((0, 0, length, width)),)


def _van_shell(sketch: Sketch, look: Look) -> None:
    length, width, height = look.length, look.width, look.height
    half_l, half_w = length / 2, width / 2
    nose = length * 0.18
    sketch.prism(SKIRT, (0, 0, length * 0.97, width * 0.95), 0.06, 0.36)
    sketch.prism(look.colour, (half_l - nose / 2, 0, nose, width), 0.3, height * 0.52)
    sketch.prism(look.colour, (-nose / 2, 0, length - nose, width), 0.3, height,
                 (-nose * 0.8, 0, length - nose * 1.6, width * 0.94))
    for facing, side in ((LEFT, 1.0), (RIGHT, -1.0)):
        sketch.plate(GLASS, facing, half_l - nose * 1.9, side * (half_w - 0.03), height * 0.7,
                     length * 0.16, height * 0.26)
    sketch.plate(GLASS, FRONT, half_l - nose * 1.05, 0, height * 0.7, width * 0.82,
                 height * 0.28)
    sketch.plate(GLASS, REAR, -half_l - _PROUD, 0, height * 0.72, width * 0.72, height * 0.26)
    _wheels(sketch, look, half_w, length * 0.33, -length * 0.3, 0.7)


def van(look: Look) -> tuple[Part, ...]:
    """Return a panel van: tall closed body, short nose, rear window."""
    half_l, half_w = look.length / 2, look.width / 2
    sketch = Sketch()
    _van_shell(sketch, look)
    _rear_lamps(sketch, look, -half_l, half_w, look.height * 0.45, 0.3, 0.42,
                look.height - 0.1)
    _front_lamps(sketch, look, half_l, half_w, 0.75)
    _side_indicators(sketch, look, look.length * 0.3, half_w, 1.0)
    return (sketch.part((0, 0, look.length, look.width)),)


def emergency(look: Look) -> tuple[Part, ...]:
    """Return a van with a chequered band and a roof bar whose two halves flash in turn."""
    half_l, half_w, height = look.length / 2, look.width / 2, look.height
    sketch = Sketch()
    _van_shell(sketch, look)
    for facing, x, y, span in ((LEFT, 0.0, half_w, look.length),
                               (RIGHT, 0.0, -half_w, look.length),
                               (REAR, -half_l, 0.0, look.width)):
        sketch.plate((214.0, 40.0, 40.0), facing, x + (-_PROUD if facing == REAR else 0.0),
                     y * 1.01, height * 0.5, span * 0.96, 0.3)
    _rear_lamps(sketch, look, -half_l, half_w, height * 0.3, 0.3, 0.34, height - 0.1)
    _front_lamps(sketch, look, half_l, half_w, 0.75)
    _side_indicators(sketch, look, look.length * 0.3, half_w, 1.0)
    lit = {'a': 1.0, 'b': -1.0}.get(look.lamp, 0.0)
    for side in (1.0, -1.0):
        bright = side == lit
        colour = (90.0, 130.0, 255.0) if bright else (24.0, 40.0, 120.0)
        for x in (-look.length * 0.36, look.length * 0.12):
            sketch.prism(colour, (x, side * half_w * 0.55, 0.4, half_w * 0.8), height,
                         height + (0.38 if bright else 0.26), glow=1.0 if bright else 0.0)
    return (sketch.part((0, 0, look.length, look.width)),)


def truck(look: Look) -> tuple[Part, ...]:
    """Return a lorry as two parts, cargo box and cab."""
    length, width, height = look.length, look.width, look.height
    half_l, half_w, cab = length / 2, width / 2, min(2.2, length * 0.28)
    box = length - cab - 0.15
    box_x = -half_l + box / 2
    cargo = Sketch()
    cargo.prism(SKIRT, (box_x, 0, box, width * 0.88), 0.35, 0.95)
    cargo.prism(look.colour, (box_x, 0, box, width), 0.9, height)
    for facing, side in ((LEFT, 1.0), (RIGHT, -1.0)):
        for x in (-half_l + 0.9, -half_l + 2.0):
            cargo.disc(TYRE, facing, x, side * (half_w + _PROUD), 0.48, 0.96)
    for z in (0.35, 0.65):
        cargo.plate(shade(look.colour, 0.6), REAR, -half_l - _PROUD, 0,
                    0.9 + (height - 0.9) * z, width * 0.9, 0.08)
    cargo.plate(shade(look.colour, 0.55), REAR, -half_l - _PROUD, 0, (0.9 + height) / 2, 0.07,
                (height - 0.9) * 0.92)
    cargo.plate(SKIRT, REAR, -half_l - _PROUD, 0, 0.72, width * 0.96, 0.4)
    _rear_lamps(cargo, look, -half_l - 0.01, half_w, 0.74, 0.52, 0.3, height - 0.14)
    _side_indicators(cargo, look, box_x, half_w, 0.8)
    front = Sketch()
    cab_x, cab_h = half_l - cab / 2, min(height, 2.9)
    front.prism(SKIRT, (cab_x, 0, cab, width * 0.94), 0.25, 0.8)
    front.prism(shade(look.colour, 0.88), (cab_x, 0, cab, width * 0.96), 0.7, cab_h)
    front.plate(GLASS, FRONT, half_l + _PROUD, 0, cab_h * 0.72, width * 0.82, cab_h * 0.26)
    for facing, side in ((LEFT, 1.0), (RIGHT, -1.0)):
        front.plate(GLASS, facing, cab_x + cab * 0.1, side * half_w * 0.97, cab_h * 0.72,
                    cab * 0.5, cab_h * 0.24)
        front.disc(TYRE, facing + look.steer, cab_x, side * (half_w + _PROUD), 0.48, 0.96)
    _front_lamps(front, look, half_l, half_w * 0.96, 0.85)
    _side_indicators(front, look, half_l - 0.3, half_w, 1.2)
    return (cargo.part((box_x, 0, box, width)), front.part((cab_x, 0, cab, width)))


def bus(look: Look) -> tuple[Part, ...]:
    """Return a city bus in two halves, so that long flanks sort well."""
    length, width, height = look.length, look.width, look.height
    half_l, half_w, quarter = length / 2, width / 2, length / 4
    halves = []
    for x in (-quarter, quarter):
        sketch = Sketch()
        sketch.prism(SKIRT, (x, 0, half_l, width * 0.96), 0.12, 0.4)
        sketch.prism(look.colour, (x, 0, half_l, width), 0.35, height)
        for facing, side in ((LEFT, 1.0), (RIGHT, -1.0)):
            y = side * (half_w + _PROUD)
            sketch.plate(GLASS, facing, x, y, height * 0.66, half_l * 0.94, height * 0.3)
            sketch.plate((225.0, 225.0, 222.0), facing, x, y, height * 0.4, half_l, 0.16)
            if side < 0:
                sketch.plate((44.0, 50.0, 58.0), facing, x + half_l * 0.28, y, height * 0.48,
                             1.1, height * 0.72)
            wheel_x, turn = (-half_l * 0.55, 0.0) if x < 0 else (half_l * 0.55, look.steer)
            _bus_wheel(sketch, facing + turn, wheel_x, y + side * abs(turn) * 0.2, side)
        if x < 0:
            sketch.plate(GLASS, REAR, -half_l - _PROUD, 0, height * 0.72, width * 0.8,
                         height * 0.24)
            sketch.plate(shade(look.colour, 0.6), REAR, -half_l - _PROUD, 0, height * 0.24,
                         width * 0.5, height * 0.18)
            _rear_lamps(sketch, look, -half_l, half_w, height * 0.36, 0.36, 0.56, height - 0.2)
        else:
            sketch.plate(GLASS, FRONT, half_l + _PROUD, 0, height * 0.58, width * 0.9,
                         height * 0.44)
            sketch.plate((255.0, 186.0, 60.0), FRONT, half_l + 2 * _PROUD, 0, height * 0.9,
                         width * 0.6, height * 0.09, 1.0)
            _front_lamps(sketch, look, half_l, half_w, 0.75)
        _side_indicators(sketch, look, x * 1.7, half_w, height * 0.36)
        halves.append(sketch.part((x, 0, half_l, width)))
    return tuple(halves)


def _bus_wheel(sketch: Sketch, facing: float, x: float, y: float, side: float) -> None:
    """Add one wheel; a steered one stands out of the flank far enough to be seen."""
    sketch.disc(TYRE, facing, x, y, 0.5, 1.0)
    sketch.plate(HUB, facing, x, y + side * 0.01, 0.5, 0.42, 0.42)
