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
"""Choice, block and acceptance: the small kernels around the forwards of one iteration."""

from __future__ import annotations

import torch
from torch import Tensor
import triton
import triton.language as tl

from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.launch import options

HEAD_COLUMNS = 64
HEAD_DEPTH = 128
_BIG = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=['M'])
def _head(x, weight, norm, top, arg, x_stride, first, gap, M, N: tl.constexpr,
          K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
          PDL: tl.constexpr):
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    rows, cols = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    ids = tl.where(cols < first, cols, cols + gap)
    row_ok, col_ok = (rows < M)[:, None], cols < N
    acc = tl.zeros((BM, BN), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for at in range(0, K, BK):
        k = at + tl.arange(0, BK)
        k_ok = (k < K)[None, :]
        spot = weight + ids.to(tl.int64)[:, None] * K + k[None, :]
        w = tl.load(spot, mask=col_ok[:, None] & k_ok, other=0.0)
        a = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=row_ok & k_ok, other=0.0)
        factor = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        a = (a.to(tl.float32) * factor[None, :]).to(x.dtype.element_ty)
        acc = tl.dot(a, tl.trans(w), acc, input_precision='ieee')
    acc = tl.where(col_ok[None, :], acc, float('-inf'))
    best = tl.max(acc, 1)
    where = tl.min(tl.where(acc == best[:, None], ids[None, :], _BIG), 1)
    tl.store(top + rows * tiles + tile, best, mask=rows < M)
    tl.store(arg + rows * tiles + tile, where, mask=rows < M)


@triton.jit
def _best(top, arg, ids, best, TILES: tl.constexpr, PT: tl.constexpr, MAPPED: tl.constexpr,
          PDL: tl.constexpr):
    row, tiles = tl.program_id(0), tl.arange(0, PT)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(top + row * TILES + tiles, mask=tiles < TILES, other=float('-inf'))
    index = tl.load(arg + row * TILES + tiles, mask=tiles < TILES, other=_BIG)
    found = tl.min(tl.where(value == tl.max(value, 0), index, _BIG), 0).to(tl.int64)
    if MAPPED:
        found = tl.load(ids + found)
    tl.store(best + row, found)


#: every size that was ever needed stays, because captured graphs keep its address
_TOPS: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}


def _scratch(device: torch.device, size: int) -> tuple[Tensor, Tensor]:
    held = _TOPS.setdefault(device, [])
    if not held or len(held[-1][0]) < size:
        held.append((torch.empty(size, device=device),
                     torch.empty(size, dtype=torch.int32, device=device)))
    return held[-1]


def choose(x: Tensor, weight: Tensor, best: Tensor, *, norm: Tensor, eps: float,
           forbidden: tuple[int, int] = (0, 0), ids: Tensor | None = None,
           width: int = 0) -> None:
    """
    Fill best (M,), see `reference.choose`; no logits are written.

    width: the tile of so many rows, where M is fewer: as in `linear`, one kernel for all M.
    The scale of an RMSNorm moves no maximum, so only its weight is applied and eps is not read.
    """
    rows, depth = x.shape
    first, gap = forbidden[0], min(forbidden[1], len(weight)) - forbidden[0]
    allowed = len(weight) - gap
    tiles = triton.cdiv(allowed, HEAD_COLUMNS)
    top, arg = _scratch(x.device, rows * tiles)
    _head[(tiles,)](x, weight, norm, top, arg, x.stride(0), first, gap, rows, N=allowed,
                    K=depth, BM=max(16, triton.next_power_of_2(max(rows, width))),
                    BN=HEAD_COLUMNS,
                    BK=HEAD_DEPTH, num_warps=4, num_stages=4, **options())
    _best[(rows,)](top, arg, best if ids is None else ids, best, TILES=tiles,
                   PT=triton.next_power_of_2(tiles), MAPPED=ids is not None, num_warps=8,
                   **options())


_CACHED, _P, _DONE = tl.constexpr(Slot.CACHED), tl.constexpr(Slot.P), tl.constexpr(Slot.DONE)
_START, _ANGLE = tl.constexpr(Slot.START), tl.constexpr(Slot.ANGLE)
_DELTA, _END = tl.constexpr(Slot.ROPE_DELTA), tl.constexpr(Slot.END_ID)
_GENERATED, _LIMIT = tl.constexpr(Slot.GENERATED), tl.constexpr(Slot.LIMIT)
_STOPPED, _ACTIVE = tl.constexpr(Slot.STOPPED), tl.constexpr(Slot.ACTIVE)
_ITERATION, _CLOSING = tl.constexpr(Slot.ITERATION), tl.constexpr(Slot.CLOSING)
_CONTEXT, _CONTEXT_ANGLE = tl.constexpr(Slot.CONTEXT), tl.constexpr(Slot.CONTEXT_ANGLE)


@triton.jit
def _begin(frame, tokens, proposals, ids, herald, follower, B: tl.constexpr, BB: tl.constexpr,
           PDL: tl.constexpr):
    index = tl.arange(0, BB)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    cached, p = tl.load(frame + _CACHED), tl.load(frame + _P)
    tl.store(frame + _START, cached)
    tl.store(frame + _ANGLE, cached + tl.load(frame + _DELTA))
    at = cached + index
    said = tl.load(tokens + at, mask=at <= p, other=0)
    said = tl.where(at <= p, said, tl.load(frame + _END))
    proposed = tl.load(proposals + index - 1, mask=(index > 0) & (index < B), other=0)
    block = tl.where(index == 0, said, proposed)
    # an odd run of heralds before an index: the rule applies to it
    before = index[None, :] < index[:, None]
    plain = tl.where(before & (block != herald)[None, :], index[None, :], -1)
    ruled = (index - 1 - tl.max(plain, 1)) % 2 == 1
    block = tl.where(ruled & (index > 0), follower, block)
    block = tl.where(tl.load(frame + _DONE) > 0, said, block)
    tl.store(ids + index, block, mask=index < B)


