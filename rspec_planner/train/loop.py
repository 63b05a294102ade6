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
"""The training loop of the target: render, sample, step, average, report, save."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from dataclasses import dataclass
import json
import os
from pathlib import Path
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor
import torch.distributed as dist

from rspec_planner.errors import ConfigurationError, EngineError, RspecError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.target import Target
from rspec_planner.planner.tokenizer import Tokenizer
from rspec_planner.train.augment import Augmentation
from rspec_planner.train.examples import ExampleEncoder
from rspec_planner.train.farm import PairJob, RenderFarm
from rspec_planner.train.jobs import JobPlan, plan_jobs
from rspec_planner.train.objective import LossWeights, TargetObjective
from rspec_planner.train.optimizer import (
    average_gradients,
    build_optimizers,
    set_learning_rate,
    share_parameters,
    WeightAverage,
)
from rspec_planner.train.pool import ClipPool, PoolFeeder
from rspec_planner.train.profiles import new_target, start_from, with_noise_scale
from rspec_planner.train.saving import export, load_state, save_state, STATE_FILE
from rspec_planner.train.schedule import TimeSchedule
from rspec_planner.train.settings import TargetSettings
from rspec_planner.train.validate import validate
from rspec_planner.world.splits import extra_spec

#: training pairs that may fail before the run does, and where their stand-ins begin
MAX_SUBSTITUTES = 50
FIRST_SUBSTITUTE = 10_000_000
#: share of a run from exported weights in which the heads, which are never exported, learn alone
HEADS_ALONE = 0.08


@dataclass(frozen=True)
class Ranks:
    """The place of this process among those of `torchrun`; alone without it."""

    rank: int
    world: int
    device: torch.device
    control: Any = None  # gloo group: decisions of rank 0 never touch the device

    @property
    def leads(self) -> bool:
        """Return whether this process writes files and reports."""
        return self.rank == 0


def join_ranks() -> Ranks:
    """Return this process's place; opens the process groups under torchrun."""
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    cuda = torch.cuda.is_available()
    device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0))) if cuda \
        else torch.device('cpu')
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    if world == 1:
        return Ranks(rank, world, device)
    if os.environ.get('LOCAL_WORLD_SIZE') == str(world):  # one host: no name to resolve
        os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
    if not dist.is_initialized():
        dist.init_process_group('nccl' if cuda else 'gloo', device_id=device if cuda else None)
    return Ranks(rank, world, device, dist.new_group(backend='gloo'))


