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
"""The expert: exact stops, gaps, lane keeping, and unicycle motion in closed form."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from rspec_planner.world.expert import (
    Driver,
    Maneuver,
    offset_at,
    quintic,
    Shift,
    SpeedLimit,
    stop_acceleration,
)
from rspec_planner.world.road import Path
from rspec_planner.world.simulation import Actor, boxes_overlap, DT, EGO_FRONT, EgoState, idm

STRAIGHT = Path([(400.0, 0.0)])


def run(path, maneuver, speed, seconds, actors=(), s=10.0):
    """Drive and return the states and the driver."""
    x, y, yaw = path.pose(s)
    ego, driver, states = EgoState(x, y, yaw, speed), None, []
    driver = Driver(path, SpeedLimit(path), maneuver, s)
    for _ in range(round(seconds / DT)):
        driver.locate(ego)
        ego = ego.driven(driver.acceleration(ego, actors), driver.curvature(ego))
        states.append(ego)
        ego = ego.at(DT)
        for actor in actors:
            actor.advance(0.0)
    driver.locate(ego)
    return [*states, ego], driver


@settings(max_examples=40, deadline=None)
@given(st.floats(2.0, 15.0), st.floats(0.0, 20.0))
def test_rests_at_the_line_without_overrun(speed, extra):
    line = 10.0 + EGO_FRONT + speed * speed / 6.0 + 0.5 + extra
    states, driver = run(STRAIGHT, Maneuver(speed, stop_at=line), speed, 25.0)
    front = driver.s + EGO_FRONT
    assert states[-1].speed == 0.0
    assert line - 0.6 < front < line + 0.06
    assert min(e.acceleration for e in states) > -4.05


def test_stop_acceleration_is_the_closed_form():
    assert stop_acceleration(10.0, 20.0) == pytest.approx(-2.5)
    assert stop_acceleration(5.0, 20.0) == math.inf
    assert stop_acceleration(5.0, 20.0, at_once=True) == pytest.approx(-0.625)


def test_follows_a_leader_at_a_safe_gap():
    lead = Actor('car', STRAIGHT, 60.0, 0.0, speed=6.0)
    states, driver = run(STRAIGHT, Maneuver(12.0), 12.0, 30.0, [lead])
    gap = lead.rear - driver.s - EGO_FRONT
    assert states[-1].speed == pytest.approx(6.0, abs=0.1)
    assert 2.0 + 1.2 * 6.0 < gap < 14.0


def test_ignores_oncoming_and_other_lanes():
    others = [Actor('car', STRAIGHT, 60.0, 3.5, speed=6.0),
              Actor('car', STRAIGHT, 200.0, 0.0, speed=6.0, reverse=True)]
    states, _ = run(STRAIGHT, Maneuver(10.0), 10.0, 5.0, others[:1])
    assert states[-1].speed == pytest.approx(10.0, abs=0.05)


def test_brakes_before_a_bend_and_keeps_its_lane():
    path = Path([(70.0, 0.0), (40.0, 0.05), (60.0, 0.0)])
    x, y, yaw = path.pose(10.0)
    ego, driver = EgoState(x, y, yaw, 12.0), Driver(path, SpeedLimit(path), Maneuver(12.0), 10.0)
    worst = fastest = 0.0
    while driver.s < 140.0:
        driver.locate(ego)
        worst = max(worst, abs(driver.d))
        if 71.0 < driver.s < 109.0:
            fastest = max(fastest, ego.speed)
        ego = ego.driven(driver.acceleration(ego, ()), driver.curvature(ego)).at(DT)
    assert worst < 0.25
    assert fastest < math.sqrt(2.0 / 0.05) + 0.15


def test_quintic_and_shifts_reach_their_targets():
    assert quintic(0.0) == (0.0, 0.0, 0.0) and quintic(1.0)[0] == 1.0
    shifts = (Shift(10.0, 20.0, 1.5), Shift(50.0, 20.0, 0.0))
    assert [round(offset_at(shifts, s)[0], 6) for s in (5, 30, 45, 70)] == [0.0, 1.5, 1.5, 0.0]
    d = 1e-5
    slope = (offset_at(shifts, 18 + d)[0] - offset_at(shifts, 18 - d)[0]) / (2 * d)
    assert offset_at(shifts, 18)[1] == pytest.approx(slope, rel=1e-5)


def test_nudges_and_comes_back():
    shifts = (Shift(20.0, 25.0, 1.2), Shift(80.0, 25.0, 0.0))
    _, driver = run(STRAIGHT, Maneuver(9.0, shifts=shifts), 9.0, 5.5)
    assert driver.d == pytest.approx(1.2, abs=0.1)
    _, driver = run(STRAIGHT, Maneuver(9.0, shifts=shifts), 9.0, 14.0)
    assert driver.d == pytest.approx(0.0, abs=0.05)


def test_interpolation_ends_in_the_next_state():
    ego = EgoState(1.0, 2.0, 0.3, 8.0, -2.0, 0.02)
    after = ego.at(DT)
    assert after.speed == pytest.approx(7.8)
    assert after.yaw == pytest.approx(0.3 + 0.02 * (0.8 - 0.01))
    half = ego.at(0.05)
    assert math.hypot(half.x - 1.0, half.y - 2.0) == pytest.approx(0.3975, rel=1e-3)
    assert EgoState(0, 0, 0, 0.1).driven(-9.0, 0.0).at(DT).speed == 0.0


def test_idm_balance():
    assert idm(10.0, 10.0, 1e6, 10.0) == pytest.approx(0.0, abs=1e-6)
    assert idm(0.0, 10.0, 2.0, 0.0) == pytest.approx(0.0)


def test_oriented_boxes():
    agents = np.array([[[4.0, 0.0, 0.0, 2.0, 2.0], [1.35, 2.2, 0.0, 4.5, 1.8],
                        [1.35, 1.6, math.pi / 2, 2.0, 1.0]]])
    zero = np.zeros(1)
    assert boxes_overlap(zero, zero, zero, agents)[0].tolist() == [True, False, True]
