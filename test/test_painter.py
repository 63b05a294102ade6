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
"""The drawing order against rays cast in the plane."""

import numpy as np
import pytest

from rspec_planner.world.painter import draw_order

CORNERS = np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])


def rectangle(x, y, length, width, yaw=0.0):
    c, s = np.cos(yaw), np.sin(yaw)
    return CORNERS * (length, width) @ np.array([[c, s], [-s, c]]) + (x, y)


def hit_distance(corners, direction):
    """Distance at which a ray from the origin enters a convex polygon, or infinity."""
    edges = np.roll(corners, -1, axis=0) - corners
    normals = np.stack([edges[:, 1], -edges[:, 0]], axis=1)
    approach = normals @ direction
    offset = (normals * corners).sum(axis=1)
    with np.errstate(divide='ignore', invalid='ignore'):
        at = offset / approach
    enter = at[approach < 0].max(initial=0.0)
    leave = at[approach > 0].min(initial=np.inf)
    return enter if enter < leave else np.inf


def assert_far_to_near(footprints, order):
    rank = np.argsort(order)
    for angle in np.linspace(-1.9, 1.9, 400):
        direction = np.array([np.cos(angle), np.sin(angle)])
        hits = [(hit_distance(corners, direction), rank[i])
                for i, corners in enumerate(footprints)]
        ranks = [r for d, r in sorted(hits, reverse=True) if np.isfinite(d)]
        assert ranks == sorted(ranks)


def test_the_near_one_comes_last():
    boxes = np.stack([rectangle(10, 0, 4, 2), rectangle(30, 0, 4, 2), rectangle(20, 0, 4, 2)])
    assert draw_order(boxes, np.zeros(2)) == [1, 2, 0]


def test_a_car_beside_a_long_bus_covers_it():
    # the bus has the nearest corner, yet the car stands between the eye and its far end
    bus, car = rectangle(11.0, 3.5, 14.0, 2.5), rectangle(14.5, 0.8, 4.0, 1.8)
    assert draw_order(np.stack([bus, car]), np.zeros(2)) == [0, 1]
    assert draw_order(np.stack([car, bus]), np.zeros(2)) == [1, 0]


def test_a_long_wall_behind_a_near_car_goes_first():
    # by centres the wall is nearer than the car, yet it lies behind it
    wall, car = rectangle(30.0, 9.0, 60.0, 1.0), rectangle(40.0, 6.0, 4.0, 2.0)
    assert draw_order(np.stack([car, wall]), np.zeros(2)) == [1, 0]


@pytest.mark.parametrize('seed', range(12))
def test_random_disjoint_boxes_are_drawn_far_to_near(seed):
    rng = np.random.RandomState(seed)
    cells = [(x, y) for x in range(6, 66, 12) for y in range(-24, 30, 8)]
    boxes = np.stack([
        rectangle(x + rng.uniform(-1, 1), y + rng.uniform(-1, 1), rng.uniform(0.3, 7.0),
                  rng.uniform(0.3, 3.0), rng.uniform(-0.3, 0.3)) for x, y in cells])
    order = draw_order(boxes, np.zeros(2))
    assert sorted(order) == list(range(len(boxes)))
    assert_far_to_near(boxes, order)


def test_overlapping_boxes_still_get_an_order():
    boxes = np.stack([rectangle(10, 0, 4, 2), rectangle(11, 0, 4, 2), rectangle(10, 0, 4, 2)])
    assert sorted(draw_order(boxes, np.zeros(2))) == [0, 1, 2]


def test_nothing_has_an_empty_order():
    assert draw_order(np.zeros((0, 4, 2)), np.zeros(2)) == []
