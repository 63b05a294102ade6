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
"""The endless drive: continuous, collision-free, deterministic, with a known future."""

import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.drive import Drive
from rspec_planner.world.reasoning import parse
from rspec_planner.world.rig import Rig
from rspec_planner.world.scenarios import CATALOGUE, TRAINED_DOUBLES
from rspec_planner.world.simulation import boxes_overlap, DT, SOLID


def touches(drive, ego):
    """Tell whether the ego touches an agent now."""
    boxes = [(a.x, a.y, a.yaw, a.length, a.width) for a in drive._queue[0].scene.agents
             if a.kind in SOLID]
    if not boxes:
        return False
    pose = (np.array([v]) for v in (ego.x, ego.y, ego.yaw))
    return boxes_overlap(*pose, np.array([boxes])).any()


@pytest.mark.parametrize('seed', [1, 2])
def test_all_families_in_one_drive(seed):
    drive, seen, said, still = Drive((), seed, render=False), [], set(), 0
    before = None
    while len(seen) < len(CATALOGUE):
        frame = drive.frame()
        if frame.family and frame.family not in seen:
            seen.append(frame.family)
        if frame.reasoning:
            sentence = parse(frame.reasoning)
            assert (sentence.action, sentence.cause) == (
                frame.decision.action, frame.decision.cause)
            said.add(frame.family)
        if before is not None:
            after = before.at(DT)
            assert (after.x, after.y, after.yaw, after.speed) == (
                frame.ego.x, frame.ego.y, frame.ego.yaw, frame.ego.speed)
        before = frame.ego
        assert not touches(drive, frame.ego)
        assert -6.05 < frame.ego.acceleration < 2.40
        still = still + 1 if frame.ego.speed < 0.01 else 0
        assert still < 250, f'stuck at {frame.time_s:.1f} s'
        assert frame.time_s < 1500.0
        drive.step()
    assert seen == list(CATALOGUE) and said >= set(list(CATALOGUE)[:-1])


@pytest.mark.parametrize('seed', [2, 3])
def test_two_causes_at_once_in_one_drive(seed):
    drive, said, still = Drive(tuple(TRAINED_DOUBLES), seed, render=False), set(), 0
    while said != set(TRAINED_DOUBLES):
        frame = drive.frame()
        said |= {frame.family} if frame.reasoning else set()
        assert not touches(drive, frame.ego)
        still = still + 1 if frame.ego.speed < 0.01 else 0
        assert still < 250 and frame.time_s < 500.0
        drive.step()


def test_the_future_comes_true():
    drive = Drive(('parked', 'left_turn'), 3, render=False)
    first = drive.frame()
    later = []
    for _ in range(64):
        drive.step()
        later.append(drive.frame().ego)
    c, s = np.cos(first.ego.yaw), np.sin(first.ego.yaw)
    for row, ego in zip(first.future, later):
        dx, dy = ego.x - first.ego.x, ego.y - first.ego.y
        assert row[0] == pytest.approx(dx * c + dy * s, abs=1e-4)
        assert row[1] == pytest.approx(dy * c - dx * s, abs=1e-4)


def test_turns_announce_themselves():
    drive, texts = Drive(('left_turn', 'right_turn'), 5, render=False), set()
    for _ in range(900):
        frame = drive.frame()
        if frame.family:
            texts.add((frame.family, frame.navigation_text))
        drive.step()
    assert texts == {('left_turn', 'turn left at the junction'),
                     ('right_turn', 'turn right at the junction')}


def test_same_seed_same_drive_and_pictures():
    a, b = (Drive(('red_light',), 9, rig=Rig(96, 48)) for _ in range(2))
    for _ in range(5):
        a.step()
        b.step()
    one, two = a.frame(), b.frame()
    assert one.images.tobytes() == two.images.tobytes() and one.ego == two.ego
    assert one.images.shape == (4, 48, 96, 3) and one.time_s == pytest.approx(0.5)
    other = Drive(('red_light',), 10, render=False)
    assert other.frame().images is None and other.frame().ego != Drive(
        ('red_light',), 9, render=False).frame().ego


def test_paints_are_shared_between_frames():
    drive = Drive(('curve',), 1, render=False)
    lists = set()
    for _ in range(30):
        lists.add(id(drive._queue[0].scene.paints))
        drive.step()
    assert len(lists) == 1


def test_unknown_scenario_is_named():
    with pytest.raises(ConfigurationError, match="scenario 'ufo' is unknown"):
        Drive(('ufo',), 0)
