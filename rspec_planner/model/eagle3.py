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
EAGLE-3: one layer proposes token after token (arXiv 2503.01840).

Slot t holds the pair (embedding of token t + 1, fused target feature g_t) and predicts token
t + 2. The last slot whose feature is known is p - 1, before the anchor at p; it yields the
first proposal. Each further slot takes the proposal just made and, in place of a target
feature, the output of the slot before.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn, Tensor

from rspec_planner.model.draft import copy_matching, Draft, DraftConfig
from rspec_planner.model.layer import attend, Attention, DecoderLayer, RmsNorm, SwiGlu
from rspec_planner.model.rope import rotate
from rspec_planner.model.text import TextDecoder

KeysValues = tuple[Tensor, Tensor]


class Eagle3(Draft):
    """The chain draft; every method is batched and lets gradients through."""

    def __init__(self, cfg: DraftConfig) -> None:
        super().__init__(cfg)
        size, eps = cfg.hidden_size, cfg.rms_norm_eps
        self.embed_norm = RmsNorm(size, eps)
        self.feature_norm = RmsNorm(size, eps)
        self.self_attn = Attention(2 * size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, eps,
                                   qk_norm=cfg.qk_norm)
        # the residual stream is the feature alone, half as wide as the layer's input
        self.self_attn.o_proj = nn.Linear(cfg.num_heads * cfg.head_dim, size, bias=False)
        self.post_attention_layernorm = RmsNorm(size, eps)
        self.mlp = SwiGlu(size, cfg.intermediate_size)

    def initialise(self, text: TextDecoder | None = None, seed: int = 0) -> Eagle3:
        """
        Draw the weights; with a target, copy from its last tapped layer what fits in shape.

        The projections of the feature half are the target's, those of the embedding half stay
        as drawn; the final norm begins as the target's.
        """
        self._normal(torch.Generator().manual_seed(seed), 1)
        if text is not None:
            source = cast('DecoderLayer', text.layers[self.cfg.taps[-1]])
            copy_matching(source, self)
            copy_matching(text.norm, self.norm)
            own, given = self.self_attn, source.self_attn
            for half, whole in ((own.q_proj, given.q_proj), (own.k_proj, given.k_proj),
                                (own.v_proj, given.v_proj)):
                half.weight.data[:, self.cfg.hidden_size:].copy_(whole.weight.detach())
            self.feature_norm.weight.data.copy_(source.input_layernorm.weight.detach())
            self._average_taps()
        return self

    def _slot(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """Return the input of the projections (Bt, S, 2 H)."""
        return torch.cat((self.embed_norm(embedded), self.feature_norm(feature)), dim=-1)

    def slot_kv(self, embedded: Tensor, feature: Tensor, cos: Tensor, sin: Tensor) -> KeysValues:
        """
        Return keys and values of slots, each (Bt, kv_heads, S, d), without running the cell.

        embedded: (Bt, S, H), E[x_(t+1)]; feature: (Bt, S, H), g_t of `fuse`; cos, sin: (S, d)
        or (Bt, S, d) at position t.
        """
        attn = self.self_attn
        slots = self._slot(embedded, feature)
        shape = (*slots.shape[:2], attn.kv_heads, attn.head_dim)
        keys = attn.k_norm(attn.k_proj(slots).view(shape)).transpose(1, 2)
        return rotate(keys, cos, sin), attn.v_proj(slots).view(shape).transpose(1, 2)

    def cell(self, embedded: Tensor, feature: Tensor, cos: Tensor, sin: Tensor,
             past: KeysValues | None = None,
             mask: Tensor | None = None) -> tuple[Tensor, KeysValues]:
        """
        Return the output of slots before the final norm (Bt, S, H), and their keys and values.

        embedded, feature, cos, sin: as for `slot_kv`; from the second chain step on the
        feature is the output of the step before. past: keys and values of other slots
        (Bt, kv_heads, P, d). mask: bool (True: seen) or additive, broadcastable to
        (Bt, 1, S, P + S), keys in the order past, own. None: everything is seen.
        """
        attn = self.self_attn
        q, k, v = attn.project(self._slot(embedded, feature), cos, sin)
        keys, values = k, v
        if past is not None:
            keys, values = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        if mask is not None:
            mask = mask.repeat(1, 1, attn.heads // attn.kv_heads, 1)
        x = feature + attn.o_proj(attend(q, keys, values, mask))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out, (k, v)

    def logits(self, output: Tensor) -> Tensor:
        """Return (..., V_d) of cell outputs (..., H): final norm, then `Draft.head`."""
        return self.head(self.norm(output))


def chain_visible(anchors: Tensor, slots: Tensor, step: int, window: int) -> Tensor:
    """
    Return who sees whom in chain step `step` of A chains, (Bt, 1, A, S + (step + 1) * A) bool.

    anchors: (Bt, A) sequence index p of each anchor; step k runs slot p - 1 + k of every chain.
    slots: (S,) or (Bt, S) sequence index of the context slots, negative for padding. Keys in
    the order context, step 0, ..., step k: a chain sees the slots t with p - window <= t < p - 1
    (window 0: every t < p - 1) and its own steps 0 .. k. Its slot p - 1 is step 0.
    """
    last = anchors[..., None] - 1
    context = slots.expand(anchors.shape[0], -1)[:, None]
    seen = (context < last) & (context >= 0)
    if window:
        seen = seen & (context > last - window)
    own = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device)
    own = own.repeat(1, step + 1).expand(len(seen), -1, -1)
    return torch.cat((seen, own), dim=2)[:, None]
