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

from dataclasses import replace
import threading
import time

from node_rig import FakePlanner
import numpy as np
import pytest

from rspec_planner.cycle import (
    CycleStatistics,
    Outcome,
    PlanningCycle,
    RateLimit,
    times_of,
)
from rspec_planner.inputs import InputWatch
from rspec_planner.parameters import load_yaml_parameters, NodeParameters
from rspec_planner.planner.buffers import Skip
from rspec_planner.planner.observation import Observation
from rspec_planner.transport import config_path

T0 = 1_000_000_000_000
MS = 1_000_000


def observation_at(t0_ns):
    images = np.broadcast_to(np.arange(90, 94, dtype=np.uint8)[:, None, None, None],
                             (4, 4, 8, 8, 3))
    poses = np.tile(np.eye(4), (16, 1, 1))
    poses[:, 0, 3] = 0.5 * np.arange(-15, 1)
    return Observation(t0_ns, ('a',) * 4, images, np.zeros((4, 4), np.int64), poses, np.eye(4),
                       'map', 5.0)


class Bench:
    """A cycle with a clock that is set by hand."""

    def __init__(self, **sections):
        config = NodeParameters.from_values(
            load_yaml_parameters(config_path('rspec_planner.param.yaml')))
        self.config = replace(config, **{
            name: replace(getattr(config, name), **changes)
            for name, changes in {'sync': {'image_wait_ms': 0.0, 'odometry_wait_ms': 0.0},
                                  **sections}.items()})
        self.planner = FakePlanner()
        self.now_ns = T0 + 10 * MS
        self.published, self.stops = [], []
        self.chosen = None
        self.prepared = []
        watch = InputWatch()
        watch.add('odometry', 'odometry', '/odom')
        self.cycle = PlanningCycle(self.planner, self, watch, lambda: self.now_ns,
                                   self.published.append, self.stops.append)

    def prepare(self, t0_ns):
        self.prepared.append(t0_ns)

    def select(self, t0_ns):
        return self.chosen or observation_at(t0_ns)

    def run(self, t0_ns=T0):
        return self.cycle.run(t0_ns, self.config, {})

    def late_by(self, milliseconds):
        def wait(observation):
            self.now_ns = observation.t0_ns + round(milliseconds * MS)
        self.planner.before = wait


def test_a_plan_is_published_with_its_own_t0():
    bench = Bench()
    bench.late_by(80)
    result = bench.run()
    assert result.outcome is Outcome.PUBLISHED
    assert [plan.t0_ns for plan in bench.published] == [T0]
    assert result.pipeline_latency_ms == pytest.approx(80.0)
    assert result.processing_ms > 0 and result.cyclic_ms is None
    assert bench.run().cyclic_ms > 0


def test_latency_ends_when_the_plan_has_been_published():
    bench = Bench()

    def publish(plan):
        bench.now_ns += 7 * MS
    bench.cycle._publish = publish
    bench.late_by(80)
    assert bench.run().pipeline_latency_ms == pytest.approx(87.0)


def test_a_cycle_collects_until_it_has_chosen():
    bench, seen = Bench(), []
    bench.prepare = lambda t0_ns: seen.append(bench.cycle.collecting_ns)
    bench.planner.before = lambda observation: seen.append(bench.cycle.collecting_ns)
    bench.cycle._source = bench
    bench.run()
    assert seen == [T0, None] and bench.cycle.collecting_ns is None


@pytest.mark.parametrize('now_ns, reason, part', [
    (T0 + 301 * MS, 'input_too_old', '301 ms old, the limit is 300 ms'),
    (T0 - 250 * MS, 'stamp_in_future', '250 ms ahead of the node clock'),
    (0, 'clock_not_running', 'nothing came on /clock'),
])
def test_an_unusable_trigger_is_not_planned(now_ns, reason, part):
    bench = Bench()
    bench.now_ns = now_ns
    result = bench.run()
    assert (result.outcome, result.reason) == (Outcome.SKIPPED, reason)
    assert part in result.detail
    assert bench.planner.observations == [] and bench.published == []


def test_the_limit_itself_and_a_slightly_early_image_are_fine():
    for now_ns in (T0 + 300 * MS, T0 - 50 * MS):
        bench = Bench()
        bench.now_ns = now_ns
        assert bench.run().outcome is Outcome.PUBLISHED


def test_a_skip_of_the_buffer_keeps_its_name():
    bench = Bench()
    bench.chosen = Skip('camera_missing', 'camera front_tele: nothing received')
    result = bench.run()
    assert (result.outcome, result.reason, result.detail) == (
        Outcome.SKIPPED, 'camera_missing', 'camera front_tele: nothing received')


def test_a_rejected_plan_is_not_published():
    bench = Bench()
    bench.planner.accept = False
    result = bench.run()
    assert (result.outcome, result.reason) == (Outcome.REJECTED, 'start_jump')
    assert result.plan is not None and bench.published == []


