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
DFlash: one forward proposes a whole block (arXiv 2602.06036).

Every position before the anchor contributes one fused feature of target states; each draft
layer projects its own keys and values from it. A block is the anchor's embedding and B - 1
copies of a trained mask embedding. Its rows attend to the context and to each other, without a
causal order; the row at offset i predicts the token at offset i.

With a correction the offsets stop being independent: a low-rank table of (token before, token)
adds to the logits of each offset what follows from the token chosen one offset earlier, from
left to right (after the sequential heads of Domino, arXiv 2605.29707, and DFlash 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.model.draft import copy_matching, Draft, DraftConfig, spread
from rspec_planner.model.layer import attend, DecoderLayer, RmsNorm, runners
from rspec_planner.model.rope import rotate
from rspec_planner.model.text import TextDecoder

KeysValues = tuple[Tensor, Tensor]
Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Dflash(Draft):
    """The block draft; every method is batched and lets gradients through."""

    def __init__(self, cfg: DraftConfig) -> None:
        super().__init__(cfg)
        text = cfg.text
        self.layers = nn.ModuleList(
            DecoderLayer(text, cfg.hidden_size, cfg.num_heads, cfg.intermediate_size)
            for _ in range(cfg.num_layers))
        self.context_norm = RmsNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(cfg.hidden_size))
        self.correction = Correction(cfg) if cfg.correction_rank else None

    def initialise(self, text: TextDecoder | None = None, seed: int = 0) -> Dflash:
        """
        Draw the weights; with a target, copy from evenly chosen layers what fits in shape.

        The layers run from 1 to the draft's last tap; the mask embedding begins as the mean
        of the embedding table, the final norm as the target's.
        """
        generator = torch.Generator().manual_seed(seed)
        self._normal(generator, self.cfg.num_layers)
        drawn = torch.randn(self.cfg.hidden_size, generator=generator)
        self.mask_embedding.data.copy_(0.02 * drawn)
        if self.correction is not None:
            self.correction.clear(generator)
        if text is not None:
            for index, layer in zip(spread(self.cfg.num_layers, 1, self.cfg.taps[-1]),
                                    self.layers):
                copy_matching(text.layers[index], layer)
            copy_matching(text.norm, self.norm)
            self._average_taps()
            table = text.embed_tokens.weight.detach()
            spent = table.std(dim=0).to(drawn) * drawn * 0.1 + table.mean(dim=0).to(drawn)
            self.mask_embedding.data.copy_(spent)
        return self

    def pack(self) -> Dflash:
        """Join projections for inference, see `DecoderLayer.pack`; call it after any move."""
        for layer in self.layers:
            cast('DecoderLayer', layer).pack()
        return self

    def fuse(self, taps: Tensor) -> Tensor:
        """Return the normed context features (Bt, S, H) of tapped states (n_f, Bt, S, H)."""
        out: Tensor = self.context_norm(super().fuse(taps))
        return out

    def context_kv(self, features: Tensor, cos: Tensor, sin: Tensor) -> list[KeysValues]:
        """
        Return per layer the context's keys and values, each (Bt, kv_heads, S, d).

        features: (Bt, S, H) of `fuse`; cos, sin: (S, d) or (Bt, S, d) of these rows.
        """
        shape = (*features.shape[:2], self.cfg.num_kv_heads, self.cfg.head_dim)
        rows = []
        for layer in self.layers:
            attn = cast('DecoderLayer', layer).self_attn
            keys = attn.k_norm(attn.k_proj(features).view(shape)).transpose(1, 2)
            values = attn.v_proj(features).view(shape).transpose(1, 2)
            rows.append((rotate(keys, cos, sin), values))
        return rows

    def block_input(self, anchor_ids: Tensor) -> Tensor:
        """Return [E[anchor], mask, mask, ...] of anchors (Bt, A), packed: (Bt, A * B, H)."""
        batch, anchors = anchor_ids.shape
        size = self.cfg.hidden_size
        masks = self.mask_embedding.expand(batch, anchors, self.cfg.block - 1, size)
        first = self.embed(anchor_ids)[:, :, None]
        return torch.cat((first, masks.to(first.dtype)), dim=2).view(batch, -1, size)

    def block(self, anchor_ids: Tensor, cos: Tensor, sin: Tensor, kv: Sequence[KeysValues],
              mask: Tensor | None = None) -> Tensor:
        """
        Return the hidden states of A packed blocks after the final norm, (Bt, A * B, H).

        anchor_ids: (Bt, A) int64. cos, sin: (A * B, d) or (Bt, A * B, d) of the block rows.
        kv: of `context_kv`. mask: bool (True: seen) or additive, broadcastable to
        (Bt, 1, A * B, S + A * B), keys in the order context, block rows; see `block_visible`.
        None: everything is seen, which suits one block of one sequence.
        """
        return self._run(anchor_ids, cos, sin, kv, mask, attend)

    def attention(self, anchor_ids: Tensor, cos: Tensor, sin: Tensor, kv: Sequence[KeysValues],
                  mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """
        Return what each row attends to, and the result of `block`.

        Arguments as for `block`. The first is (N_d, Bt, heads, A * B, S + A * B) fp32 and
        sums to one over the last axis.
        """
        seen: list[Tensor] = []

        def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            mixed, weights = attend_openly(q, k, v, mask)
            seen.append(weights)
            return mixed

        hidden = self._run(anchor_ids, cos, sin, kv, mask, mix)
        return torch.stack(seen), hidden

    def _run(self, anchor_ids: Tensor, cos: Tensor, sin: Tensor, kv: Sequence[KeysValues],
             mask: Tensor | None, mix: Mix) -> Tensor:
        if mask is not None:
            mask = mask.repeat(1, 1, self.cfg.num_heads // self.cfg.num_kv_heads, 1)
        hidden = self.block_input(anchor_ids)
        layers, sin = runners(self.layers, sin)
        for layer, (keys, values) in zip(layers, kv):
            q, k, v = layer.project(hidden, cos, sin)
            keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
            hidden = layer.finish(hidden, mix(q, keys, values, mask))
        out: Tensor = self.norm(hidden)
        return out

    def logits(self, hidden: Tensor, previous: Tensor | None = None) -> Tensor:
        """
        Return (..., V_d) of states after the final norm (..., H), see `Draft.head`.

        previous: (...) int64 target ids one offset earlier, which a draft with a correction
        needs: the true tokens in training, the chosen ones when drafting. Up to the first wrong
        proposal both are the same.
        """
        base = self.head(hidden)
        if self.correction is None:
            return base
        if previous is None:
            raise ValueError('a draft with a correction needs the tokens one offset earlier')
        added: Tensor = self.correction(self.draft_index(previous))
        return base + added


class Correction(nn.Module):
    """Low-rank logits of a token given the one before, both as head rows."""

    def __init__(self, cfg: DraftConfig) -> None:
        super().__init__()
        # one row more for tokens that the head does not have
        self.before = nn.Parameter(torch.zeros(cfg.head_rows + 1, cfg.correction_rank))
        self.after = nn.Parameter(torch.zeros(cfg.head_rows, cfg.correction_rank))

    def clear(self, generator: torch.Generator) -> None:
        """Begin without any effect, but with gradients."""
        self.before.data.copy_(torch.randn(self.before.shape, generator=generator))
        self.after.data.zero_()

    def forward(self, previous: Tensor) -> Tensor:
        """Return (..., V_d) for head rows (...) int64, -1 for a token that the head lacks."""
        rows = torch.where(previous < 0, len(self.after), previous)
        out: Tensor = functional.linear(functional.embedding(rows, self.before), self.after)
        return out


def attend_openly(q: Tensor, k: Tensor, v: Tensor,
                  mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """
    Return the result of `attend` and its probabilities (Bt, heads, S, K) fp32.

    Arguments as for `attend`, the mask additive or bool.
    """
    batch, heads, rows, dim = q.shape
    folded = q.reshape(batch, k.shape[1], -1, dim).float()
    scores = folded @ k.float().transpose(-1, -2) * dim ** -0.5
    if mask is not None:
        scores = (scores.masked_fill(~mask, float('-inf')) if mask.dtype == torch.bool
                  else scores + mask)
    weights = scores.softmax(dim=-1)
    mixed = (weights @ v.float()).to(q.dtype).view(batch, heads, rows, dim)
    return (mixed.transpose(1, 2).reshape(batch, rows, heads * dim),
            weights.view(batch, heads, rows, -1))


def block_visible(anchors: Tensor, context: Tensor, block: int, window: int) -> Tensor:
    """
    Return who sees whom for packed blocks, (Bt, 1, A * B, S + A * B) bool.

    anchors: (Bt, A) sequence index p of each block. context: (S,) or (Bt, S) sequence index of
    each context row, negative for padding. A block sees the rows t with p - window <= t < p
    (window 0: every t < p), all offsets of itself and nothing of other blocks.
    """
    count = anchors.shape[1]
    context = context.expand(anchors.shape[0], -1)[:, None]
    before = anchors[..., None]
    seen = (context < before) & (context >= 0)
    if window:
        seen = seen & (context >= before - window)
    own = torch.eye(count, dtype=torch.bool, device=anchors.device)
    seen = torch.cat((seen, own.repeat_interleave(block, dim=1).expand(len(seen), -1, -1)), dim=2)
    return seen.repeat_interleave(block, dim=1)[:, None]
