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
How fast a training step is on this machine: `python -m rspec_planner.train.throughput`.

Random images, no rendering: the ceiling that a run can reach, for each variant, and the
kernels that take the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from rspec_planner.train.augment import Augmentation
from rspec_planner.train.examples import ExampleEncoder, MAX_REASONING, MAX_WORDS
from rspec_planner.train.loop import compile_blocks, device_name
from rspec_planner.train.objective import LossWeights, TargetObjective
from rspec_planner.train.optimizer import build_optimizers, WeightAverage
from rspec_planner.train.pool import Batch
from rspec_planner.train.profiles import new_target


def random_batch(model: TargetObjective, encoder: ExampleEncoder, clips: int,
                 device: torch.device) -> Batch:
    """Return a batch of noise with the shapes of real clips."""
    cfg = model.target.cfg
    views = (len(cfg.cameras.names) * cfg.cameras.frames, cfg.cameras.height, cfg.cameras.width)
    rows = encoder.capacity
    ids = torch.full((clips, rows), cfg.tokens.pad, device=device)
    ids[:, encoder.visual_index] = cfg.tokens.image_pad
    prompt = torch.full((clips,), rows - 22, device=device)
    weights = torch.zeros(clips, MAX_REASONING, device=device)
    weights[:, :20] = 1.0
    return Batch(
        images=torch.randint(0, 256, (clips, *views, 3), dtype=torch.uint8, device=device),
        token_ids=ids, prompt_lengths=prompt, lengths=prompt + 20, token_weights=weights,
        actions=torch.randn(clips, cfg.action_space.n_waypoints, 2, device=device),
        words=torch.randint(0, 100, (clips, MAX_WORDS), device=device),
        objects=torch.zeros((clips, views[0], cfg.tokens_per_image), dtype=torch.uint8,
                            device=device),
        history=torch.zeros(clips, 16, 4, device=device),
        future=torch.zeros(clips, 64, 4, device=device))


class Stepper:
    """A model and its optimisers on random data."""

    def __init__(self, device: torch.device, optimizer: str, compiled: bool,
                 flow_samples: int = 6, smoke: bool = False):
        target, tokenizer = new_target(smoke=smoke)
        self.encoder = ExampleEncoder(target.cfg, tokenizer, 3.0)
        self.model = TargetObjective(target, self.encoder,
                                     LossWeights(flow_samples=flow_samples),
                                     Augmentation()).to(device)
        self.device = device
        self.optimizers = build_optimizers(self.model, learning_rate=1e-4, betas=(0.9, 0.95),
                                           weight_decay=0.05, matrix_optimizer=optimizer,
                                           muon_learning_rate=1e-3)
        self.average = WeightAverage(self.model, 0.998)
        if compiled:
            compile_blocks(target)

    def step(self, batch: Batch) -> None:
        """Do one whole training step."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, _ = self.model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update()

    def measure(self, clips: int, steps: int) -> dict[str, float]:
        """Return milliseconds per step, clips per second and peak memory."""
        batch = random_batch(self.model, self.encoder, clips, self.device)
        started = time.monotonic()
        for _ in range(3):
            self.step(batch)
        self._wait()
        warm = time.monotonic() - started
        started = time.monotonic()
        for _ in range(steps):
            self.step(batch)
        issued = time.monotonic() - started
        self._wait()
        span = (time.monotonic() - started) / steps
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == 'cuda' else 0.0
        return {'step_ms': span * 1e3, 'host_ms': issued / steps * 1e3,
                'clips_per_s': clips / span, 'warm_up_s': warm, 'peak_gb': peak}

    def kernels(self, clips: int, rows: int = 22) -> str:
        """Return the kernels that take most of the device time of two steps."""
        batch = random_batch(self.model, self.encoder, clips, self.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA,
                                                torch.profiler.ProfilerActivity.CPU]) as record:
            for _ in range(2):
                self.step(batch)
            self._wait()
        return str(record.key_averages().table(sort_by='self_device_time_total', row_limit=rows,
                                               max_name_column_width=60))

    def _wait(self) -> None:
        if self.device.type == 'cuda':
            torch.cuda.synchronize()


def _variants(options: argparse.Namespace) -> Iterator[tuple[str, bool, int]]:
    for optimizer in options.optimizers.split(','):
        for compiled in (False, True) if options.compile else (False,):
            for clips in (int(value) for value in options.clips.split(',')):
                yield optimizer, compiled, clips


def main(arguments: list[str] | None = None) -> int:
    """Measure the variants; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--clips', default='64,96,128')
    parser.add_argument('--steps', type=int, default=10)
    parser.add_argument('--optimizers', default='adamw')
    parser.add_argument('--compile', action='store_true')
    parser.add_argument('--profile', action='store_true')
    parser.add_argument('--smoke', action='store_true')
    options = parser.parse_args(arguments)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    results: list[dict[str, Any]] = []
    for optimizer, compiled, clips in _variants(options):
        stepper = Stepper(device, optimizer, compiled, smoke=options.smoke)
        found = stepper.measure(clips, options.steps)
        results.append({'optimizer': optimizer, 'compile': compiled, 'clips': clips,
                        **{k: float(np.round(v, 2)) for k, v in found.items()}})
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        if options.profile and len(results) == 1:
            print(stepper.kernels(clips), file=sys.stderr, flush=True)
        del stepper
        if device.type == 'cuda':
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print(json.dumps({'device': device_name(device), 'variants': results}))
    return 0


if __name__ == '__main__':
    sys.exit(main())
