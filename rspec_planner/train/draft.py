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
Front of `rspec train dflash` and `rspec train eagle3`: data, training, evaluation, export.

Render workers import this module again when they start, so nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
import json
import os
from pathlib import Path
import sys
import time
from typing import Any, TYPE_CHECKING

from rspec_planner.errors import ConfigurationError, RspecError

if TYPE_CHECKING:
    from torch import Tensor

    from rspec_planner.model.draft import Draft
    from rspec_planner.model.target import Target
    from rspec_planner.planner.tokenizer import TextTokenizer
    from rspec_planner.train.draft_data import TargetCache
    from rspec_planner.train.draft_loop import DraftTrainer
    from rspec_planner.train.draft_settings import DraftSettings

TEST_SPLITS = ('val', 'on-shelf', 'off-shelf')
#: clips of the validation split in mid-manoeuvre, and their name among the splits of a cache
VAL_DRIVE_CLIPS, VAL_DRIVE = 200, 'val-drive'
CHECKPOINT_FOLDER = 'checkpoint'
#: what `--smoke` changes: a handful of clips and steps
SMOKE = {'train_clips': 12, 'test_clips': 4, 'batch_clips': 4, 'epochs': 4.0, 'workers': 1,
         'block': 6, 'evaluate_epochs': 2.0, 'learning_rate': 3e-3, 'precision': 'fp32'}


def new_draft(settings: DraftSettings, target: Target, cache: TargetCache,
              rows: Tensor) -> tuple[Draft, float]:
    """
    Return a bound draft to train, on the device of the target, and its vocabulary's coverage.

    rows: the training clips, which decide the ids of a reduced head.
    """
    from rspec_planner.model.dflash import Dflash
    from rspec_planner.model.eagle3 import Eagle3
    from rspec_planner.train.draft_data import draft_vocabulary
    vocabulary, coverage = draft_vocabulary(cache, rows) if settings.reduced_vocab \
        else (None, 1.0)
    cfg = settings.draft_config(target.cfg, None if vocabulary is None else vocabulary.tolist())
    build = Eagle3 if settings.kind == 'eagle3' else Dflash
    draft: Draft = build(cfg)
    draft = draft.to(target.device).initialise(  # type: ignore[operator]
        target.text if settings.warm_start else None, settings.seed)
    if vocabulary is not None:
        draft.set_vocabulary(vocabulary)
    return draft.bind(target.text, target.cfg.tokens), coverage


def begun_draft(kind: str, folder: str | Path, target: Target, digest: str) -> Draft | None:
    """Return the draft in a folder, to be trained on, None for ''; an error if it is another."""
    from rspec_planner.model.draft_checkpoint import check_target, load_draft
    if not folder:
        return None
    check_target(folder, digest)
    draft: Draft = load_draft(folder, target)
    if draft.cfg.kind != kind:
        raise ConfigurationError(f'{folder} is a draft of kind {draft.cfg.kind}: use rspec train '
                                 f'{draft.cfg.kind}')
    return draft.requires_grad_(True)


