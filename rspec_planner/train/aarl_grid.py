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
Every variant of action-aware post-training on one cache.

For one DFlash and one EAGLE-3 draft, learning rates of the static variant with K = 5 are compared
on the validation clips; then the best rate serves all variants, most wanted first, three seeds
each where time permits. Several processes share a GPU, each with its own copy of the cache.
results.json is rewritten whenever a run ends, best/ holds the best weights of each kind by
validation: `python -m rspec_planner.train.aarl_grid --drafts FOLDER --out OUT`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
import json
import multiprocessing
import os
from pathlib import Path
import shutil
import sys
import time
from typing import Any

from rspec_planner.errors import ConfigurationError, RspecError

KINDS = ('dflash', 'eagle3')
#: anchors and K, the most wanted first
VARIANTS = (('static', 5), ('live', 5), ('none', 5), ('static', 10), ('static', 15))
RATES = (1e-5, 3e-5, 1e-4)
RESULTS_FILE = 'results.json'
#: seconds that a run is allowed beyond its training: scoring and export
_TAIL_S = 10.0


@dataclass(frozen=True, order=True)
class Job:
    """One run; jobs sort by what is wanted first."""

    rank: int
    kind: str
    anchors: str = field(compare=False)
    samples: int = field(compare=False)
    seed: int = field(compare=False)
    rate: float = field(compare=False)

    @property
    def name(self) -> str:
        """Return the folder of the run."""
        return f'{self.kind}-{self.anchors}-k{self.samples}-s{self.seed}-lr{self.rate:g}'


def tuning_jobs(kinds: Sequence[str], rates: Sequence[float]) -> list[Job]:
    """Return the runs that choose the learning rate of each kind."""
    return [Job(i, kind, *VARIANTS[0], seed=0, rate=rate)
            for i, rate in enumerate(rates) for kind in kinds]


def variant_jobs(kind: str, rate: float, seeds: int) -> list[Job]:
    """
    Return the other runs of a kind at its learning rate, seed by seed; larger K comes last.

    The first variant with seed 0 is not among them: tuning has run it.
    """
    wanted = sorted(((anchors, samples, seed) for seed in range(seeds)
                     for anchors, samples in VARIANTS), key=lambda variant: variant[1] > 5)
    return [Job(100 + i, kind, anchors, samples, seed, rate)
            for i, (anchors, samples, seed) in enumerate(wanted) if i]


class Plan:
    """What to run next; decides the learning rate of a kind when its tuning is over."""

    def __init__(self, kinds: Sequence[str], rates: Sequence[float], seeds: int) -> None:
        self.rates, self.seeds = tuple(rates), seeds
        self.waiting = tuning_jobs(kinds, rates)
        self.tuned: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        self.chosen: dict[str, float] = {}

    def pop(self) -> Job | None:
        """Return the most wanted job that can start, or None."""
        if not self.waiting:
            return None
        job = min(self.waiting)
        self.waiting.remove(job)
        return job

    def done(self, job: Job, length: float) -> None:
        """Note the validation length of a finished job, minus infinity for a failed one."""
        if job.rank >= 100:
            return
        found = self.tuned[job.kind]
        found.append((length, job.rate))
        if len(found) == len(self.rates):
            # of equal lengths the slower rate
            best, self.chosen[job.kind] = max(found, key=lambda pair: (pair[0], -pair[1]))
            if best > float('-inf'):
                self.waiting += variant_jobs(job.kind, self.chosen[job.kind], self.seeds)


@dataclass(frozen=True)
class Setting:
    """What all runs share."""

    drafts: dict[str, str]  # kind to folder
    target: str
    cache: str
    out: str
    clips: int
    options: dict[str, Any]  # further settings of every run
    devices: tuple[str, ...]  # processes take turns


_shared: dict[str, Any] = {}  # of a worker process


def _prepare(setting: Setting, devices: Any) -> None:
    """Load target and cache once in a worker, on the next device of the queue."""
    import torch

    from rspec_planner.train.draft import open_target
    from rspec_planner.train.draft_data import TargetCache
    torch.set_num_threads(1)
    device = torch.device(devices.get())
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    target, _, digest = open_target(setting.target, device)
    cache = TargetCache.load(setting.cache)
    cache.check_target(digest)
    train = cache.rows('train', 'extra')
    if 0 < setting.clips < len(train):
        others = [i for i, split in enumerate(cache.splits) if split not in ('train', 'extra')]
        rows = torch.cat((train[:setting.clips], torch.tensor(others, dtype=torch.int64)))
        cache = cache.take(rows)
    _shared.update(setting=setting, target=target, digest=digest, cache=cache.to(device))


