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

import os
from pathlib import Path
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ElementTree

from node_rig import private_domain, wait_until
import pytest

from rspec_planner import transport
from rspec_planner.errors import ConfigurationError
from rspec_planner.transport import (
    config_path,
    fastdds_environment,
    PROFILE_VARIABLE,
    RANGE_VARIABLE,
    viewer_environment,
)

FRAMES = 40
CAMERAS = ('cross_left', 'front_wide', 'cross_right', 'front_tele')

PUBLISHER = textwrap.dedent("""
    import sys, time
    import numpy as np
    import rclpy
    from rclpy.qos import QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import CompressedImage, Image
    from rspec_planner.ros_conversions import compressed_image_message, image_message
    kind, frames, cameras = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    pixels = np.random.default_rng(0).integers(0, 255, (480, 640, 3), dtype=np.uint8)
    message = (compressed_image_message if kind == 'jpeg' else image_message)(pixels, 1, 'x')
    rclpy.init()
    node = rclpy.create_node('cameras')
    publishers = [node.create_publisher(type(message), f'/{kind}/{camera}', QoSProfile(
        depth=10, reliability=ReliabilityPolicy.BEST_EFFORT)) for camera in cameras]
    while any(publisher.get_subscription_count() == 0 for publisher in publishers):
        time.sleep(0.02)
    sys.stdin.readline()
    start = time.monotonic()
    for frame in range(frames):
        for publisher in publishers:
            publisher.publish(message)
        time.sleep(max(0.0, start + 0.1 * (frame + 1) - time.monotonic()))
    sys.stdin.readline()
    rclpy.shutdown()
""")


def test_files_are_found_in_the_source_tree():
    path = config_path('fastdds.xml')
    assert path == Path(transport.__file__).resolve().parents[1] / 'config' / 'fastdds.xml'


@pytest.mark.parametrize('how', ['ament', 'prefix'])
def test_files_are_found_after_installation(tmp_path, monkeypatch, how):
    share = tmp_path / 'share' / 'rspec_planner' / 'config'
    share.mkdir(parents=True)
    (share / 'fastdds.xml').write_text('<dds/>')
    installed = tmp_path / 'lib' / 'python3' / 'site-packages' / 'rspec_planner' / 'transport.py'
    monkeypatch.setattr(transport, '__file__', str(
        installed if how == 'prefix' else '/elsewhere/rspec_planner/transport.py'))
    monkeypatch.setenv('AMENT_PREFIX_PATH', str(tmp_path) if how == 'ament' else '')
    assert config_path('fastdds.xml') == share / 'fastdds.xml'


def test_missing_file_is_named():
    with pytest.raises(ConfigurationError, match="'gone.xml' is missing.*reinstall"):
        config_path('gone.xml')


def test_environment_names_the_profile_and_keeps_the_users_choice(monkeypatch):
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)
    assert fastdds_environment() == {PROFILE_VARIABLE: str(config_path('fastdds.xml'))}
    monkeypatch.setenv(PROFILE_VARIABLE, '/my/own.xml')
    assert fastdds_environment() == {PROFILE_VARIABLE: '/my/own.xml'}


def test_profile_has_a_large_shared_segment_and_no_builtin_transports():
    tree = ElementTree.parse(config_path('fastdds.xml'))
    space = {'d': 'http://www.eprosima.com'}
    found = {item.find('d:type', space).text: item
             for item in tree.iterfind('.//d:transport_descriptor', space)}
    assert set(found) == {'SHM', 'UDPv4'}
    assert int(found['SHM'].find('d:segment_size', space).text) >= 128 * 2**20
    assert int(found['SHM'].find('d:port_queue_capacity', space).text) == 512
    assert tree.find('.//d:useBuiltinTransports', space).text == 'false'
    assert tree.find('.//d:participant', space).get('is_default_profile') == 'true'


def test_a_viewer_gets_its_profile_instead_of_the_one_for_cameras(monkeypatch):
    monkeypatch.delenv(RANGE_VARIABLE, raising=False)
    own = {PROFILE_VARIABLE: str(config_path('fastdds_viewer.xml'))}
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)
    assert viewer_environment() == own
    monkeypatch.setenv(PROFILE_VARIABLE, str(config_path('fastdds.xml')))
    assert viewer_environment() == own
    monkeypatch.setenv(RANGE_VARIABLE, 'LOCALHOST')
    assert viewer_environment() == {
        PROFILE_VARIABLE: str(config_path('fastdds_viewer_localhost.xml')),
        RANGE_VARIABLE: 'SYSTEM_DEFAULT'}
    monkeypatch.setenv(PROFILE_VARIABLE, '/my/own.xml')
    assert viewer_environment() == {PROFILE_VARIABLE: '/my/own.xml'}


