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
The decoder layer for export, shared by the stages that run it.

Same weights and same arithmetic as `model.layer`, written so that an exported graph has fixed
shapes, keeps every start and length on the device, updates its caches in place and says who
sees whom in an explicit additive mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.engine.stage_ops import rope
from rspec_planner.model.layer import Attention, DecoderLayer, RmsNorm

#: ends the name of an output that is bound to the buffer of the input it is named after
IN_PLACE = '_out'


class Stage(nn.Module):
    """One graph: named tensors in, named tensors out; parameters are named as stored."""

    name: ClassVar[str]

    def examples(self) -> dict[str, Tensor]:
        """Return inputs of the right names, shapes and dtypes, without memory behind them."""
        raise NotImplementedError

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs; '<x>_out' is input x with rows replaced."""
        raise NotImplementedError


def blank(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return zeros of a shape that occupy one number."""
    return torch.zeros((), dtype=dtype).expand(shape)


@dataclass(frozen=True)
class Tables:
    """Cosine and sine of the rows at hand, (1, S, d / 2) fp32."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def rows(inputs: Mapping[str, Tensor], index: Tensor) -> Tables:
        """Take rows index (S,) int64 of the inputs 'cos' and 'sin' (R, d / 2)."""
        return Tables(*(inputs[name].index_select(0, index)[None] for name in ('cos', 'sin')))

    def turn(self, x: Tensor) -> Tensor:
        """Return x (1, heads, S, d) turned; fp32 arithmetic whatever its dtype, as in model."""
        turned: Tensor = rope(x.float(), self.cos, self.sin)
        return turned.to(x.dtype)


def norm(module: RmsNorm, x: Tensor) -> Tensor:
    """Return the norm of x in one node, its statistics in fp32."""
    return functional.rms_norm(x, module.weight.shape, module.weight, module.eps)


def project(attn: Attention, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (1, heads, S, d) and k, v (1, kv_heads, S, d) of normed x, q and k turned."""
    shape = (*x.shape[:2], -1, attn.head_dim)
    q = norm(attn.norms[0], attn.q_proj(x).view(shape)).transpose(1, 2)
    return tables.turn(q), *keys_values(attn, x, tables)


def keys_values(attn: Attention, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Return k, v (1, kv_heads, S, d) of normed x (1, S, H), k turned."""
    shape = (*x.shape[:2], -1, attn.head_dim)
    k = norm(attn.norms[1], attn.k_proj(x).view(shape)).transpose(1, 2)
    return tables.turn(k), attn.v_proj(x).view(shape).transpose(1, 2)


def joined_heads(mixed: Tensor) -> Tensor:
    """Return (1, S, heads * d) of attention results (1, heads, S, d)."""
    return mixed.transpose(1, 2).flatten(2)


def finish(layer: DecoderLayer, x: Tensor, mixed: Tensor) -> Tensor:
    """Return the layer's output from its input (1, S, H) and attention (1, heads, S, d)."""
    x = x + layer.self_attn.o_proj(joined_heads(mixed))
    out: Tensor = x + layer.mlp(norm(layer.post_attention_layernorm, x))
    return out


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask (1, 1, S, K) of visible (S, K) bool; finite, so that no row is NaN."""
    zero = torch.zeros((), dtype=dtype)
    return torch.where(visible, zero, torch.finfo(dtype).min)[None, None]
