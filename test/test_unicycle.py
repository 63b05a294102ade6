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
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch

from rspec_planner.model.config import ActionSpaceConfig
from rspec_planner.model.unicycle import UnicycleActionSpace, unwrap

SPACE = UnicycleActionSpace(ActionSpaceConfig())


def arc(speed: float, accel: float, curvature: float,
        times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Closed-form poses of constant acceleration and curvature, origin at time zero."""
    distance = speed * times + 0.5 * accel * times ** 2
    yaw = curvature * distance
    if curvature:
        xy = torch.stack((yaw.sin() / curvature, (1 - yaw.cos()) / curvature), -1)
    else:
        xy = torch.stack((distance, torch.zeros_like(distance)), -1)
    return xy[None].float(), yaw[None].float()


PAST = torch.arange(-15, 1, dtype=torch.float64) * 0.1

#: speed, acceleration, curvature of the past; v0; last x, y, yaw for two constant actions
REFERENCE = [
    ((0.0, 0.0, 0.0), 0.0, (0.5945, 0.0, 0.00016), (-13.2827, 1.1868, -0.17818)),
    ((10.0, 0.0, 0.0), 9.99941, (64.5874, 0.5616, 0.01739), (46.8756, 16.4685, 0.67575)),
    ((8.0, 1.5, 0.0), 7.99952, (51.7897, 0.3611, 0.01394), (36.2558, 9.3527, 0.50496)),
    ((6.0, 0.0, 0.05), 6.00009, (38.9944, 0.2047, 0.01050), (24.5836, 4.1462, 0.33422)),
    ((12.0, -3.0, 0.0), 11.99930, (77.3844, 0.8062, 0.02083), (56.1315, 25.2856, 0.84653)),
]


@pytest.mark.parametrize('past,speed,zero,other', REFERENCE)
def test_reference_vectors(past, speed, zero, other):
    v0 = SPACE.initial_speed(*arc(*past, PAST))
    assert abs(float(v0) - speed) < 3e-5
    for action, want in (((0.0, 0.0), zero), ((-1.0, 0.5), other)):
        xy, yaw, _ = SPACE.integrate(torch.tensor(action).expand(1, 64, 2), v0)
        assert abs(float(xy[0, -1, 0]) - want[0]) < 3e-4
        assert abs(float(xy[0, -1, 1]) - want[1]) < 2e-4
        assert abs(float(yaw[0, -1]) - want[2]) < 2e-5


def test_speed_is_the_same_when_the_past_crosses_the_yaw_seam():
    xy, yaw = arc(8.0, 0.0, 0.1, PAST)
    turn = math.pi + 0.3
    rotation = torch.tensor([[math.cos(turn), -math.sin(turn)],
                             [math.sin(turn), math.cos(turn)]])
    turned = (yaw + turn + math.pi).remainder(2 * math.pi) - math.pi
    assert float(turned.max() - turned.min()) > 6.0  # it does cross
    got = SPACE.initial_speed(xy @ rotation.T, turned)
    torch.testing.assert_close(got, SPACE.initial_speed(xy, yaw), rtol=0, atol=1e-4)


def test_unwrap_restores_a_steady_turn():
    yaw = torch.arange(0, 60, dtype=torch.float64)[None] * 0.3
    wrapped = (yaw + math.pi).remainder(2 * math.pi) - math.pi
    torch.testing.assert_close(unwrap(wrapped), yaw)


def test_a_batch_is_solved_row_by_row():
    pasts = [arc(*case[0], PAST) for case in REFERENCE]
    xy, yaw = (torch.cat(parts) for parts in zip(*pasts))
    together = SPACE.initial_speed(xy, yaw)
    alone = torch.cat([SPACE.initial_speed(*past) for past in pasts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_normalisation_is_affine_and_inverts():
    actions = torch.randn(2, 64, 2)
    torch.testing.assert_close(SPACE.normalise(SPACE.denormalise(actions)), actions)
    zero = SPACE.denormalise(torch.zeros(2))
    torch.testing.assert_close(zero, torch.tensor([0.02902694707164455, 0.0002692167976330542]))


def test_bounds_name_the_steps_that_leave_them():
    actions = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, -0.34], [-9.7, 0.32]])
    assert SPACE.is_within_bounds(actions).tolist() == [True, False, False, True]


@given(st.floats(0, 30), st.lists(st.tuples(st.floats(-4, 4), st.floats(-3, 3)), min_size=64,
                                  max_size=64))
@settings(max_examples=30, deadline=None)
def test_the_floor_never_reverses_and_matches_the_step_by_step_rule(speed, actions):
    tensor = torch.tensor([actions], dtype=torch.float64)
    xy, yaw, speeds = SPACE.integrate(tensor, torch.tensor([speed], dtype=torch.float64),
                                      floor_at_zero=True)
    v, theta, x, y = speed, 0.0, 0.0, 0.0
    for step, (accel, curvature) in enumerate(SPACE.denormalise(tensor)[0].tolist()):
        after = max(0.0, v + 0.1 * accel)
        turned = theta + curvature * 0.05 * (v + after)
        x += 0.05 * (v * math.cos(theta) + after * math.cos(turned))
        y += 0.05 * (v * math.sin(theta) + after * math.sin(turned))
        v, theta = after, turned
        assert abs(float(speeds[0, step]) - v) < 1e-9
        assert abs(float(yaw[0, step]) - theta) < 1e-9
        assert abs(float(xy[0, step, 0]) - x) < 1e-8
        assert abs(float(xy[0, step, 1]) - y) < 1e-8
    assert float(speeds.min()) >= 0.0


def test_a_stopped_vehicle_holds_its_pose_and_can_start_again():
    brake = torch.full((1, 64, 2), -3.0)
    brake[:, 40:, 0] = 2.0
    brake[..., 1] = 5.0
    xy, yaw, speed = SPACE.integrate(brake, torch.tensor([2.0]), floor_at_zero=True)
    stopped = (speed[0] == 0).nonzero()[:, 0]
    first, last = int(stopped[0]), int(stopped[-1])
    assert first < 20 and last == 39
    torch.testing.assert_close(xy[0, first:last + 1], xy[0, first].expand(last + 1 - first, -1))
    torch.testing.assert_close(yaw[0, first:last + 1], yaw[0, first].expand(last + 1 - first))
    assert float(speed[0, -1]) > 2.0


def test_without_the_floor_standstill_reverses():
    _, _, speed = SPACE.integrate(torch.full((1, 64, 2), -1.0), torch.zeros(1))
    assert float(speed[0, -1]) < -3.0


@pytest.mark.parametrize('past', [(10.0, 0.5, 0.0), (8.0, -0.8, 0.02), (15.0, 0.0, -0.01),
                                  (5.0, 0.3, 0.08)])
def test_labels_reproduce_the_trajectory(past):
    future = torch.arange(1, 65, dtype=torch.float64) * 0.1
    xy, yaw = arc(*past, future)
    v0 = SPACE.initial_speed(*arc(*past, PAST))
    actions = SPACE.actions_from_trajectory(xy, yaw, v0)
    assert actions.shape == (1, 64, 2)
    got_xy, got_yaw, _ = SPACE.integrate(actions, v0)
    assert float((got_xy - xy).norm(dim=-1).max()) < 0.05
    assert float((got_yaw - yaw).abs().max()) < 0.01
    physical = SPACE.denormalise(actions)[0]
    assert float((physical[8:-8, 0] - past[1]).abs().max()) < 0.05
    assert float((physical[8:-8, 1] - past[2]).abs().max()) < 0.002


def test_labels_of_a_smooth_manoeuvre_bring_it_back():
    time = torch.arange(64, dtype=torch.float64) * 0.1
    accel = 0.8 * torch.sin(time)
    curvature = 0.03 * torch.sin(0.8 * time)
    wanted = SPACE.normalise(torch.stack((accel, curvature), -1))[None].float()
    v0 = torch.tensor([9.0])
    xy, yaw, _ = SPACE.integrate(wanted, v0)
    again, _, _ = SPACE.integrate(SPACE.actions_from_trajectory(xy, yaw, v0), v0)
    assert float((again - xy).norm(dim=-1).max()) < 0.1


def test_labels_of_a_standing_vehicle_do_not_steer():
    xy = torch.randn(1, 64, 2) * 1e-3
    yaw = torch.randn(1, 64) * 1e-3
    actions = SPACE.actions_from_trajectory(xy, yaw, torch.zeros(1))
    torch.testing.assert_close(SPACE.denormalise(actions)[..., 1], torch.zeros(1, 64),
                               rtol=0, atol=1e-7)
