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
"""One leg of a drive: free road, then the place of one scenario, ready to be driven."""

from __future__ import annotations

from dataclasses import dataclass, field
import math

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.expert import Shift, SpeedLimit
from rspec_planner.world.generate import check, opener_clear, roll
from rspec_planner.world.road import Path
from rspec_planner.world.scenarios import draw_blueprint
from rspec_planner.world.scenarios.base import AHEAD, BEHIND, Blueprint, Rejected, Stage
from rspec_planner.world.scenarios.surroundings import surround
from rspec_planner.world.scene import Paint
from rspec_planner.world.simulation import Actor, DT, follow_ego

LEAD_TIME = 5.0  # seconds between the start of a script and its t0
STANDING_LEAD_TIME = 2.0  # the same where the ego stands at t0
_TRIES = 400
_WIDEST = 1.9  # radians that two legs in a row may turn, so that roads do not cross
LEAVING = frozenset(('car', 'van', 'truck', 'bus', 'emergency'))
_EXIT = 34.0  # metres of side road that a turning leg still owns


@dataclass
class Leg:
    """A stretch of road with one scenario; stations count from its start."""

    family: str
    event: bool
    blueprint: Blueprint
    stage: Stage
    limit: SpeedLimit
    paints: list[Paint]
    start_yaw: float
    tau: float  # script time relative to t0; it stands still until `started`
    started: bool = False
    cleared: bool = False  # the script is over, what hindered the ego gives way
    guests: list[Actor] = field(default_factory=list)  # leaders that came along from before

    @property
    def path(self) -> Path:
        """Return the ego's way through this leg."""
        return self.stage.path

    @property
    def standing(self) -> bool:
        """Tell whether the ego stands at t0."""
        return self.blueprint.speed == 0.0

    @property
    def actors(self) -> list[Actor]:
        """Return everybody on this leg."""
        return self.stage.actors + self.guests

    def end(self) -> tuple[float, float, float]:
        """Return the pose where the next leg begins."""
        return self.path.pose(self.path.length)

    def start(self) -> None:
        """Let the script run: `tau` counts from here."""
        self.started = True
        for actor in self.stage.actors:
            if actor.kind in LEAVING:
                actor.visible = True

    def advance(self, station: float, ego_speed: float) -> None:
        """Move all agents by one step; `station` is the ego's rear axle on this leg."""
        for guest in self.guests:
            guest.advance(0.0)
        if not self.started:
            return
        self.tau += DT
        for actor in self.stage.actors:
            actor.advance(self.tau)
        behind = self.stage.trailing
        if behind is not None:
            gap = station - 0.9 - behind.s - behind.size[0] / 2.0
            follow_ego(behind, gap, ego_speed)

    def clear(self, station: float) -> None:
        """End the script: lights turn green, gates open, traffic ahead of `station` leaves."""
        self.cleared = True
        for actor in self.stage.actors:
            if actor.kind == 'traffic_light':
                actor.script, actor.lamp = None, 'green'
            elif actor.kind == 'crossing_gate':
                actor.open, actor.lamp = 1.0, ''
            elif actor.kind == 'deer':
                actor.visible = False
            elif actor.kind == 'cyclist' and abs(actor.d) < 1.6:
                actor.script = _turn_off
            elif (actor.kind in LEAVING and not actor.reverse and actor.s > station
                    and actor.path is self.stage.road):
                if abs(actor.d) < 1.6 or actor.speed > 0.5 or actor.indicator == 'hazard':
                    actor.script, actor.brake, actor.indicator = leave, False, ''
                    actor.drift = actor.steer = 0.0


def _turn_off(actor: Actor, tau: float) -> None:
    """Ride off the lane onto the verge."""
    actor.d = max(-4.2, actor.d - 1.6 * DT)
    actor.speed = max(2.0, actor.speed - 0.1)


def leave(actor: Actor, tau: float) -> None:
    """Speed up and drive out of sight."""
    actor.speed = min(22.0, actor.speed + 1.6 * DT)
    if abs(actor.d) < 1.6:
        actor.d *= 0.95


