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
Make clips: roll the world around one t0, check every rule, render four frames.

A pair is drawn again until both twins pass all checks; with a renderer the pair must also
differ visibly at t0. The result depends on the spec (and on the size of the images) alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
import math
from typing import Protocol

import numpy as np

from rspec_planner.errors import ConfigurationError
from rspec_planner.planner.observation import Observation
from rspec_planner.world.clip import Clip, ClipSpec
from rspec_planner.world.expert import Driver, Maneuver, SpeedLimit
from rspec_planner.world.reasoning import opener_is_clear, write
from rspec_planner.world.renderer import Renderer
from rspec_planner.world.rig import Rig
from rspec_planner.world.road import inside, Path
from rspec_planner.world.scenarios import draw_blueprint
from rspec_planner.world.scenarios.base import AHEAD, BEHIND, Blueprint, Rejected, Stage
from rspec_planner.world.scenarios.surroundings import surround
from rspec_planner.world.scene import Paint, Scene
from rspec_planner.world.simulation import (
    agent_rows,
    boxes_overlap,
    DT,
    ego_corners,
    EGO_FRONT,
    EgoState,
    follow_ego,
    SOLID,
)
from rspec_planner.world.splits import seed_of

HISTORY, FUTURE, FRAMES = 16, 64, 4
#: steps of the clip whose scenes are images unless told otherwise: t0 - 0.3 s .. t0
LAST_FRAMES = range(HISTORY - FRAMES, HISTORY)
MAX_ATTEMPTS = 200
GATE_LEVELS, GATE_PIXELS = 24, 8  # a pair must differ by more, in so many pixels
CAMERAS = ('cross_left', 'front_wide', 'cross_right', 'front_tele')


#: (height m, pitch rad) added to the rig; clips of every split use one of these
MOUNTS = ((0.0, 0.0), (0.05, 0.0087), (-0.05, -0.0087), (0.05, -0.0087), (-0.05, 0.0087))
FOREIGN_MOUNT = (0.10, -math.radians(1.0))  # the off-shelf part `rig`


class SceneRenderer(Protocol):
    """Whatever turns a Scene into (4, H, W, 3) uint8 RGB."""

    @property
    def rig(self) -> Rig:
        """Return the rig it draws for."""

    def render(self, scene: Scene) -> np.ndarray:
        """Return one image per camera."""


@lru_cache(maxsize=8)
def _mounted(rig: Rig) -> Renderer:
    """Return the renderer of a displaced rig, one per process."""
    return Renderer(rig)


def renderer_of(spec: ClipSpec, renderer: SceneRenderer) -> SceneRenderer:
    """
    Return the renderer whose rig is mounted as this clip wants it.

    Cameras sit up to 5 cm and 0.5 deg off; in the part `rig`, 10 cm higher and 1 deg up.
    """
    if spec.variant == 'rig':
        height, pitch = FOREIGN_MOUNT
    else:
        height, pitch = MOUNTS[(seed_of(spec) >> 8) % len(MOUNTS)]
    if not height and not pitch:
        return renderer
    rig = renderer.rig
    return _mounted(Rig(rig.width, rig.height, rig.height_offset + height,
                        rig.pitch_offset + pitch))


@dataclass(frozen=True)
class Rollout:
    """One twin, simulated: 80 states, agents, and the scenes of the four frames."""

    stage: Stage
    states: list[EgoState]
    stations: list[float]
    agents: np.ndarray  # (80, n, 7) float64, world frame
    scenes: list[Scene]


def start_state(path: Path, s0: float, speed: float, acceleration: float
                ) -> tuple[float, EgoState]:
    """Return station and ego state 1.5 s before t0."""
    duration = (HISTORY - 1) * DT
    s = s0 - (speed * duration - acceleration * duration ** 2 / 2.0)
    x, y, yaw = path.pose(s)
    return s, EgoState(x, y, yaw, speed - acceleration * duration, acceleration)


def build_stage(blueprint: Blueprint, event: bool) -> tuple[Stage, list[Paint]]:
    """Lay the road of a clip and furnish it."""
    road = blueprint.road(event)
    path = Path(blueprint.turn()) if blueprint.turn else road
    stage = Stage(road, path, BEHIND, blueprint.layout, blueprint.speed)
    blueprint.populate(stage, event)
    if blueprint.horizon is not None:
        blueprint.horizon(stage)
    surround(stage, blueprint.draw, blueprint, -8.0, 105.0)
    return stage, stage.paints(BEHIND - 45.0, BEHIND + AHEAD - 2.0)


