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
"""What the planner says: reasoning, trajectory, timing and the verdict on both."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rspec_planner.decode.stats import DecodeStats

#: a plan has the ego pose at t0 and 64 model waypoints, 0.1 s apart
PLAN_POINTS = 65
STEP_NS = 100_000_000
DT = STEP_NS / 1e9  # the same in seconds


@dataclass(frozen=True)
class Reasoning:
    """The chain of causation (CoC) that the target committed to."""

    token_ids: tuple[int, ...]  # generated ids, stop token included
    text: str  # words before <|cot_end|>
    complete: bool  # False when the token budget ended before the stop token
    stats: DecodeStats


@dataclass(frozen=True)
class StageTimes:
    """Durations of one frame on a monotonic clock, milliseconds."""

    preprocess_ms: float = 0.0
    encode_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    action_ms: float = 0.0
    postprocess_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """Return the sum over all stages."""
        return (self.preprocess_ms + self.encode_ms + self.prefill_ms + self.decode_ms
                + self.action_ms + self.postprocess_ms)


@dataclass(frozen=True)
class Verdict:
    """Result of the trajectory checks; a rejected plan carries its named reason."""

    accepted: bool
    reason: str = ''  # '' when accepted, else e.g. 'not_finite', 'start_jump'
    detail: str = ''  # the value and the limit


@dataclass(frozen=True)
class Plan:
    """
    One planned trajectory, in the ego frame at t0.

    Point 0 is the ego at t0 with its measured speed, point i is at t0 + i * 0.1 s.
    """

    t0_ns: int
    poses: np.ndarray  # (65, 4) float64: x, y, z m; yaw rad
    speeds: np.ndarray  # (65,) float64, m/s, never negative
    accelerations: np.ndarray  # (65,) float64, m/s^2
    curvatures: np.ndarray  # (65,) float64, 1/m, left positive
    candidates: np.ndarray  # (N, 65, 4) float64, all samples; poses is one of them, or slowed
    candidate_speeds: np.ndarray  # (N, 65) float64, m/s
    ego_pose_at_t0: np.ndarray  # (4, 4) float64, odometry frame <- ego at t0
    odometry_frame: str
    reasoning: Reasoning
    times: StageTimes
    verdict: Verdict
    ages_ms: dict[str, float] = field(default_factory=dict)
    cautious: bool = False  # driven slower than drawn, see planner.caution
