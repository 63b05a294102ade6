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
"""The picture of a MarkerArray shows what RViz would: places, colours, text, and no surprises."""

from __future__ import annotations

from dataclasses import replace

from node_rig import plan_at, turned
import numpy as np
import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed (requirements-ros.txt)')

from visualization_msgs.msg import Marker

from rspec_planner.errors import InputError
from rspec_planner.live.marker_view import (
    BACKGROUND,
    draw_markers,
    follower_view,
    GRID,
    HEIGHT,
    WIDTH,
)
from rspec_planner.markers import plan_markers
from rspec_planner.parameters import VehicleParameters
from rspec_planner.projection import project

CAR = VehicleParameters(length_m=4.8, width_m=1.9, rear_overhang_m=1.0)
POSE = turned(2.1, x=5e4, y=-3e4, z=12.0)


def markers(plan, frame='odometry'):
    return plan_markers(plan, frame, 0.1, CAR).markers


def inked(picture):
    """Return where anything but background and grid was drawn, (HEIGHT, WIDTH) bool."""
    plain = draw_markers([], POSE)
    return (picture.astype(int) - plain.astype(int)).__abs__().max(-1) > 40


def pixel(x, y, z):
    view = follower_view()
    (u, v), _ = project(np.array([x, y, z]), view, view.name)
    return round(u), round(v)


def test_the_view_is_centred_on_the_ego_with_ahead_up_and_left_left():
    assert pixel(0.0, 0.0, 0.0) == (WIDTH // 2, HEIGHT // 2)
    ahead, left, above = pixel(20.0, 0.0, 0.0), pixel(0.0, 5.0, 0.0), pixel(0.0, 0.0, 3.0)
    assert ahead[0] == WIDTH // 2 and ahead[1] < HEIGHT // 2
    assert left[0] < WIDTH // 2 and left[1] == HEIGHT // 2
    assert above[0] == WIDTH // 2 and above[1] < HEIGHT // 2


def test_footprint_and_end_of_the_plan_are_where_they_belong():
    picture = draw_markers(markers(plan_at(POSE, speed=3.0)), POSE)
    seen = inked(picture)
    for x, y in ((3.8, 0.95), (3.8, -0.95), (-1.0, 0.95), (-1.0, -0.95)):
        u, v = pixel(x, y, 0.3)
        assert seen[v - 3:v + 4, u - 3:u + 4].any(), (x, y)
    u, v = pixel(19.2, 0.0, 0.3)
    assert seen[v - 4:v + 5, u - 4:u + 5].any()
    assert not seen[v - 20:v - 8].any()  # the text stands above the plan, not on it
    assert seen[:v - 20].any()
    assert not seen[HEIGHT * 6 // 10:].any()


def test_both_frames_give_the_same_picture():
    plan = plan_at(POSE, speed=7.0)
    assert np.array_equal(draw_markers(markers(plan), POSE),
                          draw_markers(markers(plan, 'base_link'), POSE))


@pytest.mark.parametrize('speed, channel', [(0.1, 0), (15.0, 1)])
def test_the_plan_is_red_when_it_stands_and_green_when_it_drives(speed, channel):
    plan = plan_at(POSE, speed=10.0)
    plan = replace(plan, speeds=np.full(65, speed))
    u, v = pixel(20.0, 0.0, 0.3)
    colour = draw_markers(markers(plan), POSE)[v, u].astype(int)
    assert colour[channel] > 180 and colour[1 - channel] < 80


def test_the_grid_stays_with_the_ground_while_the_ego_moves():
    first, second = (draw_markers([], turned(0.0, x=x, y=0.0)) for x in (100.0, 110.0))
    assert np.array_equal(first, second)
    third = draw_markers([], turned(0.0, x=105.0, y=0.0))
    assert not np.array_equal(first, third)
    assert (third == GRID).all(-1).any() and (third == BACKGROUND).all(-1).mean() > 0.8


def test_an_unknown_kind_of_marker_is_refused():
    with pytest.raises(InputError, match="marker 'new' is of type 0"):
        draw_markers([Marker(ns='new', type=Marker.ARROW)], POSE)