def _run(job: Job, minutes: float) -> dict[str, Any]:
    """Run one job in a worker and return its result."""
    from rspec_planner.model.draft_checkpoint import load_draft
    from rspec_planner.train.aarl_loop import AarlTrainer, context_of
    from rspec_planner.train.aarl_settings import load_aarl_settings
    setting, target, cache = (_shared[key] for key in ('setting', 'target', 'cache'))
    settings = load_aarl_settings(None, **{
        **setting.options, 'anchors': job.anchors, 'samples': job.samples, 'seed': job.seed,
        'learning_rate': job.rate, 'minutes': minutes})
    folder = setting.drafts[job.kind]
    draft = load_draft(folder, target, cache.device).requires_grad_(True)
    trainer = AarlTrainer(draft, target, cache, settings, Path(setting.out) / 'runs' / job.name,
                          context=context_of(folder), keep_state=False)
    started = draft.cfg.name
    trainer.run()
    manifest = {'kind': 'draft', 'target': _shared['digest'], 'init_from': started,
                'context': trainer.context}
    return trainer.finish(manifest)


def find_drafts(folder: Path, names: dict[str, str | None]) -> dict[str, str]:
    """
    Return the folder of one draft of each kind below `folder`.

    names: folder names to prefer by kind; without one the first in alphabetical order.
    Raises ConfigurationError when a named draft or any draft at all is missing.
    """
    found: dict[str, str] = {}
    for path in sorted(folder.rglob('config.json')):
        kind = json.loads(path.read_text(encoding='utf-8')).get('draft', {}).get('kind')
        wanted = names.get(str(kind))
        if kind in KINDS and kind not in found and wanted in (
                None, *path.parent.relative_to(folder).parts):
            found[kind] = str(path.parent)
    missing = [kind for kind, name in names.items() if name and kind not in found]
    if missing or not found:
        raise ConfigurationError(f'{folder}: no draft {names.get(missing[0]) if missing else ""}'
                                 ' below it; give the folder that `rspec train dflash` wrote')
    return found


def make_grid_cache(setting: Setting, train_clips: int, test_clips: int, workers: int) -> None:
    """Render the clips and store their cache with prompts; other processes read it."""
    from rspec_planner.model.checkpoint import read_weights
    from rspec_planner.model.draft_checkpoint import check_target
    from rspec_planner.train.draft import make_cache, open_target
    from rspec_planner.train.draft_settings import DraftSettings
    folders = list(setting.drafts.values())
    windows = [read_weights(folder)[1]['draft']['window'] for folder in folders]
    target, tokenizer, digest = open_target(setting.target, setting.devices[0])
    for folder in folders:
        check_target(folder, digest)
    data = DraftSettings(train_clips=train_clips, test_clips=test_clips, workers=workers)
    cache = make_cache(data, target, tokenizer, digest, prefix=True, full=0 in windows)
    cache.save(setting.cache)


class Grid:
    """The parent: hands out jobs, keeps results and the best weights."""

    def __init__(self, setting: Setting, plan: Plan, deadline: float) -> None:
        self.setting, self.plan, self.deadline = setting, plan, deadline
        self.out = Path(setting.out)
        self.results: list[dict[str, Any]] = []
        self.longest_s = 0.0
        self.best: dict[str, float] = {}

    def run(self, processes: int) -> dict[str, Any]:
        """Run jobs until the plan is empty or the time is over; return the summary."""
        self.out.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context('spawn')
        devices = context.SimpleQueue()
        for i in range(processes):
            devices.put(self.setting.devices[i % len(self.setting.devices)])
        with ProcessPoolExecutor(processes, context, _prepare, (self.setting, devices)) as pool:
            running: dict[Future[dict[str, Any]], tuple[Job, float]] = {}
            while True:
                for job in self._startable(processes - len(running)):
                    left = (self.deadline - time.monotonic() - _TAIL_S) / 60.0
                    running[pool.submit(_run, job, left)] = (job, time.monotonic())
                if not running:
                    return self.summary()
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    self._finished(future, *running.pop(future))

    def _startable(self, free: int) -> Iterator[Job]:
        """Yield up to `free` jobs that can end in time."""
        for _ in range(free):
            if time.monotonic() + self.longest_s + _TAIL_S > self.deadline:
                return
            job = self.plan.pop()
            if job is None:
                return
            yield job

    def _finished(self, future: Future[dict[str, Any]], job: Job, started: float) -> None:
        seconds = time.monotonic() - started
        entry: dict[str, Any] = {'run': job.name, 'kind': job.kind, 'anchors': job.anchors,
                                 'samples': job.samples, 'seed': job.seed, 'rate': job.rate,
                                 'seconds': round(seconds, 1)}
        try:
            entry |= future.result()
            length = float(entry['L']['val'])
            self.longest_s = max(self.longest_s, seconds)
            self._keep(job, length)
        except Exception as error:  # one failed run must not end the others
            entry['error'] = f'{type(error).__name__}: {str(error).splitlines()[:1]}'
            length = float('-inf')
        self.results.append(entry)
        self.plan.done(job, length)
        print(f'{job.name}: ' + entry.get('error', f'val L {length:.4f}'), file=sys.stderr,
              flush=True)
        (self.out / RESULTS_FILE).write_text(json.dumps(self.summary(), indent=1),
                                             encoding='utf-8')

    def _keep(self, job: Job, length: float) -> None:
        """Replace the best weights of the kind when these are better; drop the others."""
        run = self.out / 'runs' / job.name
        if length > self.best.get(job.kind, float('-inf')):
            self.best[job.kind] = length
            final = self.out / 'best' / job.kind
            shutil.rmtree(final, ignore_errors=True)
            shutil.copytree(run / 'checkpoint', final)
            (final / 'run.json').write_text(json.dumps({'run': job.name, 'val_L': length}),
                                            encoding='utf-8')
        shutil.rmtree(run / 'checkpoint')

    def summary(self) -> dict[str, Any]:
        """Return all results, the chosen rates and one line a variant over its seeds."""
        return {'drafts': self.setting.drafts, 'rates': self.plan.chosen, 'best': self.best,
                'variants': variants_of(self.results), 'runs': self.results,
                'waiting': sorted(job.name for job in self.plan.waiting)}