def roll(blueprint: Blueprint, event: bool, t0_s: float,
         frames: Collection[int] = LAST_FRAMES) -> Rollout:
    """Simulate one twin from t0 - 1.5 s to t0 + 6.4 s; frames: the steps to keep a scene of."""
    stage, paints = build_stage(blueprint, event)
    s, ego = start_state(stage.path, stage.s0, blueprint.speed, blueprint.acceleration)
    free = Maneuver(1e3)
    driver = Driver(stage.path, SpeedLimit(stage.path), free, s)
    solid = [a for a in stage.actors if a.kind in SOLID]
    states, stations, rows, scenes = [], [], [], []
    for step in range(HISTORY + FUTURE):
        tau = (step - HISTORY + 1) * DT
        if step:
            ego = ego.at(DT)
            for actor in stage.actors:
                actor.advance(tau)
            if stage.trailing is not None:
                gap = driver.s - 0.9 - stage.trailing.s - stage.trailing.size[0] / 2.0
                follow_ego(stage.trailing, gap, ego.speed)
        else:
            for actor in stage.actors:
                if actor.script is not None:
                    actor.script(actor, tau)
        driver.locate(ego)
        if step == HISTORY - 1:
            assert stage.maneuver is not None
            driver.maneuver = stage.maneuver
        history = step < HISTORY - 1
        curvature = driver.curvature(ego)
        ego = ego.driven(blueprint.acceleration if history
                         else driver.acceleration(ego, stage.actors), curvature)
        states.append(ego)
        stations.append(driver.s)
        rows.append(agent_rows(solid))
        if step in frames:
            agents = [a.state() for a in stage.actors if a.visible] + stage.statics
            scenes.append(Scene(t0_s + tau, ego.x, ego.y, ego.yaw, paints, agents,
                                blueprint.draw.weather, blueprint.draw.noise_seed))
    agents_array = np.array(rows, np.float64).reshape(HISTORY + FUTURE, len(solid), 7)
    return Rollout(stage, states, stations, agents_array, scenes)


def check(rollout: Rollout) -> str:
    """Return why the expert's drive breaks a rule, or ''."""
    stage, maneuver = rollout.stage, rollout.stage.maneuver
    assert maneuver is not None
    poses = np.array([(e.x, e.y, e.yaw) for e in rollout.states])
    x, y, yaw = poses.T
    if rollout.agents.shape[1]:
        hit = boxes_overlap(x, y, yaw, rollout.agents).any(axis=0)
        if hit.any():
            return 'collision'
    corners = ego_corners(x, y, yaw).reshape(-1, 2)
    on_road = np.zeros(len(corners), bool)
    for polygon in stage.drivable:
        on_road |= inside(polygon, corners)
    if not on_road.all():
        return 'off road'
    accelerations = [e.acceleration for e in rollout.states[HISTORY - 1:]]
    if min(accelerations) < -maneuver.brake_limit - 0.05 or max(accelerations) > 2.40:
        return 'acceleration'
    if stage.must_hold and maneuver.holding and stage.line is not None:
        if rollout.stations[-1] + EGO_FRONT > stage.line:
            return 'line overrun'
    return ''


def lit_at(blueprint_seed: int, agent_id: int) -> float:
    """Return a t0 in seconds at which the indicator of an agent has been lit for 0.1 s."""
    whole = 10.0 + blueprint_seed % 4000
    phase = 0.16 + 0.3 * ((blueprint_seed >> 16) % 1000) / 1000.0  # of 0.6 lit
    return (math.ceil(whole * 1.5) + phase - 0.37 * (agent_id % 7)) / 1.5


def _to_ego(poses: np.ndarray, ego: EgoState) -> np.ndarray:
    """Return (n, 4) x, y, z, yaw in the frame of `ego` for world (n, 3) x, y, yaw."""
    cosine, sine = math.cos(ego.yaw), math.sin(ego.yaw)
    dx, dy = poses[:, 0] - ego.x, poses[:, 1] - ego.y
    turn = poses[:, 2] - ego.yaw
    return np.stack([dx * cosine + dy * sine, dy * cosine - dx * sine, np.zeros_like(dx),
                     np.arctan2(np.sin(turn), np.cos(turn))], axis=-1)


