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
"""The budget of known weights, and controls that fit the draft."""

import numpy as np
import pytest
import torch

from rspec_planner.evaluate.attention import (
    budget_report,
    column_groups,
    controls,
    entropy,
    GROUPS,
    shares,
)
from rspec_planner.evaluate.teacher_forcing import Answer
from rspec_planner.model.draft import dflash_config
from rspec_planner.train.profiles import new_target


@pytest.fixture(scope='module')
def profile():
    return new_target(smoke=True)[0].cfg


def test_columns_are_sorted_by_their_ids(profile):
    tokens = profile.tokens
    ids = torch.tensor([tokens.im_start, tokens.image_pad, tokens.forbidden_start,
                        tokens.forbidden_end - 1, tokens.cot_start])
    groups = column_groups(ids, tokens)
    assert groups['visual'].tolist() == [False, True, False, False, False]
    assert groups['history'].tolist() == [False, False, True, True, False]
    assert groups['text'].tolist() == [True, False, False, False, True]


def test_shares_of_known_weights(profile):
    tokens = profile.tokens
    ids = torch.tensor([tokens.im_start, tokens.image_pad, tokens.image_pad,
                        tokens.forbidden_start, tokens.forbidden_start + 1, tokens.cot_start])
    context = torch.tensor([1, 2, 3, 4, 5])  # a window without the first row
    row = torch.tensor([0.2, 0.1, 0.05, 0.05, 0.1, 0.3, 0.2])  # then two generated columns
    weights = row.expand(1, 3, 2, 7)
    found = shares(Answer(ids, ids, context, weights), column_groups(ids, tokens))
    assert dict(zip(GROUPS, found[0, :4].round(6))) == {
        'visual': 0.3, 'history': 0.1, 'text': 0.1, 'generated': 0.5}
    a = np.array([0.05, 0.05, 0.1]) / 0.2
    assert found[0, 4] == pytest.approx(-(a * np.log(a)).sum() / np.log(3), abs=1e-6)
    assert found[0, 5] == pytest.approx(1.0, abs=1e-6)  # both history columns alike


def test_entropy_of_one_column_says_nothing_and_of_one_peak_is_zero():
    assert entropy(torch.ones(2, 1, 1, 1)).isnan().all()
    peak = torch.tensor([0.0, 1.0, 0.0]).expand(1, 1, 1, 3)
    assert float(entropy(peak)) == pytest.approx(0.0, abs=1e-9)


def test_sets_that_some_clip_lacks_are_left_out():
    values = np.full((4, 6), 0.25)
    values[:, 5] = np.nan
    report = budget_report(values)
    assert 'history_entropy' not in report and report['entropy']['mean'] == 0.25
    assert report['text_and_history']['mean'] == 0.5


def test_controls_hide_and_shorten_only_what_the_draft_reads(profile):
    groups = column_groups(torch.tensor([profile.tokens.image_pad, 0]), profile.tokens)
    whole = controls(dflash_config(profile, window=0), groups)
    assert whole['other rotary'].rotary == 'mirror'
    assert whole['no visual columns'].columns.tolist() == [False, True]
    assert [whole[f'window {w}'].window for w in (1, 8, 64)] == [1, 8, 64]
    short = controls(dflash_config(profile, window=8), groups)
    assert set(short) == {'as trained', 'other rotary', 'window 1'}
