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
Drafts laid out for inference: joined matrices, few operations, keys and values kept in place.

A draft handles 1 to 24 rows, so that the number of operations costs as much as their
arithmetic. Three rewritings leave the result as it is:

- the weight of a norm is folded into the matrix behind it, and x / sqrt(mean(x^2) + eps) is
  computed as x / hypot(|x|, sqrt(n eps)) with sqrt(n) folded in as well;
- the dimensions i and i + d / 2 that a rotary turns together are made neighbours in queries and
  keys alike, which makes the turn one complex product and leaves their products unchanged;
- the first projections of rows that are the same in every block, or depend on one token alone,
  are made once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.model.dflash import Correction, Dflash
from rspec_planner.model.draft import Draft
from rspec_planner.model.layer import Attention, RmsNorm, SwiGlu

#: per-token projections are made in advance for vocabularies of up to this many numbers
TABLE_NUMBERS = 1 << 22


def pairs(head_dim: int) -> Tensor:
    """Return the order (d,) that makes dimensions i and i + d / 2 neighbours."""
    return torch.arange(head_dim).view(2, -1).t().reshape(-1)


def turns(cos: Tensor, sin: Tensor) -> Tensor:
    """Return the tables (rows, d) of `DraftRotary.tables` as complex (rows, 1, d / 2)."""
    half = cos.shape[-1] // 2
    return torch.complex(cos[:, :half], sin[:, :half])[:, None].contiguous()


def turn_pairs(x: Tensor, cis: Tensor, out: Tensor) -> None:
    """Turn x (.., rows, heads, d), neighbours paired, by cis (rows, 1, d / 2) into out."""
    shape = (*x.shape[:-1], -1, 2)
    joined = torch.view_as_complex(x.float().view(shape))
    if out.dtype == torch.float32:
        torch.mul(joined, cis, out=torch.view_as_complex(out.view(shape)))
    else:
        out.copy_(torch.view_as_real(joined * cis).flatten(-2))


@dataclass(frozen=True)
class UnitNorm:
    """RMSNorm without its weight and times n^-1/2: rows of length one, nearly."""

    floor: Tensor  # () fp32, sqrt(n * eps)

    @staticmethod
    def of(norm: RmsNorm) -> UnitNorm:
        """Return the norm of a module."""
        weight = norm.weight
        return UnitNorm(torch.tensor((weight.numel() * norm.eps) ** 0.5, device=weight.device))

    def __call__(self, x: Tensor) -> Tensor:
        """Return x (..., n) / sqrt(|x|^2 + n eps)."""
        x32 = x.float()
        length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        return torch.div(x32, length.hypot_(self.floor)).to(x.dtype)


def folded(norm: RmsNorm, weight: Tensor) -> Tensor:
    """Return weight (out, n) transposed, so that `UnitNorm` before it gives norm and matrix."""
    scale = norm.weight.detach() * norm.weight.numel() ** 0.5
    return torch.mul(weight.detach(), scale).t().contiguous()


@dataclass(frozen=True)
class PackedAttention:
    """
    The projections of one attention.

    Its rows lie as they are projected, (rows, heads + 2 kv_heads, d): the keys and values of
    a position are kept beside its queries, which saves every copy.
    """

    heads: int
    kv_heads: int
    head_dim: int
    weight: Tensor  # (out, n), queries, keys, values
    unit: UnitNorm | None  # of queries and keys, where they have one
    scale: Tensor  # (heads + kv_heads, d), their norm weights; 1 / sqrt(d) in the queries
    out: Tensor  # (heads * d, H)

    @staticmethod
    def of(attn: Attention) -> PackedAttention:
        """Return the projections of a module, with neighbours paired in queries and keys."""
        order = pairs(attn.head_dim).to(attn.q_proj.weight.device)

        def paired(linear: nn.Linear) -> Tensor:
            rows = linear.weight.detach().view(-1, attn.head_dim, linear.in_features)
            return rows.index_select(1, order).flatten(0, 1)

        weight = torch.cat((paired(attn.q_proj), paired(attn.k_proj),
                            attn.v_proj.weight.detach()))
        root = attn.head_dim ** 0.5
        out, unit = attn.o_proj.weight.detach().t().contiguous(), None
        scale = weight.new_ones((attn.heads + attn.kv_heads, attn.head_dim))
        scale[:attn.heads] /= root
        if isinstance(attn.q_norm, RmsNorm):
            # the query's own sqrt(d) and the softmax's 1 / sqrt(d) cancel
            q_norm, k_norm = attn.norms
            scale = torch.cat((q_norm.weight.detach()[order].expand(attn.heads, -1),
                               k_norm.weight.detach()[order].expand(attn.kv_heads, -1) * root))
            unit = UnitNorm.of(q_norm)
        return PackedAttention(attn.heads, attn.kv_heads, attn.head_dim, weight, unit, scale, out)

    def lay(self, rows: Tensor, cis: Tensor) -> None:
        """Norm and turn queries and keys of projected rows (rows, heads + 2 kv_heads, d)."""
        turning = rows[:, :self.heads + self.kv_heads]
        turn_pairs(self.normed(turning).mul_(self.scale), cis, turning)

    def normed(self, rows: Tensor) -> Tensor:
        """Return queries or keys (..., d) at length one, or a copy where they have no norm."""
        return rows.clone() if self.unit is None else self.unit(rows)

    def attend(self, rows: Tensor, count: int, visible: Tensor | None = None) -> Tensor:
        """
        Return (count, heads * d) for the last `count` of `lay`'s rows over all of them.

        visible: (count, rows) bool, who sees whom; None: everything is seen.
        """
        seen = rows.transpose(0, 1)[None]
        keys = seen[:, self.heads:self.heads + self.kv_heads]
        mixed = functional.scaled_dot_product_attention(
            seen[:, :self.heads, -count:], keys, seen[:, self.heads + self.kv_heads:],
            None if visible is None else visible[None, None], scale=1.0,
            enable_gqa=self.heads != self.kv_heads)
        return mixed.transpose(1, 2).reshape(count, -1)


