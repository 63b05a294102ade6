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
"""Scenarios at junctions: lights, a stop sign, two turns, and the sharp bend."""

from __future__ import annotations

from collections.abc import Callable
import math

from rspec_planner.world.expert import Maneuver
from rspec_planner.world.reasoning import decide
from rspec_planner.world.road import arrow, crosswalk, Layout, Path
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
from rspec_planner.world.simulation import Actor, EGO_FRONT

REST = 0.5  # metres between the bumper at rest and a stop line
LEFT_RADIUS, RIGHT_RADIUS = 8.5, 6.0  # of the ego's turns, metres


def _layout(draw: Draw) -> Layout:
    return Layout(width=draw.uniform(3.3, 3.6), left=draw.choice((0, 0, 1)),
                  oncoming=draw.choice((0, 1, 1)))


def _light(stage: Stage, ahead: float, height: float, before: str, after: str, when: float
           ) -> None:
    """Add the light of our direction, and the back of the one for the other direction."""
    def script(light: Actor, tau: float) -> None:
        light.lamp = after if tau >= when else before
    stage.add('traffic_light', ahead, stage.layout.right_edge - 0.85, lamp=before,
              script=script, size=(0.4, 0.4, height))


def _quarter(begin: float, radius: float, sign: float) -> Callable[[], list[tuple[float, float]]]:
    """Return the ego's way: straight for `begin` metres from t0, then a quarter turn."""
    return lambda: [(BEHIND + begin, 0.0), (radius * math.pi / 2, sign / radius), (60.0, 0.0)]


def red_light(draw: Draw) -> Blueprint:
    """Twin A: the light turns amber or red; twin B: it stays green."""
    word, ahead = draw.distance((14.0, 17.5), (23.0, 29.0), (37.0, 41.0))
    line = ahead - 2.5
    low, high = stop_speeds(line - REST - EGO_FRONT)
    speed, push = draw.motion(low, high, creeping=True)
    curvature = draw.bend(speed, push, ahead)
    lamp, when = draw.choice(('red', 'amber')), draw.event_time()
    height, layout = draw.uniform(3.6, 3.9), _layout(draw)

    def populate(stage: Stage, event: bool) -> None:
        stage.stop_line(line)
        stage.cross_road(line + 4.5)
        _light(stage, ahead, height, 'green', lamp if event else 'green', when)
        if event:
            stage.act(decide('stop', 'light_{l}', lamp=lamp, distance=word),
                      stage.stop_before(line - REST), must_hold=True)
        else:
            stage.act(decide('continue', 'light_green', distance=word), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, curvature,
                     distractors=('parked', 'cones', 'walker', 'cyclist', 'far_parked'))


def light_change(draw: Draw) -> Blueprint:
    """From standstill at the line. Twin A: red turns green; twin B: it stays red."""
    line, when = EGO_FRONT + draw.uniform(0.5, 1.4), draw.event_time()
    ahead = line + draw.uniform(10.0, 13.0)
    height, layout, desired = draw.uniform(3.6, 3.9), _layout(draw), draw.uniform(7.0, 11.0)

    def populate(stage: Stage, event: bool) -> None:
        stage.stop_line(line)
        stage.cross_road(line + 1.8, 7.0)
        _light(stage, ahead, height, 'red', 'green' if event else 'red', when)
        if event:
            stage.act(decide('start', 'light_turned_green'), Maneuver(desired))
        else:
            stage.act(decide('wait', 'light_still_red'), stage.stop_before(EGO_FRONT),
                      must_hold=True)

    return Blueprint(draw, layout, 0.0, 0.0, populate, distractors=('walker', 'far_parked'))


def stop_sign(draw: Draw) -> Blueprint:
    """Twin A: a stop sign stands at the line; twin B: there is none."""
    word, ahead = draw.distance((13.0, 16.5), (21.5, 28.0), (36.0, 40.0))
    line = ahead - 0.8
    low, high = stop_speeds(line - REST - EGO_FRONT)
    speed, push = draw.motion(low, high, creeping=True)
    curvature = draw.bend(speed, push, ahead)
    layout = _layout(draw)

    def populate(stage: Stage, event: bool) -> None:
        stage.stop_line(line)
        stage.cross_road(line + 3.5)
        if event:
            stage.add('stop_sign', ahead, layout.right_edge - 0.95, late=True)
            stage.act(decide('stop', 'stop_sign', distance=word),
                      stage.stop_before(line - REST), must_hold=True)
        else:
            stage.act(decide('keep_speed', 'no_sign', distance=word), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, curvature,
                     distractors=('parked', 'cones', 'walker', 'cyclist', 'far_parked'))


