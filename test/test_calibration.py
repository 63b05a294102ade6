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
"""Field of view against closed forms, and a name for every camera that is out of its place."""

from __future__ import annotations

import math
from types import SimpleNamespace as Fields

import numpy as np
import pytest

from rspec_planner.model.config import CameraConfig
from rspec_planner.overlay import camera_view
from rspec_planner.planner.calibration import (
    calibration_fault,
    calibration_of,
    CALIBRATION_REASONS,
    CalibrationChecks,
)
from rspec_planner.planner.camera_roles import BY_NAME, ROLES
from rspec_planner.world.rig import Rig

CAMERAS = CameraConfig()


def info(fov_deg=120.0, width=1920, height=960, *, model='plumb_bob', d=(0.0,) * 5,
         frame_id='optical', roi=(0, 0, 0, 0), binning=0, focal=None):
    """Return the fields of a CameraInfo with the given undistorted field of view."""
    focal = width / 2 / math.tan(math.radians(fov_deg) / 2) if focal is None else focal
    k = [focal, 0, (width - 1) / 2, 0, focal, (height - 1) / 2, 0, 0, 1]
    region = Fields(x_offset=roi[0], y_offset=roi[1], width=roi[2], height=roi[3])
    return Fields(width=width, height=height, k=k, d=list(d), distortion_model=model, roi=region,
                  binning_x=binning, binning_y=binning, header=Fields(frame_id=frame_id))


def fault_of(camera, message, tolerance_deg=15.0, cameras=CAMERAS):
    fault = calibration_fault(camera, calibration_of(message), cameras, tolerance_deg)
    if fault is not None:
        assert fault.reason in CALIBRATION_REASONS
        assert camera in fault.detail and '\n' not in fault.detail
    return fault


@pytest.mark.parametrize('fov_deg', [30.0, 70.0, 120.0, 150.0])
@pytest.mark.parametrize('width', [385, 1920])
def test_pinhole_field_of_view(fov_deg, width):
    assert calibration_of(info(fov_deg, width, width // 2)).fov_deg == pytest.approx(fov_deg)


def test_fisheye_field_of_view_without_and_with_its_polynomial():
    # equidistant: the angle is the distance in focal lengths
    message = info(width=1000, height=500, model='equidistant', d=(0.0,) * 4, focal=400.0)
    assert calibration_of(message).fov_deg == pytest.approx(math.degrees(1000 / 400))
    angle, k1 = 1.0, -0.05
    focal = 500 / (angle * (1 + k1 * angle ** 2))
    message = info(width=1000, height=500, model='equidistant', d=(k1, 0, 0, 0), focal=focal)
    assert calibration_of(message).fov_deg == pytest.approx(math.degrees(2 * angle))


def test_barrel_distortion_widens_the_view():
    # the side of the image is at x (1 + k1 x^2) focal lengths for a ray with tangent x
    tangent, k1 = 1.0, -0.1
    focal = 500 / (tangent * (1 + k1 * tangent ** 2))
    message = info(width=1000, height=500, d=(k1, 0, 0, 0, 0), focal=focal)
    assert calibration_of(message).fov_deg == pytest.approx(90.0, abs=0.2)


def test_region_of_interest_narrows_the_view_and_binning_does_not():
    middle = info(120.0, 2000, 1000, roi=(500, 250, 1000, 500))
    found = calibration_of(middle)
    assert (found.width, found.height) == (1000, 500)
    expected = 2 * math.degrees(math.atan(math.tan(math.radians(60)) / 2))
    assert found.fov_deg == pytest.approx(expected)
    binned = calibration_of(info(120.0, 2000, 1000, binning=2))
    assert (binned.width, binned.height) == (1000, 500)
    assert binned.fov_deg == pytest.approx(120.0)
    np.testing.assert_allclose(binned.matrix, np.reshape(info(120.0, 1000, 500).k, (3, 3)))


def test_the_world_rig_fits_its_roles():
    rig = Rig()
    for name in rig.names:
        message = info(width=rig.width, height=rig.height, frame_id=f'{name}/optical')
        message.k = rig.intrinsics[name].reshape(-1).tolist()
        assert calibration_of(message).fov_deg == pytest.approx(BY_NAME[name].fov_deg)
        assert fault_of(name, message) is None


@pytest.mark.parametrize('role', ROLES, ids=lambda role: role.name)
def test_every_role_has_a_field_of_view_within_tolerance(role):
    alone = CameraConfig(names=(role.name,), ids=(role.index,), anchor=role.name)
    assert fault_of(role.name, info(role.fov_deg + 14.9), cameras=alone) is None
    fault = fault_of(role.name, info(role.fov_deg + 15.1), cameras=alone)
    assert fault.reason == 'camera_info_field_of_view'
    assert f'its role {role.fov_deg:.0f} deg' in fault.detail
    assert fault_of(role.name, info(role.fov_deg + 15.1), 16.0, alone) is None


def test_another_lens_of_this_vehicle_is_a_swapped_camera():
    fault = fault_of('front_wide', info(30.0))
    assert fault.reason == 'camera_info_role'
    assert "fits 'front_tele'" in fault.detail


def test_equal_lenses_are_told_apart_by_their_frame():
    fault = fault_of('cross_left', info(120.0, frame_id='cross_right/camera_optical_link'))
    assert fault.reason == 'camera_info_role'
    assert "that of 'cross_right'" in fault.detail
    assert fault_of('cross_left', info(120.0, frame_id='cross_left/camera')) is None
    assert fault_of('cross_left', info(120.0, frame_id='camera3')) is None


@pytest.mark.parametrize('changes', [
    {'focal': 0.0}, {'width': 0, 'focal': 100.0}, {'focal': float('nan')}, {'focal': -5.0}])
def test_uncalibrated(changes):
    assert fault_of('front_wide', info(**changes)).reason == 'camera_info_uncalibrated'


def test_size_and_aspect_ratio():
    assert fault_of('front_wide', info(height=1080)).reason == 'camera_info_aspect'
    assert fault_of('front_wide', info(width=382, height=191)).reason == 'camera_info_too_small'
    assert fault_of('front_wide', info(width=384, height=192)) is None


def test_checks_keep_the_newest_fault_and_count_all():
    checks = CalibrationChecks(CAMERAS)
    for _ in range(3):
        assert checks.update('front_wide', info(30.0)).reason == 'camera_info_role'
    assert checks.update('front_tele', info(90.0)).reason == 'camera_info_field_of_view'
    assert set(checks.faults) == {'front_wide', 'front_tele'}
    assert checks.update('front_wide', info(120.0)) is None
    assert set(checks.faults) == {'front_tele'}
    assert checks.counts == {'camera_info_role': 3, 'camera_info_field_of_view': 1}
    assert checks.calibrations['front_wide'].width == 1920


@pytest.mark.parametrize('d', [(0.1,) * 3, (0.1,) * 13, (float('nan'),) * 5, (float('inf'),) * 4])
def test_coefficients_that_no_model_has_are_uncalibrated(d):
    """OpenCV raises for them; found by fuzzing, where it would have ended the node."""
    assert fault_of('front_wide', info(d=d)).reason == 'camera_info_uncalibrated'


@pytest.mark.parametrize('message', [info(width=0, height=0, focal=0.0), info(d=(0.1,) * 3)])
def test_pictures_take_the_nominal_lens_where_a_calibration_is_unusable(message):
    """A width of 0 divided by zero; found by fuzzing."""
    view = camera_view('front_wide', (192, 384), calibration_of(message), None)
    assert 'lens' in view.assumed and np.isfinite(view.matrix).all()
