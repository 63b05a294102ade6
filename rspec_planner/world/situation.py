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
What a scenario has come to some seconds after t0, in the sentences of the catalogue.

A scenario's own decision is that of t0. Later the light is reached, the cyclist is passed, the
lane is changed: here the decision is written again from where everybody is now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rspec_planner.world.clip import Decision
from rspec_planner.world.reasoning import CREEPING_BELOW, decide, STOPPED_BELOW
from rspec_planner.world.scenarios.base import COLOURS, PERSONS, Stage
from rspec_planner.world.simulation import Actor, EGO_FRONT

_LEAD, _LIGHT, _SIGN, _RIDER = (17.8, 32.5), (20.2, 33.0), (19.0, 32.0), (17.8, 31.0)
#: cause -> metres between close and midway, midway and far: the middles of the scenarios' gaps
_EDGES = {'lead_braking': _LEAD, 'lead_driving': _LEAD, 'light_red': _LIGHT,
          'light_amber': _LIGHT, 'light_green': _LIGHT, 'stop_sign': _SIGN, 'no_sign': _SIGN,
          'cyclist_in_lane': _RIDER, 'cyclist_on_path': _RIDER}
_UNCLEAR_M = 0.7  # nobody can tell two words apart so near to an edge
_FARTHEST_M = 60.0  # beyond every trained distance
_TURN_TAIL_M = 60.0  # of straight road behind the turn of an ego's way
_BEND = 0.031  # 1/m, the mildest sharp bend
_VEHICLES = ('car', 'van', 'truck')
#: causes that stand by the road or drive along it, judged by what is passed
_BESIDE = frozenset(('person_waiting', 'parked_alone', 'parked_blocks', 'parked_leaves_room',
                     'cones_close', 'cones_shoulder', 'cyclist_in_lane', 'cyclist_on_path',
                     'bus_waiting', 'keeping_lane', 'no_sign'))


@dataclass(frozen=True)
class Moment:
    """Where the ego is in a stage at one instant."""

    stage: Stage
    other: Decision  # of the twin, which names what else is in the scene
    s: float  # station of the rear axle on the ego's way, metres
    d: float  # left of its lane at t0, metres
    speed: float  # m/s


def decision_now(moment: Moment) -> Decision | None:
    """Return what the expert does now and why; None where no sentence is honest."""
    stage = moment.stage
    assert stage.decision is not None and stage.maneuver is not None
    return _decision(moment, stage.decision)


def _decision(moment: Moment, decision: Decision) -> Decision | None:
    """Return a decision brought up to date."""
    cause = decision.cause
    if cause in _BESIDE:
        return _beside(moment, decision)
    rule = _RULES.get(cause)
    return decision if rule is None else rule(moment, decision)


def _straight() -> Decision:
    return decide('keep_straight', 'road_straight')


def _at(decision: Decision, ahead: float) -> Decision | None:
    """Return a decision with the distance word for `ahead` metres."""
    near, far = _EDGES[decision.cause]
    if min(abs(ahead - near), abs(ahead - far)) < _UNCLEAR_M or ahead > _FARTHEST_M:
        return None
    word = 'close' if ahead < near else 'midway' if ahead < far else 'far'
    return replace(decision, attributes={**decision.attributes, 'distance': word})


def _named(moment: Moment, decision: Decision) -> Actor | None:
    """Return the vehicle that a decision names; a parked one stands on the side that it names."""
    words = decision.attributes
    for actor in moment.stage.actors:
        if actor.kind != words['vehicle'] or actor.colour != COLOURS[words['colour']]:
            continue
        if decision.cause.startswith('parked') and (
                actor.speed > 0.0 or (actor.d > 0.0) != (words['side'] == 'left')):
            continue
        return actor
    return None


def _kind(moment: Moment, *kinds: str) -> list[Actor]:
    return [actor for actor in moment.stage.actors if actor.kind in kinds]


def _evidence(moment: Moment, decision: Decision) -> tuple[float, float] | None:
    """Return stations of the near and the far end of what a cause names."""
    cause, stage = decision.cause, moment.stage
    if cause == 'no_sign':
        assert stage.line is not None
        return stage.line + 0.8, stage.line + 0.8
    if cause == 'person_waiting':
        found = [a for a in _kind(moment, *PERSONS.values()) if a.s > stage.s0][:1]
    elif cause.startswith('cones'):
        found = [a for a in _kind(moment, 'cone') if a.s > stage.s0]
    elif cause.startswith('cyclist'):
        found = _kind(moment, 'cyclist')[:1]
    elif cause == 'bus_waiting':
        found = _kind(moment, 'bus')[:1]
    else:
        named = _named(moment, decision)
        found = [] if named is None else [named]
    if not found:
        return None
    return (min(a.rear for a in found), max(a.rear + a.size[0] for a in found))


def _beside(moment: Moment, decision: Decision) -> Decision | None:
    """Return the decision until what it names is passed, then that of the free road."""
    ends = _evidence(moment, decision)
    if ends is None:
        return None
    if ends[1] < moment.s + 0.5:
        return _straight()
    return _at(decision, ends[0] - moment.s) if decision.cause in _EDGES else decision


