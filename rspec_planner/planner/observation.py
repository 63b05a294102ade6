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
"""What the planner sees at one instant t0. Nothing here knows ROS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Observation:
    """
    Inputs chosen by time around t0; the same t0 stamps the plan made from them.

    Image rows follow the profile's camera order (camera-major prompt order).
    """

    t0_ns: int  # stamp of the anchor camera's newest frame, nanoseconds
    camera_names: tuple[str, ...]  # (C,) roles, e.g. 'cross_left', 'front_wide'
    images: np.ndarray  # (C, 4, H, W, 3) uint8 RGB at t0-0.3, -0.2, -0.1, 0 s
    image_stamps_ns: np.ndarray  # (C, 4) int64, the stamps actually chosen
    ego_poses: np.ndarray  # (16, 4, 4) float64 homogeneous, ego frame at t0, oldest first
    ego_pose_at_t0: np.ndarray  # (4, 4) float64, odometry frame <- ego at t0
    odometry_frame: str  # frame_id that ego_pose_at_t0 lives in, e.g. 'map'
    speed_mps: float  # measured longitudinal speed at t0
    navigation_text: str = ''
    ages_ms: Mapping[str, float] = field(default_factory=dict)  # input name -> t0 minus stamp
