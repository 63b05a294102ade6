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
What the launch files ask for is started for real: processes, parameters, remaps, a replayed bag.

The real `launch` has no wheel; `Launched` turns the recorded actions into the same command lines.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import signal
import sys

from node_rig import wait_until
import numpy as np
import pytest
from rcl_interfaces.srv import GetParameters
import rclpy
from test_launch import Action, defaults_of, expanded, FOLDER, load, stand_ins

from rspec_planner.live.processes import Processes
from rspec_planner.live.recorded import read_drive
from rspec_planner.offline import OfflineOptions, plan_bag
from rspec_planner.world.drive import Drive
from rspec_planner.world.record import record_world, RecordOptions

pytestmark = [pytest.mark.ros, pytest.mark.usefixtures('ros')]


@pytest.fixture
def peer():
    node = rclpy.create_node('peer', use_global_arguments=False)
    yield node
    node.destroy_node()


@pytest.fixture(autouse=True)
def launch_packages(monkeypatch):
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)


class Launched:
    """The processes that launch and launch_ros start for given arguments of one file."""

    def __init__(self, name: str, **given: str) -> None:
        actions = load(FOLDER / name)
        self._values = defaults_of(actions) | given
        self._actions = expanded(actions, self._values)

    def value(self, thing):
        if isinstance(thing, Action):
            return self._values[thing.args[0]] if thing.kind == 'LaunchConfiguration' else \
                self.value(thing.args[0])
        return str(thing)

    def wanted(self, action: Action) -> bool:
        condition = action.options.get('condition')
        if condition is None:
            return True
        if condition.kind == 'IfCondition':
            return self.value(condition.args[0]) == 'true'
        return self._values[condition.args[0]] != condition.args[1]

    def processes(self) -> list[list[str]]:
        return [[self.value(part) for part in action.options['cmd']] for action in self._actions
                if action.kind == 'ExecuteProcess' and self.wanted(action)]

    def nodes(self) -> dict[str, list[str]]:
        return {action.options['package']: self._node(action.options)
                for action in self._actions if action.kind == 'Node' and self.wanted(action)}

    def _node(self, options) -> list[str]:
        ros = ['-r', f'__node:={options["name"]}',
               '-r', f'__ns:=/{self.value(options["namespace"])}'] if 'name' in options else []
        for part in options['parameters']:
            ros += [a for name, value in part.items()
                    for a in ('-p', f'{name}:={self.value(value)}')] \
                if isinstance(part, dict) else ['--params-file', self.value(part)]
        for name, target in options.get('remappings', []):
            ros += ['-r', f'{name}:={self.value(target)}']
        return [*(self.value(part) for part in options['arguments']), '--ros-args', *ros]


NODE = (sys.executable, '-m', 'rspec_planner')


def domain() -> int:
    return int(os.environ['ROS_DOMAIN_ID'])


def parameter(peer, node, name):
    client = peer.create_client(GetParameters, f'{node}/get_parameters')
    assert client.wait_for_service(20)
    future = client.call_async(GetParameters.Request(names=[name]))
    rclpy.spin_until_future_complete(peer, future, timeout_sec=20)
    peer.destroy_client(client)
    return future.result().values[0]


def test_every_argument_of_the_planner_takes_effect(peer, tmp_path):
    own = tmp_path / 'own.yaml'
    own.write_text('/**:\n  ros__parameters:\n    planning: {rate_hz: 5.0}\n')
    launched = Launched(
        'planner.launch.py', rspec_planner_param_path=str(own), namespace='car1',
        use_sim_time='true', log_level='debug', input_image0='/my/left/image_raw',
        input_odometry='/my/odometry', output_path='/my/path', rviz='true',
        rviz_config='/my/config.rviz')
    nodes = launched.nodes()
    assert nodes['rviz2'][:2] == ['-d', '/my/config.rviz']
    assert 'use_sim_time:=true' in nodes['rviz2']
    with Processes(tmp_path, domain_id=domain()) as processes:
        child = processes.start('node', [*NODE, *nodes['rspec_planner']])
        names = ('rspec_planner', '/car1')
        wait_until(lambda: names in peer.get_node_names_and_namespaces() or not child.running,
                   'the node', 60)

        def published():
            return {topic for topic, _ in peer.get_publisher_names_and_types_by_node(*names)}

        def subscribed():
            return {topic for topic, _ in peer.get_subscriber_names_and_types_by_node(*names)}
        inputs = {'/my/odometry', '/my/left/image_raw', '/my/left/image_raw/compressed',
                  '/clock', '/sensing/camera/front_wide/image_raw',
                  '/car1/rspec_planner/input/navigation_text'}
        outputs = {'/my/path', '/car1/rspec_planner/output/trajectory',
                   '/car1/rspec_planner/debug/marker'}
        # endpoints become known one by one
        wait_until(lambda: inputs <= subscribed() and outputs <= published()
                   or not child.running, 'the inputs and outputs', 60)
        assert child.running, child.tail()
        assert parameter(peer, '/car1/rspec_planner', 'planning.rate_hz').double_value == 5.0
        assert parameter(peer, '/car1/rspec_planner', 'use_sim_time').bool_value
        assert parameter(peer, '/car1/rspec_planner', 'autostart').bool_value
        assert '[DEBUG]' in child.log.read_text()
        child.process.send_signal(signal.SIGINT)
        assert child.process.wait(20) == 0, child.tail()


