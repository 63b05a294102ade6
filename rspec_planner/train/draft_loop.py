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
The training loop of a draft.

A draft is so small that a step is a few hundred short kernels; on a GPU the whole step is
captured once as a CUDA graph and replayed. The data order depends on the seed alone, and a
loop can be driven step by step, so that several drafts may train side by side on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
import math
from pathlib import Path
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor
import torch.distributed as dist

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.draft import Draft
from rspec_planner.model.target import Target
from rspec_planner.train.draft_acceptance import (
    acceptance,
    AcceptedLengths,
    clips_at_once,
    simulate,
)
from rspec_planner.train.draft_batch import DraftRows
from rspec_planner.train.draft_data import share_of, TargetCache
from rspec_planner.train.draft_objective import DraftObjective
from rspec_planner.train.draft_settings import DraftSettings
from rspec_planner.train.optimizer import average_gradients, share_parameters, WeightAverage
from rspec_planner.train.saving import load_state, save_state

WARM_UP_STEPS = 3
STATE_FILE = 'state.pt'


def world_size() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _fewest(count: int, device: torch.device) -> int:
    """Return the smallest count of all processes, so that all do equally many steps."""
    if world_size() == 1:
        return count
    value = torch.tensor(count, device=device)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)


@contextlib.contextmanager
def on_stream(device: torch.device, stream: Any = None) -> Iterator[None]:
    """Work on a stream of its own inside: the default stream cannot capture graphs."""
    if device.type != 'cuda':
        yield
        return
    with torch.cuda.device(device):
        if stream is None:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            yield


class DraftStep:
    """One optimisation step over a fixed number of clips, replayed as a graph where it can."""

    def __init__(self, objective: DraftObjective, rows: DraftRows, settings: DraftSettings,
                 clips: int):
        self.objective, self.rows, self.settings = objective, rows, settings
        self.params = [p for p in objective.draft.parameters() if p.requires_grad]
        self.device = rows.cache.device
        self.cuda = self.device.type == 'cuda'
        self.index = torch.zeros(clips, dtype=torch.int64, device=self.device)
        self.rate = torch.zeros((), device=self.device)
        self.optimizer = self._optimizer()
        self.names: tuple[str, ...] = ()
        self.sums = torch.zeros(0, device=self.device)  # of losses since the last report
        self._graph: Any = None

    def _optimizer(self) -> torch.optim.Optimizer:
        """Weight decay acts on matrices only."""
        s = self.settings
        flat = [p for p in self.params if p.dim() < 2]
        matrices = [p for p in self.params if p.dim() >= 2]
        rate: Any = self.rate if self.cuda else 0.0
        return torch.optim.AdamW(
            [{'params': matrices, 'weight_decay': s.weight_decay},
             {'params': flat, 'weight_decay': 0.0}], lr=rate, betas=(s.beta1, s.beta2),
            fused=self.cuda, capturable=self.cuda)

    def prepare(self) -> None:
        """Allocate what steps need; the weights stay as they are."""
        self.index.copy_(self.rows.rows[:1].expand_as(self.index))
        for _ in range(WARM_UP_STEPS if self.cuda else 1):
            self._backward()
            self._update()
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        self.optimizer.zero_grad(set_to_none=True)
        self.sums.zero_()

    def capture(self) -> bool:
        """Capture the step on the current stream; return whether a graph will be replayed."""
        if not self.cuda or not self.settings.graph:
            return False
        self._share_rate()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode='thread_local'):
                self._backward()
                if world_size() == 1:
                    self._update()
        except RuntimeError as error:
            print(f'no CUDA graph of the step ({str(error).splitlines()[0]}); running it '
                  'operation by operation', file=sys.stderr, flush=True)
            self.optimizer.zero_grad(set_to_none=True)
            return False
        self._graph = graph
        return True

    def run(self, index: Tensor, rate: float) -> None:
        """Do one step on the clips `index` of the cache; nothing waits for the device."""
        self.index.copy_(index)
        self.rate.fill_(rate)
        if not self.cuda:
            for group in self.optimizer.param_groups:
                group['lr'] = rate
        if self._graph is None:
            self._backward()
        else:
            self._graph.replay()
        if world_size() > 1:
            average_gradients(self.params)
        if self._graph is None or world_size() > 1:
            self._update()
        if self._graph is None:
            self.optimizer.zero_grad(set_to_none=True)

    def _backward(self) -> None:
        # inside the region only: casts that were cached outside a capture would go stale
        with torch.autocast(self.device.type, torch.bfloat16,
                            enabled=self.settings.precision == 'bf16' and self.cuda):
            loss, parts = self.objective(self.rows.batch(self.index))
        loss.backward()
        if not self.names:
            self.names = tuple(parts)
            self.sums = torch.zeros(len(parts), device=self.device)
        self.sums.add_(torch.stack([part.float() for part in parts.values()]))

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.params, self.settings.grad_clip, foreach=True)
        self.optimizer.step()

    def _share_rate(self) -> None:
        """Let every group read the one rate; loading a state replaces it by a copy."""
        for group in self.optimizer.param_groups:
            group['lr'] = self.rate