def begin(frame: Tensor, tokens: Tensor, proposals: Tensor | None, ids: Tensor,
          follow: tuple[int, int]) -> None:
    """Fill ids (B,), see `reference.begin`."""
    _begin[(1,)](frame, tokens, ids if proposals is None else proposals, ids, *follow,
                 B=len(ids), BB=triton.next_power_of_2(len(ids)), num_warps=1, **options())


@triton.jit
def _verdict(frame, ids, best, stops, proposed, B: tl.constexpr, BB: tl.constexpr,
             STOPS: tl.constexpr, PARTIAL: tl.constexpr):
    """Return the target's choices, how many proposals match, and the first stop's number."""
    index = tl.arange(0, BB)
    choice = tl.load(best + index, mask=index < B, other=-2)
    later = tl.load(ids + index + 1, mask=index + 1 < B, other=-3)
    passed = choice == later
    if PARTIAL:
        passed = passed & (index < tl.load(proposed))
    matched = tl.min(tl.where(passed, BB, index), 0).to(tl.int64)
    halts = index < 0
    for stop in tl.static_range(STOPS):
        halts = halts | (choice == tl.load(stops + stop))
    halts = halts & (index <= matched)
    first_stop = tl.min(tl.where(halts, index + 1, BB + 1), 0).to(tl.int64)
    return choice, matched, first_stop


@triton.jit
def _accept(frame, tokens, ids, best, stops, counts, proposed, turns, B: tl.constexpr,
            BB: tl.constexpr, STOPS: tl.constexpr, COUNTED: tl.constexpr, PARTIAL: tl.constexpr,
            PDL: tl.constexpr):
    index = tl.arange(0, BB)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p, cached = tl.load(frame + _P), tl.load(frame + _CACHED)
    generated, end = tl.load(frame + _GENERATED), tl.load(frame + _END)
    closing = tl.load(frame + _DONE) > 0
    choice, matched, first_stop = _verdict(frame, ids, best, stops, proposed, B, BB, STOPS,
                                           PARTIAL)
    room = tl.load(frame + _LIMIT) - generated
    count = tl.minimum(tl.minimum(matched + 1, first_stop), room)
    stopped = (first_stop <= count) & (closing == 0)
    ended = stopped | ((closing == 0) & (count == room))
    count = tl.where(closing, 0, count)
    tl.store(tokens + p + 1 + index, choice, mask=index < count)
    final = tl.sum(tl.where(index == count - 1, choice, 0), 0)
    append = ended & (final != end)
    last = p + count + append.to(tl.int64)
    tl.store(tokens + last, end, mask=append)
    rows = tl.where(closing, tl.minimum(p + 1, cached + B), p + 1 + tl.minimum(matched, count))
    done = closing | ended
    tl.store(frame + _P, last)
    tl.store(frame + _CACHED, rows)
    tl.store(frame + _GENERATED, generated + count)
    tl.store(frame + _STOPPED, tl.load(frame + _STOPPED) | stopped.to(tl.int64))
    tl.store(frame + _DONE, done.to(tl.int64))
    tl.store(frame + _ACTIVE, ((done == 0) | (rows <= last)).to(tl.int64))
    late = closing & (cached <= p)
    tl.store(frame + _CLOSING, tl.load(frame + _CLOSING) + late.to(tl.int64))
    tl.store(frame + _CONTEXT, last + 1)
    tl.store(frame + _CONTEXT_ANGLE, last + 1 + tl.load(frame + _DELTA))
    if COUNTED:
        turn = tl.load(frame + _ITERATION)
        tl.store(counts + tl.minimum(turn, turns - 1), count, mask=closing == 0)
        tl.store(frame + _ITERATION, turn + (closing == 0).to(tl.int64))


def accept(frame: Tensor, tokens: Tensor, ids: Tensor, best: Tensor, stops: Tensor,
           counts: Tensor | None = None, *, proposed: Tensor | None = None) -> None:
    """Commit what the target confirms of a block, see `reference.accept`."""
    _accept[(1,)](frame, tokens, ids, best, stops, frame if counts is None else counts,
                  frame if proposed is None else proposed, 1 if counts is None else len(counts),
                  B=len(ids), BB=triton.next_power_of_2(len(ids)), STOPS=len(stops),
                  COUNTED=counts is not None, PARTIAL=proposed is not None, num_warps=1,
                  **options())


@triton.jit
def _replay(frame, script, matches, proposals, wrong, length, turns, B: tl.constexpr,
            BB: tl.constexpr, PDL: tl.constexpr):
    index = tl.arange(0, BB)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.minimum(tl.load(frame + _GENERATED) + index, length - 1)
    right = tl.load(matches + tl.minimum(tl.load(frame + _ITERATION), turns - 1))
    said = tl.load(script + at)
    tl.store(proposals + index, tl.where(index < right, said, wrong), mask=index < B - 1)


def replay(frame: Tensor, script: Tensor, matches: Tensor, proposals: Tensor,
           wrong: int) -> None:
    """Overwrite proposals (B - 1,) with a script, see `reference.replay`."""
    width = len(proposals) + 1
    _replay[(1,)](frame, script, matches, proposals, wrong, len(script), len(matches), B=width,
                  BB=triton.next_power_of_2(width), num_warps=1, **options())
