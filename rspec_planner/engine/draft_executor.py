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
The stage that proposes the next tokens: one executor for both kinds of draft.

A draft reads the committed tokens and the tapped target states of rows before the anchor, and
keeps what it made of them (keys and values, one row per position) in fixed buffers. A call
lays out the rows that are new, as far back as the draft's window reaches, and then runs the
block or the chain, whose own rows lie behind and are overwritten by the next call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from rspec_planner.engine.torch_executor import TorchExecutor
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import Draft, DraftConfig, DraftRotary
from rspec_planner.model.draft_packed import (
    folded,
    PackedAttention,
    PackedHead,
    PackedMlp,
    TokenTable,
    turn_pairs,
    turns,
    UnitNorm,
)
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.layer import DecoderLayer
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache


def draft_executor(draft: Draft, target: Target, tokens: Tensor, taps: TapBuffer,
                   positions: Tensor, cache: KVCache | None = None) -> TorchExecutor:
    """
    Return the stage that proposes what follows the anchor at row p = start.

    tokens: (capacity,) int64 committed tokens, tokens[p] is the anchor. taps: states of the
    draft's layers; rows before p are read. positions: (3, capacity) int64, the prompt's, read by
    a mirror draft. cache: where the draft keeps its keys and values, one row per position and
    `block` rows more; without one the executor makes its own, see `draft_cache`.

    inputs: 'start' (1,); 'since' (1,), the first row that is new since the last call of this
    frame, 0 at a new frame; 'rope_delta' (1,) and 'length' (1,) of the prompt; all int64.
    outputs: 'proposals' (B - 1,) int64 target ids, and 'logits' (B - 1, V_d) fp32 over the rows
    of the draft's head, forbidden ids at -inf.
    Raises ConfigurationError when the taps are those of other layers.
    """
    cfg, device = draft.cfg, target.device
    if taps.layers != cfg.taps:
        raise ConfigurationError(f'draft {cfg.name} reads layers {cfg.taps}, the tap buffer '
                                 f'holds {taps.layers}: build it with TapBuffer(draft.cfg.taps)')
    inputs = {name: torch.zeros(1, dtype=torch.int64, device=device)
              for name in ('start', 'since', 'rope_delta', 'length')}
    logits = torch.full((cfg.block - 1, cfg.head_rows), float('-inf'), device=device)
    outputs = {'proposals': torch.zeros(cfg.block - 1, dtype=torch.int64, device=device),
               'logits': logits}
    rotary = _Rotary(cfg, tokens.shape[0] + cfg.block, positions)
    cache = cache or draft_cache(draft, tokens.shape[0])
    with torch.inference_mode():
        stage: _Stage
        if isinstance(draft, Dflash):
            stage = _Block(draft, tokens, taps, rotary, cache)
        else:
            stage = _Chain(cast('Eagle3', draft), tokens, taps, rotary, cache)
        return TorchExecutor(stage, inputs, outputs)


def draft_cache(draft: Draft, capacity: int) -> KVCache:
    """Return buffers for the keys and values of `capacity` positions and one block."""
    weight = draft.fc.weight
    return KVCache(draft.cfg.text, 1, capacity + draft.cfg.block, weight.dtype, weight.device)


class _Rotary:
    """Complex turns of every row; those of a mirror draft change with the prompt."""

    def __init__(self, cfg: DraftConfig, rows: int, positions: Tensor) -> None:
        self._cfg, self._positions = cfg, positions
        self._mirror = cfg.rotary == 'mirror'
        self._index = torch.arange(rows, device=positions.device)
        self.turns = turns(*DraftRotary.tables(cfg, self._index, self._index.expand(3, -1)))

    def begin(self, inputs: Mapping[str, Tensor]) -> None:
        """Lay out a new frame."""
        if self._mirror:
            positions = DraftRotary.sequence_positions(
                self._positions, inputs['length'][0], inputs['rope_delta'][0], len(self._index))
            self.turns.copy_(turns(*DraftRotary.tables(self._cfg, self._index, positions)))


