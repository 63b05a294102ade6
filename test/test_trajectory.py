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
"""Every rejection reason, each from a trajectory that fails nothing else."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from node_rig import plan_at
import numpy as np
import pytest

from rspec_planner.planner.plan import Verdict
from rspec_planner.planner.trajectory import (
    check_plan,
    check_trajectory,
    REJECT_REASONS,
    TrajectoryLimits,
)


def drive(speed=10.0, acceleration=0.0, curvature=0.0):
    """Integrate a constant action in closed form, stopping at zero speed."""
    t = np.arange(65) * 0.1
    if acceleration < 0:
        t = np.minimum(t, -speed / acceleration)
    speeds = speed + acceleration * t
    travelled = speed * t + 0.5 * acceleration * t ** 2
    yaw = curvature * travelled
    if curvature:
        x, y = np.sin(yaw) / curvature, (1 - np.cos(yaw)) / curvature
    else:
        x, y = travelled, np.zeros(65)
    poses = np.stack([x, y, np.zeros(65), yaw], axis=1)
    return [poses, speeds, np.full(65, float(acceleration)), np.full(65, float(curvature))]


@given(st.floats(0, 35), st.floats(-8, 5), st.floats(-0.95, 0.95))
@settings(max_examples=100, deadline=None)
def test_ordinary_driving_is_accepted(speed, acceleration, share):
    fastest = max(speed, speed + 6.4 * acceleration, 1.0)
    curvature = share * min(9.8 / fastest ** 2, 0.33)
    verdict = check_trajectory(*drive(speed, acceleration, curvature))
    assert verdict.accepted, verdict
    assert verdict.reason == verdict.detail == ''


@pytest.mark.parametrize('array', range(4))
@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_not_finite(array, value):
    arrays = drive()
    arrays[array][5] = value
    assert check_trajectory(*arrays).reason == 'not_finite'


def test_start_jump():
    arrays = drive()
    arrays[0][1:, 1] += 2.5
    verdict = check_trajectory(*arrays)
    assert verdict.reason == 'start_jump'
    assert '2.50 m' in verdict.detail
    assert '2.00 m' in verdict.detail


def test_a_rollout_from_behind_the_car_is_a_start_jump():
    arrays = drive()
    arrays[0][1:, 0] -= 10.6
    assert check_trajectory(*arrays).reason == 'start_jump'


def test_speed_mismatch():
    arrays = drive()
    arrays[1][0] = 6.5
    assert check_trajectory(*arrays).reason == 'speed_mismatch'


def test_point_jump():
    arrays = drive()
    arrays[0][30:, 1] += 11.0
    verdict = check_trajectory(*arrays)
    assert verdict.reason == 'point_jump'
    assert 'points 29 and 30' in verdict.detail


def test_a_stop_may_be_rounded_below_zero():
    assert check_trajectory(*drive(7.809133929070847, -3.0)).accepted  # ends at -9e-16 m/s
    for speed, accepted in ((-1e-5, True), (-1e-3, False)):
        arrays = drive(4.0, -2.0)
        arrays[1][40] = speed
        assert check_trajectory(*arrays).accepted is accepted


def test_reverse():
    arrays = drive(0.0)
    arrays[0][:, 0] = -0.05 * np.arange(65)
    verdict = check_trajectory(*arrays)
    assert (verdict.reason, '3.20 m are driven backwards' in verdict.detail) == ('reverse', True)
    arrays = drive(10.0)
    arrays[0][40, 0] = arrays[0][39, 0] - 0.2
    verdict = check_trajectory(*arrays)
    assert (verdict.reason, 'backwards' in verdict.detail) == ('reverse', True)


def test_action_bounds():
    arrays = drive()
    arrays[2][7] = -9.9
    verdict = check_trajectory(*arrays)
    assert verdict.reason == 'acceleration_out_of_bounds'
    assert 'point 7' in verdict.detail
    arrays = drive()
    arrays[3][9] = 0.34
    assert check_trajectory(*arrays).reason == 'curvature_out_of_bounds'


def test_lateral_acceleration():
    verdict = check_trajectory(*drive(20.0, 0.0, 0.025))  # 10 m/s^2 at a curvature that is legal
    assert verdict.reason == 'lateral_acceleration_out_of_bounds'
    assert '10.000 m/s^2' in verdict.detail
    assert check_trajectory(*drive(20.0, 0.0, 0.024)).accepted


def test_points_that_belie_their_speeds_or_curvatures():
    arrays = drive(10.0)
    arrays[1][20:] = 3.0  # the path goes on at 10 m/s
    verdict = check_trajectory(*arrays)
    assert verdict.reason == 'inconsistent' and 'speeds cover' in verdict.detail
    arrays = drive(10.0)
    arrays[3][20:] = 0.09  # the path goes on straight
    verdict = check_trajectory(*arrays)
    assert verdict.reason == 'inconsistent' and 'curvature does' in verdict.detail


def test_point_0_is_the_ego():
    arrays = drive(10.0)
    arrays[0][0, 0] = 0.3
    assert check_trajectory(*arrays).reason == 'start_jump'


def test_reverse_only_where_it_is_allowed():
    arrays = [values * sign for values, sign in zip(drive(3.0), (-1.0, -1.0, 1.0, 1.0))]
    assert check_trajectory(*arrays).reason == 'reverse'
    assert check_trajectory(*arrays, TrajectoryLimits(allow_reverse=True)).accepted


PLAN = plan_at(np.eye(4))


def test_a_whole_plan_is_judged():
    assert check_plan(PLAN, PLAN.t0_ns).accepted
    refused = replace(PLAN, verdict=Verdict(False, 'reasoning_incomplete', 'why'))
    assert check_plan(refused, PLAN.t0_ns) == refused.verdict
    assert check_plan(PLAN, PLAN.t0_ns + 1).reason == 'wrong_t0'
    assert check_plan(replace(PLAN, poses=PLAN.poses[:64]), PLAN.t0_ns).reason == 'wrong_shape'


@pytest.mark.parametrize('name', ['poses', 'speeds', 'accelerations', 'curvatures', 'candidates',
                                  'candidate_speeds', 'ego_pose_at_t0'])
def test_nothing_that_is_published_may_be_nan(name):
    values = getattr(PLAN, name).copy()
    values.reshape(-1)[3] = np.nan
    verdict = check_plan(replace(PLAN, **{name: values}), PLAN.t0_ns)
    assert verdict.reason == 'not_finite' and name in verdict.detail


def test_curvature_at_standstill_has_no_effect():
    arrays = drive(0.0)
    arrays[3][9] = 0.5
    assert check_trajectory(*arrays).accepted


def test_limits_are_parameters():
    arrays = drive(10.0, -2.0)
    assert not check_trajectory(*arrays, TrajectoryLimits(acceleration_mps2=(-1.0, 1.0))).accepted
    assert len(set(REJECT_REASONS)) == len(REJECT_REASONS)
