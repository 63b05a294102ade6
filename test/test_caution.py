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
"""A target's confidence in its words is the same however they were decoded; caution acts on it."""

from dataclasses import replace
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from rspec_planner.decode.confidence import log_probability
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import CautionConfig, ProfileConfig
from rspec_planner.planner.caution import Caution, slowed
from rspec_planner.planner.trajectory import check_trajectory, DEFAULT_LIMITS

CONFIG = CautionConfig(enter_below=0.8, leave_above=0.9, window_s=1.0, min_plans=3)
STEP = 200_000_000


def test_log_probability_is_that_of_the_softmax():
    logits = torch.tensor([[0.0, math.log(3.0)], [-math.inf, 2.0], [5.0, 5.0]])
    logits = {'logits': logits}
    assert log_probability(logits, (1, 1)) == pytest.approx(math.log(0.75))
    assert log_probability(logits, (0, 1, 0)) == pytest.approx(math.log(0.25 * 0.5))
    assert log_probability(logits, ()) == 0.0


def test_it_is_nan_where_the_network_is():
    assert math.isnan(log_probability({'logits': torch.tensor([[math.nan, 0.0]])}, (0,)))


def test_it_is_nan_where_a_stage_keeps_no_logits():
    assert math.isnan(log_probability({'best': torch.zeros(3)}, (0,)))


def told(caution, values, start=0, step=STEP):
    return [caution.note(start + i * step, value) for i, value in enumerate(values)]


def test_unsure_plans_of_a_whole_window_begin_it_and_sure_ones_end_it():
    caution = Caution(CONFIG)
    assert told(caution, [0.1] * 5) == [False] * 5          # 0.8 s are no window
    assert caution.note(5 * STEP, 0.1)
    # the mean of 6 rises above 0.8 after five sure plans and above 0.9 after six
    assert told(caution, [1.0] * 6, 6 * STEP) == [True] * 5 + [False]


def test_one_unsure_plan_between_sure_ones_means_nothing():
    assert not any(told(Caution(CONFIG), ([1.0] * 5 + [0.1]) * 10))


def test_between_the_thresholds_it_stays_as_it_was():
    caution = Caution(CONFIG)
    assert not any(told(caution, [0.85] * 20))
    assert told(caution, [0.2] * 6, 20 * STEP)[-1]
    assert all(told(caution, [0.85] * 20, 26 * STEP))


@pytest.mark.parametrize('next_ns', [5 * STEP, 0, -STEP, 5 * STEP + 1_000_000_000])
def test_a_plan_that_does_not_follow_begins_anew(next_ns):
    caution = Caution(CONFIG)
    assert told(caution, [0.1] * 6)[-1]
    assert not caution.note(next_ns, 0.1)
    assert told(caution, [0.1] * 5, next_ns + STEP)[-1]


def test_reset_forgets():
    caution = Caution(CONFIG)
    told(caution, [0.1] * 6)
    caution.reset()
    assert not caution.note(6 * STEP, 0.1)


def test_too_few_plans_are_not_judged():
    assert not any(told(Caution(CONFIG), [0.1] * 20, step=600_000_000))


