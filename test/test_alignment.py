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
Selection by time on bags of an analytic drive: a circle at 15 m/s, frames painted by number.

What is chosen is compared with closed forms, and what the live node chooses with `rspec plan`.
"""

from __future__ import annotations

import math
import os

from fake_world import FakeDrive, FakeEgo
from node_rig import CAMERAS, FakePlanner, private_domain, running, wait_until
import numpy as np
from numpy.testing import assert_array_equal
import pytest

from rspec_planner.bag_topics import choose_topics, TopicNames
from rspec_planner.offline import BagPlanner
from rspec_planner.parameters import load_yaml_parameters, NodeParameters
from rspec_planner.planner.buffers import Skip
from rspec_planner.ros_conversions import published_poses
from rspec_planner.transport import config_path
from rspec_planner.world.bag import BagReader
from rspec_planner.world.record import image_topic, record_world, RecordOptions
from rspec_planner.world.rig import Rig

SPEED, CURVATURE, SECONDS = 15.0, 0.01, 4.0
RIG = Rig(width=CAMERAS.width, height=CAMERAS.height)


class Circle(FakeDrive):
    """A drive on a circle; frame k is painted with the grey level k."""

    def __init__(self):
        super().__init__(CAMERAS.height, CAMERAS.width)
        self._ego = FakeEgo(speed=SPEED, curvature=CURVATURE)


def record(path, **options):
    """Return the bag and its options."""
    chosen = RecordOptions(encoding='raw', **options)
    record_world(path, Circle(), SECONDS, chosen, rig=RIG)
    return chosen


def pose_at(seconds):
    """Return the exact pose (4, 4) so long after the start."""
    angle = SPEED * CURVATURE * seconds
    cosine, sine = math.cos(angle), math.sin(angle)
    return np.array([[cosine, -sine, 0, sine / CURVATURE],
                     [sine, cosine, 0, (1 - cosine) / CURVATURE], [0, 0, 1, 0], [0, 0, 0, 1]])


def plan_offline(path):
    """Return planner, plans, skip reasons and image stamps by camera."""
    planner = FakePlanner()
    values = load_yaml_parameters(config_path('rspec_planner.param.yaml'))
    with BagReader(path) as reader:
        topics = choose_topics(path, reader.topics, reader.counts, TopicNames({}), CAMERAS.names)
        stamps = {name: np.array([item.log_ns for item in reader.read((image_topic(name),))])
                  for name in CAMERAS.names}
        bag = BagPlanner(planner, topics, NodeParameters.from_values(values))
        results = [result for item in reader.read(topics.all) for result in bag.feed(item)]
        results += bag.finish()
    skips = [result.reason for result in results if isinstance(result, Skip)]
    return planner, [r for r in results if not isinstance(r, Skip)], skips, stamps


@pytest.mark.parametrize('hz', [10.0, 20.0, 50.0, 100.0, 200.0])
def test_history_frames_and_plan_are_those_of_t0(tmp_path, hz):
    phases = {'cross_left': 7.0, 'cross_right': -11.0, 'front_tele': 23.0}
    options = record(tmp_path / 'a.mcap', odometry_hz=hz, phase_ms=phases, jitter_ms=3.0)
    planner, plans, skips, stamps = plan_offline(tmp_path / 'a.mcap')
    assert set(skips) <= {'history_short'}
    # odometry ends with the last frame, so 10 Hz cannot bracket a t0 behind its last sample
    assert len(plans) >= 23
    # linear interpolation leaves the arc by at most v^2 dt^2 / 8 R
    chord = SPEED ** 2 * (1 / hz) ** 2 * CURVATURE / 8
    for seen, plan in zip(planner.observations, plans):
        t0 = (seen.t0_ns - options.start_ns) / 1e9
        for k, camera in enumerate(CAMERAS.names):
            wanted = seen.t0_ns - np.arange(3, -1, -1) * 100_000_000
            nearest = [stamps[camera][np.argmin(np.abs(stamps[camera] - w))] for w in wanted]
            assert_array_equal(seen.image_stamps_ns[k], nearest)
            phase = round(phases.get(camera, 0.0) * 1e6)
            numbers = np.rint((seen.image_stamps_ns[k] - options.start_ns - phase) / 1e8)
            assert_array_equal(seen.images[k, :, 0, 0, 0], numbers)
        for k, pose in enumerate(seen.ego_poses):
            exact = np.linalg.inv(pose_at(t0)) @ pose_at(t0 + (k - 15) * 0.1)
            # both ends of the difference may be off
            assert np.abs(pose[:3, 3] - exact[:3, 3]).max() < 2.1 * chord + 1e-6
        _, placed = published_poses(plan, plan.poses, 'odometry')
        ahead = np.array([np.eye(4)] * 65)
        ahead[:, 0, 3] = SPEED * 0.1 * np.arange(65)
        error = np.abs(placed[:, :3, 3] - (pose_at(t0) @ ahead)[:, :3, 3])
        assert error[0].max() < chord + 1e-6
        assert error[0].max() < 0.01
        assert plan.t0_ns == seen.t0_ns


@pytest.mark.ros
def test_the_live_node_sees_what_planning_the_bag_sees(tmp_path):
    rclpy = pytest.importorskip('rclpy', reason='rclpy is not installed')
    from rspec_planner.live.processes import Processes
    path = tmp_path / 'drive.mcap'
    record(path, odometry_hz=50.0, jitter_ms=4.0, drop=0.02, seed=3,
           phase_ms={'cross_left': 9.0, 'cross_right': -8.0, 'front_tele': 17.0})
    offline, _, _, _ = plan_offline(path)
    expected = {seen.t0_ns: seen for seen in offline.observations}
    private_domain()
    rclpy.init()
    try:
        with running('use_sim_time:=true', 'sync.image_wait_ms:=200.0',
                     'sync.odometry_wait_ms:=200.0') as rig, \
                Processes(tmp_path, domain_id=int(os.environ['ROS_DOMAIN_ID'])) as processes:
            player = processes.start_module('player', 'rspec_planner.live.replay', str(path),
                                            '--rate', '0.5')
            last = max(expected)
            wait_until(lambda: not player.running or (rig.planner.observations and
                       rig.planner.observations[-1].t0_ns >= last), 'the end', 30.0)
            seen = [o for o in rig.planner.observations if o.t0_ns in expected]
            unexpected = [o.t0_ns for o in rig.planner.observations[2:]
                          if o.t0_ns not in expected]
    finally:
        rclpy.shutdown()
    # a loaded machine may miss some; those that were planned must agree
    assert len(seen) >= len(expected) / 2, f'{len(seen)} of {len(expected)} plans'
    assert not unexpected
    for live in seen:
        wanted = expected[live.t0_ns]
        assert_array_equal(live.image_stamps_ns, wanted.image_stamps_ns)
        assert_array_equal(live.images, wanted.images)
        assert_array_equal(live.ego_pose_at_t0, wanted.ego_pose_at_t0)
        assert_array_equal(live.ego_poses, wanted.ego_poses)
        assert live.speed_mps == wanted.speed_mps
