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
The decoder layer that the text decoder and the action expert share, at their own widths.

Grouped-query attention and SwiGLU. Qwen3's layer has an RMSNorm on each query and key head before
the rotary and no biases; Qwen2.5's has no such norm and biases on queries, keys and values.
Weights keep the names and the separate matrices of released checkpoints; `pack` joins them for
inference without copying them twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import TextConfig
from rspec_planner.model.rope import rotate, signed_sin, turn

NO_QK_NORM = ('this decoder has no QK-norm, which the CUDA kernels and exported graphs expect: '
              'run it with the PyTorch executors')


class RmsNorm(nn.Module):
    """Root-mean-square norm; statistics in fp32 because fp16 squares of activations overflow."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised over its last dimension, in the dtype of x."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x (..., d) over its root mean square, times weight (d,) or (heads, d)."""
    if x.device.type == 'cpu' and not torch.is_grad_enabled():
        # half the passes over memory that functional.rms_norm takes there
        x32 = x.float()
        scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        scale = scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
        return (x32 * weight).mul_(scale).to(x.dtype)
    if x.dtype == weight.dtype and weight.dim() == 1:
        return functional.rms_norm(x, weight.shape, weight, eps)
    normed = functional.rms_norm(x.float(), x.shape[-1:], None, eps)
    return (normed * weight.float()).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
           causal: bool = False) -> Tensor:
    """
    Grouped-query attention.

    q: (B, heads, S, d); k, v: (B, kv_heads, K, d), heads a multiple of kv_heads.
    mask: None (all visible) or additive, broadcastable to (B, 1, group * S, K), see
    `fold_mask`; causal: S = K rows that see themselves and the rows before.
    Returns (B, S, heads * d).
    """
    batch, heads, rows, dim = q.shape
    if causal:
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=heads != k.shape[1])
    else:
        # the heads that share a KV head become rows of one attention: no repeated KV
        folded = q.reshape(batch, k.shape[1], -1, dim)
        mixed = functional.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        mixed = mixed.reshape(batch, heads, rows, dim)
    return mixed.transpose(1, 2).reshape(batch, rows, heads * dim)


def fold_mask(visible: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask of `attend` for visible (B or 1, 1, S, K) booleans."""
    additive = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float('-inf'))
    return additive.repeat(1, 1, group, 1)


class Attention(nn.Module):
    """
    The projections of one attention; who sees whom is decided by the caller.

    bias: of queries, keys and values; the output has none. qk_norm: False leaves `q_norm` and
    `k_norm` without weights and without effect.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int,
                 eps: float, *, bias: bool = False, qk_norm: bool = True) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = RmsNorm(head_dim, eps) if qk_norm else nn.Identity()
        self.k_norm = RmsNorm(head_dim, eps) if qk_norm else nn.Identity()

    @property
    def norms(self) -> tuple[RmsNorm, RmsNorm]:
        """Return the norms of queries and keys; ConfigurationError where there are none."""
        if isinstance(self.q_norm, RmsNorm) and isinstance(self.k_norm, RmsNorm):
            return self.q_norm, self.k_norm
        raise ConfigurationError(NO_QK_NORM)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, heads, S, d) and k, v (B, kv_heads, S, d), q and k normed and turned."""
        shape = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), cos, sin)
        return q, k, self.v_proj(x).view(shape).transpose(1, 2)


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)), no bias."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., hidden)."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _adjacent(weights: list[Tensor]) -> Tensor | None:
    """Return one view of matrices (rows, n) that lie behind each other, None if they do not."""
    first, rows, end = weights[0], 0, weights[0].storage_offset()
    for weight in weights:
        if weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() \
                or weight.storage_offset() != end or not weight.is_contiguous():
            return None
        rows, end = rows + weight.shape[0], end + weight.numel()
    return first.as_strided((rows, first.shape[1]), first.stride())


def _join(*linears: nn.Linear) -> Tensor:
    """Return the joined weights, transposed; each linear's weight becomes a view of them."""
    weights = [linear.weight.detach() for linear in linears]
    joined = _adjacent(weights)
    if joined is not None:  # a loader allocated them so: no copy, no second peak
        return joined.t()
    stack = torch.cat(weights)
    parts = torch.split(stack, [linear.out_features for linear in linears])
    for linear, part in zip(linears, parts):
        linear.weight.data = part
    return stack.t()


