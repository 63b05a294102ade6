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
Who plans in the closed loop: the target in batches, the deployed planner, and two that are blind.

Each policy turns the views of many runs into plans; how long a plan takes is not measured here
but modelled (`closed_latency.py`), because a batch says nothing about the time of one frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rspec_planner.evaluate.batched import BatchedPlanner
from rspec_planner.evaluate.closed_world import View
from rspec_planner.model.config import CautionConfig
from rspec_planner.model.target import Target
from rspec_planner.model.unicycle import UnicycleActionSpace
from rspec_planner.planner.caution import Arrays, Caution
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.pipeline import Planner
from rspec_planner.planner.plan import PLAN_POINTS
from rspec_planner.planner.prompt import build_prompt, Prompt
from rspec_planner.planner.tokenizer import Tokenizer
from rspec_planner.planner.trajectory import check_trajectory
from rspec_planner.world.generate import CAMERAS, FRAMES


class Cautions:
    """One caution per run, where the target's profile says what unsure is."""

    def __init__(self, config: CautionConfig | None) -> None:
        self._config, self._runs = config, dict[int, Caution]()

    def drive(self, number: int, t0_ns: int, confidence: float, drawn: Arrays
              ) -> tuple[bool, Arrays]:
        """Return whether that run is cautious now, and the plan that it drives."""
        if self._config is None:
            return False, drawn
        caution = self._runs.setdefault(number, Caution(self._config))
        return caution.drive(t0_ns, confidence, drawn)


@dataclass(frozen=True)
class Made:
    """One plan: poses (65, 4), speeds, accelerations, curvatures, or None when refused."""

    plan: Arrays | None
    token_ids: tuple[int, ...] = ()
    text: str = ''
    iterations: int = 0  # of the draft, where one decoded
    cautious: bool = False  # driven slower than drawn
    confidence: float = math.nan  # see `decode.confidence`


class Policy(Protocol):
    """Whoever plans."""

    needs_images: bool

    def plan(self, views: Mapping[int, View]) -> dict[int, Made]:
        """Return a plan for each run's view."""


class ConstantVelocity:
    """Keeps speed and heading."""

    needs_images = False

    def plan(self, views: Mapping[int, View]) -> dict[int, Made]:
        """Return straight plans."""
        made = {}
        for number, view in views.items():
            poses = np.zeros((PLAN_POINTS, 4))
            poses[:, 0] = 0.1 * view.speed * np.arange(PLAN_POINTS)
            made[number] = Made((poses, np.full(PLAN_POINTS, view.speed),
                                 np.zeros(PLAN_POINTS), np.zeros(PLAN_POINTS)))
        return made


def observation_of(view: View, images: np.ndarray) -> Observation:
    """Return the planner's input; images (4 cameras, 4 frames, H, W, 3) uint8."""
    yaw = view.history[:, 3].astype(np.float64)
    poses = np.tile(np.eye(4), (len(yaw), 1, 1))
    poses[:, 0, 0] = poses[:, 1, 1] = np.cos(yaw)
    poses[:, 1, 0], poses[:, 0, 1] = np.sin(yaw), -np.sin(yaw)
    poses[:, :3, 3] = view.history[:, :3]
    stamps = view.t0_ns + np.arange(1 - FRAMES, 1, dtype=np.int64) * 100_000_000
    return Observation(
        t0_ns=view.t0_ns, camera_names=CAMERAS, images=images,
        image_stamps_ns=np.tile(stamps, (len(CAMERAS), 1)), ego_poses=poses,
        ego_pose_at_t0=np.eye(4), odometry_frame='map', speed_mps=view.speed,
        navigation_text=view.navigation)


class DeployedPlanner:
    """The planner as the node runs it, frame by frame, with one draft or none."""

    needs_images = True

    def __init__(self, checkpoint: str, device: str, draft: str | None) -> None:
        self._planner = Planner.load(checkpoint, device=device, draft=draft,
                                     use_vision_cache=False, caution=False)
        self._cautions = Cautions(self._planner.profile.caution)  # the planner knows one run
        self._frames: dict[int, dict[int, np.ndarray]] = {}

    def plan(self, views: Mapping[int, View]) -> dict[int, Made]:
        """Return one plan after the other."""
        return {number: self._one(number, view) for number, view in views.items()}

    def _one(self, number: int, view: View) -> Made:
        known = {**self._frames.get(number, {}), **view.images}
        wanted = range(view.tick - FRAMES + 1, view.tick + 1)
        self._frames[number] = {tick: known[tick] for tick in wanted}
        images = np.stack([known[tick] for tick in wanted], axis=1)
        plan = self._planner.plan(observation_of(view, images))
        cautious, driven = self._cautions.drive(
            number, view.t0_ns, plan.reasoning.stats.confidence,
            (plan.poses, plan.speeds, plan.accelerations, plan.curvatures))
        spoken = not plan.verdict.reason.startswith('reasoning_')
        accepted = check_trajectory(*driven).accepted if cautious and spoken \
            else plan.verdict.accepted
        return Made(driven if accepted else None, plan.reasoning.token_ids,
                    plan.reasoning.text, plan.reasoning.stats.iterations, cautious,
                    plan.reasoning.stats.confidence)


