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
"""Geometry of roads: arcs in closed form, projections, polygons."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from rspec_planner.world.road import crosswalk, inside, Layout, Path, road_paints


def test_arc_ends_where_the_circle_says():
    path = Path([(10.0, 0.0), (0.5 * math.pi * 20.0, 0.05)])
    x, y, heading = path.pose(path.length)
    assert heading == pytest.approx(path.curvatures.sum() * 0.5)
    assert (x, y) == pytest.approx((10 + 20 * math.sin(heading), 20 * (1 - math.cos(heading))))


@settings(max_examples=60, deadline=None)
@given(st.floats(-0.1, 0.1), st.floats(5.0, 80.0), st.floats(-4.0, 4.0))
def test_projection_inverts_pose(curvature, s, d):
    path = Path([(20.0, 0.0), (40.0, curvature), (30.0, 0.0)])
    x, y, _ = path.pose(s, d)
    back, offset, _ = path.project(x, y, s + 1.5)
    assert abs(back - s) < 0.02 and abs(offset - d) < 0.02


def test_points_agree_with_pose_and_extend_straight():
    path = Path([(30.0, 0.03)])
    s = np.array([-5.0, 0.0, 7.3, 30.0, 42.0])
    points = path.points(s, 1.5)
    for (x, y), station in zip(points, s):
        assert (x, y) == pytest.approx(path.pose(station, 1.5)[:2], abs=2e-3)


def test_layout_edges():
    layout = Layout(width=3.0, left=1, right=1, oncoming=2)
    assert (layout.right_edge, layout.divider, layout.left_edge) == (-4.5, 4.5, 10.5)
    assert layout.edge('left') == 10.5 and layout.edge('right') == -4.5


def test_markings_leave_gaps_free():
    path, layout = Path([(100.0, 0.0)]), Layout(left=1)
    paints = road_paints(path, layout, 0.0, 100.0, gaps=[(40.0, 50.0)])
    for paint in paints:
        if paint.kind == 'marking':
            x = paint.polygon[:, 0]
            assert x.max() <= 40.0 + 1e-9 or x.min() >= 50.0 - 1e-9
    assert {'shoulder', 'road', 'marking'} == {p.kind for p in paints}


def test_crosswalk_spans_the_lanes():
    stripes = crosswalk(Path([(50.0, 0.0)]), 20.0, -1.75, 5.25)
    corners = np.concatenate([p.polygon for p in stripes])
    assert corners[:, 0].min() == 20.0 and corners[:, 0].max() == 23.0
    assert corners[:, 1].min() >= -1.75 and corners[:, 1].max() <= 5.25


def test_inside_a_concave_polygon():
    shape = np.array([[0, 0], [4, 0], [4, 4], [2, 1], [0, 4]], float)
    assert inside(shape, np.array([[1, 1.5], [2, 3], [3.5, 0.5], [5, 1]])).tolist() == [
        True, False, True, False]