def test_a_node_without_autostart_waits_for_its_manager(peer, tmp_path):
    with Processes(tmp_path, domain_id=domain()) as processes:
        child = processes.start('node', [*NODE, *Launched(
            'planner.launch.py', autostart='false').nodes()['rspec_planner']])
        assert not parameter(peer, '/planning/rspec_planner', 'autostart').bool_value
        assert '[INFO]' not in child.log.read_text()
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(20) == 0, child.tail()


def test_respawn_and_optional_processes_are_asked_for():
    actions = load(FOLDER / 'planner.launch.py')
    node = next(action for action in expanded(actions, defaults_of(actions))
                if action.kind == 'Node')
    assert node.options['respawn'].args == ('use_respawn',)
    assert node.options['respawn_delay'] == 2.0
    assert list(Launched('planner.launch.py').nodes()) == ['rspec_planner']
    assert len(Launched('replay.launch.py', bag='x').processes()) == 1
    assert len(Launched('replay.launch.py', bag='x', record='y').processes()) == 2


def test_a_replayed_bag_is_planned_like_rspec_plan(tmp_path):
    bag, out = tmp_path / 'drive.mcap', tmp_path / 'plans.mcap'
    record_world(bag, Drive((), 3), 3.0, RecordOptions())
    records = tmp_path / 'records.jsonl'
    plan_bag(bag, OfflineOptions(records=records))
    offline = {record['t0_ns']: record for record in map(json.loads, records.open())}
    # slowly: the plans of a busy machine are then still in time
    replay = Launched('replay.launch.py', bag=str(bag), record=str(out), rate='0.2')
    recorder, player = replay.processes()
    node = Launched('planner.launch.py', use_sim_time='true').nodes()['rspec_planner']
    with Processes(tmp_path / 'logs', domain_id=domain()) as processes:
        processes.start('node', [*NODE, *node])
        recording = processes.start('recorder', recorder)
        playing = processes.start('player', player)
        wait_until(lambda: not playing.running, 'the end of the bag', 90)
        assert playing.process.returncode == 0, playing.tail()
        assert 'no planner listens' not in playing.log.read_text()
        assert processes.stop(recording, 10) == 0, recording.tail()
    drive = read_drive(out)
    assert len(drive.stamps) >= 2 and set(drive.stamps) <= set(offline)
    for t0_ns in drive.stamps:
        assert drive.texts[t0_ns] == offline[t0_ns]['text']
        # another guess makes wider products, which round differently
        poses = np.array(offline[t0_ns]['poses'])
        np.testing.assert_allclose(drive.plan(t0_ns).poses[:, :2], poses[:, :2], atol=1e-3)


def test_the_demo_starts_the_world_that_was_asked_for(tmp_path):
    (world,) = Launched('demo.launch.py', seconds='2.0', seed='7', scenario='red_light',
                        encoding='rgb8').processes()
    assert world[3:] == ['--seconds', '2.0', '--seed', '7', '--scenario', 'red_light',
                         '--encoding', 'rgb8']
    with Processes(tmp_path, domain_id=domain()) as processes:
        child = processes.start('world', world)
        assert child.process.wait(60) == 0, child.tail()
        report = json.loads(Path(child.log).read_text().splitlines()[-1])
    assert report['frames'] >= 19
