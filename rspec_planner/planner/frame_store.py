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
The frames of all cameras, in bounded memory.

Decoded frames are small and stay for the whole window. A frame that nobody has begun to decode
is held as it came (6 MB for raw 1080p, 120 of them a second from four cameras at 30 Hz), so only
as long as a selection can still want it, and all of them together within a number of bytes; what
exceeds it is given up, oldest first, counted, and named by a selection that misses it.
Not thread-safe: the buffer's lock guards it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from rspec_planner.model.config import CameraConfig
from rspec_planner.planner.frames import CameraFrame
from rspec_planner.planner.timeline import SECOND_NS, Timeline

#: the skip reason of a selection that needs a frame given up for memory
BUFFER_FULL = 'image_buffer_full'


class FrameStore:
    """Timelines of camera frames by name."""

    def __init__(self, cameras: CameraConfig, window_s: float, held_s: float, held_bytes: int,
                 dropped: Counter[str]) -> None:
        """
        Keep decoded frames for `window_s`, others for `held_s` and up to `held_bytes`.

        `dropped` counts frames that are given up for memory, under BUFFER_FULL.
        """
        self._timelines = {name: Timeline[CameraFrame](window_s) for name in cameras.names}
        self._held_bytes = held_bytes
        self.held_s = held_s
        self._dropped = dropped

    def __contains__(self, camera: str) -> bool:
        return camera in self._timelines

    def __getitem__(self, camera: str) -> Timeline[CameraFrame]:
        return self._timelines[camera]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the cameras."""
        return tuple(self._timelines)

    @property
    def held(self) -> int:
        """Return the bytes of all frames that nobody has begun to decode."""
        return sum(frame.held for line in self._timelines.values() for frame in line.entries)

    def insert(self, camera: str, stamp_ns: int, frame: CameraFrame) -> bool:
        """Store a frame; False for a duplicate stamp, whose first frame stays."""
        timeline = self._timelines[camera]
        if not timeline.insert(stamp_ns, frame):
            return False
        self._let_go(timeline)
        self._fit()
        return True

    def clear(self) -> None:
        """Forget all frames."""
        for timeline in self._timelines.values():
            timeline.clear()

    def _let_go(self, timeline: Timeline[CameraFrame]) -> None:
        """Remove frames that no selection can want any more and that nobody decoded."""
        end = bisect_left(timeline.stamps, timeline.stamps[-1] - int(self.held_s * SECOND_NS))
        for index in range(end - 1, -1, -1):
            if timeline.entries[index].waiting:
                timeline.remove(index)

    def _fit(self) -> None:
        """Give up the oldest frames while all of them hold too much."""
        excess = self.held - self._held_bytes
        if excess <= 0:
            return
        waiting = sorted(
            ((stamp, frame) for line in self._timelines.values()
             for stamp, frame in zip(line.stamps, line.entries) if frame.held),
            key=lambda item: item[0])
        for _, frame in waiting:
            if excess <= 0:
                break
            excess -= frame.held
            frame.drop(BUFFER_FULL)
            self._dropped[BUFFER_FULL] += 1
