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
Open-loop driving of a checkpoint on the splits of the embedded world.

`rspec eval driving`: what the target says and drives, against constant velocity and against
itself without eyes. The batched numbers count only if they equal the planner's on a sample.
"""

from __future__ import annotations

from collections.abc import Callable
import os
from pathlib import Path
import time
from typing import Any

import numpy as np
import torch

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate.batched import Answers, BatchedPlanner, SIGHTS
from rspec_planner.evaluate.clips import render_clips
from rspec_planner.evaluate.results import write_driving
from rspec_planner.evaluate.scores import answer_of, ClipScore, score_of, split_report
from rspec_planner.model.checkpoint import load_target, read_manifest
from rspec_planner.planner.drafts import checkpoint_folder
from rspec_planner.planner.pipeline import Planner
from rspec_planner.planner.prompt import build_prompt, Prompt
from rspec_planner.planner.tokenizer import load_tokenizer
from rspec_planner.world.clip import Clip
from rspec_planner.world.generate import clip_observation
from rspec_planner.world.splits import split_specs

TEST_SPLITS = ('val', 'on-shelf', 'off-shelf')
SAMPLES = 6
BATCH = 16
CHECKED_CLIPS = 4
#: metres; float rounding in another batch shape, carried through ten flow steps
CHECK_TOLERANCE = 0.05
Progress = Callable[[int, int], None]


class DrivingEvaluation:
    """One checkpoint on one device; `run` scores a split."""

    def __init__(self, checkpoint: str | Path = 'tiny', device: str = 'cpu',
                 workers: int | None = None):
        self.folder = checkpoint_folder(checkpoint)
        self.workers, self.device = workers, torch.device(device)
        self.planner = Planner.load(self.folder, device=device)
        target = load_target(self.folder, device).requires_grad_(False).pack()
        self.cfg, self.tokenizer = target.cfg, load_tokenizer(self.folder)
        self.batched = BatchedPlanner(target, self.tokenizer)
        shape = (self.cfg.action_space.n_waypoints, 2)
        seeded = [torch.randn((count, *shape), generator=torch.Generator().manual_seed(0))
                  for count in (1, SAMPLES)]
        # sample 0 is the one that a planner with num_samples = 1 publishes
        self.noise = torch.cat((seeded[0], seeded[1][1:])).to(self.device)
        self.worst_difference = 0.0

    def run(self, split: str, clips: int | None = None,
            progress: Progress | None = None) -> list[ClipScore]:
        """Return the score of every clip of a split, in the order of the split."""
        specs = split_specs(split, clips)
        cameras = self.cfg.cameras
        waiting: dict[int, list[tuple[Clip, Prompt]]] = {}
        scores: dict[str, ClipScore] = {}
        checked = 0
        for clip in render_clips(specs, cameras.width, cameras.height, self.workers):
            if checked < CHECKED_CLIPS:
                self._check(clip)
                checked += 1
            prompt = build_prompt(self.cfg, self.tokenizer, clip_observation(clip).ego_poses,
                                  clip.navigation_text)
            group = waiting.setdefault(prompt.length, [])
            group.append((clip, prompt))
            if len(group) == BATCH:
                scores.update(self._score(waiting.pop(prompt.length)))
                if progress is not None:
                    progress(len(scores), len(specs))
        for group in waiting.values():
            scores.update(self._score(group))
        if progress is not None:
            progress(len(scores), len(specs))
        return [scores[_name(spec)] for spec in specs]

    def _answers(self, group: list[tuple[Clip, Prompt]], sight: str) -> Answers:
        pixels = np.stack([clip.images for clip, _ in group if clip.images is not None])
        images = torch.from_numpy(pixels).flatten(1, 2).to(self.device)
        history = np.stack([clip.history for clip, _ in group])
        # six samples of the blind variants would double the time and answer no question
        noise = self.noise if sight == 'camera' else self.noise[:1]
        noise = noise.expand(len(group), *noise.shape)
        return self.batched.answer([prompt for _, prompt in group], images, history, noise,
                                   sight)

    def _score(self, group: list[tuple[Clip, Prompt]]) -> dict[str, ClipScore]:
        answers = {sight: self._answers(group, sight) for sight in SIGHTS}
        result = {}
        for row, (clip, _) in enumerate(group):
            result[_name(clip.spec)] = score_of(clip, {
                sight: answer_of(clip, found.texts[row], found.xy[row], found.speeds[row])
                for sight, found in answers.items()})
        return result

    def _check(self, clip: Clip) -> None:
        """Compare the batched path with `Planner.plan`; EngineError when they differ."""
        observation = clip_observation(clip)
        self.planner.reset()
        plan = self.planner.plan(observation)
        prompt = build_prompt(self.cfg, self.tokenizer, observation.ego_poses,
                              observation.navigation_text)
        answers = self._answers([(clip, prompt)], 'camera')
        difference = float(np.abs(plan.poses[1:, :2] - answers.xy[0, 0]).max())
        self.worst_difference = max(self.worst_difference, difference)
        if plan.reasoning.token_ids != answers.token_ids[0] or difference > CHECK_TOLERANCE:
            raise EngineError(
                f'clip {clip.spec.pair_id}: batched evaluation says {answers.texts[0]!r}, the '
                f'planner {plan.reasoning.text!r}, paths {difference:.3f} m apart; do not trust '
                'batched numbers on this device')


def _name(spec: Any) -> str:
    return f'{spec.pair_id}/{spec.event}'


def evaluate_driving(split: str = 'all', *, clips: int | None = None, device: str = 'cpu',
                     checkpoint: str | Path = 'tiny', workers: int | None = None,
                     write_results: bool = False, results_path: str | Path | None = None,
                     progress: Progress | None = None) -> dict[str, Any]:
    """
    Evaluate a checkpoint; the keys of a single split also stand at the top level.

    split: 'val', 'on-shelf', 'off-shelf' or 'all'; clips scales a split. Raises
    ConfigurationError for an unknown split and EngineError for an unusable checkpoint.
    """
    if split != 'all' and split not in TEST_SPLITS:
        raise ConfigurationError(f'split {split!r} is unknown; use one of '
                                 f'{", ".join(TEST_SPLITS)} or all')
    evaluation = DrivingEvaluation(checkpoint, device, workers)
    chosen = TEST_SPLITS if split == 'all' else (split,)
    reports: dict[str, Any] = {}
    for name in chosen:
        started = time.monotonic()
        report = split_report(evaluation.run(name, clips, progress))
        report['seconds'] = round(time.monotonic() - started, 1)
        reports[name] = report
    manifest = read_manifest(evaluation.folder)
    result: dict[str, Any] = {
        'split': split, 'checkpoint': str(checkpoint), 'device': device,
        'threads': torch.get_num_threads(), 'processors': len(os.sched_getaffinity(0)),
        'revision': manifest.get('revision', ''), 'samples': SAMPLES, 'horizon_s': 6.4,
        'largest_difference_to_planner_m': round(evaluation.worst_difference, 6)}
    if len(chosen) == 1:
        result.update(reports[chosen[0]])
    result['splits'] = reports
    if write_results:
        result['results'] = str(write_driving(result, results_path))
    return result
