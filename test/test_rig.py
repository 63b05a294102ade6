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
"""The rig's geometry against closed forms."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.rig import Rig

NAMES = ('cross_left', 'front_wide', 'cross_right', 'front_tele')


def test_names_are_the_four_cameras_in_prompt_order():
    assert Rig().names == NAMES
    assert set(Rig().intrinsics) == set(Rig().extrinsics) == set(NAMES)


@pytest.mark.parametrize('name,fov', list(zip(NAMES, (120, 120, 120, 30))))
def test_focal_length_follows_the_field_of_view(name, fov):
    rig = Rig(width=576, height=320)
    k = rig.intrinsics[name]
    assert k[0, 0] == pytest.approx(288 / math.tan(math.radians(fov / 2)))
    assert k[1, 1] == k[0, 0]
    assert (k[0, 2], k[1, 2]) == (287.5, 159.5)


@pytest.mark.parametrize('name,yaw', list(zip(NAMES, (55, 0, -55, 0))))
def test_a_point_along_the_camera_axis_lands_on_the_centre_column(name, yaw):
    rig = Rig()
    ahead = [1.6 + 20 * math.cos(math.radians(yaw)), 20 * math.sin(math.radians(yaw)), 1.5]
    uv, in_front = rig.project(name, np.array([ahead]))
    assert in_front.all()
    assert uv[0, 0] == pytest.approx(rig.intrinsics[name][0, 2])


def test_left_is_left_and_up_is_up():
    rig = Rig()
    points = np.array([[20.0, 1.0, 1.0], [20.0, -1.0, 1.0], [20.0, 0.0, 2.0]])
    for name in ('front_wide', 'front_tele'):
        uv, _ = rig.project(name, points)
        assert uv[0, 0] < uv[2, 0] < uv[1, 0]
        assert uv[2, 1] < uv[0, 1]


def test_the_horizon_row_is_the_pitch():
    rig = Rig(pitch_offset=math.radians(1.0))
    far = np.array([[1e7, 0.0, 0.0]])
    for name, pitch in (('front_wide', 4.0), ('front_tele', -1.0)):
        k = rig.intrinsics[name]
        uv, _ = rig.project(name, far)
        row = k[1, 2] - k[1, 1] * math.tan(math.radians(pitch))
        assert uv[0, 1] == pytest.approx(row, abs=1e-3)


def test_height_offset_raises_every_camera():
    low, high = Rig(), Rig(height_offset=0.1)
    for name in NAMES:
        lift = high.extrinsics[name] - low.extrinsics[name]
        assert lift[2, 3] == pytest.approx(0.1)
        assert np.abs(lift).sum() == pytest.approx(0.1)


@pytest.mark.parametrize('name', NAMES)
def test_extrinsics_are_proper_rotations(name):
    pose = Rig(pitch_offset=-0.02).extrinsics[name]
    assert np.allclose(pose[:3, :3] @ pose[:3, :3].T, np.eye(3), atol=1e-12)
    assert np.linalg.det(pose[:3, :3]) == pytest.approx(1.0)
    assert np.array_equal(pose[3], [0, 0, 0, 1])


def test_points_behind_are_flagged():
    rig = Rig()
    _, in_front = rig.project('front_wide', np.array([[-5.0, 0, 1], [5.0, 0, 1], [1.6, 0, 1.5]]))
    assert in_front.tolist() == [False, True, False]


@given(st.floats(0, 383), st.floats(0, 191), st.floats(0.5, 80), st.sampled_from(NAMES))
@settings(max_examples=60, deadline=None)
def test_projection_inverts_a_ray(u, v, depth, name):
    rig = Rig()
    k, pose = rig.intrinsics[name], rig.extrinsics[name]
    ray = np.linalg.inv(k) @ np.array([u, v, 1.0]) * depth
    uv, in_front = rig.project(name, (pose[:3, :3] @ ray + pose[:3, 3])[None])
    assert in_front[0]
    assert np.allclose(uv[0], (u, v), atol=1e-6)


def test_the_tele_camera_keeps_brake_lamps_and_traffic_lights_in_frame():
    rig = Rig()
    eye = rig.position[0]
    brake = np.array([[eye + d, 0.0, 0.75] for d in (8.0, 10.0, 30.0, 60.0)])
    high_lamp = np.array([[eye + d, -3.5, 5.2] for d in (23.0, 40.0, 60.0)])
    low_lamp = np.array([[eye + d, -2.5, 2.9] for d in (12.0, 40.0, 60.0)])
    for points in (brake, high_lamp, low_lamp):
        uv, in_front = rig.project('front_tele', points)
        assert in_front.all()
        assert ((uv >= 0) & (uv <= (383, 191))).all()


@pytest.mark.parametrize('kwargs,word', [
    ({'width': 8}, 'size'), ({'height': 0}, 'size'), ({'height_offset': 2.0}, 'height_offset'),
    ({'pitch_offset': 0.5}, 'radians'), ({'pitch_offset': math.nan}, 'radians')])
def test_bad_arguments_are_refused_in_one_line(kwargs, word):
    with pytest.raises(ConfigurationError, match=word) as caught:
        Rig(**kwargs)
    assert '\n' not in str(caught.value)


def test_an_unknown_camera_is_refused():
    with pytest.raises(ConfigurationError, match='front_wide'):
        Rig().project('rear', np.zeros((1, 3)))


def test_equal_rigs_compare_equal():
    assert Rig() == Rig(384, 192)
    assert hash(Rig()) == hash(Rig(384, 192))
    assert Rig() != Rig(height_offset=0.1)
