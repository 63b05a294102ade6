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
Trained situations with two causes at once, which teach the more urgent one.

Somebody or something that enters our way comes before lights, signs and standing obstacles.
None of these pairs of causes is one that the off-shelf test asks for.
"""

from __future__ import annotations

from rspec_planner.world.expert import Maneuver, Shift
from rspec_planner.world.reasoning import decide
from rspec_planner.world.road import crosswalk, Layout
from rspec_planner.world.scenarios.base import (
    Blueprint,
    CLOTHES,
    COLOURS,
    Draw,
    PERSONS,
    Rejected,
    Stage,
    stop_speeds,
    VEHICLES,
)
from rspec_planner.world.scenarios.junctions import REST
from rspec_planner.world.scenarios.roadside import (
    CONE,
    draw_side,
    nudge,
    one_way_if,
    walk_out,
    with_next_lane,
)
from rspec_planner.world.scenarios.traffic import lead, merge
from rspec_planner.world.simulation import EGO_FRONT, EGO_WIDTH, SIZES


def _zebra(stage: Stage, line: float) -> None:
    """Paint a stop line and, behind it, a crosswalk."""
    stage.stop_line(line)
    stage.marks += crosswalk(stage.road, stage.s0 + line + 1.5, stage.layout.right_edge,
                             stage.layout.left_edge)
    stage.gaps.append((stage.s0 + line + 1.1, stage.s0 + line + 4.9))


def person_and_sign(draw: Draw) -> Blueprint:
    """Stop sign and crosswalk; twin A: somebody also steps out; twin B: they wait."""
    side, _, sign = draw_side(draw)
    word, ahead = draw.choice((('close', draw.uniform(13.0, 16.5)),
                               ('midway', draw.uniform(21.5, 26.0))))
    line = ahead - 0.8
    low, high = stop_speeds(line - REST - EGO_FRONT)
    speed, push = draw.motion(low, high, creeping=True)
    curvature = draw.bend(speed, push, ahead + 2.2)
    person, clothes = draw.choice(tuple(PERSONS)), draw.choice(CLOTHES)
    when, pace = draw.event_time(gait=True), draw.uniform(1.2, 1.6)
    layout = one_way_if(draw, side == 'left', shoulder=0.5)
    start = layout.edge(side) + sign * 0.55

    def populate(stage: Stage, event: bool) -> None:
        _zebra(stage, line)
        stage.cross_road(line + 7.0)
        stage.add('stop_sign', ahead, layout.right_edge - 1.15)
        walk_out(stage, person, line + 3.0, start, event, when, pace, clothes)
        decision = (decide('yield', 'person_stepping', person=person, side=side) if event
                    else decide('stop', 'stop_sign', distance=word))
        stage.act(decision, stage.stop_before(line - REST), must_hold=True)

    return Blueprint(draw, layout, speed, push, populate, curvature,
                     distractors=('far_parked',))


def person_and_green(draw: Draw) -> Blueprint:
    """Green light and crosswalk; twin A: somebody steps out; twin B: they wait."""
    side, _, sign = draw_side(draw)
    word, ahead = draw.choice((('close', draw.uniform(16.0, 17.5)),
                               ('midway', draw.uniform(23.0, 29.0))))
    line = ahead - 6.5
    low, high = stop_speeds(line - REST - EGO_FRONT)
    speed, push = draw.motion(max(low, 1.2), high, creeping=True)
    curvature = draw.bend(speed, push, ahead)
    person, clothes = draw.choice(tuple(PERSONS)), draw.choice(CLOTHES)
    when, pace = draw.event_time(gait=True), draw.uniform(1.2, 1.6)
    layout = one_way_if(draw, side == 'left', shoulder=0.5)
    start, height = layout.edge(side) + sign * 0.55, draw.uniform(3.6, 3.9)

    def populate(stage: Stage, event: bool) -> None:
        _zebra(stage, line)
        stage.cross_road(ahead + 2.0)
        stage.add('traffic_light', ahead, layout.right_edge - 0.85, lamp='green',
                  size=(0.4, 0.4, height))
        walker = walk_out(stage, person, line + 3.0, start, event, when, pace, clothes)
        if event:
            away = layout.width / 2 + 0.4
            stage.act(decide('yield', 'person_stepping', person=person, side=side),
                      stage.stop_before(line - REST, desired=0.6 * speed, ease_off=0.9,
                                        released=lambda: -sign * walker.d > away),
                      must_hold=True)
        else:
            stage.act(decide('continue', 'light_green', distance=word), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, curvature,
                     distractors=('far_parked',))


def parked_and_cut_in(draw: Draw) -> Blueprint:
    """Parked vehicle in our lane; twin A: another one cuts in before it; twin B: not."""
    side, other_side, sign = draw_side(draw)  # of the parked one
    gap = draw.uniform(14.0, 20.0)
    place = gap + draw.uniform(11.0, 16.0)
    speed, push = draw.motion(5.5, min(11.0, gap - 4.5, (place - 4.6) / 2.4))
    kind, colour = draw.choice(VEHICLES), draw.choice(tuple(COLOURS))
    length, width, _ = SIZES[kind]
    curvature = draw.bend(speed, push, place + length / 2)
    pace, when, rate = draw.uniform(0.85, 0.93) * speed, draw.event_time(), draw.uniform(1.2, 1.5)
    layout = Layout(width=draw.uniform(3.4, 3.6), left=1 if sign < 0 else 0,
                    right=0 if sign < 0 else 1, shoulder=2.8,
                    oncoming=draw.choice((0, 1)) if sign < 0 else 0)
    inner = draw.uniform(0.5, 0.75)

    def populate(stage: Stage, event: bool) -> None:
        other = merge(stage, draw, gap, pace, event, when, rate, -sign, rest=1.05)
        stage.add(kind, place, sign * (inner + width / 2), rear=True, colour=COLOURS[colour])
        around = nudge(stage, place - 0.8, place + length + 1.5,
                       -sign * (EGO_WIDTH / 2 + 0.65 - inner))
        if event:
            around.desired, around.yield_to = pace * 0.8, (other,)
            around.ease_off, around.brake_limit = 1.0, 3.5
            stage.act(decide('slow', 'cutting_in', colour=draw.colour, vehicle=draw.vehicle,
                             side=other_side), around)
        else:
            stage.act(decide('nudge_{o}', 'parked_blocks', colour=colour, vehicle=kind,
                             side=side, other_side=other_side), around)

    return Blueprint(draw, layout, speed, push, populate, curvature, distractors=('zebra',))


def cones_and_lead_brake(draw: Draw) -> Blueprint:
    """Cones close a part of our lane; twin A: the leader between them brakes; twin B: not."""
    side, other, sign = draw_side(draw)
    word, gap = draw.choice((('midway', draw.uniform(21.5, 28.0)),
                             ('far', draw.uniform(37.0, 44.0))))
    cones = gap - (draw.uniform(7.0, 9.0) if word == 'midway' else draw.uniform(12.0, 16.0))
    if draw.sign and cones < 16.0:
        raise Rejected('no room for the shift')
    high = (cones - 2.0) / 2.4
    speed, push = draw.motion(3.6 if word == 'midway' else 6.0, min(11.0, high))
    if speed > high:
        raise Rejected('no room for the shift')
    curvature = draw.bend(speed, push, gap)
    when, brake = draw.event_time(), draw.uniform(2.2, 3.2)
    layout = with_next_lane(draw, one_way_if(draw, side == 'left'), side)
    inner = draw.uniform(0.75, 0.9)
    edge, count = layout.width / 2, 16
    half = SIZES[draw.vehicle][1] / 2

    def populate(stage: Stage, event: bool) -> None:
        first = stage.s0 + cones
        lead(stage, draw, gap, push, event, when, brake, (
            Shift(first - 16.0, 16.0, -sign * max(0.0, half + 0.55 - inner)),
            Shift(first + 2.5 * count + 6.0, 16.0, 0.0)))
        for i in range(count):
            stage.add('cone', cones + 2.5 * i,
                      sign * (edge + 0.1 - min(i, 4) / 4.0 * (edge + 0.1 - inner)), colour=CONE)
        around = nudge(stage, cones + 3.0, cones + 2.5 * count + 2.0,
                       -sign * (EGO_WIDTH / 2 + 0.8 - inner))
        if event:
            around.desired, around.ease_off = speed * 0.6, 0.6
            stage.act(decide('brake', 'lead_braking', colour=draw.colour, vehicle=draw.vehicle,
                             distance=word), around)
        else:
            stage.act(decide('nudge_{o}', 'cones_close', side=side, other_side=other), around)

    return Blueprint(draw, layout, speed, push, populate, curvature, oncoming=False,
                     distractors=('zebra',))
