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
"""The monitor: what it reads off real topics, and one clear line when nothing plans."""

from __future__ import annotations

from collections import deque
import io
import json
import math
from pathlib import Path
import sys
import time

import numpy as np
import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed (requirements-ros.txt)')

from fake_planner import straight_plan, TEXT

from rspec_planner.errors import InputError
from rspec_planner.live.monitor import end_in_ego_frame, PlanMonitor, run_monitor, view
from rspec_planner.live.processes import free_domain_id, Processes
from rspec_planner.ros_conversions import plan_trajectory

pytestmark = pytest.mark.ros

HERE = Path(__file__).parent


@pytest.fixture
def domain(monkeypatch) -> int:
    chosen = free_domain_id()
    monkeypatch.setenv('ROS_DOMAIN_ID', str(chosen))
    monkeypatch.setenv('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    return chosen


def test_end_point_is_seen_from_the_ego(tmp_path):
    yaw, pose = 2.5, np.eye(4)
    pose[:2, :2] = [[math.cos(yaw), -math.sin(yaw)], [math.sin(yaw), math.cos(yaw)]]
    pose[:3, 3] = 1000.0, -500.0, 3.0
    message = plan_trajectory(straight_plan(5, speed=10.0, pose=pose), 'odometry')
    assert end_in_ego_frame(message) == pytest.approx((64.0, 0.0), abs=1e-6)


def test_rate_is_that_of_the_newest_seconds():
    monitor, now = PlanMonitor.__new__(PlanMonitor), time.monotonic()
    monitor._arrivals = deque([now - 1000.0, *(now - 0.1 * k for k in range(10, -1, -1))])
    assert monitor.rate_hz() == pytest.approx(10.0)


def test_json_and_echo_of_a_live_planner(domain, tmp_path):
    with Processes(tmp_path, domain_id=domain) as processes:
        processes.start('planner', [sys.executable, str(HERE / 'fake_planner.py')])
        processes.start('world', [sys.executable, str(HERE / 'fake_world.py'), '--seconds', '60',
                                  '--subscribers', '1'])
        echo = io.StringIO()
        state = run_monitor(once=True, echo=True, stream=echo, seconds=30.0)
        child = processes.start_module('monitor', 'rspec_planner.live.monitor', '--json',
                                       '--seconds', '4')
        assert child.process.wait(30) == 0, child.tail()
        later = json.loads(child.log.read_text().splitlines()[-1])
    assert echo.getvalue().startswith('t0 ') and TEXT in echo.getvalue()
    assert state['plans'] >= 1 and state['reasoning'] == TEXT
    assert later['rate_hz'] > 0.0
    assert later['plans'] >= 2 and later['t0_ns'] > state['t0_ns']
    assert later['processing_ms'] == {'p50': 128.0, 'p95': 128.0, 'p99': 128.0}
    assert later['accepted_length'] == 4.5 and later['skipped'] == {'history_short': 2}
    assert later['end_m'] == [51.2, 0.0] and later['speed_mps'] == 8.0
    assert 0.0 <= later['age_ms'] < 60_000.0
    assert later['diagnostics']['inputs'] == {'level': 'OK', 'message': 'fine'}
    lines = '\n'.join(view(later))
    assert TEXT in lines and 'history_short 2' in lines and 'p95 128 ms' in lines


def test_no_planner_is_one_clear_line(domain):
    with pytest.raises(InputError, match=f'no plan within 0.*ROS_DOMAIN_ID {domain}'):
        run_monitor(once=True, seconds=0.3)
