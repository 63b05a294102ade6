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
"""Pooled means are exact, intervals cover the truth as often as they say."""

import numpy as np
import pytest

from rspec_planner.evaluate.intervals import (
    difference_interval,
    ratio_interval,
    statistic_interval,
)


def test_the_mean_is_pooled_not_a_mean_of_ratios():
    found = ratio_interval(np.array([10, 1]), np.array([1, 1]))
    assert found['mean'] == 5.5
    assert ratio_interval(np.array([12, 3]), np.array([2, 3]))['mean'] == 3.0
    low, high = found['ci95']
    assert low == 1.0 and high == 10.0  # both clips the worse one, both the better one


def test_nothing_gives_zero():
    assert ratio_interval(np.array([]), np.array([])) == {'mean': 0.0, 'ci95': [0.0, 0.0]}
    assert ratio_interval(np.array([0]), np.array([0]))['mean'] == 0.0
    assert statistic_interval(np.array([]))['mean'] == 0.0


def test_intervals_cover_the_truth():
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(60):
        below = rng.integers(2, 6, 150)
        top = rng.binomial(below * 10, 0.4)  # true ratio 4
        low, high = ratio_interval(top, below, seed)['ci95']
        covered += low <= 4.0 <= high
    assert covered >= 51  # 95 % of 60 is 57; fewer than 51 has a chance below 1 in 500


def test_a_paired_difference_is_narrower_than_the_parts():
    rng = np.random.default_rng(0)
    below = np.full(200, 3)
    first = rng.integers(3, 40, 200)
    second = first - 1  # one token less on every clip: no doubt about the difference
    found = difference_interval((first, below), (second, below))
    assert found['mean'] == pytest.approx(1 / 3, abs=1e-4)
    assert found['ci95'] == pytest.approx([1 / 3, 1 / 3], abs=1e-4)
    with pytest.raises(ValueError, match='paired'):
        difference_interval((first, below), (second[1:], below[1:]))


def test_a_median_with_its_interval():
    values = np.arange(101)
    found = statistic_interval(values, lambda v: np.median(v, axis=-1))
    assert found['mean'] == 50.0
    assert 30 < found['ci95'][0] < 50 < found['ci95'][1] < 70
