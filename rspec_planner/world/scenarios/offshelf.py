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
"""Situations that are never trained: five families, and two with two causes at once."""

from __future__ import annotations

import math

import numpy as np

from rspec_planner.world.expert import Maneuver, Shift
from rspec_planner.world.reasoning import decide
from rspec_planner.world.road import crosswalk, Layout, Path, stop_line
from rspec_planner.world.scenarios.base import (
    BEHIND,
    Blueprint,
    CLOTHES,
    COLOURS,
    Draw,
    PERSONS,
    Stage,
    stop_speeds,
)
from rspec_planner.world.scenarios.junctions import REST
from rspec_planner.world.scenarios.roadside import CONE, nudge, walk_out
from rspec_planner.world.scenarios.traffic import merge
from rspec_planner.world.scene import Paint
from rspec_planner.world.simulation import Actor, EGO_FRONT, EGO_WIDTH

_ENTRY_RADIUS, _RING_RADIUS, _RING_EDGE, _ISLAND = 12.0, 9.0, 13.0, 5.0
_RING_ANGLE = math.acos(1.0 - (_RING_RADIUS - 1.75) / (_ENTRY_RADIUS + _RING_RADIUS))


def emergency(draw: Draw) -> Blueprint:
    """Twin A: the oncoming emergency vehicle starts to flash; twin B: it drives as others do."""
    speed, push = draw.motion(5.0, 9.0)
    distance, pace, when = draw.uniform(26.0, 42.0), draw.uniform(6.0, 10.0), draw.event_time()
    room = draw.uniform(max(11.0, speed ** 2 / 5.6), 24.0)
    layout = Layout(width=3.5, oncoming=1, shoulder=3.0)

    def populate(stage: Stage, event: bool) -> None:
        def script(vehicle: Actor, tau: float) -> None:
            vehicle.lamp = 'flash' if event and tau >= when else ''
        stage.add('emergency', distance, layout.width, speed=pace, reverse=True,
                  colour=(240, 240, 240), script=script)
        if event:
            shift = Shift(stage.s0 + 0.1 * speed, 0.8 * room, -1.9)
            stage.act(decide('pull_over', 'emergency_flashing'),
                      stage.stop_before(EGO_FRONT + room, shifts=(shift,)))
        else:
            stage.act(decide('keep_speed', 'emergency_off'), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, oncoming=False)


def level_crossing(draw: Draw) -> Blueprint:
    """Twin A: the barrier is down and lamps flash; twin B: it is up."""
    line = draw.uniform(13.0, 26.0)
    low, high = stop_speeds(line - REST - EGO_FRONT)
    speed, push = draw.motion(low, high)
    layout = Layout(width=3.5, oncoming=1)

    def populate(stage: Stage, event: bool) -> None:
        stage.stop_line(line)
        for rail in (5.0, 6.5):
            stage.marks.append(Paint(stage.road.strip(stage.s0 + line + rail,
                                                      stage.s0 + line + rail + 0.16, -30.0, 30.0),
                                     (120, 112, 108), 'marking'))
        stage.gaps.append((stage.s0 + line + 4.0, stage.s0 + line + 8.0))
        stage.clear.append((stage.s0 + line + 1.0, stage.s0 + line + 11.0))
        gate = stage.add('crossing_gate', line + 2.2, 0.0)
        gate.open, gate.lamp = (0.0, 'flash') if event else (1.0, '')
        if event:
            stage.act(decide('stop', 'barrier_closed'), stage.stop_before(line - REST),
                      must_hold=True)
        else:
            stage.act(decide('continue', 'barrier_open'), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, distractors=('walker',))


def animal(draw: Draw) -> Blueprint:
    """Twin A: a deer stands in our lane; twin B: beside the road."""
    ahead = draw.uniform(15.0, 27.0)
    low, high = stop_speeds(ahead - 3.0 - EGO_FRONT)
    speed, push = draw.motion(low, high)
    curvature = draw.bend(speed, push, ahead)
    layout = Layout(width=3.5, oncoming=1, shoulder=0.5)
    place, beside, turned = draw.uniform(-0.6, 0.6), draw.uniform(1.0, 2.0), draw.uniform(-2.0, 2)

    def populate(stage: Stage, event: bool) -> None:
        deer = stage.add('deer', ahead, place if event else layout.right_edge - beside,
                         colour=(150, 104, 64), turned=turned)
        deer.gait = 0.0
        if event:
            stage.act(decide('brake', 'animal_on_road'), stage.stop_before(ahead - 3.0))
        else:
            stage.act(decide('keep_speed', 'animal_beside'), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, curvature)


