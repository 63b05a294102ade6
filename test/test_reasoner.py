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
"""Plans with a draft and with reuse equal plans without; names of drafts resolve or explain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_pipeline import make_target, observe, stopping_profile, TOKENIZER
import torch

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config, Draft, eagle3_config
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.target import Target
from rspec_planner.planner.drafts import draft_folder, EMBEDDED
from rspec_planner.planner.pipeline import Planner
from rspec_planner.planner.prompt import MAX_ROUTE_TOKENS
from rspec_planner.planner.reasoner import Reasoner, tapped_tail

KINDS = {'dflash': (Dflash, dflash_config), 'eagle3': (Eagle3, eagle3_config)}


def make_draft(target: Target, kind: str, **over: object) -> Draft:
    network, config = KINDS[kind]
    draft = network(config(target.cfg, **over))
    draft.initialise(target.text, seed=1)
    draft.bind(target.text, target.cfg.tokens)
    return draft.eval().requires_grad_(False)


def context(planner):
    """Return keys and values that the action expert reads, 2 x (L, 1, kv_heads, rows, d)."""
    reasoner = planner._stages.reasoner
    rows = reasoner.state.p + 1
    return torch.stack((reasoner._cache.keys, reasoner._cache.values))[:, :, :, :, :rows]


def assert_equal_plans(plain, other, observation):
    """
    Plan with both; the text must be equal and the expert's context equal to rounding.

    The paths of random weights cannot be compared: they turn 1e-6 into decimetres. Those of the
    shipped weights are, in `rspec eval exactness` and test_shipped_weights.
    """
    expected, made = plain.plan(observation), other.plan(observation)
    assert made.reasoning.token_ids == expected.reasoning.token_ids
    assert made.reasoning.text == expected.reasoning.text
    assert made.reasoning.complete == expected.reasoning.complete
    assert made.reasoning.stats.log_probability == pytest.approx(
        expected.reasoning.stats.log_probability, abs=1e-3)
    torch.testing.assert_close(context(other), context(plain), atol=2e-5, rtol=0)
    return made


@pytest.fixture(scope='module')
def target():
    return make_target(stopping_profile()[0])


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('window', [0, 8])
@pytest.mark.parametrize('rotary', ['flat', 'mirror'])
def test_a_draft_changes_no_plan(target, kind, window, rotary):
    draft = make_draft(target, kind, block=8, window=window, rotary=rotary)
    plain, fast = Planner(target, TOKENIZER), Planner(target, TOKENIZER, draft=draft)
    for step in range(3):
        made = assert_equal_plans(plain, fast, observe(step))
        assert made.reasoning.stats.block == 8
        assert sum(made.reasoning.stats.committed) == len(made.reasoning.token_ids) - 1
    assert plain.plan(observe()).reasoning.stats.block == 1


def test_a_budget_without_a_stop_ends_the_same_with_a_draft():
    target = make_target()
    plain = Planner(target, TOKENIZER, max_reasoning_tokens=4)
    fast = Planner(target, TOKENIZER, max_reasoning_tokens=4, draft=make_draft(target, 'dflash'))
    made = assert_equal_plans(plain, fast, observe())
    assert not made.reasoning.complete


@pytest.mark.parametrize('with_draft', [False, True])
def test_reuse_confirms_the_last_reasoning_and_changes_no_plan(target, with_draft):
    draft = make_draft(target, 'dflash') if with_draft else None
    plain = Planner(target, TOKENIZER)
    reusing = Planner(target, TOKENIZER, draft=draft, reuse=True)
    first = assert_equal_plans(plain, reusing, observe()).reasoning
    again = assert_equal_plans(plain, reusing, observe()).reasoning
    assert first.stats.reused == 0 and first.stats.iterations > 0
    assert again.stats.iterations == 0 and again.stats.closing_forwards == 0
    assert again.stats.reused == len(again.token_ids) - 1


def test_a_false_guess_is_dropped(target):
    """What the target would not say now is not kept, wherever the guess goes wrong."""
    plain = Planner(target, TOKENIZER)
    said = plain.plan(observe()).reasoning.token_ids
    reusing = Planner(target, TOKENIZER, draft=make_draft(target, 'dflash'), reuse=True)
    for wrong in range(len(said)):
        reusing._last_ids = (*said[:wrong], said[wrong] + 1, *said[wrong + 1:])
        made = assert_equal_plans(plain, reusing, observe())
        assert made.reasoning.stats.reused == wrong


def test_reset_forgets_the_last_reasoning(target):
    reusing = Planner(target, TOKENIZER, reuse=True)
    reusing.plan(observe())
    reusing.reset()
    assert reusing.plan(observe()).reasoning.stats.reused == 0


def test_stale_rows_of_a_longer_frame_are_never_read(target):
    """Large finite values in every row of cache and taps change nothing."""
    draft = make_draft(target, 'dflash', window=0)
    planner = Planner(target, TOKENIZER, draft=draft)
    expected = planner.plan(observe())
    reasoner = planner._stages.reasoner
    with torch.inference_mode():
        reasoner._cache.keys.fill_(1e4)
        reasoner._cache.values.fill_(1e4)
        reasoner._taps.rows.fill_(1e4)
    made = planner.plan(observe())
    assert made.reasoning == replace(expected.reasoning, stats=made.reasoning.stats)
    assert made.reasoning.stats.committed == expected.reasoning.stats.committed
    assert np.array_equal(made.poses, expected.poses)


def test_an_unknown_draft_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ConfigurationError, match='switch speculation off'):
        draft_folder('nonsense', EMBEDDED / 'tiny')
    with pytest.raises(ConfigurationError, match='drafts/default'):
        draft_folder('default', tmp_path)


def test_a_checkpoint_of_the_user_brings_its_own_default(tmp_path):
    folder = tmp_path / 'drafts' / 'default'
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text('{}')
    assert draft_folder('default', tmp_path) == folder



def test_a_draft_without_its_buffers_is_refused(target):
    reasoner = Planner(target, TOKENIZER)._stages.reasoner
    with pytest.raises(ConfigurationError, match='taps and positions'):
        Reasoner(target, reasoner._cache, budget=4, draft=make_draft(target, 'dflash'))


def test_only_a_draft_that_taps_the_last_layer_asks_for_its_rows(target):
    last = target.cfg.text.num_layers - 1
    assert tapped_tail(make_draft(target, 'dflash', window=8, taps=(1, last)), target) == 8
    assert tapped_tail(make_draft(target, 'dflash', window=0, taps=(1, last)), target) == 0
    assert tapped_tail(make_draft(target, 'dflash', window=0, taps=(0, 1)), target) == 1


def test_the_longest_prompt_guess_and_block_fit(target):
    """A route of the most words, a wrong guess of the most tokens and a wide block."""
    draft = make_draft(target, 'dflash', block=24)
    longest = replace(observe(), navigation_text=' '.join(['turn'] * MAX_ROUTE_TOKENS))
    plain = Planner(target, TOKENIZER)
    reusing = Planner(target, TOKENIZER, draft=draft, reuse=True)
    reusing._last_ids = (3,) * 200
    made = assert_equal_plans(plain, reusing, longest)
    assert made.reasoning.stats.reused == 0
