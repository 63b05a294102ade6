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
"""Replay of a bag to a subscriber in another process: bytes, order, clock, named skips."""

from __future__ import annotations

import json
from pathlib import Path
import threading
import time

import numpy as np
import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed (requirements-ros.txt)')

from drives import Ego
from geometry_msgs.msg import PointStamped
from nav_msgs.msg import Odometry
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import String

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.live.processes import free_domain_id, Processes
from rspec_planner.live.replay import new_names, run_replay
from rspec_planner.live.session import ros_node
from rspec_planner.ros_conversions import stamp_to_ns
from rspec_planner.world.bag import BagReader, BagWriter, message
from rspec_planner.world.messages import odometry_message

pytestmark = pytest.mark.ros

START_NS = 1_700_000_000_123_456_789
STEP_NS = 20_000_000


@pytest.fixture(params=['bag.mcap', 'bag.db3'])
def bag(request, tmp_path) -> Path:
    """Return a bag of 40 points 20 ms apart, 1 text, and a type that wheels do not have."""
    path = tmp_path / request.param
    with BagWriter(path) as writer:
        writer.add_topic('/point', 'geometry_msgs/PointStamped')
        writer.add_topic('/text', 'std_msgs/String')
        writer.add_topic('/tf', 'tf2_msgs/TFMessage')
        for i in range(40):
            stamp_ns = START_NS + i * STEP_NS
            stamp = message('builtin_interfaces/Time', sec=stamp_ns // 10**9,
                            nanosec=stamp_ns % 10**9)
            writer.write('/point', stamp_ns, message(
                'geometry_msgs/PointStamped',
                header=message('std_msgs/Header', stamp=stamp, frame_id='map'),
                point=message('geometry_msgs/Point', x=float(i), y=0.5, z=-1.0)))
        writer.write('/text', START_NS + 39 * STEP_NS, message('std_msgs/String', data='end'))
        writer.write('/tf', START_NS + 39 * STEP_NS,
                     message('tf2_msgs/TFMessage', transforms=[]))
    return path


