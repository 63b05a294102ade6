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
"""What surrounds a scenario and never decides it: houses, trees, traffic, distractors."""

from __future__ import annotations

import numpy as np

from rspec_planner.world.road import crosswalk
from rspec_planner.world.scenarios.base import Blueprint, CLOTHES, COLOURS, Draw, Stage, VEHICLES
from rspec_planner.world.scene import Colour
from rspec_planner.world.simulation import SIZES

DISTRACTOR_SHARE = 0.5  # of the clips of a family that allows any
_LEAVES: tuple[Colour, ...] = ((52, 116, 56), (74, 128, 50), (96, 122, 44))
_WALLS: tuple[Colour, ...] = ((188, 150, 120), (206, 200, 186), (150, 132, 124), (172, 120, 100))


def _background(stage: Stage, rng: np.random.Generator, start: float, end: float) -> None:
    """Put trees, houses and lamp posts along [start, end] metres ahead."""
    layout = stage.layout
    right = layout.right_edge - layout.shoulder - (4.0 if layout.path else 2.2)
    left = layout.left_edge + layout.shoulder + 2.2
    for side, edge in ((1.0, left), (-1.0, right)):
        ahead = start + rng.uniform(0.0, 6.0)
        while ahead < end:
            house = rng.random() < 0.3
            size = (rng.uniform(7, 13), rng.uniform(6, 10), rng.uniform(4, 11))
            colour = _WALLS[int(rng.integers(len(_WALLS)))]
            set_back, leaf = rng.uniform(0.8, 7.0), _LEAVES[int(rng.integers(len(_LEAVES)))]
            crown, height = rng.uniform(2.0, 3.4), rng.uniform(4.5, 8.0)
            pole, step = rng.random() < 0.2, rng.uniform(7.0, 15.0)
            reach = size[0] / 2.0 if house else crown / 2.0
            s = stage.s0 + ahead
            free = all(s + reach < a or s - reach > b for a, b in stage.clear)
            if free and house:
                stage.put('building', ahead, edge + side * (set_back + 2.0 + size[1] / 2.0), size,
                          colour)
            elif free and pole:
                stage.put('pole', ahead, edge + side * 0.3, (0.15, 0.15, 5.5), (96, 100, 104))
            elif free:
                stage.put('tree', ahead, edge + side * (set_back + crown / 2.0),
                          (crown, crown, height), leaf)
            ahead += step + (size[0] if house else 0.0)


def _traffic(stage: Stage, rng: np.random.Generator, blueprint: Blueprint) -> None:
    """Add oncoming vehicles and one behind; their numbers are drawn in any case."""
    count, pace = int(rng.integers(0, 4)), rng.uniform(5.0, 12.0)
    ahead = rng.uniform(8.0, 40.0) + 1.5 * pace
    for _ in range(count):
        kind = VEHICLES[int(rng.choice(3, p=(0.7, 0.2, 0.1)))]
        colour = list(COLOURS.values())[int(rng.integers(6))]
        step = rng.uniform(16.0, 40.0)
        if blueprint.oncoming and stage.layout.oncoming:
            d = stage.layout.divider + stage.layout.width / 2.0
            stage.add(kind, ahead, d, speed=pace, reverse=True, colour=colour)
        ahead += step
    gap, colour = rng.uniform(9.0, 16.0), list(COLOURS.values())[int(rng.integers(6))]
    if rng.random() < 0.4:
        stage.trailing = stage.add('car', -gap - 1.3 * blueprint.speed - 3.0, 0.0,
                                   speed=blueprint.speed, push=blueprint.acceleration,
                                   colour=colour)


def _distractor(stage: Stage, name: str, rng: np.random.Generator) -> None:
    """Add one harmless thing that in another family would matter."""
    layout = stage.layout
    ahead = float(rng.uniform(16.0, 45.0))
    colour = list(COLOURS.values())[int(rng.integers(6))]
    kind = VEHICLES[int(rng.integers(3))]
    clothes = CLOTHES[int(rng.integers(len(CLOTHES)))]
    person = ('adult', 'child')[int(rng.integers(2))]
    side = (1.0, -1.0)[int(rng.integers(2))]
    length, width, _ = SIZES[kind]
    if any(stage.s0 + ahead - 6.0 < b and stage.s0 + ahead + length + 6.0 > a
           for a, b in stage.clear):
        ahead = max(b for _, b in stage.clear) - stage.s0 + 7.0
    verge = layout.right_edge - layout.shoulder
    if name == 'parked':
        stage.add(kind, ahead, layout.right_edge - 0.5 - width / 2, rear=True, colour=colour)
    elif name == 'far_parked' and layout.oncoming:
        stage.add(kind, ahead, layout.left_edge + 0.4 + width / 2, reverse=True, colour=colour)
    elif name == 'cones':
        for i in range(5):
            stage.add('cone', ahead + 2.5 * i, layout.right_edge - 1.3, colour=(250, 96, 20))
    elif name == 'cyclist':
        rider = stage.add('cyclist', ahead, verge - 1.2, speed=4.0, colour=clothes)
        rider.gait = 1.2
    elif name == 'walker':
        edge = verge - 1.0 if side < 0 else layout.left_edge + layout.shoulder + 1.0
        walker = stage.add(person, ahead, edge, speed=1.2, reverse=side > 0, colour=clothes)
        walker.gait = 1.7
    elif name == 'bus' and layout.oncoming:
        stage.add('bus', ahead, layout.left_edge + 1.7, reverse=True, colour=colour)
    elif name == 'neighbour' and layout.left:  # drives in the next lane, and stays there
        pace = max(3.0, stage.speed + rng.uniform(-1.0, 1.5))
        stage.add(kind, rng.uniform(9.0, 34.0), layout.width, rear=True, speed=pace,
                  colour=colour)
    elif name == 'zebra':
        stage.marks += crosswalk(stage.road, stage.s0 + ahead, layout.right_edge,
                                 layout.left_edge)
        stage.gaps.append((stage.s0 + ahead - 0.4, stage.s0 + ahead + 3.4))


def surround(stage: Stage, draw: Draw, blueprint: Blueprint, start: float, end: float) -> None:
    """Furnish [start, end] metres ahead around what a scenario placed."""
    rng = draw.around()
    wanted = rng.random() < DISTRACTOR_SHARE
    names = list(blueprint.distractors)
    chosen = [names[i] for i in rng.permutation(len(names))[:int(rng.integers(1, 3))]]
    seeds = rng.integers(1 << 31, size=4)
    _traffic(stage, rng, blueprint)
    if wanted:
        for name, seed in zip(chosen, seeds):
            _distractor(stage, name, np.random.default_rng(int(seed)))
    _background(stage, np.random.default_rng(int(seeds[3])), start, end)