def _approach(actor: Actor, tau: float, room: float) -> None:
    """Put a vehicle `room` metres farther away, to close in until 2 s before t0."""
    script, away, sign = actor.script, -tau - 2.0, 1.0 if room > 0 else -1.0
    rate = min(0.8 * actor.speed, 2.0 * abs(room) / away) / away  # m/s^2

    def later(self: Actor, now: float) -> None:
        if script is not None:
            script(self, now)
        elif now > -2.0:
            return
        else:
            self.speed = pace
        self.speed -= sign * rate * max(0.0, -2.0 - now)

    pace = actor.speed
    actor.s += sign * rate * away * away / 2.0
    actor.speed -= sign * rate * away
    actor.script = later


def _prepare(leg_tau: float, stage: Stage) -> None:
    """Set lamps of the waiting world and hide vehicles that have not come yet."""
    for actor in stage.actors:
        if actor.script is not None:
            actor.script(actor, leg_tau)
        moving = actor.speed > 0.0
        if actor is stage.trailing or (actor.kind in LEAVING and moving):
            actor.visible = False
            if moving and not actor.reverse and leg_tau < -2.5 and actor.path is stage.road:
                _approach(actor, leg_tau, 40.0 if actor.s > stage.s0 - 60.0 and
                          actor is not stage.trailing else -30.0)


def _roads(blueprint: Blueprint, event: bool, free: float, pose: tuple[float, float, float]
           ) -> tuple[Path, Path]:
    """Return the main road and the ego's way, both from `pose` with `free` metres first."""
    lead_in = [(free, 0.0)]
    if blueprint.turn is not None:
        road = Path([(free + BEHIND + AHEAD, 0.0)], *pose)
        return road, Path(lead_in + blueprint.turn()[:-1] + [(_EXIT, 0.0)], *pose)
    if blueprint.pieces is not None:
        pieces = blueprint.pieces(event)
    else:
        tail = max(50.0, 6.4 * blueprint.speed)
        pieces = [(BEHIND - 26.0, 0.0), (74.0, blueprint.curvature), (tail, 0.0)]
    road = Path(lead_in + pieces, *pose)
    return road, road


def _usable(blueprint: Blueprint, event: bool) -> bool:
    """Tell whether a drawn scenario suits a drive: steady before t0, and safe."""
    if abs(blueprint.acceleration) > 0.13 or 0.0 < blueprint.speed < 2.8:
        return False
    rollout = roll(blueprint, event, 0.0)
    return not check(rollout) and opener_clear(rollout)


def build_leg(family: str, seed: int, event: bool, pose: tuple[float, float, float],
              heading: float = 0.0) -> Leg:
    """
    Return a leg that begins at `pose` (x, y, heading); the last one began with `heading`.

    Raises ConfigurationError when no drawn scenario suits.
    """
    for attempt in range(_TRIES):
        try:
            blueprint = draw_blueprint(family, seed, attempt)
        except Rejected:
            continue
        free = 12.0 + LEAD_TIME * max(blueprint.speed, 5.0)
        road, path = _roads(blueprint, event, free, pose)
        bent = abs(path.pose(path.length)[2] - heading)
        if bent > _WIDEST and blueprint.turn is None:
            continue
        if not _usable(blueprint, event):
            continue
        standing = blueprint.speed == 0.0
        tau = -STANDING_LEAD_TIME if standing else -LEAD_TIME
        stage = Stage(road, path, free + BEHIND, blueprint.layout, blueprint.speed,
                      lead_time=-tau)
        blueprint.populate(stage, event)
        surround(stage, blueprint.draw, blueprint, -stage.s0 + 12.0,
                 road.length - stage.s0 - 14.0)
        paints = stage.paints(0.0, road.length)
        _prepare(tau, stage)
        return Leg(family, event, blueprint, stage, SpeedLimit(path), paints, pose[2], tau)
    raise ConfigurationError(f'family {family!r} found no place on the route in {_TRIES} draws; '
                             'use another seed or fewer turns')


def returning(s: float, d: float, speed: float) -> tuple[Shift, ...]:
    """Return shifts that lead from the present offset `d` back to the lane centre."""
    if abs(d) < 0.05:
        return ()
    length = max(12.0, 3.2 * max(speed, 4.0))
    return (Shift(-1e6, 1.0, d), Shift(s + 1.0, length * max(1.0, math.sqrt(abs(d) / 2.0)), 0.0))
