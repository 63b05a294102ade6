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
What fp8 changes in what a target says and drives, on the prompts of a bench.

Two comparisons. Free: each precision decodes its own text, which parts for good at the first
token that differs. Same context: both read the text of the unquantised target, so that every
choice, logit and waypoint is compared behind the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rspec_planner.engine.cuda_fp8 import Fp8Weights
from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.evaluate.bench import percentiles
from rspec_planner.evaluate.bench_baseline import features_of
from rspec_planner.evaluate.bench_workload import bench_prompt, BenchPrompt
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.target import Target
from rspec_planner.model.unicycle import UnicycleActionSpace

#: tokens of a text, and the speed from which its trajectory begins, m/s
TOKENS, SPEED = 17, 10.0


@dataclass(frozen=True)
class Answers:
    """What one precision makes of one prompt."""

    text: tuple[int, ...]  # its own
    choices: tuple[int, ...]  # behind the prompt and each token of the text that both read
    logits: Tensor  # (tokens + 1, vocabulary without forbidden ids) of the same rows
    actions: Tensor  # (Z, 64, 2) behind that text


class Reader:
    """A frame without a draft whose prefill also reads a text behind the prompt."""

    def __init__(self, target: Target, fp8: Fp8Weights | None = None) -> None:
        self.target = target
        rows = len(bench_prompt(target.cfg, 0).ids) + TOKENS
        self.frame = DeviceFrame(target, prompt_rows=rows + -rows % 64, budget=TOKENS,
                                 guess_room=TOKENS, fp8=fp8)
        features, deepstack = features_of(target)
        self.frame.prefill.features.copy_(features)
        self.frame.prefill.deepstack.copy_(deepstack)
        generator = torch.Generator().manual_seed(0)
        noise = self.frame.frame.noise
        noise.copy_(torch.randn(noise.shape, generator=generator))

    def answers(self, prompt: BenchPrompt, read: Sequence[int] | None = None) -> Answers:
        """Return what is made of a prompt; read: the text that both read, None for its own."""
        frame, numbers = self.frame, self.frame.frame
        frame.begin(prompt.ids, prompt.positions, prompt.rope_delta, TOKENS)
        frame.run()
        if self.target.device.type == 'cuda':
            torch.cuda.synchronize()
        text = numbers.result().generated
        context = text if read is None else tuple(read)
        rows = len(prompt.ids) + len(context)
        frame.begin(prompt.ids, prompt.positions, prompt.rope_delta, TOKENS, context)
        with torch.inference_mode():
            frame.prefill()
            count = len(context) + 1
            choices = frame.prefill.best[:count].tolist()
            logits = _logits(self.target, frame.prefill.last_states[:count])
            # rows of the whole text are in the cache, whatever was accepted of it
            numbers.at(Slot.CONTEXT).fill_(rows)
            numbers.at(Slot.CONTEXT_ANGLE).fill_(rows + prompt.rope_delta)
            frame.flow()
        return Answers(text, tuple(choices), logits, numbers.actions.cpu().clone())


def _logits(target: Target, states: Tensor) -> Tensor:
    """Return (rows, ids) fp32 on the host, forbidden ids left out."""
    text, tokens = target.text, target.cfg.tokens
    logits = text.logits(text.norm(states)).float().cpu()
    return torch.cat((logits[:, :tokens.forbidden_start], logits[:, tokens.forbidden_end:]), -1)


def difference(cfg: ProfileConfig, expected: Sequence[Answers],
               found: Sequence[Answers]) -> dict[str, Any]:
    """Return the report; expected: unquantised, found: fp8, prompt by prompt."""
    pairs = list(zip(expected, found))
    free = [(a, b) for before, after in pairs
            for a, b in zip(_padded(before.text), _padded(after.text))]
    forced = [(a, b) for before, after in pairs for a, b in zip(before.choices, after.choices)]
    errors = [float((after.logits - before.logits).norm() / before.logits.norm())
              for before, after in pairs]
    apart = [_apart(cfg, before.actions, after.actions) for before, after in pairs]
    return {'weights': 'random', 'prompts': len(pairs),
            'free': {'texts_that_differ': sum(a.text != b.text for a, b in pairs),
                     'tokens': len(free), 'tokens_that_differ': sum(a != b for a, b in free)},
            'same_context': {
                'choices': len(forced), 'choices_that_differ': sum(a != b for a, b in forced),
                'logits_relative_error': {'mean': sum(errors) / len(errors),
                                          'max': max(errors)},
                'trajectory_mean_m': percentiles([mean for mean, _ in apart]),
                'trajectory_max_m': max(most for _, most in apart),
                'speed_at_t0_mps': SPEED}}


def _padded(text: tuple[int, ...]) -> tuple[int, ...]:
    """Return the text, no token where it ended early."""
    return (*text, *[-1] * (TOKENS - len(text)))


def _apart(cfg: ProfileConfig, before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the mean and the largest distance in metres of two trajectories."""
    space = UnicycleActionSpace(cfg.action_space)
    ways = [space.integrate(actions.double(), torch.full(
        (len(actions),), SPEED, dtype=torch.float64), floor_at_zero=True)[0]
        for actions in (before, after)]
    distance = (ways[0] - ways[1]).norm(dim=-1)
    return float(distance.mean()), float(distance.max())
