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
One scenario driven in closed loop: what a planner sees, what its late plans do, what goes wrong.

Until t0 the ego drives as in the clip of the same spec, bit for bit. From t0 on it follows the
newest plan whose latency has passed; until the first one it goes on as before, as under a plan
made before the event. Other agents keep their scripts, the car behind follows by IDM.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
import math

import numpy as np

from rspec_planner.evaluate.tracking import (
    SUBSTEP_S,
    track,
    VehicleModel,
    VehicleState,
    WorldPlan,
)
from rspec_planner.world.clip import ClipSpec
from rspec_planner.world.expert import Driver, Maneuver, SpeedLimit
from rspec_planner.world.generate import (
    build_stage,
    FRAMES,
    FUTURE,
    HISTORY,
    Pair,
    renderer_of,
    start_state,
    visible_pair,
)
from rspec_planner.world.renderer import Renderer
from rspec_planner.world.rig import Rig
from rspec_planner.world.road import inside
from rspec_planner.world.scene import Scene
from rspec_planner.world.simulation import (
    agent_rows,
    boxes_overlap,
    DT,
    EGO_CENTRE,
    ego_corners,
    EGO_FRONT,
    EGO_LENGTH,
    EgoState,
    follow_ego,
    SOLID,
)

TICKS = FUTURE  # of 0.1 s from t0: as long as the scripts are written for
_TTC_HORIZON_S, _TTC_STEP_S = 4.0, 0.2
#: comfort limits of the nuPlan planning challenge, m/s^2, m/s^2, m/s^2, m/s^3
_COMFORT = {'brake': -4.05, 'push': 2.40, 'lateral': 4.89, 'jerk': 8.37}
_RED = frozenset(('light_red', 'light_amber', 'light_still_red', 'barrier_closed'))


@dataclass(frozen=True)
class View:
    """What a planner gets at one tick; new images only, older ones were sent before."""

    tick: int  # from t0, 0.1 s
    t0_ns: int
    images: dict[int, np.ndarray]  # tick -> (4 cameras, H, W, 3) uint8, since the last view
    history: np.ndarray  # (16, 4) float32 x, y, z, yaw, ego frame, oldest first
    speed: float
    navigation: str


@dataclass
class Outcome:
    """What became of one run."""

    spec: ClipSpec
    collision: str = ''  # kind of the agent
    at_fault: bool = False  # not struck from behind or while standing
    off_road: bool = False
    red_light: bool = False
    stop_line: bool = False
    end_s: float = 0.0  # after t0
    progress: float = 0.0  # distance driven / the expert's over the same time; 1 if both stand
    distance_m: float = 0.0
    min_ttc_s: float = _TTC_HORIZON_S
    comfortable: bool = True
    hardest_brake: float = 0.0
    jerk: float = 0.0  # root mean square, m/s^3
    driven_ade_m: float = 0.0  # from the expert's drive
    plans: int = 0
    rejected: int = 0
    cautious: int = 0  # of the plans
    first_ade_m: float = math.nan  # of the plan at t0 from the expert's future
    path: list[tuple[float, float, float, float]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)  # of DT since t0, at which plans were made
    confidences: list[float] = field(default_factory=list)  # of those plans

    @property
    def failed(self) -> bool:
        """Tell whether anything forbidden happened."""
        return bool(self.collision or self.off_road or self.red_light or self.stop_line)


@lru_cache(maxsize=4)
def _renderer(width: int, height: int) -> Renderer:
    return Renderer(Rig(width=width, height=height))


@lru_cache(maxsize=512)
def _pair(split: str, family: str, index: int, variant: str, width: int, height: int) -> Pair:
    """Return the pair that the clips of a spec are made of; one pixel gate for all of them."""
    spec = ClipSpec(split, family, index, True, variant)
    return visible_pair(spec, _renderer(width, height))[0]


