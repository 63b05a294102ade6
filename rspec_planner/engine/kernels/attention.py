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
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,misc"
"""
Attention of 1 to 64 rows over a static cache whose length lies in device memory.

The cache is cut into chunks of fixed size (split-KV), one program per chunk and KV head; the
query heads of a group are rows of one tile, so that keys and values are read once. A second
kernel joins the chunks by their log-sum-exp. A causal tile always holds ROWS rows, those that
nobody asked for masked, and the number of rows is an argument: one compiled kernel serves every
width, so a row's bits are the same whether it comes alone or in a block. A tile as high as the
block is not: from 64 rows on the compiler takes other matrix instructions and sums otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
import triton
import triton.language as tl

from rspec_planner.engine.kernels.launch import options


@dataclass(frozen=True)
class Cut:
    """How an attention is cut: rows of a chunk and of one step, most queries of a tile."""

    chunk: int
    step: int
    rows: int
    warps: int
    stages: int = 2


#: rows of a causal tile; every width of a verify takes the same cut
ROWS = 16
CUTS = {'causal': Cut(256, 64, ROWS, 4, 3), 'all': Cut(512, 64, 32, 4, 3)}
_LOG2E = 1.4426950408889634


@triton.jit
def _halves(source, part_stride, ok, HALF: tl.constexpr, PARTS: tl.constexpr):
    """Return both halves of some heads, the sums of their parts."""
    x = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(source + part * part_stride, mask=ok, other=0.0).to(tl.float32)
        y += tl.load(source + part * part_stride + HALF, mask=ok, other=0.0).to(tl.float32)
    return x, y


@triton.jit
def _store(base, there, x, y, ok, HALF: tl.constexpr):
    """Store both halves of some heads."""
    tl.store(base + there, x.to(base.dtype.element_ty), mask=ok)
    tl.store(base + there + HALF, y.to(base.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=['W'])
def _rotate(qkv, q_norm, k_norm, cos, sin, slot, angle, q, keys, values, eps,
            sample_stride, row_stride, kv_sample, kv_head, part_stride, W,
            HEADS: tl.constexpr, KV: tl.constexpr, HB: tl.constexpr,
            D: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    row, block, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HALF: tl.constexpr = D // 2
    heads = tl.arange(0, HB)
    low = heads[:, None] * D + tl.arange(0, HALF)[None, :]
    ok = (heads < KV)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = (qkv + sample.to(tl.int64) * sample_stride + row.to(tl.int64) * row_stride
              + block * KV * D + low)
    x, y = _halves(source, part_stride, ok, HALF, PARTS)
    there = (sample.to(tl.int64) * kv_sample + heads.to(tl.int64)[:, None] * kv_head
             + (tl.load(slot) + row) * D + tl.arange(0, HALF)[None, :])
    if block == (HEADS // KV) + 1:
        _store(values, there, x, y, ok, HALF)
    else:
        turn = tl.maximum(tl.load(angle) + row, 0) * HALF + tl.arange(0, HALF)
        c, s = tl.load(cos + turn)[None, :], tl.load(sin + turn)[None, :]
        root = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        if block < HEADS // KV:
            norm = q_norm
        else:
            norm = k_norm
        x *= root * tl.load(norm + tl.arange(0, HALF)).to(tl.float32)[None, :]
        y *= root * tl.load(norm + HALF + tl.arange(0, HALF)).to(tl.float32)[None, :]
        if block < HEADS // KV:
            to = ((sample.to(tl.int64) * W + row) * HEADS + block * KV) * D + low
            _store(q, to, x * c - y * s, y * c + x * s, ok, HALF)
        else:
            _store(keys, there, x * c - y * s, y * c + x * s, ok, HALF)


def rotate(qkv: Tensor, norms: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor],
           slot: Tensor, angle: Tensor, q: Tensor | None, keys: Tensor, values: Tensor,
           eps: float) -> None:
    """Norm and turn queries and keys, store keys and values, see `reference.rotate`."""
    parts, part_stride = (len(qkv), qkv.stride(0)) if qkv.dim() == 5 else (1, 0)
    if qkv.dim() == 5:
        qkv = qkv[0]
    samples, rows, heads, dim = qkv.shape
    kv = keys.shape[1]
    _rotate[(rows, heads // kv, samples)](
        qkv, norms[0], norms[1], tables[0], tables[1], slot, angle, qkv if q is None else q,
        keys, values, eps, qkv.stride(0), qkv.stride(1), keys.stride(0), keys.stride(1),
        part_stride, rows, HEADS=heads - 2 * kv, KV=kv, HB=triton.next_power_of_2(kv), D=dim,
        PARTS=parts, num_warps=4, **options())


@triton.jit
def _scan(query, k_base, v_base, first, last, low, limit, scale, R: tl.constexpr,
          D: tl.constexpr, BN: tl.constexpr):
    """Return peak, weight and unnormalised result of rows first .. last - 1 of one head."""
    dims = tl.arange(0, D)
    high = tl.full((R,), float('-inf'), tl.float32)
    weight = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, D), tl.float32)
    for at in range(first, last, BN):
        n = at + tl.arange(0, BN)
        spot, ok = n.to(tl.int64)[:, None] * D + dims[None, :], (n < last)[:, None]
        k = tl.load(k_base + spot, mask=ok, other=0.0)
        score = tl.dot(query, tl.trans(k), input_precision='ieee') * scale
        seen = (n[None, :] < limit[:, None]) & (n >= low)[None, :]
        score = tl.where(seen, score, float('-inf'))
        top = tl.maximum(high, tl.max(score, 1))
        safe = tl.where(top == float('-inf'), 0.0, top)
        p, fade = tl.exp2(score - safe[:, None]), tl.exp2(high - safe)
        weight = weight * fade + tl.sum(p, 1)
        v = tl.load(v_base + spot, mask=ok, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision='ieee')
        high = top
    return high, weight, acc


@triton.jit(do_not_specialize=['W', 'blocks'])
def _chunk(q, keys, values, own_keys, own_values, start, own_low, mixed, peak, total,
           scale, cache_head, own_sample, own_head, W, blocks,
           TW: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
           R: tl.constexpr, BN: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr,
           OWN: tl.constexpr, CAUSAL: tl.constexpr, PDL: tl.constexpr):
    head, chunk, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = HEADS // KV
    sample, ahead = unit // blocks, unit % blocks * TW
    rows, dims = tl.arange(0, R), tl.arange(0, D)
    at = ahead + rows // G
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = (sample * W + at) * HEADS + head * G + rows % G
    query = tl.load(q + place[:, None] * D + dims[None, :],
                    mask=((rows < TW * G) & (at < W))[:, None], other=0.0)
    begin = tl.load(start).to(tl.int32)
    if chunk < CHUNKS:
        k_base = keys + head.to(tl.int64) * cache_head
        v_base = values + head.to(tl.int64) * cache_head
        first, low = chunk * SIZE, 0
        limit = tl.zeros((R,), tl.int32) + begin
        last = tl.minimum(first + SIZE, begin)
        if CAUSAL:
            limit += at + 1
            last = tl.minimum(first + SIZE, begin + tl.minimum(ahead + TW, W))
    else:
        k_base = own_keys + sample.to(tl.int64) * own_sample + head.to(tl.int64) * own_head
        v_base = own_values + sample.to(tl.int64) * own_sample + head.to(tl.int64) * own_head
        first, low, last = 0, tl.load(own_low).to(tl.int32), OWN
        limit = tl.zeros((R,), tl.int32) + OWN
    high, weight, acc = _scan(query, k_base, v_base, first, last, low, limit, scale, R, D, BN)
    part = ((unit * (CHUNKS + (OWN > 0)) + chunk) * KV + head) * R
    tl.store(peak + part + rows, high)
    if first < last:
        tl.store(total + part + rows, weight)
        tl.store(mixed + (part + rows)[:, None] * D + dims[None, :], acc)


@triton.jit(do_not_specialize=['W', 'blocks'])
def _join(mixed, peak, total, out, W, blocks, PARTS: tl.constexpr, PP: tl.constexpr,
          TW: tl.constexpr,
          HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
          PDL: tl.constexpr):
    row, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = HEADS // KV
    parts, dims = tl.arange(0, PP), tl.arange(0, D)
    unit = sample * blocks + row // (TW * G)
    place = ((unit * PARTS + parts) * KV + head) * R + row % (TW * G)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    real = parts < PARTS
    high = tl.load(peak + place, mask=real, other=float('-inf'))
    weights = tl.load(total + place, mask=real, other=0.0)  # those of unused parts mean nothing,
    acc = tl.load(mixed + place[:, None] * D + dims[None, :], mask=real[:, None], other=0.0)
    used = high > float('-inf')  # but nothing waits for the peaks to be known
    factor = tl.where(used, tl.exp2(high - tl.max(high, 0)), 0.0)
    weight = tl.sum(tl.where(used, factor * weights, 0.0), 0)
    result = tl.sum(tl.where(used[:, None], acc * factor[:, None], 0.0), 0) / weight
    to = ((sample * W + row // G) * HEADS + head * G + row % G) * D
    tl.store(out + to + dims, result.to(out.dtype.element_ty))


#: every size that was ever needed stays, because captured graphs keep its address
_PARTS: dict[torch.device, list[tuple[Tensor, Tensor, Tensor]]] = {}


def _scratch(device: torch.device, rows: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for the chunks' results; grown in warm-up, so that a capture finds it."""
    held = _PARTS.setdefault(device, [])
    if not held or len(held[-1][1]) < rows or len(held[-1][0]) < rows * dim:
        held.append((torch.empty(rows * max(dim, 128), device=device),
                     torch.empty(rows, device=device), torch.empty(rows, device=device)))
    return held[-1]


