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
"""The proposals of a guessed text in one small kernel; the reference is in `cuda_guess`."""

from __future__ import annotations

from torch import Tensor
import triton
import triton.language as tl

from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.launch import options

_P, _GENERATED = tl.constexpr(Slot.P), tl.constexpr(Slot.GENERATED)


@triton.jit
def _guess(frame, tokens, text, proposals, last, ROOM: tl.constexpr, RR: tl.constexpr,
           B: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr):
    index, block = tl.arange(0, RR), tl.arange(0, BB)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    said, length = tl.load(frame + _GENERATED), tl.load(text + ROOM)
    first = tl.load(frame + _P) + 1 - said
    known = (index < ROOM) & (index < said)
    there = tl.load(tokens + tl.minimum(first + index, last), mask=known, other=0)
    guessed = tl.load(text + index, mask=known, other=0)
    apart = tl.sum((known & (there != guessed)).to(tl.int32), 0)
    following = said + block
    taken = (block < B - 1) & (following < length) & (apart == 0)
    tl.store(proposals + block, tl.load(text + following, mask=taken, other=0), mask=taken)


def guess(frame: Tensor, tokens: Tensor, text: Tensor, proposals: Tensor) -> None:
    """Overwrite proposals (B - 1,), see `cuda_guess.guess`."""
    room, width = len(text) - 1, len(proposals) + 1
    _guess[(1,)](frame, tokens, text, proposals, len(tokens) - 1, ROOM=room,
                 RR=triton.next_power_of_2(room), B=width, BB=triton.next_power_of_2(width),
                 num_warps=1, **options())
