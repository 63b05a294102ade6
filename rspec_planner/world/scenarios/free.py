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
The free road: nothing decides but the road itself.

Twin A has somebody ahead of us. Whatever both twins show around the lane is harmless, was just
left behind, or is still too far away to be read.
"""

from __future__ import annotations

from collections.abc import Callable
import math

import numpy as np

from rspec_planner.world.expert import Maneuver
from rspec_planner.world.reasoning import decide
from rspec_planner.world.road import crosswalk, Layout, stop_line
from rspec_planner.world.scenarios.base import (
    AHEAD,
    BEHIND,
    Blueprint,
    CLOTHES,
    COLOURS,
    Draw,
    Stage,
    VEHICLES,
)
from rspec_planner.world.scenarios.roadside import CONE
from rspec_planner.world.scenarios.traffic import lead
from rspec_planner.world.simulation import SIZES

FREE_SPEED = 9.0  # m/s, what the expert speeds up to on a free road
FAR = 70.0  # metres; no trained distance word reaches so far
_FARTHEST = 112.0
_LAMPS = ('green', 'amber', 'red')


def _colour(rng: np.random.Generator) -> tuple[int, int, int]:
    return list(COLOURS.values())[int(rng.integers(len(COLOURS)))]


def _zebra(stage: Stage, ahead: float) -> None:
    """Paint a crosswalk that begins `ahead` metres away."""
    stage.marks += crosswalk(stage.road, stage.s0 + ahead, stage.layout.right_edge,
                             stage.layout.left_edge)
    stage.gaps.append((stage.s0 + ahead - 0.4, stage.s0 + ahead + 3.4))


def _parked(stage: Stage, ahead: float, overlap: float, rng: np.random.Generator) -> None:
    """Park a vehicle on the right that reaches `overlap` metres into the lane."""
    kind = VEHICLES[int(rng.integers(len(VEHICLES)))]
    stage.add(kind, ahead, stage.layout.right_edge + overlap - SIZES[kind][1] / 2, rear=True,
              colour=_colour(rng))


def _junction(stage: Stage, ahead: float, sign: bool, rng: np.random.Generator) -> None:
    """Lay a junction whose sign or light stands `ahead` metres away; no stop line is kept."""
    edge, line = stage.layout.right_edge, ahead - (0.8 if sign else 2.5)
    stage.marks.append(stop_line(stage.road, stage.s0 + line, edge, stage.layout.divider))
    stage.cross_road(line + (3.5 if sign else 4.5))
    if sign:
        stage.add('stop_sign', ahead, edge - 0.95)
    else:
        lamp = 'green' if ahead < FAR else _LAMPS[int(rng.integers(3))]
        stage.add('traffic_light', ahead, edge - 0.85, lamp=lamp,
                  size=(0.4, 0.4, rng.uniform(3.6, 3.9)))


def _left_behind(stage: Stage, rng: np.random.Generator) -> None:
    """Add what the ego is just passing or has passed."""
    name = ('', '', 'light', 'sign', 'cones', 'parked', 'zebra', 'stop')[int(rng.integers(8))]
    ahead = float(rng.uniform(-9.0, 1.5))
    if name in ('light', 'sign'):
        _junction(stage, ahead, name == 'sign', rng)
    elif name == 'cones':
        for i in range(6):
            stage.add('cone', ahead - 2.5 * i, stage.layout.right_edge - 0.5, colour=CONE)
    elif name == 'parked':
        _parked(stage, ahead - 1.0, -0.35, rng)
    elif name == 'zebra':
        _zebra(stage, ahead)
    elif name == 'stop':
        stage.put('bus_stop', ahead, stage.layout.right_edge - stage.layout.shoulder - 2.0)


def _on_the_way(stage: Stage, rng: np.random.Generator) -> None:
    """Add a crosswalk without anybody, or a side road without line, light or sign."""
    name, ahead = ('', 'zebra', 'side', 'both')[int(rng.integers(4))], rng.uniform(13.0, 45.0)
    if name in ('zebra', 'both'):
        _zebra(stage, ahead)
    if name in ('side', 'both'):
        sides = ('both', 'right', 'left')[int(rng.integers(3))]
        stage.cross_road(ahead + 7.0, rng.uniform(5.0, 8.0), sides=sides)


def _far_away(stage: Stage, least: float, rng: np.random.Generator) -> None:
    """Add one thing that decides nothing yet, `least` metres away or more."""
    names = ('', '', 'light', 'light', 'sign', 'cones', 'parked', 'person', 'cyclist', 'bus',
             'leaving', 'leaving')
    name = names[int(rng.integers(len(names)))]
    ahead = float(rng.uniform(least, min(least + 25.0, _FARTHEST)))
    edge = stage.layout.right_edge
    if name in ('light', 'sign'):
        _junction(stage, ahead, name == 'sign', rng)
    elif name == 'cones':
        for i in range(6):
            stage.add('cone', ahead + 2.5 * i, edge + 0.2 * min(i, 4), colour=CONE)
    elif name == 'parked':
        _parked(stage, ahead, rng.uniform(-0.5, 1.2), rng)
    elif name == 'person':
        _zebra(stage, ahead)
        stage.add(('adult', 'child', 'dog')[int(rng.integers(3))], ahead + 1.5, edge - 0.55,
                  colour=CLOTHES[int(rng.integers(len(CLOTHES)))], turned=math.pi / 2)
    elif name == 'cyclist':
        rider = stage.add('cyclist', ahead, edge + rng.uniform(-1.0, 0.9), speed=3.6,
                          colour=CLOTHES[int(rng.integers(len(CLOTHES)))])
        rider.gait = 1.2
    elif name == 'bus':
        stage.add('bus', ahead, edge - 1.55, rear=True, colour=_colour(rng))
    elif name == 'leaving':  # who was ahead of us drives out of sight
        stage.add(VEHICLES[int(rng.integers(len(VEHICLES)))], max(ahead, 88.0), 0.0, rear=True,
                  speed=stage.speed + rng.uniform(3.0, 7.0), colour=_colour(rng))


def _layout(draw: Draw) -> Layout:
    return Layout(width=draw.uniform(3.3, 3.7), left=draw.choice((0, 0, 1)),
                  oncoming=draw.choice((0, 1, 1)), shoulder=draw.choice((1.6, 2.6, 3.2)))


def free_road(draw: Draw) -> Blueprint:
    """Twin A: somebody drives ahead of us at our pace; twin B: nobody does."""
    word, gap = draw.distance((10.0, 15.0), (20.5, 28.0), (37.0, 48.0))
    speeds = {'close': (1.0, gap - 3.6), 'midway': (3.3, 11.0), 'far': (5.0, 13.0)}[word]
    speed, push = draw.motion(*speeds, creeping=True)
    before, layout = draw.bend(speed, push, 10.0), _layout(draw)
    free = max(speed, FREE_SPEED) if push > 0.5 or speed < 2.5 else speed
    around, seed = draw.flag(0.75), int(draw.rng.integers(1 << 31))
    least = max(FAR, 6.4 * free + 16.0)

    def pieces(event: bool) -> list[tuple[float, float]]:
        return [(BEHIND + 3.0, before), (AHEAD - 3.0, 0.0)]

    def populate(stage: Stage, event: bool) -> None:
        if around:
            _left_behind(stage, np.random.default_rng([seed, 0]))
            _on_the_way(stage, np.random.default_rng([seed, 1]))
        if event:
            lead(stage, draw, gap, push, False, 0.0, 0.0, late=True)
            stage.act(decide('follow', 'lead_driving', colour=draw.colour, vehicle=draw.vehicle,
                             distance=word), Maneuver(speed))
        else:
            stage.act(decide('keep_straight', 'road_straight'), Maneuver(free))

    horizon: Callable[[Stage], None] | None = None
    if least < _FARTHEST:
        def horizon(stage: Stage) -> None:
            known = len(stage.actors)
            _far_away(stage, least, np.random.default_rng([seed, 2]))
            assert stage.maneuver is not None
            stage.maneuver.ignore = tuple(stage.actors[known:])

    return Blueprint(draw, layout, speed, push, populate, pieces=pieces, horizon=horizon,
                     distractors=('walker', 'far_parked', 'bus'))
