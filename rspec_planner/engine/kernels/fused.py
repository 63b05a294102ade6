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
Launches that do the work of two: what follows a launch is done by the last blocks to arrive.

A block stores its part and counts itself; the last few of those that belong together wait for
one another and divide what is left among them, row by row, so which of them does a row changes
no bit. Waiting needs room for the others: the blocks that wait are always fewer than the
multiprocessors, and those still to come run on the rest. The count only grows (int64), so nobody
resets it: a launch adds a whole multiple of its blocks. The order is the memory model's: stores,
the block's barrier, an atomic that releases; an atomic that acquires, the block's barrier, loads.

Attention may also make its own queries, keys and values: a block turns the queries of its heads,
and the rows of its own chunk that this launch writes, before it reads them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as cached

import torch
from torch import Tensor
import triton
import triton.language as tl

from rspec_planner.engine.kernels.attention import (
    _join,
    _LOG2E,
    _scan,
    _scratch,
    Cut,
    CUTS,
)
from rspec_planner.engine.kernels.launch import options
from rspec_planner.engine.kernels.linear import (
    _most_shared,
    _walk,
    fitted,
    Plan,
    plan_of,
    row_tile,
)

#: most blocks that divide a join, rows that one of them joins at once, most that divide a sum
JOINERS, JOINED, SUMMERS = 8, 8, 64
#: counters of one kind of launch: groups of blocks that belong together
_GROUPS = 4096
_ARRIVALS: dict[tuple[torch.device, str, int], Tensor] = {}


def _arrivals(device: torch.device, kind: str, blocks: int) -> Tensor:
    """Return the counters of launches whose groups have so many blocks; made in warm-up."""
    key = device, kind, blocks
    if key not in _ARRIVALS:
        _ARRIVALS[key] = torch.zeros(_GROUPS, dtype=torch.int64, device=device)
    return _ARRIVALS[key]


@cached
def multiprocessors(device: torch.device) -> int:
    """Return how many blocks run at once at least; 1 where they run one behind the other."""
    if device.type == 'cpu':
        return 1
    if device.type == 'meta':  # compiled only: an H100 or H200
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def joiners(device: torch.device, groups: int, blocks: int, rows: int) -> int:
    """Return how many blocks divide a group's join: a power of two that can never deadlock."""
    count, most = 1, min(JOINERS, blocks, rows)
    while 2 * count <= most and groups * (2 * count - 1) < multiprocessors(device):
        count *= 2
    return count


