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
"""
The shipped target looks at the images: both twins of held-out pairs are decided rightly. The
shipped drafts change no plan and save most of the iterations.

The full figures come from `rspec eval driving`; this is the smallest sample that a wrong or
stale checkpoint cannot pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rspec_planner.planner.drafts import DEFAULT_DRAFT, embedded_drafts
from rspec_planner.planner.pipeline import Planner
from rspec_planner.world.generate import clip_observation, generate_pair
from rspec_planner.world.reasoning import acceptable
from rspec_planner.world.renderer import Renderer
from rspec_planner.world.splits import split_specs

PAIRS = 10


@pytest.fixture(scope='module')
def planner():
    return Planner.load('tiny')


@pytest.fixture(scope='module')
def pairs():
    events = [spec for spec in split_specs('val') if spec.event]
    renderer = Renderer()
    return [generate_pair(spec, renderer) for spec in events[::len(events) // PAIRS][:PAIRS]]


def decided(planner, clip, black=False):
    observation = clip_observation(clip)
    if black:
        observation = replace(observation, images=np.zeros_like(observation.images))
    return acceptable(clip.decision, planner.plan(observation).reasoning.text)


def test_both_twins_are_decided_rightly(planner, pairs):
    right = sum(decided(planner, a) and decided(planner, b) for a, b in pairs)
    assert right >= PAIRS - 1, f'{right} of {PAIRS} pairs'


def test_black_cameras_never_decide_a_pair(planner, pairs):
    assert not any(decided(planner, a, True) and decided(planner, b, True) for a, b in pairs)


def test_trajectories_follow_the_expert(planner, pairs):
    errors = []
    for clip in (clip for pair in pairs for clip in pair):
        plan = planner.plan(clip_observation(clip))
        assert plan.verdict.accepted, plan.verdict
        assert plan.poses.shape == (65, 4) and np.isfinite(plan.poses).all()
        errors.append(np.hypot(*(plan.poses[1:, :2] - clip.future[:, :2]).T).mean())
    assert np.mean(errors) < 1.5, f'ADE {np.mean(errors):.2f} m'


def test_the_same_observation_gives_the_same_plan(planner, pairs):
    observation = clip_observation(pairs[0][0])
    first, second = planner.plan(observation), Planner.load('tiny').plan(observation)
    assert first.reasoning.token_ids == second.reasoning.token_ids
    assert np.array_equal(first.poses, second.poses)


def test_the_default_draft_is_shipped_and_comes_first():
    assert embedded_drafts()[0] == DEFAULT_DRAFT and len(embedded_drafts()) > 1


@pytest.mark.parametrize('draft', embedded_drafts())
def test_a_shipped_draft_changes_no_plan_and_saves_iterations(planner, pairs, draft):
    fast = Planner.load('tiny', draft=draft)
    committed = iterations = 0
    for clip in (clip for pair in pairs[:3] for clip in pair):
        expected, made = (p.plan(clip_observation(clip)) for p in (planner, fast))
        assert made.reasoning.token_ids == expected.reasoning.token_ids
        # other widths of the same products round differently
        np.testing.assert_allclose(made.poses, expected.poses, atol=1e-3)
        stats = made.reasoning.stats
        committed, iterations = committed + sum(stats.committed), iterations + stats.iterations
    assert committed >= 7 * iterations, f'L {committed / iterations:.2f}'


def test_the_last_reasoning_is_confirmed_in_the_prefill(planner, pairs):
    reusing = Planner.load('tiny', draft='default', reuse=True)
    observation = clip_observation(pairs[0][0])
    first, second = reusing.plan(observation), reusing.plan(observation)
    assert first.reasoning.token_ids == second.reasoning.token_ids
    assert first.reasoning.stats.reused == 0 and second.reasoning.stats.iterations == 0
    twin = clip_observation(pairs[0][1])  # same history, another fact: the guess is wrong
    assert reusing.plan(twin).reasoning.token_ids == planner.plan(twin).reasoning.token_ids
