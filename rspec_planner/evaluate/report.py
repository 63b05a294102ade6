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
The evaluations behind `rspec eval length|exactness|attention|routing|reuse`.

Each builds a stand, chooses who decodes and what is looked at, and surveys the splits once.
`evaluate_reasoning` asks all questions in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
import os
from pathlib import Path
import time
from typing import Any

import torch

from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.attention import AttentionProbe
from rspec_planner.evaluate.bench import hardware
from rspec_planner.evaluate.deployed import extra_ms, PREFILL_CLIPS, PrefillProbe
from rspec_planner.evaluate.exactness import deployed_report, Divergences, exactness_report
from rspec_planner.evaluate.floor import floor_table, TRAIN_CLIPS
from rspec_planner.evaluate.length import length_report
from rspec_planner.evaluate.pairs import described
from rspec_planner.evaluate.reasoning_runs import Contender, Stand
from rspec_planner.evaluate.reuse import reuse_report
from rspec_planner.evaluate.routing import DisturbanceProbe, RoutingProbe
from rspec_planner.evaluate.sampled_runs import SampledProbe, Sampling
from rspec_planner.evaluate.survey import chosen_splits, Probe, Progress, Survey, Taken
from rspec_planner.evaluate.tree_runs import variant_contender, variants
from rspec_planner.model.checkpoint import read_manifest
from rspec_planner.model.draft import DraftConfig
from rspec_planner.planner.drafts import draft_folder, embedded_drafts
from rspec_planner.planner.reasoner import GUESS_ROOM
from rspec_planner.world.splits import split_specs

QUESTIONS = ('length', 'exactness', 'attention', 'routing', 'reuse')
#: at most so many drives and frames of each compare the deployed planner with the greedy one
DEPLOYED_DRIVES, DEPLOYED_FRAMES = 3, 40
#: at least so many clips of a whole run are looked at by the slower probes
ATTENTION_CLIPS, DISTURBED_CLIPS = 120, 200
Bars = Callable[[str], AbstractContextManager[Progress]]


@contextmanager
def no_bars(label: str) -> Iterator[Progress]:
    """Show nothing."""
    yield lambda done, total: None


@dataclass(frozen=True)
class Subject:
    """What is evaluated, on how many clips, and where."""

    drafts: tuple[str, ...] = ()  # embedded names or folders; empty: all embedded ones
    readers: tuple[str, ...] = ()  # more drafts, whose attention alone is looked at
    split: str = 'all'
    clips: int | None = None  # of each split
    checkpoint: str | Path = 'tiny'
    device: str = 'cpu'
    floor_clips: int = TRAIN_CLIPS
    drives: int = 5
    frames: int = 60
    sampling: Sampling | None = None  # also sample: how; None: greedy decoding alone
    trees: tuple[int, ...] = ()  # node budgets of trees, see `tree_runs.variants`

    def loop_drafts(self) -> tuple[str, ...]:
        """Return the drafts that decode; ConfigurationError when there is none."""
        found = self.drafts or embedded_drafts()
        if not found:
            raise ConfigurationError('no draft is embedded and none was given; train one with '
                                     'rspec train dflash and give its folder with --draft')
        return tuple(dict.fromkeys(found))

    def total_clips(self) -> int:
        """Return how many clips a survey takes."""
        return sum(len(split_specs(name, self.clips)) for name in chosen_splits(self.split))


