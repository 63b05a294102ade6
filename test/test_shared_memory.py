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
"""What killed processes leave in shared memory is told from what lives, and freed."""

import fcntl
import os
import signal
import subprocess
import sys
import time

from node_rig import private_domain, wait_until
import pytest

from rspec_planner import doctor, shared_memory
from rspec_planner.live.processes import Processes
from rspec_planner.shared_memory import dead_segments, free_segments
from rspec_planner.transport import fastdds_environment

PARTICIPANT = """
import rclpy, sys, time
rclpy.init()
node = rclpy.create_node('killed')
print('ready', flush=True)
time.sleep(60)
"""


def segment(folder, name, size=4096, age_s=5.0, lock=True):
    """Write a segment and its lock file as a process makes them; return the segment."""
    path = folder / name
    path.write_bytes(bytes(size))
    if lock:
        beside = folder / (name + '_el')
        beside.touch()
        os.utime(beside, (time.time() - age_s,) * 2)
    return path


def test_only_what_nobody_holds_is_dead(tmp_path):
    dead = segment(tmp_path, 'fastdds_0123456789abcdef', 5000)
    segment(tmp_path, 'fastdds_0123456789abcdee', age_s=0.0)           # being made
    segment(tmp_path, 'fastdds_0123456789abcded', lock=False)          # not Fast DDS 3's
    segment(tmp_path, 'fastdds_port7411')                              # a port
    segment(tmp_path, 'fastdds_0123456789abcdefg')                     # somebody else's name
    held = segment(tmp_path, 'fastdds_0123456789abcdec')
    with open(f'{held}_el', 'rb') as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert [(one.path, one.size) for one in dead_segments(tmp_path)] == [(dead, 5000)]
    assert [one.path for one in dead_segments(tmp_path)] == [held, dead]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    path = segment(tmp_path, 'fastdds_0123456789abcdef', lock=False)
    (tmp_path / 'other').touch()
    os.utime(tmp_path / 'other', (0, 0))
    (tmp_path / f'{path.name}_el').symlink_to(tmp_path / 'other')
    assert dead_segments(tmp_path) == ()


def test_a_pipe_in_the_place_of_a_lock_holds_nobody_up(tmp_path):
    path = segment(tmp_path, 'fastdds_0123456789abcdef', lock=False)
    os.mkfifo(f'{path}_el')
    os.utime(f'{path}_el', (0, 0))
    assert dead_segments(tmp_path) == ()


def test_what_another_user_left_is_not_ours_to_free(tmp_path, monkeypatch):
    segment(tmp_path, 'fastdds_0123456789abcdef')
    monkeypatch.setattr(os, 'geteuid', lambda: os.getuid() + 1)
    assert dead_segments(tmp_path) == ()


def test_freeing_takes_segment_and_lock_and_tells_bytes(tmp_path):
    segment(tmp_path, 'fastdds_0123456789abcdef', 5000)
    gone = segment(tmp_path, 'fastdds_0123456789abcdee', 7000)
    dead = dead_segments(tmp_path)
    gone.unlink()  # another process was faster
    assert free_segments(dead) == 5000
    assert [path.name for path in tmp_path.iterdir()] == ['fastdds_0123456789abcdee_el']


def test_a_missing_folder_holds_nothing(tmp_path):
    assert dead_segments(tmp_path / 'none') == ()


def test_doctor_tells_dead_segments_and_how_to_free_them(tmp_path, monkeypatch):
    segment(tmp_path, 'fastdds_0123456789abcdef', 3 * 2**20)
    monkeypatch.setattr(doctor, 'SHARED_MEMORY', tmp_path)
    check = doctor.run_check('shared_memory')
    assert '3 MiB in 1 segments' in check.detail
    assert 'rspec doctor --free-shared-memory' in check.detail
    monkeypatch.setattr(doctor, 'SEGMENT_BYTES', 2**60)
    check = doctor.run_check('shared_memory')
    assert not check.ok
    assert check.fix == 'rspec doctor --free-shared-memory'


def test_the_command_frees_them(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from rspec_planner.cli import cli
    path = segment(tmp_path, 'fastdds_0123456789abcdef', 2 * 2**20)
    monkeypatch.setattr(shared_memory, 'SHARED_MEMORY', tmp_path)
    monkeypatch.setattr(doctor, 'SHARED_MEMORY', tmp_path)
    result = CliRunner().invoke(cli, ['doctor', '--free-shared-memory'])
    assert '2 MiB of 1 dead segments removed' in result.output
    assert not path.exists()


def segments_of(pid):
    """Return the data segments of Fast DDS that a process has mapped."""
    with open(f'/proc/{pid}/maps', encoding='utf-8') as stream:
        names = {line.split('/')[-1].strip() for line in stream if '/dev/shm/fastdds_' in line}
    return {name for name in names if shared_memory._SEGMENT.fullmatch(name)}


@pytest.mark.ros
def test_a_real_participant_lives_and_dies_as_supposed():
    """Fast DDS may change its names or locks; then this fails, not somebody's node."""
    private_domain()
    child = subprocess.Popen([sys.executable, '-c', PARTICIPANT], stdout=subprocess.PIPE,
                             env={**os.environ, **fastdds_environment()}, text=True)
    try:
        assert child.stdout.readline().strip() == 'ready'
        own = segments_of(child.pid)
        assert own
        time.sleep(1.2)
        assert not own & {one.path.name for one in dead_segments()}
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    dead = [one for one in dead_segments() if one.path.name in own]
    assert {one.path.name for one in dead} == own
    assert free_segments(dead) >= 2**27
    assert not any(one.path.exists() or one.lock.exists() for one in dead)


@pytest.mark.ros
def test_a_group_that_has_to_kill_leaves_nothing(tmp_path):
    deaf = PARTICIPANT.replace('print(', 'import signal\n'
                               'signal.signal(signal.SIGINT, signal.SIG_IGN)\n'
                               'signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(')
    with Processes(tmp_path) as group:
        child = group.start('deaf', [sys.executable, '-c', deaf])
        wait_until(lambda: 'ready' in child.log.read_text(), 'a participant', 20)
        own = segments_of(child.process.pid)
        assert own
        time.sleep(1.2)
        group.stop_all(1.0)
    assert child.process.returncode == -signal.SIGKILL
    assert not [name for name in own if (shared_memory.SHARED_MEMORY / name).exists()]
