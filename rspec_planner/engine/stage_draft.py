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
The draft stage as a graph: one static step that proposes B - 1 tokens.

The step keeps nothing between calls. It reads the tapped states of the last `window` rows
before the anchor out of the buffers that verify and prefill fill, and projects them anew: with
a window of 8 that is less than a block usually commits, and no cache has to be rolled back. A
draft without a window reads all C rows on every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn, Tensor

from rspec_planner.engine.stage_decoder import forbidden_ids, table_examples
from rspec_planner.engine.stage_layers import (
    additive,
    blank,
    finish,
    keys_values,
    norm,
    project,
    Stage,
    Tables,
)
from rspec_planner.engine.stage_ops import attention
from rspec_planner.engine.stages import StageShapes
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import Draft
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.layer import DecoderLayer
from rspec_planner.model.target import Target


def draft_stage(draft: Draft, target: Target, shapes: StageShapes) -> DraftStage:
    """Return the stage of either kind of draft."""
    kind = ChainStage if isinstance(draft, Eagle3) else BlockStage
    return kind(draft, target, shapes)


class DraftStage(Stage):
    """
    What follows the anchor at row p = start, see `draft_executor.draft_executor`.

    inputs: 'tokens' (C,) int64, the committed text; 'start' (1,) int64; 'cos', 'sin' (C, d / 2)
    fp32 by row index, so that flat and mirror drafts are one graph; tap<j> (1, 1, C, H).
    outputs: 'proposals' (B - 1,) int64, 'logits' (B - 1, V_d) fp32, forbidden ids at -inf.
    """

    name = 'draft'

    def __init__(self, draft: Draft, target: Target, shapes: StageShapes) -> None:
        super().__init__()
        self.draft, self.shapes, self.cfg = draft, shapes, draft.cfg
        self.text = nn.Module()
        self.text.embed_tokens, self.text.lm_head = target.text.embed_tokens, target.text.lm_head
        self.ids = None if draft.draft_ids is None else draft.draft_ids.clone()
        self._forbidden = forbidden_ids(target.cfg.tokens, draft.cfg.target_vocab)
        self.context = draft.cfg.window or shapes.capacity

    def examples(self) -> dict[str, Tensor]:
        """Return the inputs, see `Stage.examples`."""
        cfg, rows, dtype = self.cfg, self.shapes.capacity, self.draft.fc.weight.dtype
        taps = {f'tap{j}': blank(1, 1, rows, cfg.hidden_size, dtype=dtype)
                for j in range(len(cfg.taps))}
        return {'tokens': blank(rows), 'start': blank(1), **table_examples(rows, cfg.head_dim),
                **taps}

    def embed(self, ids: Tensor) -> Tensor:
        """Return (..., H) of target ids."""
        out: Tensor = cast('nn.Embedding', self.text.embed_tokens)(ids)
        return out

    def context_rows(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows (S,) int64 that the step reads, and which of them exist (S,) bool."""
        if self.cfg.window:
            rows = start - self.context + torch.arange(self.context)
            return rows.clamp(min=0), rows >= 0
        rows = torch.arange(self.context)
        return rows, rows < start

    def features(self, inputs: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Return the fused states (1, S, H) of rows (S,) before any norm."""
        taps = [inputs[f'tap{j}'][0].index_select(1, rows) for j in range(len(self.cfg.taps))]
        out: Tensor = self.draft.fc(torch.cat(taps, dim=-1))
        return out

    def logits(self, x: Tensor) -> Tensor:
        """Return (S, V_d) fp32 of states (1, S, H) before the final norm."""
        weight: Tensor = cast('nn.Linear', self.text.lm_head).weight
        if self.draft.own_head is not None:
            weight = self.draft.own_head
        elif self.ids is not None:
            weight = weight.index_select(0, self.ids)
        out = nn.functional.linear(norm(self.draft.norm, x[0]), weight).float()
        return out if self.ids is not None else torch.where(self._forbidden, float('-inf'), out)

    def target_ids(self, chosen: Tensor) -> Tensor:
        """Return the target ids of head rows (S,)."""
        return chosen if self.ids is None else self.ids.index_select(0, chosen)


class BlockStage(DraftStage):
    """DFlash: the whole block in one pass."""

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, see `DraftStage`."""
        draft, block = cast('Dflash', self.draft), self.cfg.block
        start = inputs['start']
        rows, exist = self.context_rows(start)
        features = norm(draft.context_norm, self.features(inputs, rows))
        context, own = (Tables.rows(inputs, index)
                        for index in (rows, start + torch.arange(block)))
        seen = torch.cat((exist, torch.ones(block, dtype=torch.bool)))
        mask = additive(seen.expand(block, -1), features.dtype)
        anchor = inputs['tokens'].index_select(0, start)
        masks = draft.mask_embedding.expand(block - 1, -1)
        x = torch.cat((self.embed(anchor), masks))[None]
        for module in draft.layers:
            layer = cast('DecoderLayer', module)
            far = keys_values(layer.self_attn, features, context)
            q, *near = project(layer.self_attn, norm(layer.input_layernorm, x), own)
            k, v = (torch.cat(pair, dim=2) for pair in zip(far, near))
            x = finish(layer, x, attention(q, k, v, mask))
        logits = self.logits(x[:, 1:])
        if draft.correction is None:
            return {'proposals': self.target_ids(logits.argmax(-1)), 'logits': logits}
        return self._corrected(logits, anchor)

    def _corrected(self, logits: Tensor, anchor: Tensor) -> dict[str, Tensor]:
        """Return the outputs after the walk from left to right, see `dflash.Correction`."""
        correction = cast('Dflash', self.draft).correction
        assert correction is not None
        before, rows, chosen = self._head_row(anchor), [], []
        for index in range(len(logits)):
            row = logits[index:index + 1]
            state = correction.before.index_select(0, before)
            rows.append(row + nn.functional.linear(state, correction.after).float())
            before = rows[-1].argmax(-1)
            chosen.append(before)
        return {'proposals': self.target_ids(torch.cat(chosen)), 'logits': torch.cat(rows)}

    def _head_row(self, ids: Tensor) -> Tensor:
        """Return the head row (1,) of a target id (1,), or the row behind them if none."""
        if self.ids is None:
            return ids
        found = self.ids == ids
        index = torch.arange(len(self.ids))
        row = torch.where(found, index, 0).sum(0, keepdim=True)
        return torch.where(found.any(0, keepdim=True), row, len(self.ids))


class ChainStage(DraftStage):
    """EAGLE-3: B - 1 steps unrolled, each fed with the one before."""

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, see `DraftStage`; slot t is token t + 1 and feature t."""
        draft, tokens, start = cast('Eagle3', self.draft), inputs['tokens'], inputs['start']
        cell = cast('DecoderLayer', draft)  # the same two halves behind the projections
        rows, exist = self.context_rows(start)
        slots = self._slots(self.embed(tokens.index_select(0, (rows + 1).clamp(
            max=self.shapes.capacity - 1)))[None], self.features(inputs, rows))
        k, v = keys_values(draft.self_attn, slots, Tables.rows(inputs, rows))
        x = self.features(inputs, start - 1)
        ids, logits, chosen = tokens.index_select(0, start), [], []
        for step in range(self.cfg.block - 1):
            slot = self._slots(self.embed(ids)[None], x)
            q, own_k, own_v = project(draft.self_attn, slot,
                                      Tables.rows(inputs, start - 1 + step))
            if step:  # slot p - 1 is the last one of the context
                k, v = torch.cat((k, own_k), dim=2), torch.cat((v, own_v), dim=2)
                exist = torch.cat((exist, torch.ones(1, dtype=torch.bool)))
            x = finish(cell, x, attention(q, k, v, additive(exist[None], x.dtype)))
            logits.append(self.logits(x))
            ids = self.target_ids(logits[-1].argmax(-1))
            chosen.append(ids)
        return {'proposals': torch.cat(chosen), 'logits': torch.cat(logits)}

    def _slots(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """Return the input of the projections (1, S, 2 H)."""
        draft = cast('Eagle3', self.draft)
        return torch.cat((norm(draft.embed_norm, embedded), norm(draft.feature_norm, feature)),
                         dim=-1)
