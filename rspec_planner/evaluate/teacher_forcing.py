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
What a draft proposes at every anchor of one text, in one pass, under any mask or rotary.

Greedy speculative decoding reproduces the target's text whatever is proposed, so the proposals at
all anchors of that text give the accepted length of any run exactly. Here this serves questions
that the deployed loop does not ask: other rotary tables, hidden columns, shorter windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from rspec_planner.decode.accept import accept, apply_follow
from rspec_planner.model.dflash import attend_openly, block_visible, Dflash
from rspec_planner.model.draft import Draft, DraftRotary
from rspec_planner.model.eagle3 import chain_visible, Eagle3


@dataclass(frozen=True)
class Spoken:
    """One frame with the target's own text: all that a draft may read."""

    ids: Tensor  # (S,) int64, prompt and generated tokens
    length: int  # prompt rows; ids[length] is the first generated token
    taps: Tensor  # (n_f, S, H) tapped states of every row
    positions: Tensor  # (3, P) int64, the prompt's in its first `length` columns
    rope_delta: int

    @property
    def text(self) -> list[int]:
        """Return the generated ids."""
        generated: list[int] = self.ids[self.length:].tolist()
        return generated


@dataclass(frozen=True)
class Reading:
    """How a draft reads: as it was trained, or changed at test time."""

    rotary: str  # 'flat' or 'mirror'
    window: int  # context rows before the anchor, 0 = all
    columns: Tensor | None = None  # (S,) bool, context rows that exist at all; None: every row


@dataclass(frozen=True)
class Answer:
    """What a draft says behind A anchors."""

    proposals: Tensor  # (A, B - 1) int64 target ids
    logits: Tensor  # (A, B - 1, V_d) fp32
    context: Tensor  # (C,) int64 rows of the context columns
    weights: Tensor  # (layers, heads, A * Q, C + A * Q) fp32 attention; see `attention`


def as_trained(draft: Draft) -> Reading:
    """Return how a draft was trained to read."""
    return Reading(draft.cfg.rotary, draft.cfg.window)


@torch.inference_mode()
def ask(draft: Draft, spoken: Spoken, anchors: Sequence[int],
        reading: Reading | None = None) -> Answer:
    """
    Return what a draft proposes behind the anchors, rows of the text that see rows before them.

    With one anchor, the weights tell what each of its Q rows attends to: context columns first,
    then the rows of the block (DFlash, Q = B) or of the chain (EAGLE-3, Q = B - 1).
    """
    asked = _Asked(draft, spoken, reading or as_trained(draft), anchors)
    logits, weights = _block(draft, asked) if isinstance(draft, Dflash) else \
        _chain(cast('Eagle3', draft), asked)
    return Answer(draft.target_ids(logits.argmax(-1)), logits, asked.context, weights)


class _Asked:
    """Context rows, tables and tokens of one question."""

    def __init__(self, draft: Draft, spoken: Spoken, reading: Reading,
                 anchors: Sequence[int]) -> None:
        cfg, device = draft.cfg, spoken.ids.device
        self.anchors, self.window = torch.tensor(anchors, device=device), reading.window
        last = max(anchors)
        first = max(min(anchors) - reading.window, 0) if reading.window else 0
        self.context = torch.arange(first, last, device=device)
        if reading.columns is not None:
            self.context = self.context[reading.columns[first:last]]
        rows = last + cfg.block
        index = torch.arange(rows, device=device)
        positions = DraftRotary.sequence_positions(
            spoken.positions[:, :spoken.length], spoken.length, spoken.rope_delta,
            max(rows, spoken.length))[:, :rows]
        self.cos, self.sin = DraftRotary.tables(replace(cfg, rotary=reading.rotary), index,
                                                positions)
        self.ids = spoken.ids
        self.taps = spoken.taps[:, None]

    def tables(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (n, d) of rows (n,)."""
        return self.cos[rows], self.sin[rows]


def _block(draft: Dflash, asked: _Asked) -> tuple[Tensor, Tensor]:
    """Return logits (A, B - 1, V_d) and attention of packed blocks."""
    anchors, block = asked.anchors, draft.cfg.block
    features = draft.fuse(asked.taps[:, :, asked.context])
    kv = draft.context_kv(features, *asked.tables(asked.context))
    places = (anchors[:, None] + torch.arange(block, device=anchors.device)).flatten()
    mask = block_visible(anchors[None], asked.context, block, asked.window)
    weights, hidden = draft.attention(asked.ids[anchors][None], *asked.tables(places), kv, mask)
    rows = hidden.view(len(anchors), block, -1)[:, 1:]
    if draft.correction is None:
        return draft.logits(rows), weights[:, 0]
    before, logits = asked.ids[anchors], []
    for row in rows.unbind(1):  # left to right, each offset given the choice before it
        logits.append(draft.logits(row, before))
        before = draft.target_ids(logits[-1].argmax(-1))
    return torch.stack(logits, dim=1), weights[:, 0]


def _chain(draft: Eagle3, asked: _Asked) -> tuple[Tensor, Tensor]:
    """Return logits (A, B - 1, V_d) and attention of parallel chains."""
    anchors, steps = asked.anchors, draft.cfg.block - 1
    slots = asked.context[asked.context < anchors.max() - 1]
    count, group = len(anchors), draft.cfg.num_heads // draft.cfg.num_kv_heads
    past = draft.slot_kv(draft.embed(asked.ids[slots + 1])[None],
                         draft.fuse(asked.taps[:, :, slots]), *asked.tables(slots))
    tokens, feature = asked.ids[anchors], draft.fuse(asked.taps[:, :, anchors - 1])
    logits: list[Tensor] = []
    shape = (draft.cfg.num_heads, steps, count, len(asked.context) + steps * count)
    weights = torch.zeros(shape, device=tokens.device)
    for step in range(steps):
        cos, sin = asked.tables(anchors - 1 + step)
        mask = chain_visible(anchors[None], slots, step, asked.window).repeat(1, 1, group, 1)
        slot = torch.cat((draft.embed_norm(draft.embed(tokens)[None]),
                          draft.feature_norm(feature)), dim=-1)
        q, k, v = draft.self_attn.project(slot, cos, sin)
        past = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        mixed, seen = attend_openly(q, *past, mask)
        own = seen.shape[-1] - len(slots)
        weights[:, step, :, :len(slots)] = seen[0, :, :, :len(slots)]
        weights[:, step, :, len(asked.context):len(asked.context) + own] = \
            seen[0, :, :, len(slots):]
        x = feature + draft.self_attn.o_proj(mixed)
        feature = x + draft.mlp(draft.post_attention_layernorm(x))
        logits.append(draft.logits(feature)[0])
        tokens = draft.target_ids(logits[-1].argmax(-1))
    return torch.stack(logits, dim=1), weights.flatten(1, 2)[None]


def walk(text: Sequence[int], proposals: Tensor, stop_ids: Sequence[int],
         follow: Mapping[int, int]) -> list[int]:
    """
    Return the tokens that each iteration commits.

    text: n generated ids; proposals: (n - 1, B - 1) behind anchors 0 .. n - 2 of the text;
    follow: the proposal rule of the loop.
    """
    committed, at = [], 0
    while at < len(text) - 1:
        block = apply_follow([text[at], *proposals[at].tolist()], follow)
        best = [*text[at + 1:], *[-1] * len(block)][:len(block)]
        taken = accept(block, best, stop_ids, len(text) - 1 - at)
        committed.append(len(taken.committed))
        at += len(taken.committed)
    return committed