def test_deadline_miss_skips():
    bench = Bench()
    bench.late_by(1001)
    result = bench.run()
    assert (result.outcome, result.reason, result.repeated) == (
        Outcome.LATE, 'deadline_missed', False)
    assert '1001 ms old, the limit is 1000 ms' in result.detail
    assert bench.published == []


def test_deadline_miss_repeats_the_last_valid_plan_with_its_old_stamp():
    bench = Bench(deadline={'on_miss': 'last_valid'})
    bench.late_by(1001)
    assert not bench.run().repeated  # there is none yet
    bench.late_by(50)
    bench.now_ns = T0 + 2 * 10**9
    good = bench.run(T0 + 2 * 10**9)
    assert good.outcome is Outcome.PUBLISHED
    bench.late_by(2000)
    late = bench.run(T0 + 2 * 10**9 + 100 * MS)
    assert late.outcome is Outcome.LATE and late.repeated
    assert [plan.t0_ns for plan in bench.published] == [T0 + 2 * 10**9] * 2
    # a reset forgets it
    bench.cycle.reset()
    bench.now_ns = T0 + 4 * 10**9
    assert not bench.run(T0 + 4 * 10**9).repeated
    assert bench.planner.resets == 1


def test_a_plan_from_before_a_reset_is_dropped():
    bench = Bench()
    bench.planner.before = lambda observation: bench.cycle.invalidate()
    result = bench.run()
    assert (result.outcome, result.reason) == (Outcome.SKIPPED, 'reset')
    assert bench.published == []


def test_waiting_and_choosing_are_told_apart_from_planning():
    bench = Bench(sync={'image_wait_ms': 0.0, 'odometry_wait_ms': 30.0})
    busy = []
    bench.planner.before = lambda observation: busy.append(bench.cycle.busy_s)
    result = bench.run()
    assert 30.0 <= result.wait_ms < result.processing_ms
    assert 0.0 < result.select_ms < 30.0 and bench.prepared == [T0]
    assert 0.03 <= busy[0] <= result.processing_ms / 1e3 and bench.cycle.busy_s == 0.0
    assert times_of(result)['wait'] == result.wait_ms and 'cyclic' not in times_of(result)
    assert times_of(result)['images'] == result.images_ms < 30.0


def test_frames_are_decoded_while_the_odometry_is_awaited():
    bench = Bench(sync={'image_wait_ms': 0.0, 'odometry_wait_ms': 80.0})
    bench.prepare = lambda t0_ns: time.sleep(0.1)
    result = bench.run()
    assert result.wait_ms < 20.0 and result.images_ms >= 100.0


def test_a_reset_while_waiting_is_named_as_such():
    bench = Bench(sync={'image_wait_ms': 0.0, 'odometry_wait_ms': 150.0})
    threading.Timer(0.02, bench.cycle.invalidate).start()
    bench.chosen = Skip('odometry_missing', 'nothing received')
    result = bench.run()
    assert (result.outcome, result.reason) == (Outcome.SKIPPED, 'reset')
    assert bench.planner.observations == []


def test_what_the_planner_raises_goes_through():
    bench = Bench()

    def fail(observation):
        raise RuntimeError('CUDA error')
    bench.planner.before = fail
    with pytest.raises(RuntimeError, match='CUDA error'):
        bench.run()
    bench.planner.before = lambda observation: None
    assert bench.run().outcome is Outcome.PUBLISHED


def test_statistics_count_each_outcome_once():
    statistics = CycleStatistics()
    bench = Bench()
    statistics.count(bench.run(), budget_ms=1e6)
    statistics.count(replace(bench.run(), processing_ms=200.0), budget_ms=150.0)
    bench.chosen = Skip('history_short', '')
    statistics.count(bench.run(), budget_ms=1e6)
    bench.chosen, bench.planner.accept = None, False
    statistics.count(bench.run(), budget_ms=1e6)
    assert (statistics.published, statistics.budget_misses) == (2, 1)
    assert dict(statistics.rejected) == {'start_jump': 1}
    assert dict(statistics.skipped) == {'history_short': 1}
    assert len(statistics.processing) == 3


@pytest.mark.parametrize('camera_hz, expected', [(10, 10.0), (30, 10.0), (20, 10.0), (12, 9.6),
                                                 (5, 5.0)])
def test_rate_limit_keeps_the_mean_below_the_limit(camera_hz, expected):
    limit = RateLimit()
    passed = sum(limit.allows(T0 + i * 10**9 // camera_hz, 10.0) for i in range(camera_hz * 20))
    assert passed / 20 == pytest.approx(expected, rel=0.02)


def test_rate_limit_forgives_jitter_of_a_camera_at_the_limit():
    limit = RateLimit()
    jitter = np.random.default_rng(0).integers(-12 * MS, 12 * MS, 200)
    passed = [limit.allows(T0 + i * 100 * MS + int(jitter[i]), 10.0) for i in range(200)]
    assert all(passed)


def test_rate_limit_starts_afresh_after_reset():
    limit = RateLimit()
    assert limit.allows(T0, 10.0)
    assert not limit.allows(T0 - 5 * 10**9, 10.0)
    limit.reset()
    assert limit.allows(T0 - 5 * 10**9, 10.0)
