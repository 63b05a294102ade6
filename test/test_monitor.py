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
import re
import sys
import time

import numpy as np
import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed (requirements-ros.txt)')

from fake_planner import straight_plan, TEXT

from rspec_planner.errors import InputError
from rspec_planner.live.monitor import end_in_ego_frame, first_speed, PlanMonitor, run_monitor
from rspec_planner.live.monitor_view import refresh, view
from rspec_planner.live.processes import free_domain_id, Processes
from rspec_planner.ros_conversions import plan_path

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
    message = plan_path(straight_plan(5, speed=10.0, pose=pose), 'odometry')
    assert first_speed(message) == pytest.approx(10.0, abs=1e-6)
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
    assert later['processing_ms'] == {'now': 128.0, 'p50': 120.0, 'p95': 130.0, 'p99': 131.0}
    assert later['times_ms']['decode'] == dict.fromkeys(('now', 'p50', 'p95', 'p99'), 35.0)
    assert later['inputs'] == {'image0': {'rate_hz': 10.0, 'age_ms': 41.0}}
    assert later['counts']['published'] >= 2 and later['tokens_per_second'] == 514.0
    assert later['accepted_length'] == 4.5 and later['skipped'] == {'history_short': 2}
    assert later['end_m'] == [51.2, 0.0] and later['speed_mps'] == 8.0
    assert 0.0 <= later['age_ms'] < 60_000.0
    assert later['diagnostics']['inputs'] == {'level': 'OK', 'message': 'fine'}
    lines = '\n'.join(view(later))
    assert TEXT in lines and 'history_short 2' in lines and '130.0' in lines


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_is_redrawn_in_its_own_width_and_a_file_is_appended(monkeypatch):
    monkeypatch.setenv('COLUMNS', '40')
    monkeypatch.setenv('LINES', '60')
    monitor = PlanMonitor.__new__(PlanMonitor)
    monitor.__dict__.update(_namespace='/planning/rspec_planner', plans=0, newest=None,
                            _arrivals=deque(), diagnostics={
                                'inputs': (2, 'camera is missing; ' * 5, {}),
                                'latency': (0, 'within budget', {
                                    'p50_ms': '100.0', 'p95_ms': '110.0', 'p99_ms': '120.0',
                                    'decode_p50_ms': '50.0', 'decode_p95_ms': '60.0',
                                    'decode_p99_ms': '70.0'})})
    state = monitor.snapshot()
    terminal, file = Terminal(), io.StringIO()
    refresh(terminal, state)
    refresh(file, state)
    drawn = terminal.getvalue()
    assert drawn.startswith('\x1b[H') and drawn.endswith('\x1b[J')
    plain = re.sub(r'\x1b\[[0-9;]*[A-Za-z]', '', drawn)
    assert max(len(line) for line in plain.splitlines()) == 40
    assert '\x1b[31mERROR \x1b[0minputs' in drawn and '\x1b[31m' not in file.getvalue()
    assert 'no plan seen yet' in file.getvalue()
    bars = {line.split()[0]: line.count('█')
            for line in file.getvalue().splitlines() if line}
    assert (bars['processing'], bars['decode']) == (24, 12)


def test_no_planner_is_one_clear_line(domain):
    with pytest.raises(InputError, match=f'no plan within 0.*ROS_DOMAIN_ID {domain}'):
        run_monitor(once=True, seconds=0.3)
