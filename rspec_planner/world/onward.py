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
Clips in mid-manoeuvre: a scenario driven on beyond t0, imprecisely, and shown at a later instant.

A planner that plans ten times a second sees mostly what its own plans led to, and not the expert's
line at t0. So a drive clip follows the scenario's expert for up to 6 s as a late and imprecise
tracker does, and is labelled with what the expert does from there and why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rspec_planner.world.anchor import anchored
from rspec_planner.world.clip import Clip, ClipSpec, Decision
from rspec_planner.world.expert import Driver, Maneuver, SpeedLimit
from rspec_planner.world.generate import (
    build_stage,
    check,
    FRAMES,
    FUTURE,
    generate_pair,
    HISTORY,
    Pair,
    record,
    renderer_of,
    Rollout,
    SceneRenderer,
    simulate_pair,
    start_state,
)
from rspec_planner.world.scenarios.base import AHEAD, BEHIND, Stage
from rspec_planner.world.scene import Scene
from rspec_planner.world.simulation import (
    agent_rows,
    boxes_overlap,
    DT,
    EgoState,
    follow_ego,
    SOLID,
)
from rspec_planner.world.situation import decision_now, Moment
from rspec_planner.world.splits import seed_of

LATEST = 60  # ticks of 0.1 s after t0; scenarios are driven for 64
_EARLY, _EARLY_SHARE = 24, 0.6  # most things are decided within 2.4 s
_TRIES = 8
_RESPONSE = 0.6  # share of a commanded change that a car does within 0.1 s
_NEAR_M = 50.0  # a light or sign of the free road that is nearer would decide


@dataclass(frozen=True)
class Disturbance:
    """How one drive departs from the expert's; the same for both twins."""

    ticks: int  # from t0 to the instant of the clip
    latency: int  # ticks until the first plan is followed
    aim: float  # metres beside the expert's line
    push: np.ndarray  # (ticks,) m/s^2
    sway: np.ndarray  # (ticks,) m/s^2, across

    @staticmethod
    def draw(rng: np.random.Generator) -> Disturbance:
        """Draw one."""
        early = rng.random() < _EARLY_SHARE
        ticks = int(rng.integers(1, _EARLY + 1) if early else rng.integers(_EARLY, LATEST + 1))
        latency = int(rng.integers(1, 6) if rng.random() < 0.85 else rng.integers(6, 11))
        scale = float(rng.choice((0.3, 1.0, 2.0)))
        aim = float(np.clip(rng.normal(0.0, 0.4 * scale), -1.2, 1.2)) \
            if rng.random() < 0.5 else 0.0
        held = np.arange(ticks) // int(rng.integers(3, 9))  # noise stays for 0.3 to 0.8 s
        push, sway = rng.normal(0.0, (0.35 * scale, 0.5 * scale), (int(held[-1]) + 1, 2)).T
        return Disturbance(ticks, min(latency, ticks), aim, push[held], sway[held])


def _command(driver: Driver, ego: EgoState, stage: Stage, before: EgoState,
             disturbance: Disturbance, tick: int) -> tuple[float, float]:
    """Return what a late and imprecise tracker does at a tick: acceleration and curvature."""
    driver.d -= disturbance.aim
    bend = driver.curvature(ego)
    push = driver.acceleration(ego, stage.actors) if tick >= disturbance.latency \
        else before.acceleration
    if ego.speed < 0.4 and push <= 0.05:
        return push, bend  # held at rest
    push = before.acceleration + _RESPONSE * (push - before.acceleration)
    bend = before.curvature + _RESPONSE * (bend - before.curvature)
    sway = float(disturbance.sway[tick]) / max(ego.speed, 4.0) ** 2
    return push + float(disturbance.push[tick]), min(max(bend + sway, -0.2), 0.2)


class _Drive:
    """One twin, stepped by 0.1 s from 1.5 s before t0."""

    def __init__(self, pair: Pair, event: bool, other: Decision, disturbance: Disturbance):
        """`other` is the decision of the twin at t0."""
        self.pair, self.other, self.disturbance = pair, other, disturbance
        blueprint = pair.blueprint
        self.stage, self.paints = build_stage(blueprint, event)
        s, self.ego = start_state(self.stage.path, self.stage.s0, blueprint.speed,
                                  blueprint.acceleration)
        self.driver = Driver(self.stage.path, SpeedLimit(self.stage.path), Maneuver(1e3), s)
        self.solid = [a for a in self.stage.actors if a.kind in SOLID]
        self.states: list[EgoState] = []
        self.stations: list[float] = []
        self.rows: list[list[tuple[float, ...]]] = []
        self.scenes: list[Scene] = []
        self.decision: Decision | None = None

    def step(self, tick: int) -> bool:
        """Enter the instant `tick` after t0; return whether a sentence fits, at the last one."""
        self._move(tick)
        driver, stage, disturbance = self.driver, self.stage, self.disturbance
        driver.locate(self.ego)
        self.stations.append(driver.s)
        if tick >= disturbance.latency:
            assert stage.maneuver is not None
            driver.maneuver = stage.maneuver
        if tick < 0:
            inputs = self.pair.blueprint.acceleration, driver.curvature(self.ego)
        elif tick < disturbance.ticks:
            inputs = _command(driver, self.ego, stage, self.states[-1], disturbance, tick)
        else:
            if tick == disturbance.ticks:
                self.decision = decision_now(
                    Moment(stage, self.other, driver.s, driver.d, self.ego.speed))
                if self.decision is None or not _foreseen(stage, driver.s):
                    return False
                assert stage.maneuver is not None
                stage.maneuver = driver.maneuver = anchored(
                    stage.maneuver, driver.s, driver.d, self.ego.speed, stage.actors)
            bend = driver.curvature(self.ego)
            inputs = driver.acceleration(self.ego, stage.actors), bend
        self.ego = self.ego.driven(*inputs)
        self.states.append(self.ego)
        self.rows.append(agent_rows(self.solid))
        if disturbance.ticks - FRAMES < tick <= disturbance.ticks:
            self.scenes.append(self._scene(tick))
        return True

    def _move(self, tick: int) -> None:
        """Move everybody to the instant `tick`, or set the first one up."""
        stage, tau = self.stage, tick * DT
        if not self.states:
            for actor in stage.actors:
                if actor.script is not None:
                    actor.script(actor, tau)
            return
        self.ego = self.ego.at(DT)
        for actor in stage.actors:
            actor.advance(tau)
        if stage.trailing is not None:
            gap = self.driver.s - 0.9 - stage.trailing.s - stage.trailing.size[0] / 2.0
            follow_ego(stage.trailing, gap, self.ego.speed)

    def _scene(self, tick: int) -> Scene:
        agents = [a.state() for a in self.stage.actors if a.visible] + self.stage.statics
        draw, ego = self.pair.blueprint.draw, self.ego
        return Scene(self.pair.t0_s + tick * DT, ego.x, ego.y, ego.yaw, self.paints, agents,
                     draw.weather, draw.noise_seed)


