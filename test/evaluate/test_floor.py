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
"""The image-blind draft: closed forms on a few texts, and its buffers in the loop."""

import pytest
import torch

from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.floor import (
    Continuations,
    floor_table,
    FloorDraft,
    target_ids,
    training_texts,
)
from rspec_planner.planner.tokenizer import build_tokenizer
from rspec_planner.world.reasoning import vocabulary

TEXTS = [(1, 2, 3), (1, 2, 4), (1, 2, 4), *[(5, 2, 6)] * 4]


def test_the_whole_prefix_decides_before_its_end_does():
    table = Continuations(TEXTS)
    assert table.next(()) == 5
    assert table.next((1,)) == 2
    assert table.next((1, 2)) == 4  # the suffix (2,) alone would say 6
    assert table.next((9, 2)) == 6  # an unknown prefix falls back to its end
    assert table.next((9, 9)) == 2  # and then to the most frequent token of all


def test_ties_do_not_depend_on_the_order():
    assert Continuations([(1, 3), (1, 2)]).next((1,)) == Continuations([(1, 2), (1, 3)]).next((1,))


def test_the_opener_is_known_before_it_is_said():
    table = Continuations([(1, 2, 3, 4), (1, 7, 8, 9), (1, 7, 8, 9)])
    assert table.walk((1,), 3) == [7, 8, 9]
    assert table.walk((1,), 3, opener=(1, 2)) == [2, 3, 4]
    assert table.walk((1, 7), 2, opener=(1, 2)) == [8, 9]  # what is committed counts


def test_no_texts_is_refused():
    with pytest.raises(ConfigurationError, match='training texts'):
        Continuations([])


def test_the_executor_reads_committed_tokens_behind_the_prompt():
    tokens = torch.tensor([50, 51, 52, 1, 2, 99, 99])
    draft = FloorDraft(Continuations(TEXTS), tokens, width=4)
    draft.begin((1, 2))
    proposals = draft.outputs['proposals']
    draft.inputs['length'].fill_(3)
    draft.inputs['start'].fill_(4)
    draft.enqueue()
    assert proposals.tolist()[0] == 4 and len(proposals) == 3
    draft.inputs['start'].fill_(3)
    draft.enqueue()
    assert proposals.tolist()[:2] == [2, 4]


def test_texts_of_the_training_split_end_like_a_target_would():
    tokenizer = build_tokenizer(vocabulary())
    texts = training_texts(5, workers=0)
    assert len(texts) == 5 and texts == training_texts(6, workers=0)[:5]
    ids = target_ids(tokenizer, texts[0])
    tokens = tokenizer.token_ids
    assert ids[-2:] == (tokens.cot_end, tokens.traj_future_start)
    assert tokenizer.unknown_id not in ids
    table = floor_table(tokenizer, 6, workers=0)
    assert table.next(ids[:-1]) == tokens.traj_future_start
