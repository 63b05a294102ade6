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
Temporal reuse on drives: the previous plan's reasoning rides in the prefill.

Drives of the embedded world at 10 Hz. Every frame is decoded greedily, by the draft alone
(stateless), and by the draft behind a prefill that verifies the text of 0.1, 0.2 or 0.5 s
before, in rotating order. Reuse is exact, so the texts must be equal; what changes is how many
decoding iterations are left. These numbers do not mix with the stateless L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rspec_planner.decode.reuse import place_guess
from rspec_planner.evaluate.bench import drive_observations
from rspec_planner.evaluate.deployed import deployed_stages, hand_over, timed_prefill
from rspec_planner.evaluate.intervals import ratio_interval, statistic_interval
from rspec_planner.evaluate.length import breakdown, time_summary
from rspec_planner.evaluate.metrics import wilson
from rspec_planner.evaluate.reasoning_runs import Run, Stand
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.pipeline import Stages
from rspec_planner.planner.prompt import Prompt

#: frames between a text and its reuse, at 10 Hz
SPACINGS = {'0.1 s': 1, '0.2 s': 2, '0.5 s': 5}
GREEDY, STATELESS = 'greedy', 'stateless'
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Step:
    """One frame decoded one way."""

    run: Run
    prefill_ms: float
    guessed: int  # tokens that rode in the prefill


class DriveReuse:
    """Decodes the frames of drives in every way, through the stages that the planner deploys."""

    def __init__(self, stand: Stand, draft: str) -> None:
        """Take a stand, which encodes the frames, and one of its drafts."""
        self._stand = stand
        self._plain, self._draft = deployed_stages(stand), deployed_stages(stand, draft)
        self.steps: dict[str, list[Step]] = {
            name: [] for name in (GREEDY, STATELESS, *SPACINGS)}
        self.mismatches = 0
        self.drives: list[int] = []  # the drive of each frame of SPACINGS and of STATELESS

    def drive(self, observations: Iterable[Observation], number: int,
              show: Callable[[], None] = lambda: None) -> None:
        """Decode the frames of one drive; the longest spacing ahead of them is warm-up."""
        texts: list[tuple[int, ...]] = []
        longest = max(SPACINGS.values())
        for turn, observation in enumerate(observations):
            self._stand.encode(observation)
            ways: dict[str, tuple[Stages, tuple[int, ...]]] = {
                GREEDY: (self._plain, ()), STATELESS: (self._draft, ())}
            counted = turn >= longest
            if counted:
                ways.update({name: (self._draft, texts[-back])
                             for name, back in SPACINGS.items()})
            found = self._frame(observation, ways, turn)
            text = found[GREEDY].run.ids
            if counted:
                self.drives.append(number)
                for name, step in found.items():
                    self.steps[name].append(step)
                    self.mismatches += step.run.ids != text
            texts.append(text)
            show()

    def _frame(self, observation: Observation,
               ways: Mapping[str, tuple[Stages, tuple[int, ...]]], turn: int
               ) -> dict[str, Step]:
        """Decode one frame in every way; another way comes first at every turn."""
        prompt, names = self._stand.place(observation), list(ways)
        first = turn % len(names)
        return {name: self._decode(prompt, *ways[name])
                for name in (*names[first:], *names[:first])}

    def _decode(self, prompt: Prompt, stages: Stages, guess: tuple[int, ...]) -> Step:
        stand = self._stand
        hand_over(stand, stages, prompt)
        kept = place_guess(stages.prefill, prompt.length, prompt.rope_delta, guess)
        spent = timed_prefill(stand, stages)
        started = perf_counter()
        ids, stats, length = stages.reasoner.reason(prompt, stages.prefill, kept)
        stand.wait()
        return Step(Run(ids, stats, length, 1e3 * (perf_counter() - started)), spent, len(kept))

    def report(self) -> dict[str, Any]:
        """Return every way side by side; times in milliseconds."""
        stateless = [step.run.ms + step.prefill_ms for step in self.steps[STATELESS]]
        found = {name: self._way(steps, name, stateless) for name, steps in self.steps.items()}
        return {'frames': len(self.drives), 'drives': len(set(self.drives)), 'rate_hz': 10,
                'token_mismatches': self.mismatches, 'ways': found}

    @staticmethod
    def _way(steps: Sequence[Step], name: str, stateless: Sequence[float]) -> dict[str, Any]:
        runs = [step.run for step in steps]
        total = [step.run.ms + step.prefill_ms for step in steps]
        iterations = np.array([run.stats.iterations for run in runs], np.int64)
        row: dict[str, Any] = {
            'iterations': statistic_interval(iterations),
            'target_forwards': statistic_interval(
                iterations + np.array([run.stats.closing_forwards for run in runs], np.int64)),
            'breakdown_ms': breakdown(runs),
            'reasoning_ms': time_summary([run.ms for run in runs]),
            'prefill_ms': time_summary([step.prefill_ms for step in steps]),
            'prefill_and_reasoning_ms': time_summary(total)}
        if name in SPACINGS:
            full = [run.stats.iterations == 0 for run in runs]
            reused = np.array([run.stats.reused for run in runs], np.int64)
            row['full_match'] = wilson(sum(full), len(full)).to_dict()
            row['reused_tokens'] = statistic_interval(reused)
            row['reused_share'] = ratio_interval(
                reused, np.array([len(run.ids) - 1 for run in runs], np.int64))
            row['time_ratio_to_stateless'] = statistic_interval(
                np.array(stateless) / np.array(total), lambda v: np.median(v, axis=-1))
        return row


@torch.inference_mode()
def reuse_report(stand: Stand, draft: str, drives: int = 5, frames: int = 60,
                 progress: Progress | None = None) -> dict[str, Any]:
    """Return the report over `drives` drives of `frames` counted frames each."""
    found, done = DriveReuse(stand, draft), 0
    cameras, ahead = stand.cfg.cameras, max(SPACINGS.values())

    def show() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, drives * (frames + ahead))

    for number in range(drives):
        found.drive(drive_observations(frames + ahead, cameras.width, cameras.height,
                                       cameras.names, seed=100 + number), number, show)
    return {'draft': draft, **found.report()}
