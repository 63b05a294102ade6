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
How long the middleware takes to let a plan go: it should never wait, and can.

A subscriber that shares memory with the node and is frozen or killed while it holds the lock of
its port makes Fast DDS wait for a second at each message to it (docs/reliability.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import time

#: publishing a plan takes 1 ms; longer than this only what waits for somebody
HELD_UP_S = 0.5
_TOLD_S = 5.0  # diagnostics come once a second and may be held up themselves


class HoldUps:
    """Measures publications; written by the worker, read by diagnostics."""

    def __init__(self) -> None:
        self.count, self.longest_s = 0, 0.0
        self._began: float | None = None
        self._last_s, self._ended = 0.0, 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Measure one publication, also one that fails."""
        self._began = began = time.monotonic()
        try:
            yield
        finally:
            self._began, now = None, time.monotonic()
            self.longest_s = max(self.longest_s, now - began)
            if now - began > HELD_UP_S:
                self._last_s, self._ended = now - began, now
                self.count += 1

    @property
    def note(self) -> str:
        """Return one line about a publication that is or was just held up, '' without one."""
        now, began = time.monotonic(), self._began
        held_s = now - began if began is not None else 0.0
        if held_s <= HELD_UP_S:
            held_s = self._last_s if self.count and now - self._ended < _TOLD_S else 0.0
        return '' if not held_s else (
            f'publication was held up for {held_s:.1f} s, as by a subscriber on this machine that '
            'is frozen or died; start what only watches with config/fastdds_viewer.xml')
