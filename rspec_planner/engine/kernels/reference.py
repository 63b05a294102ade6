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
The kernels of the device-resident frame as plain PyTorch, on any device and in any float dtype.

The Triton kernels beside this file must equal these functions up to rounding; CPUs run them.
Every function fills buffers that the caller owns and reads positions from tensors, never from
Python numbers, so that the same calls can be captured in a CUDA graph. The arithmetic is at
least fp32 whatever the dtype of the buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.model.rope import rotate as rotate_half

__all__ = ['accept', 'add_norm', 'add_rows', 'attend', 'begin', 'choose', 'close', 'gate',
           'gather', 'linear', 'mix', 'norm', 'product', 'replay', 'rotate', 'turn']


def _wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 where it is."""
    return x if x.dtype == torch.float64 else x.float()


def linear(x: Tensor, weight: Tensor, out: Tensor, *, norm: Tensor | None = None,
           eps: float = 0.0, residual: Tensor | None = None, gated: bool = False,
           scale: Tensor | None = None, width: int = 0) -> None:
    """
    Fill out (M, N) with x (M, K) times weight (N, K) transposed.

    norm: (K,), x goes through an RMSNorm of this weight first. residual: (M, N), added.
    gated: weight is (2 N, K), gate above up, and out = silu(gate) * up. scale: (rows of weight,)
    fp32 factors of an fp8 weight. width: the most rows whose results must equal these bit for
    bit, for kernels whose rounding would depend on M.
    """
    wide = _wide(x)
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(norm)
    product = wide @ weight.to(wide.dtype).t()
    if scale is not None:
        product = product * scale
    if gated:
        gate, up = product.chunk(2, dim=-1)
        product = functional.silu(gate) * up
    if residual is not None:
        product = product + _wide(residual)
    out.copy_(product)


def product(x: Tensor, weight: Tensor, parts: Tensor, *, width: int = 0) -> int:
    """
    Fill the first parts of (S, M, N), at least fp32, and return how many they are.

    Their sum is x (M, K) times weight (N, K) transposed. width: see `linear`.
    """
    wide = _wide(x)
    parts[0].copy_(wide @ weight.to(wide.dtype).t())
    return 1


def gather(parts: Tensor, residual: Tensor, total: Tensor, weight: Tensor | None, out: Tensor,
           eps: float) -> None:
    """
    Fill total (M, N) with the sum of parts (S, M, N) and residual (M, N), which it may be.

    weight: (N,), then out (M, N) gets the RMSNorm of the total as rounded; None leaves out alone.
    """
    total.copy_(parts.sum(0) + _wide(residual))
    if weight is not None:
        norm(total, weight, out, eps)


def close(x: Tensor, weight: Tensor, parts: Tensor, residual: Tensor, total: Tensor,
          norm: Tensor | None, out: Tensor, eps: float, *, width: int = 0) -> None:
    """Run `product` of x (M, K) and weight (N, K) into room (S, M, N), and `gather` behind it."""
    count = product(x, weight, parts, width=width)
    gather(parts[:count], residual, total, norm, out, eps)


def norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """Fill out (M, N) with the RMSNorm of x (M, N), weight (N,)."""
    wide = _wide(x)
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(weight))


def add_norm(x: Tensor, add: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor,
             eps: float) -> None:
    """
    Add (M, N) to x in its place and fill out with the LayerNorm of the sum.

    weight, bias: (N,). The sum is rounded to the dtype of x before it is normed.
    """
    if add is not None:
        x.add_(add)
    out.copy_(functional.layer_norm(_wide(x), weight.shape, _wide(weight), _wide(bias), eps))


def turn(qkv: Tensor, tables: tuple[Tensor, Tensor], q: Tensor, k: Tensor) -> None:
    """
    Fill q and k (N, P, heads, d) with the queries and keys of N images, turned.

    qkv: (N, P, 3, heads, d); tables: cos and sin (P, d) fp32 of `rope.vision_cos_sin`.
    """
    for part, to in enumerate((q, k)):
        to.copy_(rotate_half(qkv[:, :, part].transpose(1, 2), *tables).transpose(1, 2))


def add_rows(x: Tensor, index: Tensor, add: Tensor) -> None:
    """Add (n, N) to rows index (n,) int64 of x (S, N) in its place, each row at most once."""
    x.index_copy_(0, index, x.index_select(0, index).add_(add))


def gate(joined: Tensor, out: Tensor) -> None:
    """Fill out (M, N) with silu(gate) * up of joined (M, 2 N), gate first."""
    gated, up = _wide(joined).chunk(2, dim=-1)
    out.copy_(functional.silu(gated) * up)


def rotate(qkv: Tensor, norms: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor],
           slot: Tensor, angle: Tensor, q: Tensor | None, keys: Tensor, values: Tensor,
           eps: float) -> None:
    """
    Norm and turn queries and keys, and put keys and values where attention reads them.

    qkv: (Z, W, heads + 2 kv_heads, d) projections of Z samples of W rows, rows may be strided;
    with a dimension more in front, the parts whose sum they are.
    norms: weights (d,) of queries and keys. tables: cos and sin (rows, d / 2) fp32.
    slot, angle: one-element tensors; row w goes to row slot + w of keys and values
    (Z, kv_heads, rows, d), turned by table row max(angle + w, 0).
    q: (Z, W, heads, d), or None where qkv holds only keys and values.
    """
    if qkv.dim() == 5:
        qkv = qkv.sum(0)
    kv_heads, rows = keys.shape[1], qkv.shape[1]
    heads = qkv.shape[2] - 2 * kv_heads
    index = torch.arange(rows, device=qkv.device)
    turned = (angle + index).clamp(min=0)
    cos, sin = (_wide(table.index_select(0, turned))[:, None] for table in tables)

    def turn(part: Tensor, weight: Tensor) -> Tensor:
        wide = _wide(part)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(weight)
        low, high = wide.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    if q is not None:
        q.copy_(turn(qkv[:, :, :heads], norms[0]))
    at = slot + index
    made = turn(qkv[:, :, heads:heads + kv_heads], norms[1]).to(keys.dtype)
    keys.index_copy_(2, at, made.transpose(1, 2))
    values.index_copy_(2, at, qkv[:, :, heads + kv_heads:].transpose(1, 2).to(values.dtype))


def attend(q: Tensor, out: Tensor, *, start: Tensor, cache: tuple[Tensor, Tensor] | None = None,
           own: tuple[Tensor, Tensor] | None = None, causal: bool = True,
           own_low: Tensor | None = None) -> None:
    """
    Fill out (Z * W, heads * d) with grouped-query attention of q (Z, W, heads, d).

    cache: keys and values (kv_heads, capacity, d) that all samples share. Row w sees the cache
    rows below start + w + 1 (causal) or below start. own: keys and values (Z, kv_heads, O, d) of
    each sample, behind the cache, of which rows own_low .. O - 1 are seen by all. start,
    own_low: one-element tensors.
    """
    samples, rows, heads, dim = q.shape
    index = torch.arange(rows, device=q.device)
    keys, values, seen = [], [], []
    if cache is not None:
        limit = start + index + 1 if causal else start.expand(rows)
        seen.append(torch.arange(cache[0].shape[1], device=q.device) < limit[:, None])
        keys.append(cache[0].expand(samples, -1, -1, -1))
        values.append(cache[1].expand(samples, -1, -1, -1))
    if own is not None:
        visible = torch.arange(own[0].shape[2], device=q.device) >= (
            own_low if own_low is not None else 0)
        seen.append(visible.expand(rows, -1))
        keys.append(own[0])
        values.append(own[1])
    k, v = (_wide(torch.cat(parts, dim=2)) for parts in (keys, values))
    group = heads // k.shape[1]
    folded = _wide(q).view(samples, rows, k.shape[1], group, dim).permute(0, 2, 1, 3, 4)
    scores = torch.einsum('zkwgd,zknd->zkwgn', folded, k) * dim ** -0.5
    scores = scores.masked_fill(~torch.cat(seen, dim=1)[:, None], float('-inf'))
    mixed = torch.einsum('zkwgn,zknd->zwkgd', scores.softmax(-1), v)
    out.copy_(mixed.reshape(samples * rows, heads * dim))


def mix(qkv: Tensor, norms: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], slot: Tensor,
        angle: Tensor, out: Tensor, eps: float, *, start: Tensor,
        cache: tuple[Tensor, Tensor] | None = None, own: tuple[Tensor, Tensor] | None = None,
        causal: bool = True, own_low: Tensor | None = None, joined: bool = False) -> None:
    """
    Run `rotate` on parts (S, Z, W, heads + 2 kv_heads, d) and `attend` behind it.

    Keys and values go to own where it is given, else to the cache, which one sample alone
    writes. joined: in one launch, where a launch is one.
    """
    keys, values = own if own is not None else [x[None] for x in cache or ()]
    heads = qkv.shape[3] - 2 * keys.shape[1]
    q = keys.new_empty((*qkv.shape[1:3], heads, qkv.shape[4]))
    rotate(qkv, norms, tables, slot, angle, q, keys, values, eps)
    attend(q, out, start=start, cache=cache, own=own, causal=causal, own_low=own_low)


def choose(x: Tensor, weight: Tensor, best: Tensor, *, norm: Tensor, eps: float,
           forbidden: tuple[int, int] = (0, 0), ids: Tensor | None = None,
           width: int = 0) -> None:
    """
    Fill best (M,) int64 with the most likely token of each row of x (M, K).

    Final norm (K,), head weight (V, K) and argmax, of which ids in [forbidden[0], forbidden[1])
    are no candidates. ids: (V,) target ids of a reduced head. Equal logits: the smaller row.
    width: as in `linear`.
    """
    wide = _wide(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(norm)
    logits = wide @ weight.to(wide.dtype).t()
    logits[:, forbidden[0]:forbidden[1]] = float('-inf')
    found = logits.argmax(dim=-1)
    best.copy_(found if ids is None else ids[found])


def begin(frame: Tensor, tokens: Tensor, proposals: Tensor | None, ids: Tensor,
          follow: tuple[int, int]) -> None:
    """
    Fill ids (B,) int64, the block that the next verify reads, and the frame's start and angle.

    frame: (Slot.SIZE,) int64. While tokens are being committed the block is the anchor and the
    proposals (B - 1,), behind follow[0] always follow[1], see `decode.accept.apply_follow`.
    Once the text is complete, the block holds the committed tokens whose rows are missing, and
    the end token behind them.
    """
    width = len(ids)
    index = torch.arange(width, device=ids.device)
    frame[Slot.START] = frame[Slot.CACHED]
    frame[Slot.ANGLE] = frame[Slot.CACHED] + frame[Slot.ROPE_DELTA]
    at = frame[Slot.CACHED] + index
    said = torch.where(at <= frame[Slot.P], tokens[at.clamp(max=len(tokens) - 1)],
                       frame[Slot.END_ID])
    block = said
    if proposals is not None:
        block = torch.cat((said[:1], proposals))
        plain = block != follow[0]
        last_plain = torch.where(plain, index, -1).cummax(0).values
        odd = (index - last_plain) % 2 == 1  # an odd run of heralds ends here
        ruled = torch.cat((odd.new_zeros(1), odd[:-1]))
        block = torch.where(ruled, follow[1], block)
    ids.copy_(torch.where(frame[Slot.DONE] > 0, said, block))


def accept(frame: Tensor, tokens: Tensor, ids: Tensor, best: Tensor, stops: Tensor,
           counts: Tensor | None = None, *, proposed: Tensor | None = None) -> None:
    """
    Commit what the target confirms of a block, see `decode.accept.accept` for the rule.

    ids: (B,) the block; best: (B,) the target's choice after each of its rows; stops: (n,) ids
    that end a text, -1 for none; counts: (iterations,) int64 receives the number committed,
    None for a prefill, which is no iteration. proposed: one-element tensor, how many of the
    B - 1 proposals are real; None: all.
    A complete text gets the end token appended where it is not the last one already; DONE then
    asks for the missing rows, and ACTIVE falls when the context is complete.
    """
    width = len(ids)
    index = torch.arange(width, device=ids.device)
    closing = frame[Slot.DONE] > 0
    p, cached = frame[Slot.P].clone(), frame[Slot.CACHED].clone()
    passed = torch.zeros(width, dtype=torch.bool, device=ids.device)
    passed[:-1] = ids[1:] == best[:-1]
    real = width - 1 if proposed is None else proposed
    matched = (passed & (index < real)).long().cumprod(0).sum()
    halts = (best[:, None] == stops).any(1) & (index <= matched)
    first_stop = torch.where(halts, index + 1, width + 1).amin()
    room = frame[Slot.LIMIT] - frame[Slot.GENERATED]
    count = torch.minimum(torch.minimum(matched + 1, first_stop), room)
    stopped = first_stop <= count
    count, stopped = torch.where(closing, 0, count), stopped & ~closing
    at = (p + 1 + index).clamp(max=len(tokens) - 1)
    tokens.index_copy_(0, at, torch.where(index < count, best, tokens[at]))
    last = p + count
    ended = stopped | (~closing & (count == room))
    append = ended & (tokens[last] != frame[Slot.END_ID])
    last = last + append
    tokens[last] = torch.where(append, frame[Slot.END_ID], tokens[last])
    rows = torch.where(closing, torch.minimum(p + 1, cached + width),
                       p + 1 + torch.minimum(matched, count))
    frame[Slot.P], frame[Slot.CACHED] = last, rows
    frame[Slot.GENERATED] += count
    frame[Slot.STOPPED] |= stopped
    frame[Slot.DONE] = closing | ended
    frame[Slot.ACTIVE] = ~(frame[Slot.DONE] > 0) | (rows <= last)
    frame[Slot.CLOSING] += closing & (cached <= p)
    frame[Slot.CONTEXT] = last + 1
    frame[Slot.CONTEXT_ANGLE] = last + 1 + frame[Slot.ROPE_DELTA]
    if counts is not None:
        turn = frame[Slot.ITERATION].clamp(max=len(counts) - 1)
        counts[turn] = torch.where(closing, counts[turn], count)
        frame[Slot.ITERATION] += ~closing


def replay(frame: Tensor, script: Tensor, matches: Tensor, proposals: Tensor,
           wrong: int) -> None:
    """
    Overwrite proposals (B - 1,) so that a known number of them is right.

    script: (capacity,) int64, the greedy text behind the prompt, index 0 its first token.
    matches: (iterations,) int64, how many proposals of each iteration are right; the next one
    is `wrong` instead. Measures a loop at a given accepted length with random weights.
    """
    index = torch.arange(len(proposals), device=proposals.device)
    at = (frame[Slot.GENERATED] + index).clamp(max=len(script) - 1)
    right = matches[frame[Slot.ITERATION].clamp(max=len(matches) - 1)]
    proposals.copy_(torch.where(index < right, script[at], wrong))
