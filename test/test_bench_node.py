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
"""The node's bench: what counts as overhead and as loss, and one short run of the real thing."""

from __future__ import annotations

import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed (requirements-ros.txt)')

from click.testing import CliRunner
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from rspec_planner.cli import cli
from rspec_planner.errors import ConfigurationError
from rspec_planner.live.bench_node import bench_node, Case, CASES, Heard, memory_of, report_of
from rspec_planner.planner.timing import STAGES

pytestmark = pytest.mark.ros


def array(**tasks):
    return DiagnosticArray(status=[
        DiagnosticStatus(name=f'rspec_planner: {task}',
                         values=[KeyValue(key=k, value=str(v)) for k, v in values.items()])
        for task, values in tasks.items()])


def latency(t0_ns, total, planner):
    stages = dict.fromkeys((f'{stage}_ms' for stage in STAGES), planner / len(STAGES))
    return {'t0_ns': t0_ns, 'pipeline_latency_ms': total, 'processing_time_ms': planner + 6.0,
            'wait_ms': 2.0, 'images_ms': 2.0, 'select_ms': 1.0, **stages}


def test_overhead_is_age_without_planner_and_arrival_of_the_inputs():
    heard = Heard()
    heard.take(array(latency={'deadline_misses': 0}))  # no plan yet
    for t0_ns, total in ((1, 110.0), (2, 112.0), (2, 112.0)):
        heard.take(array(latency=latency(t0_ns, total, planner=90.0)))
    sent = {'frames': 10, 'frame_bytes': 7, 'inputs_ms': {'1': 4.0, '2': 5.0}}
    report = report_of(Case('jpeg', 10.0), heard, sent, 0.4)
    assert report['overhead_ms']['p50'] == pytest.approx(16.5)  # of 16 and 17
    assert report['age_ms']['p50'] == 21.0 and report['inputs_ms']['p50'] == 4.5
    assert report['wait_ms']['p99'] == report['images_ms']['p99'] == 2.0
    assert report['select_ms']['p99'] == 1.0 and report['start_ms']['p50'] == 15.0
    assert report['publish_ms']['p50'] == 1.0  # of 96 ms of processing
    assert report['processor_share'] == 0.4


def test_every_frame_is_received_lost_or_left_out_by_design():
    heard = Heard()
    heard.take(array(
        inputs={'image0_received': 95, 'image1_received': 90, 'skipped_total': 15,
                'image0_rate_hz': 10.0},
        inference_status={'published_total': 50, 'superseded_total': 5, 'rate_limited_total': 18,
                          'rejected_total': 1}, latency={'deadline_misses': 2}))
    sent = {'frames': 100, 'frame_bytes': 7, 'inputs_ms': {}}
    report = report_of(Case('raw', 30.0, 'default'), heard, sent, 0.4)
    assert (report['sent'], report['received']) == (200, 185)
    assert report['transport_loss'] == 0.075
    assert report['unaccounted'] == 90 - 50 - 15 - 5 - 18 - 1 - 2
    assert report['name'] == 'raw 30 Hz, default profile'


def test_what_fell_out_of_the_queue_is_no_loss_of_the_transport():
    heard = Heard()
    heard.take(array(inputs={'image0_received': 80, 'image1_received': 80,
                             'image0_overflowed': 20, 'image1_overflowed': 15}))
    sent = {'frames': 100, 'frame_bytes': 7, 'inputs_ms': {}}
    report = report_of(Case('raw', 10.0), heard, sent, 0.4)
    assert (report['transport_loss'], report['overflowed']) == (0.025, 35)


def test_the_default_profile_loses_frames_and_the_node_says_so():
    report = bench_node(seconds=5.0, cases=[Case('jpeg', 10.0, 'default')])
    (case,) = report['cases']
    assert report['transport_loss_default_profile'] == case['transport_loss'] > 0.05
    assert 'transport' in case['named_causes']


def test_a_node_that_hears_nothing_lost_everything():
    sent = {'frames': 100, 'frame_bytes': 7, 'inputs_ms': {}}
    assert report_of(Case('raw', 10.0), Heard(), sent, 0.4)['transport_loss'] == 1.0


def test_memory_is_compared_after_the_start():
    samples = [(float(t), 100.0 + (50.0 if t < 13 else 0.0) + 0.1 * t) for t in range(0, 65)]
    grown = memory_of(samples)
    assert grown['memory_mib_per_minute'] == pytest.approx(6.0)
    assert grown['memory_mib'] == pytest.approx(106.4)
    assert grown['memory_growth_mib'] == pytest.approx(4.7)  # 5 s tenths, 47 s apart
    assert memory_of([(0.0, 5.0)])['memory_growth_mib'] == memory_of([])['memory_mib'] == 0.0


def test_cases_are_those_of_both_profiles():
    assert [case.name for case in CASES][:3] == [
        'jpeg 10 Hz, shipped profile', 'jpeg 30 Hz, shipped profile', 'raw 10 Hz, shipped profile']
    assert {case.profile for case in CASES} == {'shipped', 'default'} and len(CASES) == 6


def test_wrong_calls_name_the_value():
    with pytest.raises(ConfigurationError, match='seconds 1.0 is out of range'):
        bench_node(seconds=1.0)
    for arguments, part in ((['--size', '1080p'], "--size '1080p'"), (['--only', 'x'], "'x'")):
        result = CliRunner().invoke(cli, ['bench', 'node', *arguments])
        assert isinstance(result.exception, ConfigurationError)
        assert part in str(result.exception) and 'jpeg 10 Hz' in str(result.exception)


def test_small_frames_arrive_and_every_one_is_accounted_for():
    report = bench_node(seconds=5.0, width=384, height=216, cases=[Case('jpeg', 20.0)])
    (case,) = report['cases']
    assert case['transport_loss'] == report['transport_loss'] == 0.0
    assert case['sent'] >= 4 * 50 and case['plans'] >= 5
    assert case['rate_limited'] >= case['plans'] // 2  # 20 Hz cameras, 10 Hz plans
    assert abs(case['unaccounted']) <= 1  # the last frame may still be on its way
    assert 0.0 < case['processor_share'] < 2.0
    assert 0.0 < case['overhead_ms']['p50'] < case['age_ms']['p99']
    assert case['memory_mib'] > 0.0 and report['transport_loss_default_profile'] is None
