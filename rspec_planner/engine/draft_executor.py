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
from rspec_planner.model.backbone import Backbone
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import Draft, DraftConfig, DraftRotary
from rspec_planner.model.draft_packed import (
    folded,
    PackedAttention,
    PackedCorrection,
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


def draft_executor(draft: Draft, target: Backbone, tokens: Tensor, taps: TapBuffer,
                   positions: Tensor, kept: Tensor | None = None) -> TorchExecutor:
    """
    Return the stage that proposes what follows the anchor at row p = start.

    The draft is bound; its weights are laid out here, so later changes of them are not seen.
    tokens: (capacity,) int64 committed tokens, tokens[p] is the anchor. taps: states of the
    draft's layers; rows before p are read. positions: (3, capacity) int64, the prompt's, read by
    a mirror draft. kept: where the draft keeps its keys and values, see `kept_rows`; without
    it the executor makes its own.

    inputs: 'start' (1,); 'since' (1,), the first row that is new since the last call of this
    frame, 0 at a new frame; 'rope_delta' (1,) and 'length' (1,) of the prompt; all int64.
    outputs: 'proposals' (B - 1,) int64 target ids, and 'logits' (B - 1, V_d) fp32 over the rows
    of the draft's head, forbidden ids at -inf.
    Raises ConfigurationError when the taps are those of other layers.
    """
    cfg, device = draft.cfg, target.device
    check_taps(draft, taps)
    inputs = {name: torch.zeros(1, dtype=torch.int64, device=device)
              for name in ('start', 'since', 'rope_delta', 'length')}
    logits = torch.full((cfg.block - 1, cfg.head_rows), float('-inf'), device=device)
    outputs = {'proposals': torch.zeros(cfg.block - 1, dtype=torch.int64, device=device),
               'logits': logits}
    rotary = RotaryRows(cfg, tokens.shape[0] + cfg.block, positions)
    kept = kept_rows(draft, tokens.shape[0]) if kept is None else kept
    with torch.inference_mode():
        stage: DraftStage
        if isinstance(draft, Dflash):
            stage = _Block(draft, tokens, taps, rotary, kept)
        else:
            stage = ChainStage(cast('Eagle3', draft), tokens, taps, rotary, kept)
        return TorchExecutor(stage, inputs, outputs)


def check_taps(draft: Draft, taps: TapBuffer) -> None:
    """Raise ConfigurationError when the taps are those of other layers."""
    if taps.layers != draft.cfg.taps:
        raise ConfigurationError(f'draft {draft.cfg.name} reads layers {draft.cfg.taps}, the tap '
                                 f'buffer holds {taps.layers}: build it with '
                                 'TapBuffer(draft.cfg.taps)')


def kept_rows(draft: Draft, capacity: int, behind: int = 0) -> Tensor:
    """
    Return a buffer for the projections of `capacity` positions and what lies behind them.

    (N_d, capacity + R, heads + 2 kv_heads, d): queries, which nobody reads again, keys, values.
    behind: R, the rows that one call needs for its own proposals; 0 stands for a block.
    """
    cfg, weight = draft.cfg, draft.fc.weight
    return torch.zeros((cfg.num_layers, capacity + (behind or cfg.block),
                        cfg.num_heads + 2 * cfg.num_kv_heads, cfg.head_dim),
                       dtype=weight.dtype, device=weight.device)


class RotaryRows:
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


class DraftStage:
    """What the two kinds share: which rows are new, and where their projections lie."""

    def __init__(self, draft: Draft, tokens: Tensor, taps: TapBuffer, rotary: RotaryRows,
                 kept: Tensor) -> None:
        self.cfg = draft.cfg
        self.tokens, self.taps, self.rotary, self.kept = tokens, taps.rows[:, 0], rotary, kept
        self.fc = draft.fc.weight.detach().t().contiguous()
        self.head = PackedHead(draft)
        self.best = torch.zeros(self.cfg.block - 1, dtype=torch.int64, device=tokens.device)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Fill the outputs of `draft_executor` from its inputs."""
        self.propose(*self.begin(inputs), outputs['logits'])
        if self.head.ids is None:
            outputs['proposals'].copy_(self.best)
        else:
            torch.index_select(self.head.ids, 0, self.best, out=outputs['proposals'])

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """Return the anchor's row, the first row that it sees and the first that is new."""
        p, since = int(inputs['start']), int(inputs['since'])
        if since == 0:
            self.rotary.begin(inputs)
        low = max(p - self.cfg.window, 0) if self.cfg.window else 0
        return p, low, max(since, low)

    def propose(self, p: int, low: int, first: int, logits: Tensor) -> None:
        """
        Fill `best` and logits (B - 1, V_d) for an anchor at p that sees rows low .. p - 1.

        Rows first .. p - 1 are new.
        """
        raise NotImplementedError

    def fuse(self, first: int, p: int) -> Tensor:
        """Return the fused features (p - first, H) before any norm."""
        rows = self.taps[:, first:p].transpose(0, 1).reshape(p - first, -1)
        return torch.mm(rows.to(self.fc.dtype), self.fc)


class _Block(DraftStage):
    """DFlash: all proposals from one pass."""

    def __init__(self, draft: Dflash, tokens: Tensor, taps: TapBuffer, rotary: RotaryRows,
                 kept: Tensor) -> None:
        super().__init__(draft, tokens, taps, rotary, kept)
        cfg = draft.cfg
        layers = [cast('DecoderLayer', layer) for layer in draft.layers]
        self.layers, turned = kept.unbind(0), cfg.num_heads + cfg.num_kv_heads
        self.keys, self.values = kept[:, :, cfg.num_heads:turned], kept[:, :, turned:]
        self.attention = [PackedAttention.of(layer.self_attn) for layer in layers]
        self.ends = [PackedMlp.of(attn, layer.post_attention_layernorm, layer.mlp)
                     for attn, layer in zip(self.attention, layers)]
        self.units = [UnitNorm.of(layer.input_layernorm) for layer in layers]
        self.joined = [folded(layer.input_layernorm, attn.weight)
                       for attn, layer in zip(self.attention, layers)]
        # the context goes through the key and value columns of all layers at once
        queries = cfg.num_heads * cfg.head_dim
        self.context_unit = UnitNorm.of(draft.context_norm)
        self.context_kv = folded(draft.context_norm, torch.cat(
            [attn.weight[queries:] for attn in self.attention]))
        self.key_scale = torch.stack([attn.scale[cfg.num_heads:] for attn in self.attention])
        self.walk = None if draft.correction is None else \
            PackedCorrection(draft, draft.correction, self.head.used)
        self.table = TokenTable(draft, cfg.hidden_size + self.joined[0].shape[1], self._enter)
        # what enters the block: embeddings and their first projections; row 0 is the anchor's
        entered = self._enter(draft.mask_embedding.detach().expand(cfg.block, -1).contiguous())
        self.anchor, self.x = entered[:1], entered[:, :cfg.hidden_size]
        self.heads = entered[:, cfg.hidden_size:].view(cfg.block, -1, cfg.head_dim)

    def _enter(self, embedded: Tensor) -> Tensor:
        """Return embeddings (rows, H) beside their first projections (rows, out)."""
        joined = torch.mm(self.units[0](embedded), self.joined[0])
        return torch.cat((embedded, joined), dim=1)

    def _lay_context(self, first: int, p: int) -> None:
        """Write keys and values of rows first .. p - 1."""
        cfg = self.cfg
        features = self.context_unit(self.fuse(first, p))
        rows = torch.mm(features, self.context_kv).view(
            p - first, cfg.num_layers, 2 * cfg.num_kv_heads, cfg.head_dim)
        keys, values = rows[:, :, :cfg.num_kv_heads], rows[:, :, cfg.num_kv_heads:]
        normed = self.attention[0].normed(keys).mul_(self.key_scale).transpose(0, 1)
        turn_pairs(normed, self.rotary.turns[first:p], self.keys[:, first:p])
        self.values[:, first:p] = values.transpose(0, 1)

    def propose(self, p: int, low: int, first: int, logits: Tensor) -> None:
        """Run one block, see `DraftStage.propose`."""
        if first < p:
            self._lay_context(first, p)
        block, end = self.cfg.block, p + self.cfg.block
        cis, x = self.rotary.turns[p:end], self.x
        self.anchor.copy_(self.table(self.tokens[p:p + 1]))
        for index, (kept, attn, finish) in enumerate(zip(self.layers, self.attention,
                                                         self.ends)):
            rows = kept[p:end]
            if index == 0:
                rows.copy_(self.heads)
            else:
                torch.mm(self.units[index](x), self.joined[index], out=rows.view(block, -1))
            attn.lay(rows, cis)
            x = finish(x, attn.attend(kept[low:end], block))
        logits = self.head.fill(x[1:], logits)
        if self.walk is None:
            torch.argmax(logits, dim=-1, out=self.best)
        else:
            self.walk(self.tokens[p:p + 1], logits, self.best)


class ChainStage(DraftStage):
    """EAGLE-3: one proposal a step, each from the step before."""

    def __init__(self, draft: Eagle3, tokens: Tensor, taps: TapBuffer, rotary: RotaryRows,
                 kept: Tensor) -> None:
        super().__init__(draft, tokens, taps, rotary, kept)
        size = draft.cfg.hidden_size
        self.slots = kept[0]
        self.attn = PackedAttention.of(draft.self_attn)
        self.finish = PackedMlp.of(self.attn, draft.post_attention_layernorm, draft.mlp)
        self.unit = UnitNorm.of(draft.feature_norm)
        self.joined = folded(draft.feature_norm, self.attn.weight[:, size:])
        unit = UnitNorm.of(draft.embed_norm)
        embedded = folded(draft.embed_norm, self.attn.weight[:, :size])
        self.table = TokenTable(draft, embedded.shape[1],
                                lambda rows: torch.mm(unit(rows), embedded))
        self.steps = self.best[:, None]

    def lay(self, ids: Tensor, features: Tensor, first: int, cis: Tensor) -> None:
        """Write the projections of rows first .. from tokens, features (rows, H) and turns."""
        count = ids.shape[0]
        rows = self.slots[first:first + count]
        torch.addmm(self.table(ids), self.unit(features), self.joined,
                    out=rows.view(count, -1))
        self.attn.lay(rows, cis)

    def open(self, p: int, low: int, first: int) -> Tensor:
        """Lay out the slots that are new, first .. p - 1; return the last one's output (1, H)."""
        first = min(first, p - 1)  # the last slot is run anew even where nothing else is new
        x = self.fuse(first, p)
        self.lay(self.tokens[first + 1:p + 1], x, first, self.rotary.turns[first:p])
        return self.finish(x[-1:], self.attn.attend(self.slots[low:p], 1))

    def propose(self, p: int, low: int, first: int, logits: Tensor) -> None:
        """Run one chain, see `DraftStage.propose`; its first slot is p - 1."""
        x = self.open(p, low, first)
        for step, (row, best) in enumerate(zip(logits[:, None], self.steps)):
            if step:
                chosen, slot = self.steps[step - 1], p - 1 + step
                if self.head.ids is not None:
                    chosen = self.head.ids.index_select(0, chosen)
                self.lay(chosen, x, slot, self.rotary.turns[slot:slot + 1])
                x = self.finish(x, self.attn.attend(self.slots[low:slot + 1], 1))
            torch.argmax(self.head.fill(x, row), dim=-1, out=best)
