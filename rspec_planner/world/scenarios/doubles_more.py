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
More trained situations with two causes at once.

The order is that of `doubles`: who or what enters our way comes before lights, signs and standing
obstacles, and also before somebody slow who was there already.
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
from rspec_planner.world.scenarios.roadside import draw_side, nudge, one_way_if, walk_out
from rspec_planner.world.scenarios.traffic import lead, merge
from rspec_planner.world.simulation import EGO_FRONT, EGO_WIDTH, SIZES


def cyclist_and_cut_in(draw: Draw) -> Blueprint:
    """Cyclist in our lane; twin A: a vehicle from the left cuts in before it; twin B: not."""
    word, place = draw.choice((('midway', draw.uniform(24.0, 27.0)),
                               ('far', draw.uniform(35.0, 40.0))))
    gap = draw.uniform(*((12.0, 14.0) if word == 'midway' else (14.0, 20.0)))
    ride = draw.uniform(3.0, 4.2)
    speed, push = draw.motion(max(5.5, ride + 1.2),
                              min(11.0, gap - 4.5, ride + (place - EGO_FRONT) / 3.1))
    curvature = draw.bend(speed, push, place)
    pace, when, rate = draw.uniform(0.85, 0.93) * speed, draw.event_time(), draw.uniform(1.2, 1.5)
    layout = Layout(width=draw.uniform(3.6, 3.7), left=1, oncoming=draw.choice((0, 1)),
                    shoulder=0.5, path=True)
    beside, target = draw.uniform(-1.0, -0.8), draw.uniform(1.1, 1.25)
    clothes = draw.choice(CLOTHES)

    def populate(stage: Stage, event: bool) -> None:
        other = merge(stage, draw, gap, pace, event, when, rate, 1.0, rest=1.2)
        rider = stage.add('cyclist', place, beside, rear=True, speed=ride, colour=clothes)
        rider.gait = 1.2
        passed = (place + 9.0) / max(0.5, speed - ride) * speed
        around = Maneuver(speed, ignore=(rider,), shifts=(
            Shift(stage.s0 + 0.15 * speed, max(8.0, 2.9 * speed), target),
            Shift(stage.s0 + max(passed, 4.0 * speed), max(10.0, 3.0 * speed), 0.0)))
        if event:
            around.desired, around.yield_to = pace * 0.85, (other,)
            around.ease_off, around.brake_limit = 1.0, 3.5
            stage.act(decide('slow', 'cutting_in', colour=draw.colour, vehicle=draw.vehicle,
                             side='left'), around)
        else:
            stage.act(decide('nudge_left', 'cyclist_in_lane', distance=word), around)

    return Blueprint(draw, layout, speed, push, populate, curvature, distractors=('zebra',))


def green_and_lead_brake(draw: Draw) -> Blueprint:
    """Green light; twin A: the leader before it brakes; twin B: it drives on."""
    word, ahead = draw.distance((15.0, 17.5), (23.0, 29.0), (37.0, 41.0))
    near, gap = draw.choice({
        'close': (('close', draw.uniform(10.0, 12.5)),),
        'midway': (('close', draw.uniform(12.0, 15.0)), ('midway', draw.uniform(20.5, 24.0))),
        'far': (('midway', draw.uniform(20.5, 28.0)),)}[word])
    speed, push = draw.motion(3.3 if near == 'close' else 5.0, min(gap - 3.6, 12.5))
    curvature = draw.bend(speed, push, max(ahead, gap))
    when, brake = draw.event_time(), draw.uniform(2.2, 3.2)
    layout = Layout(width=draw.uniform(3.3, 3.6), left=draw.choice((0, 0, 1)),
                    oncoming=draw.choice((0, 1, 1)))
    height, line = draw.uniform(3.6, 3.9), ahead - 2.5
    edge = curvature * gap / 2 - SIZES[draw.vehicle][1] / 2 / gap  # of the leader, radians
    if (layout.right_edge - 0.85) / ahead + curvature * ahead / 2 > edge - 0.015:
        raise Rejected('the leader hides the light')

    def populate(stage: Stage, event: bool) -> None:
        leader = lead(stage, draw, gap, push, event, when, brake)
        stage.stop_line(line)
        stage.cross_road(line + 4.5)
        stage.add('traffic_light', ahead, layout.right_edge - 0.85, lamp='green',
                  size=(0.4, 0.4, height))
        if event:
            stage.act(decide('brake', 'lead_braking', colour=draw.colour, vehicle=draw.vehicle,
                             distance=near), Maneuver(speed * 0.6, ease_off=0.6))
        else:
            stage.act(decide('continue', 'light_green', distance=word),
                      Maneuver(speed, ignore=(leader,)))  # both keep their pace

    return Blueprint(draw, layout, speed, push, populate, curvature,
                     distractors=('walker', 'far_parked'))


def parked_and_person(draw: Draw) -> Blueprint:
    """Parked vehicle in our lane; twin A: somebody steps onto the crosswalk before it."""
    side, other_side, sign = draw_side(draw)
    ahead = draw.uniform(12.0, 19.0)
    place = ahead + draw.uniform(8.0, 11.0)
    low, high = stop_speeds(ahead - 1.4 - EGO_FRONT)
    speed, push = draw.motion(max(low, 3.4), min(high, (place - 4.6) / 2.4))
    kind, colour = draw.choice(VEHICLES), draw.choice(tuple(COLOURS))
    length, width, _ = SIZES[kind]
    curvature = draw.bend(speed, push, place + length / 2)
    person, clothes = draw.choice(tuple(PERSONS)), draw.choice(CLOTHES)
    when, pace = draw.event_time(gait=True), draw.uniform(1.2, 1.6)
    layout, inner = one_way_if(draw, side == 'left', shoulder=0.5), draw.uniform(0.55, 0.75)

    def populate(stage: Stage, event: bool) -> None:
        stage.marks += crosswalk(stage.road, stage.s0 + ahead, layout.right_edge,
                                 layout.left_edge)
        stage.gaps.append((stage.s0 + ahead - 0.4, stage.s0 + ahead + 3.4))
        stage.line = stage.s0 + ahead - 0.6
        walker = walk_out(stage, person, ahead + 1.5, layout.edge(side) + sign * 0.55, event,
                          when, pace, clothes)
        stage.add(kind, place, sign * (inner + width / 2), rear=True, colour=COLOURS[colour])
        around = nudge(stage, place - 0.8, place + length + 1.5,
                       -sign * (EGO_WIDTH / 2 + 0.65 - inner))
        if event:
            away = layout.width / 2 + 0.4
            stage.act(decide('yield', 'person_stepping', person=person, side=side),
                      stage.stop_before(ahead - 1.4, desired=0.6 * speed, ease_off=0.9,
                                        shifts=around.shifts,
                                        released=lambda: -sign * walker.d > away),
                      must_hold=True)
        else:
            stage.act(decide('nudge_{o}', 'parked_blocks', colour=colour, vehicle=kind,
                             side=side, other_side=other_side), around)

    return Blueprint(draw, layout, speed, push, populate, curvature, oncoming=False)