def record(spec: ClipSpec, rollout: Rollout, blueprint: Blueprint, t0_s: float,
           images: np.ndarray | None) -> Clip:
    """Return the clip of one twin."""
    states, stage = rollout.states, rollout.stage
    ego = states[HISTORY - 1]
    poses = np.array([(e.x, e.y, e.yaw) for e in states])
    local = _to_ego(poses, ego).astype(np.float32)
    agents = rollout.agents.copy()
    shape = agents.shape[:2]
    flat = agents.reshape(-1, 7)
    flat[:, :3] = _to_ego(flat[:, :3], ego)[:, [0, 1, 3]]
    history = local[:HISTORY]
    assert stage.decision is not None
    text, kinds = write(history, stage.decision)
    cosine, sine = math.cos(ego.yaw), math.sin(ego.yaw)
    turn = np.array([[cosine, -sine], [sine, cosine]])
    polygons = [((p - (ego.x, ego.y)) @ turn).astype(np.float32) for p in stage.drivable]
    inputs = states[HISTORY - 1:-1]
    return Clip(
        spec=spec, t0_ns=round(t0_s * 1e9), images=images, history=history, speed=ego.speed,
        future=local[HISTORY:],
        speeds=np.array([e.speed for e in states[HISTORY:]], np.float32),
        actions=np.array([(e.acceleration, e.curvature) for e in inputs], np.float32),
        reasoning=text, token_kind=kinds, decision=stage.decision,
        navigation_text=blueprint.navigation,
        agents=flat.reshape(*shape, 7).astype(np.float32),
        stop_line_x=None if stage.line is None else stage.line - rollout.stations[HISTORY - 1],
        paints_polygons=polygons)


def _t0_seconds(blueprint: Blueprint) -> float:
    """Return t0 on the clip's clock, such that a signalling vehicle's lamp is lit."""
    seed = blueprint.draw.noise_seed
    stage, _ = build_stage(blueprint, True)
    return lit_at(seed, stage.blinker.agent_id if stage.blinker is not None else 0)


@dataclass(frozen=True)
class Pair:
    """Two twins that passed every check; `rejected` lists why earlier attempts did not."""

    blueprint: Blueprint
    t0_s: float
    event: Rollout
    twin: Rollout
    rejected: tuple[str, ...]


def opener_clear(rollout: Rollout) -> bool:
    """Tell whether the opener of a rollout is unambiguous."""
    poses = np.array([(e.x, e.y, e.yaw) for e in rollout.states[:HISTORY]])
    return opener_is_clear(_to_ego(poses, rollout.states[HISTORY - 1]))


def simulate_pair(spec: ClipSpec, first_attempt: int = 0,
                  frames: Collection[int] = LAST_FRAMES) -> tuple[Pair, int]:
    """
    Return the first valid pair at or after an attempt, and the attempt after it.

    frames: the steps of 0.1 s, the last of them 15 at t0, to keep a scene of.
    Raises ConfigurationError when MAX_ATTEMPTS draws all break a rule.
    """
    rejected: list[str] = []
    for attempt in range(first_attempt, MAX_ATTEMPTS):
        try:
            blueprint = draw_blueprint(spec.family, seed_of(spec), attempt,
                                       spec.variant == 'combination')
        except Rejected as reason:
            rejected.append(f'draw: {reason}')
            continue
        t0_s = _t0_seconds(blueprint)
        event = roll(blueprint, True, t0_s, frames)
        fault = check(event) or ('' if opener_clear(event) else 'opener')
        if not fault:
            twin = roll(blueprint, False, t0_s, frames)
            fault = check(twin)
        if not fault:
            return Pair(blueprint, t0_s, event, twin, tuple(rejected)), attempt + 1
        rejected.append(fault)
    raise ConfigurationError(f'{spec.pair_id} found no valid scene in {MAX_ATTEMPTS} draws; '
                             f'last reasons: {", ".join(rejected[-3:])}')


def visible_difference(a: np.ndarray, b: np.ndarray) -> int:
    """Return the largest per-camera count of pixels that differ by more than 24 levels."""
    apart = np.abs(a.astype(np.int16) - b.astype(np.int16)).max(axis=-1) > GATE_LEVELS
    return int(apart.reshape(apart.shape[0], -1).sum(axis=1).max())


