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
Closed-loop driving of a checkpoint: `rspec eval driving --closed-loop`.

Every way to drive (the target at each latency, the target without eyes, constant velocity, the
expert's own plan) drives the same scenarios. Finished runs are kept in a folder, so that a run
that was interrupted goes on where it stopped. Drafts are compared one by one in runs of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
import json
import os
from pathlib import Path
import time
from typing import Any

import numpy as np
import torch

from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.closed_farm import Answer, RunFarm, Stepping
from rspec_planner.evaluate.closed_latency import Latency, MEASURED
from rspec_planner.evaluate.closed_policies import (
    BatchedTarget,
    ConstantVelocity,
    DeployedPlanner,
    Made,
    Policy,
)
from rspec_planner.evaluate.closed_report import split_table
from rspec_planner.evaluate.closed_sheets import write_sheets
from rspec_planner.evaluate.closed_world import Outcome, View
from rspec_planner.model.checkpoint import load_target, read_manifest
from rspec_planner.planner.drafts import checkpoint_folder, embedded_drafts
from rspec_planner.planner.tokenizer import load_tokenizer
from rspec_planner.world.clip import ClipSpec
from rspec_planner.world.splits import split_specs

SPLITS = ('on-shelf', 'off-shelf')
RUNS = 200
#: metres: two drives whose plans differ by rounding stay this near to each other
SAME_PATH_M = 0.01
INSTANT = Latency('instant', 0.0)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ClosedOptions:
    """What is driven, and how."""

    splits: tuple[str, ...] = SPLITS
    runs: int = RUNS  # of each split
    plan_hz: float = 10.0
    latencies: tuple[Latency, ...] = MEASURED
    drafts: tuple[str, ...] = ()
    iso_runs: int = 8  # of each split, per draft
    iso_hz: float | None = None  # 2, or enough for caution where the checkpoint has it
    checkpoint: str = 'tiny'
    device: str = 'cpu'
    workers: int | None = None
    batch: int = 16  # runs that are open at once and planned in one pass
    folder: Path | None = None  # keeps finished runs, and pictures of failures
    sheets: int = 12  # pictures of each split at most

    def __post_init__(self) -> None:
        for split in self.splits:
            if split not in ('val', *SPLITS):
                raise ConfigurationError(f'split {split!r} is unknown; use val, on-shelf or '
                                         'off-shelf')
        if self.runs < 1 or not 0.1 <= self.plan_hz <= 10.0:
            raise ConfigurationError(f'{self.runs} runs at {self.plan_hz:g} Hz: at least one run, '
                                     'and 0.1 to 10 plans a second')

    @property
    def period(self) -> int:
        """Return the ticks of 0.1 s between two plans at least."""
        return max(1, round(10.0 / self.plan_hz))


class ClosedLoop:
    """One checkpoint, its policies and the processes that step the world."""

    def __init__(self, options: ClosedOptions, farm: RunFarm) -> None:
        self.options, self._farm = options, farm
        folder = checkpoint_folder(options.checkpoint)
        self.manifest = read_manifest(folder)
        self._target = load_target(folder, options.device).requires_grad_(False).pack()
        self._tokenizer = load_tokenizer(folder)
        cfg = self._target.cfg
        self.size = (cfg.cameras.width, cfg.cameras.height)
        self._noise = torch.randn((1, cfg.action_space.n_waypoints, 2),
                                  generator=torch.Generator().manual_seed(0))[0]

    @property
    def iso_period(self) -> int:
        """Return the ticks between two plans of the comparison of drafts."""
        usual = 3.3 if self._target.cfg.caution is not None else 2.0
        return max(1, round(10.0 / (self.options.iso_hz or usual)))

    @property
    def caution(self) -> dict[str, Any]:
        """Return {'caution': its thresholds}, or nothing for a checkpoint without."""
        found = self._target.cfg.caution
        return {} if found is None else {'caution': asdict(found)}

    def target(self, sight: str = 'camera', caution: bool = True) -> Policy:
        """Return the target over batches; without `caution` it drives as drawn."""
        return BatchedTarget(self._target, self._tokenizer, sight, self.options.batch,
                             self._noise, caution)

    def planner(self, draft: str | None) -> Policy:
        """Return the deployed planner with a draft, or decoding one token a forward."""
        return DeployedPlanner(self.options.checkpoint, self.options.device, draft)

    def stepping(self, render: bool, period: int, expert: bool = False) -> Stepping:
        """Return how runs are stepped at the checkpoint's image size."""
        return Stepping(*self.size, render=render, period=period, expert=expert)

    def drive(self, specs: Sequence[ClipSpec], policy: Policy | None, how: Stepping,
              latency: Latency) -> Iterator[Outcome]:
        """Yield the outcome of every spec, as they end; no policy: the expert's plan."""
        numbered = list(enumerate(specs))
        for start in range(0, len(numbered), self.options.batch):
            states = self._farm.open(numbered[start:start + self.options.batch], how)
            while states:
                yield from (state for state in states.values() if isinstance(state, Outcome))
                views = {number: state for number, state in sorted(states.items())
                         if isinstance(state, View)}
                if not views or policy is None:
                    break
                made = policy.plan(views)
                states = self._farm.answer({number: answer_of(plan, latency)
                                            for number, plan in made.items()})


def answer_of(made: Made, latency: Latency) -> Answer:
    """Return a plan with the time that its making took."""
    return Answer(made.plan, latency.seconds(len(made.token_ids)), made.text, made.cautious,
                  made.confidence)


def key_of(spec: ClipSpec) -> str:
    """Return the name of a run."""
    return f'{spec.pair_id}/{"event" if spec.event else "twin"}'


class RunStore:
    """Finished runs of one way to drive, one JSON line each; resumes."""

    def __init__(self, folder: Path | None, name: str, settings: dict[str, Any]) -> None:
        self._path = None if folder is None else folder / f'{name}.jsonl'
        self.found: dict[str, Outcome] = {}
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._read(self._path, settings)
        else:
            self._path.write_text(json.dumps(settings) + '\n', encoding='utf-8')

    def _read(self, path: Path, settings: dict[str, Any]) -> None:
        text = path.read_text(encoding='utf-8')
        if not text.endswith('\n'):  # cut off while it was written
            path.write_text(text + '\n', encoding='utf-8')
        head, *lines = text.splitlines() or ['{}']
        if json.loads(head) != settings:
            raise ConfigurationError(f'{path} holds runs with other settings, {head}; give '
                                     'another --out or remove it')
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # driven again
            spec = ClipSpec(**row.pop('spec'))
            self.found[key_of(spec)] = Outcome(spec, **row)

    def add(self, outcome: Outcome) -> None:
        """Keep one finished run."""
        self.found[key_of(outcome.spec)] = outcome
        if self._path is not None:
            with self._path.open('a', encoding='utf-8') as file:
                file.write(json.dumps(asdict(outcome)) + '\n')


def spread(specs: Sequence[ClipSpec], count: int) -> list[ClipSpec]:
    """Return `count` specs over the whole list, so that few runs still show many families."""
    step = max(1, len(specs) // max(count, 1))
    return list(specs[::step])[:count]


def closed_specs(split: str, runs: int) -> list[ClipSpec]:
    """Return the scenarios of a split: its clips, more of them when more runs are asked for."""
    own = split_specs(split)
    return own[:runs] if split != 'off-shelf' and runs <= len(own) else \
        spread(own, runs) if runs <= len(own) else split_specs(split, runs)


def evaluate_closed_loop(options: ClosedOptions, progress: Progress | None = None
                         ) -> dict[str, Any]:
    """Drive every way over every split; see ClosedOptions. Raises RspecError."""
    started = time.monotonic()
    count = len(os.sched_getaffinity(0))
    workers = min(count, 14) if options.workers is None else options.workers
    with RunFarm(workers) as farm:
        loop = ClosedLoop(options, farm)
        reports = {split: _split(loop, split, progress) for split in options.splits}
        iso = _iso(loop, progress) if options.iso_runs else {}
    flags = [report['identical'] for report in iso.values()]
    head = reports[options.splits[0]]
    return {'checkpoint': options.checkpoint, 'device': options.device,
            'revision': loop.manifest.get('revision', ''), 'runs': options.runs,
            'plan_hz': options.plan_hz, 'horizon_s': 6.4, 'processors': count,
            'latencies': {latency.name: latency.to_dict() for latency in options.latencies},
            'collision_rate': {split: report['ways'][options.latencies[0].name]['collision']
                               for split, report in reports.items()},
            'ways': list(head['ways']), 'splits': reports, 'iso': iso,
            'iso_quality': bool(flags) and all(flags),
            'seconds': round(time.monotonic() - started, 1)}


def _ways(loop: ClosedLoop) -> Iterator[tuple[str, Policy | None, Stepping, Latency]]:
    """Yield every way to drive: the target at each latency, the baselines at the first one."""
    options = loop.options
    target = loop.target()
    for latency in options.latencies:
        yield latency.name, target, loop.stepping(True, options.period), latency
    first = options.latencies[0]
    yield 'blind', loop.target('black', caution=False), loop.stepping(False, options.period), first
    yield 'constant_velocity', ConstantVelocity(), loop.stepping(False, options.period), \
        Latency('fixed', first.fixed_ms)
    yield 'expert', None, loop.stepping(False, 1, expert=True), INSTANT


def _split(loop: ClosedLoop, split: str, progress: Progress | None) -> dict[str, Any]:
    options = loop.options
    specs = closed_specs(split, options.runs)
    ways: dict[str, list[Outcome]] = {}
    for name, policy, how, latency in _ways(loop):
        store = RunStore(options.folder, f'{split}.{name}', {
            'way': name, 'checkpoint': options.checkpoint, 'period': how.period,
            'revision': loop.manifest.get('revision', ''), **loop.caution, **latency.to_dict()})
        waiting = [spec for spec in specs if key_of(spec) not in store.found]
        for outcome in loop.drive(waiting, policy, how, latency):
            store.add(outcome)
            if progress is not None:
                progress(len(store.found), len(specs))
        ways[name] = [store.found[key_of(spec)] for spec in specs]
    report = split_table(ways, options.latencies)
    if options.folder is not None and options.sheets:
        report['sheets'] = write_sheets(ways[options.latencies[0].name],
                                        options.folder / 'failures', *loop.size, options.sheets)
    return report


def _iso(loop: ClosedLoop, progress: Progress | None) -> dict[str, Any]:
    """Drive the same runs with every draft and without one; compare texts, paths, outcomes."""
    options = loop.options
    specs = [spec for split in options.splits
             for spec in spread(closed_specs(split, options.runs), options.iso_runs)]
    how = loop.stepping(True, loop.iso_period)
    latency = Latency('fixed', options.latencies[0].fixed_ms)
    names = options.drafts or embedded_drafts()
    driven: dict[str, dict[str, Outcome]] = {}
    for turn, name in enumerate(('greedy', *names)):
        store = RunStore(options.folder, f'iso.{Path(name).name}', {
            'draft': name, 'checkpoint': options.checkpoint, 'period': how.period,
            'revision': loop.manifest.get('revision', ''), **loop.caution, **latency.to_dict()})
        waiting = [spec for spec in specs if key_of(spec) not in store.found]
        policy = loop.planner(None if name == 'greedy' else name) if waiting else None
        for outcome in loop.drive(waiting, policy, how, latency):
            store.add(outcome)
            if progress is not None:
                progress(turn * len(specs) + len(store.found), (1 + len(names)) * len(specs))
        driven[name] = {key_of(spec): store.found[key_of(spec)] for spec in specs}
    return {name: compared(driven['greedy'], driven[name]) for name in names}


def compared(greedy: dict[str, Outcome], drafted: dict[str, Outcome]) -> dict[str, Any]:
    """Return how two ways to decode differ over the same runs."""
    texts = outcomes = 0
    worst = 0.0
    for key, ours in greedy.items():
        theirs = drafted[key]
        texts += ours.texts != theirs.texts
        length = min(len(ours.path), len(theirs.path))
        worst = max(worst, float(np.abs(np.array(ours.path[:length])[:, :2]
                                        - np.array(theirs.path[:length])[:, :2]).max()))
        outcomes += any(getattr(ours, name) != getattr(theirs, name) for name in _EVENTS) \
            or len(ours.path) != len(theirs.path)
    return {'runs': len(greedy), 'plans': sum(o.plans for o in drafted.values()),
            'runs_with_other_texts': texts, 'runs_with_other_outcomes': outcomes,
            'largest_path_difference_m': round(worst, 6),
            'identical': not texts and not outcomes and worst <= SAME_PATH_M}


_EVENTS = [field.name for field in fields(Outcome)
           if field.name in ('collision', 'at_fault', 'off_road', 'red_light', 'stop_line',
                             'rejected', 'plans', 'comfortable')]