class _Stage:
    """What the two kinds share: which rows are new, and where keys and values lie."""

    def __init__(self, draft: Draft, tokens: Tensor, taps: TapBuffer, rotary: _Rotary,
                 cache: KVCache) -> None:
        self.cfg = draft.cfg
        self.tokens, self.taps, self.rotary = tokens, taps.rows[:, 0], rotary
        self.keys, self.values = cache.keys[:, 0], cache.values[:, 0]
        self.fc = draft.fc.weight.detach().t()
        self.head = PackedHead(draft)
        self.best = torch.zeros(self.cfg.block - 1, dtype=torch.int64, device=tokens.device)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        p, since = int(inputs['start']), int(inputs['since'])
        if since == 0:
            self.rotary.begin(inputs)
        low = max(p - self.cfg.window, 0) if self.cfg.window else 0
        self.propose(p, low, max(since, low), outputs)

    def propose(self, p: int, low: int, first: int, outputs: Mapping[str, Tensor]) -> None:
        """Lay out rows first .. p - 1; propose for an anchor at p that sees rows low .. p - 1."""
        raise NotImplementedError

    def fuse(self, first: int, p: int) -> Tensor:
        """Return the fused features (p - first, H) before any norm."""
        rows = self.taps[:, first:p].transpose(0, 1).reshape(p - first, -1)
        return torch.mm(rows.to(self.fc.dtype), self.fc)


class _Block(_Stage):
    """DFlash: all proposals from one pass."""

    def __init__(self, draft: Dflash, tokens: Tensor, taps: TapBuffer, rotary: _Rotary,
                 cache: KVCache) -> None:
        super().__init__(draft, tokens, taps, rotary, cache)
        cfg = draft.cfg
        layers = [cast('DecoderLayer', layer) for layer in draft.layers]
        self.attention = [PackedAttention.of(layer.self_attn) for layer in layers]
        self.ends = [PackedMlp.of(attn, layer.post_attention_layernorm, layer.mlp)
                     for attn, layer in zip(self.attention, layers)]
        self.units = [UnitNorm.of(layer.input_layernorm) for layer in layers]
        self.joined = [folded(layer.input_layernorm, attn.weight)
                       for attn, layer in zip(self.attention, layers)]
        # the context goes through the key and value columns of all layers at once
        turning = cfg.num_heads * cfg.head_dim
        context = torch.cat([attn.weight[turning:] for attn in self.attention])
        self.context_unit = UnitNorm.of(draft.context_norm)
        self.context_kv = folded(draft.context_norm, context)
        self.key_scale = torch.stack([attn.scale[cfg.num_heads:] for attn in self.attention])
        self.table = TokenTable(draft, self.joined[0].shape[1] + cfg.hidden_size, self._enter)
        masks = draft.mask_embedding.detach().expand(cfg.block, -1)
        self.entered = self._enter(masks)

    def _enter(self, embedded: Tensor) -> Tensor:
        """Return embeddings (rows, H) beside their first projections, norms applied."""
        attn = self.attention[0]
        qk, values = attn.split(torch.mm(self.units[0](embedded), self.joined[0]))
        return torch.cat((embedded, qk.flatten(1), values.flatten(1)), dim=1)

    def _lay_context(self, first: int, p: int) -> None:
        """Write keys and values of rows first .. p - 1."""
        cfg, unit = self.cfg, self.attention[0].unit
        features = self.context_unit(self.fuse(first, p))
        rows = torch.mm(features, self.context_kv).view(
            p - first, cfg.num_layers, 2, cfg.num_kv_heads, cfg.head_dim)
        keys = turn_pairs(unit(rows[:, :, 0]).mul_(self.key_scale).flatten(1, 2),
                          self.rotary.turns[first:p]).view_as(rows[:, :, 0])
        self.keys[:, :, first:p] = keys.permute(1, 2, 0, 3)
        self.values[:, :, first:p] = rows[:, :, 1].permute(1, 2, 0, 3)

    def propose(self, p: int, low: int, first: int, outputs: Mapping[str, Tensor]) -> None:
        """Run one block, see `_Stage.propose`."""
        if first < p:
            self._lay_context(first, p)
        cfg, end = self.cfg, p + self.cfg.block
        self.entered[0] = self.table(self.tokens[p:p + 1])[0]
        x, heads = self.entered[:, :cfg.hidden_size], self.entered[:, cfg.hidden_size:]
        heads = heads.view(cfg.block, -1, cfg.head_dim)
        turning = cfg.num_heads + cfg.num_kv_heads
        qk, values = heads[:, :turning], heads[:, turning:]
        for index, (attn, finish) in enumerate(zip(self.attention, self.ends)):
            if index:
                qk, values = attn.split(torch.mm(self.units[index](x), self.joined[index]))
            qk = turn_pairs(qk, self.rotary.turns[p:end])
            self.keys[index, :, p:end] = qk[:, cfg.num_heads:].transpose(0, 1)
            self.values[index, :, p:end] = values.transpose(0, 1)
            q = qk[:, :cfg.num_heads]
            if index == cfg.num_layers - 1:  # the anchor's own row predicts nothing
                q, x = q[1:], x[1:]
            mixed = attn.attend(q, self.keys[index, :, low:end], self.values[index, :, low:end])
            x = finish(x, mixed)
        self.head(x, outputs['logits'], self.best)
        outputs['proposals'].copy_(self.head.ids(self.best))


