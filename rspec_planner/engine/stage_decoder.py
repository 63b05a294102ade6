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
from torch import Tensor
from torch.nn import functional

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


def forbidden_ids(tokens: TokenIds, vocabulary: int) -> Tensor:
    """Return (V,) bool, True for ids that never appear in a CoC: a constant of the graph."""
    ids = torch.arange(vocabulary)
    return (ids >= tokens.forbidden_start) & (ids < tokens.forbidden_end)


def choose(hidden: Tensor, weight: Tensor, forbidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return best (S,) int64 and logits (S, V) fp32, forbidden ids at -inf, of hidden (S, H)."""
    logits = functional.linear(hidden, weight).float()
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
        self._forbidden = forbidden_ids(target.cfg.tokens, target.cfg.text.vocab_size)

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
        best, logits = choose(norm(self.text.norm, x)[0], self.text.lm_head.weight,
                              self._forbidden)
        committed, matched = accept(ids, best, inputs['limit'], tokens.stop_ids)
        return {'best': best, 'logits': logits, 'committed': committed, 'matched': matched,
                'anchor': best.index_select(0, committed - 1), **updated}


class PrefillStage(Stage):
    """
    Prompt and guess into cache rows 0 .. S - 1, see `torch_executor.prefill_executor`.

    inputs: 'ids' (S,), 'length' (1,), 'guess_length' (1,) int64; 'cos', 'sin' (S, d / 2) fp32
    of these rows; 'features' (N, T, H), 'deepstack' (D, N, T, H); caches and taps.
    outputs: 'best' (G + 1,) int64 and 'logits' (G + 1, V) fp32. Rows behind `length` are padding
    that nobody sees; what they leave in the caches is stale and gets overwritten.
    """

    name = 'prefill'

    def __init__(self, target: Target, shapes: StageShapes) -> None:
        super().__init__()
        self.text, self.cfg, self.shapes = target.text, target.cfg, shapes
        self._forbidden = forbidden_ids(target.cfg.tokens, target.cfg.text.vocab_size)
        #: rows that the last layer computes, the last ones of prompt and guess
        self.last_rows = min(shapes.tail + shapes.guess, shapes.prompt) if shapes.tail \
            else shapes.prompt

    def examples(self) -> dict[str, Tensor]:
        """Return the inputs, see `Stage.examples`."""
        cfg, shapes = self.cfg, self.shapes
        dtype = self.text.lm_head.weight.dtype
        images = len(cfg.cameras.names) * cfg.cameras.frames
        size = (images, cfg.tokens_per_image, cfg.text.hidden_size)
        return {'ids': blank(shapes.prompt), 'length': blank(1), 'guess_length': blank(1),
                **table_examples(shapes.prompt, cfg.text.head_dim),
                'features': blank(*size, dtype=dtype),
                'deepstack': blank(len(cfg.vision.deepstack_layers), *size, dtype=dtype),
                **cache_examples(cfg, shapes, dtype)}

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, see the class."""
        length, rows = inputs['length'], torch.arange(self.shapes.prompt)
        zero, last = torch.zeros_like(length), self.cfg.text.num_layers - 1
        visual = _Visual(inputs, rows, self.cfg.tokens.image_pad)
        x = visual.place(self.text.embed(inputs['ids']))[None]
        tables = Tables(inputs['cos'][None], inputs['sin'][None])
        mask = _causal(rows, rows, length, x.dtype)
        first, picked = zero, rows  # the rows that x holds
        updated: dict[str, Tensor] = {}
        for index, module in enumerate(self.text.layers):
            layer = cast('DecoderLayer', module)
            normed = norm(layer.input_layernorm, x)
            q, k, v = project(layer.self_attn, normed, tables)
            updated[f'k{index}{IN_PLACE}'] = kv_update(inputs[f'k{index}'], k, zero)
            updated[f'v{index}{IN_PLACE}'] = kv_update(inputs[f'v{index}'], v, zero)
            if index == last and self.last_rows < self.shapes.prompt:
                first = (length - self.last_rows).clamp(min=0)
                picked = first + torch.arange(self.last_rows)
                x, q = x.index_select(1, picked), q.index_select(2, picked)
                mask = _causal(picked, rows, length, x.dtype)
            x = finish(layer, x, attention(q, k, v, mask))
            if index < len(self.cfg.vision.deepstack_layers) and picked is rows:
                x = visual.add(x, index)
            if index in self.shapes.taps:
                tap = f'tap{self.shapes.taps.index(index)}'
                updated[tap + IN_PLACE] = kv_update(inputs[tap], x[None], first)
        end = length - inputs['guess_length'] - 1 - first
        wanted = (end + torch.arange(self.shapes.guess + 1)).clamp(max=self.last_rows - 1)
        hidden = norm(self.text.norm, x[0].index_select(0, wanted))
        best, logits = choose(hidden, self.text.lm_head.weight, self._forbidden)
        return {'best': best, 'logits': logits, **updated}


def _causal(queries: Tensor, keys: Tensor, length: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask of rows (S,) over rows (K,) that see themselves, the past, no padding."""
    return additive(keys <= torch.minimum(queries, length - 1)[:, None], dtype)


class _Visual:
    """Which prompt rows hold images, and which feature belongs to each."""

    def __init__(self, inputs: Mapping[str, Tensor], rows: Tensor, image_pad: int) -> None:
        prompt = inputs['length'] - inputs['guess_length']
        mask = (inputs['ids'] == image_pad) & (rows < prompt)
        count = inputs['features'].shape[0] * inputs['features'].shape[1]
        self._slot = (mask.to(torch.int64).cumsum(0) - 1).clamp(min=0, max=count - 1)
        self._mask = mask[:, None]
        self._features = inputs['features'].flatten(0, 1)
        self._deepstack = inputs['deepstack'].flatten(1, 2)

    def place(self, embedded: Tensor) -> Tensor:
        """Return (S, H) with the features in the visual rows."""
        return torch.where(self._mask, self._features.index_select(0, self._slot), embedded)

    def add(self, x: Tensor, index: int) -> Tensor:
        """Return x (1, S, H) with DeepStack features `index` added to the visual rows."""
        wide = self._deepstack[index].index_select(0, self._slot)
        return x + torch.where(self._mask, wide, torch.zeros((), dtype=wide.dtype))[None]
