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
Small targets and drafts, and a slow direct reading of the draft formulas in fp64.

Nothing here is cached, batched or packed: every value is computed from the tokens and the
tapped states of rows 0 .. p - 1 each time it is asked for.
"""

from __future__ import annotations

from dataclasses import replace
import math
from typing import Any

import torch
from torch import nn, Tensor

from rspec_planner.model.config import (
    ExpertConfig,
    ProfileConfig,
    TextConfig,
    tiny,
    TokenIds,
    VisionConfig,
)
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config, Draft, eagle3_config
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.rope import flat_cos_sin
from rspec_planner.model.target import Target

VOCAB, FORBIDDEN = 40, (17, 23)
REDUCED = (1, 2, 5, 6, 11, 12, 13, 24, 30, 31, 39)


def small_profile() -> ProfileConfig:
    """Six query heads on two KV heads, three axes of different weight, ids beyond the gap."""
    tokens = TokenIds(pad=0, image_pad=3, vision_start=4, vision_end=5, im_start=6, im_end=7,
                      cot_start=8, cot_end=9, traj_history_start=10, traj_history=11,
                      traj_history_end=12, traj_future_start=13, traj_token_start=14,
                      forbidden_start=FORBIDDEN[0], forbidden_end=FORBIDDEN[1])
    text = TextConfig(vocab_size=VOCAB, hidden_size=32, num_layers=4, num_heads=6,
                      num_kv_heads=2, head_dim=16, intermediate_size=48,
                      mrope_section=(3, 3, 2), rope_theta=500.0)
    vision = VisionConfig(hidden_size=16, depth=1, num_heads=2, intermediate_size=16,
                          deepstack_layers=(0,), out_hidden_size=32, num_position_embeddings=16)
    expert = ExpertConfig(hidden_size=16, num_heads=2, intermediate_size=16,
                          in_proj_hidden_size=8)
    return replace(tiny(tokens, VOCAB), text=text, vision=vision, expert=expert)


def randomise(module: nn.Module, seed: int) -> None:
    """Draw weights so large that every path shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if name.endswith('norm.weight'):
            weight.data.copy_(1.0 + 0.3 * drawn)
        elif 'embed' in name or weight.dim() == 1:
            weight.data.copy_(drawn)
        else:
            weight.data.copy_(drawn * weight[0].numel() ** -0.5 * 1.3)


def small_target(seed: int = 0) -> Target:
    """Return the small profile with random weights."""
    target = Target(small_profile())
    randomise(target, seed)
    return target.eval().requires_grad_(False)


def small_draft(target: Target, kind: str, seed: int = 0, reduced: bool = False,
                **over: object) -> Draft:
    """Return a bound draft with random weights, ready for inference."""
    over['draft_vocab'] = len(REDUCED) if reduced else 0
    draft: Draft
    if kind == 'dflash':
        draft = Dflash(dflash_config(target.cfg, **over))
    else:
        draft = Eagle3(eagle3_config(target.cfg, **over))
    randomise(draft, seed)
    if reduced:
        draft.set_vocabulary(REDUCED)
    draft.to(target.device).bind(target.text, target.cfg.tokens)
    return draft.eval().requires_grad_(False)