def narrowing(draw: Draw) -> Blueprint:
    """Twin A: somebody comes through the narrow part; twin B: it is free."""
    gap = draw.uniform(16.0, 26.0)
    low, high = stop_speeds(gap - 6.5 - EGO_FRONT)
    speed, push = draw.motion(low, min(high, (gap - 4.0) / 2.4))
    distance, pace = gap + draw.uniform(8.0, 16.0), draw.uniform(4.0, 6.0)
    layout = Layout(width=3.5, oncoming=1)
    target = EGO_WIDTH / 2 + 0.75

    def populate(stage: Stage, event: bool) -> None:
        for i in range(3):
            stage.add('barrier', gap + 4.0 * i, -1.3, size=(0.3, 2.2, 1.0))
        for i in range(5):
            stage.add('cone', gap + 2.0 * i + 1.0, 0.05, colour=CONE)
        if event:
            stage.add(draw.vehicle, distance, layout.width - 0.4, late=True, speed=pace,
                      reverse=True, colour=COLOURS[draw.colour])
            stage.act(decide('wait', 'narrow_oncoming', colour=draw.colour, vehicle=draw.vehicle),
                      stage.stop_before(gap - 6.5, after=(
                          Shift(stage.s0 + gap - 9.5, 9.0, target),
                          Shift(stage.s0 + gap + 12.0, 12.0, 0.0))))
        else:
            stage.act(decide('nudge_left', 'narrow_free'),
                      nudge(stage, gap - 0.5, gap + 12.0, target))

    return Blueprint(draw, layout, speed, push, populate, oncoming=False)


def _around(near: float) -> list[tuple[float, float]]:
    """Return the ego's way around the island and on."""
    out = (_ENTRY_RADIUS * _RING_ANGLE, -1.0 / _ENTRY_RADIUS)
    return [(BEHIND + near, 0.0), out, (2 * _RING_RADIUS * _RING_ANGLE, 1.0 / _RING_RADIUS),
            out, (60.0, 0.0)]


def roundabout(draw: Draw) -> Blueprint:
    """Twin A: a vehicle circles from the left; twin B: the way is free."""
    near = draw.uniform(8.0, 15.0)  # where the ego's way leaves the straight
    limit = math.sqrt(2.0 * _RING_RADIUS + 3.2 * near) * 0.96
    low, high = stop_speeds(near + 1.0 - REST - EGO_FRONT)
    speed, push = draw.motion(low, min(high, limit))
    layout = Layout(width=3.5, oncoming=1, shoulder=2.6)
    half = (_ENTRY_RADIUS + _RING_RADIUS) * math.sin(_RING_ANGLE)
    angle, pace = math.radians(draw.uniform(95.0, 130.0)), draw.uniform(4.0, 5.5)

    def populate(stage: Stage, event: bool) -> None:
        x, y, heading = stage.road.pose(stage.s0 + near + half, layout.width / 2)
        turns = np.linspace(0.0, 2 * math.pi, 48, endpoint=False)
        circle = np.stack([np.cos(turns), np.sin(turns)], axis=-1)
        ring = np.array([x, y]) + _RING_EDGE * circle
        stage.drivable.append(ring)
        stage.marks += [Paint(ring, (86, 86, 84), 'road'),
                        Paint(np.array([x, y]) + _ISLAND * circle, (92, 128, 70), 'island')]
        stage.line = stage.s0 + near + 1.0
        stage.marks.append(stop_line(stage.road, stage.line, layout.right_edge, layout.divider))
        centre = stage.s0 + near + half
        stage.clear.append((centre - _RING_EDGE - 3.0, centre + _RING_EDGE + 3.0))
        if not event:
            stage.act(decide('continue', 'roundabout_free'), Maneuver(max(speed, 5.0)))
            return
        start = heading + angle - math.radians(120.0)
        way = Path([(4 * math.pi * _RING_RADIUS, 1.0 / _RING_RADIUS)],
                   x + _RING_RADIUS * math.cos(start), y + _RING_RADIUS * math.sin(start),
                   start + math.pi / 2)
        other = stage.add(draw.vehicle, 0.0, 0.0, late=True, speed=pace,
                          colour=COLOURS[draw.colour])
        other.path = way
        other.s = math.radians(120.0) * _RING_RADIUS - stage.lead_time * pace
        stage.act(decide('yield', 'roundabout_busy', colour=draw.colour, vehicle=draw.vehicle),
                  stage.stop_before(near + 1.0 - REST, ignore=(other,)), must_hold=True)

    return Blueprint(draw, layout, speed, push, populate, oncoming=False,
                     turn=lambda: _around(near))