def every(total: int, wanted: int) -> int:
    """Return the step in pairs that looks at `wanted` of `total` clips or more."""
    return max(total // wanted, 1)


class Evaluation:
    """One subject's stand, contenders and probes."""

    def __init__(self, subject: Subject, questions: Collection[str]) -> None:
        """Load everything that the questions need."""
        self.subject, self.questions = subject, questions
        loop = subject.loop_drafts()
        chosen = tuple(dict.fromkeys((*loop, *subject.readers)))
        self.stand = Stand(subject.checkpoint, subject.device, drafts=chosen, guess=GUESS_ROOM,
                           widest=max((1, *subject.trees)))
        self.loop = list(dict.fromkeys(self.stand.label(name) for name in loop))
        self.configs: dict[str, DraftConfig] = {
            name: self.stand.drafts[name].cfg for name in self.loop}
        self.variants = variants(self.configs, subject.trees)
        self.blocks = sorted({cfg.block for cfg in self.configs.values()})
        self.divergences = Divergences()
        self.routing = RoutingProbe({name: self.stand.drafts[name] for name in self.loop})
        self.plain = self.stand.plain()
        total = subject.total_clips()
        self.prefill = PrefillProbe(self.stand, self.loop, every(total, PREFILL_CLIPS))
        # drafts without a window say most; with none among them, the others are looked at
        readers = {name: draft for name, draft in self.stand.drafts.items()
                   if draft.cfg.window == 0} or self.stand.drafts
        self.attention = AttentionProbe(readers, every(total, ATTENTION_CLIPS))
        self.sampled = None if subject.sampling is None else SampledProbe(
            self.stand, self.loop, subject.sampling)
        self.disturbance = DisturbanceProbe(self.plain, every(total, DISTURBED_CLIPS))

    def contenders(self) -> list[Contender]:
        """Return who decodes every clip, plain decoding first."""
        stand, asked = self.stand, self.questions
        found: list[Contender] = [self.plain]
        if 'length' in asked:
            table = floor_table(stand.tokenizer, self.subject.floor_clips)
            found += [stand.eager(), *(stand.floor(table, block) for block in self.blocks)]
        if {'length', 'exactness', 'routing'} & set(asked):
            found += [stand.speculative(name) for name in self.loop]
        if {'length', 'exactness'} & set(asked):
            found += [variant_contender(stand, variant) for variant in self.variants]
        if 'exactness' in asked:
            found += [stand.junk(block) for block in self.blocks]
        return found

    def probes(self) -> list[Probe]:
        """Return what looks at every frame; what spoils the text, then the prompt, comes last."""
        asked = self.questions
        found: list[Probe] = []
        if 'length' in asked:
            found.append(self.prefill)
        if 'exactness' in asked:
            found.append(self.divergences)
        if 'attention' in asked:
            found.append(self.attention)
        if 'routing' in asked:
            found.append(self.routing)
        if 'length' in asked and self.sampled is not None:
            found.append(self.sampled)
        if 'routing' in asked:
            found.append(self.disturbance)
        return found

    def run(self, bars: Bars) -> dict[str, Any]:
        """Return the report of every question."""
        result: dict[str, Any] = {}
        started = time.monotonic()
        if set(self.questions) - {'reuse'}:
            survey = Survey(self.stand, self.contenders(), self.probes(),
                            act='exactness' in self.questions)
            with bars('clips') as show:
                taken = survey.run(self.subject.split, self.subject.clips, progress=show)
            result.update(self._reports(taken))
        result['survey_seconds'] = round(time.monotonic() - started, 1)
        if 'exactness' in self.questions:
            with bars('deployed') as show:
                result['exactness']['deployed'] = self._deployed(show)
        if 'reuse' in self.questions:
            with bars('drives') as show:
                result['reuse'] = reuse_report(self.stand, self.loop[0], self.subject.drives,
                                               self.subject.frames, show)
        return result

    def _deployed(self, show: Progress) -> dict[str, Any]:
        """Return the default draft with reuse against greedy decoding; else the first draft."""
        subject = self.subject
        try:
            draft = 'default'
            draft_folder(draft, self.stand.folder)
        except ConfigurationError:
            draft = subject.loop_drafts()[0]
        return deployed_report(subject.checkpoint, draft, subject.device,
                               min(subject.drives, DEPLOYED_DRIVES),
                               min(subject.frames, DEPLOYED_FRAMES), show)

    def _reports(self, taken: Sequence[Taken]) -> dict[str, Any]:
        asked = self.questions
        found: dict[str, Any] = {}
        if 'length' in asked:
            prefill = self.prefill.report()
            found['length'] = {**length_report(taken, self.configs, self.variants,
                                               extra_ms(prefill)),
                               'prefill': prefill, 'floor_clips': self.subject.floor_clips}
            if self.sampled is not None:
                found['length']['sampled'] = self.sampled.report()
        if 'exactness' in asked:
            named = self.configs | {variant.name: self.configs[variant.base]
                                    for variant in self.variants}
            found['exactness'] = exactness_report(taken, named, self.divergences)
        if 'attention' in asked:
            found['attention'] = self.attention.report()
        if 'routing' in asked:
            found['routing'] = {**self.routing.report(),
                                'disturbance': self.disturbance.report()}
        return found

    def header(self) -> dict[str, Any]:
        """Return what was measured and where."""
        subject, target = self.subject, self.stand.target
        manifest = read_manifest(self.stand.folder)
        return {'split': subject.split, 'checkpoint': str(subject.checkpoint),
                'revision': manifest.get('revision', ''), 'profile': target.cfg.name,
                'device': subject.device, 'hardware': hardware(self.stand.device),
                'threads': torch.get_num_threads(),
                'processors': len(os.sched_getaffinity(0)), 'torch': torch.__version__,
                'precision': str(target.dtype).removeprefix('torch.'),
                'draft_shapes': {
                    name: {'name': draft.cfg.name, 'shape': described(draft.cfg),
                           'kind': draft.cfg.kind, 'block': draft.cfg.block,
                           'window': draft.cfg.window, 'rotary': draft.cfg.rotary,
                           'parameters': draft.num_parameters()}
                    for name, draft in self.stand.drafts.items()}}


def evaluate_reasoning(questions: Collection[str], subject: Subject,
                       bars: Bars = no_bars) -> dict[str, Any]:
    """
    Return header and one report per question, see QUESTIONS.

    Raises ConfigurationError for an unknown split or without any draft, and EngineError for an
    unusable checkpoint or draft.
    """
    evaluation = Evaluation(subject, tuple(questions))
    reports = evaluation.run(bars)
    return {**evaluation.header(), **reports}


def evaluate_one(question: str, subject: Subject, bars: Bars = no_bars) -> dict[str, Any]:
    """
    Return the report of one question with its keys at the top level.

    length: the keys of a single split also stand at the top.
    """
    result = evaluate_reasoning((question,), subject, bars)
    report = result.pop(question)
    if question == 'length' and len(report['splits']) == 1:
        report = {**next(iter(report['splits'].values())), **report}
    return {**result, **report}
