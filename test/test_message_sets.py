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
"""Contents of both message sets, against closed forms of a turning plan."""

from __future__ import annotations

from dataclasses import replace
import math

import autoware_messages
from node_rig import plan_at, T0, turned
import numpy as np
from numpy.testing import assert_allclose
import pytest
from std_msgs.msg import Float64, String

from rspec_planner.errors import ConfigurationError
from rspec_planner.message_sets import AUTOWARE_PACKAGES, AutowareMessages, load_message_set
from rspec_planner.ros_conversions import candidate_motion, stamp_to_ns

SPEED, CURVATURE, BRAKING = 8.0, 0.02, -0.5
TIMES = np.arange(65) * 0.1


def turning_plan(pose=None, samples=3):
    """Return a braking left turn; candidate k turns k times as much, the last one is the plan."""
    speeds = SPEED + BRAKING * TIMES
    lengths = SPEED * TIMES + BRAKING * TIMES ** 2 / 2
    candidates = []
    for k in range(1, samples + 1):
        yaw = k * CURVATURE * lengths
        candidates.append(np.column_stack([
            np.sin(yaw) / (k * CURVATURE), (1 - np.cos(yaw)) / (k * CURVATURE),
            np.zeros(65), yaw]))
    plan = plan_at(turned(0.0) if pose is None else pose, SPEED)
    return replace(plan, poses=candidates[-1], speeds=speeds,
                   accelerations=np.full(65, BRAKING),
                   curvatures=np.full(65, samples * CURVATURE),
                   candidates=np.stack(candidates), candidate_speeds=np.stack([speeds] * samples))


@pytest.fixture
def autoware(monkeypatch):
    autoware_messages.install(monkeypatch)
    return AutowareMessages()


def test_common_set_needs_no_other_package():
    messages = load_message_set('common')
    assert messages.number(T0, 2) == Float64(data=2.0)
    assert messages.text(T0, 'keep') == String(data='keep')
    assert len(messages.trajectory(turning_plan(), 'odometry').points) == 65


@pytest.mark.parametrize('package', AUTOWARE_PACKAGES)
def test_missing_package_is_named(monkeypatch, package):
    autoware_messages.install(monkeypatch, package)
    with pytest.raises(ConfigurationError, match=f"'{package}' is not installed"):
        load_message_set('autoware')


def test_autoware_trajectory(autoware):
    used = autoware.trajectory(turning_plan(turned(0.0)), 'base_link')
    message = autoware.trajectory(turning_plan(turned(math.pi / 2)), 'odometry', used)
    assert stamp_to_ns(message.header.stamp) == T0
    assert message.header.frame_id == 'map'
    assert len(message.points) == 65
    times = [stamp_to_ns(point.time_from_start) for point in message.points]
    assert times == [i * 100_000_000 for i in range(65)]
    assert_allclose([p.longitudinal_velocity_mps for p in message.points], SPEED + BRAKING * TIMES)
    assert_allclose([p.acceleration_mps2 for p in message.points], BRAKING)
    assert_allclose([p.heading_rate_rps for p in message.points],
                    (SPEED + BRAKING * TIMES) * 3 * CURVATURE)
    assert {p.lateral_velocity_mps for p in message.points} == {0.0}
    first, last = message.points[0].pose, message.points[-1].pose
    assert_allclose([first.position.x, first.position.y, first.position.z], [100, -20, 1])
    # the ego looks along +y of the map, and left of it is -x
    end = turning_plan().poses[-1]
    assert_allclose([last.position.x, last.position.y], [100 - end[1], -20 + end[0]])
    yaw = math.pi / 2 + end[3]
    turn = last.orientation
    assert_allclose([abs(turn.z), abs(turn.w)],
                    [abs(math.sin(yaw / 2)), abs(math.cos(yaw / 2))], atol=1e-9)


def test_autoware_candidates(autoware):
    plan = turning_plan()
    message = autoware.candidates(plan, 'base_link')
    assert len(message.candidate_trajectories) == 3
    names = [info.generator_name.data for info in message.generator_info]
    assert names == ['rspec_planner_0', 'rspec_planner_1', 'rspec_planner_2']
    again = autoware.candidates(plan, 'base_link')
    ids = {bytes(item.generator_id.uuid) for part in (message, again)
           for item in (*part.candidate_trajectories, *part.generator_info)}
    assert len(ids) == 1 and ids != {bytes(16)}
    for k, candidate in enumerate(message.candidate_trajectories):
        assert candidate.header.frame_id == 'base_link'
        assert stamp_to_ns(candidate.header.stamp) == T0
        assert len(candidate.points) == 65
        assert_allclose([p.pose.position.y for p in candidate.points], plan.candidates[k, :, 1])
        assert_allclose([p.acceleration_mps2 for p in candidate.points], BRAKING)
    # mean heading rate of each step: curvature times mean speed
    rates = [p.heading_rate_rps for p in message.candidate_trajectories[0].points]
    assert_allclose(rates[:64], CURVATURE * (SPEED + BRAKING * (TIMES[:64] + 0.05)))


def test_the_plan_keeps_its_own_actions_among_the_candidates():
    plan = turning_plan()
    assert np.array_equal(candidate_motion(plan, 2).heading_rates, plan.speeds * plan.curvatures)
    assert np.array_equal(candidate_motion(plan, None).accelerations, plan.accelerations)


def test_headings_across_half_a_turn_have_no_jump():
    plan = turning_plan()
    wrapped = plan.candidates.copy()
    wrapped[..., 3] = (wrapped[..., 3] + 3.0 + math.pi) % (2 * math.pi) - math.pi
    rates = candidate_motion(replace(plan, candidates=wrapped), 0).heading_rates
    assert_allclose(rates, candidate_motion(plan, 0).heading_rates, atol=1e-9)


def test_autoware_texts_numbers_and_published_time(autoware):
    text, number = autoware.text(T0, 'keep'), autoware.number(T0 + 5, 3)
    assert (text.data, stamp_to_ns(text.stamp)) == ('keep', T0)
    assert (number.data, stamp_to_ns(number.stamp)) == (3.0, T0 + 5)
    published = autoware.published_time(turning_plan(), 'odometry', T0 + 7)
    assert stamp_to_ns(published.header.stamp) == T0
    assert stamp_to_ns(published.published_stamp) == T0 + 7
    assert published.header.frame_id == 'map'