def left_turn(draw: Draw) -> Blueprint:
    """Twin A: an oncoming vehicle is close; twin B: the oncoming lane is free."""
    standing = draw.flag(0.3)
    near = 4.6 if standing else draw.uniform(9.0, 14.0)  # the side road's near edge
    speed = push = 0.0
    if not standing:
        rest = near - REST - EGO_FRONT
        high = min(math.sqrt(2 * LEFT_RADIUS + 3.4 * (near - 2.75)) * 0.97,
                   math.sqrt(6.4 * rest))
        speed, push = draw.motion(1.0, min(high, 6.5), creeping=True)
    layout = Layout(width=3.5, oncoming=1, shoulder=1.6)
    distance, pace = draw.uniform(20.0, 36.0), draw.uniform(5.5, 8.5)
    begin = near + 4.0 + 1.75 - LEFT_RADIUS

    def populate(stage: Stage, event: bool) -> None:
        stage.cross_road(near, 8.0)
        stage.marks += arrow(stage.road, stage.s0 + near - 8.0, 'left')
        if not event:
            stage.act(decide('turn_left', 'oncoming_free'), Maneuver(max(speed, 5.5)))
            return
        other = stage.add(draw.vehicle, distance, layout.width, late=True,
                          speed=pace, reverse=True, colour=COLOURS[draw.colour])
        gone = stage.s0 + near + 0.5
        stage.act(decide('wait', 'oncoming_close', colour=draw.colour, vehicle=draw.vehicle),
                  stage.stop_before(EGO_FRONT if standing else near - REST, desired=5.5,
                                    released=lambda: other.s < gone))

    return Blueprint(draw, layout, speed, push, populate, oncoming=False,
                     turn=_quarter(begin, LEFT_RADIUS, 1.0), distractors=('walker',),
                     navigation='turn left at the junction')


def right_turn(draw: Draw) -> Blueprint:
    """Twin A: somebody crosses the side road (cross_right sees it); twin B: nobody does."""
    standing = draw.flag(0.2)
    near = 4.3 if standing else draw.uniform(5.0, 7.5)
    speed = push = 0.0
    begin = near + 4.0 - 1.75 - RIGHT_RADIUS
    if not standing:
        rest = begin + 6.2 - EGO_FRONT
        high = min(math.sqrt(2 * RIGHT_RADIUS + 3.4 * begin) * 0.97, math.sqrt(6.4 * rest))
        speed, push = draw.motion(1.0, min(high, 5.5), creeping=True)
    layout = Layout(width=3.5, oncoming=draw.choice((0, 1)), left=draw.choice((0, 1)),
                    shoulder=1.2)
    word, clothes = draw.choice(tuple(PERSONS)), draw.choice(CLOTHES)
    way, pace = draw.choice((1.0, -1.0)), draw.uniform(0.9, 1.3)
    place = draw.uniform(-3.0, 0.2) if way > 0 else draw.uniform(-0.8, 1.2)
    edge = layout.right_edge - layout.shoulder

    def populate(stage: Stage, event: bool) -> None:
        stage.cross_road(near, 8.0, sides='right')
        stage.marks += arrow(stage.road, stage.s0 + near - 8.0, 'right')
        x, y, heading = stage.road.pose(stage.s0 + near + 4.0, edge)
        side = Path([(60.0, 0.0)], x, y, heading - math.pi / 2)
        stage.marks += crosswalk(side, 0.6, -4.0, 4.0, depth=2.6)
        if not event:
            stage.act(decide('turn_right', 'crosswalk_free'), Maneuver(max(speed, 4.5)))
            return

        def script(person: Actor, tau: float) -> None:
            person.gait = 1.8
            person.d = place + way * pace * tau
        person = stage.add(PERSONS[word], 0.0, 0.0, late=True, script=script, colour=clothes,
                           turned=way * math.pi / 2)
        person.path, person.s = side, 1.9
        stop = begin + 6.2
        stage.act(decide('wait', 'person_crossing', person=word),
                  stage.stop_before(EGO_FRONT if standing else stop, desired=4.5,
                                    released=lambda: way * person.d > 4.4))

    return Blueprint(draw, layout, speed, push, populate, turn=_quarter(begin, RIGHT_RADIUS, -1.0),
                     navigation='turn right at the junction')


def curve(draw: Draw) -> Blueprint:
    """Twin A: the road bends sharply; twin B: it runs straight."""
    side = draw.choice(('left', 'right'))
    sign = 1.0 if side == 'left' else -1.0
    ahead, sharp = draw.uniform(15.0, 26.0), draw.uniform(0.032, 0.05)
    slow = math.sqrt(2.0 / sharp)
    speed, push = draw.motion(slow + 1.8, min(13.0, math.sqrt(2 / sharp + 3.1 * (ahead - 2.0))))
    before, after = draw.bend(speed, push, 10.0), draw.uniform(0.9, 1.3)
    layout = Layout(width=draw.uniform(3.3, 3.7), left=draw.choice((0, 1)),
                    oncoming=draw.choice((0, 1)))

    def pieces(event: bool) -> list[tuple[float, float]]:
        first = [(BEHIND + 3.0, before), (ahead - 3.0, 0.0)]
        return first + ([(after / sharp, sign * sharp), (90.0, 0.0)] if event else [(130.0, 0.0)])

    def populate(stage: Stage, event: bool) -> None:
        if event:
            stage.act(decide('slow_{s}', 'road_bends', side=side), Maneuver(speed))
        else:
            stage.act(decide('keep_straight', 'road_straight'), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, before, pieces=pieces,
                     distractors=('walker',))
