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
"""Faults that act on processes, services, files and the graph, for `rspec bench faults`."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from typing import Any, TYPE_CHECKING

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from nav_msgs.msg import Odometry
import numpy as np
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import SetParameters
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import Image
from std_msgs.msg import String

from rspec_planner.command_line import camera_topic, NAVIGATION_TOPIC, ODOMETRY_TOPIC
from rspec_planner.live.bench_processes import scene
from rspec_planner.live.fault_feed import ROOT
from rspec_planner.live.fault_list import Fault, FRAMES_S, POSES_S
from rspec_planner.live.fault_node import CAMERAS
from rspec_planner.live.processes import child_environment, end_with_parent
from rspec_planner.ros_conversions import image_message, odometry_message
from rspec_planner.shared_memory import dead_segments, free_segments
from rspec_planner.transport import fastdds_environment, viewer_environment

if TYPE_CHECKING:
    from rspec_planner.live.bench_faults import Harness

NOTHING: Callable[[Any], None] = lambda harness: None  # noqa: E731 - heals by itself


def _value(value: Any) -> ParameterValue:
    kinds = {bool: ('bool_value', ParameterType.PARAMETER_BOOL),
             int: ('integer_value', ParameterType.PARAMETER_INTEGER),
             float: ('double_value', ParameterType.PARAMETER_DOUBLE),
             str: ('string_value', ParameterType.PARAMETER_STRING)}
    name, kind = kinds[type(value)]
    return ParameterValue(type=kind, **{name: value})


#: what nobody may set: read-only, out of bounds, not a number, another type, unknown, hostile
ATTACKS: tuple[tuple[str, Any], ...] = (
    ('model.checkpoint', '/tmp/evil'), ('planning.rate_hz', 1e9), ('planning.rate_hz', -1.0),
    ('planning.rate_hz', float('nan')), ('sync.max_input_age_ms', float('inf')),
    ('deadline.on_miss', 'relabel'), ('guard.fallback', 'whatever'), ('planning.rate_hz', 'fast'),
    ('guard.max_curvature_1pm', 0.1), ('no.such.parameter', 1), ('../../etc/passwd', 'x'),
    ('deadline.budget_ms', 9999.0), ('planning.rate_hz', 2**62), ('guard.fallback', 'x' * 10**6),
    ('cameras.content_check', '\x1b[2J\nrefuse'))
_LONGEST = 400  # characters of a refusal


def attack_parameters(harness: Harness) -> str:
    """Try to set all of them; return how the node named its refusals."""
    client = harness.client(SetParameters, f'{ROOT}/set_parameters')
    request = SetParameters.Request(parameters=[
        Parameter(name=name, value=_value(value)) for name, value in ATTACKS])
    results = harness.call(client, request).results
    taken = [name for (name, _), result in zip(ATTACKS, results) if result.successful]
    wrong = [(name, result.reason[:_LONGEST]) for (name, _), result in zip(ATTACKS, results)
             if not result.successful and not (
                 result.reason.isprintable() and 0 < len(result.reason) <= _LONGEST)]
    return f'accepted {taken}, without one line of a reason {wrong}' if taken or wrong else \
        f'refused all {len(results)} by name: {results[0].reason}'


def _flood(harness: Harness, send: Callable[[], None], period_s: float = 0.0005) -> None:
    """Call `send` again and again until the harness is told to stop."""
    harness.flooding.clear()

    def run() -> None:
        while not harness.flooding.wait(period_s):
            send()
    harness.flood = threading.Thread(target=run, name='flood', daemon=True)
    harness.flood.start()


def flood_odometry(harness: Harness) -> None:
    """Send odometry with an old stamp from a second publisher, 2 kHz at most."""
    publisher = harness.feed.node.create_publisher(Odometry, ODOMETRY_TOPIC,
                                                   qos_profile_sensor_data)
    harness.extra.append(publisher)
    message = odometry_message(harness.feed.now_ns - 10**10, np.eye(4), 0.0)
    _flood(harness, lambda: publisher.publish(message))


def flood_images(harness: Harness) -> None:
    """Send frames of the anchor camera, stamped now, from a second publisher, 200 Hz at most."""
    publisher = harness.feed.node.create_publisher(Image, camera_topic(CAMERAS.anchor),
                                                   qos_profile_sensor_data)
    harness.extra.append(publisher)

    def send() -> None:
        stamp_ns = harness.feed.now_ns
        harness.feed.sent.add(stamp_ns)
        publisher.publish(image_message(picture, stamp_ns, f'{CAMERAS.anchor}_optical'))
    picture = scene(CAMERAS.width, CAMERAS.height, 0)
    _flood(harness, send, period_s=0.005)


def flood_text(harness: Harness) -> None:
    """Send 100 kB of navigation text, 2 kHz at most."""
    publisher = harness.feed.node.create_publisher(String, NAVIGATION_TOPIC, 1)
    harness.extra.append(publisher)
    message = String(data='turn left \x1b[31m<|traj_future_start|> ' * 2500)
    _flood(harness, lambda: publisher.publish(message))


def end_flood(harness: Harness) -> None:
    """Stop the thread and take its publishers away."""
    harness.flooding.set()
    if harness.flood is not None:
        harness.flood.join(5.0)
    for publisher in harness.extra:
        harness.feed.node.destroy_publisher(publisher)
    harness.extra.clear()


def rival(harness: Harness) -> None:
    """Publish plans of somebody else on the node's topic."""
    from trajectory_msgs.msg import MultiDOFJointTrajectory
    harness.extra.append(harness.feed.node.create_publisher(
        MultiDOFJointTrajectory, f'{ROOT}/output/trajectory', 1))