class _Chain(_Stage):
    """EAGLE-3: one proposal a step, each from the step before."""

    def __init__(self, draft: Eagle3, tokens: Tensor, taps: TapBuffer, rotary: _Rotary,
                 cache: KVCache) -> None:
        super().__init__(draft, tokens, taps, rotary, cache)
        size = draft.cfg.hidden_size
        self.attn = PackedAttention.of(draft.self_attn)
        self.finish = PackedMlp.of(self.attn, draft.post_attention_layernorm, draft.mlp)
        self.unit = UnitNorm.of(draft.feature_norm)
        self.joined = folded(draft.feature_norm, self.attn.weight[:, size:])
        unit = UnitNorm.of(draft.embed_norm)
        embedded = folded(draft.embed_norm, self.attn.weight[:, :size])
        self.table = TokenTable(draft, embedded.shape[1],
                                lambda rows: torch.mm(unit(rows), embedded))

    def _enter(self, ids: Tensor, features: Tensor, first: int) -> Tensor:
        """Write keys and values of slots first ..; return their queries (rows, heads, d)."""
        end, heads = first + len(ids), self.cfg.num_heads
        joined = torch.addmm(self.table(ids), self.unit(features), self.joined)
        qk, values = self.attn.split(joined)
        qk = turn_pairs(qk, self.rotary.turns[first:end])
        self.keys[0, :, first:end] = qk[:, heads:].transpose(0, 1)
        self.values[0, :, first:end] = values.transpose(0, 1)
        return qk[:, :heads]

    def propose(self, p: int, low: int, first: int, outputs: Mapping[str, Tensor]) -> None:
        """Run one chain, see `_Stage.propose`; its first slot is p - 1."""
        first = min(first, p - 1)  # the last slot is run anew even where nothing else is new
        keys, values = self.keys[0], self.values[0]
        best, logits = self.best, outputs['logits']
        x = self.fuse(first, p)
        q = self._enter(self.tokens[first + 1:p + 1], x, first)[-1:]
        x = x[-1:]
        for step in range(self.cfg.block - 1):
            if step:
                q = self._enter(self.head.ids(best[step - 1:step]), x, p - 1 + step)
            mixed = self.attn.attend(q, keys[:, low:p + step], values[:, low:p + step])
            x = self.finish(x, mixed)
            self.head(x, logits[step:step + 1], best[step:step + 1])
        outputs['proposals'].copy_(self.head.ids(best))
