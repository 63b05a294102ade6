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
"""The demo with light stand-ins for world and node: summary, pictures, and clear failures."""

from __future__ import annotations

import json
from pathlib import Path
import subprocess
import sys

import cv2
import numpy as np
import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed (requirements-ros.txt)')

from fake_planner import TEXT

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.live import demo
from rspec_planner.live.demo import choose_plans, DemoCommands, run_demo
from rspec_planner.live.processes import ChildError
from rspec_planner.live.recorded import frames_at, read_drive, RecordedDrive
from rspec_planner.shared_memory import dead_segments

pytestmark = pytest.mark.ros

HERE = Path(__file__).parent
WORLD = (sys.executable, str(HERE / 'fake_world.py'))
PLANNER = (sys.executable, str(HERE / 'fake_planner.py'))


@pytest.fixture(scope='module')
def finished(tmp_path_factory) -> tuple[Path, dict]:
    """Return the folder and the summary of one short demo."""
    folder = tmp_path_factory.mktemp('demo')
    (folder / 'drive.mcap').write_bytes(b'left over from an earlier demo')
    summary = run_demo(seconds=5.0, out=folder, pictures=3,
                       commands=DemoCommands(WORLD, PLANNER))
    return folder, summary


def test_summary_tells_what_was_planned(finished):
    folder, summary = finished
    assert json.loads((folder / 'summary.json').read_text()) == summary
    assert 40 <= summary['plans'] <= 50 and summary['rejected'] == 0
    assert summary['rate_hz'] > 0.0
    assert summary['frame_ms'] == {'p50': 128.0, 'p95': 128.0, 'p99': 128.0}
    assert summary['accepted_length'] == 4.5 and summary['skipped'] == {'history_short': 2}
    assert summary['reasoning_examples'] == [TEXT]
    assert summary['world']['frames'] == 50 and summary['bag'] == str(folder / 'drive.mcap')


def test_pictures_are_drawn_and_differ(finished):
    folder, summary = finished
    # three plans, what RViz got of them, and the contact sheet
    assert len(summary['pictures']) == 7
    drawn = [cv2.imread(path) for path in summary['pictures']]
    assert [p.shape[:2] for p in drawn[:6]] == [(900, 1600), (720, 1280)] * 3
    assert not np.array_equal(drawn[0], drawn[2])
    assert Path(summary['pictures'][-1]).name == 'contact_sheet.png'


def test_recorded_plan_comes_back_in_the_ego_frame(finished):
    folder, _ = finished
    drive = read_drive(folder / 'drive.mcap')
    plan = drive.plan(drive.stamps[10])
    assert np.allclose(plan.poses[:, 0], np.arange(65) * 0.8) and np.allclose(plan.speeds, 8.0)
    assert np.allclose(plan.poses[:, 1:], 0.0)
    assert plan.times.encode_ms == 40.0 and plan.times.decode_ms == 35.0
    assert plan.reasoning.stats.accepted_length == 4.5 and plan.reasoning.text == TEXT


def test_frames_come_back_for_exactly_the_stamps_asked_for(finished):
    folder, _ = finished
    stamps = read_drive(folder / 'drive.mcap').stamps
    cameras = ('cross_left', 'front_wide', 'cross_right', 'front_tele')
    found = dict(frames_at(folder / 'drive.mcap', cameras, [stamps[5], stamps[9], 123]))
    assert sorted(found) == [stamps[5], stamps[9]]
    assert found[stamps[9]].shape == (4, 192, 384, 3)
    # frame k is painted with grey level k
    assert abs(int(found[stamps[9]][0, 0, 0, 0]) - int(found[stamps[5]][0, 0, 0, 0])) == 4


def test_the_real_node_leaves_no_shared_memory_behind(tmp_path):
    before = {one.path for one in dead_segments()}
    summary = run_demo(seconds=5.0, out=tmp_path, pictures=1)
    assert summary['plans'] > 0
    assert {one.path for one in dead_segments()} <= before


def test_node_death_is_one_line_with_its_cause(tmp_path):
    with pytest.raises(ChildError, match='node ended early with exit code 3: EngineError: '
                                         'weight file model.safetensors is missing') as caught:
        run_demo(seconds=20.0, out=tmp_path, commands=DemoCommands(WORLD, (*PLANNER, '--die')))
    assert '\n' not in str(caught.value)


def test_missing_checkpoint_ends_the_demo_with_the_remedy(tmp_path):
    with pytest.raises(ChildError, match='node ended early.*/nowhere'):
        run_demo(seconds=20.0, out=tmp_path, commands=DemoCommands(WORLD),
                 node_arguments=('--ros-args', '-p', 'model.checkpoint:=/nowhere'))


def test_silent_planner_is_named(tmp_path, monkeypatch):
    silent = HERE / 'fake_planner.py'
    monkeypatch.setattr(demo, 'FIRST_PLAN_S', 1.0)
    with pytest.raises(ChildError, match='no plan arrived in .* of driving; the node says'):
        run_demo(seconds=5.0, out=tmp_path,
                 commands=DemoCommands(WORLD, (sys.executable, str(silent), '--silent')))


@pytest.mark.parametrize('module', ['node', 'live.demo', 'live.monitor', 'live.recorder',
                                    'live.replay', 'live.world_publisher'])
def test_no_process_imports_torch_before_it_needs_it(module):
    # seconds and memory for the watchers; for the node, OMP_WAIT_POLICY must come before it
    code = f'import sys, rspec_planner.{module}; sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=HERE.parent).returncode == 0


def test_bad_calls_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match='seconds 1.0 is out of range'):
        run_demo(seconds=1.0, out=tmp_path)
    (tmp_path / 'file').write_text('x')
    with pytest.raises(InputError, match='is a file'):
        run_demo(seconds=10.0, out=tmp_path / 'file')


def test_pictures_show_every_different_reasoning():
    texts = ['go'] * 10 + ['stop'] * 5 + ['go'] * 3 + ['turn'] * 2
    drive = RecordedDrive(Path('x'), dict.fromkeys(range(20)), dict(enumerate(texts)))
    for count in (3, 5, 20, 40):
        chosen = choose_plans(drive, count)
        assert chosen == sorted(set(chosen)) and len(chosen) == min(count, 20)
        assert {texts[t0] for t0 in chosen} == {'go', 'stop', 'turn'}
    assert len(choose_plans(drive, 2)) == 2 and choose_plans(drive, 0) == []
