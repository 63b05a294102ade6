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
From the features and the prompt of one frame to its reasoning and actions.

The planner knows this interface alone. `Stages` calls executors one after the other from the
host; `device_stages.DeviceStages` runs the device-resident frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
import torch
from torch import Tensor

from rspec_planner.decode.reuse import place_guess
from rspec_planner.decode.stats import DecodeStats
from rspec_planner.engine.executor import Executor
from rspec_planner.engine.torch_executor import (
    flow_step_executor,
    prefill_executor,
    vision_executor,
)
from rspec_planner.model.draft import Draft
from rspec_planner.model.flow import euler_sample
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache
from rspec_planner.planner.prompt import Prompt
from rspec_planner.planner.reasoner import draft_taps, GUESS_ROOM, Reasoner, tapped_tail
from rspec_planner.planner.timing import StageTimer


@dataclass(frozen=True)
class Outcome:
    """What one frame came to."""

    generated: tuple[int, ...]
    stats: DecodeStats
    actions: Tensor  # (N, 64, 2) fp32, normalised


class FrameStages(Protocol):
    """Everything between preprocessing and postprocessing of a frame."""

    @property
    def vision(self) -> Executor:
        """Return the stage that encodes a few images per call."""

    @property
    def features(self) -> Tensor:
        """Return (images, T, hidden), the features that the prefill reads, in prompt order."""

    @property
    def deepstack(self) -> Tensor:
        """Return (D, images, T, hidden), the same for the first text layers."""

    def begin(self, prompt: Prompt, guess: Sequence[int]) -> tuple[int, ...]:
        """Take a frame's prompt and a guess at its text; return the guess that is verified."""

    def encode(self, images: Sequence[NDArray[np.uint8]]) -> None:
        """Run the vision stage on at most as many images (H, W, 3) as it takes."""

    def run(self, prompt: Prompt, guess: tuple[int, ...], encode: Callable[[], None],
            noise: Tensor, steps: int, timer: StageTimer) -> Outcome:
        """
        Run the frame that was begun.

        encode: fills `features` and `deepstack`. noise: (N, 64, 2) fp32, carried to actions in
        `steps` Euler steps. timer: receives the times of encode, prefill, decode and action.
        """


@dataclass(frozen=True)
class Stages:
    """The executors of one target and the cache rows that they share."""

    vision: Executor
    prefill: Executor
    reasoner: Reasoner  # draft and verify
    flow_step: Executor

    @property
    def features(self) -> Tensor:
        """Return the prefill's features, see `FrameStages`."""
        return self.prefill.inputs['features']

    @property
    def deepstack(self) -> Tensor:
        """Return the prefill's deepstack features, see `FrameStages`."""
        return self.prefill.inputs['deepstack']

    def begin(self, prompt: Prompt, guess: Sequence[int]) -> tuple[int, ...]:
        """Put prompt and guess into the prefill's buffers."""
        inputs = self.prefill.inputs
        inputs['ids'][:prompt.length] = torch.from_numpy(prompt.token_ids)
        inputs['positions'][:, :prompt.length] = torch.from_numpy(prompt.positions)
        return place_guess(self.prefill, prompt.length, prompt.rope_delta, guess)

    def encode(self, images: Sequence[NDArray[np.uint8]]) -> None:
        """Run the vision stage on images (H, W, 3)."""
        for row, image in enumerate(images):
            self.vision.inputs['images'][row].copy_(torch.from_numpy(image))
        self.vision.enqueue()

    def run(self, prompt: Prompt, guess: tuple[int, ...], encode: Callable[[], None],
            noise: Tensor, steps: int, timer: StageTimer) -> Outcome:
        """Run stage after stage, see `FrameStages`."""
        with timer.stage('encode'):
            encode()
        with timer.stage('prefill'):
            self.prefill.enqueue()
        with timer.stage('decode'):
            generated, stats, length = self.reasoner.reason(prompt, self.prefill, guess)
        with timer.stage('action'):
            actions = self._act(length, prompt.rope_delta, noise, steps)
        return Outcome(generated, stats, actions)

    def _act(self, length: int, rope_delta: int, noise: Tensor, steps: int) -> Tensor:
        """Return normalised actions (N, 64, 2): noise carried to data in Euler steps."""
        step = self.flow_step
        step.inputs['length'].fill_(length)
        step.inputs['rope_delta'].fill_(rope_delta)

        def velocity(noisy: Tensor, t: Tensor) -> Tensor:
            step.inputs['noisy'].copy_(noisy)
            step.inputs['t'].copy_(t[:1])
            step.enqueue()
            return step.outputs['velocity']

        with torch.inference_mode():
            return euler_sample(velocity, noise, steps)


#: target, cache rows, samples, token budget and draft -> stages
StageMaker = Callable[[Target, int, int, int, Draft | None], Stages]


def torch_stages(target: Target, capacity: int, samples: int, budget: int,
                 draft: Draft | None = None) -> Stages:
    """Return PyTorch executors over one new KV cache of `capacity` rows."""
    cache = KVCache(target.cfg.text, 1, capacity, target.dtype, target.device)
    taps = draft_taps(target, draft, capacity) if draft is not None else None
    prefill = prefill_executor(target, cache, capacity, taps, min(budget, GUESS_ROOM),
                               tapped_tail(draft, target) if draft is not None else 1)
    return Stages(vision=vision_executor(target, len(target.cfg.cameras.names)),
                  prefill=prefill,
                  reasoner=Reasoner(target, cache, budget=budget, draft=draft, taps=taps,
                                    positions=prefill.inputs['positions']),
                  flow_step=flow_step_executor(target, cache, samples))
