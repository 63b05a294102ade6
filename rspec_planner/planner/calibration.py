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
Does a camera fit the role that it plays? Judge its CameraInfo; knows no message package.

The model sees pixels only, so a tele lens in the wide camera's place, two cables swapped or a
cropped stream give confident nonsense. Each complaint has a name, a count and a remedy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
import math
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from rspec_planner.model.config import CameraConfig
from rspec_planner.model.image_size import size_fault
from rspec_planner.planner.buffers import SelectionLimits
from rspec_planner.planner.camera_roles import BY_NAME

CALIBRATION_REASONS = (
    'camera_info_uncalibrated', 'camera_info_too_small', 'camera_info_aspect',
    'camera_info_field_of_view', 'camera_info_role',
)

#: distortion models of sensor_msgs/distortion_models whose angles follow the fisheye polynomial
_FISHEYE = ('equidistant', 'fisheye')
#: numbers of coefficients that OpenCV's other models have; it raises for any other
_DISTORTIONS = (0, 4, 5, 8, 12, 14)


@dataclass(frozen=True)
class Calibration:
    """What one camera says of itself."""

    width: int  # pixels of the published image, after region of interest and binning
    height: int
    matrix: NDArray[np.float64]  # (3, 3) K of the published image
    fov_deg: float  # horizontal, distortion included; nan when not calibrated
    frame_id: str

    @property
    def usable(self) -> bool:
        """Tell whether rays can be computed from it."""
        return (self.width > 0 and self.height > 0 and math.isfinite(self.fov_deg)
                and abs(self.fov_deg) < 360.0)


@dataclass(frozen=True)
class CalibrationFault:
    """What is wrong with a camera."""

    reason: str  # one of CALIBRATION_REASONS
    detail: str  # one line: the camera, the value, the remedy


def calibration_of(message: Any) -> Calibration:
    """Return the calibration in a CameraInfo of any ROS library."""
    roi = message.roi
    left, top = (roi.x_offset, roi.y_offset) if roi.width and roi.height else (0, 0)
    width, height = (roi.width, roi.height) if roi.width and roi.height \
        else (message.width, message.height)
    full = np.array(message.k, dtype=np.float64).reshape(3, 3)
    fov_deg = _horizontal_fov(full, np.array(message.d, dtype=np.float64),
                              message.distortion_model, left, width)
    columns, rows = max(message.binning_x, 1), max(message.binning_y, 1)
    matrix = full.copy()
    # Pixel centres lie at integers, so an edge of the image is at -0.5.
    matrix[0, 2], matrix[1, 2] = full[0, 2] - left, full[1, 2] - top
    matrix[0] = matrix[0] / columns + [0.0, 0.0, 0.5 / columns - 0.5]
    matrix[1] = matrix[1] / rows + [0.0, 0.0, 0.5 / rows - 0.5]
    return Calibration(width // columns, height // rows, matrix, fov_deg,
                       message.header.frame_id)


def _horizontal_fov(matrix: NDArray[np.float64], distortion: NDArray[np.float64], model: str,
                    left: int, width: int) -> float:
    """Return the angle in degrees between the rays through the middle of both image sides."""
    if not np.isfinite(matrix).all() or matrix[0, 0] <= 0 or matrix[1, 1] <= 0 or width <= 0:
        return float('nan')
    sides = np.array([[[left - 0.5, matrix[1, 2]]], [[left + width - 0.5, matrix[1, 2]]]])
    if model in _FISHEYE:
        reach = (sides[:, 0, 0] - matrix[0, 2]) / matrix[0, 0]
        angles = np.array([_fisheye_angle(value, distortion[:4]) for value in reach])
    elif distortion.size not in _DISTORTIONS or not np.isfinite(distortion).all():
        return float('nan')
    else:
        rays = cv2.undistortPoints(sides, matrix, distortion if distortion.size else None)
        angles = np.arctan(rays[:, 0, 0])
    return float(np.degrees(angles[1] - angles[0]))


