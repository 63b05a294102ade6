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
"""Percentiles against numpy, and stage times that add up."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.planner import timing
from rspec_planner.planner.timing import LatencyWindow, STAGES, StageTimer


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50), st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_percentiles_cover_the_newest_samples(values, size):
    window = LatencyWindow(size)
    for value in values:
        window.add(value)
    newest = values[-size:]
    assert len(window) == len(newest)
    assert window.p50 == pytest.approx(np.percentile(newest, 50))
    assert window.p95 == pytest.approx(np.percentile(newest, 95))
    assert window.p99 == pytest.approx(np.percentile(newest, 99))
    assert window.maximum == max(newest)
    assert window.p50 <= window.p95 <= window.p99 <= window.maximum * (1 + 1e-12)


def test_empty_window_is_zero():
    window = LatencyWindow()
    assert window.summary() == {'p50': 0.0, 'p95': 0.0, 'p99': 0.0}
    window.add(3.0)
    window.clear()
    assert window.maximum == 0.0


def test_size_is_checked():
    with pytest.raises(ConfigurationError, match='size 0'):
        LatencyWindow(0)


def test_stages_add_up(monkeypatch):
    clock = iter([0.0, 0.010, 1.0, 1.002, 2.0, 2.005])
    monkeypatch.setattr(timing, 'perf_counter', lambda: next(clock))
    timer = StageTimer()
    for name in ('encode', 'decode', 'encode'):
        with timer.stage(name):
            pass
    times = timer.times()
    assert times.encode_ms == pytest.approx(15.0)
    assert times.decode_ms == pytest.approx(2.0)
    assert times.total_ms == pytest.approx(17.0)


def test_a_raising_stage_is_still_timed(monkeypatch):
    clock = iter([0.0, 0.004])
    monkeypatch.setattr(timing, 'perf_counter', lambda: next(clock))
    timer = StageTimer()
    with pytest.raises(ValueError), timer.stage('action'):
        raise ValueError
    assert timer.times().action_ms == pytest.approx(4.0)


def test_device_is_synchronised_at_both_ends():
    calls = []
    timer = StageTimer(lambda: calls.append(1))
    with timer.stage('prefill'):
        calls.append(2)
    assert calls == [1, 2, 1]


def test_unknown_stage_is_an_error():
    with pytest.raises(KeyError), StageTimer().stage('thinking'):
        pass
    assert 'prefill' in STAGES
