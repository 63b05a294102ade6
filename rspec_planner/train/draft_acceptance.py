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
How many tokens an iteration commits, from one teacher-forced pass over all anchors.

Greedy speculative decoding reproduces the target's own text whatever the draft proposes, so
every anchor that a run can meet is a token of that text. The matches at all anchors therefore
give every run exactly; `simulate` only walks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rspec_planner.evaluate.intervals import ratio_interval
from rspec_planner.model.draft import Draft
from rspec_planner.train.draft_batch import DraftRows
from rspec_planner.train.draft_data import exact_products, TargetCache
from rspec_planner.train.draft_objective import block_hidden, CompactHead

#: logits that a pass without gradients makes at once, 2 GiB of fp32
LOGITS = 2 ** 29


@torch.no_grad()
def proposals_of(draft: Draft, rows: DraftRows, index: Tensor,
                 head: CompactHead | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """
    Return anchors (Bt, A), proposals and labels (Bt, A, B - 1), all target ids.

    Behind `cot_end`, proposed or the anchor, the proposal is `traj_future_start` whatever the
    draft says: the rule of the decoder that saves the closing forward.
    """
    tokens = rows.cache.profile.tokens
    head = head or CompactHead(draft)
    batch = rows.batch(index)
    chosen = head.ids[head.logits(block_hidden(draft, batch)).argmax(-1)]
    before = torch.cat((batch.anchors[..., None], chosen[..., :-1]), dim=-1)
    chosen = torch.where(before == tokens.cot_end, tokens.traj_future_start, chosen)
    return batch.anchors, chosen, batch.labels


def matches(proposals: Tensor, labels: Tensor) -> Tensor:
    """Return the length of the agreeing beginning (...) of (..., B - 1) proposals and labels."""
    agreed = (proposals == labels) & (labels >= 0)
    return agreed.long().cumprod(-1).sum(-1)


def clips_at_once(rows: DraftRows) -> int:
    """Return how many clips' logits of every anchor and offset fit in `LOGITS`."""
    each = rows.anchors * (rows.cfg.block - 1) * rows.cfg.head_rows
    return max(1, min(128, LOGITS // each))


@torch.no_grad()
def acceptance(draft: Draft, cache: TargetCache, rows: Tensor | None = None, *,
               batch: int = 0, context: str = 'all') -> Tensor:
    """
    Return m (n, R): how many proposals the target would accept at each generated token.

    rows: (n,) clips of the cache, all by default. batch: clips at once, 0 chooses. Tokens that
    are no anchor have m = 0.
    """
    index = torch.arange(len(cache), device=cache.device) if rows is None else rows
    view = DraftRows(cache, draft.cfg, index, context=context)
    head = CompactHead(draft)
    trained = draft.training
    draft.eval()
    with exact_products():
        parts = [matches(*proposals_of(draft, view, part, head)[1:])
                 for part in torch.split(index, batch or clips_at_once(view))]
    draft.train(trained)
    found = torch.cat(parts)
    result = torch.zeros((len(index), cache.ids.shape[1]), dtype=torch.int64,
                         device=cache.device)
    result[:, :found.shape[1]] = found
    return result


@dataclass(frozen=True)
class AcceptedLengths:
    """The iterations of a split; L counts the bonus token, the first token is of no iteration."""

    committed: np.ndarray  # (n,) int64 tokens of each clip's iterations, cut at the stop token
    iterations: np.ndarray  # (n,) int64
    beyond: np.ndarray  # (n,) int64 bonus tokens behind an accepted stop, author-style count
    tried: np.ndarray  # (B - 1,) iterations in which this offset could be right
    right: np.ndarray  # (B - 1,) iterations in which it was accepted

    @property
    def strict(self) -> float:
        """Return L over all iterations, tokens behind the stop discarded (0 without any)."""
        return float(self.committed.sum() / max(self.iterations.sum(), 1))

    @property
    def author_style(self) -> float:
        """Return L with a bonus token counted behind an accepted stop token."""
        return float((self.committed + self.beyond).sum() / max(self.iterations.sum(), 1))

    @property
    def drafted_share(self) -> float:
        """Return the share of committed tokens that were proposals."""
        return float(self.right.sum() / max(self.committed.sum(), 1))

    def interval(self) -> list[float]:
        """Return the 95 % bootstrap interval of strict L over clips."""
        found = ratio_interval(self.committed, self.iterations)['ci95']
        return list(cast('list[float]', found))

    def report(self, per_clip: bool = True) -> dict[str, Any]:
        """Return a JSON-ready summary; `per_clip` adds (committed, iterations) of every clip."""
        counts = np.bincount(self.iterations)
        found: dict[str, Any] = {
            'clips': len(self.committed), 'L': round(self.strict, 4),
            'ci95': [round(end, 4) for end in self.interval()],
            'L_author': round(self.author_style, 4),
            'drafted_share': round(self.drafted_share, 4),
            'iterations_histogram': counts.tolist(),
            'accepted_at_offset': [round(float(r / t), 4) if t else None
                                   for r, t in zip(self.right, self.tried)],
            'tried_at_offset': self.tried.tolist()}
        if per_clip:
            found['per_clip'] = np.stack((self.committed, self.iterations), 1).tolist()
        return found


def simulate(m: Tensor, lengths: Tensor, block: int) -> AcceptedLengths:
    """
    Walk the iterations of every clip.

    m: (n, R) matches at each generated token, see `acceptance`; lengths: (n,) generated tokens
    with the stop token; block: B, at most the one that m was computed with.
    """
    count, device = len(lengths), m.device
    at = torch.zeros(count, dtype=torch.int64, device=device)  # the anchor's token
    committed, iterations, beyond = (torch.zeros_like(at) for _ in range(3))
    offset = torch.arange(1, block, device=device)
    tried = torch.zeros(block - 1, dtype=torch.int64, device=device)
    right = torch.zeros_like(tried)
    for _ in range(int(lengths.max()) if count else 0):
        left = lengths - 1 - at  # tokens still to come
        open_ = left > 0
        accepted = m.gather(1, at.clamp(max=m.shape[1] - 1)[:, None])[:, 0].clamp(max=block - 1)
        accepted = torch.minimum(accepted, left) * open_
        taken = torch.minimum(accepted + 1, left) * open_
        committed += taken
        iterations += open_
        beyond += open_ & (accepted == left)
        tried += ((offset <= left[:, None]) & open_[:, None]).sum(0)
        right += ((offset <= accepted[:, None]) & open_[:, None]).sum(0)
        at = at + taken
    return AcceptedLengths(*(x.cpu().numpy() for x in (committed, iterations, beyond, tried,
                                                       right)))
