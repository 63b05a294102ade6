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
What a build may take from the machine: how much memory is left, and how much was used at most.

A build that swaps freezes the machine for minutes, and one that is killed says nothing; so a
build asks first and gives up in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
import re

from rspec_planner.errors import EngineError

MIB = 2**20
#: what the rest of the machine keeps while a build runs
RESERVE_BYTES = 768 * MIB
#: memory of a build beside its constants; 36 layers of 4096 with weights as inputs take this
BASE_BYTES = 1024 * MIB
#: anonymous memory per byte of constants: they are held by parser, optimiser and plan
BYTES_PER_CONSTANT_BYTE = 2.2

_CGROUP = Path('/sys/fs/cgroup')
_STATUS = Path('/proc/self/status')
_CLEAR = Path('/proc/self/clear_refs')


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the memory that this process may still take, in bytes; a container's limit counts."""
    import psutil
    free = int(psutil.virtual_memory().available)
    limit, used = _number(cgroup / 'memory.max'), _number(cgroup / 'memory.current')
    if limit is not None and used is not None:
        match = re.search(r'^inactive_file (\d+)', _text(cgroup / 'memory.stat'), re.MULTILINE)
        free = min(free, limit - used + (int(match[1]) if match else 0))
    return free


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding='ascii')
    except (OSError, UnicodeDecodeError):
        return ''


def _number(path: Path) -> int | None:
    """Return the number in a file; None for 'max' or no file."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def needed_bytes(constant_bytes: int) -> int:
    """Return an upper estimate of a build's memory, in bytes, from the bytes of its constants."""
    return BASE_BYTES + int(BYTES_PER_CONSTANT_BYTE * constant_bytes)


def check_memory(stage: str, constant_bytes: int) -> None:
    """Raise EngineError when a build of so many bytes of constants would swap."""
    needed, free = needed_bytes(constant_bytes), available_bytes() - RESERVE_BYTES
    if needed > free:
        raise EngineError(
            f'building {stage} needs about {needed // MIB} MiB of memory '
            f'({constant_bytes // MIB} MiB of constants) and {max(free, 0) // MIB} MiB are free: '
            'end other programs, raise the limit of the container, or export with weights as '
            'inputs')


def is_exhausted() -> bool:
    """Return whether the reserve of the machine is being eaten: time to give up."""
    return available_bytes() < RESERVE_BYTES // 2


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """
    Yield a list that holds, afterwards, the largest resident size in the block, in bytes.

    The list stays empty where the kernel does not let a process reset its own peak.
    """
    found: list[int] = []
    try:
        _CLEAR.write_text('5', encoding='ascii')  # 5: reset the peak resident set size
        can_measure = True
    except OSError:
        can_measure = False
    try:
        yield found
    finally:
        match = re.search(r'^VmHWM:\s+(\d+) kB', _text(_STATUS), re.MULTILINE)
        if can_measure and match:
            found.append(int(match[1]) * 1024)
