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
"""The recorder as a process: every message of every QoS lands in a bag that opens elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
import shutil
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed (requirements-ros.txt)')

from rclpy.qos import DurabilityPolicy, QoSProfile
from std_msgs.msg import String

from rspec_planner.errors import InputError
from rspec_planner.live.processes import free_domain_id, Processes
from rspec_planner.live.recorder import run_recorder
from rspec_planner.live.session import ros_node
from rspec_planner.world.bag import BagReader

pytestmark = pytest.mark.ros

WORLD = str(Path(__file__).with_name('fake_world.py'))


def test_world_round_trip(tmp_path):
    domain, out, ready = free_domain_id(), tmp_path / 'drive.mcap', tmp_path / 'ready'
    with Processes(tmp_path / 'logs', domain_id=domain) as processes:
        recorder = processes.start_module('recorder', 'rspec_planner.live.recorder', str(out),
                                          '--ready-file', str(ready))
        processes.wait_for(ready.exists, 'the recorder', 30)
        world = processes.start('world', [sys.executable, WORLD, '--seconds', '1.5',
                                          '--subscribers', '1'])
        processes.wait_for(lambda: not world.running, 'the end of the world', 30,
                           ended_well=('world',))
        recorder.process.send_signal(signal.SIGINT)
        assert recorder.process.wait(15) == 0, recorder.tail()
        summary = json.loads(recorder.log.read_text().splitlines()[-1])
    counts = summary['topics']
    for camera in ('cross_left', 'front_wide', 'cross_right', 'front_tele'):
        assert counts[f'/sensing/camera/{camera}/image_raw/compressed'] >= 12
        assert counts[f'/sensing/camera/{camera}/camera_info'] >= 12
    assert counts['/localization/kinematic_state'] >= 120
    assert sum(counts.values()) == summary['messages'] and summary['skipped'] == {}
    with BagReader(out) as bag:
        assert bag.message_count == summary['messages']
        assert bag.topics['/localization/kinematic_state'] == 'nav_msgs/msg/Odometry'
        messages = list(bag.read(('/localization/kinematic_state',)))
    first, last = messages[0].content, messages[-1].content
    span = (last.header.stamp.sec - first.header.stamp.sec) * 10**9 \
        + last.header.stamp.nanosec - first.header.stamp.nanosec
    assert span >= 119 * 10_000_000 and span % 10_000_000 == 0
    assert last.pose.pose.position.x > first.pose.pose.position.x + 8.0
    opens_with_mcap(out, summary['messages'])


def opens_with_mcap(path: Path, count: int) -> None:
    mcap = pytest.importorskip('mcap_ros2.reader', reason='mcap-ros2-support is not installed')
    decoded = list(mcap.read_ros2_messages(str(path)))
    assert len(decoded) == count


def test_late_topics_and_latched_topics_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv('ROS_DOMAIN_ID', str(free_domain_id()))
    monkeypatch.setenv('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    out, stop, result = tmp_path / 'bag', threading.Event(), {}
    thread = threading.Thread(target=lambda: result.update(run_recorder(
        out, prefixes=('/planning/', '/latched'), stop=stop)))
    thread.start()
    with ros_node('talker') as (node, _):
        latched = node.create_publisher(String, '/latched', QoSProfile(
            depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL))
        latched.publish(String(data='kept'))
        late = node.create_publisher(String, '/planning/text', 10)
        other = node.create_publisher(String, '/other', 10)
        pause = threading.Event()
        for _ in range(200):
            if late.get_subscription_count() and latched.get_subscription_count():
                break
            pause.wait(0.05)
        pause.wait(0.3)
        for i in range(5):
            late.publish(String(data=str(i)))
            other.publish(String(data='not asked for'))
        pause.wait(0.3)
    stop.set()
    thread.join(10)
    assert result['topics'] == {'/latched': 1, '/planning/text': 5}
    with BagReader(out) as bag:
        assert bag.latched_topics() == {'/latched'}
        assert [m.content.data for m in bag.read(('/planning/text',))] == list('01234')


def test_an_existing_bag_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setenv('ROS_DOMAIN_ID', str(free_domain_id()))
    (tmp_path / 'a.mcap').write_bytes(b'precious')
    with pytest.raises(InputError, match='exists already'):
        run_recorder(tmp_path / 'a.mcap', seconds=0.1)
    assert (tmp_path / 'a.mcap').read_bytes() == b'precious'


def test_a_disk_that_fills_ends_the_recording_with_a_whole_bag(tmp_path, monkeypatch):
    monkeypatch.setenv('ROS_DOMAIN_ID', str(free_domain_id()))
    monkeypatch.setenv('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    free = iter([100, 100, 100, 63])

    def usage(folder):
        assert folder in (tmp_path, tmp_path / 'new')
        return SimpleNamespace(free=next(free, 63) * 2**20)
    monkeypatch.setattr(shutil, 'disk_usage', usage)
    result = run_recorder(tmp_path / 'new' / 'a.mcap', seconds=60.0)
    assert result['ok'] is False and '63 MiB are free' in result['ended']
    with BagReader(tmp_path / 'new' / 'a.mcap') as bag:
        assert bag.message_count == result['messages']
    with pytest.raises(InputError, match='b.mcap cannot be written: 63 MiB are free'):
        run_recorder(tmp_path / 'b.mcap', seconds=60.0)
