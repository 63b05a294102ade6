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
"""Scenarios about people and things beside the lane: crosswalk, dart-out, nudges."""

from __future__ import annotations

from dataclasses import replace
import math

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
)
from rspec_planner.world.scene import Colour
from rspec_planner.world.simulation import Actor, EGO_FRONT, EGO_WIDTH, SIZES

CONE = (250, 96, 20)


def draw_side(draw: Draw) -> tuple[str, str, float]:
    """Return a side word, the other side, and the sign of d there."""
    side = draw.choice(('left', 'right'))
    return side, 'right' if side == 'left' else 'left', 1.0 if side == 'left' else -1.0


def one_way_if(draw: Draw, left: bool, shoulder: float = 2.8) -> Layout:
    """Return a single lane; without oncoming traffic when its left edge matters."""
    return Layout(width=draw.uniform(3.4, 3.7), oncoming=0 if left else 1, shoulder=shoulder)


def with_next_lane(draw: Draw, layout: Layout, side: str) -> Layout:
    """Return the layout, in every third clip with a second lane of our direction, off `side`."""
    if not draw.flag(1.0 / 3.0):
        return layout
    return replace(layout, left=1) if side == 'right' else replace(layout, right=1)


def walk_out(stage: Stage, word: str, ahead: float, start: float, event: bool, when: float,
             pace: float, clothes: Colour) -> Actor:
    """Add somebody at d = `start` who faces the road and, in the event, steps onto it."""
    sign = math.copysign(1.0, start)

    def script(person: Actor, tau: float) -> None:
        if event and tau >= when:
            person.gait = 1.8
            person.d = start - sign * pace * (tau - when)
    return stage.add(PERSONS[word], ahead, start, script=script, colour=clothes,
                     turned=-sign * math.pi / 2)


def crosswalk_person(draw: Draw) -> Blueprint:
    """Twin A: somebody steps out onto the crosswalk; twin B: the same person waits."""
    side, _, sign = draw_side(draw)
    ahead = draw.uniform(12.0, 25.0)
    low, high = stop_speeds(ahead - 1.4 - EGO_FRONT)
    speed, push = draw.motion(max(low, 1.2), high, creeping=True)
    curvature = draw.bend(speed, push, ahead + 3.0)
    word, clothes = draw.choice(tuple(PERSONS)), draw.choice(CLOTHES)
    when, pace = draw.event_time(gait=True), draw.uniform(1.2, 1.6)
    layout = one_way_if(draw, side == 'left', shoulder=0.5)
    start = layout.edge(side) + sign * 0.55

    def populate(stage: Stage, event: bool) -> None:
        stage.marks += crosswalk(stage.road, stage.s0 + ahead, layout.right_edge,
                                 layout.left_edge)
        stage.gaps.append((stage.s0 + ahead - 0.4, stage.s0 + ahead + 3.4))
        stage.line = stage.s0 + ahead - 0.6
        person = walk_out(stage, word, ahead + 1.5, start, event, when, pace, clothes)
        slots = {'person': word, 'side': side}
        if event:
            away = layout.width / 2 + 0.4
            stage.act(decide('yield', 'person_stepping', **slots),
                      stage.stop_before(ahead - 1.4, desired=0.6 * speed, ease_off=0.9,
                                        released=lambda: -sign * person.d > away),
                      must_hold=True)
        else:
            stage.act(decide('pass', 'person_waiting', **slots), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, curvature,
                     distractors=('far_parked',))


def dart_out(draw: Draw) -> Blueprint:
    """Twin A: somebody runs out from behind a parked vehicle; twin B: nobody is there."""
    side, _, sign = draw_side(draw)
    length, width, _ = SIZES[draw.vehicle]
    hardest = draw.uniform(3.4, 5.2)
    room = max(7.5 + length - 4.6, draw.uniform(9.0, 17.0))
    high = math.sqrt(2.0 * hardest * room)
    speed, push = draw.motion(high - 0.4, high)
    gap = room + EGO_FRONT + 1.4 - length - 0.7  # rear of the parked vehicle
    curvature = draw.bend(speed, push, gap + length)
    word, clothes = draw.choice(tuple(PERSONS)), draw.choice(CLOTHES)
    when, pace = draw.event_time(gait=True), draw.uniform(2.7, 3.4)
    layout = one_way_if(draw, side == 'left')
    place = sign * (layout.width / 2 + 0.25 + width / 2)
    start = place - sign * 0.3

    def populate(stage: Stage, event: bool) -> None:
        stage.add(draw.vehicle, gap, place, rear=True, colour=COLOURS[draw.colour])
        slots = {'colour': draw.colour, 'vehicle': draw.vehicle}
        if not event:
            stage.act(decide('keep_speed', 'parked_alone', side=side, **slots), Maneuver(speed))
            return

        def script(person: Actor, tau: float) -> None:
            person.visible = tau >= when
            if person.visible:
                person.gait = 2.8
                person.d = start - sign * pace * (tau - when)
        person = stage.add(PERSONS[word], gap + length + 0.7, start, late=True, script=script,
                           colour=clothes, turned=-sign * math.pi / 2)
        person.visible = False
        away, watch = layout.width / 2 + 1.0, person
        stage.act(decide('brake_hard', 'person_running', person=word, **slots),
                  stage.stop_before(gap + length + 0.7 - 1.4, brake_limit=6.0, hard=True,
                                    released=lambda: -sign * watch.d > away + 9.0))

    return Blueprint(draw, layout, speed, push, populate, curvature)