def leave_ranks() -> None:
    """Close the process groups of `join_ranks`."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class Decision:
    """What rank 0 decides before a step; the same in every process."""

    stop: bool
    validate: bool
    save: bool
    rate: float


class TargetTrainer:
    """One training run; `run` does the work and returns the summary."""

    def __init__(self, settings: TargetSettings, out_dir: Path, state_dir: Path, *,
                 smoke: bool = False, init_from: Path | None = None, resume: bool = False,
                 revision: str = '', started: float | None = None):
        self.settings, self.out_dir, self.state_dir = settings, out_dir, state_dir
        self.smoke, self.init_from, self.resume = smoke, init_from, resume
        self.revision = revision
        self.schedule = TimeSchedule(settings.minutes * 60.0, settings.reserve_s,
                                     settings.warmup_s, settings.final_lr_fraction,
                                     settings.max_steps)
        self.schedule.started = self.schedule.started if started is None else started
        self.step = 0
        self.clips_seen = 0
        self.substituted = 0
        self.metrics: dict[str, float] = {}
        self.losses: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """Train until the time is over; return steps, loss, checkpoint and metrics."""
        self.ranks = join_ranks()
        torch.manual_seed(self.settings.seed * 1000 + self.ranks.rank)
        self.target, self.tokenizer = self._target()
        plan, farm = self._start_rendering(self.target.cfg)
        try:
            self._build(plan, farm)
            self._await_clips(min(len(plan.train), plan.start_pairs))
            self._train()
            self._finish_held_out(len(plan.held_out))
            return self._finish()
        finally:
            farm.close()
            leave_ranks()

    def _target(self) -> tuple[Target, Tokenizer]:
        target, tokenizer = new_target(smoke=self.smoke, seed=self.settings.seed) \
            if self.init_from is None else start_from(self.init_from)
        return with_noise_scale(target, self.settings.noise_scale), tokenizer

    def _start_rendering(self, cfg: ProfileConfig) -> tuple[JobPlan, RenderFarm]:
        s = self.settings
        plan = plan_jobs(seed=s.seed, rank=self.ranks.rank, world=self.ranks.world,
                         train_clips=s.train_clips, val_clips=s.val_clips,
                         start_clips=s.start_clips, extra=s.extra_clips,
                         first_extra=s.extra_offset, drive_share=s.drive_share,
                         val_drive_clips=s.val_drive_clips)
        local = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
        workers = s.workers or min(max(len(os.sched_getaffinity(0)) // local - 2, 1), 14)
        cameras = cfg.cameras
        shape = (len(cameras.names), cameras.frames, cameras.height, cameras.width, 3)
        farm = RenderFarm(plan.stream(), workers=workers, image_shape=shape,
                          substitute=self._substitute)
        farm.start()
        self._say(f'{workers} render workers, {len(plan.train)} training pairs, '
                  f'{len(plan.held_out)} held-out pairs per process')
        return plan, farm

    def _substitute(self, job: PairJob, message: str) -> PairJob:
        """Replace a training pair that cannot be made; a held-out pair must not change."""
        ordinal, _ = job
        self.substituted += 1
        if ordinal < 0 or self.substituted > MAX_SUBSTITUTES:
            raise RspecError(message)
        print(f'{message}; an extra pair takes its place', file=sys.stderr, flush=True)
        index = FIRST_SUBSTITUTE + 2 * (self.substituted * self.ranks.world + self.ranks.rank)
        return ordinal, (extra_spec(index), extra_spec(index + 1))

    def _build(self, plan: JobPlan, farm: RenderFarm) -> None:
        s, device = self.settings, self.ranks.device
        encoder = ExampleEncoder(self.target.cfg, self.tokenizer, s.deliberative_weight)
        weights = LossWeights(s.flow_weight, s.decision_weight, s.object_weight,
                              s.expert_gradient, s.flow_samples, s.path_weight,
                              s.quiet_samples)
        augmentation = Augmentation(s.pitch_deg, s.yaw_deg, s.shift_px, s.brightness,
                                    s.contrast, s.noise)
        self.model = TargetObjective(self.target, encoder, weights, augmentation).to(device)
        share_parameters(self.model)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = build_optimizers(
            self.model, learning_rate=s.learning_rate, betas=(s.beta1, s.beta2),
            weight_decay=s.weight_decay, matrix_optimizer=s.matrix_optimizer,
            muon_learning_rate=s.muon_learning_rate)
        self.average = WeightAverage(self.model, s.ema_decay)
        if self.resume:
            self._restore()
        if s.compile:
            compile_blocks(self.target)
        shape = farm.pixels.shape[2:]
        capacity = max(s.pool_clips // 2, 1)
        if not s.extra_clips:
            capacity = min(capacity, len(plan.train))
        self.pool = ClipPool(capacity, len(plan.train), encoder, shape, device)
        self.held_out = ClipPool(max(len(plan.held_out), 1), 0, encoder, shape, device)
        self.feeder = PoolFeeder(farm, self.pool, self.held_out)
        self._say(f'{self.target.num_parameters() / 1e6:.2f} M parameters on {device}')

    def _restore(self) -> None:
        progress = load_state(self.state_dir / STATE_FILE, self.model, self.optimizers,
                              self.average)
        self.step, self.clips_seen = int(progress['step']), int(progress['clips_seen'])
        self.schedule.started -= progress['elapsed_s']
        self.schedule.first_step = progress['first_step_s']
        self._say(f'resumed at step {self.step}, {progress["elapsed_s"]:.0f} s')

    def _await_clips(self, pairs: int) -> None:
        shown = time.monotonic()
        while self.pool.size < pairs:
            self.feeder.feed(64, timeout_s=0.5)
            if time.monotonic() - shown > self.settings.report_every_s:
                shown = time.monotonic()
                self._say(f'rendered {self.pool.clips_rendered} clips, training starts at '
                          f'{2 * pairs}')
            if self.schedule.finished():
                raise ConfigurationError(
                    f'minutes={self.settings.minutes}: over before {2 * pairs} clips were '
                    'rendered; raise minutes or lower start_clips')
        if self.ranks.world > 1:
            dist.barrier(self.ranks.control)
        self.schedule.begin()

    def _train(self) -> None:
        s = self.settings
        rng = np.random.default_rng([s.seed, 21, self.ranks.rank])
        report = Reporter(self)
        self.model.train()
        for decision in self._decisions():
            if decision.validate:
                self._validate()
            if decision.save:
                self._save()
            self.feeder.feed(8)
            rows = self.pool.sample(s.batch_clips // 2, rng)
            parts, norm = self._one_step(rows, decision.rate)
            self.step += 1
            self.clips_seen += 2 * len(rows) * self.ranks.world
            report.add(parts, norm, decision.rate)
        self.losses = report.flush() or self.losses

    def _decisions(self) -> Iterator[Decision]:
        """Yield what to do before each step until rank 0 says stop."""
        s = self.settings
        saved = validated = self.schedule.elapsed_s
        while True:
            now = self.schedule.elapsed_s
            values = torch.tensor([self.schedule.finished(self.step),
                                   now - validated > s.evaluate_every_s,
                                   now - saved > s.checkpoint_every_s,
                                   self.schedule.factor(self.step)], dtype=torch.float64)
            if self.ranks.control is not None:
                dist.broadcast(values, 0, group=self.ranks.control)
            stop, check, save, rate = values.tolist()
            if stop:
                return
            validated = now if check else validated
            saved = now if save else saved
            yield Decision(bool(stop), bool(check), bool(save), rate)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self.settings.precision == 'bf16'
        return torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=enabled)

    def _one_step(self, rows: np.ndarray, rate: float) -> tuple[dict[str, Tensor], Tensor]:
        batch = self.pool.batch(rows)
        alone = self.init_from is not None and self.schedule.progress(self.step) < HEADS_ALONE
        self.model.head_gradient = 0.0 if alone else 1.0
        with self._autocast():
            loss, parts = self.model(batch)
        loss.backward()
        average_gradients(self.params)
        norm = nn.utils.clip_grad_norm_(self.params, self.settings.grad_clip, foreach=True)
        set_learning_rate(self.optimizers, rate)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update()
        return parts, norm

    def _validate(self) -> None:
        started = time.monotonic()
        self.average.swap()
        self.target.eval()
        with torch.no_grad(), self._autocast():
            self.metrics = validate(self.target, self.tokenizer, self.held_out)
        self.model.train()
        self.average.swap()
        shown = ' '.join(f'{k} {v:.3f}' for k, v in self.metrics.items() if k != 'clips')
        self._say(f'validation on {self.metrics["clips"]:.0f} clips: {shown} '
                  f'({time.monotonic() - started:.1f} s)')
        self._log({'step': self.step, 'validation': self.metrics})

    def _save(self, state: bool = True) -> Path | None:
        if not self.ranks.leads:
            return None
        self.average.swap()
        folder = export(self.target, self.tokenizer, self.out_dir, self._manifest())
        self.average.swap()
        if state:
            save_state(self.state_dir / STATE_FILE, self.model, self.optimizers, self.average,
                       {'step': self.step, 'clips_seen': self.clips_seen,
                        'elapsed_s': self.schedule.elapsed_s,
                        'first_step_s': self.schedule.first_step or 0.0})
        return folder

    def _manifest(self) -> dict[str, Any]:
        return {'kind': 'target', 'profile': self.target.cfg.name, 'revision': self.revision,
                'data_seed': self.settings.seed, 'settings': self.settings.to_dict(),
                'minutes': round(self.schedule.elapsed_s / 60.0, 2), 'steps': self.step,
                'clips_seen': self.clips_seen, 'processes': self.ranks.world,
                'clips_rendered': self.pool.clips_rendered,
                'pairs_substituted': self.substituted, 'losses': self.losses,
                'validation': self.metrics, 'parameters': self.target.num_parameters(),
                'torch': torch.__version__, 'device': device_name(self.ranks.device)}

    def _finish_held_out(self, pairs: int) -> None:
        """Render what is still missing of the validation clips, within the reserve."""
        while self.held_out.size < pairs and self.schedule.elapsed_s < self.schedule.total_s - 10:
            self.feeder.feed(64, timeout_s=0.2)

    def _finish(self) -> dict[str, Any]:
        if not all(np.isfinite(value) for value in self.losses.values()):
            raise EngineError(f'loss {self.losses} is not finite; lower learning_rate and '
                              f'continue from {self.out_dir}')
        self._validate()
        folder = self._save()
        self._say(f'done after {self.schedule.elapsed_s:.0f} s, {self.step} steps')
        if self.ranks.world > 1:
            dist.barrier(self.ranks.control)
        return {'steps': self.step, 'loss': self.losses.get('total', float('nan')),
                'losses': self.losses, 'validation': self.metrics,
                'clips_seen': self.clips_seen, 'seconds': round(self.schedule.elapsed_s, 1),
                'checkpoint': str(folder or self.out_dir / 'checkpoint')}

    def _say(self, text: str) -> None:
        if self.ranks.leads:
            print(f'[{self.schedule.elapsed_s:6.1f} s] {text}', file=sys.stderr, flush=True)

    def _log(self, record: dict[str, Any]) -> None:
        if self.ranks.leads:
            self.out_dir.mkdir(parents=True, exist_ok=True)
            record = {'seconds': round(self.schedule.elapsed_s, 1), **record}
            with open(self.out_dir / 'log.jsonl', 'a', encoding='utf-8') as file:
                file.write(json.dumps(record) + '\n')


class Reporter:
    """Sum losses on the device and print one line every few seconds."""

    def __init__(self, trainer: TargetTrainer):
        self.trainer = trainer
        self.sums: dict[str, Tensor] = {}
        self.steps = 0
        self.since = time.monotonic()
        self.rate = 1.0
        self.rendered = trainer.pool.clips_rendered

    def add(self, parts: dict[str, Tensor], norm: Tensor, rate: float) -> None:
        """Count one step."""
        for name, value in {**parts, 'grad': norm.detach()}.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps, self.rate = self.steps + 1, rate
        if time.monotonic() - self.since > self.trainer.settings.report_every_s:
            self.trainer.losses = self.flush()

    def flush(self) -> dict[str, float]:
        """Print and return the means since the last call; empty without a step."""
        if not self.steps:
            return {}
        trainer, span = self.trainer, max(time.monotonic() - self.since, 1e-9)
        means = {name: float(value) / self.steps for name, value in self.sums.items()}
        means['total'] = sum(v for k, v in means.items() if k not in ('grad', 'total'))
        pool, clips = trainer.pool, trainer.settings.batch_clips * trainer.ranks.world
        rendered = pool.clips_rendered
        shown = ' '.join(f'{k} {v:.3f}' for k, v in means.items())
        trainer._say(
            f'step {trainer.step} | {self.steps / span:.2f} steps/s '
            f'{self.steps * clips / span:.0f} clips/s | rendered {rendered} '
            f'({(rendered - self.rendered) / span:.0f}/s) pool {2 * pool.size} | '
            f'lr x{self.rate:.3f} | {shown}')
        trainer._log({'step': trainer.step, 'losses': means, 'clips_rendered': rendered,
                      'clips_per_s': self.steps * clips / span})
        self.sums, self.steps = {}, 0
        self.since, self.rendered = time.monotonic(), rendered
        return means


def compile_blocks(target: Target) -> None:
    """Compile each repeated block once; all blocks of a kind share the compiled code."""
    for block in [*target.vision.blocks, *target.text.layers, *target.expert.layers]:
        block.compile()


def device_name(device: torch.device) -> str:
    """Return a readable name of the device."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'
