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
Numbers that say how good plans are, each with its uncertainty.

Positions are in the ego frame at t0, metres; waypoints are 0.1 s apart up to 6.4 s.
"""

from __future__ import annotations

from dataclasses import dataclass
import math

import numpy as np

DT = 0.1
#: m/s; a vehicle slower than this stands
STANDING = 0.5
#: 95 % two-sided normal quantile
_Z = 1.959963984540054

_STANDS = frozenset(('stop', 'wait'))
_SLOWS = frozenset(('brake', 'brake_hard', 'yield', 'slow', 'slow_left', 'slow_right'))
_GOES_ON = frozenset(('keep_speed', 'keep_lane', 'keep_straight', 'continue', 'pass'))


@dataclass(frozen=True)
class Estimate:
    """A mean with a 95 % interval over n samples."""

    value: float
    low: float
    high: float
    n: int

    def to_dict(self) -> dict[str, float]:
        """Return a JSON-ready dict, rounded to five digits."""
        return {'value': round(self.value, 5), 'low': round(self.low, 5),
                'high': round(self.high, 5), 'n': self.n}


def ade(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """
    Return the average displacement (...) of paths.

    predicted (..., T, 2) and truth broadcastable to it, metres.
    """
    distance: np.ndarray = np.linalg.norm(predicted - truth, axis=-1).mean(-1)
    return distance


def min_ade(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the average displacement (N,) of the best of K paths (N, K, T, 2) to (N, T, 2)."""
    best: np.ndarray = ade(predicted, truth[:, None]).min(-1)
    return best


def wilson(successes: int, n: int) -> Estimate:
    """Return a rate with its Wilson score interval; n = 0 gives the whole range."""
    if n == 0:
        return Estimate(0.0, 0.0, 1.0, 0)
    rate, z2 = successes / n, _Z * _Z
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    return Estimate(rate, max(0.0, centre - half), min(1.0, centre + half), n)


def bootstrap_mean(values: np.ndarray, resamples: int = 2000, seed: int = 0) -> Estimate:
    """Return the mean of (N,) values with a percentile bootstrap interval."""
    values = np.asarray(values, np.float64)
    if len(values) == 0:
        return Estimate(0.0, 0.0, 0.0, 0)
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (resamples, len(values)))].mean(-1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(values.mean()), float(low), float(high), len(values))


def agrees(action: str, speeds: np.ndarray, speed_at_t0: float) -> bool | None:
    """
    Tell whether a speed profile (64,) does what the action word says; None: no speed word.

    stop and wait: stands, or at least ends slower than half the speed at t0. brake, yield,
    slow: loses a tenth of the speed (at least 0.5 m/s) at some time. keep, continue, pass:
    never falls below 60 % of the speed at t0. start: ends faster than 1 m/s and than at t0.
    """
    end, low = float(speeds[-1]), float(speeds.min())
    if action in _STANDS:
        return low < STANDING or end < 0.5 * speed_at_t0
    if action in _SLOWS:
        return low < speed_at_t0 - max(0.5, 0.1 * speed_at_t0) or low < STANDING
    if action in _GOES_ON:
        return low > 0.6 * speed_at_t0
    if action == 'start':
        return end > max(1.0, speed_at_t0)
    return None


def box_corners(x: np.ndarray, y: np.ndarray, yaw: np.ndarray, length: np.ndarray,
                width: np.ndarray) -> np.ndarray:
    """Return the corners (..., 4, 2) of boxes around centres (...), counter-clockwise."""
    signs = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)]) / 2
    local_x = signs[:, 0] * np.asarray(length)[..., None]
    local_y = signs[:, 1] * np.asarray(width)[..., None]
    cos, sin = np.cos(yaw)[..., None], np.sin(yaw)[..., None]
    return np.stack((np.asarray(x)[..., None] + cos * local_x - sin * local_y,
                     np.asarray(y)[..., None] + sin * local_x + cos * local_y), axis=-1)


def boxes_overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return (...) whether boxes (..., 4, 2) touch: no edge direction separates them."""
    overlap = np.ones(np.broadcast_shapes(first.shape[:-2], second.shape[:-2]), bool)
    for box in (first, second):
        for edge in (0, 1):
            axis = box[..., edge + 1, :] - box[..., edge, :]
            a = (first * axis[..., None, :]).sum(-1)
            b = (second * axis[..., None, :]).sum(-1)
            overlap &= (a.max(-1) >= b.min(-1)) & (b.max(-1) >= a.min(-1))
    return overlap