def test_an_unknown_confidence_counts_for_nothing():
    caution = Caution(CONFIG)
    assert told(caution, [0.1, math.nan] * 4, step=STEP // 2)[-1] is False
    assert told(caution, [0.1] * 4, 4 * STEP)[-1]
    assert caution.note(8 * STEP, math.nan)


def arc(speed, acceleration, curvature, error=0.0):
    """
    Return a plan (65 points) on a circle, as a planner rolls it out.

    Its first speed is the measured one, which differs by `error` from what the history implies.
    """
    times = 0.1 * np.arange(65)
    speeds = np.maximum(0.0, speed + acceleration * times)
    along = np.concatenate([[0.0], np.cumsum(0.05 * (speeds[1:] + speeds[:-1]))])
    yaw = curvature * along
    k = curvature if abs(curvature) > 1e-9 else 1e-9
    poses = np.stack([np.sin(k * along) / k, (1 - np.cos(k * along)) / k, 0 * along, yaw], 1)
    applied = np.diff(speeds) / 0.1
    measured = np.concatenate([[max(0.0, speeds[0] + error)], speeds[1:]])
    return poses, measured, np.append(applied, applied[-1]), np.full(65, curvature)


@given(st.floats(0.0, 20.0), st.floats(-6.0, 2.0), st.floats(-0.05, 0.05), st.floats(0.5, 4.0),
       st.floats(-1.5, 1.5))
@settings(max_examples=300, deadline=None)
def test_a_slowed_plan_is_the_same_path_and_a_plan_still(speed, acceleration, curvature, brake,
                                                         error):
    drawn = arc(speed, acceleration, curvature, error)
    poses, speeds, _, _ = drawn
    made, slower, accelerations, bent = slowed(drawn, brake)
    assert (slower <= speeds).all()
    assert (slower <= np.maximum(0.0, speeds[0] - brake * 0.1 * np.arange(65)) + 1e-12).all()
    assert made.shape == poses.shape and np.isfinite(made).all() and np.isfinite(bent).all()
    # on the given circle, or on a chord of two of its points; the first chord may be longer than
    # the measured speed says
    chord = np.hypot(*np.diff(poses[:, :2], axis=0).T).max()
    centre = np.array([0.0, 1.0 / curvature]) if abs(curvature) > 1e-4 else None
    if centre is not None:
        exact = 1.0 / abs(curvature)
        sagitta = exact - np.sqrt(exact ** 2 - chord ** 2 / 4)
        radius = np.linalg.norm(made[:, :2] - centre, axis=1)
        assert np.abs(radius - exact).max() < sagitta + 1e-6
    steps = np.hypot(*np.diff(made[:, :2], axis=0).T)
    cut = 10.0 * chord * (chord * curvature) ** 2 / 8  # m/s, of a step around the end of a chord
    assert np.abs(steps / 0.1 - 0.5 * (slower[1:] + slower[:-1]))[1:].max() < 0.05 + cut
    assert (accelerations >= np.minimum(drawn[2], -brake)).all()
    # the guard may allow no more than what the caution brakes with
    limits = replace(DEFAULT_LIMITS, acceleration_mps2=(-brake, 9.8))
    for allowed in (DEFAULT_LIMITS, limits):
        if check_trajectory(*drawn, allowed).accepted:
            assert check_trajectory(made, slower, accelerations, bent, allowed).accepted


def test_a_measured_speed_beside_that_of_the_history_is_no_braking():
    drawn = arc(9.0, 0.0, 0.0, error=1.0)
    assert check_trajectory(*drawn).accepted
    made = slowed(drawn, 1.5)
    assert check_trajectory(*made).accepted
    assert made[2].min() == -1.5


def test_a_plan_that_brakes_harder_stays_as_it_was():
    drawn = arc(8.0, -3.0, 0.02)
    for before, after in zip(drawn, slowed(drawn, 1.5)):
        np.testing.assert_allclose(after, before, atol=1e-12)


def test_who_stands_keeps_standing():
    made, slower, accelerations, _ = slowed(arc(0.0, 1.0, 0.01), 1.5)
    assert not slower.any() and not made.any() and not accelerations.any()


def test_it_never_brakes_harder_than_the_guard_allows():
    caution = Caution(CONFIG, hardest=0.7)
    told(caution, [0.1] * 6)
    _, driven = caution.drive(6 * STEP, 0.1, arc(8.0, 1.0, 0.0))
    assert driven[2].min() == -0.7


@pytest.mark.parametrize('wrong', [
    {'enter_below': 0.0}, {'enter_below': 0.95}, {'leave_above': 1.0}, {'window_s': 0.0},
    {'min_plans': 0}, {'deceleration': -1.0}, {'deceleration': 9.0}])
def test_a_wrong_configuration_is_refused(wrong):
    with pytest.raises(ConfigurationError, match='caution'):
        CautionConfig(**{'enter_below': 0.8, 'leave_above': 0.9, **wrong})


@pytest.mark.parametrize('caution', [None, CONFIG])
def test_a_profile_keeps_it(caution):
    from node_rig import fake_profile
    profile = replace(fake_profile(), caution=caution)
    assert ProfileConfig.from_dict(profile.to_dict()) == profile


def planner_of(profile, **options):
    from test_pipeline import make_target, TOKENIZER

    from rspec_planner.planner.pipeline import Planner
    return Planner(make_target(profile), TOKENIZER, flow_steps=2, **options)


@pytest.fixture(scope='module')
def unsure():
    """A profile whose random target is never sure enough; its plans are complete."""
    from test_pipeline import stopping_profile
    return replace(stopping_profile()[0], caution=CautionConfig(
        enter_below=0.998, leave_above=0.999, window_s=0.5, min_plans=3))


def test_a_planner_that_is_unsure_drives_the_same_path_slower(unsure):
    from test_pipeline import observe
    planner, plain = planner_of(unsure), planner_of(unsure, caution=False)
    for step in range(0, 12, 2):
        drawn, plan = plain.plan(observe(step)), planner.plan(observe(step))
        assert 0.0 < plan.reasoning.stats.confidence < 0.9
        assert plan.reasoning.stats.confidence == drawn.reasoning.stats.confidence
        assert not drawn.cautious
        assert plan.cautious == (step >= 6)  # 0.6 s since the first plan, four plans
        if not plan.cautious:
            np.testing.assert_array_equal(plan.poses, drawn.poses)
            continue
        bound = np.maximum(0.0, plan.speeds[0] - 1.5 * 0.1 * np.arange(65))
        assert (plan.speeds <= np.minimum(drawn.speeds, bound) + 1e-12).all()
        np.testing.assert_array_equal(plan.candidates, drawn.candidates)
        assert plan.verdict.reason != 'start_jump'
    planner.reset()
    assert not planner.plan(observe(12)).cautious


def test_a_checkpoint_that_does_not_say_what_unsure_is_drives_as_drawn():
    from test_pipeline import observe, stopping_profile
    planner = planner_of(stopping_profile()[0])
    assert not any(planner.plan(observe(step)).cautious for step in range(0, 20, 2))
