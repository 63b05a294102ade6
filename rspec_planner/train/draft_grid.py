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
Train and compare many drafts on one cache: `python -m rspec_planner.train.draft_grid`.

The clips are rendered and read by the target once. Several drafts train side by side in one
process, each on a stream of its own (a lane): a single draft's step leaves most of a large GPU
idle. Results are written after every run, so that a stopped comparison keeps what it finished.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
import contextlib
from dataclasses import replace
import json
import os
from pathlib import Path
import shlex
import sys
import time
from typing import Any, TYPE_CHECKING

from rspec_planner.errors import RspecError

if TYPE_CHECKING:
    import torch

    from rspec_planner.model.draft import Draft
    from rspec_planner.model.target import Target
    from rspec_planner.train.draft_data import TargetCache
    from rspec_planner.train.draft_loop import DraftTrainer
    from rspec_planner.train.draft_runs import GridRun
    from rspec_planner.train.draft_settings import DraftSettings

RESULTS_FILE = 'results.json'
PACK_BYTES = 14_500_000
IN_FLIGHT = 4  # steps of one lane that the host may be ahead
SPARE_S = 6.0  # kept free at the end
TUNE_SHARE = 0.35  # of the training time that `--tune` may take


class Results:
    """One JSON of all runs, and packs of weights below 15 MB, both always whole on disk."""

    def __init__(self, out: Path, header: dict[str, Any]):
        self.out, self.content = out, {**header, 'runs': []}
        self.pack: dict[str, torch.Tensor] = {}
        self.number = 0
        out.mkdir(parents=True, exist_ok=True)

    def add(self, record: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> None:
        """Keep one finished run; its weights are stored as fp16."""
        if weights is not None:
            record = {**record, 'weights': self._store(record['run'], weights)}
        self.content['runs'].append(record)
        self.write()

    def write(self) -> None:
        """Replace the JSON file."""
        fresh = self.out / f'{RESULTS_FILE}.new'
        fresh.write_text(json.dumps(self.content, separators=(',', ':')), encoding='utf-8')
        os.replace(fresh, self.out / RESULTS_FILE)

    def _store(self, run: str, weights: dict[str, torch.Tensor]) -> str:
        from safetensors.torch import save_file
        import torch
        named = {f'{run}:{name}': value.detach().cpu().contiguous() if value.dtype == torch.int64
                 else value.detach().to('cpu', torch.float16).contiguous()
                 for name, value in weights.items()}
        size = sum(value.nbytes for value in (*named.values(), *self.pack.values()))
        if self.pack and size > PACK_BYTES:
            self.pack, self.number = {}, self.number + 1
        self.pack.update(named)
        name = f'weights-{self.number:02d}.safetensors'
        save_file(self.pack, self.out / f'{name}.new')
        os.replace(self.out / f'{name}.new', self.out / name)
        return name


class Lane:
    """Trains one run after the other on one stream of one device."""

    def __init__(self, target: Target, cache: TargetCache, begin: Path | None = None):
        """`begin`: folder of drafts that runs of their names go on from."""
        import torch
        self.target, self.cache, self.begin = target, cache, begin
        self.cuda = cache.device.type == 'cuda'
        self.stream: Any = None
        if self.cuda:
            torch.cuda.synchronize(cache.device)
            self.stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
        self.run: GridRun | None = None
        self.trainer: DraftTrainer | None = None
        self._steps: Iterator[int] = iter(())
        self._events: deque[Any] = deque()
        self.started = 0.0

    def _here(self) -> contextlib.AbstractContextManager[None]:
        from rspec_planner.train.draft_loop import on_stream
        return on_stream(self.cache.device, self.stream)

    def start(self, run: GridRun) -> None:
        """Set up a run and capture its step."""
        from rspec_planner.train.draft import new_draft
        from rspec_planner.train.draft_loop import DraftTrainer
        self.run, self.started = run, time.monotonic()
        splits = ('train', 'extra') if run.settings.extra_clips else ('train',)
        with self._here():
            rows = self.cache.rows(*splits)
            draft = self._begun(run) if self.begin is not None \
                else new_draft(run.settings, self.target, self.cache, rows)[0]
            self.trainer = DraftTrainer(draft, self.target, self.cache, run.settings,
                                        name=run.key, train_rows=rows)
            self.trainer.prepare()
        self._steps = self.trainer.steps()
        self._events.clear()

    def _begun(self, run: GridRun) -> Draft:
        """Return the draft to go on from; the target's weights may have changed since."""
        from rspec_planner.model.draft_checkpoint import load_draft
        assert self.begin is not None
        draft = load_draft(self.begin / run.name, self.target)
        return draft.requires_grad_(True)

    def advance(self) -> bool | None:
        """Issue a step if the device keeps up; True: issued, False: not now, None: finished."""
        import torch
        while self._events and self._events[0].query():
            self._events.popleft()
        if len(self._events) >= IN_FLIGHT:
            return False
        with self._here():
            if next(self._steps, None) is None:
                return None
            if self.cuda:
                event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                self._events.append(event)
        return True

    def finish(self, wall_s: float) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Evaluate the trained draft; return its record and its weights."""
        from rspec_planner.train.draft import split_reports
        assert self.run is not None and self.trainer is not None
        run, trainer = self.run, self.trainer
        with self._here():
            reports = split_reports(trainer, per_clip=True)
            weights = {name: value.clone() for name, value in
                       trainer.draft.state_dict().items()}
        record = {'run': run.key, 'name': run.name, 'group': run.group,
                  'seed': run.settings.seed, 'settings': run.settings.to_dict(),
                  'config': trainer.draft.cfg.to_dict(),
                  'parameters': trainer.draft.num_parameters(), 'steps': trainer.step,
                  'clips': len(trainer.rows), 'graph': trainer.graphed,
                  'train_s': round(trainer.elapsed_s, 2), 'wall_s': round(wall_s, 2),
                  'curve': trainer.curve, 'splits': reports}
        self.release()
        return record, weights

    def release(self) -> None:
        """Drop the run and its memory."""
        self.run = self.trainer = None
        self._steps = iter(())
        self._events.clear()


class Grid:
    """Works through a list of runs on all lanes until the time is over."""

    def __init__(self, lanes: list[Lane], runs: list[GridRun], results: Results,
                 deadline: float):
        self.lanes, self.pending, self.results = lanes, deque(runs), results
        self.deadline = deadline
        self.spent: dict[tuple[str, bool], float] = {}  # seconds a run of a kind took
        self.skipped: list[str] = []

    def work(self) -> None:
        """Train until nothing is left or the time is over."""
        while self.pending or any(lane.run for lane in self.lanes):
            if time.monotonic() > self.deadline:
                break
            if not any([self._turn(lane) for lane in self.lanes]):
                time.sleep(2e-4)
        for lane in self.lanes:
            if lane.run:
                self.skipped.append(lane.run.key)
                lane.release()
        self.skipped += [run.key for run in self.pending]
        self.results.content.setdefault('not_finished', []).extend(self.skipped)
        self.results.write()

    def _turn(self, lane: Lane) -> bool:
        """Do one thing on a lane; return whether there was anything to do."""
        try:
            if lane.run is None:
                run = self._next()
                if run is not None:
                    lane.start(run)
                return run is not None
            moved = lane.advance()
            if moved is None:
                self._record(lane, lane.run)
            return moved is not False
        except Exception as error:  # one run must not cost the others
            run = lane.run
            lane.release()
            reason = f'{type(error).__name__}: {str(error).splitlines()[0][:300]}'
            print(f'{run.key if run else "?"} failed: {reason}', file=sys.stderr, flush=True)
            self.results.add({'run': run.key if run else '', 'failed': reason})
            return True

    def _next(self) -> GridRun | None:
        """Return the next run that can still be finished."""
        while self.pending:
            run = self.pending.popleft()
            needed = self.spent.get(_sort(run), 0.0)
            if time.monotonic() + needed < self.deadline:
                return run
            self.skipped.append(run.key)
        return None

    def _record(self, lane: Lane, run: GridRun) -> None:
        wall = time.monotonic() - lane.started
        self.spent[_sort(run)] = max(self.spent.get(_sort(run), 0.0), wall)
        record, weights = lane.finish(wall)
        kept = run.settings.seed == 0 and run.group != 'tune'
        self.results.add(record, weights if kept else None)
        shown = ' '.join(f'{split} {report["L"]:.3f}'
                         for split, report in record['splits'].items())
        left = self.deadline - time.monotonic()
        print(f'{run.key}: L {shown} | {record["steps"]} steps {wall:.1f} s | '
              f'{len(self.pending)} runs and {left:.0f} s left', file=sys.stderr, flush=True)


def _sort(run: GridRun) -> tuple[str, bool]:
    return run.settings.kind, run.settings.window == 0


def run_grid(options: argparse.Namespace) -> dict[str, Any]:
    """Build the cache, train the runs, return a summary; files go to `options.out`."""
    import torch

    from rspec_planner.train.draft import open_target
    from rspec_planner.train.draft_runs import grid_runs, tuned_changes
    from rspec_planner.train.draft_settings import load_draft_settings
    started = time.monotonic()
    deadline = started + 60.0 * options.minutes - SPARE_S
    base = load_draft_settings('dflash', options.config, **_chosen(options))
    groups = tuple(group for group in options.groups.split(',') if group)
    runs = _wanted(grid_runs(groups, base, tuple(range(options.seeds)), options.only), options)
    devices = [torch.device('cuda', i) for i in range(torch.cuda.device_count())] \
        if torch.cuda.is_available() else [torch.device('cpu')]
    target, cache = _data(options, base, runs, devices[0])
    results = Results(options.out, {**_header(cache, devices, started),
                                    'command': options.command})
    places = [(target, cache)]
    for device in devices[1:]:
        places.append((open_target(options.target, device)[0], cache.to(device)))
    lanes = [Lane(*places[i % len(places)], options.init_from) for i in range(options.lanes)]
    if options.tune:
        now = time.monotonic()
        Grid(lanes, grid_runs(('tune',), base, (0,), options.only), results,
             now + TUNE_SHARE * (deadline - now)).work()
        tuned = {kind: tuned_changes(results.content['runs'], base, kind)
                 for kind in ('dflash', 'eagle3')}
        results.content['tuned'] = tuned
        print(f'tuned settings: {tuned}', file=sys.stderr, flush=True)
        runs = _wanted(grid_runs(groups, base, tuple(range(options.seeds)), options.only, tuned),
                       options)
    Grid(lanes, runs, results, deadline).work()
    return {'runs': len(results.content['runs']),
            'not_finished': len(results.content['not_finished']),
            'cache_s': results.content['cache_s'], 'out': str(options.out),
            'seconds': round(time.monotonic() - started, 1)}


def _wanted(runs: list[GridRun], options: argparse.Namespace) -> list[GridRun]:
    """Return the runs whose clips exist: those beyond the split are made on demand only."""
    return [run for run in runs if options.more_clips or not run.settings.extra_clips]


def _header(cache: TargetCache, devices: list[torch.device], started: float) -> dict[str, Any]:
    """Return what the results say about machine and data."""
    import torch
    return {'target': cache.digest, 'torch': torch.__version__,
            'devices': [torch.cuda.get_device_name(d) if d.type == 'cuda' else 'cpu'
                        for d in devices],
            'clips': {split: cache.splits.count(split) for split in sorted(set(cache.splits))},
            'cache_s': round(time.monotonic() - started, 1),
            'unfinished_texts': int((~cache.finished).sum()),
            'tokens': int(cache.lengths.sum()), 'longest_text': int(cache.lengths.max())}


def _data(options: argparse.Namespace, base: DraftSettings, runs: list[GridRun],
          device: torch.device) -> tuple[Target, TargetCache]:
    """Return the target and the clips that the runs need, read or made."""
    from rspec_planner.train.draft import make_cache, open_target
    from rspec_planner.train.draft_data import TargetCache
    target, tokenizer, digest = open_target(options.target, device)
    if options.cache is not None and options.cache.is_dir():
        cache = TargetCache.load(options.cache, device)
        cache.check_target(digest)
        return target, cache
    data = replace(base, extra_clips=options.more_clips)
    cache = make_cache(data, target, tokenizer, digest,
                       full=any(run.settings.window == 0 for run in runs))
    if options.cache is not None:
        cache.save(options.cache)
    return target, cache


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given as `--set name=value`."""
    import yaml

    from rspec_planner.train.draft import SMOKE
    values: dict[str, Any] = dict(SMOKE) if options.smoke else {}
    for item in options.set:
        name, _, value = item.partition('=')
        values[name] = yaml.safe_load(value)
    return values


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(prog='draft_grid', description=__doc__.split('\n')[1])
    parser.add_argument('--out', type=Path, required=True, help='results.json and weights')
    parser.add_argument('--config', type=Path, help='YAML of draft settings for all runs')
    parser.add_argument('--target', default='tiny', help='checkpoint folder or embedded name')
    parser.add_argument('--cache', type=Path, help='folder of a saved cache: read, else written')
    parser.add_argument('--minutes', type=float, default=8.5, help='of the whole process')
    parser.add_argument('--lanes', type=int, default=6, help='drafts that train side by side')
    parser.add_argument('--groups', default='main,shapes,ablations')
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--only', default='', help='keep runs whose name contains this')
    parser.add_argument('--tune', action='store_true',
                        help='first compare learning rates and loss options, keep the best')
    parser.add_argument('--more-clips', type=int, default=0,
                        help='clips beyond the train split, for the runs that ask for them')
    parser.add_argument('--set', action='append', default=[], metavar='NAME=VALUE',
                        help='a draft setting for all runs, such as epochs=40')
    parser.add_argument('--init-from', type=Path, help=(
        'folder of draft folders; each run goes on from the one of its name'))
    parser.add_argument('--smoke', action='store_true', help='a few clips and steps')
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    options.command = shlex.join(['python3', '-m', 'rspec_planner.train.draft_grid', *given])
    for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):
        os.environ.setdefault(name, '1')  # render workers inherit the environment
    try:
        result = run_grid(options)
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(json.dumps(result), flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
