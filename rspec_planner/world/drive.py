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
A drive without end: scenarios chained along one road, driven by the expert.

Between two scenarios lie 6 to 10 s of free road. Only the causal script is reset there; ego
motion, clock and odometry run on. The world is simulated 6.4 s ahead of what `frame()` shows,
so every frame knows its true future.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
import hashlib
import math

import numpy as np

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.clip import Decision
from rspec_planner.world.expert import Driver, Maneuver, stop_acceleration
from rspec_planner.world.reasoning import write
from rspec_planner.world.renderer import Renderer
from rspec_planner.world.rig import Rig
from rspec_planner.world.route import build_leg, LEAD_TIME, leave, LEAVING, Leg, returning
from rspec_planner.world.scenarios import CATALOGUE, DAY_ONLY, DOUBLES, FAMILIES, OFF_SHELF
from rspec_planner.world.scene import AgentState, Paint, Scene, Weather
from rspec_planner.world.simulation import DT, EgoState

__all__ = ['Drive', 'DriveFrame', 'EgoState']

FUTURE, HISTORY = 64, 16
EVENT_SHARE = 0.7  # of the scenarios; the others show the harmless twin
SPEAKING_S = 0.5  # the reasoning of a scenario is published from t0 for so long
_FREE_SPEED = 9.0
_SIGHT_M = 170.0
_LATEST_S = 1.7  # a script starts so long before t0 even if the speed is not yet right


@dataclass(frozen=True)
class DriveFrame:
    """What there is at one instant of a drive."""

    time_s: float
    images: np.ndarray | None  # (4, H, W, 3) uint8 RGB in rig order, None without rendering
    ego: EgoState  # rear axle, world frame; ego.at(dt) interpolates within the step
    family: str  # of the active script, '' on free road
    decision: Decision | None  # of the active script
    reasoning: str  # the expert's CoC within 0.5 s after a script's t0, else ''
    future: np.ndarray  # (64, 4) float32 x, y, z, yaw in the ego frame, 0.1 s apart
    navigation_text: str = ''


@dataclass(frozen=True)
class _Snapshot:
    """One simulated instant, waiting to be shown."""

    scene: Scene
    ego: EgoState
    family: str
    decision: Decision | None
    reasoning: str
    navigation: str


