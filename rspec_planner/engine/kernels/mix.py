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
Attention in one launch: it may join its own parts, and make its own queries, keys and values.

The last blocks of a row tile and KV head join its parts, see `arrive`. A block turns the queries
of its heads, and the rows of its own chunk that this launch writes, before it reads them back.
Sums are in the order of the launches apart (`attention`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
import triton
import triton.language as tl

from rspec_planner.engine.kernels.arrive import arrivals, arrive, joiners, wait
from rspec_planner.engine.kernels.attention import (
    _halves,
    _join,
    _LOG2E,
    _scan,
    _scratch,
    _store,
    Cut,
    CUTS,
)
from rspec_planner.engine.kernels.launch import options

#: most blocks that divide a join, and rows that one of them joins at once
JOINERS, JOINED = 8, 8


@triton.jit
def _turned(x, y, norm, cos, sin, angle, ok, eps, D: tl.constexpr):
    """Return both halves normed and turned by table rows `angle`, see `attention._rotate`."""
    HALF: tl.constexpr = D // 2
    cols = tl.arange(0, HALF)
    turn = angle[:, None] * HALF + cols[None, :]
    c, s = tl.load(cos + turn, mask=ok, other=0.0), tl.load(sin + turn, mask=ok, other=0.0)
    root = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
    x *= root * tl.load(norm + cols).to(tl.float32)[None, :]
    y *= root * tl.load(norm + HALF + cols).to(tl.float32)[None, :]
    return x * c - y * s, y * c + x * s


@triton.jit
def _write(qkv, part_stride, row_stride, k_base, v_base, k_norm, cos, sin, angle, slot, low,
           high, eps, head, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
           PARTS: tl.constexpr):
    """
    Write keys and values of this launch's rows low .. high - 1 of one head.

    Tiles of eight rows are `_rotate`'s: more would change the order of the norm's sum. Two at a
    time, all of both loaded first.
    """
    HALF: tl.constexpr = D // 2
    cols = tl.arange(0, HALF)
    for base in range(low, high, 16):
        one, two = base + tl.arange(0, 8), base + 8 + tl.arange(0, 8)
        ok = (one < high)[:, None] & (cols < HALF)[None, :]
        too = (two < high)[:, None] & (cols < HALF)[None, :]
        source = qkv + (HEADS + head) * D + cols[None, :]
        more = source + two.to(tl.int64)[:, None] * row_stride
        source += one.to(tl.int64)[:, None] * row_stride
        kx, ky = _halves(source, part_stride, ok, HALF, PARTS)
        lx, ly = _halves(more, part_stride, too, HALF, PARTS)
        vx, vy = _halves(source + KV * D, part_stride, ok, HALF, PARTS)
        wx, wy = _halves(more + KV * D, part_stride, too, HALF, PARTS)
        kx, ky = _turned(kx, ky, k_norm, cos, sin, tl.maximum(angle + one, 0), ok, eps, D)
        lx, ly = _turned(lx, ly, k_norm, cos, sin, tl.maximum(angle + two, 0), too, eps, D)
        there, apart = (slot + one)[:, None] * D + cols[None, :], 8 * D
        _store(v_base, there, vx, vy, ok, HALF)
        _store(v_base, there + apart, wx, wy, too, HALF)
        _store(k_base, there, kx, ky, ok, HALF)
        _store(k_base, there + apart, lx, ly, too, HALF)


@triton.jit
def _piece(mixed, peak, total, place, top, ok, part: tl.constexpr, COUNT: tl.constexpr,
           STEP: tl.constexpr, D: tl.constexpr, RB: tl.constexpr):
    """Return what one part adds to the weights and results of RB rows."""
    if part < COUNT:
        spot = place + part * STEP
        high = tl.load(peak + spot, mask=ok, other=float('-inf'), cache_modifier='.cg')
        weight = tl.load(total + spot, mask=ok, other=0.0, cache_modifier='.cg')
        acc = tl.load(mixed + spot[:, None] * D + tl.arange(0, D)[None, :], mask=ok[:, None],
                      other=0.0, cache_modifier='.cg')
        used = high > float('-inf')
        factor = tl.where(used, tl.exp2(high - top), 0.0)
        return (tl.where(used, factor * weight, 0.0),
                tl.where(used[:, None], acc * factor[:, None], 0.0))
    else:
        return tl.zeros((RB,), tl.float32), tl.zeros((RB, D), tl.float32)


@triton.jit
def _quarter(mixed, peak, total, place, top, ok, part: tl.constexpr, COUNT: tl.constexpr,
             STEP: tl.constexpr, D: tl.constexpr, RB: tl.constexpr):
    """Return the sums of every fourth part: weights as lanes, results as a thread adds them."""
    w, a = _piece(mixed, peak, total, place, top, ok, part, COUNT, STEP, D, RB)
    x, b = _piece(mixed, peak, total, place, top, ok, part + 4, COUNT, STEP, D, RB)
    y, c = _piece(mixed, peak, total, place, top, ok, part + 8, COUNT, STEP, D, RB)
    z, d = _piece(mixed, peak, total, place, top, ok, part + 12, COUNT, STEP, D, RB)
    weight, result = (w + y) + (x + z), a + b + c + d
    for more in tl.static_range(part + 16, COUNT, 4):
        w, a = _piece(mixed, peak, total, place, top, ok, more, COUNT, STEP, D, RB)
        weight += w
        result += a
    return weight, result


@triton.jit
def _join_rows(mixed, peak, total, out, first, unit, head, sample, ahead, W,
               COUNT: tl.constexpr, TW: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
               D: tl.constexpr, R: tl.constexpr, RB: tl.constexpr):
    """
    Join the parts of RB rows of a tile.

    The order is that of `attention._join`, whose four warps take every fourth part each and whose
    lanes hold one weight each. It is written down here, since the layout of a tile of several
    rows is the compiler's choice.
    """
    G: tl.constexpr = HEADS // KV
    STEP: tl.constexpr = KV * R
    rows, dims = first + tl.arange(0, RB), tl.arange(0, D)
    at = ahead + rows // G
    ok = (rows < TW * G) & (at < W)
    place = (unit * COUNT * KV + head) * R + rows
    top = tl.full((RB,), float('-inf'), tl.float32)
    for part in tl.static_range(COUNT):
        top = tl.maximum(top, tl.load(peak + place + part * STEP, mask=ok, other=0.0,
                                      cache_modifier='.cg'))
    w, a = _quarter(mixed, peak, total, place, top, ok, 0, COUNT, STEP, D, RB)
    x, b = _quarter(mixed, peak, total, place, top, ok, 1, COUNT, STEP, D, RB)
    y, c = _quarter(mixed, peak, total, place, top, ok, 2, COUNT, STEP, D, RB)
    z, d = _quarter(mixed, peak, total, place, top, ok, 3, COUNT, STEP, D, RB)
    weight, result = (w + y) + (x + z), (a + c) + (b + d)
    to = ((sample * W + at) * HEADS + head * G + rows % G) * D
    tl.store(out + to[:, None] + dims[None, :],
             (result / weight[:, None]).to(out.dtype.element_ty), mask=ok[:, None])


@triton.jit
def _divide(mixed, peak, total, out, counters, unit, head, sample, ahead, W, shares,
            COUNT: tl.constexpr, TW: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
            D: tl.constexpr, R: tl.constexpr, RB: tl.constexpr):
    """Hand a part in; the last blocks of a row tile and KV head join its parts."""
    counter = counters + unit * KV + head
    share, goal, seen = arrive(counter, COUNT, shares)
    if share >= 0:
        wait(counter, goal, seen)
        rest = R // shares
        for each in range(share * rest, (share + 1) * rest, RB):
            _join_rows(mixed, peak, total, out, each, unit, head, sample, ahead, W, COUNT, TW,
                       HEADS, KV, D, R, RB)


@triton.jit
def _query(qkv, k_base, v_base, q_norm, k_norm, cos, sin, slot, angle, eps, part_stride,
           row_stride, rows, at, ok, head, first, last, mine, W,
           HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
           PARTS: tl.constexpr):
    """Return a tile's queries, turned; write this launch's rows first .. last - 1, if mine."""
    G: tl.constexpr = HEADS // KV
    HALF: tl.constexpr = D // 2
    where, turn, cols = tl.load(slot).to(tl.int32), tl.load(angle), tl.arange(0, HALF)
    both = ok & (cols < HALF)[None, :]
    x, y = _halves(qkv + at.to(tl.int64)[:, None] * row_stride
                   + (head * G + rows % G)[:, None] * D + cols[None, :], part_stride, both, HALF,
                   PARTS)  # on their way while rows are written
    if mine:
        low, high = tl.maximum(first - where, 0), tl.minimum(last - where, W)
        if low < high:
            _write(qkv, part_stride, row_stride, k_base, v_base, k_norm, cos, sin, turn, where,
                   low, high, eps, head, HEADS, KV, D, PARTS)
            tl.debug_barrier()  # the scan reads them back, this block's threads only
    x, y = _turned(x, y, q_norm, cos, sin, tl.maximum(turn + at, 0), both, eps, D)
    kind = k_base.dtype.element_ty
    return tl.reshape(tl.permute(tl.join(x.to(kind), y.to(kind)), (0, 2, 1)), (R, D))


@triton.jit(do_not_specialize=['W', 'blocks', 'shares'])
def _mix(q, keys, values, own_keys, own_values, start, own_low, mixed, peak, total, out, counters,
         q_norm, k_norm, cos, sin, slot, angle, eps, sample_stride, row_stride, part_stride, scale,
         cache_head, own_sample, own_head, W, blocks, shares, TW: tl.constexpr,
         HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
         SIZE: tl.constexpr, CHUNKS: tl.constexpr, OWN: tl.constexpr, CAUSAL: tl.constexpr,
         TURN: tl.constexpr, PARTS: tl.constexpr, JOIN: tl.constexpr, RB: tl.constexpr,
         PDL: tl.constexpr):
    head, chunk, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = HEADS // KV
    COUNT: tl.constexpr = CHUNKS + (OWN > 0)
    sample, ahead, rows = unit // blocks, unit % blocks * TW, tl.arange(0, R)
    at, dims = ahead + rows // G, tl.arange(0, D)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, low = tl.load(start).to(tl.int32), tl.load(own_low).to(tl.int32)
    if chunk < CHUNKS:
        spot = head.to(tl.int64) * cache_head
        k_base, v_base = keys + spot, values + spot
        first, low, limit = chunk * SIZE, 0, tl.zeros((R,), tl.int32) + begin
        last = tl.minimum(first + SIZE, begin)
        if CAUSAL:
            limit += at + 1
            last = tl.minimum(first + SIZE, begin + tl.minimum(ahead + TW, W))
    else:
        spot = sample.to(tl.int64) * own_sample + head.to(tl.int64) * own_head
        k_base, v_base = own_keys + spot, own_values + spot
        first, last, limit = 0, OWN, tl.full((R,), OWN, tl.int32)
    ok = ((rows < TW * G) & (at < W))[:, None]
    if TURN:
        query = _query(q + sample.to(tl.int64) * sample_stride, k_base, v_base, q_norm, k_norm,
                       cos, sin, slot, angle, eps, part_stride, row_stride, rows, at, ok, head,
                       first, last, (OWN == 0) | (chunk == CHUNKS), W, HEADS, KV, D, R, PARTS)
    else:
        place = ((sample * W + at) * HEADS + head * G + rows % G)[:, None] * D
        query = tl.load(q + place + dims[None, :], mask=ok, other=0.0)
    high, weight, acc = _scan(query, k_base, v_base, first, last, low, limit, scale, R, D, BN)
    part = ((unit * COUNT + chunk) * KV + head) * R + rows
    tl.store(peak + part, high)
    if first < last:
        tl.store(total + part, weight)
        tl.store(mixed + part[:, None] * D + dims[None, :], acc)
    if JOIN:
        _divide(mixed, peak, total, out, counters, unit, head, sample, ahead, W, shares, COUNT,
                TW, HEADS, KV, D, R, RB)


def attend(q: Tensor, out: Tensor, *, start: Tensor, cache: tuple[Tensor, Tensor] | None = None,
           own: tuple[Tensor, Tensor] | None = None, causal: bool = True,
           own_low: Tensor | None = None) -> None:
    """Fill out (Z * W, heads * d) in one launch, see `reference.attend`."""
    _launch(q, out, None, True, start, cache, own, causal, own_low)


def mix(qkv: Tensor, norms: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], slot: Tensor,
        angle: Tensor, out: Tensor, eps: float, *, start: Tensor,
        cache: tuple[Tensor, Tensor] | None = None, own: tuple[Tensor, Tensor] | None = None,
        causal: bool = True, own_low: Tensor | None = None, joined: bool = False) -> None:
    """Fill out (Z * W, heads * d) and write keys and values, see `reference.mix`."""
    _launch(qkv, out, _Turn(norms, tables, slot, angle, eps), joined, start, cache, own, causal,
            own_low)


