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
How blocks of one launch hand in their parts and divide what is left.

A block stores its part and counts itself; the last few of those that belong together wait for
one another and divide what is left among them, row by row, so which of them does a row changes
no bit. Waiting needs room for the others: the blocks that wait are always fewer than the
multiprocessors, and those still to come run on the rest. The count only grows (int64), so nobody
resets it: a launch adds a whole multiple of its blocks. The order is the memory model's: stores,
the block's barrier, an atomic that releases; an atomic that acquires, the block's barrier, loads.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
import triton
import triton.language as tl

#: by device, kind of launch, blocks of a group and number of groups
_ARRIVALS: dict[tuple[torch.device, str, int, int], Tensor] = {}


def arrivals(device: torch.device, kind: str, blocks: int, groups: int) -> Tensor:
    """Return counters of groups of so many blocks each; made in warm-up, like all scratch."""
    key = device, kind, blocks, groups
    if key not in _ARRIVALS:
        _ARRIVALS[key] = torch.zeros(groups, dtype=torch.int64, device=device)
    return _ARRIVALS[key]


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many blocks run at once at least; 1 where they run one behind the other."""
    if device.type == 'cpu':
        return 1
    if device.type == 'meta':  # compiled only: an H100 or H200
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def joiners(device: torch.device, groups: int, most: int) -> int:
    """Return how many blocks may divide a group's work: a power of two that never deadlocks."""
    count = 1
    while 2 * count <= most and groups * (2 * count - 1) < multiprocessors(device):
        count *= 2
    return count


@triton.jit
def arrive(counter, COUNT: tl.constexpr, shares):
    """Count this block; return its share of what is left, negative for none, and the goal."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem='acq_rel')
    ticket = before % COUNT
    return (ticket - (COUNT - shares)).to(tl.int32), before - ticket + COUNT, before + 1


@triton.jit
def wait(counter, goal, seen):
    """Wait until all of the group have arrived."""
    while seen < goal:
        seen = tl.atomic_add(counter, 0, sem='acquire')
