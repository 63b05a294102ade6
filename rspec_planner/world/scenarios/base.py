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
"""What every scenario is drawn from and drawn onto: Draw, Stage, Blueprint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
import hashlib
import math
from typing import Any, TypeVar

import numpy as np

from rspec_planner.world.clip import Decision
from rspec_planner.world.expert import Maneuver
from rspec_planner.world.road import Layout, Path, road_paints, stop_line
from rspec_planner.world.scene import AgentState, Colour, Paint, Weather
from rspec_planner.world.simulation import Actor, SIZES

T = TypeVar('T')

BEHIND, AHEAD = 60.0, 130.0  # metres of road of one clip before and after s0
COLOURS: dict[str, Colour] = {
    'red': (204, 30, 34), 'blue': (28, 74, 214), 'white': (240, 240, 240),
    'black': (20, 20, 23), 'green': (24, 150, 62), 'yellow': (240, 206, 24)}
VEHICLES = ('car', 'van', 'truck')
WEATHERS = ('clear', 'fog', 'rain', 'night')
_WEATHER_SHARES = (0.58, 0.14, 0.14, 0.14)
PERSONS = {'child': 'child', 'pedestrian': 'adult', 'dog': 'dog'}  # word -> agent kind
CLOTHES: tuple[Colour, ...] = ((220, 60, 40), (40, 90, 200), (240, 200, 40), (230, 230, 230),
                               (60, 160, 80))
#: families that need a straight road at t0
STRAIGHT = frozenset(('lead_departs', 'light_change', 'left_turn', 'right_turn',
                      'level_crossing', 'roundabout', 'emergency', 'narrowing'))
#: families whose evidence lies outside the headlights
DAY_ONLY = frozenset(('right_turn', 'blocked_lane'))


class Rejected(Exception):
    """The drawn numbers allow no scene that keeps every rule; draw again."""


@lru_cache(maxsize=256)
def _kept_back(family: str, sign: int) -> tuple[str, str]:
    """Return the one pair of weather and vehicle that a family never shows in training."""
    pairs = [(weather, vehicle) for weather in WEATHERS for vehicle in VEHICLES
             if weather != 'night' or family not in DAY_ONLY]
    return min(pairs, key=lambda pair: hashlib.blake2b(
        f'{family}/{sign}/{pair[0]}/{pair[1]}'.encode(), digest_size=8).digest())


def held_out(family: str, weather: str, vehicle: str, sign: int) -> bool:
    """Tell whether a combination is kept for the off-shelf test (one in twelve, or nine)."""
    return (weather, vehicle) == _kept_back(family, sign)


class Draw:
    """Random numbers of one clip; no draw may depend on `event`, so that twins share all."""

    def __init__(self, family: str, seed: int, attempt: int, want_held_out: bool = False
                 ) -> None:
        """Choose weather, vehicle kind and curvature sign; the rest is drawn on demand."""
        self.rng = np.random.default_rng([seed, attempt])
        self._around = (seed, attempt, 1)
        for _ in range(1000):
            self.weather_name: str = str(self.rng.choice(WEATHERS, p=_WEATHER_SHARES))
            self.vehicle: str = str(self.rng.choice(VEHICLES))
            self.sign = int(self.rng.choice((0, 1, -1), p=(0.5, 0.25, 0.25)))
            self.sign = 0 if family in STRAIGHT else self.sign
            if self.weather_name == 'night' and family in DAY_ONLY:
                continue
            if held_out(family, self.weather_name, self.vehicle, self.sign) == want_held_out:
                break
        else:
            raise Rejected(f'{family} has no held-out combination')
        self.colour: str = self.choice(tuple(COLOURS))
        self.weather = self._weather()
        self.noise_seed = int(self.rng.integers(1 << 31))

    def around(self) -> np.random.Generator:
        """Return a fresh generator for the surroundings, the same for both twins."""
        return np.random.default_rng(self._around)

    def _weather(self) -> Weather:
        name = self.weather_name
        if name == 'fog':
            return Weather(light=self.uniform(0.75, 1.05), fog=self.uniform(0.006, 0.011))
        if name == 'rain':
            return Weather(light=self.uniform(0.7, 0.9), fog=self.uniform(0.001, 0.004),
                           rain=self.uniform(0.4, 1.0))
        if name == 'night':
            return Weather(light=self.uniform(0.9, 1.05), night=True)
        return Weather(light=self.uniform(0.7, 1.08), fog=self.uniform(0.0, 0.003))

    def uniform(self, low: float, high: float) -> float:
        """Return a number in [low, high)."""
        return float(self.rng.uniform(low, high))

    def choice(self, items: Sequence[T]) -> T:
        """Return one of `items`."""
        return items[int(self.rng.integers(len(items)))]

    def flag(self, probability: float) -> bool:
        """Return True with the given probability."""
        return bool(self.rng.random() < probability)

    def event_time(self, gait: bool = False) -> float:
        """Return when the causal fact switches, seconds relative to t0."""
        return -self.uniform(0.3, 0.8) if gait else -self.uniform(0.15, 0.45)

    def distance(self, close: tuple[float, float], midway: tuple[float, float],
                 far: tuple[float, float]) -> tuple[str, float]:
        """Return a distance word and metres in its bin; bins keep gaps between them."""
        word, bounds = self.choice((('close', close), ('midway', midway), ('far', far)))
        return word, self.uniform(*bounds)

    def motion(self, low: float, high: float, creeping: bool = False) -> tuple[float, float]:
        """
        Return speed at t0 and acceleration before t0, clear of the opener's thresholds.

        `low` .. `high` bounds the speed at t0, m/s.
        """
        lowest = 3.3 if self.sign == 0 else 5.0
        floors = {'cruising': lowest, 'slowing': lowest + 0.2, 'accelerating': lowest + 0.6}
        weights = {'cruising': 8, 'slowing': 4, 'accelerating': 4}
        modes = [m for m, w in weights.items() for _ in range(w) if high > floors[m] + 0.05]
        if creeping and self.sign == 0 and low < 1.8:
            modes += ['creeping'] * 4
        if not modes:
            raise Rejected('no speed fits')
        mode = self.choice(modes)
        if mode == 'creeping':
            return self.uniform(max(low, 0.8), min(high, 2.2)), 0.0
        floor = floors[mode]
        speed = self.uniform(max(low, floor), high) if low < high else high
        if mode == 'cruising':
            return speed, self.uniform(-0.12, 0.12)
        push = self.uniform(0.75, 1.5)
        return speed, -push if mode == 'slowing' else push

    def bend(self, speed: float, acceleration: float, reach: float) -> float:
        """
        Return the road's curvature: visible in the history, evidence still in the tele view.

        `reach` is the distance of the evidence, metres. Raises Rejected if both cannot hold.
        """
        if self.sign == 0:
            return 0.0
        driven = 1.5 * speed - 1.125 * acceleration
        least = 0.46 / driven ** 2
        most = min(0.36 / reach, 1.7 / speed ** 2, 0.03)
        if least > most:
            raise Rejected('no curvature fits')
        return self.sign * self.uniform(least, min(most, 2.0 * least))


@dataclass
class Stage:
    """One place on a road, being furnished; stations are counted from the ego at t0."""

    road: Path  # centre of the ego lane along the main road
    path: Path  # the way of the ego; another one when it turns
    s0: float  # station of the ego's rear axle at t0
    layout: Layout
    speed: float  # of the ego at t0, m/s
    lead_time: float = 1.5  # seconds between the start and t0
    actors: list[Actor] = field(default_factory=list)
    statics: list[AgentState] = field(default_factory=list)
    marks: list[Paint] = field(default_factory=list)  # on top of the road
    ground: list[Paint] = field(default_factory=list)  # under the road: side roads
    gaps: list[tuple[float, float]] = field(default_factory=list)
    clear: list[tuple[float, float]] = field(default_factory=list)  # no houses there
    drivable: list[np.ndarray] = field(default_factory=list)
    line: float | None = None  # station of the stop line
    trailing: Actor | None = None
    blinker: Actor | None = None  # whose indicator must be lit at t0
    decision: Decision | None = None
    maneuver: Maneuver | None = None
    must_hold: bool = False  # the line may not be crossed before t0 + 6.4 s, unless released

    def add(self, kind: str, ahead: float, d: float, *, rear: bool = False, late: bool = False,
            push: float = 0.0, **options: Any) -> Actor:
        """
        Add an actor that is `ahead` metres from the ego's rear axle at t0, centre or `rear` end.

        `speed` is its speed at t0 without the event, `push` its acceleration before t0.
        `late` marks one that only one twin has, so that it takes no id from the others.
        """
        length = (options.get('size') or SIZES[kind])[0]
        actor = Actor(kind, self.road, self.s0 + ahead + (length / 2.0 if rear else 0.0), d,
                      **options)
        driven = actor.speed * self.lead_time - push * self.lead_time ** 2 / 2.0
        actor.s += driven if actor.reverse else -driven
        actor.speed -= push * self.lead_time
        used = [a.agent_id for a in self.actors if (a.agent_id >= 700) == late]
        actor.agent_id = max(used, default=699 if late else -1) + 1
        self.actors.append(actor)
        return actor

    def put(self, kind: str, ahead: float, d: float, size: tuple[float, float, float] | None
            = None, colour: Colour = (120, 120, 120), turned: float = 0.0) -> None:
        """Add an object that never moves and that nothing collides with."""
        x, y, heading = self.road.pose(self.s0 + ahead, d)
        self.statics.append(AgentState(kind, x, y, heading + turned, *(size or SIZES[kind]),
                                       colour=colour))

    def stop_line(self, ahead: float) -> None:
        """Paint a stop line across the lanes of our direction."""
        layout = self.layout
        self.line = self.s0 + ahead
        self.marks.append(stop_line(self.road, self.line, layout.right_edge, layout.divider))

    def cross_road(self, near: float, width: float = 8.0, reach: float = 45.0,
                   sides: str = 'both') -> None:
        """Lay a side road across [near, near + width] ahead, on both sides or one."""
        first, last = self.s0 + near, self.s0 + near + width
        right = 0.0 if sides == 'left' else -reach
        left = 0.0 if sides == 'right' else reach
        for margin, colour, kind in ((1.6, (172, 166, 158), 'shoulder'), (0.0, (86, 86, 84),
                                                                          'road')):
            polygon = self.road.points(np.array([first - margin, last + margin, last + margin,
                                                 first - margin]),
                                       np.array([right, right, left, left]))
            self.ground.append(Paint(polygon, colour, kind))
        self.drivable.append(self.ground[-1].polygon)
        middle = (first + last) / 2.0
        lo, hi = self.layout.right_edge - 1.0, self.layout.left_edge + 1.0
        for begin, end in ((right, lo), (hi, left)):
            if end > begin:
                self.marks.append(Paint(self.road.points(
                    np.array([middle - .08, middle + .08, middle + .08, middle - .08]),
                    np.array([begin, begin, end, end])), (232, 196, 60), 'marking'))
        self.gaps.append((first - 0.5, last + 0.5))
        self.clear.append((first - 4.0, last + 4.0))

    def act(self, decision: Decision, maneuver: Maneuver, must_hold: bool = False) -> None:
        """Fix what the expert does and why."""
        self.decision, self.maneuver, self.must_hold = decision, maneuver, must_hold

    def stop_before(self, ahead: float, desired: float | None = None, **options: Any) -> Maneuver:
        """Return the maneuver that rests with the front bumper `ahead` metres away."""
        return Maneuver(self.speed if desired is None else desired, stop_at=self.s0 + ahead,
                        **options)

    def paints(self, start: float, end: float) -> list[Paint]:
        """Return everything on the ground, lowest first, and note the drivable road."""
        layout = self.layout
        self.drivable.append(self.road.strip(start, end, layout.right_edge - layout.shoulder,
                                             layout.left_edge + layout.shoulder))
        road = road_paints(self.road, layout, start, end, self.gaps)
        # verge, then side roads over it, then the asphalt of the main road and all markings
        return [road[0], *self.ground, *road[1:], *self.marks]


@dataclass(frozen=True)
class Blueprint:
    """A drawn scenario; `populate(stage, event)` may branch on event but draws nothing."""

    draw: Draw
    layout: Layout
    speed: float
    acceleration: float  # before t0, m/s^2
    populate: Callable[[Stage, bool], None]
    curvature: float = 0.0
    pieces: Callable[[bool], list[tuple[float, float]]] | None = None  # whole road, or None
    turn: Callable[[], list[tuple[float, float]]] | None = None  # the ego's own way
    oncoming: bool = True  # harmless oncoming traffic may pass
    distractors: tuple[str, ...] = ()
    #: adds what a clip shows far away; a drive shows its next scenario there
    horizon: Callable[[Stage], None] | None = None
    navigation: str = ''

    def road(self, event: bool) -> Path:
        """Return the main road of a clip; s0 is BEHIND metres from its start."""
        return Path(self.pieces(event) if self.pieces else [(BEHIND + AHEAD, self.curvature)])


def stop_speeds(distance: float, hardest: float = 3.2) -> tuple[float, float]:
    """Return the speeds from which the expert rests after `distance` within 6 s, m/s."""
    room = 5.9 ** 2 - 4.0 * distance / 2.1 / 2.0
    if room <= 0.0:
        raise Rejected('too far to stop within the horizon')
    return (5.9 - math.sqrt(room)) * 2.1, math.sqrt(2.0 * hardest * distance)


def fixed_speed(speed: float, acceleration: float, tau: float) -> float:
    """Return the speed of something that keeps the ego's pace until t0 and then stays."""
    return max(0.0, speed + acceleration * min(tau, 0.0))



