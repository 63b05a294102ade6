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
Exact sampling from the target with a draft ahead of it.

Two rules, both leaving the target's distribution untouched. Match: draw one token from every
row of the verify and keep proposals while they equal it; needs nothing from the draft but its
proposals. Rejection (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): draw
the proposals from the draft's q and test each against the target's p. It is valid for a draft
that proposes a whole block at once, because each row's q is known before that row is tested.

Either rule reduces a row to the token that it commits, so `accept.accept` does the rest.
Every random number is a function of seed and token position alone. By the match rule the text
is therefore the same, token for token, whatever the draft proposes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from rspec_planner.errors import ConfigurationError

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# columns of `uniforms`: what each number of a position is for
_TEST, _DRAW, _PROPOSE = 0, 1, 2
_PAGE = 64  # positions


@dataclass(frozen=True)
class SamplingRule:
    """Temperature, then the smallest set of tokens that holds `top_p` of the probability."""

    temperature: float = 0.6
    top_p: float = 0.98

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ConfigurationError(f'temperature {self.temperature}: must be above 0; decode '
                                     'without a sampler for the most likely token')
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigurationError(f'top_p {self.top_p}: must be in (0, 1]')

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return (..., V) fp64 probabilities of (..., V) logits; -inf stays impossible."""
        p = torch.softmax(logits.double() / self.temperature, dim=-1)
        if self.top_p == 1.0:
            return p
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= self.top_p
        kept = torch.zeros_like(p).scatter_(-1, index, ordered.masked_fill(outside, 0.0))
        return kept / kept.sum(-1, keepdim=True)


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """
    Return four 32-bit words per counter: Philox 4x32 with ten rounds (Salmon et al., SC 2011).

    counter: four int64 tensors of equal shape with values below 2^32; key: two such integers.
    """
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        # the product of two words fits 64 bits; int64 wraps, its bits are right all the same
        x, y = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (y >> 32 & _WORD) ^ b ^ k0, y & _WORD, (x >> 32 & _WORD) ^ d ^ k1, x & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def uniforms(seed: int, positions: Tensor) -> Tensor:
    """Return (..., 4) fp64 numbers in (0, 1) for positions (...,) int64 and a 64-bit seed."""
    zero = torch.zeros_like(positions)
    words = philox((positions & _WORD, positions >> 32 & _WORD, zero, zero),
                   (seed & _WORD, seed >> 32 & _WORD))
    return (torch.stack(words, dim=-1).double() + 0.5) / 2.0 ** 32


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Return (...,) int64 ids drawn from (..., V) fp64 weights, of any sum, by u (...,)."""
    total = weights.cumsum(-1)
    # the first entry above the mark; an id without weight never rises above the one before
    return torch.searchsorted(total, u[..., None] * total[..., -1:], right=True)[..., 0]


def rejection_choice(p: Tensor, q: Tensor, proposals: Tensor, u: Tensor) -> Tensor:
    """
    Return the token (...,) that each row commits by the rejection rule.

    p, q: (..., V) fp64 of target and draft; proposals: (...,) int64 drawn from q; u: (..., 4),
    see `uniforms`. The proposal stays with probability min(1, p / q); otherwise the token is
    drawn from norm(max(p - q, 0)), which never is the proposal again.
    """
    chance = p.gather(-1, proposals[..., None])[..., 0]
    proposed = q.gather(-1, proposals[..., None])[..., 0]
    stays = u[..., _TEST] * proposed < chance
    rest = draw((p - q).clamp_(min=0.0), u[..., _DRAW])
    return torch.where(stays, proposals, rest)


@dataclass(frozen=True)
class Sampler:
    """
    How `decode` draws tokens in one frame.

    seed: 64 bits, another one for every frame: the numbers depend on it and the position only.
    rejection: draw the proposals from the draft and use the rejection rule; else the match rule.
    draft_rule: makes q of the draft's logits. draft_ids: (V_d,) target ids of the draft's
    logits, None when they are the target's own.
    """

    rule: SamplingRule
    seed: int
    rejection: bool = False
    draft_rule: SamplingRule = field(default=SamplingRule(1.0, 1.0))
    draft_ids: Tensor | None = None

    def draw(self, logits: Tensor, positions: int | Tensor) -> list[int]:
        """Return one token per row of logits (S, V); row i decides positions + i or [i]."""
        p = self.rule.probabilities(logits)
        drawn = draw(p, self._uniforms(positions, len(p), p.device)[:, _DRAW])
        chosen: list[int] = drawn.tolist()
        return chosen

    def propose(self, drafted: Mapping[str, Tensor], position: int) -> Tensor:
        """Return proposals (B - 1,) for position ..: the draft's best, or drawn from its q."""
        if not self.rejection:
            return drafted['proposals']
        q = self.draft_rule.probabilities(drafted['logits'])
        ids = draw(q, self._uniforms(position, len(q), q.device)[:, _PROPOSE])
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def choose(self, block: Sequence[int], verified: Mapping[str, Tensor],
               drafted: Mapping[str, Tensor] | None, follow: Mapping[int, int],
               position: int) -> list[int]:
        """
        Return the token that each row of a block commits if the rows before it passed.

        `position` is that of the first proposal. Proposals that `follow` dictated were not
        drawn from q, so the match rule decides them.
        """
        if drafted is None or not self.rejection:
            return self.draw(verified['logits'], position)
        p = self.rule.probabilities(verified['logits'])
        u = self._uniforms(position, len(p), p.device)
        proposals = torch.tensor(block[1:], device=p.device)
        q = self._spread(self.draft_rule.probabilities(drafted['logits']), p.shape[-1])
        best = draw(p, u[:, _DRAW])
        dictated = torch.tensor([token in follow for token in block[:-1]], device=p.device)
        tested = rejection_choice(p[:-1], q, proposals, u[:-1])
        best[:-1] = torch.where(dictated, best[:-1], tested)
        chosen: list[int] = best.tolist()
        return chosen

    def _spread(self, q: Tensor, vocabulary: int) -> Tensor:
        """Return q (B - 1, V_d) over all target ids (B - 1, V)."""
        if self.draft_ids is None:
            return q
        return torch.zeros((len(q), vocabulary), dtype=q.dtype,
                           device=q.device).index_copy_(1, self.draft_ids, q)

    def _uniforms(self, positions: int | Tensor, count: int, device: torch.device) -> Tensor:
        """Return (count, 4) numbers of these positions, or of as many from the first on."""
        if isinstance(positions, Tensor):
            return uniforms(self.seed, positions)
        if count > _PAGE:
            return uniforms(self.seed, torch.arange(positions, positions + count, device=device))
        page, first = divmod(positions, _PAGE)
        return _page(self.seed, page, device)[first:first + count]


@lru_cache(maxsize=4)
def _page(seed: int, page: int, device: torch.device) -> Tensor:
    """Return the numbers of two pages in a row: making few costs as much as making many."""
    return uniforms(seed, torch.arange(page * _PAGE, (page + 2) * _PAGE, device=device))