@pytest.mark.parametrize('name', ['fastdds_viewer.xml', 'fastdds_viewer_localhost.xml'])
def test_who_moves_images_does_not_take_a_viewers_profile(monkeypatch, name):
    """Somebody exported it for RViz, and then started the node in the same shell."""
    monkeypatch.setenv(PROFILE_VARIABLE, str(config_path(name)))
    assert fastdds_environment() == {PROFILE_VARIABLE: str(config_path('fastdds.xml'))}


def test_what_a_viewer_sets_ends_with_it(monkeypatch):
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)
    monkeypatch.setenv(RANGE_VARIABLE, 'LOCALHOST')
    before = dict(os.environ)
    with transport.fastdds_applied(viewer=True):
        assert os.environ[PROFILE_VARIABLE].endswith('fastdds_viewer_localhost.xml')
        assert os.environ[RANGE_VARIABLE] == 'SYSTEM_DEFAULT'
    assert dict(os.environ) == before


WATCHER = textwrap.dedent("""
    import os
    from rspec_planner.live.session import ros_node
    before = dict(os.environ)
    with ros_node('watcher', viewer=True):
        assert dict(os.environ) == before
    assert dict(os.environ) == before
""")


@pytest.mark.ros
def test_a_node_that_watches_leaves_the_environment_as_it_was():
    """In a process of its own: the first profile that Fast DDS reads there stays for good."""
    private_domain()
    subprocess.run([sys.executable, '-c', WATCHER], check=True, timeout=60, env={
        **os.environ, 'PYTHONPATH': str(Path(__file__).resolve().parents[1])})


def shared_ports(pid):
    """Return the shared-memory ports of Fast DDS that a process has mapped."""
    maps = Path(f'/proc/{pid}/maps').read_text(encoding='utf-8')
    return {line.split('/')[-1] for line in maps.splitlines() if '/dev/shm/fast' in line}


VIEWER = textwrap.dedent("""
    import sys, rclpy
    from std_msgs.msg import String
    rclpy.init()
    node = rclpy.create_node('viewer')
    node.create_subscription(String, '/seen', lambda message: print(message.data, flush=True), 1)
    rclpy.spin(node)
""")


@pytest.mark.ros
@pytest.mark.parametrize('reach', ['LOCALHOST', 'SUBNET'])
@pytest.mark.parametrize('viewer', [False, True])
def test_a_viewer_hears_a_node_and_shares_no_lock_with_it(viewer, reach, monkeypatch):
    """The other process, for comparison, has a lock in common with whoever sends to it."""
    import rclpy
    from std_msgs.msg import String
    private_domain()
    monkeypatch.setenv(RANGE_VARIABLE, reach)
    environment = viewer_environment() if viewer else fastdds_environment()
    child = subprocess.Popen([sys.executable, '-c', VIEWER], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, **environment})
    rclpy.init()
    node = rclpy.create_node('sender')
    try:
        publisher = node.create_publisher(String, '/seen', 1)
        wait_until(lambda: publisher.get_subscription_count() == 1, 'a match', 20)
        publisher.publish(String(data='hello'))
        assert child.stdout.readline().strip() == 'hello'
        assert bool(shared_ports(child.pid)) is not viewer
    finally:
        child.kill()
        child.wait()
        node.destroy_node()
        rclpy.shutdown()


def receive(kind):
    """Return how many of FRAMES frames of each camera cross from another process."""
    import rclpy
    from rclpy.qos import QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import CompressedImage, Image
    node = rclpy.create_node('listener')
    got = dict.fromkeys(CAMERAS, 0)

    def count(camera):
        got[camera] += 1
    subscriptions = [node.create_subscription(
        CompressedImage if kind == 'jpeg' else Image, f'/{kind}/{camera}',
        lambda message, camera=camera: count(camera),
        QoSProfile(depth=10, reliability=ReliabilityPolicy.BEST_EFFORT)) for camera in CAMERAS]
    child = subprocess.Popen(
        [sys.executable, '-c', PUBLISHER, kind, str(FRAMES), *CAMERAS], stdin=subprocess.PIPE,
        text=True, env={**os.environ, 'PYTHONPATH': str(Path(__file__).resolve().parents[1])})
    try:
        wait_until(lambda: all(s.get_publisher_count() > 0 for s in subscriptions), 'match', 30)
        child.stdin.write('go\n')
        child.stdin.flush()
        deadline = time.monotonic() + 0.1 * FRAMES + 5
        while min(got.values()) < FRAMES and time.monotonic() < deadline:
            rclpy.spin_once(node, timeout_sec=0.1)
        child.stdin.write('end\n')
        child.stdin.flush()
        assert child.wait(20) == 0
    finally:
        child.kill()
        node.destroy_node()
    return got


@pytest.mark.ros
@pytest.mark.parametrize('kind', ['jpeg', 'raw'])
def test_four_cameras_at_10_hz_arrive_complete_between_two_processes(kind):
    import rclpy
    private_domain()
    rclpy.init()
    try:
        assert receive(kind) == dict.fromkeys(CAMERAS, FRAMES)
    finally:
        rclpy.shutdown()
