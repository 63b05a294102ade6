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
"""Metrics against closed forms."""

import math

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from rspec_planner.evaluate.baselines import constant_velocity
from rspec_planner.evaluate.metrics import (
    ade,
    agrees,
    bootstrap_mean,
    box_corners,
    boxes_overlap,
    min_ade,
    wilson,
)
from rspec_planner.evaluate.results import table, write_section
from rspec_planner.evaluate.scores import collides


def test_average_displacement_of_a_shifted_path_is_the_shift():
    truth = np.cumsum(np.ones((64, 2)), axis=0)
    assert ade(truth + [3.0, 4.0], truth) == pytest.approx(5.0)


def test_the_best_of_several_paths_counts_as_a_whole():
    truth = np.zeros((2, 10, 2))
    paths = np.zeros((2, 3, 10, 2))
    paths[:, :, :, 0] = [[[3.0], [1.0], [2.0]], [[5.0], [7.0], [6.0]]]
    assert min_ade(paths, truth) == pytest.approx([1.0, 5.0])


@given(st.integers(0, 300), st.integers(1, 300))
def test_wilson_holds_its_rate_and_stays_within_bounds(successes, n):
    estimate = wilson(min(successes, n), n)
    assert 0.0 <= estimate.low <= estimate.value + 1e-12
    assert estimate.value - 1e-12 <= estimate.high <= 1.0


def test_wilson_known_value_and_empty_sample():
    estimate = wilson(81, 263)  # Newcombe 1998, table I
    assert estimate.low == pytest.approx(0.2553, abs=1e-4)
    assert estimate.high == pytest.approx(0.3662, abs=1e-4)
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)


def test_bootstrap_interval_has_the_width_of_the_normal_one():
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    estimate = bootstrap_mean(values)
    half = 1.96 * values.std() / math.sqrt(400)
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.high - estimate.low == pytest.approx(2 * half, rel=0.15)
    assert bootstrap_mean(values) == estimate


def test_constant_velocity_goes_straight():
    path = constant_velocity(np.array([0.0, 10.0]))
    assert not path[0].any()
    assert path[1, -1] == pytest.approx([64.0, 0.0])


@pytest.mark.parametrize('action, start, end, expected', [
    ('stop', 10.0, 0.0, True), ('stop', 10.0, 9.0, False), ('wait', 0.0, 0.0, True),
    ('brake', 10.0, 6.0, True), ('brake', 10.0, 10.0, False), ('keep_speed', 10.0, 9.0, True),
    ('keep_speed', 10.0, 2.0, False), ('start', 0.0, 5.0, True), ('start', 0.0, 0.0, False),
    ('nudge_left', 10.0, 10.0, None)])
def test_words_are_held_against_the_speed_profile(action, start, end, expected):
    assert agrees(action, np.linspace(start, end, 64), start) is expected


@given(st.floats(-3, 3), st.floats(0, 2 * math.pi))
def test_boxes_overlap_exactly_when_the_gap_is_negative(gap, yaw):
    if abs(gap) < 1e-6:
        return
    turn = np.array([[math.cos(yaw), math.sin(yaw)], [-math.sin(yaw), math.cos(yaw)]])
    first = box_corners(np.array(0.0), np.array(0.0), np.array(0.0), np.array(4.0),
                        np.array(2.0)) @ turn
    second = box_corners(np.array(4.0 + gap), np.array(0.0), np.array(0.0), np.array(4.0),
                         np.array(2.0)) @ turn
    assert bool(boxes_overlap(first, second)) == (gap < 0)


def test_a_drive_into_a_standing_car_collides_and_one_beside_it_does_not():
    agents = np.zeros((80, 1, 7), np.float32)
    agents[:, 0] = (30.0, 0.0, 0.0, 4.5, 1.8, 0.0, 0)
    path = constant_velocity(np.array([8.0]))[0]
    assert collides(path, agents)
    agents[:, 0, 1] = 3.5
    assert not collides(path, agents)
    assert not collides(path, agents[:, :0])


def test_a_generated_section_is_replaced_and_its_surroundings_stay(tmp_path):
    path = tmp_path / 'results.md'
    path.write_text('# Mine\n\nkeep this\n')
    write_section('a', table(['x'], [['1']]), path)
    write_section('b', 'second', path)
    write_section('a', 'fresh', path)
    text = path.read_text()
    assert text.startswith('# Mine\n\nkeep this\n')
    assert text.count('fresh') == text.count('second') == 1 and '| 1 |' not in text