@triton.jit
def _arrive(counter, COUNT: tl.constexpr, shares):
    """Count this block; return its share of what is left, negative for none, and the goal."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem='acq_rel')
    ticket = before % COUNT
    return (ticket - (COUNT - shares)).to(tl.int32), before - ticket + COUNT, before + 1


@triton.jit
def _wait(counter, goal, seen):
    """Wait until all of the group have arrived."""
    while seen < goal:
        seen = tl.atomic_add(counter, 0, sem='acquire')


@triton.jit
def _halves(source, part_stride, ok, HALF: tl.constexpr, PARTS: tl.constexpr):
    """Return both halves of some heads, the sums of their parts, see `attention._rotate`."""
    x = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(source + part * part_stride, mask=ok, other=0.0).to(tl.float32)
        y += tl.load(source + part * part_stride + HALF, mask=ok, other=0.0).to(tl.float32)
    return x, y


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
def _store(base, there, x, y, ok, HALF: tl.constexpr):
    tl.store(base + there, x.to(base.dtype.element_ty), mask=ok)
    tl.store(base + there + HALF, y.to(base.dtype.element_ty), mask=ok)


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
def _join_rows(mixed, peak, total, out, first, unit, head, sample, ahead, W,
               COUNT: tl.constexpr, PP: tl.constexpr, LOG: tl.constexpr, TW: tl.constexpr,
               HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
               RB: tl.constexpr):
    """Join the parts of RB rows of a tile, in the order of `attention._join`."""
    G: tl.constexpr = HEADS // KV
    rows, parts, dims = first + tl.arange(0, RB), tl.arange(0, PP), tl.arange(0, D)
    at = ahead + rows // G
    ok = (rows < TW * G) & (at < W)
    place = ((unit * COUNT + parts)[None, :] * KV + head) * R + rows[:, None]
    real = (parts < COUNT)[None, :] & ok[:, None]
    high = tl.load(peak + place, mask=real, other=float('-inf'), cache_modifier='.cg')
    weights = tl.load(total + place, mask=real, other=0.0, cache_modifier='.cg')
    acc = tl.load(mixed + place[:, :, None] * D + dims[None, None, :], mask=real[:, :, None],
                  other=0.0, cache_modifier='.cg')
    used = high > float('-inf')
    factor = tl.where(used, tl.exp2(high - tl.max(high, 1)[:, None]), 0.0)
    weight = tl.where(used, factor * weights, 0.0)
    for half in tl.static_range(LOG):  # pairs are added in the order of one warp's lanes
        weight = tl.sum(tl.reshape(weight, (RB, 2, PP >> (half + 1))), 1)
    weight = tl.reshape(weight, (RB,))
    result = tl.sum(tl.where(used[:, :, None], acc * factor[:, :, None], 0.0), 1)
    to = ((sample * W + at) * HEADS + head * G + rows % G) * D
    tl.store(out + to[:, None] + dims[None, :],
             (result / weight[:, None]).to(out.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=['W', 'blocks', 'shares'])
def _mix(q, keys, values, own_keys, own_values, start, own_low, mixed, peak, total, out,
         arrivals, q_norm, k_norm, cos, sin, slot, angle, eps, sample_stride, row_stride,
         part_stride, scale, cache_head, own_sample, own_head, W, blocks, shares,
         TW: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
         R: tl.constexpr, BN: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr,
         OWN: tl.constexpr, CAUSAL: tl.constexpr, TURN: tl.constexpr, PARTS: tl.constexpr,
         JOIN: tl.constexpr, RB: tl.constexpr, PP: tl.constexpr, LOG: tl.constexpr,
         PDL: tl.constexpr):
    head, chunk, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = HEADS // KV
    HALF: tl.constexpr = D // 2
    COUNT: tl.constexpr = CHUNKS + (OWN > 0)
    sample, ahead = unit // blocks, unit % blocks * TW
    rows, dims = tl.arange(0, R), tl.arange(0, D)
    at = ahead + rows // G
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    ok = ((rows < TW * G) & (at < W))[:, None]
    if TURN:
        qkv = q + sample.to(tl.int64) * sample_stride
        where, turn = tl.load(slot).to(tl.int32), tl.load(angle)
        cols = tl.arange(0, HALF)
        both = ok & (cols < HALF)[None, :]
        x, y = _halves(qkv + at.to(tl.int64)[:, None] * row_stride
                       + (head * G + rows % G)[:, None] * D + cols[None, :], part_stride, both,
                       HALF, PARTS)  # on their way while rows are written
        if OWN == 0 or chunk == CHUNKS:
            mine, end = tl.maximum(first - where, 0), tl.minimum(last - where, W)
            if mine < end:
                _write(qkv, part_stride, row_stride, k_base, v_base, k_norm, cos, sin, turn,
                       where, mine, end, eps, head, HEADS, KV, D, PARTS)
                tl.debug_barrier()  # the scan reads them back, this block's threads only
        x, y = _turned(x, y, q_norm, cos, sin, tl.maximum(turn + at, 0), both, eps, D)
        pair = tl.join(x.to(keys.dtype.element_ty), y.to(keys.dtype.element_ty))
        query = tl.reshape(tl.permute(pair, (0, 2, 1)), (R, D))
    else:
        place = (sample * W + at) * HEADS + head * G + rows % G
        query = tl.load(q + place[:, None] * D + dims[None, :], mask=ok, other=0.0)
    high, weight, acc = _scan(query, k_base, v_base, first, last, low, limit, scale, R, D, BN)
    part = ((unit * COUNT + chunk) * KV + head) * R
    tl.store(peak + part + rows, high)
    if first < last:
        tl.store(total + part + rows, weight)
        tl.store(mixed + (part + rows)[:, None] * D + dims[None, :], acc)
    if JOIN:
        counter = arrivals + unit * KV + head
        share, goal, seen = _arrive(counter, COUNT, shares)
        if share >= 0:
            _wait(counter, goal, seen)
            rest = R // shares
            for each in range(share * rest, (share + 1) * rest, RB):
                _join_rows(mixed, peak, total, out, each, unit, head, sample, ahead, W, COUNT,
                           PP, LOG, TW, HEADS, KV, D, R, RB)


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
    wide = triton.next_power_of_2(parts)
    shares = joiners(q.device, groups, parts, tile)
    _mix[(kv, parts, samples * blocks)](
        q, k, v, own_k, own_v, start, start if own_low is None else own_low, mixed, peak, total,
        out, _arrivals(q.device, 'attention', parts), *by.norms, *by.tables, by.slot,
        by.angle, by.eps, *strides, dim ** -0.5 * _LOG2E, k.stride(0), own_k.stride(0),
        own_k.stride(1), rows, blocks, shares, **shape, BN=cut.step, SIZE=cut.chunk, CHUNKS=chunks,
        OWN=owned, CAUSAL=causal, TURN=turn is not None,
        PARTS=len(q) if turn is not None else 1, JOIN=joined,
        RB=max(1, min(JOINED, 128 // wide, tile // JOINERS)), PP=wide,
        LOG=wide.bit_length() - 1, num_warps=cut.warps, num_stages=cut.stages, **options())
    if not joined:
        _join[(rows * heads // kv, kv, samples)](
            mixed, peak, total, out, rows, blocks, PARTS=parts, PP=wide, **shape, num_warps=4,
            **options())


@triton.jit
def _sum_row(parts, residual, total, norm, out, row, eps, residual_stride, total_stride,
             part_stride, N: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr):
    """Add parts and residual of one row up and norm the sum, see `rows._gather`."""
    cols = tl.arange(0, WIDE)
    ok = cols < N
    wide = tl.load(parts + row * N + cols, mask=ok, other=0.0, cache_modifier='.cg')
    for part in tl.static_range(1, SPLIT):
        wide += tl.load(parts + part * part_stride + row * N + cols, mask=ok, other=0.0,
                        cache_modifier='.cg')
    wide += tl.load(residual + row * residual_stride + cols, mask=ok, other=0.0).to(tl.float32)
    if norm is not None:
        factor = tl.load(norm + cols, mask=ok, other=0.0).to(tl.float32)
    kept = wide.to(total.dtype.element_ty)
    tl.store(total + row * total_stride + cols, kept, mask=ok)
    if norm is not None:
        wide = kept.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
        wide *= factor
        tl.store(out + row * N + cols, wide.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=['M', 'shares'])
def _close(x, weight, parts, residual, total, norm, out, arrivals, eps,
           x_stride, residual_stride, total_stride, M, shares,
           N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           BK: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    tile, part = tl.program_id(0), tl.program_id(1)
    rows, cols = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    TILES: tl.constexpr = (K + BK - 1) // BK
    PER: tl.constexpr = (TILES + SPLIT - 1) // SPLIT
    COUNT: tl.constexpr = (N + BN - 1) // BN * SPLIT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc, _ = _walk(x, weight, x_stride, rows, cols, part * PER,
                   tl.minimum(part * PER + PER, TILES), M, N, K, BM, BN, BK, False)
    spot = (part * M + rows)[:, None] * N + cols[None, :]
    tl.store(parts + spot, acc, mask=(rows < M)[:, None] & (cols < N)[None, :])
    share, goal, seen = _arrive(arrivals, COUNT, shares)
    if share >= 0:
        _wait(arrivals, goal, seen)
        for row in range(share, M, shares):
            _sum_row(parts, residual, total, norm, out, row, eps, residual_stride, total_stride,
                     M * N, N, WIDE, SPLIT)


def close(x: Tensor, weight: Tensor, parts: Tensor, residual: Tensor, total: Tensor,
          norm: Tensor | None, out: Tensor, eps: float, *, width: int = 0,
          plan: Plan | None = None) -> None:
    """Fill total (M, N) and out (M, N), see `reference.close`; parts (S, M, N) is room."""
    rows, depth = x.shape
    columns, bm = len(weight), row_tile(max(rows, width))
    plan = fitted(plan or plan_of(columns, depth, bm, False), bm, False, x.element_size(),
                  _most_shared(x.device))
    grid = triton.cdiv(columns, plan.bn), plan.split
    shares = max(1, min(rows, SUMMERS, grid[0] * grid[1], multiprocessors(x.device) - 1))
    _close[grid](
        x, weight, parts, residual, total, norm, out,
        _arrivals(x.device, 'product', grid[0] * grid[1]), eps, x.stride(0), residual.stride(0),
        total.stride(0), rows, shares, N=columns, K=depth, BM=bm, BN=plan.bn, BK=plan.bk,
        SPLIT=plan.split, WIDE=triton.next_power_of_2(columns), num_warps=plan.warps,
        num_stages=plan.stages, **options())