class ClosedRun:
    """One scenario, stepped by 0.1 s; plan at the ticks that `wants_plan` names."""

    def __init__(self, spec: ClipSpec, width: int, height: int, *, render: bool = True,
                 period: int = 1, model: VehicleModel | None = None) -> None:
        """`period`: ticks between two plans at least. Drives the 1.5 s before t0."""
        pair = _pair(spec.split, spec.family, spec.index, spec.variant, width, height)
        self.spec, self._blueprint, self._t0_s = spec, pair.blueprint, pair.t0_s
        self._expert = pair.event if spec.event else pair.twin
        self._stage, self._paints = build_stage(pair.blueprint, spec.event)
        self._model, self._period = model or VehicleModel(), period
        self._draw = renderer_of(spec, _renderer(width, height)) if render else None
        self._images: dict[int, np.ndarray] = {}
        self._driver = Driver(self._stage.path, SpeedLimit(self._stage.path), Maneuver(1e3), 0.0)
        self._poses: deque[tuple[float, float, float]] = deque(maxlen=HISTORY)
        self._waiting: list[tuple[float, WorldPlan]] = []
        self._plan: WorldPlan | None = None
        self._trace: list[tuple[float, float, float, float, float, float]] = []
        self.tick, self.next_plan = 1 - HISTORY, 0
        self.outcome = Outcome(spec)
        self._approach()

    def _approach(self) -> None:
        """Drive to t0 as the clip does."""
        stage, blueprint = self._stage, self._blueprint
        s, ego = start_state(stage.path, stage.s0, blueprint.speed, blueprint.acceleration)
        self._driver.s = s
        for actor in stage.actors:
            if actor.script is not None:
                actor.script(actor, self.tick * DT)
        while True:
            self._driver.locate(ego)
            ego = ego.driven(blueprint.acceleration, self._driver.curvature(ego))
            self._state = VehicleState(ego.x, ego.y, ego.yaw, ego.speed, ego.acceleration,
                                       math.atan(ego.curvature * self._model.wheelbase_m))
            self._arrive()
            if self.tick == 0:
                break
            self.tick += 1
            ego = ego.at(DT)
            self._move_others(ego.speed)
        assert stage.maneuver is not None
        self._start_s = self._driver.s
        self._holding = stage.must_hold and stage.maneuver.holding
        self._judge()

    def _move_others(self, ego_speed: float) -> None:
        for actor in self._stage.actors:
            actor.advance(self.tick * DT)
        trailing = self._stage.trailing
        if trailing is not None:
            gap = self._driver.s - 0.9 - trailing.s - trailing.size[0] / 2.0
            follow_ego(trailing, gap, ego_speed)

    def _arrive(self) -> None:
        """Note where the ego is at this tick, and render it when a plan will look back at it."""
        state = self._state
        self._poses.append((state.x, state.y, state.yaw))
        if self._draw is not None and self.tick > self.next_plan - FRAMES:
            agents = [a.state() for a in self._stage.actors if a.visible] + self._stage.statics
            self._images[self.tick] = self._draw.render(Scene(
                self._t0_s + self.tick * DT, state.x, state.y, state.yaw, self._paints, agents,
                self._blueprint.draw.weather, self._blueprint.draw.noise_seed))

    @property
    def done(self) -> bool:
        """Tell whether the run is over."""
        return self.tick >= TICKS or bool(self.outcome.collision)

    @property
    def wants_plan(self) -> bool:
        """Tell whether a plan is to be made at this tick."""
        return not self.done and self.tick >= self.next_plan

    def view(self) -> View:
        """Return the planner's input at this tick."""
        images, self._images = self._images, {}
        poses, (x, y, yaw) = np.array(self._poses), self._poses[-1]
        cosine, sine = math.cos(yaw), math.sin(yaw)
        dx, dy, turn = poses[:, 0] - x, poses[:, 1] - y, poses[:, 2] - yaw
        history = np.stack([dx * cosine + dy * sine, dy * cosine - dx * sine, np.zeros_like(dx),
                            np.arctan2(np.sin(turn), np.cos(turn))], axis=-1)
        return View(self.tick, round((self._t0_s + self.tick * DT) * 1e9),
                    {k: v for k, v in images.items() if k > self.tick - FRAMES},
                    history.astype(np.float32), self._state.speed, self._blueprint.navigation)

    def apply(self, plan: tuple[np.ndarray, ...] | None, latency_s: float, text: str = '',
              cautious: bool = False, confidence: float = math.nan) -> None:
        """
        Take the plan made at this tick; it is followed once its latency has passed.

        plan: poses (65, 4), speeds, accelerations, curvatures in the ego frame; None when the
        guard refused it.
        """
        self.outcome.plans += 1
        self.outcome.texts.append(text)
        self.outcome.cautious += cautious
        self.outcome.ticks.append(self.tick)
        self.outcome.confidences.append(confidence)
        busy = math.ceil(round(latency_s / DT, 6))
        self.next_plan = self.tick + max(self._period, busy, 1)
        if plan is None:
            self.outcome.rejected += 1
            return
        if self.tick == 0:
            self.outcome.first_ade_m = float(np.linalg.norm(
                plan[0][1:, :2] - self.expert_future()[:, :2], axis=1).mean())
        state, now = self._state, self.tick * DT
        self._waiting.append((now + latency_s, WorldPlan.placed(
            now, (state.x, state.y, state.yaw), *plan)))

    def expert_future(self) -> np.ndarray:
        """Return the expert's 64 poses x, y, yaw after t0, ego frame at t0."""
        states = self._expert.states[HISTORY - 1:]
        origin = states[0]
        cosine, sine = math.cos(origin.yaw), math.sin(origin.yaw)
        return np.array([((e.x - origin.x) * cosine + (e.y - origin.y) * sine,
                          (e.y - origin.y) * cosine - (e.x - origin.x) * sine,
                          e.yaw - origin.yaw) for e in states[1:]])

    def expert_plan(self) -> tuple[np.ndarray, ...]:
        """Return the expert's drive from t0 in the form of a plan."""
        states = self._expert.states[HISTORY - 1:]
        poses = np.zeros((len(states), 4))
        poses[1:, [0, 1, 3]] = self.expert_future()
        return (poses, *(np.array([getattr(e, name) for e in states])
                         for name in ('speed', 'acceleration', 'curvature')))

    def step(self) -> None:
        """Move the world on by 0.1 s."""
        state, now = self._state, self.tick * DT
        for substep in range(round(DT / SUBSTEP_S)):
            time_s = now + substep * SUBSTEP_S
            while self._waiting and self._waiting[0][0] <= time_s + 1e-9:
                self._plan = self._waiting.pop(0)[1]
            if self._plan is None:
                ego = EgoState(state.x, state.y, state.yaw, state.speed)
                self._driver.locate(ego)
                state.advance(self._blueprint.acceleration, self._driver.curvature(ego),
                              self._model)
            else:
                state.advance(*track(self._plan, time_s, state, self._model), self._model)
        self.tick += 1
        self._driver.locate(EgoState(state.x, state.y, state.yaw, state.speed))
        self._move_others(state.speed)
        self._arrive()
        self._judge()

    def motion(self, tick: int) -> tuple[float, float, float, float]:
        """Return x, y, yaw and speed of the ego in the world at a tick up to now."""
        if tick <= 0:
            ego = self._expert.states[tick + HISTORY - 1]
            return ego.x, ego.y, ego.yaw, ego.speed
        return self._trace[tick][:4]

    def replay(self, pose: tuple[float, float, float, float]) -> None:
        """Move the world on by 0.1 s with the ego at a recorded x, y, yaw, speed."""
        state = self._state
        state.x, state.y, state.yaw, state.speed = pose
        self.tick += 1
        self._driver.locate(EgoState(*pose))
        self._move_others(state.speed)
        self._arrive()

    def snapshot(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return newest images (4, H, W, 3), agents (n, 7) and drivable polygons, ego frame."""
        x, y, yaw = self._poses[-1]
        turn = np.array([[math.cos(yaw), -math.sin(yaw)], [math.sin(yaw), math.cos(yaw)]])
        solid = [a for a in self._stage.actors if a.kind in SOLID and a.visible]
        rows = np.array(agent_rows(solid), np.float64).reshape(len(solid), 7)
        rows[:, :2] = (rows[:, :2] - (x, y)) @ turn
        rows[:, 2] -= yaw
        return (self._images[max(self._images)], rows,
                [(polygon - (x, y)) @ turn for polygon in self._stage.drivable])

    def _judge(self) -> None:
        """Look for everything that must not happen at this tick."""
        state, outcome, stage = self._state, self.outcome, self._stage
        outcome.end_s = self.tick * DT
        self._trace.append((state.x, state.y, state.yaw, state.speed, state.acceleration,
                            state.speed ** 2 * state.curvature(self._model)))
        x, y, yaw = (np.array([v]) for v in (state.x, state.y, state.yaw))
        solid = [a for a in stage.actors if a.kind in SOLID and a.visible]
        rows = np.array(agent_rows(solid), np.float64).reshape(1, len(solid), 7)
        if solid:
            hit = boxes_overlap(x, y, yaw, rows)[0]
            if hit.any():
                self._collide(int(np.argmax(hit)), solid[int(np.argmax(hit))].kind, rows[0])
            outcome.min_ttc_s = min(outcome.min_ttc_s, self._time_to_collision(rows[0]))
        corners = ego_corners(x, y, yaw).reshape(-1, 2)
        on_road = np.zeros(len(corners), bool)
        for polygon in stage.drivable:
            on_road |= inside(polygon, corners)
        outcome.off_road |= not bool(on_road.all())
        self._judge_line()

    def _collide(self, index: int, kind: str, rows: np.ndarray) -> None:
        state, outcome = self._state, self.outcome
        along = (rows[index, 0] - state.x) * math.cos(state.yaw) \
            + (rows[index, 1] - state.y) * math.sin(state.yaw)
        outcome.collision = kind
        outcome.at_fault = state.speed > 0.1 and bool(along > EGO_CENTRE - EGO_LENGTH / 2.0)

    def _judge_line(self) -> None:
        """Note a stop line that the ego crosses while it must wait."""
        stage, maneuver = self._stage, self._stage.maneuver
        assert maneuver is not None and stage.decision is not None
        if not self._holding or stage.line is None:
            return
        if maneuver.released is not None and maneuver.released():
            self._holding = False
            return
        room = stage.line - (self._driver.s + EGO_FRONT)
        cause = stage.decision.cause
        if cause == 'stop_sign' and 0.0 <= room < 6.0 and self._state.speed < 0.3:
            self._holding = False  # stopped at the sign: free to go on
        elif room < -0.1:
            self.outcome.red_light |= cause in _RED
            self.outcome.stop_line |= cause not in _RED

    def _time_to_collision(self, rows: np.ndarray) -> float:
        """Return when the ego box meets another one if all keep speed and heading, seconds."""
        state = self._state
        if state.speed < 0.1:
            return _TTC_HORIZON_S
        times = np.arange(0.0, _TTC_HORIZON_S, _TTC_STEP_S)
        moved = np.repeat(rows[None], len(times), axis=0)
        moved[:, :, 0] += times[:, None] * rows[:, 5] * np.cos(rows[:, 2])
        moved[:, :, 1] += times[:, None] * rows[:, 5] * np.sin(rows[:, 2])
        ahead = (rows[:, 0] - state.x) * math.cos(state.yaw) \
            + (rows[:, 1] - state.y) * math.sin(state.yaw) > 0.0
        hit = boxes_overlap(state.x + times * state.speed * math.cos(state.yaw),
                            state.y + times * state.speed * math.sin(state.yaw),
                            np.full(len(times), state.yaw), moved[:, ahead])
        return float(times[int(np.argmax(hit.any(axis=1)))]) if hit.any() else _TTC_HORIZON_S

    def finish(self) -> Outcome:
        """Return the outcome with its sums."""
        outcome, trace = self.outcome, np.array(self._trace)
        truth = np.array([(e.x, e.y) for e in self._expert.states[HISTORY - 1:]])[:len(trace)]
        outcome.driven_ade_m = float(np.linalg.norm(trace[:, :2] - truth, axis=1).mean())
        outcome.distance_m = self._driver.s - self._start_s
        theirs = self._expert.stations[HISTORY - 2 + len(trace)] - \
            self._expert.stations[HISTORY - 1]
        outcome.progress = min(outcome.distance_m / theirs, 2.0) if theirs > 1.0 else 1.0
        jerk = np.diff(trace[:, 4]) / DT
        outcome.jerk = float(np.sqrt((jerk ** 2).mean())) if len(jerk) else 0.0
        outcome.hardest_brake = float(trace[:, 4].min())
        outcome.comfortable = bool(
            trace[:, 4].min() >= _COMFORT['brake'] and trace[:, 4].max() <= _COMFORT['push']
            and np.abs(trace[:, 5]).max() <= _COMFORT['lateral']
            and (len(jerk) == 0 or np.abs(jerk).max() <= _COMFORT['jerk']))
        outcome.path = [tuple(row[:4]) for row in trace.round(4).tolist()]
        return outcome
