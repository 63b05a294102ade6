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
Watch the input streams: how many messages, how fast, how old, and wait for the next one.

Knows stamps and arrival times, not messages. One lock serves the callbacks that record and the
worker that waits; the recorded numbers become the `inputs` diagnostic.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
import threading
import time

from rspec_planner.losses import TopicLosses

_WINDOW_NS = 3_000_000_000
#: frames of one camera are 0.1 s apart in the model, so slower streams cannot be planned on
_NEEDED_CAMERA_HZ = 10.0


@dataclass(frozen=True)
class StreamState:
    """One stream at one instant."""

    name: str  # 'image0', 'odometry'
    label: str  # what a person calls it, e.g. "camera 'cross_left'"
    topic: str
    received: int
    newest_ns: int | None  # largest stamp since the last clear
    silence_s: float | None  # since the last arrival, monotonic clock; None when never
    rate_hz: float  # by stamps, over the last 3 s
    expected_hz: float  # what the stream would have without losses
    lost: int = 0  # in transport, as the middleware tells
    overflowed: int = 0  # arrived, but pushed out of the queue before they were taken
    loss_age_s: float | None = None  # since the newest of either, None when never


@dataclass
class _Stream:
    name: str
    label: str
    topic: str
    needed_hz: float
    received: int = 0
    newest_ns: int | None = None
    arrival_s: float | None = None
    stamps: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    losses: defaultdict[str, TopicLosses] = field(
        default_factory=lambda: defaultdict(TopicLosses))  # by topic

    def record(self, stamp_ns: int, arrival_s: float) -> None:
        self.received += 1
        self.arrival_s = arrival_s
        if self.newest_ns is not None and stamp_ns < self.newest_ns - _WINDOW_NS:
            self.clear()  # the source restarted, or one stamp had been far in the future
        if self.newest_ns is None or stamp_ns > self.newest_ns:
            self.newest_ns = stamp_ns
            self.stamps.append(stamp_ns)
            while stamp_ns - self.stamps[0] > _WINDOW_NS:
                self.stamps.popleft()

    def clear(self) -> None:
        self.newest_ns = None
        self.stamps.clear()

    def rates(self) -> tuple[float, float]:
        """Return received and expected rate; short gaps tell the period that losses stretch."""
        stamps = list(self.stamps)
        if len(stamps) < 3:
            return 0.0, self.needed_hz
        gaps = sorted(b - a for a, b in zip(stamps, stamps[1:]))
        rate = (len(stamps) - 1) * 1e9 / (stamps[-1] - stamps[0])
        return rate, max(self.needed_hz, 1e9 / gaps[len(gaps) // 5])

    def state(self, now_s: float) -> StreamState:
        """Return the state at an instant of the monotonic clock."""
        losses = list(self.losses.values())
        lost_s = max((item.at_s for item in losses if item.at_s is not None), default=None)
        return StreamState(
            self.name, self.label, self.topic, self.received, self.newest_ns,
            None if self.arrival_s is None else now_s - self.arrival_s, *self.rates(),
            lost=sum(item.lost for item in losses),
            overflowed=sum(item.overflowed for item in losses),
            loss_age_s=None if lost_s is None else now_s - lost_s)


class InputWatch:
    """All streams of the node, by name ('image0', ..., 'odometry')."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._streams: dict[str, _Stream] = {}

    def add(self, name: str, label: str, topic: str) -> None:
        """Register a stream before its first message."""
        needed = _NEEDED_CAMERA_HZ if name.startswith('image') else 0.0
        with self._changed:
            self._streams[name] = _Stream(name, label, topic, needed)

    def record(self, name: str, stamp_ns: int) -> None:
        """Note one message and wake the worker if it waits for it."""
        with self._changed:
            self._streams[name].record(stamp_ns, time.monotonic())
            self._changed.notify_all()

    def took(self, name: str, topic: str, sequence: int | None) -> None:
        """Note the publisher's sequence number of a message."""
        with self._changed:
            self._streams[name].losses[topic].took(sequence)

    def lost(self, name: str, topic: str, total: int) -> None:
        """Note how many messages of a topic were lost in transport so far."""
        with self._changed:
            self._streams[name].losses[topic].told(total)

    def clear(self) -> None:
        """Forget stamps after a clock jump; counts stay."""
        with self._changed:
            for stream in self._streams.values():
                stream.clear()

    def wait_for(self, required: Mapping[str, int], timeout_s: float) -> bool:
        """Wait until each stream has a stamp of at least `required[name]`; False on timeout."""
        def reached() -> bool:
            return all((self._streams[name].newest_ns or 0) >= stamp
                       for name, stamp in required.items())
        with self._changed:
            return self._changed.wait_for(reached, timeout=timeout_s)

    def states(self) -> list[StreamState]:
        """Return a consistent view of all streams, in the order they were added."""
        now = time.monotonic()
        with self._changed:
            return [stream.state(now) for stream in self._streams.values()]
