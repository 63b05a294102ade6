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
Losses of both kinds of draft over all anchors of a reasoning.

DFlash (arXiv 2602.06036): cross entropy at offsets 1 .. B - 1 of every block, partial blocks
kept, weight exp(-(offset - 1) / gamma). EAGLE-3 (arXiv 2503.01840): the chain is unrolled as in
inference with the text's own tokens as inputs (training-time test), weight decay^step.

A draft with a window sees W columns from each anchor. Its blocks become batch rows of their
own, which costs W keys a block and needs no mask; a draft without a window packs all blocks of
a clip behind one shared context under a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.dflash import block_visible, Dflash, KeysValues
from rspec_planner.model.draft import Draft
from rspec_planner.model.eagle3 import chain_visible, Eagle3
from rspec_planner.model.text import TextDecoder
from rspec_planner.train.draft_batch import DraftBatch


@dataclass(frozen=True)
class LossOptions:
    """How the positions of a block are weighted, and what else a step may do."""

    gamma: float = 0.0  # of DFlash; 0: 1 + 3 B / 8, which is 4, 7, 10 for blocks of 8, 16, 24
    decay: float = 0.8  # of EAGLE-3
    unroll: int = 0  # steps of EAGLE-3 in training; 0: the whole chain
    first_weight: float = 1.0  # extra factor of the first proposal
    soft_weight: float = 0.0  # share of cross entropy against the target's probabilities
    confidence: float = 0.0  # exponent of the expected-length weight, see `length_weight`
    random_masks: bool = False  # DFlash: hide the end of a block at a random offset
    partial_blocks: bool = True  # False: learn only from anchors with B - 1 tokens behind them
    tap_noise: float = 0.0  # relative, on tapped states


