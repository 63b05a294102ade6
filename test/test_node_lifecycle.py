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

import importlib.util
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from node_rig import CAMERAS, NodeRig, PATIENT, running, values_of, wait_until
import pytest
from rcl_interfaces.srv import SetParameters
import rclpy
from rclpy.parameter import Parameter
from test_node import now, SECOND

from rspec_planner.errors import EngineError
from rspec_planner.loading import load_planner

pytestmark = [pytest.mark.ros, pytest.mark.usefixtures('ros')]
NODE = '/planning/rspec_planner'


@pytest.fixture
def unmanaged():
    """Return a rig whose node waits for transitions."""
    rig = NodeRig(['--ros-args', '-p', 'autostart:=false',
                   *(part for argument in PATIENT for part in ('-p', argument))])
    rig.start()
    yield rig
    rig.close()


def ask(rig, kind, service, request):
    client = rig.peer.create_client(kind, f'{NODE}/{service}')
    assert client.wait_for_service(10)
    future = client.call_async(request)
    wait_until(future.done, service)
    rig.peer.destroy_client(client)
    return future.result()


def transition(rig, which):
    return ask(rig, ChangeState, 'change_state',
               ChangeState.Request(transition=Transition(id=which))).success


def state(rig):
    return ask(rig, GetState, 'get_state', GetState.Request()).current_state.id