def variants_of(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return per kind, variant and rate the mean change of L over seeds and its range, by split.

    The interval of each single run lies in its own entry.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in results:
        if 'error' not in entry:
            key = tuple(entry[name] for name in ('kind', 'anchors', 'samples', 'rate'))
            groups.setdefault(key, []).append(entry)
    found = []
    for (kind, anchors, samples, rate), entries in groups.items():
        change: dict[str, Any] = {}
        for split in entries[0]['difference']:
            values = [entry['difference'][split]['pooled']['mean'] for entry in entries]
            change[split] = {'mean': sum(values) / len(values), 'least': min(values),
                             'most': max(values),
                             'last_L': [entry['last_L'][split] for entry in entries]}
        last = [entry['curve'][-1] for entry in entries]
        found.append({
            'kind': kind, 'anchors': anchors, 'samples': samples, 'rate': rate,
            'seeds': sorted(entry['seed'] for entry in entries), 'change': change,
            'final_val_L': [entry['val_L'] for entry in last],
            'final_drifted': [entry['val_drifted'] for entry in last]})
    return found


def train_grid(options: dict[str, Any]) -> dict[str, Any]:
    """Run the grid described by the command line's options; return the summary."""
    started = time.monotonic()
    drafts = find_drafts(options['drafts'], {kind: options.get(kind) for kind in KINDS})
    drafts = {kind: drafts[kind] for kind in options['kinds'].split(',') if kind in drafts}
    import torch
    found = [f'cuda:{i}' for i in range(torch.cuda.device_count())] or ['cpu']
    devices = (options['device'],) if options['device'] else tuple(found)
    out = options['out']
    cache = options['cache'] or out / 'cache'
    extra = {key: options[key] for key in ('max_steps', 'checkpoint_every', 'batch_clips')
             if options[key] is not None}
    setting = Setting(drafts, options['target'], str(cache), str(out), options['clips'], extra,
                      devices)
    if not (cache / 'cache.json').is_file():
        make_grid_cache(setting, options['clips'], options['test_clips'], options['workers'])
        print(f'[{time.monotonic() - started:.0f} s] cache written', file=sys.stderr, flush=True)
    if devices[0] != 'cpu':
        torch.cuda.empty_cache()  # the workers need the memory
    rates = [float(rate) for rate in options['rates'].split(',')]
    grid = Grid(setting, Plan(tuple(drafts), rates, options['seeds']),
                started + 60.0 * options['minutes'])
    return grid.run(options['processes'])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='aarl_grid', description=__doc__)
    parser.add_argument('--drafts', type=Path, required=True, help='folder of trained drafts')
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--target', default='tiny', help='folder or embedded name')
    parser.add_argument('--cache', type=Path, help='read it, or write it if there is none')
    parser.add_argument('--clips', type=int, default=4000, help='training clips; 0: all')
    parser.add_argument('--test-clips', type=int, default=0, help='per split; 0: all')
    parser.add_argument('--workers', type=int, default=0, help='render processes')
    parser.add_argument('--minutes', type=float, default=9.0, help='the whole run')
    parser.add_argument('--processes', type=int, default=5, help='runs side by side')
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--rates', default=','.join(f'{rate:g}' for rate in RATES))
    parser.add_argument('--kinds', default=','.join(KINDS))
    parser.add_argument('--dflash', help='folder name of the DFlash draft')
    parser.add_argument('--eagle3', help='folder name of the EAGLE-3 draft')
    parser.add_argument('--device', help='default: every GPU, else the CPU')
    parser.add_argument('--max-steps', type=int)
    parser.add_argument('--checkpoint-every', type=int)
    parser.add_argument('--batch-clips', type=int)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the last line of stdout is one JSON object."""
    for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):
        os.environ.setdefault(name, '1')
    try:
        summary = train_grid(vars(_parser().parse_args(arguments)))
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(json.dumps({key: summary[key] for key in ('rates', 'best', 'variants', 'waiting')}))
    return 0


if __name__ == '__main__':
    sys.exit(main())
