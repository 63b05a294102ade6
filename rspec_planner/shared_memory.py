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
Find and free the shared memory that killed Fast DDS processes left behind.

A participant names its segment `fastdds_<16 hex digits>` and holds an exclusive `flock` on
`<name>_el` beside it for as long as it lives (Fast DDS 3, RobustExclusiveLock). A killed process
loses the lock and leaves both files: 134 MiB each with the profile for cameras. Where they fill
/dev/shm, the next participants write `Unable to Register SHM Transport` to stderr, go on over UDP
and lose images. Ports (`fastdds_port<N>`) are small, and Fast DDS takes over those of the dead.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
from dataclasses import dataclass
import fcntl
import os
from pathlib import Path
import re
import stat
import time

SHARED_MEMORY = Path('/dev/shm')
_SEGMENT = re.compile(r'fastdds_[0-9a-f]{16}')
#: a participant that is being made has its files a moment before it has the lock
_SETTLED_S = 1.0


@dataclass(frozen=True)
class DeadSegment:
    """A segment whose process is gone; `size` in bytes."""

    path: Path
    size: int

    @property
    def lock(self) -> Path:
        """Return the file whose lock its process held."""
        return self.path.with_name(self.path.name + '_el')


def _is_free(lock: Path) -> bool:
    """Tell whether nobody holds a lock file."""
    # whoever may write there may have put a pipe in that place
    handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def _is_ours(path: Path) -> bool:
    """Tell whether a path is a file that this user may remove."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and os.geteuid() in (0, found.st_uid)


def _is_dead(segment: DeadSegment) -> bool:
    if not (_is_ours(segment.path) and _is_ours(segment.lock)):
        return False
    if time.time() - segment.lock.stat().st_mtime < _SETTLED_S:
        return False
    return _is_free(segment.lock)


def dead_segments(folder: Path | None = None) -> tuple[DeadSegment, ...]:
    """
    Return the segments in `folder` (default: /dev/shm) whose process is gone, by name.

    A segment without a lock file, of another user or younger than a second counts as alive.
    """
    found = []
    for path in sorted((folder or SHARED_MEMORY).glob('fastdds_*')):
        if not _SEGMENT.fullmatch(path.name):
            continue
        # its process may end, and another user's files may refuse, while we look
        with contextlib.suppress(OSError):
            segment = DeadSegment(path, path.stat().st_size)
            if _is_dead(segment):
                found.append(segment)
    return tuple(found)


def free_segments(segments: Sequence[DeadSegment]) -> int:
    """Remove dead segments with their locks; return the bytes freed. What refuses stays."""
    freed = 0
    for segment in segments:
        with contextlib.suppress(OSError):
            segment.path.unlink()
            freed += segment.size
            segment.lock.unlink()
    return freed