def test_subscriber_gets_every_message_and_the_clock(bag, monkeypatch, tmp_path):
    domain = free_domain_id()
    monkeypatch.setenv('ROS_DOMAIN_ID', str(domain))
    monkeypatch.setenv('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    points, texts, clock = [], [], []
    with ros_node('listener') as (node, executor), \
            Processes(tmp_path / 'logs', domain_id=domain) as processes:
        node.create_subscription(PointStamped, '/point', points.append, 100)
        node.create_subscription(String, '/text', texts.append, 10)
        node.create_subscription(Clock, '/clock', lambda m: clock.append(
            (stamp_to_ns(m.clock), len(points))), 100)
        child = processes.start_module('replay', 'rspec_planner.live.replay', str(bag))
        while child.running:
            executor.spin_once(timeout_sec=0.1)
        log = child.log.read_text()
        assert child.process.returncode == 0, log
    assert [p.point.x for p in points] == [float(i) for i in range(40)]
    assert [stamp_to_ns(p.header.stamp) for p in points] == [
        START_NS + i * STEP_NS for i in range(40)]
    assert [t.data for t in texts] == ['end']
    ticks = np.array([t for t, _ in clock])
    assert ticks[0] == START_NS and np.all(np.diff(ticks) == 10_000_000)
    result = json.loads(log.splitlines()[-1])
    try:
        import tf2_msgs.msg  # noqa: F401
    except ImportError:
        assert result['messages'] == 41
        assert 'tf2_msgs' in result['skipped']['/tf'] and '/tf is not replayed' in log
    else:
        assert result['messages'] == 42 and result['skipped'] == {}


def test_rate_scales_the_duration(bag, monkeypatch):
    monkeypatch.setenv('ROS_DOMAIN_ID', str(free_domain_id()))
    monkeypatch.setattr('rspec_planner.live.replay.DISCOVERY_S', 0.0)
    slow = run_replay(bag, 1.0, progress=False)['seconds']
    fast = run_replay(bag, 4.0, progress=False)['seconds']
    assert slow >= 0.78 and fast >= 0.195  # 39 steps of 20 ms, never early
    assert slow > fast


@pytest.mark.parametrize('bag', ['bag.mcap'], indirect=True)
def test_loop_starts_again_until_stopped(bag, monkeypatch):
    monkeypatch.setenv('ROS_DOMAIN_ID', str(free_domain_id()))
    monkeypatch.setattr('rspec_planner.live.replay.DISCOVERY_S', 0.0)
    from rspec_planner.live import replay
    events: list[threading.Event] = []
    original = replay.Replayer.play

    def play_twice(self, rate, advance):
        original(self, rate, advance)
        events.append(self._stopped)
        if len(events) == 3:
            self._stopped.set()

    monkeypatch.setattr(replay.Replayer, 'play', play_twice)
    result = run_replay(bag, 50.0, True, progress=False)
    assert result['messages'] == 3 * (42 - len(result['skipped']))


def test_bad_calls_name_the_value(tmp_path):
    with pytest.raises(ConfigurationError, match='rate 0 is out of range'):
        run_replay(tmp_path / 'x.mcap', 0)
    with pytest.raises(InputError, match='does not exist'):
        run_replay(tmp_path / 'x.mcap', progress=False)


def test_bag_without_a_known_type_is_refused(tmp_path, monkeypatch):
    try:
        import tf2_msgs.msg  # noqa: F401
        pytest.skip('tf2_msgs is installed, so the bag can be replayed')
    except ImportError:
        pass
    monkeypatch.setenv('ROS_DOMAIN_ID', str(free_domain_id()))
    path = tmp_path / 'only_tf.mcap'
    with BagWriter(path) as writer:
        writer.add_topic('/tf', 'tf2_msgs/TFMessage')
        writer.write('/tf', START_NS, message('tf2_msgs/TFMessage', transforms=[]))
    with pytest.raises(InputError, match='holds no message that can be published here'):
        run_replay(path, progress=False)


NODE_TOPICS = {f'/sensing/camera/{name}/image_raw/compressed'
               for name in ('cross_left', 'front_wide', 'cross_right', 'front_tele')} | {
                   '/localization/kinematic_state'}


@pytest.fixture
def foreign(tmp_path) -> Path:
    """Return a bag with a vehicle's own names, a plan that it once made, and a mapping file."""
    path = tmp_path / 'foreign.mcap'
    with BagWriter(path) as writer:
        for name in ('left', 'front', 'right', 'tele'):
            writer.add_topic(f'/cam/{name}', 'sensor_msgs/CompressedImage')
            writer.write(f'/cam/{name}', START_NS, message(
                'sensor_msgs/CompressedImage', header=header(), format='jpeg',
                data=np.zeros(4, np.uint8)))
        writer.add_topic('/odom', 'nav_msgs/Odometry')
        writer.write('/odom', START_NS, odometry_message(header(), Ego(), (0.0, 0.0, 0.0, 1.0)))
        for topic in ('/planning/rspec_planner/output/reasoning', '/text'):
            writer.add_topic(topic, 'std_msgs/String')
            writer.write(topic, START_NS, message('std_msgs/String', data='x'))
    (tmp_path / 'map.yaml').write_text(
        'cameras: {cross_left: /cam/left, front_wide: /cam/front, cross_right: /cam/right, '
        'front_tele: /cam/tele}\nodometry: /odom\n')
    return path


def header():
    return message('std_msgs/Header', frame_id='', stamp=message(
        'builtin_interfaces/Time', sec=START_NS // 10**9, nanosec=START_NS % 10**9))


def test_a_mapping_publishes_under_the_names_of_the_node(foreign, tmp_path):
    with BagReader(foreign) as reader:
        names = new_names(foreign, reader, tmp_path / 'map.yaml', inputs_only=True)
        assert {name for name in names.values() if name} == NODE_TOPICS
        assert names['/cam/front'] == '/sensing/camera/front_wide/image_raw/compressed'
        assert names['/planning/rspec_planner/output/reasoning'] == '' and '/text' not in names
        assert new_names(foreign, reader, None, inputs_only=False) == {}
        (tmp_path / 'map.yaml').write_text('odometry: /odom\n')
        with pytest.raises(InputError, match='front_wide: /cam/front'):
            new_names(foreign, reader, tmp_path / 'map.yaml', inputs_only=False)


def test_a_planner_that_still_loads_is_waited_for(foreign, tmp_path, monkeypatch):
    domain = free_domain_id()
    monkeypatch.setenv('ROS_DOMAIN_ID', str(domain))
    monkeypatch.setenv('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    with ros_node('listener') as (node, executor), \
            Processes(tmp_path / 'logs', domain_id=domain) as processes:
        child = processes.start_module(
            'replay', 'rspec_planner.live.replay', str(foreign), '--topics',
            str(tmp_path / 'map.yaml'), '--inputs-only', '--wait', '60')
        topics = sorted(NODE_TOPICS)
        received = []
        for topic in topics:
            kind = Odometry if 'localization' in topic else CompressedImage
            assert child.running
            deadline = time.monotonic() + 20
            while not node.count_publishers(topic) and time.monotonic() < deadline:
                executor.spin_once(timeout_sec=0.05)
            node.create_subscription(kind, topic, received.append, 10)
        while child.running:
            executor.spin_once(timeout_sec=0.1)
        assert child.process.returncode == 0, child.tail()
        assert json.loads(child.log.read_text().splitlines()[-1])['messages'] == 6
        assert 'no planner listens' not in child.log.read_text()
    assert len(received) == len(topics)


def test_a_bag_of_plans_alone_has_no_inputs(tmp_path, monkeypatch):
    monkeypatch.setenv('ROS_DOMAIN_ID', str(free_domain_id()))
    path = tmp_path / 'plans.mcap'
    with BagWriter(path) as writer:
        writer.add_topic('/planning/rspec_planner/output/reasoning', 'std_msgs/String')
        writer.write('/planning/rspec_planner/output/reasoning', START_NS,
                     message('std_msgs/String', data='x'))
    with pytest.raises(InputError, match='no message that can be published'):
        run_replay(path, inputs_only=True, progress=False)
