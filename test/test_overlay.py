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
"""The overlay against pinhole geometry, and camera poses against chains of transforms."""

from __future__ import annotations

from dataclasses import replace
import math

import numpy as np
from numpy.testing import assert_allclose
import pytest
from test_message_sets import turning_plan

from rspec_planner import drawing
from rspec_planner.mounting import StaticFrames, transform_matrix
from rspec_planner.overlay import camera_view, draw_overlay, nominal_pose, OVERLAY_WIDTH
from rspec_planner.planner.calibration import Calibration
from rspec_planner.planner.camera_roles import ROLES
from rspec_planner.projection import project
from rspec_planner.world.rig import Rig

RIG = Rig()
SIZE = (192, 384)


def test_nominal_view_is_that_of_the_embedded_world():
    view = camera_view('front_wide', SIZE, None, None)
    assert_allclose(view.matrix, RIG.intrinsics['front_wide'])
    assert_allclose(view.pose, RIG.extrinsics['front_wide'], atol=1e-12)
    assert view.assumed == 'nominal lens and mounting'


@pytest.mark.parametrize('role', ROLES, ids=lambda role: role.name)
def test_nominal_poses_are_rotations_that_look_their_way(role):
    pose = nominal_pose(role.name)
    assert_allclose(pose[:3, :3] @ pose[:3, :3].T, np.eye(3), atol=1e-12)
    assert np.linalg.det(pose[:3, :3]) == pytest.approx(1.0)
    forward, down = pose[:3, 2], pose[:3, 1]
    assert forward[2] < 0 and down[2] < -0.9
    assert (forward[0] > 0) == (not role.name.startswith('rear'))
    side = {'left': 1, 'right': -1}.get(role.name.rpartition('_')[2], 0)
    assert forward[1] * side > 0 or abs(forward[1]) < 1e-9


def test_calibration_is_scaled_to_the_image_that_is_drawn_on():
    big = Rig(width=1920, height=960)
    calibration = Calibration(1920, 960, big.intrinsics['front_tele'], 30.0, '')
    view = camera_view('front_tele', SIZE, calibration, RIG.extrinsics['front_tele'])
    assert_allclose(view.matrix, RIG.intrinsics['front_tele'], atol=1e-9)
    assert view.assumed == ''


def test_a_picture_says_what_is_assumed_and_what_is_not():
    plan, grey = turning_plan(), np.full((*SIZE, 3), 90, np.uint8)
    known = camera_view('front_wide', SIZE, None, None)
    silent = replace(known, assumed='')
    tagged, plain = draw_overlay(grey, plan, known), draw_overlay(grey, plan, silent)
    rows, columns = np.nonzero((tagged != plain).any(-1))
    assert columns.max() < 300 and 40 <= rows.min() and rows.max() < 75


def test_the_band_lies_where_the_plan_projects_to():
    plan = turning_plan(samples=1)
    view = camera_view('front_wide', SIZE, None, None)
    picture = draw_overlay(np.full((*SIZE, 3), 90, np.uint8), plan, view)
    assert picture.shape[1] == OVERLAY_WIDTH and picture.shape[0] > OVERLAY_WIDTH // 2
    scale = OVERLAY_WIDTH / SIZE[1]
    ahead = plan.poses[10:30]
    pixels, _ = project(np.column_stack([ahead[:, :2], np.zeros(20)]), view, 'front_wide')
    for (u, v), x in zip((pixels + 0.5) * scale - 0.5, ahead[:, 0]):
        assert np.abs(picture[round(v), round(u)].astype(int) - 90).max() > 30, x
        beside = picture[round(v), round(u) + round(3.0 * 332 / x)]  # 3 m right of the band
        assert_allclose(beside, 90, atol=3)


def test_the_reasoning_stands_below_the_scene():
    plan = turning_plan()
    view = camera_view('front_wide', SIZE, None, None)
    black = draw_overlay(np.zeros((*SIZE, 3), np.uint8), plan, view)
    panel = black[OVERLAY_WIDTH // 2:]
    assert (np.abs(panel.astype(int) - drawing.ACCENT).sum(-1) < 30).sum() > 100


def test_chain_of_static_transforms():
    frames = StaticFrames()
    quarter = (0.0, 0.0, math.sqrt(0.5), math.sqrt(0.5))  # a quarter turn to the left
    frames.add('base_link', 'sensor_kit', transform_matrix((1.0, 0.0, 2.0), quarter))
    frames.add('/sensor_kit', '/camera', transform_matrix((0.5, 0.0, 0.0), (0, 0, 0, 1)))
    pose = frames.pose('camera', 'base_link')
    assert_allclose(pose[:3, 3], [1.0, 0.5, 2.0], atol=1e-12)
    assert_allclose(pose[:3, 0], [0.0, 1.0, 0.0], atol=1e-12)
    assert_allclose(frames.pose('base_link', 'base_link'), np.eye(4))
    frames.add('base_link', 'sensor_kit', transform_matrix((3.0, 0.0, 2.0), (0, 0, 0, 1)))
    assert_allclose(frames.pose('camera', 'base_link')[:3, 3], [3.5, 0.0, 2.0])


def test_unconnected_frames_and_loops_have_no_pose():
    frames = StaticFrames()
    frames.add('a', 'b', np.eye(4))
    frames.add('b', 'a', np.eye(4))
    assert frames.pose('a', 'base_link') is None
    assert frames.pose('camera', 'base_link') is None
    assert frames.pose('', 'base_link') is None
