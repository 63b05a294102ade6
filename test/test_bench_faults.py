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
"""The harness that breaks things: its judgement, and a handful of faults against a live node."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed')

from node_rig import plan_at
from trajectory_msgs.msg import MultiDOFJointTrajectory

from rspec_planner.errors import ConfigurationError
from rspec_planner.live.bench_faults import (
    bench_faults,
    chosen_faults,
    FAULTS,
    name_of,
    report_of,
    Verdict,
)
from rspec_planner.live.bench_soak import bench_soak, Sample
from rspec_planner.live.bench_soak import report_of as soak_report
from rspec_planner.live.fault_actions import QUICK
from rspec_planner.live.fault_feed import defect
from rspec_planner.live.reliability import faults_section, soak_section
from rspec_planner.ros_conversions import plan_trajectory


def test_there_are_many_faults_of_distinct_names():
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 40 and set(QUICK) <= set(names)
    assert [fault.name for fault in chosen_faults(('hang',), True)] == ['hang']
    with pytest.raises(ConfigurationError, match="fault 'x' is unknown"):
        chosen_faults(('x',), False)


def trajectory():
    return plan_trajectory(plan_at(np.eye(4)), 'odometry')


def test_a_trajectory_that_nobody_may_drive_is_seen():
    assert defect(trajectory()) == ''
    assert defect(MultiDOFJointTrajectory()) == '0 points'
    message = trajectory()
    message.points[3].velocities[0].linear.x = math.nan
    assert defect(message) == 'not finite'
    message = trajectory()
    message.points[40].transforms[0].translation.y = 15.0
    assert 'jump' in defect(message)
    message = trajectory()
    message.points[40].velocities[0].angular.z = 3.0  # at 4 m/s
    assert defect(message) == '12 m/s^2 sideways'
    message = trajectory()
    message.points[9].velocities[0].linear.x = 20.0  # points stay where 4 m/s leads
    assert 'jump' in defect(message)


def test_a_name_counts_only_when_it_is_new():
    fault = next(f for f in FAULTS if f.name == 'camera_black')
    key = 'inputs.skipped_camera_black'
    assert name_of(fault, {key: '3'}, {key: '3'}) == ''
    assert name_of(fault, {key: '3'}, {key: '4'}) == f'{key} = 4'
    assert name_of(fault, {}, {key: '0'}) == ''
    assert name_of(fault, {}, {'inputs.skip_reason': 'camera_black'}) != ''
    assert name_of(fault, {}, {'inputs: camera_black: camera x': '!'}) \
        == 'inputs: camera_black: camera x'
    assert name_of(fault, {}, {'inputs: odometry; camera_black: x; restart it': '!'}) \
        == 'inputs: camera_black: x'


def verdict(**changes):
    values = {'name': 'x', 'group': 'camera', 'what': 'y', 'named': 'z', 'needed': True,
              'crashed': False, 'invalid_plans': 0, 'relabelled_plans': 0, 'plans_during': 3,
              'since_heal_s': 0.4, 'recovery_s': 0.1}
    return Verdict(**{**values, **changes})


@pytest.mark.parametrize('changes', [
    {'named': ''}, {'crashed': True}, {'invalid_plans': 1}, {'relabelled_plans': 1},
    {'recovery_s': 1.01}, {'recovery_s': -1.0}, {'needed': False, 'named': '', 'plans_during': 0}])
def test_every_way_to_fail_fails(changes):
    assert verdict().ok and not verdict(**changes).ok
    report = report_of([verdict(), verdict(**changes)], 0)
    assert not report['ok'] and report['failed'] == ['x'] and report['faults'] == 2
    assert not report_of([verdict()], -11)['ok']
    assert '| x | y |' in faults_section(report)


def flat(minutes=10.0, **slopes):
    """Return samples and latencies that grow by so much per second."""
    times = np.arange(0.0, 60.0 * minutes)
    samples = [Sample(t, 400.0 + slopes.get('memory', 0.0) * t,
                      30 + int(slopes.get('handles', 0.0) * t), 12) for t in times]
    late = [(t, 100.0 + slopes.get('late', 0.0) * t) for t in times]
    return soak_report(samples, late, {'inference_status.published_total': '600'}, minutes,
                       'none', 0)


def test_a_soak_judges_what_grows():
    assert flat()['ok'] and flat()['plans'] == 600
    assert flat()['window_s'] == pytest.approx((599 - 60) / 3)
    assert not flat(memory=0.1)['flat']['memory_mib']
    assert not flat(handles=0.05)['flat']['handles']
    assert not flat(late=0.1)['flat']['p99_ms']
    assert '| memory_mib | 400.000 |' in soak_section(flat())


@pytest.mark.ros
def test_a_handful_of_faults_is_survived_by_name():
    report = bench_faults(quick=True)
    assert report['ok'], report
    assert report['faults'] == len(QUICK) and report['unnamed'] == 0
    assert report['crashes'] == report['invalid_plans'] == report['relabelled_plans'] == 0


@pytest.mark.ros
def test_a_short_soak_runs():
    """Twenty seconds say nothing about leaks; handles and threads must be flat even so."""
    report = bench_soak(1 / 3, planner='none')
    assert report['plans'] > 100 and report['failed'] == 0 and report['exit_code'] == 0
    assert report['flat']['threads'] and report['flat']['handles']
    assert report['windows']['p99_ms']['last'] > 0.0


#: without a guard: what must then leave the node, or stay without a name
UNGUARDED = {'nan_logits': 'invalid_plans', 'jump': 'invalid_plans', 'behind': 'invalid_plans',
             'wild_curvature': 'invalid_plans', 'old_stamp': 'relabelled_plans',
             'camera_black': 'unnamed', 'odometry_lies': 'unnamed'}


@pytest.mark.ros
def test_a_node_without_its_guard_is_caught(monkeypatch):
    """The matrix proves nothing unless it fails where the guard is missing."""
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get('PYTHONPATH', '')]))
    report = bench_faults(only=tuple(UNGUARDED), module='unguarded_node')
    assert not report['ok'] and sorted(report['failed']) == sorted(UNGUARDED)
    found = {row['name']: row for row in report['verdicts']}
    for name, how in UNGUARDED.items():
        assert (found[name]['named'] == '') if how == 'unnamed' else found[name][how] > 3, name
    assert report['crashes'] == 0 and report['named_without_fault'] == []