class BatchedTarget:
    """The target over batches of runs; `sight` as in `batched.SIGHTS`."""

    def __init__(self, target: Target, tokenizer: Tokenizer, sight: str, batch: int,
                 noise: Tensor, caution: bool = True) -> None:
        """`noise` (64, 2) is that of the planner's seed."""
        self._batched, self._tokenizer = BatchedPlanner(target, tokenizer), tokenizer
        self._space = UnicycleActionSpace(target.cfg.action_space)
        self._cfg, self._device = target.cfg, target.device
        self._sight, self._batch, self._noise = sight, batch, noise.to(target.device)
        self._encoded: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._cautions = Cautions(target.cfg.caution if caution else None)
        self.needs_images = sight == 'camera'

    def plan(self, views: Mapping[int, View]) -> dict[int, Made]:
        """Plan all views, batches of equal prompt length."""
        groups: dict[int, list[tuple[int, View, Prompt]]] = {}
        for number, view in views.items():
            blank = np.empty((0,))  # the prompt needs no image
            observation = observation_of(view, blank)
            prompt = build_prompt(self._cfg, self._tokenizer, observation.ego_poses,
                                  view.navigation)
            groups.setdefault(prompt.length, []).append((number, view, prompt))
        made: dict[int, Made] = {}
        for group in groups.values():
            for start in range(0, len(group), self._batch):
                made.update(self._plan(group[start:start + self._batch]))
        return made

    def _plan(self, group: Sequence[tuple[int, View, Prompt]]) -> dict[int, Made]:
        views = [(number, view) for number, view, _ in group]
        features = self._features(views) if self.needs_images else \
            self._batched.features(None, len(group), self._sight)
        history = np.stack([view.history for _, view in views])
        noise = self._noise.expand(len(group), 1, *self._noise.shape)
        answers = self._batched.answer_encoded([prompt for _, _, prompt in group], features,
                                               history, noise)
        plans = self._rolled(answers.actions[:, 0], [view for _, view in views])
        stop = self._cfg.tokens.traj_future_start
        made = {}
        for row, ((number, view), ids) in enumerate(zip(views, answers.token_ids)):
            sure = float(answers.confidences[row])
            cautious, driven = self._cautions.drive(number, view.t0_ns, sure, plans[row])
            fine = ids[-1:] == (stop,) and check_trajectory(*driven).accepted
            made[number] = Made(driven if fine else None, ids, answers.texts[row],
                                cautious=cautious, confidence=sure)
        return made

    @torch.no_grad()
    def _features(self, views: Sequence[tuple[int, View]]) -> tuple[Tensor, list[Tensor]]:
        """Return features of all frames, camera-major; frames seen before are not encoded."""
        new = [(number, tick, frames) for number, view in views
               for tick, frames in view.images.items()]
        for start in range(0, len(new), self._batch):
            part = new[start:start + self._batch]
            images = torch.from_numpy(np.stack([frames for _, _, frames in part]))
            features, deep = self._batched.encode(images.to(self._device))
            cameras, width = images.shape[1], features.shape[-1]
            deepstack = torch.stack(deep, dim=1)  # (n, levels, V * T, H)
            for row, (number, tick, _) in enumerate(part):
                self._encoded[number, tick] = (
                    features[row].view(cameras, -1, width).clone(),
                    deepstack[row].view(len(deep), cameras, -1, width).clone())
        rows, deep_rows = [], []
        for number, view in views:
            kept = [self._encoded[number, view.tick - back] for back in range(FRAMES - 1, -1, -1)]
            rows.append(torch.stack([f for f, _ in kept], dim=1).flatten(0, 2))
            deep_rows.append(torch.stack([d for _, d in kept], dim=2).flatten(1, 3))
            self._forget(number, view.tick - FRAMES + 1)
        together = torch.stack(deep_rows, dim=1)
        return torch.stack(rows), list(together)

    def _forget(self, number: int, before: int) -> None:
        for key in [k for k in self._encoded if k[0] == number and k[1] <= before]:
            del self._encoded[key]

    def _rolled(self, actions: np.ndarray, views: Sequence[View]) -> list[Arrays]:
        """Integrate normalised actions (B, 64, 2) as the planner does."""
        history = torch.from_numpy(np.stack([view.history for view in views])).double()
        wide = torch.from_numpy(actions).double()
        v0 = self._space.initial_speed(history[:, :, :2], history[:, :, 3]).clamp(min=0.0)
        xy, yaw, speed = self._space.integrate(wide, v0, floor_at_zero=True)
        curvature = self._space.denormalise(wide)[..., 1].numpy()
        applied = (torch.diff(speed, dim=-1, prepend=v0[:, None])
                   / self._space.cfg.dt).numpy()
        plans: list[Arrays] = []
        for row, view in enumerate(views):
            poses = np.zeros((PLAN_POINTS, 4))
            poses[1:, :2], poses[1:, 3] = xy[row].numpy(), yaw[row].numpy()
            plans.append((poses, np.concatenate([[view.speed], speed[row].numpy()]),
                          np.append(applied[row], applied[row, -1]),
                          np.append(curvature[row], curvature[row, -1])))
        return plans