def cyclist(draw: Draw) -> Blueprint:
    """Twin A: the cyclist rides in our lane; twin B: on the path beside the road."""
    word, gap = draw.distance((11.0, 15.0), (20.5, 27.0), (35.0, 40.0))
    pace = draw.uniform(3.0, 4.2)
    most = pace + (gap - EGO_FRONT) / 3.1
    speed, push = draw.motion(max(3.6, pace + 0.8), min(most, 11.5))
    curvature = draw.bend(speed, push, gap)
    clothes = draw.choice(CLOTHES)
    layout = Layout(width=draw.uniform(3.4, 3.7), oncoming=1, shoulder=0.5, path=True)
    place, target = draw.uniform(-1.0, -0.75), draw.uniform(1.3, 1.5)

    def populate(stage: Stage, event: bool) -> None:
        beside = layout.right_edge - layout.shoulder - 1.3
        rider = stage.add('cyclist', gap, place if event else beside, rear=True, speed=pace,
                          colour=clothes)
        rider.gait = 1.2
        if event:
            start = Shift(stage.s0 + 0.15 * speed, max(8.0, 2.9 * speed), target)
            passed = (gap + 9.0) / max(0.5, speed - pace) * speed
            back = Shift(stage.s0 + max(passed, 4.0 * speed), max(10.0, 3.0 * speed), 0.0)
            stage.act(decide('nudge_left', 'cyclist_in_lane', distance=word),
                      Maneuver(speed, shifts=(start, back), ignore=(rider,)))
        else:
            stage.act(decide('keep_lane', 'cyclist_on_path', distance=word), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, curvature, oncoming=False,
                     distractors=('far_parked', 'zebra'))


def nudge(stage: Stage, first: float, last: float, target: float) -> Maneuver:
    """Return a shift to `target` done `first` metres ahead, undone after `last`."""
    start = 0.15 * stage.speed
    length = min(3.2 * stage.speed, first - EGO_FRONT - start)
    return Maneuver(stage.speed, shifts=(
        Shift(stage.s0 + start, length, target),
        Shift(stage.s0 + last, max(9.0, 3.0 * stage.speed), 0.0)))


def parked(draw: Draw) -> Blueprint:
    """Twin A: a parked vehicle reaches into our lane; twin B: it leaves room."""
    side, other, sign = draw_side(draw)
    gap = draw.uniform(14.0 if draw.sign == 0 else 19.0, 30.0)
    speed, push = draw.motion(3.3, min(11.0, (gap - 4.6) / 2.4))
    length, width, _ = SIZES[draw.vehicle]
    curvature = draw.bend(speed, push, gap + length / 2)
    layout = with_next_lane(draw, one_way_if(draw, side == 'left'), side)
    inner = layout.width / 2 - draw.uniform(1.05, 1.35)
    away = layout.width / 2 + draw.uniform(0.35, 0.6)
    target = -sign * (EGO_WIDTH / 2 + 0.65 - inner)

    def populate(stage: Stage, event: bool) -> None:
        place = sign * ((inner if event else away) + width / 2)
        stage.add(draw.vehicle, gap, place, rear=True, colour=COLOURS[draw.colour])
        slots = {'colour': draw.colour, 'vehicle': draw.vehicle, 'side': side}
        if event:
            stage.act(decide('nudge_{o}', 'parked_blocks', other_side=other, **slots),
                      nudge(stage, gap - 0.8, gap + length + 1.5, target))
        else:
            stage.act(decide('keep_lane', 'parked_leaves_room', **slots), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, curvature, oncoming=False,
                     distractors=('zebra', 'walker', 'neighbour'))


def construction(draw: Draw) -> Blueprint:
    """Twin A: cones close a part of our lane; twin B: they stand on the shoulder."""
    side, other, sign = draw_side(draw)
    gap = draw.uniform(13.0 if draw.sign == 0 else 17.0, 28.0)
    count = draw.choice((7, 8, 9, 10))
    speed, push = draw.motion(3.3, min(11.0, (gap - 2.0) / 2.4))
    if speed > (gap - 2.0) / 2.4:
        raise Rejected('no room for the shift')
    curvature = draw.bend(speed, push, gap + 6.0)
    layout = with_next_lane(draw, one_way_if(draw, side == 'left'), side)
    inner = draw.uniform(0.7, 0.85)
    target = -sign * (EGO_WIDTH / 2 + 0.8 - inner)
    edge = layout.width / 2

    def populate(stage: Stage, event: bool) -> None:
        for i in range(count):
            share = min(i, 4) / 4.0
            place = edge + 0.9 + 0.2 * share
            if event:
                place = edge + 0.1 - share * (edge + 0.1 - inner)
            stage.add('cone', gap + 2.5 * i, sign * place, colour=CONE)
        if event:
            stage.act(decide('nudge_{o}', 'cones_close', side=side, other_side=other),
                      nudge(stage, gap + 3.0, gap + 2.5 * count + 2.0, target))
        else:
            stage.act(decide('keep_lane', 'cones_shoulder', side=side), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, curvature, oncoming=False,
                     distractors=('zebra', 'walker'))  # a neighbour here is off-shelf
