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
"""Entries sorted by stamp, bounded by time."""

from __future__ import annotations

from bisect import bisect_left
from typing import Generic, TypeVar

T = TypeVar('T')

SECOND_NS = 1_000_000_000


class Timeline(Generic[T]):
    """Entries sorted by stamp, those of the newest `window_s`."""

    def __init__(self, window_s: float) -> None:
        self.window_ns = int(window_s * SECOND_NS)
        self.stamps: list[int] = []
        self.entries: list[T] = []

    def insert(self, stamp_ns: int, entry: T) -> bool:
        """Insert in order; False for a duplicate stamp, whose first entry stays."""
        if self.stamps and stamp_ns < self.stamps[-1] - self.window_ns:
            # The source restarted, or one stamp had been far in the future.
            self.clear()
        index = bisect_left(self.stamps, stamp_ns)
        if index < len(self.stamps) and self.stamps[index] == stamp_ns:
            return False
        self.stamps.insert(index, stamp_ns)
        self.entries.insert(index, entry)
        old = bisect_left(self.stamps, self.stamps[-1] - self.window_ns)
        del self.stamps[:old], self.entries[:old]
        return True

    def remove(self, index: int) -> None:
        """Remove one entry."""
        del self.stamps[index], self.entries[index]

    def nearest(self, stamp_ns: int) -> int:
        """Return the index of the entry nearest to `stamp_ns`; of two equals the older one."""
        right = min(bisect_left(self.stamps, stamp_ns), len(self.stamps) - 1)
        left = max(right - 1, 0)
        closer = abs(self.stamps[left] - stamp_ns) <= abs(self.stamps[right] - stamp_ns)
        return left if closer else right

    def half_period_ns(self) -> int:
        """Return half of the median distance of two stamps; the window when there are none."""
        gaps = sorted(b - a for a, b in zip(self.stamps, self.stamps[1:]))
        return (gaps[len(gaps) // 2] if gaps else self.window_ns) // 2

    def clear(self) -> None:
        """Forget everything."""
        self.stamps.clear()
        self.entries.clear()