def clip_specs(settings: DraftSettings, rank: int = 0, world: int = 1) -> list[Any]:
    """
    Return this process's training clips, the validation clips and, at rank 0, the tests.

    A share of the training pairs, and at rank 0 a part of the validation split once more, are
    shown in mid-manoeuvre.
    """
    from rspec_planner.train.jobs import driven_on
    from rspec_planner.world.splits import extra_spec, split_specs
    train = split_specs('train')
    train = train[:settings.train_clips] if settings.train_clips else train
    train += [extra_spec(i) for i in range(settings.extra_clips)]
    pairs = [driven_on(tuple(train[i:i + 2]), i, settings.drive_share)
             for i in range(0, len(train), 2)]
    mine = [spec for pair in pairs[rank:len(pairs) // world * world:world] for spec in pair]
    splits = TEST_SPLITS if rank == 0 else TEST_SPLITS[:1]
    for split in splits:
        mine += split_specs(split)[:settings.test_clips or None]
    if rank == 0 and settings.drive_share:
        later = split_specs('val')[:settings.test_clips or VAL_DRIVE_CLIPS]
        mine += [replace(spec, drive=1) for spec in later]
    return mine


def split_reports(trainer: DraftTrainer, per_clip: bool = False) -> dict[str, dict[str, Any]]:
    """Return the simulated lengths of a trained draft on every test split of its cache."""
    present = set(trainer.cache.splits)
    return {split: trainer.lengths(trainer.cache.rows(split)).report(per_clip)
            for split in (*TEST_SPLITS, VAL_DRIVE) if split in present}


def train_draft(kind: str, config_path: str | Path | None, out_dir: str | Path, *,
                target: str | Path = 'tiny', profile: str = '', init_from: str | Path = '',
                cache: str | Path | None = None, save_cache: str | Path | None = None,
                resume: bool = False, smoke: bool = False, revision: str = '',
                **overrides: Any) -> dict[str, Any]:
    """
    Train one draft of a target and leave OUT/checkpoint.

    kind: 'dflash' or 'eagle3'. target: folder or embedded name; profile: random weights of its
    shapes instead, for memory and speed. init_from: a draft to go on from, whose network then
    counts and not that of the settings. cache: folder of a saved `TargetCache` to read instead
    of rendering; save_cache: folder to write it to. resume: continue OUT/state.pt. Returns name,
    L per split, steps, seconds, memory and the checkpoint.
    """
    if smoke:
        overrides = {**SMOKE, **{k: v for k, v in overrides.items() if v is not None}}
    for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):
        os.environ.setdefault(name, '1')  # render workers inherit the environment
    from rspec_planner.train.draft_settings import load_draft_settings
    from rspec_planner.train.loop import join_ranks, leave_ranks
    settings = load_draft_settings(kind, config_path, **overrides)
    started = time.monotonic()
    ranks = join_ranks()
    try:
        return _train(settings, Path(out_dir), '' if profile else target, profile, init_from,
                      cache, save_cache, resume, revision, ranks, started)
    finally:
        leave_ranks()


def _train(settings: DraftSettings, out: Path, target_folder: str | Path, profile: str,
           init_from: str | Path, cache_folder: str | Path | None, save_to: str | Path | None,
           resume: bool, revision: str, ranks: Any, started: float) -> dict[str, Any]:
    from rspec_planner.model.draft_checkpoint import save_draft
    from rspec_planner.train.cache_parts import load_cache
    from rspec_planner.train.draft_loop import on_stream
    from rspec_planner.train.random_target import open_any_target
    if profile and cache_folder is None:
        raise ConfigurationError(f'--profile {profile} has nothing to render: give --cache, see '
                                 '`rspec train cache-target`')
    if profile:
        settings = replace(settings, warm_start=False)  # there is no layer to copy
    opened = open_any_target(target_folder, profile, ranks.device, seed=settings.seed,
                             whole=False)
    target, digest = opened.target, opened.digest
    if cache_folder is not None:
        cache = load_cache(cache_folder, ranks.device, without=('prefix', 'actions', 'noise'))
        cache.check_target(digest)
    else:
        assert opened.tokenizer is not None
        cache = make_cache(settings, target, opened.tokenizer, digest, ranks.rank, ranks.world)
    if save_to is not None and ranks.leads:
        cache.save(save_to)
    cached_s = time.monotonic() - started
    with on_stream(ranks.device):
        started_from = begun_draft(settings.kind, init_from, target, digest)
        result, manifest, draft = _fit(settings, out, target, cache, cache_folder is None, resume,
                                       ranks, started_from)
    result.update({'cache_s': round(cached_s, 1), 'synthetic': opened.synthetic,
                   'seconds': round(time.monotonic() - started, 1)})
    if ranks.leads:
        save_draft(draft, out / CHECKPOINT_FOLDER,
                   {**result, **manifest, 'kind': 'draft', 'revision': revision,
                    'seed': settings.seed, 'settings': settings.to_dict(), 'target': digest})
    return result


def _fit(settings: DraftSettings, out: Path, target: Target, cache: TargetCache, sharded: bool,
         resume: bool, ranks: Any,
         begun: Draft | None) -> tuple[dict[str, Any], dict[str, Any], Draft]:
    """Return the summary, more entries for the manifest, and the trained draft."""
    import torch

    from rspec_planner.train.draft_loop import DraftTrainer
    from rspec_planner.train.random_target import memory_table
    torch.manual_seed(settings.seed)
    rows = cache.rows('train', 'extra')
    draft, coverage = new_draft(settings, target, cache, rows) if begun is None \
        else (begun, 1.0)
    trainer = DraftTrainer(draft, target, cache, settings, out, train_rows=rows, sharded=sharded)
    trainer.prepare(resume)
    try:
        for _ in trainer.steps():
            pass
    except KeyboardInterrupt:
        trainer.save_state()
        raise
    if settings.keep_state:
        trainer.save_state()
    memory = memory_table(draft, target, cache, trainer.step_of.optimizer, trainer.average)
    reports = split_reports(trainer) if ranks.leads else {}
    result = {'name': draft.cfg.name, 'parameters': draft.num_parameters(),
              'steps': trainer.step, 'clips': len(rows), 'processes': ranks.world,
              'train_s': round(trainer.elapsed_s, 1), 'coverage': round(coverage, 5),
              'memory_gib': memory,
              'L': {split: report['L'] for split, report in reports.items()},
              'checkpoint': str(out / CHECKPOINT_FOLDER)}
    return result, {'splits': reports, 'curve': trainer.curve}, draft


def open_target(folder: str | Path, device: Any) -> tuple[Target, TextTokenizer, str]:
    """Return a frozen fp32 target, its tokenizer and the digest of its weights."""
    from rspec_planner.model.checkpoint import load_target
    from rspec_planner.model.draft_checkpoint import target_digest
    from rspec_planner.planner.drafts import EMBEDDED, EMBEDDED_NAMES
    from rspec_planner.planner.tokenizer import load_tokenizer
    path = EMBEDDED / str(folder) if folder in EMBEDDED_NAMES else Path(folder)
    target = load_target(path, device).requires_grad_(False)
    return target, load_tokenizer(path), target_digest(path)


def make_cache(settings: DraftSettings, target: Target, tokenizer: TextTokenizer, digest: str,
               rank: int = 0, world: int = 1, **options: Any) -> TargetCache:
    """Render the clips of the settings and run the target over them, with a line of progress."""
    from rspec_planner.train.draft_data import CacheOptions
    from rspec_planner.train.draft_target import build_cache
    specs = clip_specs(settings, rank, world)
    shown = started = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if rank == 0 and (now - shown > 5.0 or done == total):
            shown = now
            print(f'[{now - started:6.1f} s] {done}/{total} clips read by the target',
                  file=sys.stderr, flush=True)

    workers = settings.workers
    if not workers and world > 1:
        workers = max(len(os.sched_getaffinity(0)) // world - 1, 1)
    options.setdefault('full', settings.window == 0)
    return build_cache(target, tokenizer, specs, digest, CacheOptions(**options),
                       workers=workers, progress=say)


def _parser() -> argparse.ArgumentParser:
    from rspec_planner.train.draft_settings import DraftSettings
    from rspec_planner.train.settings import add_options
    parser = argparse.ArgumentParser(prog='rspec train', description=(
        'Train a draft on the texts and states of a target; one process per GPU under '
        'torchrun.'))
    parser.add_argument('kind', choices=('dflash', 'eagle3'))
    parser.add_argument('--config', type=Path, help='YAML of training settings')
    parser.add_argument('--out', type=Path, required=True, help='receives checkpoint/ and logs')
    parser.add_argument('--target', default='tiny', help='checkpoint folder or embedded name')
    parser.add_argument('--profile', default='', help='random weights of these shapes instead')
    parser.add_argument('--init-from', default='', help='folder of a draft to go on from')
    parser.add_argument('--cache', type=Path, help='read this saved cache instead of rendering')
    parser.add_argument('--save-cache', type=Path, help='write the cache to this folder')
    parser.add_argument('--resume', action='store_true', help='continue OUT/state.pt')
    parser.add_argument('--smoke', action='store_true', help='a few clips and steps')
    parser.add_argument('--revision', default='', help='git revision for the manifest')
    add_options(parser, DraftSettings, leave_out='kind')
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the last line of stdout is one JSON object."""
    options = vars(_parser().parse_args(arguments))
    kind, config, out = (options.pop(key) for key in ('kind', 'config', 'out'))
    try:
        result = train_draft(kind, config, out, **options)
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    if int(os.environ.get('RANK', 0)) == 0:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
