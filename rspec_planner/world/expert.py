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
The expert driver: IDM along the lane, pure pursuit with feed-forward across it.

It follows a Maneuver that a scenario writes together with the Decision, so what it does and
what the text says come from one place. It reacts to the causal event only after t0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
import math

import numpy as np

from rspec_planner.world.road import Path, STEP
from rspec_planner.world.simulation import Actor, DT, EGO_FRONT, EGO_WIDTH, EgoState, idm

BRAKE_LIMIT = 4.0  # m/s^2; the limits asserted per clip are -4.05 .. 2.40
HARD_BRAKE_LIMIT = 6.0  # only where a person runs out
ACCELERATION_LIMIT = 2.3
CURVATURE_LIMIT = 0.2  # 1/m
COMFORT_STOP = 2.1  # m/s^2: braking for a line starts when this is needed
_LATERAL = 2.0  # m/s^2, curve speed is sqrt(_LATERAL / |curvature|)
_CURVE_BRAKE = 1.7  # m/s^2 towards a curve
_LEADERS = frozenset(('car', 'van', 'truck', 'bus', 'emergency', 'cyclist'))


@dataclass(frozen=True)
class Shift:
    """A quintic change of the lateral place: from station `start`, `length` metres long."""

    start: float
    length: float
    target: float  # d at the end, metres


@dataclass
class Maneuver:
    """What the expert does from t0 on."""

    desired: float  # speed without obstacles, m/s
    stop_at: float | None = None  # station where the front bumper comes to rest
    released: Callable[[], bool] | None = None  # the stop ends when this holds
    shifts: Sequence[Shift] = ()
    yield_to: Sequence[Actor] = ()  # leaders that are not yet in the lane
    ignore: Sequence[Actor] = ()  # handled by `shifts` or `stop_at` instead of IDM
    brake_limit: float = BRAKE_LIMIT
    ease_off: float = 0.0  # m/s^2 of braking at least, while above `desired`
    hard: bool = False  # brake for `stop_at` at once, whatever little is needed
    after: Sequence[Shift] = ()  # shifts once the wait is over, beyond a clip's horizon
    holding: bool = field(default=True)  # False once the stop was released


class SpeedLimit:
    """Highest speed along a path such that every curve is entered at its own speed."""

    def __init__(self, path: Path) -> None:
        """Sweep the curvature backwards once."""
        tight = np.maximum(np.abs(path.curvatures), 1e-4)
        stations = np.arange(len(tight)) * STEP
        cost = _LATERAL / tight + 2.0 * _CURVE_BRAKE * stations
        best = np.minimum.accumulate(cost[::-1])[::-1] - 2.0 * _CURVE_BRAKE * stations
        self._speeds = np.sqrt(np.maximum(best, 1.0)).tolist()

    def at(self, s: float) -> float:
        """Return the limit at station s, m/s."""
        return float(self._speeds[min(max(int(s / STEP), 0), len(self._speeds) - 1)])


def quintic(u: float) -> tuple[float, float, float]:
    """Return value, first and second derivative of the minimum-jerk step at u in [0, 1]."""
    u = min(max(u, 0.0), 1.0)
    return (u ** 3 * (10 - 15 * u + 6 * u * u), 30 * u * u * (1 - u) ** 2,
            60 * u * (1 - u) * (1 - 2 * u))


def offset_at(shifts: Sequence[Shift], s: float) -> tuple[float, float, float]:
    """Return the wanted d, its slope and its curvature at station s."""
    d = slope = bend = 0.0
    for shift in shifts:
        if s <= shift.start:
            break
        value, first, second = quintic((s - shift.start) / shift.length)
        rise = shift.target - d
        slope, bend = rise * first / shift.length, rise * second / shift.length ** 2
        d += rise * value
    return d, slope, bend


