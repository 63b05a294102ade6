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
Messages that a stream should have had: lost on the way, or not taken in time.

The middleware tells how many were lost between publisher and subscriber; gaps in the publisher's
sequence numbers count those and the ones that fell out of the subscriber's queue because this
computer was too busy to take them. The two have different remedies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
import time

#: a larger step is another publisher, not a gap
_LARGEST_GAP = 1000


@dataclass
class TopicLosses:
    """The losses of one topic; not thread-safe."""

    lost: int = 0  # in transport
    missing: int = 0  # in transport or in the queue
    at_s: float | None = None  # of the newest loss of either kind, monotonic clock
    _sequence: int | None = field(default=None, repr=False)

    def took(self, sequence: int | None) -> None:
        """Note the sequence number of a message that was taken, None when there is none."""
        if sequence is None:
            return
        before, self._sequence = self._sequence, sequence
        gap = 0 if before is None else sequence - before - 1
        if 0 < gap <= _LARGEST_GAP:
            self.missing += gap
            self.at_s = time.monotonic()

    def told(self, total: int) -> None:
        """Note the middleware's count of messages lost in transport."""
        if total > self.lost:
            self.lost = total
            self.at_s = time.monotonic()

    @property
    def overflowed(self) -> int:
        """Return how many messages arrived and were pushed out of the queue by newer ones."""
        return max(0, self.missing - self.lost)
