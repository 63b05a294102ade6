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
"""Durations on a monotonic clock: per-stage times of one frame, percentiles over many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from rspec_planner.errors import ConfigurationError
from rspec_planner.planner.plan import StageTimes

STAGES = ('preprocess', 'encode', 'prefill', 'decode', 'action', 'postprocess')
PERCENTILES = ('p50', 'p95', 'p99')


class LatencyWindow:
    """
    Percentiles over the newest `size` samples, in the samples' own unit.

    Percentiles interpolate linearly between order statistics; an empty window gives 0.0.
    """

    def __init__(self, size: int = 600) -> None:
        if size < 1:
            raise ConfigurationError(f'latency window: size {size}, must be at least 1')
        self._samples: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, value: float) -> None:
        """Append one sample, dropping the oldest when the window is full."""
        self._samples.append(float(value))

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()

    def percentile(self, q: float) -> float:
        """Return the q-th percentile (0..100)."""
        if not self._samples:
            return 0.0
        return float(np.percentile(np.fromiter(self._samples, dtype=np.float64), q))

    @property
    def p50(self) -> float:
        """Return the median."""
        return self.percentile(50)

    @property
    def p95(self) -> float:
        """Return the 95th percentile."""
        return self.percentile(95)

    @property
    def p99(self) -> float:
        """Return the 99th percentile."""
        return self.percentile(99)

    @property
    def mean(self) -> float:
        """Return the mean."""
        return sum(self._samples) / len(self._samples) if self._samples else 0.0

    @property
    def maximum(self) -> float:
        """Return the largest sample."""
        return max(self._samples, default=0.0)

    def summary(self) -> dict[str, float]:
        """Return p50, p95 and p99 rounded to a microsecond of a millisecond unit."""
        if not self._samples:
            return dict.fromkeys(PERCENTILES, 0.0)
        values = np.percentile(np.fromiter(self._samples, dtype=np.float64), (50, 95, 99))
        return {name: round(float(value), 3) for name, value in zip(PERCENTILES, values)}


class StageTimer:
    """
    Adds up the time of each stage of one frame.

    `synchronize` is called at both ends of a stage so that a device's queued work is counted
    where it was issued; leave it out on the CPU.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._ms = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the enclosed block as one of STAGES, also when it raises."""
        start = self._now()
        try:
            yield
        finally:
            self._ms[name] += 1e3 * (self._now() - start)

    def add(self, name: str, ms: float) -> None:
        """Add milliseconds that were taken elsewhere, on a device's clock, to one of STAGES."""
        self._ms[name] += ms

    def times(self) -> StageTimes:
        """Return what has been added up so far, milliseconds."""
        return StageTimes(**{f'{name}_ms': value for name, value in self._ms.items()})

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return perf_counter()