def see_nothing_read(rig):
    """Feed a node that is not active, and see that it drops everything."""
    before = [stream.received for stream in rig.node._watch.states()]
    start = now() - 3 * SECOND
    for step in range(4):
        rig.odometry(start - step * SECOND // 20)
        for name in CAMERAS.names:
            rig.image(name, start - step * SECOND // 10)
    for _ in range(8):  # the executor takes one message of each topic between two requests
        state(rig)
    assert [stream.received for stream in rig.node._watch.states()] == before
    rig.forget_sent()


def set_parameter(rig, name, value):
    request = SetParameters.Request(
        parameters=[Parameter(name, value=value).to_parameter_msg()])
    return ask(rig, SetParameters, 'set_parameters', request).results[0]


def topics_of(rig):
    return {name for name, _ in rig.node.get_publisher_names_and_types_by_node(
        'rspec_planner', '/planning')}


def test_lifecycle_round_trip(unmanaged):
    rig = unmanaged
    assert state(rig) == State.PRIMARY_STATE_UNCONFIGURED
    assert f'{NODE}/output/path' not in topics_of(rig)
    for _ in range(2):
        assert transition(rig, Transition.TRANSITION_CONFIGURE)
        assert f'{NODE}/output/path' in topics_of(rig)
        see_nothing_read(rig)
        assert transition(rig, Transition.TRANSITION_ACTIVATE)
        rig.path_at(rig.drive(now()))
        assert transition(rig, Transition.TRANSITION_DEACTIVATE)
        published = len(rig.received['path'])
        see_nothing_read(rig)
        assert transition(rig, Transition.TRANSITION_ACTIVATE)
        rig.path_at(rig.drive(now()))
        assert len(rig.received['path']) == published + 1
        assert transition(rig, Transition.TRANSITION_DEACTIVATE)
        assert transition(rig, Transition.TRANSITION_CLEANUP)
        assert state(rig) == State.PRIMARY_STATE_UNCONFIGURED
        wait_until(lambda: f'{NODE}/output/path' not in topics_of(rig), 'the end of the topics')
        rig.forget_publishers()
    assert transition(rig, Transition.TRANSITION_UNCONFIGURED_SHUTDOWN)
    assert state(rig) == State.PRIMARY_STATE_FINALIZED


def test_deactivate_drops_the_plan_in_progress(unmanaged):
    rig = unmanaged
    assert transition(rig, Transition.TRANSITION_CONFIGURE)
    assert transition(rig, Transition.TRANSITION_ACTIVATE)
    rig.planner.before = lambda observation: wait_until(
        lambda: not rig.node._made.inputs.enabled, 'deactivation')
    t0 = rig.drive(now())
    wait_until(lambda: rig.node._watch.states()[1].newest_ns == t0, 'the trigger')
    assert transition(rig, Transition.TRANSITION_DEACTIVATE)
    assert rig.received['path'] == []


def test_failing_checkpoint_ends_in_a_named_engine_error():
    def load(parameters):
        raise EngineError("checkpoint 'x': model-00001.safetensors is missing; restore it")
    rig = NodeRig([], load=load)
    try:
        rig.listen()
        assert not rig.node.start()
        rig._thread.start()
        status = rig.status('engine', lambda s: s.level == b'\x02', 'the error')
        assert status.message == ("failed: checkpoint 'x': model-00001.safetensors is missing; "
                                  'restore it')
        assert state(rig) == State.PRIMARY_STATE_UNCONFIGURED
        rig.node._load = lambda parameters: rig.planner
        assert transition(rig, Transition.TRANSITION_CONFIGURE)  # heals without a restart
    finally:
        rig.close()


def test_camera_ids_must_be_those_of_the_checkpoint(capfd):
    rig = NodeRig(['--ros-args', '-p', 'cameras.ids:=[0, 1, 2, 5]'])
    try:
        assert not rig.node.start()
    finally:
        rig.close()
    assert "'cameras.ids' [0, 1, 2, 5] does not fit the checkpoint 'tiny'" \
        in capfd.readouterr().err


@pytest.mark.parametrize('argument, part', [
    ('planning.rate_hx:=5.0',
     "unknown parameter 'planning.rate_hx' in the command line or launch file; did you mean "
     "'planning.rate_hz'?"),
    ('planning.rate_hz:=5', "'planning.rate_hz' is the integer 5; write 5.0 (in the command line"),
    ('planning.rate_hz:=500.0', "'planning.rate_hz' is 500.0; give a number (0.1 to 100.0)"),
    ('deadline.on_miss:=stop', "'deadline.on_miss' is 'stop'"),
    ('sync.anchor_camera:=4', "'sync.anchor_camera' 4 is not one of"),
])
def test_wrong_parameter_stops_configuration_with_one_line(argument, part, capfd):
    rig = NodeRig(['--ros-args', '-p', argument])
    try:
        assert not rig.node.start()
    finally:
        rig.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if '[ERROR]' in line]
    assert len(lines) == 1 and part in lines[0]


def test_misspelt_key_in_a_file_names_the_file(tmp_path, capfd):
    path = tmp_path / 'mine.yaml'
    path.write_text('/**:\n  ros__parameters:\n    deadline: {on_mis: skip}\n')
    rig = NodeRig(['--ros-args', '--params-file', str(path)])
    try:
        assert not rig.node.start()
    finally:
        rig.close()
    assert (f"unknown parameter 'deadline.on_mis' in {path}; did you mean 'deadline.on_miss'?"
            in capfd.readouterr().err)


@pytest.mark.skipif(importlib.util.find_spec('autoware_planning_msgs') is not None,
                    reason='autoware_planning_msgs is installed, so nothing is missing')
def test_missing_autoware_messages_are_named(capfd):
    rig = NodeRig(['--ros-args', '-p', 'output.message_set:=autoware'])
    try:
        assert not rig.node.start()
    finally:
        rig.close()
    assert "the package 'autoware_planning_msgs' is not installed" in capfd.readouterr().err


def test_runtime_parameters_are_checked_and_taken_over():
    with running() as rig:
        assert set_parameter(rig, 'planning.rate_hz', 3.0).successful
        assert rig.node._config.planning.rate_hz == 3.0
        refused = set_parameter(rig, 'planning.rate_hz', 0.0)
        assert not refused.successful and 'planning.rate_hz' in refused.reason
        refused = set_parameter(rig, 'deadline.budget_ms', 9999.0)
        assert refused.successful  # the limit is 10 s in this test
        refused = set_parameter(rig, 'deadline.max_pipeline_latency_ms', 500.0)
        assert not refused.successful and "'deadline.budget_ms' 9999 exceeds" in refused.reason
        assert rig.node._config.deadline.max_pipeline_latency_ms == 10000.0
        refused = set_parameter(rig, 'model.checkpoint', 'other')
        assert not refused.successful and 'read-only' in refused.reason.lower()
        rig.path_at(rig.drive(now()))


def test_late_plan_is_a_deadline_miss():
    with running('deadline.max_pipeline_latency_ms:=500.0') as rig:
        rig.drive(now() - 2 * SECOND)
        status = rig.status('latency', lambda s: s.level == b'\x02', 'the miss')
        assert 'the limit is 500 ms (deadline.max_pipeline_latency_ms)' in status.message
        assert int(values_of(status)['deadline_misses']) >= 1
        assert rig.received['path'] == []


def test_missing_checkpoint_folder_is_one_line(tmp_path, capfd):
    rig = NodeRig(['--ros-args', '-p', f'model.checkpoint:={tmp_path}/gone'], load=load_planner)
    try:
        assert not rig.node.start()
    finally:
        rig.close()
    errors = capfd.readouterr().err
    assert f'{tmp_path}/gone' in errors and 'Traceback' not in errors


def process(*arguments):
    return subprocess.Popen([sys.executable, '-m', 'rspec_planner', *arguments],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=dict(os.environ))


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_process_with_code_0(number):
    peer = rclpy.create_node('watcher')
    child = process('--ros-args', '-p', 'autostart:=false')
    try:
        wait_until(lambda: ('rspec_planner', '/planning') in peer.get_node_names_and_namespaces(),
                   'the node', 30)
        wait_until(lambda: any(name == f'{NODE}/get_state' for name, _ in
                               peer.get_service_names_and_types()), 'its services', 30)
        child.send_signal(number)
        output, _ = child.communicate(timeout=20)
        assert child.returncode == 0, output
        assert 'Traceback' not in output
    finally:
        child.kill()
        peer.destroy_node()


def catches(child):
    """Return whether a process handles SIGTERM, from its first lines on."""
    status = Path(f'/proc/{child.pid}/status').read_text(encoding='ascii')
    caught = next(line for line in status.splitlines() if line.startswith('SigCgt')).split()[1]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_of_the_start_ends_with_code_0(number):
    # importing, making the node, loading the model, planning: which is when differs by machine
    children = {after_s: process() for after_s in (0.0, 0.5, 1.5, 4.0)}
    try:
        started = {}
        for after_s, child in children.items():
            wait_until(lambda child=child: catches(child), 'the first lines of the program', 30)
            started[after_s] = time.monotonic()
        for after_s, child in children.items():
            time.sleep(max(0.0, started[after_s] + after_s - time.monotonic()))
            child.send_signal(number)
            if after_s == 1.5:
                child.send_signal(number)  # somebody in a hurry
        for after_s, child in children.items():
            output, _ = child.communicate(timeout=60)
            assert child.returncode == 0, f'after {after_s} s: {output}'
            assert 'Traceback' not in output
    finally:
        for child in children.values():
            child.kill()
            child.wait()


@pytest.mark.parametrize('arguments, code, part', [
    (('--help',), 0, 'usage: rspec_planner_node'),
    (('--what',), 2, "argument '--what' is not known"),
    (('--ros-args', '--params-file', '/gone.yaml'), 2, 'parameter file /gone.yaml cannot be'),
    (('--ros-args', '--what'), 2, "ROS arguments cannot be parsed: ['--what']; see --help"),
    (('--ros-args', '-p', 'rate'), 2, "Couldn't parse parameter override rule: '-p rate'"),
    (('--ros-args', '-p', 'planning.rate_hx:=1.0'), 1, "did you mean 'planning.rate_hz'?"),
])
def test_command_line_answers_with_one_line(arguments, code, part):
    child = process(*arguments)
    output, _ = child.communicate(timeout=30)
    assert child.returncode == code
    assert part in output and 'Traceback' not in output
