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
What a step of action-aware post-training draws: clips, blocks, positions and tokens.

Random numbers belong to a step and a clip, never to a process: n processes draw what one process
draws with n times the clips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

#: the block at visited start b is chosen with probability ~ 0.8^b by the 'geometric' rule
_GEOMETRIC = 0.8


@dataclass(frozen=True)
class Randoms:
    """
    The random numbers of one step for G clips.

    start: (G,) uniform; tokens: (G, K, N) uniform; noise: (G, D, W, 2) standard normal.
    """

    start: Tensor
    tokens: Tensor
    noise: Tensor

    def share(self, rank: int, world: int, device: torch.device | str = 'cpu') -> Randoms:
        """Return the numbers of every world-th clip from `rank` on."""
        parts = (part[rank::world].to(device) for part in (self.start, self.tokens, self.noise))
        return Randoms(*parts)


def draw_randoms(seed: int, step: int, clips: int, samples: int, positions: int, draws: int,
                 waypoints: int) -> Randoms:
    """Return the numbers of a step; they depend on seed and step alone."""
    rng = np.random.default_rng([seed, 41, step])
    start, tokens = rng.random(clips), rng.random((clips, samples, positions))
    noise = rng.standard_normal((clips, draws, waypoints, 2))
    return Randoms(*(torch.from_numpy(part).float() for part in (start, tokens, noise)))


def clip_order(seed: int, clips: int, batch: int, step: int) -> np.ndarray:
    """Return the places (batch,) of step `step` in endless permutations of `clips` places."""
    first = step * batch
    epochs = range(first // clips, (first + batch - 1) // clips + 1)
    stream = np.concatenate([np.random.default_rng([seed, 42, epoch]).permutation(clips)
                             for epoch in epochs])
    begin = first - epochs[0] * clips
    picked: np.ndarray = stream[begin:begin + batch]
    return picked


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (...) bool: the first choice of logits (..., V_d) is the label (...)."""
    return (logits.argmax(-1) == labels) & (labels >= 0)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """
    Return indices (...) int64 drawn with probability ~ weights (..., V) by uniforms (...).

    The inverse of the cumulative sum; a weight of zero is never drawn. All zero: index 0.
    """
    total = weights.double().cumsum(-1)
    level = uniform.double()[..., None] * total[..., -1:]
    drawn = torch.searchsorted(total, level, right=True)[..., 0]
    last = (total < total[..., -1:]).sum(-1)  # where the sum is reached: rounding stops there
    return torch.minimum(drawn, last)


def visited(wrong: Tensor, known: Tensor) -> Tensor:
    """
    Return the iteration (Bt, A) int64 that starts at each anchor when decoding, -1 for none.

    wrong, known: (Bt, A, W) bool of the offsets 1 .. W of anchors 0 .. A - 1: the proposal is
    refused, there is a token to propose. An iteration commits what leads its first wrong
    position and one token of the target.
    """
    batch, anchors = wrong.shape[:2]
    matched = (known & ~wrong).long().cumprod(-1).sum(-1)
    place = torch.zeros(batch, dtype=torch.int64, device=wrong.device)
    order = torch.full((batch, anchors), -1, device=wrong.device)
    column = torch.arange(anchors, device=wrong.device)
    for iteration in range(anchors):
        here = (column == place[:, None]) & known[..., 0]
        order = torch.where(here, iteration, order)
        place = place + 1 + matched.gather(1, place.clamp(max=anchors - 1)[:, None])[:, 0]
    return order


def choose_starts(wrong: Tensor, known: Tensor, rule: str,
                  uniform: Tensor) -> tuple[Tensor, Tensor]:
    """
    Return the anchor (Bt,) int64 of each clip's block and whether it has anything to learn.

    wrong, known: (Bt, A, W) bool; uniform: (Bt,). 'rejected': uniformly among the anchors with
    a wrong position. 'geometric': among the anchors that decoding visits, the b-th with weight
    0.8^b, wrong or not. A clip whose block has no wrong position is not active.
    """
    if rule == 'rejected':
        weights = wrong.any(-1).float()
    else:
        order = visited(wrong, known)
        weights = torch.where(order >= 0, _GEOMETRIC ** order.float(), 0.0)
    start = pick(weights, uniform)
    row = torch.arange(len(start), device=start.device)
    return start, wrong.any(-1)[row, start]


def contaminated(wrong: Tensor, count: int) -> Tensor:
    """Return the first `count` wrong offsets (Bt, count) int64 of blocks (Bt, W); -1: none."""
    width = wrong.shape[1]
    offset = torch.arange(width, device=wrong.device)
    first = torch.where(wrong, offset, width).sort(-1).values[:, :count]
    first = functional.pad(first, (0, count - first.shape[1]), value=width)
    return torch.where(first < width, first, -1)
