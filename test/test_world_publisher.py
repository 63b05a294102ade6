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
"""The real-time world: an absolute schedule, stamps, completeness, over real DDS."""

from __future__ import annotations

import json
from pathlib import Path
import sys

import numpy as np
import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed (requirements-ros.txt)')

from nav_msgs.msg import Odometry
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import String

from rspec_planner.live.processes import free_domain_id, Processes
from rspec_planner.live.session import ros_node
from rspec_planner.planner.images import decode_message
from rspec_planner.ros_conversions import stamp_to_ns

pytestmark = pytest.mark.ros

WORLD = str(Path(__file__).with_name('fake_world.py'))
CAMERAS = ('cross_left', 'front_wide', 'cross_right', 'front_tele')


def collect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str,
            seconds: float) -> tuple[dict[str, list], dict]:
    """Run the fake world in its own process; return messages by topic and its summary."""
    domain = free_domain_id()
    monkeypatch.setenv('ROS_DOMAIN_ID', str(domain))
    monkeypatch.setenv('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    kind, suffix = ((CompressedImage, '/compressed') if encoding == 'jpeg' else (Image, ''))
    topics = {'/localization/kinematic_state': Odometry, '/world/ground_truth/coc': String,
              **{f'/sensing/camera/{c}/camera_info': CameraInfo for c in CAMERAS},
              **{f'/sensing/camera/{c}/image_raw{suffix}': kind for c in CAMERAS}}
    got: dict[str, list] = {topic: [] for topic in topics}
    with ros_node('listener') as (node, executor), \
            Processes(tmp_path, domain_id=domain) as processes:
        for topic, message in topics.items():
            node.create_subscription(message, topic, got[topic].append, qos_profile_sensor_data)
        child = processes.start('world', [
            sys.executable, WORLD, '--seconds', str(seconds), '--encoding', encoding,
            '--subscribers', '1'])
        while child.running:
            executor.spin_once(timeout_sec=0.1)
        assert child.process.returncode == 0, child.tail()
        return got, json.loads(child.log.read_text().splitlines()[-1])


def stamps(messages: list) -> np.ndarray:
    return np.array([stamp_to_ns(m.header.stamp) for m in messages])


def test_jpeg_world_keeps_an_absolute_schedule(monkeypatch, tmp_path):
    got, summary = collect(monkeypatch, tmp_path, 'jpeg', 2.0)
    frames = stamps(got['/sensing/camera/front_wide/image_raw/compressed'])
    assert len(frames) == 20 == summary['frames']
    assert np.all(np.diff(frames) == 100_000_000)
    for camera in CAMERAS:
        assert np.array_equal(
            stamps(got[f'/sensing/camera/{camera}/image_raw/compressed']), frames)
        assert np.array_equal(stamps(got[f'/sensing/camera/{camera}/camera_info']), frames)
    odometry = got['/localization/kinematic_state']
    assert len(odometry) == 200 and np.all(np.diff(stamps(odometry)) == 10_000_000)
    assert stamps(odometry)[0] == frames[0]
    assert {m.data for m in got['/world/ground_truth/coc']} == {
        'cruising left, keep speed because the road is free.'}
    assert odometry[0].header.frame_id == 'map' and odometry[0].child_frame_id == 'base_link'


def test_odometry_follows_the_exact_circle(monkeypatch, tmp_path):
    got, _ = collect(monkeypatch, tmp_path, 'rgb8', 1.0)
    odometry = got['/localization/kinematic_state']
    times = (stamps(odometry) - stamps(odometry)[0]) / 1e9
    yaw = 8.0 * 0.01 * times
    xy = np.array([[m.pose.pose.position.x, m.pose.pose.position.y] for m in odometry])
    assert np.allclose(xy, 100.0 * np.stack([np.sin(yaw), 1 - np.cos(yaw)], -1), atol=1e-9)
    assert odometry[0].twist.twist.angular.z == pytest.approx(0.08)
    levels = [int(decode_message(m)[0, 0, 0])
              for m in got['/sensing/camera/front_wide/image_raw']]
    assert levels == list(range(10))  # frame k is painted k: none lost, none swapped


def test_without_subscribers_the_world_says_what_is_missing(tmp_path, monkeypatch):
    from fake_world import FakeDrive

    from rspec_planner.errors import ConfigurationError
    from rspec_planner.live.world_publisher import run_world
    from rspec_planner.world.rig import Rig
    monkeypatch.setenv('ROS_DOMAIN_ID', str(free_domain_id()))
    with pytest.raises(ConfigurationError, match='0 of 1 subscribers.*start the node first'):
        run_world(FakeDrive(), Rig(), seconds=1.0, subscribers=1, subscriber_timeout_s=0.3,
                  ready_file=str(tmp_path / 'ready'))
    assert (tmp_path / 'ready').exists()