def _lead(moment: Moment, decision: Decision) -> Decision | None:
    leader = _named(moment, decision)
    if leader is None or leader.rear < moment.s + EGO_FRONT:
        return None
    words = {name: decision.attributes[name] for name in ('colour', 'vehicle')}
    gap = leader.rear - moment.s
    if leader.speed < STOPPED_BELOW and moment.speed < STOPPED_BELOW:
        return decide('wait', 'lead_standing', **words)
    if leader.brake:
        return _at(decide('brake', 'lead_braking', distance='close', **words), gap)
    if moment.speed < CREEPING_BELOW and leader.speed > moment.speed + 0.5:
        return decide('start', 'lead_leaving', **words)
    return _at(decide('follow', 'lead_driving', distance='close', **words), gap)


def _light(moment: Moment, decision: Decision) -> Decision | None:
    """Return what a light ahead asks for, whatever it asked for at t0."""
    lights = [a for a in _kind(moment, 'traffic_light') if a.s > moment.s - 1.0]
    if not lights:
        return _straight()
    light = min(lights, key=lambda a: a.s)
    if light.lamp == 'red' and moment.speed < STOPPED_BELOW:
        return decide('wait', 'light_still_red')
    ahead = light.s - moment.s
    if light.lamp in ('red', 'amber'):
        return _at(decide('stop', 'light_{l}', lamp=light.lamp, distance='close'), ahead)
    started = decision.cause == 'light_turned_green' and moment.speed < CREEPING_BELOW
    if started:
        return decision
    return _at(decide('continue', 'light_green', distance='close'), ahead)


def _sign(moment: Moment, decision: Decision) -> Decision | None:
    signs = [a for a in _kind(moment, 'stop_sign') if a.s > moment.s - 1.0]
    return _at(decision, min(a.s for a in signs) - moment.s) if signs else None


def _released(moment: Moment) -> bool:
    maneuver = moment.stage.maneuver
    assert maneuver is not None
    return not maneuver.holding or (maneuver.released is not None and maneuver.released())


def _stepping(moment: Moment, decision: Decision) -> Decision | None:
    """Return the yield until the person has left our lane, then what else is in the scene."""
    sign = 1.0 if decision.attributes['side'] == 'left' else -1.0
    walkers = [a for a in _kind(moment, *PERSONS.values()) if a.gait > 0.0]
    away = bool(walkers) and -sign * walkers[0].d > moment.stage.layout.width / 2 + 0.4
    if not (away or _released(moment)):
        return decision
    return _straight() if moment.other.cause == 'person_waiting' \
        else _decision(moment, moment.other)


def _running(moment: Moment, decision: Decision) -> Decision | None:
    return _decision(moment, moment.other) if _released(moment) else decision


def _cutting(moment: Moment, decision: Decision) -> Decision | None:
    """Return the slowing until the other one drives straight in its new place."""
    other = _named(moment, decision)
    if other is None or other.rear < moment.s + EGO_FRONT:
        return None
    if not (other.indicator and other.drift == 0.0):
        return decision
    return _lead(moment, decision) if moment.other.cause == 'keeping_lane' \
        else _decision(moment, moment.other)


def _blocked(moment: Moment, decision: Decision) -> Decision | None:
    """
    Return the change until the blocker is passed.

    A sentence of its own for the drive beside it was tried: said a second too early, it ended
    the change with half the vehicle in the old lane.
    """
    blocker = _named(moment, decision)
    if blocker is None:
        return None
    passed = blocker.rear + blocker.size[0] < moment.s + 0.5
    return _straight() if passed else decision


def _occupied(moment: Moment, decision: Decision) -> Decision | None:
    """Return the stop until the ego rests behind the blocker."""
    if moment.speed >= STOPPED_BELOW:
        return decision
    return decide('wait', 'lead_standing',
                  **{name: decision.attributes[name] for name in ('colour', 'vehicle')})


def _turn(moment: Moment, decision: Decision) -> Decision | None:
    """Return the wait until the way is free, the turn until the side road runs straight."""
    if decision.action == 'wait':
        return _turn(moment, moment.other) if _released(moment) else decision
    return _straight() if moment.s > moment.stage.path.length - _TURN_TAIL_M else decision


def _bend(moment: Moment, decision: Decision) -> Decision | None:
    path = moment.stage.path
    ahead = np.arange(moment.s + 1.0, moment.s + 32.0, 1.0)
    sharp = any(abs(path.curvature(float(s))) > _BEND for s in ahead)
    return decision if sharp else _straight()


_RULES: dict[str, Callable[[Moment, Decision], Decision | None]] = {
    'lead_braking': _lead, 'lead_driving': _lead, 'lead_leaving': _lead, 'lead_standing': _lead,
    'light_red': _light, 'light_amber': _light, 'light_green': _light,
    'light_turned_green': _light, 'light_still_red': _light, 'stop_sign': _sign,
    'person_stepping': _stepping, 'person_running': _running, 'cutting_in': _cutting,
    'lane_blocked': _blocked, 'left_occupied': _occupied, 'oncoming_close': _turn,
    'oncoming_free': _turn, 'person_crossing': _turn, 'crosswalk_free': _turn,
    'road_bends': _bend}
