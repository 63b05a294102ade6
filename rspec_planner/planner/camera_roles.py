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
The seven camera roles of the Alpamayo family, by data set index.

A checkpoint was trained with some of them, in ascending order; nothing but the order tells the
model which image is which (no intrinsics reach it), so a camera in another role's place is seen
as that role. Names and fields of view are those of the Physical AI data set's features.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CameraRole:
    """One place on the vehicle."""

    index: int
    name: str
    fov_deg: float  # nominal horizontal field of view
    display: str  # what Alpamayo 1.5 calls it in its prompt


ROLES = (
    CameraRole(0, 'cross_left', 120.0, 'Front left camera'),
    CameraRole(1, 'front_wide', 120.0, 'Front camera'),
    CameraRole(2, 'cross_right', 120.0, 'Front right camera'),
    CameraRole(3, 'rear_left', 70.0, 'Rear left camera'),
    CameraRole(4, 'rear_tele', 30.0, 'Rear camera'),
    CameraRole(5, 'rear_right', 70.0, 'Rear right camera'),
    CameraRole(6, 'front_tele', 30.0, 'Front telephoto camera'),
)

BY_NAME = {role.name: role for role in ROLES}
BY_INDEX = {role.index: role for role in ROLES}
