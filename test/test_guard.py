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
"""What is published when a plan is refused: nothing, the last one, or a controlled stop."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from node_rig import fake_plan, running, values_of
import numpy as np
import pytest
from test_cycle import Bench, MS, observation_at, T0

from rspec_planner.cycle import Outcome
from rspec_planner.diagnostics import inference_status, PlanFacts
from rspec_planner.guard import guard_limits
from rspec_planner.parameters import load_yaml_parameters, NodeParameters
from rspec_planner.planner.fallback import stop_plan
from rspec_planner.planner.trajectory import check_plan, DEFAULT_LIMITS
from rspec_planner.transport import config_path

SHIPPED = load_yaml_parameters(config_path('rspec_planner.param.yaml'))


def nan_plans(bench):
    """Make the planner return plans that it calls good and that are not finite."""
    whole = bench.planner.plan

    def plan(observation):
        made = whole(observation)
        return replace(made, poses=np.full_like(made.poses, np.nan))
    bench.planner.plan = plan


def driving(speed, curvature=0.0):
    """Return an observation of an ego that has driven an arc."""
    observation = replace(observation_at(T0), speed_mps=speed)
    s = speed * 0.1 * np.arange(-15, 1)
    poses = np.tile(np.eye(4), (16, 1, 1))
    yaw = curvature * s
    poses[:, 0, 0] = poses[:, 1, 1] = np.cos(yaw)
    poses[:, 1, 0], poses[:, 0, 1] = np.sin(yaw), -np.sin(yaw)
    poses[:, 0, 3] = np.sin(yaw) / curvature if curvature else s
    poses[:, 1, 3] = (1 - np.cos(yaw)) / curvature if curvature else 0.0
    return replace(observation, ego_poses=poses)


def test_the_shipped_limits_are_those_of_the_planner():
    assert guard_limits(NodeParameters.from_values(SHIPPED).guard) == DEFAULT_LIMITS


def test_a_planner_that_lies_about_its_plan_is_caught():
    bench = Bench()
    nan_plans(bench)
    result = bench.run()
    assert (result.outcome, result.reason) == (Outcome.REJECTED, 'not_finite')
    assert bench.published == bench.stops == [] and not result.repeated and not result.stopped


def test_a_plan_of_another_time_is_caught():
    bench = Bench()
    bench.planner.plan = lambda observation: fake_plan(observation_at(T0 - 100 * MS))
    assert bench.run().reason == 'wrong_t0' and bench.published == []


def test_a_plan_ahead_of_the_clock_is_caught():
    bench = Bench()
    bench.late_by(-400)  # the clock was set back while the plan was made
    assert bench.run().reason == 'stamp_in_future' and bench.published == []


def test_limits_are_those_of_the_parameters():
    bench = Bench(guard={'max_curvature_1pm': 0.02})
    assert bench.run().outcome is Outcome.PUBLISHED  # curvature 0.01
    bench.config = replace(bench.config, guard=replace(bench.config.guard,
                                                       max_curvature_1pm=0.009))
    assert bench.run().reason == 'curvature_out_of_bounds'


def test_last_valid_keeps_its_old_stamp_and_grows_too_old():
    bench = Bench(guard={'fallback': 'last_valid', 'last_valid_max_age_ms': 500.0})
    nan = Bench(guard={'fallback': 'last_valid'})
    nan_plans(nan)
    assert not nan.run().repeated and nan.published == []  # there is none yet
    assert bench.run().outcome is Outcome.PUBLISHED
    nan_plans(bench)
    bench.now_ns = T0 + 300 * MS
    result = bench.run(T0 + 200 * MS)
    assert (result.outcome, result.reason) == (Outcome.REJECTED, 'not_finite')
    assert result.repeated and [plan.t0_ns for plan in bench.published] == [T0, T0]
    bench.now_ns = T0 + 501 * MS
    assert not bench.run(T0 + 400 * MS).repeated and len(bench.published) == 2


def test_a_stop_leaves_on_its_own_topic_under_the_time_of_its_input():
    bench = Bench(guard={'fallback': 'stop'})
    nan_plans(bench)
    result = bench.run()
    assert result.outcome is Outcome.REJECTED and result.stopped and not result.repeated
    assert bench.published == []
    assert [plan.t0_ns for plan in bench.stops] == [T0]
    assert bench.stops[0].reasoning.text == 'controlled stop: not_finite'
    assert bench.stops[0].speeds[0] == 5.0 and bench.stops[0].speeds[-1] == 0.0


def test_a_planner_that_raises_has_a_fallback_too():
    bench = Bench(guard={'fallback': 'stop'})

    def fail(observation):
        raise RuntimeError('CUDA error')
    bench.planner.before = fail
    with pytest.raises(RuntimeError):
        bench.run()
    assert bench.cycle.fallback == 'stop' and len(bench.stops) == 1
    bench.planner.before = lambda observation: None
    assert bench.run().outcome is Outcome.PUBLISHED and bench.cycle.fallback == ''


def test_diagnostics_name_the_check_and_the_fallback():
    bench = Bench(guard={'fallback': 'stop'})
    nan_plans(bench)
    statistics = bench_statistics(bench)
    status = inference_status(PlanFacts(statistics, bench.run()))
    values = values_of(status)
    assert (values['rejected_total'], values['rejected_not_finite']) == ('1', '1')
    assert (values['fallback'], values['stopped_total']) == ('stop', '1')
    assert 'plan rejected: not_finite' in status.message
    assert 'controlled stop was published on ~/output/stop_trajectory' in status.message


def bench_statistics(bench):
    from rspec_planner.cycle import CycleStatistics
    statistics = CycleStatistics()
    statistics.count(bench.run(), budget_ms=1e6)
    return statistics


@given(st.floats(0, 40), st.floats(-0.1, 0.1), st.floats(0.5, 9.8))
@settings(max_examples=200, deadline=None)
def test_every_stop_passes_the_checks_and_never_speeds_up(speed, curvature, deceleration):
    stop = stop_plan(driving(speed, curvature), None, deceleration, 'why', DEFAULT_LIMITS)
    assert check_plan(stop, T0).accepted, check_plan(stop, T0)
    assert (np.diff(stop.speeds) <= 0).all()
    travelled = np.linalg.norm(np.diff(stop.poses[:, :2], axis=0), axis=1).sum()
    assert travelled <= speed ** 2 / (2 * deceleration) + 0.1 * speed + 1e-6


def test_a_stop_keeps_to_the_arc_that_the_ego_drives():
    stop = stop_plan(driving(8.0, 0.05), None, 3.0, 'why', DEFAULT_LIMITS)
    radius = np.linalg.norm(stop.poses[:, :2] - [0.0, 20.0], axis=1)
    assert np.abs(radius - 20.0).max() < 0.05


def test_a_stop_follows_the_last_plan_while_the_ego_is_on_it():
    first = driving(8.0)
    bend = stop_plan(driving(8.0, 0.05), None, 0.5, 'a plan along an arc', DEFAULT_LIMITS)
    pose = np.eye(4)
    yaw = bend.poses[10, 3]
    pose[:2, :2] = [[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]]
    pose[:2, 3] = bend.poses[10, :2]
    stop = stop_plan(replace(first, ego_pose_at_t0=pose), bend, 3.0, 'why', DEFAULT_LIMITS)
    assert stop.curvatures[:20] == pytest.approx(0.05, rel=1e-3)
    pose[:2, 3] += 3.0  # off the way: the history was straight
    stop = stop_plan(replace(first, ego_pose_at_t0=pose), bend, 3.0, 'why', DEFAULT_LIMITS)
    assert stop.curvatures == pytest.approx(0.0)


@pytest.mark.ros
def test_the_stop_of_a_live_node(ros):
    from trajectory_msgs.msg import MultiDOFJointTrajectory

    from rspec_planner.ros_conversions import stamp_to_ns
    with running('guard.fallback:=stop') as rig:
        root = '/planning/rspec_planner/output'
        stops = rig.subscribe(MultiDOFJointTrajectory, f'{root}/stop_trajectory')
        rig.planner.accept = False
        t0_ns = rig.drive(rig.node.get_clock().now().nanoseconds)
        status = rig.status('inference_status',
                            lambda s: values_of(s)['fallback'] == 'stop', 'the stop')
        assert 'plan rejected: start_jump' in status.message
        assert t0_ns in {stamp_to_ns(stop.header.stamp) for stop in stops}
        assert rig.received['trajectory'] == rig.received['path'] == []