@dataclass(frozen=True)
class _Turn:
    """What queries and keys are normed and turned by, see `reference.rotate`."""

    norms: tuple[Tensor, Tensor]
    tables: tuple[Tensor, Tensor]
    slot: Tensor
    angle: Tensor
    eps: float


def _launch(q: Tensor, out: Tensor, turn: _Turn | None, joined: bool, start: Tensor,
            cache: tuple[Tensor, Tensor] | None, own: tuple[Tensor, Tensor] | None,
            causal: bool, own_low: Tensor | None) -> None:
    """Attend to q (Z, W, heads, d), or to parts (S, Z, W, heads + 2 kv_heads, d) to be turned."""
    given = cache if cache is not None else own
    assert given is not None
    (k, v), (own_k, own_v) = given, own if own is not None else given
    kv = k.shape[0] if cache is not None else own_k.shape[1]
    samples, rows, heads, dim = q.shape[-4:]
    strides = q.stride(-4), q.stride(-3), q.stride(0) if turn is not None else 0
    heads -= 2 * kv if turn is not None else 0
    by = turn or _Turn((q, q), (q, q), start, start, 0.0)
    cut: Cut = CUTS['causal' if causal else 'all']
    chunks = triton.cdiv(k.shape[1], cut.chunk) if cache is not None else 0
    parts, owned = chunks + (own is not None), own_k.shape[2] if own is not None else 0
    tall = min(cut.rows, rows) if not causal else cut.rows
    blocks, tile = triton.cdiv(rows, tall), max(16, triton.next_power_of_2(tall * heads // kv))
    groups = samples * blocks * kv
    mixed, peak, total = _scratch(q.device, groups * parts * tile, dim)
    shape = {'TW': tall, 'HEADS': heads, 'KV': kv, 'D': dim, 'R': tile}
    shares = joiners(q.device, groups, min(JOINERS, parts, tile))
    _mix[(kv, parts, samples * blocks)](
        q, k, v, own_k, own_v, start, start if own_low is None else own_low, mixed, peak, total,
        out, arrivals(q.device, 'attention', parts, groups), *by.norms, *by.tables, by.slot,
        by.angle, by.eps, *strides, dim ** -0.5 * _LOG2E, k.stride(0), own_k.stride(0),
        own_k.stride(1), rows, blocks, shares, **shape, BN=cut.step, SIZE=cut.chunk, CHUNKS=chunks,
        OWN=owned, CAUSAL=causal, TURN=turn is not None,
        PARTS=len(q) if turn is not None else 1, JOIN=joined,
        RB=min(JOINED, tile // JOINERS), num_warps=cut.warps, num_stages=cut.stages, **options())
    if not joined:
        _join[(rows * heads // kv, kv, samples)](
            mixed, peak, total, out, rows, blocks, PARTS=parts, PP=triton.next_power_of_2(parts),
            **shape, num_warps=4, **options())