def _angles(draft: Draft, index: int, positions: Tensor) -> Tensor:
    """Return the (d / 2,) angles of one index; positions: (3, rows) of the mirror."""
    cfg = draft.cfg
    out = torch.zeros(cfg.head_dim // 2, dtype=torch.float64)
    for pair in range(len(out)):
        axis = 0
        for candidate in (1, 2):
            if pair % 3 == candidate and pair < 3 * cfg.mrope_section[candidate]:
                axis = candidate
        at = index if cfg.rotary == 'flat' else int(positions[axis, index])
        out[pair] = at * cfg.rope_theta ** (-2 * pair / cfg.head_dim)
    return out


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


class Reading:
    """The formulas of one draft over one frame."""

    def __init__(self, draft: Draft, taps: Tensor, tokens: Tensor, positions: Tensor) -> None:
        """taps: (n_f, rows, H); tokens: (rows,); positions: (3, rows) of the whole frame."""
        self.draft, self.cfg = draft, draft.cfg
        self.w = {name: value.double() if value.is_floating_point() else value
                  for name, value in draft.state_dict().items()}
        self.taps, self.tokens, self.positions = taps.double(), tokens, positions

    def _embed(self, token: int) -> Tensor:
        return self.draft.shared.embedding[token].double()

    def _turned(self, x: Tensor, norm: str, index: int) -> Tensor:
        """Return one row (heads * d,) as heads (heads, d), normed and turned to an index."""
        half = self.cfg.head_dim // 2
        x = _norm(x.view(-1, self.cfg.head_dim), self.w[norm], self.cfg.rms_norm_eps)
        angles = _angles(self.draft, index, self.positions)
        a, b = x[:, :half], x[:, half:]
        return torch.cat((a * angles.cos() - b * angles.sin(),
                          b * angles.cos() + a * angles.sin()), dim=1)

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Return the (heads * d,) result for one query (heads, d)."""
        out = []
        group = self.cfg.num_heads // self.cfg.num_kv_heads
        for head in range(self.cfg.num_heads):
            k = torch.stack([row[head // group] for row in keys])
            v = torch.stack([row[head // group] for row in values])
            weights = (k @ q[head] / math.sqrt(self.cfg.head_dim)).softmax(0)
            out.append(weights @ v)
        return torch.cat(out)

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        w, eps = self.w, self.cfg.rms_norm_eps
        h = _norm(x, w[f'{prefix}post_attention_layernorm.weight'], eps)
        gate = w[f'{prefix}mlp.gate_proj.weight'] @ h
        up = w[f'{prefix}mlp.up_proj.weight'] @ h
        return x + w[f'{prefix}mlp.down_proj.weight'] @ (gate / (1 + (-gate).exp()) * up)

    def _logits(self, x: Tensor) -> Tensor:
        head = self.draft.shared.head.double()
        logits = head @ _norm(x, self.w['norm.weight'], self.cfg.rms_norm_eps)
        logits[FORBIDDEN[0]:FORBIDDEN[1]] = -math.inf
        return logits[list(REDUCED)] if self.cfg.draft_vocab else logits

    def _context(self, p: int) -> range:
        return range(max(0, p - self.cfg.window) if self.cfg.window else 0, p)

    def dflash(self, p: int, anchor: int) -> Tensor:
        """Return the logits (B - 1, V_d) of the block anchored at p."""
        w, eps, context = self.w, self.cfg.rms_norm_eps, self._context(p)
        features = [_norm(w['fc.weight'] @ self.taps[:, t].reshape(-1),
                          w['context_norm.weight'], eps) for t in context]
        rows = [self._embed(anchor)] + [w['mask_embedding']] * (self.cfg.block - 1)
        for layer in range(self.cfg.num_layers):
            name = f'layers.{layer}.'
            attn = f'{name}self_attn.'
            inputs = [_norm(x, w[f'{name}input_layernorm.weight'], eps) for x in rows]
            sources = list(zip((*features, *inputs), (*context, *range(p, p + len(rows)))))
            keys = [self._turned(w[f'{attn}k_proj.weight'] @ x, f'{attn}k_norm.weight', t)
                    for x, t in sources]
            values = [(w[f'{attn}v_proj.weight'] @ x).view(-1, self.cfg.head_dim)
                      for x, _ in sources]
            out = []
            for offset, x in enumerate(inputs):
                q = self._turned(w[f'{attn}q_proj.weight'] @ x, f'{attn}q_norm.weight',
                                 p + offset)
                mixed = self._attend(q, keys, values)
                out.append(self._mlp(rows[offset] + w[f'{attn}o_proj.weight'] @ mixed, name))
            rows = out
        logits, before = [], anchor
        for x in rows[1:]:
            logits.append(self._logits(x) + self._correction(before))
            before = self._target_id(int(logits[-1].argmax()))
        return torch.stack(logits)

    def _target_id(self, row: int) -> int:
        return REDUCED[row] if self.cfg.draft_vocab else row

    def _correction(self, before: int) -> Tensor | float:
        """Return what is added to the logits behind a token."""
        if not self.cfg.correction_rank:
            return 0.0
        known = REDUCED if self.cfg.draft_vocab else tuple(range(VOCAB))
        row = known.index(before) if before in known else len(known)
        return self.w['correction.after'] @ self.w['correction.before'][row]

    def eagle3(self, p: int, anchor: int) -> tuple[Tensor, Tensor]:
        """Return the proposals (B - 1,) and their logits (B - 1, V_d) after the anchor at p."""
        w, eps = self.w, self.cfg.rms_norm_eps
        tokens = [*self.tokens[:p].tolist(), anchor]
        slots, proposals, logits = [], [], []
        for t in self._context(p):
            slots.append((t, self._embed(tokens[t + 1]),
                          w['fc.weight'] @ self.taps[:, t].reshape(-1)))
        for _ in range(self.cfg.block - 1):
            inputs = [(t, torch.cat((_norm(e, w['embed_norm.weight'], eps),
                                     _norm(g, w['feature_norm.weight'], eps))))
                      for t, e, g in slots]
            keys = [self._turned(w['self_attn.k_proj.weight'] @ x, 'self_attn.k_norm.weight', t)
                    for t, x in inputs]
            values = [(w['self_attn.v_proj.weight'] @ x).view(-1, self.cfg.head_dim)
                      for _, x in inputs]
            t, x = inputs[-1]
            q = self._turned(w['self_attn.q_proj.weight'] @ x, 'self_attn.q_norm.weight', t)
            mixed = w['self_attn.o_proj.weight'] @ self._attend(q, keys, values)
            output = self._mlp(slots[-1][2] + mixed, '')
            logits.append(self._logits(output))
            proposals.append(self._target_id(int(logits[-1].argmax())))
            slots.append((t + 1, self._embed(proposals[-1]), output))
        return torch.tensor(proposals), torch.stack(logits)


def plain_forward(target: Target, ids: list[int], delta: int, **options: object) -> Any:
    """Return what the decoder says of a whole sequence, read in one pass without any cache."""
    text = target.cfg.text
    cos, sin = flat_cos_sin(torch.arange(len(ids)) + delta, text.head_dim, text.rope_theta)
    return target.text(target.text.embed(torch.tensor([ids])), cos, sin, **options)
