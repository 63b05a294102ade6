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
"""Held-out accuracy during training: greedy reasoning and one trajectory per clip."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from rspec_planner.evaluate.batched import BatchedPlanner
from rspec_planner.model.target import Target
from rspec_planner.planner.prompt import build_prompt, Prompt
from rspec_planner.planner.tokenizer import Tokenizer
from rspec_planner.train.examples import history_poses
from rspec_planner.train.pool import ClipPool
from rspec_planner.world.clip import Clip
from rspec_planner.world.reasoning import acceptable, attribute_matches

#: decode budget while training; the longest sentence of the catalogue has 23 tokens
BUDGET = 32


def _groups(prompts: list[Prompt], limit: int) -> Iterator[list[int]]:
    """Yield indices of prompts with one length, at most `limit` at a time."""
    lengths = np.array([prompt.length for prompt in prompts])
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        for start in range(0, len(rows), limit):
            yield rows[start:start + limit].tolist()


def validate(target: Target, tokenizer: Tokenizer, pool: ClipPool,
             batch_clips: int = 64) -> dict[str, float]:
    """
    Return decision, pair and attribute accuracy and minADE1 over the pool, summed over ranks.

    Those of drive clips have `drive_` before their names. Fixed noise, so that two calls differ
    only by the weights.
    """
    shown = [row for row in range(pool.size) if not pool.clips[row][0].spec.drive]
    later = [row for row in range(pool.size) if pool.clips[row][0].spec.drive]
    metrics = _measure(target, tokenizer, pool, shown, batch_clips)
    driven = _measure(target, tokenizer, pool, later, batch_clips)
    if driven['clips']:
        metrics.update({f'drive_{name}': value for name, value in driven.items()})
    return metrics


def _measure(target: Target, tokenizer: Tokenizer, pool: ClipPool, of_pool: list[int],
             batch_clips: int) -> dict[str, float]:
    """Return the metrics over some rows of the pool, summed over ranks."""
    clips: list[Clip] = [clip for row in of_pool for clip in pool.clips[row]]
    places = [(row, k) for row in of_pool for k in range(len(pool.clips[row]))]
    prompts = [build_prompt(target.cfg, tokenizer, history_poses(clip.history),
                            clip.navigation_text) for clip in clips]
    planner = BatchedPlanner(target, tokenizer, max_reasoning_tokens=BUDGET)
    noise = torch.randn((len(clips), 1, 64, 2), generator=torch.Generator().manual_seed(0))
    right = np.zeros(len(clips), bool)
    sums = np.zeros(6)  # clips, right, pairs, pairs right, attributes right, attributes
    error = np.zeros(len(clips))
    for rows in _groups(prompts, batch_clips):
        place = torch.tensor([places[i] for i in rows], device=pool.device)
        images = pool.images[place[:, 0], place[:, 1]]
        history = np.stack([clips[i].history for i in rows])
        answers = planner.answer([prompts[i] for i in rows], images, history,
                                 noise[rows].to(pool.device))
        for i, text, xy in zip(rows, answers.texts, answers.xy):
            right[i] = acceptable(clips[i].decision, text)
            sums[4:] += attribute_matches(clips[i].decision, text)
            error[i] = np.linalg.norm(xy[0] - clips[i].future[:, :2], axis=-1).mean()
    for row in of_pool:
        members = [right[i] for i, place_of in enumerate(places) if place_of[0] == row]
        if len(members) == 2:
            sums[2:4] += (1, all(members))
    sums[:2] = len(clips), right.sum()
    return _reduced(sums, float(error.sum()), pool.device)


def _reduced(sums: np.ndarray, error: float, device: torch.device) -> dict[str, float]:
    total = torch.tensor([*sums, error], dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    clips, right, pairs, both, matched, said, distance = total.tolist()
    return {'clips': clips, 'decision_accuracy': right / max(clips, 1),
            'pair_accuracy': both / max(pairs, 1),
            'attribute_accuracy': matched / max(said, 1), 'ade_m': distance / max(clips, 1)}
