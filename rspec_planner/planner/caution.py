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
Drive more slowly while the target is unsure of its own words.

Before a scene that it never saw a target still says something, but its words change from plan to
plan and it gives them little probability. One such plan means nothing, between two manoeuvres
they are common; a mean over more than a second does. What is done about it is mild: the path
stays, the speed falls. A reader of the plan is told, see `Plan.cautious`.
"""

from __future__ import annotations

from collections import deque
import math

import numpy as np
from numpy.typing import NDArray

from rspec_planner.model.config import CautionConfig
from rspec_planner.planner.plan import DT

Floats = NDArray[np.float64]
Arrays = tuple[Floats, Floats, Floats, Floats]  # poses, speeds, accelerations, curvatures


class Caution:
    """Whether the plans of the last second were unsure; one frame after the other."""

    def __init__(self, config: CautionConfig, hardest: float = math.inf) -> None:
        """`hardest` is the strongest deceleration that the guard lets through, m/s^2."""
        self.config = config
        self._deceleration = min(config.deceleration, hardest)
        self._plans: deque[tuple[int, float]] = deque()  # t0 in ns and confidence
        self._since_ns = 0
        self._active = False

    def reset(self) -> None:
        """Forget all plans."""
        self._plans.clear()
        self._active = False

    def note(self, t0_ns: int, confidence: float) -> bool:
        """
        Tell the confidence of the plan at t0; return whether to be cautious from now on.

        A confidence that is not known (NaN) counts for nothing. Plans that do not follow the
        last one, earlier or behind a gap as long as the window, begin anew.
        """
        window_ns = round(1e9 * self.config.window_s)
        if self._plans and not 0 < t0_ns - self._plans[-1][0] < window_ns:
            self.reset()
        if math.isnan(confidence):
            return self._active
        if not self._plans:
            self._since_ns = t0_ns
        self._plans.append((t0_ns, confidence))
        while self._plans[0][0] < t0_ns - window_ns:
            self._plans.popleft()
        if t0_ns - self._since_ns >= window_ns and len(self._plans) >= self.config.min_plans:
            mean = sum(value for _, value in self._plans) / len(self._plans)
            limit = self.config.leave_above if self._active else self.config.enter_below
            self._active = mean < limit
        return self._active

    def drive(self, t0_ns: int, confidence: float, drawn: Arrays) -> tuple[bool, Arrays]:
        """
        Return whether the plan at t0 is cautious, and what of it is driven.

        drawn: poses (n, 4), speeds, accelerations and curvatures (n,).
        """
        if not self.note(t0_ns, confidence):
            return False, drawn
        return True, slowed(drawn, self._deceleration)


def slowed(drawn: Arrays, deceleration: float) -> Arrays:
    """
    Return a plan of n points on the same path, driven slower.

    The speed at i * 0.1 s is at most v(0) - i * 0.1 s * deceleration, and never above the given
    one; where it is 0 the plan stands still. Where the speed stays, so does the acceleration:
    that of the first point is of the speed that the history implies, not of the measured one.
    """
    poses, speeds, accelerations, curvatures = drawn
    since = DT * np.arange(len(speeds))
    slower = np.minimum(speeds, np.maximum(0.0, speeds[0] - deceleration * since))
    steps = np.hypot(*np.diff(poses[:, :2], axis=0).T)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    # each interval is shortened by what its mean speed lost, so an unchanged one stays as it was
    mean = 0.5 * (speeds[1:] + speeds[:-1])
    share = np.divide(0.5 * (slower[1:] + slower[:-1]), mean, out=np.zeros_like(mean),
                      where=mean > 0.0)
    reached = np.concatenate([[0.0], np.cumsum(steps * np.minimum(share, 1.0))])
    moving = np.concatenate([[True], steps > 0.0])  # a point reached twice has one station
    columns = [np.interp(reached, along[moving], column[moving])
               for column in (*poses.T, curvatures)]
    applied = np.append(np.maximum(np.diff(slower) / DT, -deceleration), 0.0)
    lost = slower < speeds
    changed = np.append(lost[1:], lost[-1])  # what an interval ends with is what its action makes
    return (np.stack(columns[:4], axis=1), slower, np.where(changed, applied, accelerations),
            columns[4])
