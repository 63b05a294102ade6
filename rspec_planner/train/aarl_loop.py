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
The training loop of action-aware post-training, and `rspec train aarl`.

Order of clips and random numbers are functions of seed and step, so a resumed run repeats what an
uninterrupted one does. Every checkpoint is scored by the strict accepted length on the validation
clips; what is exported is the best of them, which may be the draft before this training.
"""

from __future__ import annotations

import copy
from dataclasses import replace
import json
from pathlib import Path
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor
import torch.distributed as dist

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate.intervals import difference_interval, statistic_interval
from rspec_planner.model.checkpoint import read_manifest
from rspec_planner.model.draft import Draft
from rspec_planner.model.draft_checkpoint import check_target, load_draft, save_draft
from rspec_planner.model.target import Target
from rspec_planner.train.aarl import AarlObjective
from rspec_planner.train.aarl_reward import TextPlanner
from rspec_planner.train.aarl_sampling import clip_order, correct, draw_randoms
from rspec_planner.train.aarl_settings import AarlSettings, load_aarl_settings
from rspec_planner.train.cache_parts import load_cache
from rspec_planner.train.draft import make_cache, TEST_SPLITS
from rspec_planner.train.draft_acceptance import (
    acceptance,
    AcceptedLengths,
    clips_at_once,
    simulate,
)
from rspec_planner.train.draft_batch import DraftRows
from rspec_planner.train.draft_data import exact_products, TargetCache
from rspec_planner.train.draft_settings import DraftSettings
from rspec_planner.train.loop import join_ranks, leave_ranks
from rspec_planner.train.optimizer import (
    average_gradients,
    build_optimizers,
    set_learning_rate,
    share_parameters,
    WeightAverage,
)
from rspec_planner.train.random_target import memory_table, open_any_target
from rspec_planner.train.saving import load_state, save_state

CHECKPOINT_FOLDER = 'checkpoint'
STATE_FILE = 'state.pt'
CURVE_FILE = 'curve.jsonl'
RESULT_FILE = 'result.json'
#: what `--smoke` changes: a handful of clips and steps
SMOKE: dict[str, Any] = {'max_steps': 4, 'checkpoint_every': 2, 'clips': 12, 'batch_clips': 4}
SMOKE_DATA: dict[str, Any] = {'test_clips': 4, 'workers': 1}


class AarlTrainer:
    """One draft on one cache; `run` trains, `finish` scores and exports the best checkpoint."""

    def __init__(self, draft: Draft, target: Target, cache: TargetCache, settings: AarlSettings,
                 out: Path | None = None, *, context: str = 'all', name: str = '',
                 keep_state: bool = True) -> None:
        """
        Wire the parts.

        draft: bound, on the device of the cache; it is trained in place. Every process has the
        same cache. context: as in the draft's first training. keep_state: write OUT/state.pt.
        """
        self.draft, self.cache, self.settings, self.out = draft, cache, settings, out
        self.context, self.keep_state = context, keep_state
        self.name = name or f'{draft.cfg.name}-aarl'
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1
        rows = cache.rows('train', 'extra')
        self.rows = rows[cache.finished[rows]][:settings.clips or None]
        if not len(self.rows):
            raise ConfigurationError('no finished training text in the cache; train the target '
                                     'longer or raise max_tokens')
        self.reference = draft.twin().eval().requires_grad_(False)
        self.view = DraftRows(cache, draft.cfg, self.rows, context=context)
        planner = TextPlanner(self._rewarding(target), settings.flow_steps or None)
        self.objective = AarlObjective(draft, self.reference, planner, self.view, settings)
        self.params = [p for p in draft.parameters() if p.requires_grad]
        self.optimizers = build_optimizers(
            draft, learning_rate=settings.learning_rate, betas=(settings.beta1, settings.beta2),
            weight_decay=0.0, matrix_optimizer='adamw', muon_learning_rate=0.0)
        self.best = WeightAverage(draft, 0.0)  # decay 0: a copy of the best weights so far
        self.best_step, self.best_length = 0, 0.0
        self.step, self.elapsed_s = 0, 0.0
        self.curve: list[dict[str, float]] = []
        self.sums: dict[str, Tensor] = {}
        self._reported = 0

    def _rewarding(self, target: Target) -> Target:
        """Return the target that plans from altered texts, in the precision of rewards."""
        if self.settings.reward_precision == 'bf16' and self.cache.device.type == 'cuda' \
                and target.dtype != torch.bfloat16:
            return copy.deepcopy(target).to(torch.bfloat16).eval().pack()
        return target

    def run(self, resume: bool = False) -> None:
        """Train to the end; validate at the start and at every checkpoint."""
        share_parameters(self.draft)
        share_parameters(self.reference)
        if resume:
            self._restore()
        since, before = time.monotonic(), self.elapsed_s
        if not self.curve:
            self._checkpoint()
        self.draft.train()
        every, s = self.settings.checkpoint_every, self.settings
        while self.step < s.max_steps:
            self.one_step()
            if self.step % every == 0 or self.step == s.max_steps:
                self.elapsed_s = before + time.monotonic() - since
                self._checkpoint()
                if self._time_is_over():
                    break

    def one_step(self) -> None:
        """Sample, reward, step."""
        s, device = self.settings, self.cache.device
        count = s.batch_clips * self.world
        places = clip_order(s.seed, len(self.rows), count, self.step)[self.rank::self.world]
        index = self.rows[torch.from_numpy(places.copy()).to(device)]
        waypoints = self.cache.profile.action_space.n_waypoints
        randoms = draw_randoms(s.seed, self.step, count, s.samples, s.positions, s.noise_draws,
                               waypoints).share(self.rank, self.world, device)
        loss, parts = self.objective.loss(index, randoms)
        torch.autograd.backward(loss)
        average_gradients(self.params)
        parts['grad'] = nn.utils.clip_grad_norm_(self.params, s.grad_clip, foreach=True)
        set_learning_rate(self.optimizers, min(1.0, (self.step + 1) / max(s.warmup_steps, 1)))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for name, value in parts.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value
        self.step += 1

    def _time_is_over(self) -> bool:
        """Return what rank 0 decides."""
        over = torch.tensor([0 < self.settings.minutes * 60.0 < self.elapsed_s],
                            dtype=torch.int64, device=self.cache.device)
        if self.world > 1:
            dist.broadcast(over, 0)
        return bool(over)

    def lengths(self, draft: Draft, split: str) -> AcceptedLengths:
        """Return the simulated iterations of a draft on one split of the cache."""
        rows = self.cache.rows(split)
        with exact_products():
            m = acceptance(draft, self.cache, rows, context=self.context)
        return simulate(m, self.cache.lengths[rows], draft.cfg.block)

    @torch.no_grad()
    def drift(self, rows: Tensor) -> dict[str, float]:
        """
        Return what became of the positions that were right before, over all anchors of clips.

        static: their share among all; live: positions that are right now, over them; drifted:
        the share of them that is wrong now.
        """
        view = DraftRows(self.cache, self.draft.cfg, rows, context=self.context)
        sums = torch.zeros(4, device=self.cache.device)
        for part in torch.split(rows, clips_at_once(view)):
            batch = view.batch(part)
            labels, free = self.objective.positions(batch)
            before, now = (correct(self.objective.log_policy(draft, batch), labels) & free
                           for draft in (self.reference, self.draft))
            sums += torch.stack([free.sum(), before.sum(), now.sum(), (before & ~now).sum()])
        known, static, live, drifted = sums.tolist()
        return {'static': static / max(known, 1), 'live': live / max(static, 1),
                'drifted': drifted / max(static, 1)}

    def _checkpoint(self) -> None:
        """Validate, keep the weights if they are the best so far, write curve and state."""
        if self.rank != 0:
            return
        self.draft.eval()
        length = self.lengths(self.draft, 'val').strict
        # the clips of a step are drawn at random: the first ones are any
        seen = self.drift(self.rows[:self.settings.drift_clips])
        held = self.drift(self.cache.rows('val'))
        self.draft.train()
        steps = max(self.step - self._reported, 1)
        means = {name: float(value) / steps for name, value in self.sums.items()}
        self.sums, self._reported = {}, self.step
        if not all(np.isfinite(value) for value in means.values()):
            raise EngineError(f'{self.name}: the loss is not finite at step {self.step}; lower '
                              'learning_rate')
        if not self.curve or length > self.best_length:
            self.best.update()
            self.best_step, self.best_length = self.step, length
        record = {'step': self.step, 'seconds': self.elapsed_s, 'val_L': length,
                  **{f'val_{k}': v for k, v in held.items()},
                  **{f'train_{k}': v for k, v in seen.items()}, **means}
        self.curve.append({key: round(float(value), 6) for key, value in record.items()})
        self._write()

    def _write(self) -> None:
        record = self.curve[-1]
        shown = ' '.join(f'{key} {value:.4g}' for key, value in record.items())
        print(f'[{self.name}] {shown}', file=sys.stderr, flush=True)
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        lines = ''.join(json.dumps(entry) + '\n' for entry in self.curve)
        (self.out / CURVE_FILE).write_text(lines, encoding='utf-8')
        if self.keep_state:
            save_state(self.out / STATE_FILE, self.draft, self.optimizers, self.best,
                       {'step': self.step, 'best_step': self.best_step,
                        'best_length': self.best_length, 'elapsed_s': self.elapsed_s})

    def _restore(self) -> None:
        if self.out is None:
            raise ConfigurationError('nothing to resume without an output folder; give --out')
        state = load_state(self.out / STATE_FILE, self.draft, self.optimizers, self.best)
        self.step = self._reported = int(state['step'])
        self.best_step, self.best_length = int(state['best_step']), state['best_length']
        self.elapsed_s = state['elapsed_s']
        lines = (self.out / CURVE_FILE).read_text(encoding='utf-8').splitlines()
        self.curve = [entry for entry in map(json.loads, lines) if entry['step'] <= self.step]

    @torch.no_grad()
    def finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """
        Export the best checkpoint and return its lengths beside those of the start.

        The numbers are those of the weights as they are stored, in half precision.
        """
        splits = [split for split in TEST_SPLITS if split in set(self.cache.splits)]
        self.draft.eval()
        last = {split: round(self.lengths(self.draft, split).strict, 4) for split in splits}
        self.best.swap()
        for weight in self.draft.parameters():
            weight.copy_(weight.half())
        ends = {split: (self.lengths(self.reference, split), self.lengths(self.draft, split))
                for split in splits}
        result = {
            'name': self.name, 'steps': self.step, 'best_step': self.best_step,
            'train_s': round(self.elapsed_s, 2), 'clips': len(self.rows),
            'parameters': self.draft.num_parameters(), 'processes': self.world,
            'settings': self.settings.to_dict(),
            'L': {split: round(pair[1].strict, 4) for split, pair in ends.items()},
            'difference': {split: compare(*pair) for split, pair in ends.items()},
            'start': {split: pair[0].report(False) for split, pair in ends.items()},
            'splits': {split: pair[1].report(False) for split, pair in ends.items()},
            'last_L': last, 'curve': self.curve}
        if self.out is not None:
            result['checkpoint'] = str(self.out / CHECKPOINT_FOLDER)
            self.draft.cfg = replace(self.draft.cfg, name=self.name)
            save_draft(self.draft, self.out / CHECKPOINT_FOLDER,
                       {**result, 'kind': 'draft', **manifest})
            (self.out / RESULT_FILE).write_text(json.dumps(result, indent=1), encoding='utf-8')
        return result


def compare(start: AcceptedLengths, final: AcceptedLengths) -> dict[str, Any]:
    """
    Return final minus start over the same clips with 95 % bootstrap intervals over clips.

    pooled: of strict L; per_clip: mean of the differences of each clip's own L.
    """
    def own(lengths: AcceptedLengths) -> np.ndarray:
        ratio: np.ndarray = lengths.committed / np.maximum(lengths.iterations, 1)
        return ratio

    return {'pooled': difference_interval((final.committed, final.iterations),
                                          (start.committed, start.iterations)),
            'per_clip': statistic_interval(own(final) - own(start)),
            'clips_changed': int((final.iterations != start.iterations).sum())}


def context_of(folder: str | Path) -> str:
    """Return which columns a stored draft was trained to see, 'all' unless it says otherwise."""
    manifest = read_manifest(folder)
    settings = manifest.get('settings', {})
    return str(manifest.get('context', settings.get('context', 'all')))


def train_aarl(config: str | Path | None, out: str | Path, *, init_from: str | Path,
               target: str | Path = 'tiny', profile: str = '',
               cache: str | Path | None = None, save_cache: str | Path | None = None,
               resume: bool = False, smoke: bool = False, revision: str = '',
               **overrides: Any) -> dict[str, Any]:
    """
    Post-train the draft in `init_from` and leave OUT/checkpoint, result.json and curve.jsonl.

    config: YAML of `AarlSettings` or None; overrides: single settings. target: folder or
    embedded name. cache: folder of a `TargetCache` with prompts (prefix=True); without one the
    clips are rendered, which one process can do alone; save_cache: folder to write it to.
    Returns lengths before and after.
    """
    if smoke:
        overrides = {**SMOKE, **{k: v for k, v in overrides.items() if v is not None}}
    settings = load_aarl_settings(config, **overrides)
    ranks = join_ranks()
    try:
        if cache is None and ranks.world > 1:
            raise ConfigurationError('several processes share a cache: make one with '
                                     '--save-cache in a single process, then give --cache')
        opened = open_any_target('' if profile else target, profile, ranks.device, whole=True)
        network, digest = opened.target, opened.digest
        check_target(init_from, digest)
        draft = load_draft(init_from, network, ranks.device).requires_grad_(True)
        if cache is None:
            data = DraftSettings(train_clips=settings.clips, window=draft.cfg.window,
                                 **(SMOKE_DATA if smoke else {}))
            if opened.tokenizer is None:
                raise ConfigurationError(f'--profile {profile} has nothing to render: give '
                                         '--cache, see `rspec train cache-target --prefix`')
            held = make_cache(data, network, opened.tokenizer, digest, prefix=True)
        else:
            held = load_cache(cache, ranks.device)
            held.check_target(digest)
        if save_cache is not None and ranks.leads:
            held.save(save_cache)
        manifest = {'kind': 'draft', 'target': digest, 'revision': revision,
                    'init_from': draft.cfg.name, 'context': context_of(init_from)}
        trainer = AarlTrainer(draft, network, held, settings, Path(out),
                              context=manifest['context'], keep_state=settings.keep_state)
        trainer.run(resume)
        memory = memory_table(draft, network, held, trainer.optimizers[0], trainer.best)
        if not ranks.leads:
            return {}
        return {**trainer.finish(manifest), 'memory_gib': memory,
                'synthetic': opened.synthetic}
    finally:
        leave_ranks()
