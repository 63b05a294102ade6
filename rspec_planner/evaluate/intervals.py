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
Intervals for numbers that are pooled over clips: ratios, differences, quantiles.

Clips are drawn again with replacement, never tokens or iterations: the iterations of one text
are not independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 2000


def _draws(clips: int, seed: int) -> NDArray[np.int64]:
    """Return the clips of every resample, (RESAMPLES, clips)."""
    return np.random.default_rng(seed).integers(0, clips, (RESAMPLES, clips))


def ratio(numerator: Floats, denominator: Floats, draws: NDArray[np.int64] | None = None
          ) -> Floats:
    """Return sum / sum over the last axis, of all clips or of each resample; 0 without any."""
    if draws is not None:
        numerator, denominator = numerator[draws], denominator[draws]
    below = denominator.sum(-1)
    found: Floats = np.where(below > 0, numerator.sum(-1) / np.maximum(below, 1e-12), 0.0)
    return found


def ratio_interval(numerator: NDArray[np.generic], denominator: NDArray[np.generic],
                   seed: int = 0) -> dict[str, object]:
    """
    Return `mean` and `ci95` of sum(numerator) / sum(denominator), both (clips,).

    The mean is pooled: with numerators of committed tokens and denominators of iterations it is
    the accepted length L. The interval is the percentile bootstrap's.
    """
    top, below = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    if len(top) == 0:
        return {'mean': 0.0, 'ci95': [0.0, 0.0]}
    return _named(float(ratio(top, below)), ratio(top, below, _draws(len(top), seed)))


def difference_interval(first: tuple[NDArray[np.generic], NDArray[np.generic]],
                        second: tuple[NDArray[np.generic], NDArray[np.generic]],
                        seed: int = 0) -> dict[str, object]:
    """
    Return `mean` and `ci95` of one pooled ratio minus another over the same clips.

    Each is (numerator, denominator); both are resampled together, so what makes a clip easy for
    either cancels.
    """
    parts = [np.asarray(part, np.float64) for part in (*first, *second)]
    if len({len(part) for part in parts}) != 1:
        raise ValueError(f'{[len(part) for part in parts]} clips: a paired difference needs '
                         'the same ones')
    if len(parts[0]) == 0:
        return {'mean': 0.0, 'ci95': [0.0, 0.0]}
    draws = _draws(len(parts[0]), seed)
    mean = float(ratio(parts[0], parts[1]) - ratio(parts[2], parts[3]))
    return _named(mean, ratio(parts[0], parts[1], draws) - ratio(parts[2], parts[3], draws))


def statistic_interval(values: NDArray[np.generic],
                       statistic: Callable[[Floats], Floats] | None = None,
                       seed: int = 0) -> dict[str, object]:
    """
    Return `mean` and `ci95` of a statistic of (clips,) values, the mean unless told otherwise.

    statistic: reduces the last axis, for example `lambda v: np.median(v, axis=-1)`.
    """
    known = np.asarray(values, np.float64)
    if len(known) == 0:
        return {'mean': 0.0, 'ci95': [0.0, 0.0]}
    reduce = statistic or (lambda v: v.mean(axis=-1))
    return _named(float(reduce(known)), reduce(known[_draws(len(known), seed)]))


def _named(mean: float, resampled: Floats) -> dict[str, object]:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {'mean': round(mean, 5), 'ci95': [round(float(low), 5), round(float(high), 5)]}