def drive_on(pair: Pair, event: bool, other: Decision, disturbance: Disturbance
             ) -> Rollout | None:
    """
    Return the 80 steps around the clip's instant of one twin, its decision that of then.

    None when the expert's drive from there breaks a rule, or when no sentence fits.
    """
    drive, ticks = _Drive(pair, event, other, disturbance), disturbance.ticks
    for tick in range(1 - HISTORY, ticks + 1 + FUTURE):
        if not drive.step(tick):
            return None
    agents = np.array(drive.rows, np.float64).reshape(len(drive.rows), len(drive.solid), 7)
    if _collides(drive.states, agents):
        return None
    drive.stage.decision = drive.decision
    _lengthen(drive.stage)
    rollout = Rollout(drive.stage, drive.states[ticks:], drive.stations[ticks:], agents[ticks:],
                      drive.scenes)
    return None if check(rollout) else rollout


def _foreseen(stage: Stage, s: float) -> bool:
    """Tell whether all that the expert ignores without passing it is still far away."""
    assert stage.maneuver is not None and stage.decision is not None
    if stage.decision.cause not in ('road_straight', 'lead_driving'):
        return True
    return all(actor.s - s > _NEAR_M for actor in stage.maneuver.ignore)


def _collides(states: list[EgoState], agents: np.ndarray) -> bool:
    x, y, yaw = np.array([(e.x, e.y, e.yaw) for e in states]).T
    return bool(agents.shape[1]) and bool(boxes_overlap(x, y, yaw, agents).any())


def _lengthen(stage: Stage) -> None:
    """Go on with the road where a scenario's ends: a future may lead beyond it."""
    layout, road, path = stage.layout, stage.road, stage.path
    stage.drivable.append(road.strip(BEHIND + AHEAD - 10.0, BEHIND + AHEAD + 150.0,
                                     layout.right_edge - layout.shoulder,
                                     layout.left_edge + layout.shoulder))
    if path is not road:
        stage.drivable.append(path.strip(path.length - 40.0, path.length + 60.0, -3.5, 3.5))


def drive_pair(spec: ClipSpec, renderer: SceneRenderer | None = None) -> tuple[Clip, Clip]:
    """
    Return (event clip, twin) at the same instant after the scenario's t0, `spec.drive` its seed.

    `spec.event` is ignored. Where no instant of several suits both twins, they are shown at t0.
    """
    pair, _ = simulate_pair(spec)
    rng = np.random.default_rng([seed_of(spec), 41, spec.drive])
    for _ in range(_TRIES):
        disturbance = Disturbance.draw(rng)
        rollouts = _both(pair, disturbance)
        if rollouts is not None:
            break
    else:
        return generate_pair(replace(spec, drive=0), renderer)
    clips = []
    for event, rollout in zip((True, False), rollouts):
        images = None
        if renderer is not None:
            mounted = renderer_of(spec, renderer)
            images = np.stack([mounted.render(scene) for scene in rollout.scenes], axis=1)
        clips.append(record(replace(spec, event=event), rollout, pair.blueprint,
                            pair.t0_s + disturbance.ticks * DT, images))
    return clips[0], clips[1]


def _both(pair: Pair, disturbance: Disturbance) -> tuple[Rollout, Rollout] | None:
    decisions = pair.event.stage.decision, pair.twin.stage.decision
    assert decisions[0] is not None and decisions[1] is not None
    event = drive_on(pair, True, decisions[1], disturbance)
    twin = None if event is None else drive_on(pair, False, decisions[0], disturbance)
    return None if event is None or twin is None else (event, twin)


def make_pair(spec: ClipSpec, renderer: SceneRenderer | None = None) -> tuple[Clip, Clip]:
    """Return both twins of a spec, at t0 or, as a drive clip, later."""
    return drive_pair(spec, renderer) if spec.drive else generate_pair(spec, renderer)