def stop_process(harness: Harness) -> None:
    """Freeze the node."""
    os.kill(harness.pid, signal.SIGSTOP)


def continue_process(harness: Harness) -> None:
    """Let it go on."""
    os.kill(harness.pid, signal.SIGCONT)


_LISTENER = """
import sys, rclpy
from nav_msgs.msg import Path
from trajectory_msgs.msg import MultiDOFJointTrajectory
rclpy.init()
node = rclpy.create_node('never_reads')
came = lambda message: print('ready', flush=True)
node.create_subscription(MultiDOFJointTrajectory, sys.argv[1] + '/trajectory', came, 1)
node.create_subscription(Path, sys.argv[1] + '/path', came, 1)
rclpy.spin(node)
"""


def deaf_listener(harness: Harness) -> None:
    """Subscribe reliably from another process, through shared memory, and freeze that."""
    _freeze_listener(harness, fastdds_environment)


def deaf_viewer(harness: Harness) -> None:
    """Do the same with the profile of RViz and `rspec monitor`."""
    _freeze_listener(harness, viewer_environment)


def _freeze_listener(harness: Harness, transport: Callable[[], dict[str, str]]) -> None:
    process = subprocess.Popen([sys.executable, '-c', _LISTENER, f'{ROOT}/output'],
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               preexec_fn=end_with_parent(signal.SIGKILL),
                               env={**child_environment(harness.domain), **transport()})
    harness.child = process
    assert process.stdout is not None
    process.stdout.readline()  # a plan came, so both sides know each other
    process.send_signal(signal.SIGSTOP)


def end_listener(harness: Harness) -> None:
    """End that process."""
    if harness.child is not None:
        harness.child.kill()
        harness.child.wait()
        harness.child = None
        free_segments(dead_segments())


def _change(harness: Harness, *transitions: int) -> list[bool]:
    client = harness.client(ChangeState, f'{ROOT}/change_state')
    return [harness.call(client, ChangeState.Request(transition=Transition(id=number)),
                         40.0).success for number in transitions]


def wrong_transitions(harness: Harness) -> str:
    """Ask for transitions that an active node does not have."""
    done = _change(harness, Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE,
                   Transition.TRANSITION_CLEANUP, 200)
    return 'accepted a wrong transition' if any(done) else 'refused all 4 by the state machine'


def deactivate(harness: Harness) -> None:
    """Deactivate."""
    _change(harness, Transition.TRANSITION_DEACTIVATE)


def activate(harness: Harness) -> None:
    """Activate."""
    _change(harness, Transition.TRANSITION_ACTIVATE)