@dataclass(frozen=True)
class PackedMlp:
    """The end of a layer: the attention's out-projection, and the gated MLP."""

    out: Tensor  # (heads * d, H)
    unit: UnitNorm
    gate_up: Tensor  # (H, 2 * intermediate)
    down: Tensor  # (intermediate, H)

    @staticmethod
    def of(attn: PackedAttention, norm: RmsNorm, mlp: SwiGlu) -> PackedMlp:
        """Return the end of a layer from its modules."""
        joined = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        return PackedMlp(attn.out, UnitNorm.of(norm), folded(norm, joined),
                         mlp.down_proj.weight.detach().t().contiguous())

    def __call__(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output (rows, H) from its input and the attention result."""
        x = torch.addmm(x, mixed, self.out)
        joined = torch.mm(self.unit(x), self.gate_up)
        middle = self.down.shape[0]
        gated = functional.silu(joined[:, :middle]).mul_(joined[:, middle:])
        return torch.addmm(x, gated, self.down)


class PackedHead:
    """Final norm and head: logits of the ids that a CoC can have, and the best of them."""

    def __init__(self, draft: Draft) -> None:
        shared = draft.shared
        self._unit = UnitNorm.of(draft.norm)
        self._weight = draft.norm.weight.detach() * draft.cfg.hidden_size ** 0.5
        starts = (0, shared.gap[1])
        self._parts = [(slice(start, start + len(rows)), rows.t())
                       for start, rows in zip(starts, shared.rows) if len(rows)]
        self.used = max(part.stop for part, _ in self._parts)
        self.ids = draft.draft_ids

    def fill(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """
        Fill logits (rows, V_d) fp32 of hidden (rows, H); return the columns that can win.

        The columns of forbidden ids are left as they are, at -inf.
        """
        normed = self._unit(hidden).mul_(self._weight)
        for part, rows in self._parts:
            logits[:, part] = torch.mm(normed.to(rows.dtype), rows)
        return logits[:, :self.used]


class TokenTable:
    """
    Something that depends on one token alone, made in advance where the vocabulary is small.

    `make` maps embeddings (rows, H) to (rows, width).
    """

    def __init__(self, draft: Draft, width: int, make: Callable[[Tensor], Tensor]) -> None:
        self._draft, self._make = draft, make
        self._rows: Tensor | None = None
        if draft.cfg.target_vocab * width <= TABLE_NUMBERS:
            ids = torch.arange(draft.cfg.target_vocab, device=draft.fc.weight.device)
            self._rows = make(draft.embed(ids))

    def __call__(self, ids: Tensor) -> Tensor:
        """Return (rows, width) of target ids (rows,) int64."""
        if self._rows is None:
            return self._make(self._draft.embed(ids))
        return self._rows.index_select(0, ids)


class PackedCorrection:
    """The left-to-right walk over the offsets of a block, see `dflash.Correction`."""

    def __init__(self, draft: Dflash, correction: Correction, used: int) -> None:
        self._draft = draft
        self._before = correction.before.detach().float()
        self._after = correction.after.detach().float()[:used].t().contiguous()

    def __call__(self, anchor: Tensor, logits: Tensor, best: Tensor) -> None:
        """
        Correct logits (rows, used) in place and fill the best head rows, best (rows,) int64.

        anchor: (1,) int64 target id before the first row.
        """
        chosen = self._draft.draft_index(anchor)
        chosen = torch.where(chosen < 0, len(self._before) - 1, chosen)
        for row, choice in zip(logits[:, None], best[:, None]):
            row.addmm_(self._before.index_select(0, chosen), self._after)
            chosen = torch.argmax(row, dim=-1, out=choice)
