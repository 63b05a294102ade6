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
Ask for the weights of the next product while this kernel leaves memory idle.

Between two products lie a norm, a rotation or an attention whose time is latency, and every
product ends with a tail in which few programs still read. A kernel that is told what comes next
asks the second-level cache for it (`cp.async.bulk.prefetch.L2`, PTX ISA 8.0, sm_90): no register,
no shared memory, and no result that could change. Every row of the next weight gets its first
columns, in each part of a split K, because all programs of a product begin there at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
import triton
import triton.language as tl

MIB = 1 << 20
#: most bytes that the end of a product and an attention ask for; 0 asks for nothing
BUDGET = {'product': 12 * MIB, 'attention': 32 * MIB}
#: arguments of every kernel that asks, which must not make another kernel of it
ASKED = ('ask_size', 'ask_rows', 'ask_stride', 'ask_parts', 'ask_turns')
_GRAIN = 128  # bytes of a cache line


@dataclass(frozen=True)
class Ahead:
    """The bytes that a launch asks for: `size` at each of `parts` places of every row."""

    weight: Tensor
    rows: int
    stride: int  # bytes of a row
    parts: int
    size: int

    @staticmethod
    def of(weight: Tensor, parts: int, budget: int) -> Ahead | None:
        """Return what a budget of bytes allows of a contiguous weight (N, K), None if nothing."""
        stride = weight.shape[1] * weight.element_size()
        size = min(budget // (len(weight) * parts), stride // parts) // _GRAIN * _GRAIN
        if size == 0 or stride // parts % 16 or not weight.is_contiguous():
            return None
        return Ahead(weight, len(weight), stride, parts, size)


def keywords(ahead: Ahead | None, programs: int, warps: int) -> dict[str, Any]:
    """Return the arguments of a launch of so many programs that asks ahead."""
    if ahead is None:
        return {'ASK': False, 'ask_size': 0, 'ask_rows': 0, 'ask_stride': 0, 'ask_parts': 0,
                'ask_turns': 0}
    return {'ASK': True, 'ask_size': ahead.size, 'ask_rows': ahead.rows,
            'ask_stride': ahead.stride, 'ask_parts': ahead.parts,
            'ask_turns': triton.cdiv(ahead.rows * ahead.parts, programs * 32 * warps)}


@contextmanager
def budget(product: int, attention: int) -> Iterator[None]:
    """Launch, or capture, with other budgets in this block."""
    before = dict(BUDGET)
    BUDGET.update(product=product, attention=attention)
    try:
        yield
    finally:
        BUDGET.update(before)


def possible(device: torch.device) -> bool:
    """Return whether the device knows the instruction; 'meta' stands for one that does."""
    return device.type == 'meta' or (
        device.type == 'cuda' and torch.cuda.get_device_capability(device) >= (9, 0))


@triton.jit
def ask(weight, program, programs, size, rows, stride, parts, turns, THREADS: tl.constexpr):
    """Ask for this program's share, one request a thread and turn."""
    base = weight.to(tl.int64)
    for turn in range(turns):
        item = (turn * programs + program) * THREADS + tl.arange(0, THREADS)
        item = tl.minimum(item, rows * parts - 1)
        spot = base + (item // parts).to(tl.int64) * stride + (item % parts) * (stride // parts)
        tl.inline_asm_elementwise('cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;',
                                  '=r,l,r', [spot, tl.zeros((THREADS,), tl.int32) + size],
                                  dtype=tl.int32, is_pure=False, pack=1)