class DraftTrainer:
    """One draft on one cache. `steps` trains; one item of it is one step, already issued."""

    def __init__(self, draft: Draft, target: Target, cache: TargetCache,
                 settings: DraftSettings, out: Path | None = None, *, name: str = '',
                 train_rows: Tensor | None = None, val_rows: Tensor | None = None,
                 sharded: bool = False):
        self.draft, self.cache, self.settings, self.out = draft, cache, settings, out
        self.name = name or draft.cfg.name
        self.train_rows = cache.rows('train', 'extra') if train_rows is None else train_rows
        self.train_rows = self.train_rows[cache.finished[self.train_rows]]
        self.val_rows = cache.rows('val') if val_rows is None else val_rows
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.leads = rank == 0
        world = world_size()
        if settings.batch_clips % world:
            raise ConfigurationError(f'batch_clips={settings.batch_clips}: {world} processes '
                                     'share a batch; choose a multiple')
        self.rows = self.train_rows if sharded else share_of(self.train_rows, rank, world)
        self.rows = self.rows[:_fewest(len(self.rows), cache.device)]
        self.batch = min(settings.batch_clips // world, len(self.rows))
        if not self.batch:
            raise ConfigurationError('no finished training text in the cache; train the target '
                                     'longer or raise max_tokens')
        objective = DraftObjective(draft, target.text, settings.loss_options())
        view = DraftRows(cache, draft.cfg, self.train_rows, context=settings.context,
                         teacher=settings.soft_weight > 0.0)
        self.step_of = DraftStep(objective.to(cache.device), view, settings, self.batch)
        self.average = WeightAverage(draft, settings.ema_decay)
        self.step = 0
        self.elapsed_s = 0.0  # of training steps, evaluation included
        self.curve: list[dict[str, float]] = []
        self.graphed = False
        self._reported = 0

    @property
    def steps_per_epoch(self) -> int:
        """Return how many whole batches an epoch has."""
        return len(self.rows) // self.batch

    @property
    def total_steps(self) -> int:
        """Return the steps of the whole run."""
        return max(1, round(self.settings.epochs * self.steps_per_epoch))

    def prepare(self, resume: bool = False) -> None:
        """Allocate, load a saved state if asked, capture. Call it before `steps`."""
        share_parameters(self.draft)
        self.draft.train()
        self.step_of.prepare()
        if resume and self.out is not None:
            state = load_state(self.out / STATE_FILE, self.draft, [self.step_of.optimizer],
                               self.average)
            self.step, self.elapsed_s = int(state['step']), float(state['elapsed_s'])
            self._reported = self.step
        else:
            for mine, live in zip(self.average.values, self.draft.parameters()):
                mine.copy_(live.detach())
        self.graphed = self.step_of.capture()

    def order(self, epoch: int) -> np.ndarray:
        """Return this process's clips of an epoch, (n,) int64 positions in `rows`."""
        rng = np.random.default_rng([self.settings.seed, 30, epoch])
        return rng.permutation(len(self.rows))

    def rate(self, progress: float) -> float:
        """Return the learning rate at a finished fraction: linear warm-up, then cosine."""
        s = self.settings
        warm = min(1.0, (progress + 1.0 / self.total_steps) / max(s.warmup_fraction, 1e-9))
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
        floor = s.final_lr_fraction
        return s.learning_rate * warm * (floor + (1.0 - floor) * cosine)

    def _progress(self) -> float:
        """Return the finished fraction, by steps or by time, the same in every process."""
        progress = self.step / self.total_steps
        if self.settings.minutes > 0.0:
            progress = max(progress, self.elapsed_s / (60.0 * self.settings.minutes))
            if world_size() > 1:
                value = torch.tensor([progress], dtype=torch.float64, device=self.cache.device)
                dist.broadcast(value, 0)
                progress = float(value)
        return progress

    def steps(self) -> Iterator[int]:
        """Train to the end; yield after every step. Validation happens on the way."""
        epoch_steps, s = self.steps_per_epoch, self.settings
        every = max(1, round(s.evaluate_epochs * epoch_steps))
        since = saved = time.monotonic()
        before, epoch, order = self.elapsed_s, -1, self.rows
        while (progress := self._progress()) < 1.0:
            if self.step // epoch_steps != epoch:
                epoch = self.step // epoch_steps
                order = self.rows[torch.from_numpy(self.order(epoch)).to(self.rows.device)]
            start = self.step % epoch_steps * self.batch
            self.step_of.run(order[start:start + self.batch], self.rate(progress))
            if s.ema_decay > 0.0:
                self.average.update()
            self.step += 1
            self.elapsed_s = before + time.monotonic() - since
            if self.step % every == 0:
                self.validate()
                if s.keep_state and time.monotonic() - saved > s.checkpoint_s:
                    saved = time.monotonic()
                    self.save_state()
            yield self.step
        if s.ema_decay > 0.0:
            self.average.swap()
        self.draft.eval()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averaged weights inside, where there is an average."""
        swaps = self.settings.ema_decay > 0.0
        if swaps:
            self.average.swap()
        try:
            yield
        finally:
            if swaps:
                self.average.swap()

    def validate(self) -> None:
        """Append loss and simulated L on the validation clips to the curve and the log."""
        with self.averaged():
            lengths = self.lengths(self.val_rows)
            loss = self.validation_loss()
        means = (self.step_of.sums / max(1, self.step - self._reported)).tolist()
        self.step_of.sums.zero_()
        self._reported = self.step
        trained = dict(zip(self.step_of.names, means))
        if not math.isfinite(trained.get('loss', 0.0)):
            raise EngineError(f'{self.name}: the loss is not finite at step {self.step}; lower '
                              'learning_rate')
        record = {'step': self.step, 'epoch': round(self.step / self.steps_per_epoch, 2),
                  'seconds': round(self.elapsed_s, 2), 'val_L': round(lengths.strict, 4),
                  'val_loss': round(loss, 5), **{k: round(v, 5) for k, v in trained.items()}}
        self.curve.append(record)
        self._log(record)

    def lengths(self, rows: Tensor) -> AcceptedLengths:
        """Return the simulated iterations on these clips of the cache."""
        m = acceptance(self.draft, self.cache, rows, context=self.settings.context)
        return simulate(m, self.cache.lengths[rows], self.draft.cfg.block)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the loss on the validation clips."""
        objective = self.step_of.objective
        view = DraftRows(self.cache, self.draft.cfg, self.val_rows,
                         context=self.settings.context,
                         teacher=self.settings.soft_weight > 0.0)
        self.draft.eval()
        objective.eval()
        total = sum(float(objective(view.batch(part))[0]) * len(part)
                    for part in torch.split(self.val_rows, clips_at_once(view)))
        objective.train()
        return total / max(len(self.val_rows), 1)

    def save_state(self) -> None:
        """Write what an exact continuation needs."""
        if self.leads and self.out is not None:
            save_state(self.out / STATE_FILE, self.draft, [self.step_of.optimizer],
                       self.average, {'step': self.step, 'elapsed_s': self.elapsed_s})

    def _log(self, record: dict[str, float]) -> None:
        if not self.leads:
            return
        shown = ' '.join(f'{key} {value:.4g}' for key, value in record.items())
        print(f'[{self.name}] {shown}', file=sys.stderr, flush=True)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            with open(self.out / 'log.jsonl', 'a', encoding='utf-8') as file:
                file.write(json.dumps(record) + '\n')