@dataclass(frozen=True)
class PackedLayer:
    """
    One layer for inference: joined projections, no module calls between the operations.

    The matrices alias those of the modules. At one row a time the cost of a layer is the
    number of operations, not their arithmetic.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    input_norm: Tensor
    qkv: Tensor  # (hidden, (heads + 2 kv_heads) * d)
    qk_norm: Tensor | None  # (heads + kv_heads, d)
    out: Tensor  # (heads * d, hidden)
    post_norm: Tensor
    gate_up: Tensor  # (hidden, 2 * intermediate)
    down: Tensor  # (intermediate, hidden)
    qkv_bias: Tensor | None = None  # ((heads + 2 kv_heads) * d,)

    def project(self, x: Tensor, cos: Tensor, signed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v like `DecoderLayer.project`; signed: see `rope.signed_sin`."""
        batch, rows, hidden = x.shape
        turning = self.heads + self.kv_heads
        flat = rms_norm(x.reshape(-1, hidden), self.input_norm, self.eps)
        joined = (torch.mm(flat, self.qkv) if self.qkv_bias is None
                  else torch.addmm(self.qkv_bias, flat, self.qkv))
        joined = joined.view(batch, rows, -1, self.head_dim)
        qk = joined[:, :, :turning]
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, self.eps)
        # heads last but one: the tables broadcast over them
        qk = turn(qk, cos[..., None, :], signed[..., None, :]).transpose(1, 2)
        return qk[:, :self.heads], qk[:, self.heads:], joined[:, :, turning:].transpose(1, 2)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output like `DecoderLayer.finish`."""
        middle = self.down.shape[0]
        flat = torch.addmm(x.reshape(-1, x.shape[-1]), mixed.reshape(-1, mixed.shape[-1]),
                           self.out)
        joined = torch.mm(rms_norm(flat, self.post_norm, self.eps), self.gate_up)
        gated = functional.silu(joined[:, :middle]).mul_(joined[:, middle:])
        return torch.addmm(flat, gated, self.down).view(x.shape)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP; the expert uses the same layer with its own width."""

    def __init__(self, cfg: TextConfig, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.self_attn = Attention(hidden, heads, cfg.num_kv_heads, cfg.head_dim,
                                   cfg.rms_norm_eps, bias=cfg.qkv_bias, qk_norm=cfg.qk_norm)
        self.mlp = SwiGlu(hidden, intermediate)
        self.input_layernorm = RmsNorm(hidden, cfg.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(hidden, cfg.rms_norm_eps)
        self.packed: PackedLayer | None = None

    def pack(self) -> None:
        """Join the projections for inference, see `PackedLayer`."""
        attn, mlp = self.self_attn, self.mlp
        projections = attn.q_proj, attn.k_proj, attn.v_proj
        norms = [norm.weight.detach().expand(heads, -1) for norm, heads in
                 ((attn.q_norm, attn.heads), (attn.k_norm, attn.kv_heads))
                 if isinstance(norm, RmsNorm)]
        biases = [linear.bias.detach() for linear in projections if linear.bias is not None]
        self.packed = PackedLayer(
            attn.heads, attn.kv_heads, attn.head_dim, self.input_layernorm.eps,
            self.input_layernorm.weight.detach(), _join(*projections),
            torch.cat(norms) if norms else None, attn.o_proj.weight.detach().t(),
            self.post_attention_layernorm.weight.detach(),
            _join(mlp.gate_proj, mlp.up_proj), mlp.down_proj.weight.detach().t(),
            torch.cat(biases) if biases else None)

    def train(self, mode: bool = True) -> DecoderLayer:
        """Set the mode; training drops the joined weights, which would go stale."""
        if mode:
            self.packed = None
        super().train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> DecoderLayer:
        self.packed = None  # a move or cast breaks the aliases
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.packed = None
        super()._load_from_state_dict(*args, **kwargs)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v of the normed input, see `Attention.project`."""
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output from its input and the attention result."""
        x = x + self.self_attn.o_proj(mixed)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def runners(layers: nn.ModuleList, sin: Tensor) -> tuple[list[DecoderLayer | PackedLayer], Tensor]:
    """
    Return what runs each layer, and the sine table that its `project` takes.

    Packed layers run where they exist and nobody asks for gradients or mixed precision.
    """
    plain = cast('list[DecoderLayer]', list(layers))
    packed = [layer.packed for layer in plain if layer.packed is not None]
    mixed = torch.is_autocast_enabled(sin.device.type)
    if len(packed) < len(plain) or torch.is_grad_enabled() or mixed:
        return [*plain], sin
    return [*packed], signed_sin(sin)
