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
"""Delta tokens against Alpamayo's reference vectors; resampling against closed forms."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from rspec_planner.model.config import HistoryConfig
from rspec_planner.planner.history import (
    history_bins,
    history_stamps,
    history_token_ids,
    resample_poses,
    rotation_matrices,
    slerp,
    to_local,
    yaw_of,
)

CONFIG = HistoryConfig()
TIMES = np.arange(-15, 1) * 0.1


def straight(speed, acceleration=0.0):
    x = speed * TIMES + 0.5 * acceleration * TIMES ** 2
    return np.stack([x, np.zeros(16), np.zeros(16)], axis=1)


def arc(speed, curvature):
    angle = speed * TIMES * curvature
    return np.stack([np.sin(angle) / curvature, (1 - np.cos(angle)) / curvature,
                     np.zeros(16)], axis=1)


@pytest.mark.parametrize(('positions', 'first', 'last'), [
    (straight(0.0), [500] * 6, [500] * 3),
    (straight(10.0), [0, 500, 500, 624, 500, 500], [624, 500, 500]),
    (straight(12.0, -3.0), [0, 500, 500, 704, 500, 500], [651, 500, 500]),
    (arc(6.0, 0.05), [0, 748, 500, 567, 468, 500], [574, 498, 500]),
])
def test_reference_vectors(positions, first, last):
    bins = history_bins(positions, CONFIG)
    assert bins.shape == (48,)
    assert bins[:6].tolist() == first
    assert bins[-3:].tolist() == last


def test_bins_ignore_interpolation_noise():
    noise = np.random.default_rng(0).normal(scale=1e-9, size=(16, 3))
    expected = history_bins(straight(10.0), CONFIG)
    assert np.array_equal(history_bins(straight(10.0) + noise, CONFIG), expected)


def test_rounding_is_half_to_even_and_clamped():
    positions = np.zeros((16, 3))
    positions[1:, 0] = 4 * 999 / 999 + 10  # far outside: clamped to the last bin
    bins = history_bins(positions, CONFIG).reshape(16, 3)
    assert bins[1, 0] == 999
    step = 8 / 999  # a delta of half a bin above bin 500 lies between 500 and 501
    positions[:, 0] = 0
    positions[:, 1] = 0
    assert history_bins(positions, CONFIG)[1] == 500  # 499.5 -> 500, even
    config = HistoryConfig(delta_min=(-0.5, -4.0, -10.0), delta_max=(998.5, 4.0, 10.0))
    positions[5:, 0] = 2.0
    assert history_bins(positions, config).reshape(16, 3)[5, 0] == 2  # 2.5 -> 2, even
    assert step < 0.01


def test_token_ids_are_offset_bins():
    ids = history_token_ids(straight(0.0), CONFIG, 151_669)
    assert ids.min() == ids.max() == 154_669 + 500


def test_stamps_are_integers_oldest_first():
    stamps = history_stamps(10 ** 18 + 7)
    assert stamps.dtype == np.int64
    assert stamps[-1] == 10 ** 18 + 7
    assert set(np.diff(stamps)) == {100_000_000}


def yaw_quaternion(yaw):
    yaw = np.asarray(yaw, dtype=float)
    zero = np.zeros_like(yaw)
    return np.stack([zero, zero, np.sin(yaw / 2), np.cos(yaw / 2)], axis=-1)


@given(st.floats(10, 200), st.floats(-20, 20), st.floats(-0.5, 0.5), st.integers(0, 2 ** 31))
@settings(max_examples=60, deadline=None)
def test_resampling_follows_a_constant_twist(rate_hz, speed, yaw_rate, seed):
    rng = np.random.default_rng(seed)
    t0_ns = 10 ** 18
    steps = rng.uniform(0.5, 1.5, size=int(2.5 * rate_hz) + 3) / rate_hz
    times = np.cumsum(steps) - 1.5 - 2.0 / rate_hz
    times = times - times[0] - 1.6
    times = np.append(times, 0.2)
    times = np.unique((times * 1e9).astype(np.int64))
    seconds = times / 1e9
    positions = np.stack([speed * seconds, 0.3 * seconds, np.full_like(seconds, 7.0)], axis=1)
    query = history_stamps(t0_ns)
    poses = resample_poses(t0_ns + times, positions + 1e5, yaw_quaternion(yaw_rate * seconds),
                           query)
    assert np.allclose(poses[:, 0, 3] - 1e5, speed * TIMES, atol=1e-6)
    assert np.allclose(poses[:, 1, 3] - 1e5, 0.3 * TIMES, atol=1e-6)
    assert np.allclose(yaw_of(poses), yaw_rate * TIMES, atol=1e-7)


def test_slerp_takes_the_shorter_arc():
    start = yaw_quaternion([0.1])
    end = -yaw_quaternion([0.5])
    middle = slerp(start, end, np.array([0.5]))
    assert np.allclose(rotation_matrices(middle), rotation_matrices(yaw_quaternion([0.3])))


def test_slerp_crosses_plus_minus_pi():
    middle = slerp(yaw_quaternion([3.1]), yaw_quaternion([-3.1]), np.array([0.5]))
    assert np.allclose(rotation_matrices(middle), rotation_matrices(yaw_quaternion([np.pi])))


def test_exact_stamps_return_the_sample():
    stamps = history_stamps(5 * 10 ** 9)
    positions = np.random.default_rng(1).normal(size=(16, 3))
    yaw = np.linspace(0, 1, 16)
    poses = resample_poses(stamps, positions, yaw_quaternion(yaw), stamps)
    assert np.allclose(poses[:, :3, 3], positions, atol=1e-12)
    assert np.allclose(yaw_of(poses), yaw, atol=1e-12)


@given(st.floats(-3, 3), st.floats(-1, 1), st.floats(-1e5, 1e5))
@settings(max_examples=50, deadline=None)
def test_local_frame_is_the_inverse_transform(yaw, pitch, offset):
    rng = np.random.default_rng(3)
    quaternions = rng.normal(size=(4, 4))
    poses = np.tile(np.eye(4), (4, 1, 1))
    poses[:, :3, :3] = rotation_matrices(quaternions)
    poses[:, :3, 3] = rng.normal(size=(4, 3)) + offset
    reference = np.eye(4)
    half = np.array([[np.sin(pitch / 2) * 0.6, 0.1, np.sin(yaw / 2), np.cos(yaw / 2) + 2]])
    reference[:3, :3] = rotation_matrices(half)[0]
    reference[:3, 3] = offset
    local = to_local(poses, reference)
    assert np.allclose(local, np.linalg.inv(reference) @ poses, atol=1e-6)
    assert np.allclose(to_local(reference[None], reference)[0], np.eye(4), atol=1e-12)
