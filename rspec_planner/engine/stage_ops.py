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
The operations that an exported graph must express as one ONNX node each.

In eager mode they are plain PyTorch, so that a stage module can be run and compared as it is;
on export they become the nodes that inference engines map to their own layers: the in-place
cache update (TensorScatter), the rotary (RotaryEmbedding) and the attention (Attention), all
of opset 24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

OPSET = 24


@torch.library.custom_op('rspec::kv_update', mutates_args=())
def kv_update(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """
    Return cache (B, heads, C, d) with rows (B, heads, S, d) written at start (B,) int64.

    An engine writes in place: the result is bound to the buffer of the cache.
    """
    index = start[:, None] + torch.arange(rows.shape[2], device=rows.device)
    index = index[:, None, :, None].expand_as(rows)
    return cache.scatter(2, index, rows)


@kv_update.register_fake
def _(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    return torch.empty_like(cache)


@torch.library.custom_op('rspec::rope', mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, heads, S, d) turned by cos, sin (B, S, d / 2), pairing i with i + d / 2."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """
    Return (B, heads, S, d) of q (B, heads, S, d) over k, v (B, kv_heads, K, d).

    mask: additive, broadcastable to (B, heads, S, K), or None where everything is seen.
    """
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return how `torch.onnx.export` writes these operations."""
    from onnxscript.onnx_opset import opset24 as op

    def write_update(cache: Any, rows: Any, start: Any) -> Any:
        return op.TensorScatter(cache, rows, start, axis=-2, mode='linear')

    def write_rope(x: Any, cos: Any, sin: Any) -> Any:
        return op.RotaryEmbedding(x, cos, sin, interleaved=0)

    return {torch.ops.rspec.kv_update.default: write_update,
            torch.ops.rspec.rope.default: write_rope}