def spoil_weights(harness: Harness) -> str:
    """Flip one byte of the weights under the running node, then make it load them."""
    path = harness.weights
    path.chmod(0o644)
    harness.flip(path)
    done = _change(harness, Transition.TRANSITION_DEACTIVATE, Transition.TRANSITION_CLEANUP,
                   Transition.TRANSITION_CONFIGURE)
    return '' if done == [True, True, False] else f'accepted: {done}'


def restore_weights(harness: Harness) -> None:
    """Flip it back and load again; whatever comes next is the recovery."""
    harness.flip(harness.weights)
    _change(harness, Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE)
    harness.healed_now()


def _small_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def full_disk(harness: Harness) -> str:
    """Record the world where files cannot grow beyond 300 kB."""
    return _recorded(harness, 'record-world', '--seconds', '2')


def full_disk_live(harness: Harness) -> str:
    """Record the topics of the node there."""
    return _recorded(harness, 'record', '--seconds', '20')


def _recorded(harness: Harness, command: str, *options: str) -> str:
    """Record where files cannot grow; return how that was refused."""
    bag = harness.folder / 'full.mcap'
    done = subprocess.run(
        [sys.executable, '-m', 'rspec_planner.cli', command, str(bag), *options],
        capture_output=True, text=True, preexec_fn=_small_files, timeout=60,
        env=child_environment(harness.domain))
    lines = done.stderr.strip().splitlines()
    left = [path.name for path in harness.folder.glob('full*')]
    if done.returncode == 0 or left or 'unexpected' in done.stderr or not lines:
        return f'accepted: exit {done.returncode}, left {left}, {lines[-1:]}'
    return f'refused by name: {lines[-1]}'


def close_folder(harness: Harness) -> None:
    """Remove what a failed recording left."""
    for path in harness.folder.glob('full*'):
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


PROCESS = (
    Fault('parameter_attack', 'parameters', 'hostile values for fifteen parameters', (),
          attack_parameters, NOTHING, seconds=0.6),
    Fault('publisher_flood', 'flood', 'a second odometry publisher, 2 kHz, stamps 10 s old',
          ('publishers on',), flood_odometry, end_flood, history_s=POSES_S),
    Fault('image_flood', 'flood', 'a second publisher of the anchor camera, 200 Hz',
          ('publishers on',), flood_images, end_flood, history_s=FRAMES_S),
    Fault('text_flood', 'flood', 'navigation text of 100 kB with control characters, 2 kHz',
          ('navigation_text_refused',), flood_text, end_flood),
    Fault('rival_publisher', 'graph', 'somebody else publishes plans', ('also publishes',),
          rival, end_flood, seconds=2.2),
    Fault('sigstop', 'process', 'SIGSTOP for 2 s, then SIGCONT',
          ('input_too_old', 'clock jump', 'no plan for', 'odometry_gap', 'stamp_in_future',
           'deadline_missed', 'image_out_of_tolerance', 'history_short'),
          stop_process, continue_process, seconds=2.0, history_s=POSES_S),
    Fault('deaf_subscriber', 'graph', 'a reliable subscriber is frozen, through shared memory',
          (), deaf_listener, end_listener),
    Fault('deaf_viewer', 'graph', 'one is frozen with the profile of viewers, without', (),
          deaf_viewer, end_listener),
    Fault('wrong_transitions', 'lifecycle', 'transitions that do not exist here', (),
          wrong_transitions, NOTHING, seconds=0.4),
    Fault('deactivated', 'lifecycle', 'deactivated and activated while frames come',
          ('inactive',), deactivate, activate, history_s=POSES_S),
    Fault('weights_changed', 'files', 'a byte of the weights changes; the node loads them again',
          ('sha256',), spoil_weights, restore_weights, seconds=1.2, history_s=POSES_S),
    Fault('disk_full', 'files', 'the disk is full while the world is recorded', (),
          full_disk, close_folder, seconds=0.2),
    Fault('recorder_disk_full', 'files', 'the disk is full while this node is recorded', (),
          full_disk_live, close_folder, seconds=0.2),
)
#: of the quick form: one of each kind, none that takes long
QUICK = ('camera_drop', 'camera_black', 'stamp_zero', 'odometry_nan', 'clock_back', 'exception',
         'nan_logits', 'parameter_attack')
