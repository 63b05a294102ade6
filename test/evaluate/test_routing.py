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
"""Kinds of generated tokens equal those of the clip that says the same sentence."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rspec_planner.evaluate.floor import target_ids
from rspec_planner.evaluate.routing import (
    CLOSING,
    DisturbanceProbe,
    rank_of,
    spoken_text,
    token_kinds,
    UNREADABLE,
)
from rspec_planner.planner.tokenizer import build_tokenizer
from rspec_planner.world.generate import generate_pair
from rspec_planner.world.reasoning import opener, vocabulary
from rspec_planner.world.splits import split_specs


@pytest.fixture(scope='module')
def tokenizer():
    return build_tokenizer(vocabulary())


@pytest.fixture(scope='module')
def clips():
    return [clip for spec in split_specs('val')[:60:2] for clip in generate_pair(spec)]


def test_kinds_are_those_of_the_clip(tokenizer, clips):
    for clip in clips:
        kinds = token_kinds(tokenizer, target_ids(tokenizer, clip.reasoning), clip.history)
        assert kinds == [*clip.token_kind.tolist(), CLOSING]  # <|cot_end|> and the stop token


def test_another_opener_does_not_change_the_kinds(tokenizer, clips):
    still = np.zeros((16, 4))
    for clip in clips[:6]:
        ids = target_ids(tokenizer, clip.reasoning)
        assert token_kinds(tokenizer, ids, still) == token_kinds(tokenizer, ids, clip.history)


def test_nonsense_is_unreadable_but_its_closing_is_not(tokenizer, clips):
    ids = target_ids(tokenizer, 'brake brake because lane.')
    kinds = token_kinds(tokenizer, ids, clips[0].history)
    assert kinds == [UNREADABLE] * (len(ids) - 2) + [CLOSING, CLOSING]
    assert spoken_text(tokenizer, ids) == 'brake brake because lane.'


def test_ranks_count_from_one_and_know_a_reduced_head():
    whole = SimpleNamespace(draft_index=lambda ids: ids)
    logits = torch.tensor([0.1, 3.0, 2.0, -1.0])
    assert [rank_of(whole, logits, token) for token in range(4)] == [3, 1, 2, 4]
    lacking = SimpleNamespace(draft_index=lambda ids: torch.full_like(ids, -1))
    assert rank_of(lacking, logits, 0) is None


@dataclass(frozen=True)
class Seen:
    """Stands for an observation."""

    ego_poses: np.ndarray


class Reader:
    """A target that reads the opener off the history and says the rest by a rule."""

    name = 'ar'

    def __init__(self, tokenizer, rest):
        self.tokenizer, self.rest = tokenizer, rest

    def reason(self, frame):
        said = opener(frame.history)
        return SimpleNamespace(ids=target_ids(self.tokenizer, f'{said}, {self.rest(said)}'))


@pytest.mark.parametrize('stubborn', [True, False])
def test_the_disturbance_sees_whether_the_decision_follows_the_history(tokenizer, clips,
                                                                        stubborn):
    def rest(said):
        sentences = ('keep speed because no sign controls the junction far ahead of us.',
                     'stop before the line because a stop sign controls the junction far ahead.')
        return sentences[0 if stubborn else int('straight' not in said or 'stopped' in said)]

    reader = Reader(tokenizer, rest)
    probe = DisturbanceProbe(reader)
    stand = SimpleNamespace(tokenizer=tokenizer, prefill=lambda observation, encode:
                            SimpleNamespace(history=observation.ego_poses))
    for clip in clips:
        frame = SimpleNamespace(history=clip.history, observation=Seen(clip.history))
        probe.take(stand, frame, clip, SimpleNamespace(runs={'ar': reader.reason(frame)}))
    report = probe.report()
    assert len({opener(clip.history) for clip in clips}) > 2
    assert report['clips'] >= len(clips) // 2 and report['readable'] == report['clips']
    assert report['opener_follows']['value'] == 1.0 and report['opener_stays']['value'] == 0.0
    assert (report['action_changes']['value'] == 0.0) is stubborn
