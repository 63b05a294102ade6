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
"""Child processes: early deaths are told with their cause, and nothing is left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from rspec_planner.live.processes import (
    child_environment,
    ChildError,
    free_domain_id,
    Processes,
)

STUBBORN = ('import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); '
            'signal.signal(signal.SIGTERM, signal.SIG_IGN); print("up", flush=True); '
            'time.sleep(600)')
POLITE = ('import signal, sys, time\n'
          'signal.signal(signal.SIGINT, lambda *_: (print("bye", flush=True), sys.exit(0)))\n'
          'print("up", flush=True)\ntime.sleep(600)')


def up(child) -> bool:
    return 'up' in child.log.read_text()


def test_early_death_is_reported_with_its_cause(tmp_path):
    with Processes(tmp_path) as processes:
        processes.start('node', [sys.executable, '-c',
                                 'print("loading"); raise ValueError("weights are missing")'])
        with pytest.raises(ChildError, match='node ended early with exit code 1: ValueError: '
                                             'weights are missing .*node.log'):
            processes.wait_for(lambda: False, 'a plan', 20)


def test_a_child_that_may_end_is_no_death(tmp_path):
    with Processes(tmp_path) as processes:
        child = processes.start('world', [sys.executable, '-c', 'print("done")'])
        processes.wait_for(lambda: not child.running, 'the end', 20, ended_well=('world',))
        processes.check(ended_well=('world',))
        with pytest.raises(ChildError, match='world ended early with exit code 0: done'):
            processes.check()


def test_what_never_happens_times_out_by_name(tmp_path):
    with Processes(tmp_path) as processes:
        processes.start('idle', [sys.executable, '-c', POLITE])
        with pytest.raises(ChildError, match='the first plan did not happen within 0 s'):
            processes.wait_for(lambda: False, 'the first plan', 0.2)


def test_interrupt_is_enough_for_a_polite_child(tmp_path):
    with Processes(tmp_path) as processes:
        child = processes.start('polite', [sys.executable, '-c', POLITE])
        processes.wait_for(lambda: up(child), 'up', 20)
        assert processes.stop(child) == 0
        assert child.log.read_text().split() == ['up', 'bye']


def test_a_stubborn_child_is_killed(tmp_path):
    with Processes(tmp_path) as processes:
        child = processes.start('stubborn', [sys.executable, '-c', STUBBORN])
        processes.wait_for(lambda: up(child), 'up', 20)
        began = time.monotonic()
        assert processes.stop(child, 0.4) == -signal.SIGKILL
        assert time.monotonic() - began < 5.0


def test_leaving_the_group_ends_all_children(tmp_path):
    with Processes(tmp_path) as processes:
        children = [processes.start(f'child{i}', [sys.executable, '-c', POLITE])
                    for i in range(3)]
        processes.wait_for(lambda: all(up(c) for c in children), 'up', 20)
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child.process.pid, 0)


def test_environment_carries_profile_domain_and_package(monkeypatch):
    monkeypatch.delenv('FASTDDS_DEFAULT_PROFILES_FILE', raising=False)
    monkeypatch.setenv('PYTHONPATH', '/elsewhere')
    environment = child_environment(42, {'OMP_NUM_THREADS': '1'})
    assert environment['FASTDDS_DEFAULT_PROFILES_FILE'].endswith('fastdds.xml')
    assert environment['ROS_DOMAIN_ID'] == '42' and environment['OMP_NUM_THREADS'] == '1'
    assert environment['ROS_AUTOMATIC_DISCOVERY_RANGE'] == 'LOCALHOST'
    first, second = environment['PYTHONPATH'].split(os.pathsep)
    assert os.path.isdir(os.path.join(first, 'rspec_planner')) and second == '/elsewhere'


def test_a_domain_in_use_is_not_chosen():
    chosen = free_domain_id(seed=1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as participant:
        participant.bind(('', 7410 + 250 * chosen + 2))
        assert free_domain_id(seed=1) != chosen
    assert free_domain_id(seed=1) == chosen


PARENT = textwrap.dedent("""
    import sys, time
    from rspec_planner.live.processes import Processes
    with Processes(sys.argv[1]) as processes:
        child = processes.start('child', [sys.executable, '-c', sys.argv[2]])
        processes.wait_for(lambda: 'up' in child.log.read_text(), 'up', 20)
        print(child.process.pid, flush=True)
        time.sleep(600)
""")


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_a_parent_that_is_killed(tmp_path, number):
    parent = subprocess.Popen([sys.executable, '-c', PARENT, str(tmp_path), POLITE],
                              stdout=subprocess.PIPE, env=child_environment())
    child = int(parent.stdout.readline())
    assert state(child) in 'SR'
    parent.send_signal(number)
    assert parent.wait(10) == -number
    deadline = time.monotonic() + 10
    while state(child) not in ('', 'Z') and time.monotonic() < deadline:
        time.sleep(0.02)
    assert state(child) in ('', 'Z')  # nobody may be there to reap it


def state(pid: int) -> str:
    """Return the letter of /proc, '' when the process is gone."""
    try:
        with open(f'/proc/{pid}/stat', encoding='ascii') as file:
            return file.read().rsplit(')', 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ''
