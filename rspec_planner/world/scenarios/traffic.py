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
"""Scenarios about vehicles: leaders, a cut-in, a blocked lane, a bus."""

from __future__ import annotations

from collections.abc import Sequence

from rspec_planner.world.expert import Maneuver, offset_at, quintic, Shift
from rspec_planner.world.reasoning import decide
from rspec_planner.world.road import Layout
from rspec_planner.world.scenarios.base import (
    Blueprint,
    COLOURS,
    Draw,
    fixed_speed,
    Rejected,
    Stage,
    stop_speeds,
    VEHICLES,
)
from rspec_planner.world.simulation import Actor, EGO_FRONT, SIZES

DRIVES_ON = 8.0  # seconds after t0, beyond a clip: a leader that braked goes on


def _any_layout(draw: Draw) -> Layout:
    return Layout(width=draw.uniform(3.3, 3.7), left=draw.choice((0, 0, 1)),
                  right=draw.choice((0, 0, 1)), oncoming=draw.choice((0, 1, 1)))


def lead(stage: Stage, draw: Draw, gap: float, push: float, event: bool, when: float,
         brake: float, shifts: Sequence[Shift] = (), late: bool = False) -> Actor:
    """Add a leader that keeps the ego's pace along `shifts` and, in the event, brakes."""
    def script(vehicle: Actor, tau: float) -> None:
        vehicle.speed = fixed_speed(stage.speed, push, tau)
        vehicle.brake = event and tau >= when
        if vehicle.brake:
            vehicle.speed = max(0.0, fixed_speed(stage.speed, push, when) - brake * (tau - when))
        if vehicle.brake and tau >= DRIVES_ON:
            vehicle.brake, vehicle.speed = False, min(stage.speed, 1.2 * (tau - DRIVES_ON))
        vehicle.d, vehicle.drift, _ = offset_at(shifts, vehicle.s)
    return stage.add(draw.vehicle, gap, 0.0, rear=True, late=late, script=script,
                     speed=stage.speed, push=push, colour=COLOURS[draw.colour])


def lead_brake(draw: Draw) -> Blueprint:
    """Twin A: the leader brakes; twin B: it drives on."""
    word, gap = draw.distance((10.0, 15.0), (20.5, 28.0), (37.0, 48.0))
    speeds = {'close': (3.3, (gap - 3.6) / 1.0), 'midway': (5.0, 12.5), 'far': (9.0, 16.0)}[word]
    speed, push = draw.motion(*speeds)
    curvature = draw.bend(speed, push, gap)
    when, brake = draw.event_time(), draw.uniform(2.2, 3.2) + (0.6 if word == 'far' else 0.0)
    layout = _any_layout(draw)

    def populate(stage: Stage, event: bool) -> None:
        lead(stage, draw, gap, push, event, when, brake)
        slots = {'colour': draw.colour, 'vehicle': draw.vehicle, 'distance': word}
        key = ('brake', 'lead_braking') if event else ('follow', 'lead_driving')
        maneuver = Maneuver(speed)
        if event:
            maneuver = Maneuver(speed * 0.6, ease_off=0.6)
        stage.act(decide(*key, **slots), maneuver)

    return Blueprint(draw, layout, speed, push, populate, curvature,
                     distractors=('parked', 'cones', 'cyclist', 'walker', 'bus', 'zebra',
                                  'neighbour'))


def lead_departs(draw: Draw) -> Blueprint:
    """From standstill. Twin A: the leader pulls away; twin B: it stays."""
    gap, when, pull = draw.uniform(6.4, 9.0), draw.event_time(), draw.uniform(1.5, 2.2)
    layout, desired = _any_layout(draw), draw.uniform(6.0, 10.0)

    def populate(stage: Stage, event: bool) -> None:
        def script(lead: Actor, tau: float) -> None:
            leaving = event and tau >= when
            lead.brake = not leaving
            lead.speed = min(desired + 1.0, pull * (tau - when)) if leaving else 0.0
        stage.add(draw.vehicle, gap, 0.0, rear=True, script=script, brake=True,
                  colour=COLOURS[draw.colour])
        slots = {'colour': draw.colour, 'vehicle': draw.vehicle}
        if event:
            stage.act(decide('start', 'lead_leaving', **slots), Maneuver(desired))
        else:
            stage.act(decide('wait', 'lead_standing', **slots), stage.stop_before(EGO_FRONT))

    return Blueprint(draw, layout, 0.0, 0.0, populate,
                     distractors=('parked', 'cones', 'walker', 'bus'))


def merge(stage: Stage, draw: Draw, gap: float, pace: float, event: bool, when: float,
          rate: float, sign: float, rest: float = 0.0) -> Actor:
    """Add a vehicle in the next lane (`sign` 1: left); in the event it moves to d = `rest`."""
    width = stage.layout.width

    def script(other: Actor, tau: float) -> None:
        if event and tau >= when:
            other.indicator = 'right' if sign > 0 else 'left'
            gone = min(width - rest, rate * (tau - when))
            other.d = sign * (width - gone)
            # straighten up in time, so that no corner swings beyond the final place
            other.drift = -sign * min(rate / pace, 2.0 * (width - rest - gone) / other.size[0])
    stage.blinker = stage.add(draw.vehicle, gap, sign * width, rear=True, speed=pace,
                              script=script, colour=COLOURS[draw.colour])
    return stage.blinker


