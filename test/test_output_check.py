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
"""Plans are checked against the target alone, in their turn, and a difference is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rspec_planner.loading import warm_up_observation
from rspec_planner.output_check import CheckState, difference, OutputCheck
from rspec_planner.planner.pipeline import Planner


class Speaker:
    """A planner that says the given tokens; counts what it was asked."""

    def __init__(self, plan, tokens):
        self.tokens, self._plan = tokens, plan
        self.plans = self.resets = 0

    def plan(self, observation):
        self.plans += 1
        return replace(self._plan, t0_ns=observation, reasoning=replace(
            self._plan.reasoning, token_ids=tuple(self.tokens)))

    def reset(self):
        self.resets += 1


@pytest.fixture(scope='module')
def planner():
    return Planner.load('tiny', draft='default', reuse=True)


@pytest.fixture(scope='module')
def made(planner):
    """Return a plan of the shipped model."""
    return planner.plan(warm_up_observation(planner.profile))


def test_every_third_plan_is_checked_behind_its_publication(made):
    drafted, alone = Speaker(made, [1, 2, 3]), Speaker(made, [1, 2, 3])
    check = OutputCheck(drafted, alone, 3)
    for index in range(7):
        assert check.plan(index).t0_ns == index
        assert alone.plans == index // 3  # not before the plan is out
        check.run()
        check.run()  # a cycle without a plan of its own
    assert check.state == CheckState(2, 0, '')


def test_a_difference_is_counted_and_told_until_the_next_start(made):
    drafted, alone = Speaker(made, [1, 2, 3]), Speaker(made, [1, 9])
    check = OutputCheck(drafted, alone, 1)
    check.plan(55)
    check.run()
    assert (check.state.checked, check.state.mismatches) == (1, 1)
    assert 'at t0 55 token 1 differs: (2,) with the draft, (9,) without' in check.state.detail
    alone.tokens = [1, 2, 3]
    check.plan(56)
    check.run()
    assert (check.state.checked, check.state.mismatches) == (2, 1) and '55' in check.state.detail
    check.restart()
    assert check.state == CheckState()


def test_a_plan_that_failed_or_was_reset_is_not_checked(made):
    drafted, alone = Speaker(made, [1]), Speaker(made, [1])
    check = OutputCheck(drafted, alone, 1)
    check.plan(1)
    check.reset()
    check.run()
    assert alone.plans == 0 and (drafted.resets, alone.resets) == (1, 1)
    check.plan(2)
    drafted.plan = lambda observation: 1 / 0
    with pytest.raises(ZeroDivisionError):
        check.plan(3)
    check.run()
    assert alone.plans == 0


def test_a_text_that_stops_early_differs_at_its_end(made):
    said, alone = Speaker(made, [1, 2]).plan(1), Speaker(made, [1, 2, 3]).plan(1)
    assert 'token 2 differs: () with the draft, (3,) without' in difference(said, alone)


def test_the_shipped_draft_says_what_the_target_says_alone(planner):
    check = OutputCheck(planner, planner.alone(), 1)
    observation = warm_up_observation(planner.profile)
    random = np.random.default_rng(3)
    for step in range(3):
        seen = replace(observation, t0_ns=observation.t0_ns + step, images=random.integers(
            0, 256, observation.images.shape, dtype=np.uint8))
        plan = check.plan(seen)
        check.run()
    assert plan.reasoning.stats.block > 1  # with a draft
    assert check.state == CheckState(3, 0, '')
    assert planner.alone().plan(seen).reasoning.stats.block == 1
    assert planner.alone()._target is planner._target  # no second set of weights


def test_a_draft_that_decided_words_would_be_found(planner):
    check = OutputCheck(planner, planner.alone(), 1)
    check.plan(warm_up_observation(planner.profile))
    observation, plan = check._last
    wrong = (plan.reasoning.token_ids[0] + 1, *plan.reasoning.token_ids[1:])
    check._last = observation, replace(plan, reasoning=replace(plan.reasoning, token_ids=wrong))
    check.run()
    assert check.state.mismatches == 1 and 'token 0 differs' in check.state.detail
