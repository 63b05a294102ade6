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
Compare what speculative decoding says and drives with greedy decoding, clip by clip.

The reference is greedy decoding through the same wide verify: that of the draft's own width with
proposals that no target can choose. Decoding one token a forward is compared as well; there a
matrix product of another shape may round a near tie the other way, so every difference is listed
with the gap of the two best logits. Trajectories come from the cache that each run left, under
the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rspec_planner.evaluate.bench import drive_observations
from rspec_planner.evaluate.reasoning_runs import Frame, PLAIN, Run, Stand, wide_plain
from rspec_planner.evaluate.survey import Taken
from rspec_planner.model.draft import DraftConfig
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.pipeline import Planner
from rspec_planner.planner.plan import Plan
from rspec_planner.world.clip import Clip

#: largest distance of two waypoints that still counts as the same trajectory. Keys and values of
#: another matrix shape differ in their last bits, and ten Euler steps carry that on.
TOLERANCE_M = 1e-3
LISTED = 50


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two texts differ, None for equal ones."""
    for index, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def apart_m(one: Run, other: Run) -> float:
    """Return the largest distance of equal waypoints of two runs, metres."""
    if one.xy is None or other.xy is None:
        raise ValueError('runs without trajectories: survey them with act=True')
    return float(np.linalg.norm(one.xy - other.xy, axis=-1).max())


class Divergences:
    """Lists where a text leaves that of width-1 decoding, while the logits can be read."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.count = 0  # of all, listed or not

    def take(self, stand: Stand, frame: Frame, clip: Clip, taken: Taken) -> None:
        """Compare every run of a clip with the plain one, see `survey.Probe`."""
        plain = taken.runs[PLAIN]
        for name, run in taken.runs.items():
            index = first_difference(plain.ids, run.ids)
            if index is None:
                continue
            self.count += 1
            if len(self.found) >= LISTED:
                continue
            pair = [ids[index] if index < len(ids) else None for ids in (plain.ids, run.ids)]
            gap = stand.top_two(frame, plain.ids, index) if index else float('nan')
            self.found.append({'clip': f'{clip.spec.pair_id}/{clip.spec.event}', 'run': name,
                               'index': index, 'width_1': pair[0], 'said': pair[1],
                               'top2_gap': gap})


def draft_report(taken: Sequence[Taken], name: str, block: int) -> dict[str, Any]:
    """Return counts of one draft over clips that were surveyed with trajectories."""
    wide = wide_plain(block)
    tokens = plain_tokens = trajectories = identical = 0
    worst = {wide: 0.0, PLAIN: 0.0}
    for clip in taken:
        run, reference, plain = clip.runs[name], clip.runs[wide], clip.runs[PLAIN]
        tokens += run.ids != reference.ids
        plain_tokens += run.ids != plain.ids
        distance = apart_m(run, reference)
        trajectories += distance > TOLERANCE_M
        identical += distance == 0.0
        worst[wide] = max(worst[wide], distance)
        if run.ids == plain.ids:
            worst[PLAIN] = max(worst[PLAIN], apart_m(run, plain))
    return {'clips': len(taken), 'token_mismatches': tokens,
            'token_mismatches_width_1': plain_tokens, 'trajectory_mismatches': trajectories,
            'bit_equal_trajectories': identical,
            'largest_deviation_mm': round(1e3 * worst[wide], 6),
            'largest_deviation_width_1_mm': round(1e3 * worst[PLAIN], 6)}


def exactness_report(taken: Sequence[Taken], drafts: Mapping[str, DraftConfig],
                     divergences: Divergences) -> dict[str, Any]:
    """Return the worst counts over the drafts at the top, then each draft."""
    rows = {name: draft_report(taken, name, cfg.block) for name, cfg in drafts.items()}
    keys = ('token_mismatches', 'token_mismatches_width_1', 'trajectory_mismatches',
            'largest_deviation_mm', 'largest_deviation_width_1_mm')
    return {'clips': len(taken),
            **{key: max((row[key] for row in rows.values()), default=0) for key in keys},
            'tolerance_mm': 1e3 * TOLERANCE_M, 'drafts': rows,
            'divergences': divergences.found, 'divergences_found': divergences.count}


class DeployedPair:
    """What the node runs, a draft with reuse, beside greedy decoding on the same frames."""

    def __init__(self, spoken: Callable[[Observation], Plan],
                 plain: Callable[[Observation], Plan]) -> None:
        """Take `Planner.plan` of both."""
        self._spoken, self._plain = spoken, plain
        self._frames = self._tokens = self._apart = self._equal = 0
        self._worst = 0.0

    def take(self, observation: Observation) -> None:
        """Plan one frame both ways and compare the text and the published path."""
        said, plain = self._spoken(observation), self._plain(observation)
        distance = float(np.linalg.norm(said.poses[:, :2] - plain.poses[:, :2], axis=-1).max())
        self._frames += 1
        self._tokens += said.reasoning.token_ids != plain.reasoning.token_ids
        self._apart += distance > TOLERANCE_M
        self._equal += distance == 0.0
        self._worst = max(self._worst, distance)

    def report(self) -> dict[str, Any]:
        """Return counts and the largest distance of equal waypoints."""
        return {'frames': self._frames, 'token_mismatches': self._tokens,
                'trajectory_mismatches': self._apart, 'bit_equal_trajectories': self._equal,
                'largest_deviation_mm': round(1e3 * self._worst, 6)}


def deployed_report(checkpoint: str | Path, draft: str, device: str, drives: int, frames: int,
                    progress: Callable[[int, int], None]) -> dict[str, Any]:
    """
    Return the deployed planner (draft and reuse) against the autoregressive one on drives.

    Text and path of every frame are compared; each drive starts without an earlier text.
    """
    spoken = Planner.load(checkpoint, device=device, draft=draft, reuse=True, caution=False)
    plain = Planner.load(checkpoint, device=device, caution=False)
    pair, cameras = DeployedPair(spoken.plan, plain.plan), plain.profile.cameras
    for number in range(drives):
        spoken.reset()
        plain.reset()
        seen = drive_observations(frames, cameras.width, cameras.height, cameras.names,
                                  seed=200 + number)
        for index, observation in enumerate(seen, start=1):
            pair.take(observation)
            progress(number * frames + index, drives * frames)
    return {'draft': draft, 'drives': drives, **pair.report()}
