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
"""The stages that run the target's text decoder, as graphs: verify and prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn, Tensor

from rspec_planner.engine.stage_layers import (
    additive,
    blank,
    finish,
    IN_PLACE,
    norm,
    project,
    Stage,
    Tables,
)
from rspec_planner.engine.stage_ops import attention, kv_update
from rspec_planner.engine.stages import StageShapes
from rspec_planner.model.config import ProfileConfig, TokenIds
from rspec_planner.model.layer import DecoderLayer
from rspec_planner.model.target import Target


def cache_examples(cfg: ProfileConfig, shapes: StageShapes, dtype: torch.dtype,
                   taps: bool = True) -> dict[str, Tensor]:
    """
    Return the states that the stages share.

    k<i>, v<i> (1, kv_heads, C, d) of layer i; tap<j> (1, 1, C, H) of the j-th tapped layer.
    """
    text, rows = cfg.text, shapes.capacity
    held = {f'{kind}{i}': blank(1, text.num_kv_heads, rows, text.head_dim, dtype=dtype)
            for i in range(text.num_layers) for kind in 'kv'}
    tapped = {f'tap{j}': blank(1, 1, rows, text.hidden_size, dtype=dtype)
              for j in range(len(shapes.taps) if taps else 0)}
    return {**held, **tapped}


def table_examples(rows: int, head_dim: int) -> dict[str, Tensor]:
    """Return cos and sin (rows, d / 2) fp32."""
    return {name: blank(rows, head_dim // 2, dtype=torch.float32) for name in ('cos', 'sin')}


def choose(hidden: Tensor, head: nn.Linear, tokens: TokenIds) -> tuple[Tensor, Tensor]:
    """Return best (S,) int64 and logits (S, V) fp32, forbidden ids at -inf, of hidden (S, H)."""
    logits = head(hidden).float()
    ids = torch.arange(logits.shape[-1])
    forbidden = (ids >= tokens.forbidden_start) & (ids < tokens.forbidden_end)
    logits = torch.where(forbidden, float('-inf'), logits)
    return logits.argmax(-1), logits


def accept(ids: Tensor, best: Tensor, limit: Tensor,
           stop_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """
    Return how many of best (B,) are committed and how many of them were proposals, (1,) each.

    The rule of `decode.accept` on the device: rows are committed up to the first one that
    contradicts the next proposal, is a stop token, or reaches the limit (1,).
    """
    last = torch.zeros(1, dtype=torch.bool)
    passed = torch.cat((ids[1:] == best[:-1], last))
    stops = torch.zeros_like(passed)
    for stop in stop_ids:
        stops = stops | (best == stop)
    ends = (~passed | stops).to(torch.int64)
    earlier = ends.cumsum(0) - ends
    kept = (earlier == 0) & (torch.arange(len(best)) < limit)
    return tuple(rows.to(torch.int64).sum(0, keepdim=True)  # type: ignore[return-value]
                 for rows in (kept, kept & passed))


class VerifyStage(Stage):
    """
    `block` tokens at cache rows start .. start + B - 1, see `torch_executor.verify_executor`.

    inputs: 'ids' (B,), 'start' (1,), 'rope_delta' (1,), 'limit' (1,) the most tokens that may
    be committed, all int64; 'cos', 'sin' (C, d / 2) fp32 of flat positions; caches and taps.
    outputs: 'best' (B,) int64, 'logits' (B, V) fp32; of the greedy choice 'committed' (1,) and
    'matched' (1,), see `accept`, and 'anchor' (1,), the last committed token, all int64.
    """

    name = 'verify'

    def __init__(self, target: Target, shapes: StageShapes) -> None:
        super().__init__()
        self.text, self.cfg, self.shapes = target.text, target.cfg, shapes

    def examples(self) -> dict[str, Tensor]:
        """Return the inputs, see `Stage.examples`."""
        text, shapes = self.cfg.text, self.shapes
        return {'ids': blank(shapes.block), 'start': blank(1), 'rope_delta': blank(1),
                'limit': blank(1), **table_examples(shapes.capacity, text.head_dim),
                **cache_examples(self.cfg, shapes, self.text.lm_head.weight.dtype)}

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, see the class."""
        ids, start, tokens = inputs['ids'], inputs['start'], self.cfg.tokens
        rows = start + torch.arange(self.shapes.block)
        tables = Tables.rows(inputs, rows + inputs['rope_delta'])
        x = self.text.embed(ids)[None]
        mask = additive(torch.arange(self.shapes.capacity) <= rows[:, None], x.dtype)
        updated: dict[str, Tensor] = {}
        for index, module in enumerate(self.text.layers):
            layer = cast('DecoderLayer', module)
            q, k, v = project(layer.self_attn, norm(layer.input_layernorm, x), tables)
            k = updated[f'k{index}{IN_PLACE}'] = kv_update(inputs[f'k{index}'], k, start)
            v = updated[f'v{index}{IN_PLACE}'] = kv_update(inputs[f'v{index}'], v, start)
            x = finish(layer, x, attention(q, k, v, mask))
            if index in self.shapes.taps:
                tap = f'tap{self.shapes.taps.index(index)}'
                updated[tap + IN_PLACE] = kv_update(inputs[tap], x[None], start)
        best, logits = choose(norm(self.text.norm, x)[0], self.text.lm_head, tokens)
        committed, matched = accept(ids, best, inputs['limit'], tokens.stop_ids)
        return {'best': best, 'logits': logits, 'committed': committed, 'matched': matched,
                'anchor': best.index_select(0, committed - 1), **updated}