def steer(path: Path, ego: EgoState, s: float, d: float, heading: float,
          shifts: Sequence[Shift]) -> float:
    """Return the curvature that leads the ego back to its line, 1/m."""
    if ego.speed < 0.05:
        return 0.0
    ahead = s + 0.5 * ego.speed * DT
    want, slope, bend = offset_at(shifts, ahead)
    error = d + ego.speed * 0.5 * DT * math.sin(ego.yaw - heading) - want
    angle = ego.yaw + 0.0 - heading - math.atan(slope)
    angle = math.atan2(math.sin(angle), math.cos(angle))
    look = min(max(0.9 * ego.speed, 3.0), 12.0)
    bent = path.curvature(ahead)
    feed = bent / (1.0 - bent * want) + bend
    wanted = feed - 2.0 * error / look ** 2 - 2.0 * math.sin(angle) / look
    return min(max(wanted, -CURVATURE_LIMIT), CURVATURE_LIMIT)


def stop_acceleration(speed: float, distance: float, at_once: bool = False) -> float:
    """Return constant braking that ends at `distance`, or inf while it is not yet needed."""
    if distance <= 0.05:
        return -speed / DT if speed > 0.0 else 0.0
    needed = speed * speed / (2.0 * distance)
    if at_once or needed >= COMFORT_STOP or (speed < 1.0 and distance < 0.6):
        return -needed
    return math.inf


def leader_acceleration(ego: EgoState, s: float, maneuver: Maneuver, actors: Sequence[Actor]
                        ) -> float:
    """Return the smallest IDM acceleration over all leaders in the ego's way."""
    result = idm(ego.speed, maneuver.desired, 1e3, ego.speed)
    front = s + EGO_FRONT
    for actor in actors:
        if actor.kind not in _LEADERS or actor.reverse:
            continue
        gap = actor.rear - front
        if gap > 90.0 or gap < -2.0 or not actor.visible or actor in maneuver.ignore:
            continue
        want = offset_at(maneuver.shifts, actor.s)[0]
        apart = abs(actor.d - want) - 0.5 * (actor.size[1] + EGO_WIDTH)
        if apart < 0.25 or actor in maneuver.yield_to:
            result = min(result, idm(ego.speed, maneuver.desired, gap, actor.speed))
    return result


class Driver:
    """The expert on one path; its station follows the ego."""

    def __init__(self, path: Path, limit: SpeedLimit, maneuver: Maneuver, s: float) -> None:
        """Start near station s."""
        self.path, self.limit, self.maneuver = path, limit, maneuver
        self.s, self.d, self.heading = s, 0.0, 0.0

    def locate(self, ego: EgoState) -> None:
        """Find the ego on the path again."""
        self.s, self.d, self.heading = self.path.project(ego.x, ego.y, self.s)

    def curvature(self, ego: EgoState) -> float:
        """Return the curvature to steer from here, 1/m."""
        return steer(self.path, ego, self.s, self.d, self.heading, self.maneuver.shifts)

    def acceleration(self, ego: EgoState, actors: Sequence[Actor]) -> float:
        """Return the acceleration from here, m/s^2."""
        maneuver = self.maneuver
        if maneuver.holding and maneuver.released is not None and maneuver.released():
            maneuver.holding = False
        acceleration = leader_acceleration(ego, self.s, maneuver, actors)
        allowed = self.limit.at(self.s + ego.speed * DT)
        acceleration = min(acceleration, (allowed - ego.speed) / DT)
        if ego.speed > maneuver.desired + 0.1 and maneuver.ease_off:
            acceleration = min(acceleration, -maneuver.ease_off)
        if maneuver.stop_at is not None and maneuver.holding:
            distance = maneuver.stop_at - (self.s + EGO_FRONT)
            acceleration = min(acceleration,
                               stop_acceleration(ego.speed, distance, maneuver.hard))
            if ego.speed < 0.05 and distance < 1.5:
                acceleration = min(acceleration, 0.0)
        return min(max(acceleration, -maneuver.brake_limit), ACCELERATION_LIMIT)
