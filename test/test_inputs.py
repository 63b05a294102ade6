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

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rspec_planner.inputs import InputWatch

FRAME = 100_000_000


def watch_of(stamps, name='image0'):
    watch = InputWatch()
    watch.add(name, 'a stream', '/topic')
    for stamp in stamps:
        watch.record(name, stamp)
    return watch


def state_of(stamps, name='image0'):
    return watch_of(stamps, name).states()[0]


@pytest.mark.parametrize('hz', [10, 30])
def test_rate_of_a_complete_stream(hz):
    state = state_of([10**9 + i * 10**9 // hz for i in range(60)])
    assert state.rate_hz == pytest.approx(hz, rel=1e-6)
    assert state.expected_hz == pytest.approx(hz, rel=1e-6)


def test_lost_frames_lower_the_rate_but_not_the_expectation():
    random = np.random.default_rng(0)
    stamps = [10**9 + i * 10**9 // 30 for i in range(200) if random.random() < 0.5]
    state = state_of(stamps)
    assert state.rate_hz < 0.7 * state.expected_hz
    assert state.expected_hz == pytest.approx(30, rel=0.01)


def test_a_camera_is_expected_at_the_rate_the_model_needs():
    assert state_of([10**9 + i * 2 * FRAME for i in range(20)]).expected_hz == 10.0
    slow = state_of([10**9 + i * 2 * FRAME for i in range(20)], 'odometry')
    assert slow.expected_hz == pytest.approx(5.0)


def test_unheard_stream():
    state = state_of([])
    assert (state.received, state.newest_ns, state.silence_s, state.rate_hz) == (0, None, None, 0)


def test_duplicate_and_backward_stamps_do_not_change_the_rate():
    stamps = [10**9 + i * FRAME for i in range(20)]
    doubled = [stamp for pair in zip(stamps, stamps) for stamp in pair]
    assert state_of(doubled).rate_hz == pytest.approx(10.0)
    assert state_of(doubled).received == 40


def test_restart_with_older_stamps_starts_a_new_window():
    state = state_of([100 * 10**9 + i * FRAME for i in range(10)]
                     + [10**9 + i * FRAME for i in range(10)])
    assert state.newest_ns == 10**9 + 9 * FRAME
    assert state.rate_hz == pytest.approx(10.0)


def test_wait_ends_with_the_message_or_with_the_timeout():
    watch = watch_of([10**9])
    assert watch.wait_for({'image0': 10**9}, 0.0)
    assert not watch.wait_for({'image0': 2 * 10**9}, 0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(watch.wait_for, {'image0': 2 * 10**9}, 5.0)
        watch.record('image0', 2 * 10**9)
        assert waiting.result(5.0)


def test_clear_forgets_stamps_but_not_counts():
    watch = watch_of([10**9, 2 * 10**9])
    watch.clear()
    state = watch.states()[0]
    assert (state.newest_ns, state.received) == (None, 2)
