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

from __future__ import annotations

import math

from node_rig import plan_at, T0, TEXT, turned
import numpy as np
from numpy.testing import assert_allclose
import pytest
from rclpy.serialization import deserialize_message, serialize_message
from visualization_msgs.msg import Marker, MarkerArray

from rspec_planner.markers import (
    LIFT_M,
    plan_markers,
    speed_colours,
    TEXT_COLUMNS,
    TEXT_HEIGHT_M,
    TEXT_SIZE_M,
)
from rspec_planner.parameters import VehicleParameters
from rspec_planner.ros_conversions import chosen_candidate, stamp_to_ns

CAR = VehicleParameters(length_m=4.0, width_m=2.0, rear_overhang_m=1.0)


@pytest.fixture
def markers():
    array = plan_markers(plan_at(turned(math.pi / 2)), 'odometry', 0.1, CAR)
    return deserialize_message(serialize_message(array), MarkerArray).markers


def of(markers, namespace):
    return [marker for marker in markers if marker.ns == namespace]


def test_all_markers_are_stamped_t0_and_die_after_two_periods(markers):
    for marker in markers:
        assert stamp_to_ns(marker.header.stamp) == T0
        assert marker.header.frame_id == 'map'
        assert stamp_to_ns(marker.lifetime) == 200_000_000
        assert marker.pose.orientation.w == 1.0
        assert not marker.frame_locked
    keys = [(marker.ns, marker.id) for marker in markers]
    assert len(set(keys)) == len(keys)
    assert {name for name, _ in keys} == {'trajectory', 'waypoints', 'reasoning',
                                          'ego_footprint'}


def test_one_line_per_candidate_and_the_chosen_one_is_coloured(markers):
    lines = of(markers, 'trajectory')
    assert [len(line.points) for line in lines] == [65, 65]
    assert [len(line.colors) for line in lines] == [0, 65]  # the plan is the second candidate
    assert lines[1].scale.x > lines[0].scale.x
    end = lines[1].points[-1]
    assert_allclose([end.x, end.y, end.z], [100.0, 5.6, 1.0 + LIFT_M], atol=1e-9)


def test_reasoning_stands_above_the_ego(markers):
    (text,) = of(markers, 'reasoning')
    assert text.type == Marker.TEXT_VIEW_FACING
    assert text.text.replace('\n', ' ') == TEXT
    assert [len(line) <= TEXT_COLUMNS for line in text.text.split('\n')] == [True, True]
    assert_allclose([text.pose.position.x, text.pose.position.y], [100.0, -20.0])
    assert text.pose.position.z == pytest.approx(1.0 + TEXT_HEIGHT_M + TEXT_SIZE_M / 2)


def test_waypoints_are_full_seconds(markers):
    (dots,) = of(markers, 'waypoints')
    assert_allclose([point.y for point in dots.points], -20.0 + 4.0 * np.arange(1, 7))


def test_footprint_is_the_closed_rectangle_of_the_vehicle(markers):
    (outline,) = of(markers, 'ego_footprint')
    corners = [(point.x, point.y) for point in outline.points]
    # the ego looks along +y of the map: 3 m ahead, 1 m behind, 1 m to each side
    assert_allclose(corners, [(101, -21), (101, -17), (99, -17), (99, -21), (101, -21)])


def test_base_link_markers_are_locked_to_the_vehicle():
    made = plan_markers(plan_at(turned(1.0)), 'base_link', 0.1, CAR).markers
    assert all(m.frame_locked and m.header.frame_id == 'base_link' for m in made)


def test_colours_go_from_red_to_green():
    red, yellow, green = speed_colours(np.array([0.0, 7.5, 40.0]))
    assert (red.r, red.g) == (1.0, 0.0)
    assert (yellow.r, yellow.g) == (1.0, 1.0)
    assert (green.r, green.g) == (0.0, 1.0)


def test_chosen_candidate_is_the_plan():
    assert chosen_candidate(plan_at(turned(0.0))) == 1