class Drive:
    """Chained scenarios: `frame()` describes now, `step()` moves on by 0.1 s."""

    def __init__(self, families: Sequence[str], seed: int, *, rig: Rig | None = None,
                 render: bool = True, weather: Weather | None = None) -> None:
        """
        Plan a route that repeats `families` (all of `CATALOGUE` if empty).

        Raises ConfigurationError if one is unknown or the seed is negative.
        """
        if seed < 0:
            raise ConfigurationError(f'seed {seed} is negative; use 0 or above')
        known = (*FAMILIES, *OFF_SHELF, *DOUBLES)
        self._families = tuple(families) or tuple(CATALOGUE)
        for family in self._families:
            if family not in known:
                raise ConfigurationError(f'scenario {family!r} is unknown; use one of '
                                         f'{", ".join(known)}')
        self._seed = seed
        self._rng = np.random.default_rng([seed, 7])
        self._weather = weather or self._draw_weather()
        self._renderer = Renderer(rig) if render else None
        self._legs: list[Leg] = []  # at most the last, the present and the next one
        self._present, self._built = 0, 0
        self._add_leg()
        self._add_leg()
        speed = self._cruise(self._legs[0])
        s = 30.0
        x, y, yaw = self._legs[0].path.pose(s)
        self._ego = EgoState(x, y, yaw, speed)
        self._driver = Driver(self._legs[0].path, self._legs[0].limit, Maneuver(speed), s)
        self._steps = 0
        self._paints: tuple[int, list[Paint]] = (-1, [])
        self._poses: deque[tuple[float, float, float]] = deque(maxlen=HISTORY)
        self._queue: deque[_Snapshot] = deque()
        self._images: np.ndarray | None = None
        self._spoken, self._standing_s, self._active = '', 0.0, False
        while len(self._queue) <= FUTURE:
            self._simulate()

    def step(self) -> None:
        """Advance the world by 0.1 s."""
        self._queue.popleft()
        self._images = None
        self._simulate()

    def frame(self) -> DriveFrame:
        """Return everything about the present instant."""
        now = self._queue[0]
        if self._renderer is not None and self._images is None:
            self._images = self._renderer.render(now.scene)
        poses = np.array([(n.ego.x, n.ego.y, n.ego.yaw) for n in list(self._queue)[1:FUTURE + 1]])
        return DriveFrame(now.scene.time_s, self._images, now.ego, now.family, now.decision,
                          now.reasoning, _local(poses, now.ego), now.navigation)

    def _draw_weather(self) -> Weather:
        """Return the weather of a drive, by its seed."""
        names = ['clear', 'clear', 'fog', 'rain']
        if not DAY_ONLY.intersection(self._families):
            names.append('night')
        name = names[int(self._rng.integers(len(names)))]
        return {'clear': Weather(light=1.0, fog=0.001), 'fog': Weather(light=0.9, fog=0.007),
                'rain': Weather(light=0.8, fog=0.002, rain=0.6),
                'night': Weather(light=1.0, night=True)}[name]

    def _add_leg(self) -> None:
        """Append the next leg of the route."""
        family = self._families[self._built % len(self._families)]
        text = f'drive/{self._seed}/{self._built}'.encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        event = bool(self._rng.random() < EVENT_SHARE)
        pose = self._legs[-1].end() if self._legs else (0.0, 0.0, 0.0)
        heading = self._legs[-1].start_yaw if self._legs else 0.0
        leg = build_leg(family, int.from_bytes(digest, 'big'), event, pose, heading)
        self._legs.append(leg)
        self._built += 1

    @staticmethod
    def _cruise(leg: Leg) -> float:
        """Return the speed at which the ego approaches a scenario."""
        return _FREE_SPEED if leg.standing else leg.blueprint.speed

    def _simulate(self) -> None:
        """Add one instant to the queue and move on."""
        self._driver.locate(self._ego)
        self._enter_leg()
        leg = self._legs[self._present]
        self._run_script(leg)
        acceleration = self._acceleration(leg)
        self._ego = self._ego.driven(acceleration, self._driver.curvature(self._ego))
        self._poses.append((self._ego.x, self._ego.y, self._ego.yaw))
        self._queue.append(self._snapshot(leg))
        self._steps += 1
        self._ego = self._ego.at(DT)
        for other in self._legs:
            other.advance(self._driver.s + self._ego.speed * DT, self._ego.speed)

    def _enter_leg(self) -> None:
        """Change to the next leg when the present one is over."""
        leg = self._legs[self._present]
        if self._driver.s < leg.path.length:
            return
        following = self._legs[self._present + 1]
        if not leg.cleared:
            leg.clear(self._driver.s)
        for actor in leg.actors:  # who still drives ahead of us comes along
            if not actor.reverse and actor.speed > 0.0 and actor.s > leg.path.length:
                (leg.guests if actor in leg.guests else leg.stage.actors).remove(actor)
                if leg.blueprint.turn is None and actor.kind in LEAVING:
                    actor.path, actor.s = following.stage.road, actor.s - leg.path.length
                    actor.script = leave
                    following.guests.append(actor)
        if leg.stage.trailing is not None:
            leg.stage.actors.remove(leg.stage.trailing)
            leg.stage.trailing = None
        s = self._driver.s - leg.path.length
        self._driver = Driver(following.path, following.limit, Maneuver(_FREE_SPEED), s)
        self._driver.locate(self._ego)
        self._active = False
        self._present += 1
        self._add_leg()
        if self._present > 1:
            self._legs.pop(0)
            self._present -= 1

    def _run_script(self, leg: Leg) -> None:
        """Start, begin and end the script of the present leg."""
        stage, maneuver, ego = leg.stage, self._driver.maneuver, self._ego
        self._standing_s = self._standing_s + DT if ego.speed < 1e-6 else 0.0
        if not leg.started:
            left = stage.s0 - self._driver.s
            steady = abs(ego.speed - leg.blueprint.speed) < 0.03
            if leg.standing and self._standing_s > 0.5 and abs(left) < 0.6:
                leg.start()
            elif not leg.standing and left <= (LEAD_TIME if steady else _LATEST_S) * ego.speed:
                leg.tau = -left / max(ego.speed, 0.1)
                leg.start()
            return
        if leg.tau > -0.5 * DT and not self._active and not leg.cleared:
            assert stage.maneuver is not None
            self._driver.maneuver, self._active = stage.maneuver, True
            return
        if not self._active or leg.tau < FUTURE * DT:
            return
        waits = maneuver.stop_at is not None and maneuver.holding
        shifting = maneuver.shifts and self._driver.s < (maneuver.shifts[-1].start
                                                         + maneuver.shifts[-1].length)
        near_end = self._driver.s > leg.path.length - 30.0
        if (ego.speed < 0.05 if waits else not shifting) or near_end:
            self._finish(leg)

    def _finish(self, leg: Leg) -> None:
        """Return to free driving on the lane centre."""
        leg.clear(self._driver.s)
        self._active = False
        back = self._driver.maneuver.after or returning(
            self._driver.s, self._driver.d, self._ego.speed)
        self._driver.maneuver = Maneuver(self._cruise(self._legs[self._present + 1]), shifts=back)

    def _acceleration(self, leg: Leg) -> float:
        """Return the expert's acceleration: by the script, or towards the next one."""
        driver, ego = self._driver, self._ego
        if self._active:
            return driver.acceleration(ego, leg.actors)
        ahead = leg if not leg.cleared else self._legs[self._present + 1]
        desired = self._cruise(ahead)
        steady = (desired - ego.speed) / (0.8 if ego.speed > 0.5 else 2.0)
        acceleration = min(max(steady, -1.8), 1.4)
        left = leg.stage.s0 - driver.s
        if leg.standing and not leg.cleared:
            acceleration = min(acceleration, stop_acceleration(ego.speed, left))
            if ego.speed < 0.05 and left < 0.6:
                acceleration = -ego.speed / DT
        if leg.started and not leg.cleared:
            return acceleration  # steady on the way to t0, as in a clip
        driver.maneuver.desired = max(desired, ego.speed + 2.0)
        others = leg.actors if leg.cleared else leg.guests
        return max(-4.0, min(acceleration, driver.acceleration(ego, others)))

    def _snapshot(self, leg: Leg) -> _Snapshot:
        """Return the present instant."""
        ego = self._ego
        agents: list[AgentState] = []
        for other in self._legs:
            agents += [a.state() for a in other.actors if a.visible]
            agents += other.stage.statics
        agents = [a for a in agents if math.hypot(a.x - ego.x, a.y - ego.y) < _SIGHT_M]
        if self._paints[0] != self._built:
            ground = [p for other in self._legs for p in other.paints]
            self._paints = (self._built, ground)
        scene = Scene(self._steps * DT, ego.x, ego.y, ego.yaw, self._paints[1], agents,
                      self._weather, self._seed & 0x7fffffff)
        on = leg.started and not leg.cleared
        decision = leg.stage.decision if on else None
        reasoning = ''
        if self._active and decision and leg.tau < SPEAKING_S and len(self._poses) == HISTORY:
            reasoning, _ = write(_local(np.array(self._poses), ego), decision)
        navigation = leg.blueprint.navigation if on else ''
        return _Snapshot(scene, ego, leg.family if on else '', decision, reasoning, navigation)


def _local(poses: np.ndarray, ego: EgoState) -> np.ndarray:
    """Return world (n, 3) x, y, yaw as (n, 4) float32 x, y, z, yaw in the ego frame."""
    cosine, sine = math.cos(ego.yaw), math.sin(ego.yaw)
    dx, dy, turn = poses[:, 0] - ego.x, poses[:, 1] - ego.y, poses[:, 2] - ego.yaw
    return np.stack([dx * cosine + dy * sine, dy * cosine - dx * sine, np.zeros_like(dx),
                     np.arctan2(np.sin(turn), np.cos(turn))], axis=-1).astype(np.float32)
