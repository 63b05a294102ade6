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
What fp8 costs a trained target: the same clips, said and driven with and without it.

`rspec eval fp8`. Matrices of text, expert and tower are replaced by what their e4m3 copies stand
for, and the rows in front of every one of their products are rounded as `engine.cuda_fp8` rounds
them, so the arithmetic is that of the device up to the order of sums; it runs anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn, Tensor

from rspec_planner.engine.cuda_rows import quantise
from rspec_planner.engine.kernels.fp8_reference import E4M3, norm8
from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.batched import Answers, BatchedPlanner
from rspec_planner.evaluate.clips import render_clips
from rspec_planner.evaluate.intervals import statistic_interval
from rspec_planner.evaluate.scores import Answer, answer_of
from rspec_planner.model.checkpoint import load_target
from rspec_planner.model.layer import DecoderLayer
from rspec_planner.model.target import Target
from rspec_planner.model.vision import VisionBlock
from rspec_planner.planner.drafts import checkpoint_folder
from rspec_planner.planner.prompt import build_prompt, Prompt
from rspec_planner.planner.tokenizer import load_tokenizer
from rspec_planner.world.clip import Clip
from rspec_planner.world.generate import clip_observation
from rspec_planner.world.splits import split_specs

SAMPLES, BATCH = 6, 8
#: what is compared with the unquantised target
VARIANTS = ('weights', 'weights and rows', 'weights and rows, tower too')
Progress = Callable[[int, int], None]


def rounded_rows(x: Tensor) -> Tensor:
    """Return x (..., K) as its e4m3 rows stand for it."""
    flat = x.reshape(-1, x.shape[-1])
    small, scale = torch.empty(flat.shape, dtype=E4M3, device=x.device), torch.empty(
        len(flat), device=x.device)
    norm8(flat, small, scale)
    return (small.float() * scale[:, None]).to(x.dtype).view(x.shape)


def round_linear(linear: nn.Linear, rows: bool) -> None:
    """Replace a weight by what its e4m3 copy stands for; rows: round what goes into it too."""
    small, scale = quantise(linear.weight.detach())
    linear.weight.data = (small.float() * scale[:, None]).to(linear.weight.dtype)
    if rows:
        linear.register_forward_pre_hook(
            lambda _, inputs: (rounded_rows(inputs[0]), *inputs[1:]))


def round_target(target: Target, rows: bool = True, vision: bool = False) -> Target:
    """
    Round the layers of text and expert in place, see the module; return the target.

    rows: also round what goes into their products; vision: the tower's blocks too. The target
    runs unpacked afterwards.
    """
    for each in (*target.text.layers, *target.expert.layers):
        layer = cast('DecoderLayer', each)
        layer.packed = None
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
                       mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            round_linear(linear, rows)
    for each in target.vision.blocks if vision else ():
        block = cast('VisionBlock', each)
        for linear in (block.attn.qkv, block.attn.proj, block.mlp.linear_fc1,
                       block.mlp.linear_fc2):
            round_linear(linear, rows)
    return target


@dataclass(frozen=True)
class Pair:
    """One clip, said and driven by the unquantised target and by a variant."""

    before: Answer
    after: Answer
    same_text: bool
    tokens: int  # of the unquantised text
    same_tokens: int  # of these, equal at their position
    apart_m: float  # mean distance of the first trajectories