def attend(q: Tensor, out: Tensor, *, start: Tensor, cache: tuple[Tensor, Tensor] | None = None,
           own: tuple[Tensor, Tensor] | None = None, causal: bool = True,
           own_low: Tensor | None = None) -> None:
    """Fill out (Z * W, heads * d), see `reference.attend`; heads * W per group."""
    samples, rows, heads, dim = q.shape
    k, v = cache if cache is not None else (q, q)
    own_k, own_v = own if own is not None else (q, q)
    kv = k.shape[0] if cache is not None else own_k.shape[1]
    cut = CUTS['causal' if causal else 'all']
    chunks = triton.cdiv(k.shape[1], cut.chunk) if cache is not None else 0
    parts, owned = chunks + (own is not None), own_k.shape[2] if own is not None else 0
    tall = min(cut.rows, rows) if not causal else cut.rows
    blocks, tile = triton.cdiv(rows, tall), max(16, triton.next_power_of_2(tall * heads // kv))
    mixed, peak, total = _scratch(q.device, samples * blocks * parts * kv * tile, dim)
    shape = {'TW': tall, 'HEADS': heads, 'KV': kv, 'D': dim, 'R': tile}
    _chunk[(kv, parts, samples * blocks)](
        q, k, v, own_k, own_v, start, start if own_low is None else own_low, mixed, peak, total,
        dim ** -0.5 * _LOG2E, k.stride(0),
        own_k.stride(0), own_k.stride(1), rows, blocks,
        **shape, BN=cut.step, SIZE=cut.chunk, CHUNKS=chunks, OWN=owned, CAUSAL=causal,
        num_warps=cut.warps, num_stages=cut.stages, **options())
    _join[(rows * heads // kv, kv, samples)](
        mixed, peak, total, out, rows, blocks, PARTS=parts, PP=triton.next_power_of_2(parts),
        **shape, num_warps=4, **options())