def cut_in(draw: Draw) -> Blueprint:
    """Twin A: a vehicle ahead in the next lane signals and moves over; twin B: it stays."""
    side = draw.choice(('left', 'right'))
    sign = 1.0 if side == 'left' else -1.0
    gap = draw.uniform(14.0, 26.0)
    speed, push = draw.motion(5.5, min(16.0, gap - 3.6))
    curvature = draw.bend(speed, push, gap + 4.0)
    pace, when, rate = draw.uniform(0.8, 0.93) * speed, draw.event_time(), draw.uniform(1.2, 1.5)
    layout = Layout(width=draw.uniform(3.3, 3.6), left=1 if sign > 0 else 0,
                    right=0 if sign > 0 else 1, oncoming=draw.choice((0, 1)))

    def populate(stage: Stage, event: bool) -> None:
        other = merge(stage, draw, gap, pace, event, when, rate, sign)
        slots = {'colour': draw.colour, 'vehicle': draw.vehicle, 'side': side}
        if event:
            stage.act(decide('slow', 'cutting_in', **slots),
                      Maneuver(pace * 0.85, yield_to=(other,), ease_off=1.0, brake_limit=3.0))
        else:
            stage.act(decide('keep_speed', 'keeping_lane', **slots), Maneuver(speed))

    return Blueprint(draw, layout, speed, push, populate, curvature,
                     distractors=('zebra', 'walker') + (('parked', 'cones') if sign > 0 else ()))


def blocked_lane(draw: Draw) -> Blueprint:
    """Twin A: the left lane is free; twin B: somebody passes there (cross_left sees it)."""
    gap = draw.uniform(20.0, 36.0)
    room = gap - EGO_FRONT - 3.0
    low, high = stop_speeds(room, 2.8)
    speed, push = draw.motion(max(low, 3.4), min(high, (gap - 5.5) / 2.2))
    curvature = draw.bend(speed, push, gap + 4.0)
    other_kind, other_colour = draw.choice(VEHICLES), draw.choice(tuple(COLOURS))
    faster, beside = draw.uniform(0.3, 2.0), draw.uniform(0.8, 3.8)
    layout = Layout(width=draw.uniform(3.3, 3.6), left=1, oncoming=draw.choice((0, 1)))
    length = max(8.0, 2.9 * speed)

    def populate(stage: Stage, event: bool) -> None:
        blocker = stage.add(draw.vehicle, gap, 0.0, rear=True, indicator='hazard',
                            colour=COLOURS[draw.colour])
        stage.blinker = blocker
        slots = {'colour': draw.colour, 'vehicle': draw.vehicle}
        if event:
            shift = Shift(stage.s0 + 0.15 * speed, length, layout.width)
            stage.act(decide('change_left', 'lane_blocked', **slots),
                      Maneuver(speed, shifts=(shift,), ignore=(blocker,)))
            return

        def script(other: Actor, tau: float) -> None:
            other.speed = fixed_speed(speed, push, tau) + faster
        stage.add(other_kind, beside, layout.width, late=True, speed=speed + faster, push=push,
                  script=script, colour=COLOURS[other_colour])
        stage.act(decide('stop', 'left_occupied', other_vehicle=other_kind, **slots),
                  stage.stop_before(gap - 3.0, ignore=(blocker,)))

    return Blueprint(draw, layout, speed, push, populate, curvature, distractors=('walker',))


def bus_stop(draw: Draw) -> Blueprint:
    """Twin A: the bus signals, turns its wheels and pulls out; twin B: it waits."""
    gap = draw.uniform(13.0, 27.0)
    low = 4.5
    speed, push = draw.motion(low, min(11.0, 2.0 + (gap - 3.6) / 1.9))
    curvature = draw.bend(speed, push, gap + 5.0)
    when, pull = draw.event_time(), draw.uniform(1.0, 1.4)
    layout = Layout(width=draw.uniform(3.4, 3.7), left=draw.choice((0, 1)),
                    oncoming=draw.choice((0, 1)), shoulder=3.2)
    bay = layout.right_edge - 1.55

    def populate(stage: Stage, event: bool) -> None:
        def script(bus: Actor, tau: float) -> None:
            if event and tau >= when:
                since = tau - when
                bus.indicator, bus.speed = 'left', min(7.0, pull * since)
                value, slope, _ = quintic((since + 0.3) / 5.0)
                bus.d = bay * (1.0 - value)
                bus.drift = min(0.22, 0.5 * since, -bay * slope / 5.0 / max(0.5, bus.speed))
                bus.steer = 0.45 if since < 2.0 else 0.0
        bus = stage.add('bus', gap, bay, rear=True, script=script, colour=COLOURS[draw.colour])
        stage.blinker = bus
        stage.put('bus_stop', gap + SIZES['bus'][0] - 2.0, layout.right_edge - 4.6)
        if event:
            stage.act(decide('slow', 'bus_pulling_out', colour=draw.colour),
                      Maneuver(min(2.5, speed * 0.5), yield_to=(bus,), ease_off=1.6,
                               brake_limit=3.5))
        else:
            shift = Shift(stage.s0 + 0.15 * speed, max(8.0, 2.5 * speed), 0.6)
            back = Shift(bus.s + 9.0, max(10.0, 3.0 * speed), 0.0)
            stage.act(decide('pass', 'bus_waiting', colour=draw.colour),
                      Maneuver(speed, shifts=(shift, back)))

    if speed < low:
        raise Rejected('too slow to tell passing from yielding')
    return Blueprint(draw, layout, speed, push, populate, curvature,
                     distractors=('walker', 'far_parked', 'neighbour'))