def cones_and_cut_in(draw: Draw) -> Blueprint:
    """Cones close a part of our lane; twin A: a vehicle cuts in before them, the nearer cause."""
    gap = draw.uniform(14.0, 20.0)
    speed, push = draw.motion(5.5, min(11.0, gap - 4.5))
    curvature = draw.bend(speed, push, gap + 10.0)
    pace, when, rate = draw.uniform(0.85, 0.93) * speed, draw.event_time(), draw.uniform(1.2, 1.5)
    layout = Layout(width=3.5, left=1, oncoming=draw.choice((0, 1)))
    cones = gap + draw.uniform(16.0, 20.0)

    def populate(stage: Stage, event: bool) -> None:
        other = merge(stage, draw, gap, pace, event, when, rate, 1.0, rest=0.9)
        for i in range(8):
            stage.add('cone', cones + 2.5 * i, -1.85 + min(i, 4) * 0.27, colour=CONE)
        around = nudge(stage, cones + 3.0, cones + 22.0, 0.95)
        if event:
            around.desired, around.yield_to = pace * 0.8, (other,)
            around.ease_off, around.brake_limit = 1.0, 3.5
            stage.act(decide('slow', 'cutting_in', colour=draw.colour, vehicle=draw.vehicle,
                             side='left'), around)
        else:
            stage.act(decide('nudge_{o}', 'cones_close', side='right', other_side='left'), around)

    return Blueprint(draw, layout, speed, push, populate, curvature)


def person_and_red(draw: Draw) -> Blueprint:
    """At a red light. Twin A: somebody also steps onto the crosswalk, the more urgent cause."""
    word, ahead = draw.choice((('close', draw.uniform(16.5, 17.5)),
                               ('midway', draw.uniform(23.0, 29.0))))
    line = ahead - 6.5
    low, high = stop_speeds(line - REST - EGO_FRONT)
    speed, push = draw.motion(low, high, creeping=True)
    curvature = draw.bend(speed, push, ahead)
    person, clothes = draw.choice(tuple(PERSONS)), draw.choice(CLOTHES)
    side = draw.choice(('left', 'right'))
    sign = 1.0 if side == 'left' else -1.0
    when, pace = draw.event_time(gait=True), draw.uniform(1.2, 1.6)
    layout = Layout(width=3.5, oncoming=0 if side == 'left' else 1, shoulder=0.5)
    start = layout.edge(side) + sign * 0.55

    def populate(stage: Stage, event: bool) -> None:
        stage.stop_line(line)
        stage.marks += crosswalk(stage.road, stage.s0 + line + 1.5, layout.right_edge,
                                 layout.left_edge)
        stage.cross_road(ahead + 2.0)
        stage.add('traffic_light', ahead, layout.right_edge - 0.85, lamp='red',
                  size=(0.4, 0.4, 3.7))
        walk_out(stage, person, line + 3.0, start, event, when, pace, clothes)
        maneuver = stage.stop_before(line - REST)
        if event:
            stage.act(decide('yield', 'person_stepping', person=person, side=side), maneuver,
                      must_hold=True)
        else:
            stage.act(decide('stop', 'light_{l}', lamp='red', distance=word), maneuver,
                      must_hold=True)

    return Blueprint(draw, layout, speed, push, populate, curvature)