def _same_scene(a: Scene, b: Scene) -> bool:
    """Tell whether two twins' scenes draw the same picture."""
    if a.agents != b.agents or len(a.paints) != len(b.paints):
        return False
    return (a.ego_x, a.ego_y, a.ego_yaw) == (b.ego_x, b.ego_y, b.ego_yaw) and all(
        p.colour == q.colour and np.array_equal(p.polygon, q.polygon)
        for p, q in zip(a.paints, b.paints))


def _render(renderer: SceneRenderer, scenes: list[Scene]) -> np.ndarray:
    """Return (4 cameras, frames, H, W, 3)."""
    return np.stack([renderer.render(scene) for scene in scenes], axis=1)


def visible_pair(spec: ClipSpec, renderer: SceneRenderer | None,
                 frames: Collection[int] = LAST_FRAMES) -> tuple[Pair, list[np.ndarray]]:
    """Return a pair that passes the pixel gate, and its last frames if rendered."""
    attempt = 0
    renderer = None if renderer is None else renderer_of(spec, renderer)
    rejected: tuple[str, ...] = ()
    while True:
        pair, attempt = simulate_pair(spec, attempt, frames)
        pair = replace(pair, rejected=rejected + pair.rejected)
        if renderer is None:
            return pair, []
        last = [renderer.render(r.scenes[-1]) for r in (pair.event, pair.twin)]
        if visible_difference(*last) >= GATE_PIXELS:
            return pair, last
        rejected = (*pair.rejected, 'pixels')


def generate_pair(spec: ClipSpec, renderer: SceneRenderer | None = None,
                  frames: Collection[int] = LAST_FRAMES) -> tuple[Clip, Clip]:
    """
    Return (event clip, twin); frames before the event are rendered once for both.

    `spec.event` is ignored. Without a renderer, images are None and the pixel gate is off.
    frames: the steps of 0.1 s that are images, in rising order, the last of them 15 at t0.
    """
    pair, last = visible_pair(spec, renderer, frames)
    images: list[np.ndarray | None] = [None, None]
    if renderer is not None:
        renderer = renderer_of(spec, renderer)
        first, second = pair.event.scenes, pair.twin.scenes
        event_frames = [renderer.render(scene) for scene in first[:-1]]
        twin_frames = [frame if _same_scene(a, b) else renderer.render(b)
                       for frame, a, b in zip(event_frames, first, second)]
        images = [np.stack([*event_frames, last[0]], axis=1),
                  np.stack([*twin_frames, last[1]], axis=1)]
    event, twin = (
        record(replace(spec, event=flag), rollout, pair.blueprint, pair.t0_s, pixels)
        for flag, rollout, pixels in ((True, pair.event, images[0]),
                                      (False, pair.twin, images[1])))
    return event, twin


def generate_clip(spec: ClipSpec, renderer: SceneRenderer | None = None) -> Clip:
    """Return one twin; it equals the one that `generate_pair` returns, byte for byte."""
    pair, last = visible_pair(spec, renderer)
    rollout = pair.event if spec.event else pair.twin
    images = None
    if renderer is not None:
        renderer = renderer_of(spec, renderer)
        frames = [renderer.render(scene) for scene in rollout.scenes[:-1]]
        images = np.stack([*frames, last[0 if spec.event else 1]], axis=1)
    return record(spec, rollout, pair.blueprint, pair.t0_s, images)


def clip_observation(clip: Clip) -> Observation:
    """
    Return the planner's input at the clip's t0; the odometry frame is the ego frame at t0.

    Raises ConfigurationError for a clip without images.
    """
    if clip.images is None:
        raise ConfigurationError(f'clip {clip.spec.pair_id} has no images; '
                                 'generate it with a renderer')
    poses = np.tile(np.eye(4), (HISTORY, 1, 1))
    yaw = clip.history[:, 3].astype(np.float64)
    poses[:, 0, 0] = poses[:, 1, 1] = np.cos(yaw)
    poses[:, 1, 0], poses[:, 0, 1] = np.sin(yaw), -np.sin(yaw)
    poses[:, :3, 3] = clip.history[:, :3]
    stamps = clip.t0_ns + np.arange(1 - FRAMES, 1, dtype=np.int64) * 100_000_000
    return Observation(
        t0_ns=clip.t0_ns, camera_names=CAMERAS, images=clip.images,
        image_stamps_ns=np.tile(stamps, (len(CAMERAS), 1)), ego_poses=poses,
        ego_pose_at_t0=np.eye(4), odometry_frame='map', speed_mps=clip.speed,
        navigation_text=clip.navigation_text)
