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
"""Rewards of altered texts: what is read, what a plan costs, what a text without an end means."""

from __future__ import annotations

import copy

from aarl_toy import COLUMNS, IM_END, STOP, toy_cache, toy_target, WAYPOINTS, whole_pass
import pytest
import torch

from rspec_planner.model.flow import euler_sample
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.train.aarl_reward import mix_texts, MixedTexts, plan_errors, Prefix, TextPlanner


@pytest.fixture(scope='module')
def toy():
    target = toy_target()
    return target, toy_cache(target)


def prefix_of(cache, index):
    return Prefix(cache.prefix[index], cache.prompt_lengths[index],
                  cache.rope_delta[cache.layouts[index]])


def noise_of(clips, draws=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((clips, draws, WAYPOINTS, 2), generator=generator)


def plan_from_the_start(target, ids, prompt, noise):
    """Return the actions (D, W, 2) of one prompt and text, without any cached prefix."""
    cfg = target.cfg
    _, kv, _ = whole_pass(target, ids, prompt)
    positions = len(ids) - 2 + torch.arange(noise.shape[1])
    cos, sin = mrope_cos_sin(positions.expand(3, -1), cfg.text.head_dim, cfg.text.rope_theta,
                             cfg.text.mrope_section)
    keys, values = (x.expand(-1, len(noise), -1, -1, -1) for x in (kv.keys, kv.values))
    return euler_sample(lambda x, t: target.expert(x, t, keys, values, cos, sin), noise,
                        cfg.flow.num_steps)


def mixed_texts(cache, index, at, sampled):
    return mix_texts(cache.ids[index], cache.lengths[index], at, sampled, cache.profile.tokens)


@torch.no_grad()
def test_plans_behind_a_cached_prefix_equal_those_of_a_whole_pass(toy):
    target, cache = toy
    index = torch.tensor([0, 3, 6])
    at = torch.tensor([[1, 3], [2, -1], [int(cache.lengths[6]) - 1, 0]])
    sampled = torch.randint(12, 24, (3, 4, 2), generator=torch.Generator().manual_seed(4))
    sampled[0, 1, 0] = STOP  # ends the text at its second token
    sampled[1, 2, 0] = IM_END  # an end that still needs the start of a trajectory
    texts, noise = mixed_texts(cache, index, at, sampled), noise_of(3)
    plans = TextPlanner(target).plans(prefix_of(cache, index), texts, noise)
    assert plans.shape == (3, 4, 2, WAYPOINTS, 2)
    for i, clip in enumerate(index.tolist()):
        length = int(cache.prompt_lengths[clip])
        prompt = cache.prompt_ids[clip, COLUMNS - length:].long()
        for k in range(4):
            ids = torch.cat((prompt, texts.ids[i, k, :texts.rows[i, k]]))
            expected = plan_from_the_start(target, ids, length, noise[i])
            torch.testing.assert_close(plans[i, k], expected, atol=2e-5, rtol=1e-4)
    assert (plans[0, 0] - plans[0, 1]).abs().max() > 1e-3  # the texts do matter


@torch.no_grad()
def test_the_greedy_text_costs_nothing_and_a_changed_word_does(toy):
    target, cache = toy
    index = torch.arange(4)
    teacher = cache.ids[index, 1][:, None, None]
    other = torch.where(teacher == 20, 21, 20)
    texts = mixed_texts(cache, index, torch.ones((4, 1), dtype=torch.int64),
                        torch.cat((teacher, teacher, other), dim=1))
    plans = TextPlanner(target).plans(prefix_of(cache, index), texts, noise_of(4))
    errors = plan_errors(plans, texts)
    assert errors.shape == (4, 2)
    assert torch.equal(errors[:, 0], torch.zeros(4))
    assert (errors[:, 1] > 1e-5).all()
    # without the rule for equal texts only rounding is left: the noise is common
    raw = (plans[:, 1] - plans[:, 0]).square().mean()
    assert raw < 1e-10


@torch.no_grad()
def test_different_noise_would_cost_more_than_a_word(toy):
    target, cache = toy
    index = torch.arange(4)
    texts = mixed_texts(cache, index, torch.full((4, 1), -1), cache.ids[index, :1, None])
    planner = TextPlanner(target)
    one, two = (planner.plans(prefix_of(cache, index), texts, noise_of(4, seed=seed))
                for seed in (0, 1))
    assert (one - two).square().mean() > 1e-2


def test_a_sampled_stop_token_ends_the_text(toy):
    _, cache = toy
    length = int(cache.lengths[0])
    index = torch.tensor([0])
    sampled = torch.tensor([[[STOP, 13], [IM_END, 13], [13, STOP]]])
    texts = mixed_texts(cache, index, torch.tensor([[1, 3]]), sampled)
    first = int(cache.ids[0, 0])
    assert texts.rows.tolist() == [[2, 3, 4]]
    assert texts.ids[0, 0, :3].tolist() == [first, STOP, 0]
    assert texts.ids[0, 1, :4].tolist() == [first, IM_END, STOP, 0]
    assert texts.ids[0, 2, 4:].eq(0).all()
    lost = mixed_texts(cache, index, torch.tensor([[length - 1]]), torch.tensor([[[13]]]))
    assert lost.rows.tolist() == [[length + 1]]
    assert lost.ids[0, 0, length - 1:length + 1].tolist() == [13, STOP]


def test_texts_without_a_replaced_token_are_the_greedy_ones(toy):
    _, cache = toy
    index = torch.arange(len(cache))
    texts = mixed_texts(cache, index, torch.full((len(cache), 2), -1),
                        torch.full((len(cache), 3, 2), 15))
    assert torch.equal(texts.rows, cache.lengths[:, None].expand(-1, 3))
    known = cache.ids >= 0
    assert torch.equal(texts.ids[:, 1, :-1][known], cache.ids[known])


def test_errors_are_means_over_draws_and_waypoints():
    plans = torch.zeros((1, 3, 2, 4, 2))
    plans[0, 1, 0] = 1.0
    plans[0, 2] = 2.0
    ids = torch.tensor([[[1], [2], [1]]])
    errors = plan_errors(plans, MixedTexts(ids, torch.ones((1, 3), dtype=torch.int64)))
    assert errors.tolist() == [[0.5, 0.0]]  # the last text is the first one again


@torch.no_grad()
def test_rewards_in_half_precision_rank_words_alike(toy):
    target, cache = toy
    index = torch.tensor([0, 2])
    sampled = torch.arange(12, 24)[None, :, None].expand(2, -1, -1)
    texts = mixed_texts(cache, index, torch.ones((2, 1), dtype=torch.int64), sampled)
    half = copy.deepcopy(target).to(torch.bfloat16).eval().pack()
    exact, rough = (plan_errors(TextPlanner(network).plans(
        prefix_of(cache, index), texts, noise_of(2)), texts) for network in (target, half))
    assert rough.dtype == torch.float32
    assert torch.corrcoef(torch.stack((exact.flatten(), rough.flatten())))[0, 1] > 0.97