class Fp8Evaluation:
    """An unquantised target and its rounded variants over the same clips."""

    def __init__(self, checkpoint: str | Path = 'tiny', device: str = 'cpu') -> None:
        folder = checkpoint_folder(checkpoint)
        self.device, self.tokenizer = torch.device(device), load_tokenizer(folder)
        targets = [load_target(folder, device).requires_grad_(False) for _ in range(4)]
        self.cfg = targets[0].cfg
        made = [targets[0].pack(), round_target(targets[1], rows=False),
                round_target(targets[2]), round_target(targets[3], vision=True)]
        self._planners = [BatchedPlanner(target, self.tokenizer) for target in made]
        shape = (1, SAMPLES, self.cfg.action_space.n_waypoints, 2)
        self._noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(
            self.device)

    def run(self, split: str, clips: int, progress: Progress | None = None,
            workers: int | None = 0) -> dict[str, list[Pair]]:
        """Return the pairs of each variant."""
        cameras = self.cfg.cameras
        found: dict[str, list[Pair]] = {name: [] for name in VARIANTS}
        rendered = render_clips(split_specs(split, clips), cameras.width, cameras.height, workers)
        for group in self._groups(rendered):
            for name, pairs in zip(VARIANTS, self._compare(group)):
                found[name] += pairs
            if progress is not None:
                progress(len(found[VARIANTS[0]]), clips)
        return found

    def _groups(self, clips: Iterator[Clip]) -> Iterator[list[tuple[Clip, Prompt]]]:
        """Yield up to BATCH clips whose prompts are equally long."""
        waiting: dict[int, list[tuple[Clip, Prompt]]] = {}
        for clip in clips:
            prompt = build_prompt(self.cfg, self.tokenizer, clip_observation(clip).ego_poses,
                                  clip.navigation_text)
            group = waiting.setdefault(prompt.length, [])
            group.append((clip, prompt))
            if len(group) == BATCH:
                yield waiting.pop(prompt.length)
        yield from waiting.values()

    def _compare(self, group: list[tuple[Clip, Prompt]]) -> list[list[Pair]]:
        pixels = np.stack([clip.images for clip, _ in group if clip.images is not None])
        images = torch.from_numpy(pixels).flatten(1, 2).to(self.device)
        history = np.stack([clip.history for clip, _ in group])
        prompts, noise = [prompt for _, prompt in group], self._noise.expand(
            len(group), -1, -1, -1)
        features = self._planners[0].features(images, len(group), 'camera')
        rounded = self._planners[-1].features(images, len(group), 'camera')
        plain, *others = [
            planner.answer_encoded(prompts, rounded if planner is self._planners[-1] else
                                   features, history, noise) for planner in self._planners]
        return [[_pair(clip, row, plain, other) for row, (clip, _) in enumerate(group)]
                for other in others]


def _pair(clip: Clip, row: int, plain: Answers, other: Answers) -> Pair:
    before, after = (answer_of(clip, answers.texts[row], answers.xy[row], answers.speeds[row])
                     for answers in (plain, other))
    said, heard = plain.token_ids[row], other.token_ids[row]
    apart = np.linalg.norm(plain.xy[row, 0] - other.xy[row, 0], axis=-1)
    return Pair(before, after, said == heard, len(said),
                sum(a == b for a, b in zip(said, heard)), float(apart.mean()))


def report_of(pairs: list[Pair]) -> dict[str, Any]:
    """Return what a variant changes; intervals are 95 % bootstrap intervals over clips."""
    def change(value: Callable[[Answer], float]) -> dict[str, Any]:
        differences = np.array([value(p.after) - value(p.before) for p in pairs])
        return {'before': float(np.mean([value(p.before) for p in pairs])),
                'after': float(np.mean([value(p.after) for p in pairs])),
                'change': statistic_interval(differences, lambda v: np.mean(v, axis=-1))}

    apart = np.array([pair.apart_m for pair in pairs])
    tokens = sum(pair.tokens for pair in pairs)
    return {'clips': len(pairs), 'texts_that_differ': sum(not p.same_text for p in pairs),
            'token_agreement': sum(p.same_tokens for p in pairs) / max(tokens, 1),
            'decision_accuracy': change(lambda a: float(a.right)),
            'min_ade6_m': change(lambda a: a.min_ade6_m), 'ade_m': change(lambda a: a.ade_m),
            'trajectory_apart_m': {'mean': float(apart.mean()), 'p50': float(np.median(apart)),
                                   'p95': float(np.percentile(apart, 95)),
                                   'max': float(apart.max())}}


def evaluate_fp8(split: str = 'val', clips: int = 100, checkpoint: str = 'tiny',
                 device: str = 'cpu', progress: Progress | None = None,
                 workers: int | None = 0) -> Mapping[str, Any]:
    """Return what fp8 changes on clips of a split; ConfigurationError for fewer than two."""
    if clips < 2:
        raise ConfigurationError(f'clips {clips}: an interval needs at least 2')
    found = Fp8Evaluation(checkpoint, device).run(split, clips, progress, workers)
    return {'split': split, 'checkpoint': str(checkpoint), 'device': device,
            'quantised': 'matrices e4m3, a factor each output channel; rows e4m3, a factor each '
                         'row',
            'variants': {name: report_of(pairs) for name, pairs in found.items()}}
