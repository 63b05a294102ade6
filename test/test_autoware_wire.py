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
"""
Autoware's messages on the wire: the node publishes types generated from their definitions.

Definitions of autoware_msgs and autoware_internal_msgs (fields, types, order).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys

from node_rig import TEXT
import pytest
from rosidl_build import missing_tools, Workspace

pytestmark = pytest.mark.ros
POINT = """\
builtin_interfaces/Duration time_from_start
geometry_msgs/Pose pose
float32 longitudinal_velocity_mps
float32 lateral_velocity_mps
float32 acceleration_mps2
float32 heading_rate_rps
float32 front_wheel_angle_rad
float32 rear_wheel_angle_rad
"""
PACKAGES = {
    'autoware_planning_msgs': {
        'TrajectoryPoint': POINT,
        'Trajectory': 'std_msgs/Header header\nautoware_planning_msgs/TrajectoryPoint[] points\n'},
    'autoware_internal_planning_msgs': {
        'CandidateTrajectory': 'std_msgs/Header header\n'
                               'unique_identifier_msgs/UUID generator_id\n'
                               'autoware_planning_msgs/TrajectoryPoint[] points\n',
        'GeneratorInfo': 'unique_identifier_msgs/UUID generator_id\n'
                         'std_msgs/String generator_name\n',
        'CandidateTrajectories':
            'autoware_internal_planning_msgs/CandidateTrajectory[] candidate_trajectories\n'
            'autoware_internal_planning_msgs/GeneratorInfo[] generator_info\n'},
    'autoware_internal_debug_msgs': {
        'StringStamped': 'builtin_interfaces/Time stamp\nstring data\n',
        'Float64Stamped': 'builtin_interfaces/Time stamp\nfloat64 data\n'},
    'autoware_internal_msgs': {
        'PublishedTime': 'std_msgs/Header header\nbuiltin_interfaces/Time published_stamp\n'},
}


@pytest.fixture(scope='module')
def probe(tmp_path_factory):
    """Return what a process with Autoware's packages heard from the node."""
    if missing_tools():
        pytest.skip(f'Autoware messages cannot be generated without {missing_tools()}')
    workspace = Workspace(tmp_path_factory.mktemp('autoware'))
    for package, definitions in PACKAGES.items():
        workspace.build(package, definitions)
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(workspace.python), str(here), os.environ.get('PYTHONPATH', '')])
    done = subprocess.run([sys.executable, str(here / 'autoware_probe.py')], text=True,
                          env={**os.environ, 'PYTHONPATH': paths}, capture_output=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_trajectory(probe):
    assert set(probe['stamps']) == {probe['t0_ns']}
    assert probe['frame'] == 'map'
    assert probe['times_ns'] == [i * 100_000_000 for i in range(65)]
    assert probe['speeds'] == [5.0] * 65
    assert probe['heading_rates'] == pytest.approx([0.05] * 65)
    assert probe['distance'] == pytest.approx(32.0)


def test_candidates_reasoning_and_numbers(probe):
    assert probe['candidates'] == [65, 65]
    assert probe['names'] == ['rspec_planner_0', 'rspec_planner_1']
    assert probe['text'] == TEXT
    assert 0.0 < probe['latency_ms'] <= probe['number_age_ms']