class CompactHead:
    """The head rows of ids that may be said; the gap of forbidden ids is left out."""

    def __init__(self, draft: Draft):
        shared = draft.shared
        if draft.draft_ids is None:
            every = torch.arange(len(shared.head), device=shared.head.device)
            first, last = shared.forbidden
            self.ids = every[(every < first) | (every >= last)]
        else:
            self.ids = draft.draft_ids.to(shared.head.device)
        self.weight = shared.rows[0] if draft.cfg.own_head else shared.head[self.ids]
        self._index = torch.full((len(shared.head),), -1, device=self.ids.device)
        self._index[self.ids] = torch.arange(len(self.ids), device=self.ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (..., V_c) of normed states (..., H)."""
        return functional.linear(hidden.to(self.weight.dtype), self.weight)

    def index(self, ids: Tensor) -> Tensor:
        """Return the columns (...) int64 of target ids, -1 for an id that is not there."""
        return torch.where(ids >= 0, self._index[ids.clamp(min=0)], -1)


def block_hidden(draft: Draft, batch: DraftBatch, options: LossOptions | None = None,
                 steps: int | None = None, kept: Tensor | None = None) -> Tensor:
    """
    Return normed states (Bt, A, steps, H) that decide offsets 1 .. steps of every anchor.

    steps: B - 1 unless a shorter chain is asked for; kept: (Bt, A) int64 of DFlash, the last
    offset of each block that exists (random mask counts). options: noise while training.
    """
    options = options or LossOptions()
    steps = draft.cfg.block - 1 if steps is None else steps
    taps = batch.taps
    if options.tap_noise > 0.0:
        taps = tuple(part * (1.0 + options.tap_noise * torch.randn_like(part)) for part in taps)
    features = torch.cat([draft.fuse(part) for part in taps], dim=1)
    if isinstance(draft, Dflash):
        if draft.cfg.window:
            return _dflash_windows(draft, batch, features, kept)[:, :, :steps]
        return _dflash_packed(draft, batch, features)[:, :, :steps]
    if isinstance(draft, Eagle3):
        chain = _eagle_windows if draft.cfg.window else _eagle_packed
        features = features.float()  # the residual stream of the chain, also in mixed precision
        normed: Tensor = draft.norm(chain(draft, batch, features, steps))
        return normed
    raise ConfigurationError(f'draft {draft.cfg.name}: no loss for kind {draft.cfg.kind!r}')


def _unfolded(rows: Tensor, dim: int, size: int) -> Tensor:
    """Return windows of `size` along `dim` (-2), (Bt * windows, ..., size, d)."""
    windows = rows.unfold(dim, size, 1)  # (Bt, [heads,] A, d, size)
    order = [0, dim, *range(1, dim), windows.dim() - 1, windows.dim() - 2]
    return windows.permute(order).flatten(0, 1)


def _dflash_windows(draft: Dflash, batch: DraftBatch, features: Tensor,
                    kept: Tensor | None) -> Tensor:
    cfg, used = draft.cfg, features.shape[1]
    count, anchors = batch.anchors.shape
    kv: list[KeysValues] = [
        (_unfolded(keys, 2, cfg.window), _unfolded(values, 2, cfg.window))
        for keys, values in draft.context_kv(features, batch.cos[:, :used], batch.sin[:, :used])]
    cos, sin = (_unfolded(table[:, batch.context:], 1, cfg.block)
                for table in (batch.cos, batch.sin))
    mask = None
    if kept is not None:
        offset = torch.arange(cfg.block, device=kept.device)
        seen = functional.pad(offset <= kept.reshape(-1, 1), (cfg.window, 0), value=True)
        mask = seen[:, None, None].expand(-1, -1, cfg.block, -1)
    hidden = draft.block(batch.anchors.reshape(-1, 1), cos, sin, kv, mask)
    return hidden.view(count, anchors, cfg.block, -1)[:, :, 1:]


def _dflash_packed(draft: Dflash, batch: DraftBatch, features: Tensor) -> Tensor:
    cfg, used = draft.cfg, features.shape[1]
    count, anchors = batch.anchors.shape
    kv = draft.context_kv(features, batch.cos[:, :used], batch.sin[:, :used])
    cos, sin = (_unfolded(table[:, batch.context:], 1, cfg.block).reshape(
        count, anchors * cfg.block, -1) for table in (batch.cos, batch.sin))
    mask = block_visible(_anchor_columns(batch), _context_columns(batch), cfg.block, 0)
    hidden = draft.block(batch.anchors, cos, sin, kv, mask)
    return hidden.view(count, anchors, cfg.block, -1)[:, :, 1:]


def _anchor_columns(batch: DraftBatch) -> Tensor:
    """Return the column of every anchor, (Bt, A) int64."""
    count, anchors = batch.anchors.shape
    columns = torch.arange(anchors, device=batch.anchors.device) + batch.context
    return columns.expand(count, -1)


def _context_columns(batch: DraftBatch) -> Tensor:
    """Return the number of each column, -1 where a draft must not look, (Bt, M) int64."""
    column = torch.arange(batch.visible.shape[1], device=batch.visible.device)
    return torch.where(batch.visible, column, -1)


def _step_inputs(draft: Eagle3, batch: DraftBatch, steps: int) -> Tensor:
    """Return the embeddings (Bt, A, steps, H) that the chain reads: anchor, then the text."""
    said = torch.cat((batch.anchors[..., None], batch.labels[..., :steps - 1].clamp(min=0)), -1)
    return draft.embed(said)


def _eagle_windows(draft: Eagle3, batch: DraftBatch, features: Tensor, steps: int) -> Tensor:
    """Return chain outputs (Bt, A, steps, H) before the final norm."""
    cfg, used = draft.cfg, features.shape[1]
    count, anchors = batch.anchors.shape
    keys, values = draft.slot_kv(draft.embed(batch.tokens[:, 1:]), features,
                                 batch.cos[:, :used], batch.sin[:, :used])
    # the last slot of each window is step 0 and computes its own keys
    keys, values = (_unfolded(x, 2, cfg.window)[:, :, :-1] for x in (keys, values))
    embedded = _step_inputs(draft, batch, steps).flatten(0, 1)
    first = batch.context - 1
    feature = features[:, first:].reshape(count * anchors, 1, -1)
    outputs = []
    for step in range(steps):
        cos, sin = (table[:, first + step:first + step + anchors].reshape(
            count * anchors, 1, -1) for table in (batch.cos, batch.sin))
        feature, own = draft.cell(embedded[:, step:step + 1], feature, cos, sin, (keys, values))
        keys, values = torch.cat((keys, own[0]), dim=2), torch.cat((values, own[1]), dim=2)
        outputs.append(feature)
    return torch.cat(outputs, dim=1).view(count, anchors, steps, -1)


def _eagle_packed(draft: Eagle3, batch: DraftBatch, features: Tensor, steps: int) -> Tensor:
    """Return chain outputs (Bt, A, steps, H) before the final norm."""
    used = features.shape[1]
    anchors = batch.anchors.shape[1]
    keys, values = draft.slot_kv(draft.embed(batch.tokens[:, 1:]), features,
                                 batch.cos[:, :used], batch.sin[:, :used])
    embedded = _step_inputs(draft, batch, steps)
    places, slots = _anchor_columns(batch), _context_columns(batch)
    first = batch.context - 1
    feature = features[:, first:]
    outputs = []
    for step in range(steps):
        cos, sin = (table[:, first + step:first + step + anchors]
                    for table in (batch.cos, batch.sin))
        mask = chain_visible(places, slots, step, 0)
        feature, own = draft.cell(embedded[:, :, step], feature, cos, sin, (keys, values), mask)
        keys, values = torch.cat((keys, own[0]), dim=2), torch.cat((values, own[1]), dim=2)
        outputs.append(feature)
    return torch.stack(outputs, dim=2)


def length_weight(log_p: Tensor, valid: Tensor, exponent: float) -> Tensor:
    """
    Return how much each position adds to the expected accepted length, to a power.

    log_p: (..., n) log probability of the label, 0 where there is none; valid: (..., n) bool.
    E[matches] = sum_n prod_{k <= n} p_k, so d E / d log p_i = sum_{n >= i} prod_{k <= n} p_k:
    prefix confidence times continuation. At exponent 1 the weighted cross entropy has the
    gradient of -E; smaller exponents give the later positions more to learn from.
    """
    reached = log_p.cumsum(-1).exp() * valid
    weight: Tensor = reached.flip(-1).cumsum(-1).flip(-1)
    return weight.clamp(min=1e-4) ** exponent


class DraftObjective(nn.Module):
    """Loss of a bound draft on a batch; the draft is the only trained part."""

    offset_weight: Tensor

    def __init__(self, draft: Draft, text: TextDecoder, options: LossOptions):
        super().__init__()
        self.draft, self.options = draft, options
        self.head = CompactHead(draft)
        self._target_norm = (text.norm,)  # in a tuple: not a module of ours
        if options.random_masks and (draft.cfg.kind != 'dflash' or not draft.cfg.window):
            raise ConfigurationError('random_masks: only for dflash drafts with a window; '
                                     'set it to false')
        self.register_buffer('offset_weight', self._offset_weight(), persistent=False)

    @property
    def steps(self) -> int:
        """Return how many proposals a training step looks at."""
        whole = self.draft.cfg.block - 1
        short = self.options.unroll if self.draft.cfg.kind == 'eagle3' else 0
        return min(short or whole, whole)

    def _offset_weight(self) -> Tensor:
        options, cfg = self.options, self.draft.cfg
        offset = torch.arange(self.steps, dtype=torch.float32)
        if cfg.kind == 'eagle3':
            weight = options.decay ** offset
        else:
            weight = torch.exp(-offset / (options.gamma or 1.0 + 3.0 * cfg.block / 8.0))
        weight[0] *= options.first_weight
        return weight.to(self.draft.shared.head.device)

    def forward(self, batch: DraftBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and, for the log, the share of right first and second proposals."""
        steps, kept = self.steps, None
        labels = batch.labels[..., :steps]
        if self.options.random_masks and self.training:
            kept = torch.randint(1, self.draft.cfg.block, batch.anchors.shape,
                                 device=labels.device)
            offset = torch.arange(1, steps + 1, device=labels.device)
            labels = torch.where(offset <= kept[..., None], labels, -1)
        noisy = self.options if self.training else None
        hidden = block_hidden(self.draft, batch, noisy, steps, kept)
        log_q = self.head.logits(hidden).float().log_softmax(-1)
        if not self.options.partial_blocks:
            labels = torch.where(batch.labels[..., -1:] >= 0, labels, -1)
        wanted = self.head.index(labels)
        valid = wanted >= 0
        log_p = log_q.gather(-1, wanted.clamp(min=0)[..., None])[..., 0] * valid
        weight = self.offset_weight * valid
        if self.options.confidence > 0.0:
            weight = weight * length_weight(log_p.detach(), valid, self.options.confidence)
        cost = -log_p
        if self.options.soft_weight > 0.0:
            soft = self._soft(batch, log_q, steps)
            cost = cost + self.options.soft_weight * (soft - cost)
        loss = (weight * cost).sum() / weight.sum().clamp(min=1e-6)
        right = (log_q.argmax(-1) == wanted) & valid
        shares = {f'right_{i + 1}': right[..., i].sum() / valid[..., i].sum().clamp(min=1)
                  for i in range(min(2, steps))}
        return loss, {'loss': loss.detach(), **shares}

    def _soft(self, batch: DraftBatch, log_q: Tensor, steps: int) -> Tensor:
        """Return the cross entropy (Bt, A, steps) against the target over the head's ids."""
        if batch.teacher is None:
            raise ConfigurationError('soft_weight needs states of the target: gather the batch '
                                     'with teacher=True')
        with torch.no_grad():
            norm = self._target_norm[0]
            state = norm(batch.teacher.to(norm.weight.dtype))
            target = self.head.logits(state).float().softmax(-1)
            target = functional.pad(target[:, 1:], (0, 0, 0, steps))
            target = target.unfold(1, steps, 1)[:, :log_q.shape[1]].transpose(-1, -2)
        return -(target * log_q).sum(-1)
