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
"""A learning-rate schedule over wall-clock time; the same code serves any machine speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
import math
import time


@dataclass
class TimeSchedule:
    """
    Cosine decay with linear warm-up over the seconds between the first step and the end.

    The clock starts with the run; `begin()` marks the first step, because the time that
    rendering needs before it is not known in advance. With `max_steps` the progress is the
    larger of both fractions, so short test runs also see the whole schedule.
    """

    total_s: float  # wall clock of the whole run
    reserve_s: float  # kept free at the end
    warmup_s: float
    final_fraction: float = 0.0
    max_steps: int = 0
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)
    first_step: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Start the wall clock."""
        self.started = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Return seconds since the start of the run."""
        return self.clock() - self.started

    @property
    def train_end_s(self) -> float:
        """Return the second of the run at which training must end."""
        return self.total_s - self.reserve_s

    def begin(self) -> None:
        """Mark the first step, unless a resumed run already had one."""
        if self.first_step is None:
            self.first_step = self.elapsed_s

    def progress(self, step: int = 0) -> float:
        """Return the finished fraction of the training time, 0 before the first step."""
        if self.first_step is None:
            return 0.0
        span = max(self.train_end_s - self.first_step, 1e-6)
        fraction = (self.elapsed_s - self.first_step) / span
        if self.max_steps:
            fraction = max(fraction, step / self.max_steps)
        return min(max(fraction, 0.0), 1.0)

    def finished(self, step: int = 0) -> bool:
        """Return whether the time or the number of steps is used up."""
        out_of_steps = bool(self.max_steps) and step >= self.max_steps
        return out_of_steps or self.elapsed_s >= self.train_end_s

    def factor(self, step: int = 0) -> float:
        """Return the multiplier of the peak learning rate at this moment."""
        progress = self.progress(step)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        decay = self.final_fraction + (1.0 - self.final_fraction) * cosine
        span = self.train_end_s - (self.first_step or 0.0)
        warm = min(self.warmup_s / max(span, 1e-6), 0.2)
        return decay * min(1.0, (progress + 1e-3) / warm) if warm > 0.0 else decay