def _fisheye_angle(distance: float, coefficients: NDArray[np.float64]) -> float:
    """
    Return the angle in radians at a signed image distance (in focal lengths).

    Solves distance = a (1 + k1 a^2 + k2 a^4 + k3 a^6 + k4 a^8) by Newton's method, the model of
    Kannala and Brandt (2006) that OpenCV and ROS call fisheye and equidistant.
    """
    powers = np.arange(len(coefficients)) * 2 + 2
    angle = distance
    for _ in range(20):
        scale = 1.0 + float(np.sum(coefficients * angle ** powers))
        slope = 1.0 + float(np.sum((powers + 1) * coefficients * angle ** powers))
        angle -= (angle * scale - distance) / slope if slope else 0.0
    return float(angle)


def calibration_fault(camera: str, calibration: Calibration, cameras: CameraConfig,
                      tolerance_deg: float) -> CalibrationFault | None:
    """
    Return the first thing that is wrong with a camera in its role, or None.

    `tolerance_deg` is the largest difference from the role's nominal field of view; a role that
    is not one of the family has none.
    """
    width, height, fov = calibration.width, calibration.height, calibration.fov_deg
    if width <= 0 or height <= 0 or not np.isfinite(fov):
        return CalibrationFault(
            'camera_info_uncalibrated', f"camera '{camera}': camera_info says {width}x{height} "
            f'pixels, focal length {calibration.matrix[0, 0]:g}; calibrate the camera')
    other = _other_role(camera, calibration, cameras, tolerance_deg)
    if other:
        return CalibrationFault('camera_info_role', f"camera '{camera}': {other}; check which "
                                'camera is connected to which topic')
    role = BY_NAME.get(camera)
    if role is not None and abs(fov - role.fov_deg) > tolerance_deg:
        return CalibrationFault(
            'camera_info_field_of_view', f"camera '{camera}' sees {fov:.1f} deg, its role "
            f'{role.fov_deg:.0f} deg within {tolerance_deg:.0f} (cameras.fov_tolerance_deg); '
            'use another lens or crop upstream')
    return _size_fault(camera, width, height, cameras)


def _other_role(camera: str, calibration: Calibration, cameras: CameraConfig,
                tolerance_deg: float) -> str:
    """Return why the camera seems to play another role of this checkpoint, '' if it does not."""
    others = [name for name in cameras.names if name != camera]
    named = [name for name in others if name in calibration.frame_id]
    if named and camera not in calibration.frame_id:
        return f"its frame_id '{calibration.frame_id}' is that of '{named[0]}'"
    fov = calibration.fov_deg
    if camera not in BY_NAME or abs(fov - BY_NAME[camera].fov_deg) <= tolerance_deg:
        return ''
    fits = [name for name in others
            if name in BY_NAME and abs(fov - BY_NAME[name].fov_deg) <= tolerance_deg]
    return f"it sees {fov:.1f} deg, which fits '{fits[0]}'" if fits else ''


def _size_fault(camera: str, width: int, height: int,
                cameras: CameraConfig) -> CalibrationFault | None:
    """Return whether the model would see stretched or enlarged pixels."""
    fault = size_fault(cameras, height, width, SelectionLimits.aspect_tolerance)
    if fault:
        return CalibrationFault('camera_info_aspect', f"camera '{camera}': {fault}")
    if width < cameras.width or height < cameras.height:
        return CalibrationFault(
            'camera_info_too_small', f"camera '{camera}': {width}x{height} pixels, the model "
            f'reads {cameras.width}x{cameras.height}; publish a larger image')
    return None


class CalibrationChecks:
    """The newest calibration and complaint of each camera, and how often each was made."""

    def __init__(self, cameras: CameraConfig, tolerance_deg: float = 15.0) -> None:
        self._cameras = cameras
        self.tolerance_deg = tolerance_deg
        self.calibrations: dict[str, Calibration] = {}
        self.faults: dict[str, CalibrationFault] = {}
        #: messages by reason
        self.counts: Counter[str] = Counter()

    def update(self, camera: str, message: Any) -> CalibrationFault | None:
        """Judge a CameraInfo of a camera; return what is wrong with it."""
        calibration = calibration_of(message)
        fault = calibration_fault(camera, calibration, self._cameras, self.tolerance_deg)
        self.calibrations[camera] = calibration
        self.faults.pop(camera, None)
        if fault is not None:
            self.faults[camera] = fault
            self.counts[fault.reason] += 1
        return fault
