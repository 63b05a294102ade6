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
"""One pass over all anchors says what the deployed draft executor says, anchor by anchor."""

import itertools

import pytest
import torch

from rspec_planner.engine.draft_executor import draft_executor
from rspec_planner.evaluate.teacher_forcing import as_trained, ask, Reading, Spoken, walk
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config, eagle3_config
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.taps import TapBuffer
from rspec_planner.train.profiles import new_target

PROMPT, TEXT, CAPACITY = 20, 7, 64


@pytest.fixture(scope='module')
def target():
    torch.manual_seed(0)
    return new_target(smoke=True)[0].eval().requires_grad_(False)


def make(target, kind, window, rotary, block=5, **over):
    build, network = ((dflash_config, Dflash) if kind == 'dflash' else (eagle3_config, Eagle3))
    cfg = build(target.cfg, window=window, rotary=rotary, block=block, **over)
    draft = network(cfg).initialise(target.text, seed=3).eval().requires_grad_(False)
    return draft.bind(target.text, target.cfg.tokens)


def speak(target, draft, seed=0):
    """Return a frame of random taps and ids, and the buffers that the executor reads."""
    generator = torch.Generator().manual_seed(seed)
    hidden = target.cfg.text.hidden_size
    taps = TapBuffer(draft.cfg.taps, 1, CAPACITY, hidden)
    taps.rows.copy_(torch.randn(taps.rows.shape, generator=generator))
    tokens = torch.randint(0, target.cfg.tokens.forbidden_start, (CAPACITY,),
                           generator=generator)
    positions = torch.arange(CAPACITY).expand(3, -1).clone()
    positions[1, 5:14] = 5 + torch.arange(9) // 3
    positions[2, 5:14] = 5 + torch.arange(9) % 3
    positions[:, 14:] -= 6
    spoken = Spoken(tokens[:PROMPT + TEXT], PROMPT, taps.rows[:, 0, :PROMPT + TEXT], positions,
                    rope_delta=-6)
    return spoken, draft_executor(draft, target, tokens, taps, positions)


@pytest.mark.parametrize('kind, window, rotary', list(itertools.product(
    ('dflash', 'eagle3'), (0, 1, 4), ('flat', 'mirror'))))
def test_all_anchors_at_once_equal_the_executor(target, kind, window, rotary):
    check_parity(target, make(target, kind, window, rotary))


def test_a_reduced_head_and_a_correction_equal_the_executor_too(target):
    draft = make(target, 'dflash', 4, 'flat', draft_vocab=30, correction_rank=4)
    draft.correction.after.normal_(generator=torch.Generator().manual_seed(1))
    check_parity(target, draft)


def check_parity(target, draft):
    spoken, stage = speak(target, draft)
    anchors = range(PROMPT, PROMPT + TEXT - 1)
    answer = ask(draft, spoken, anchors)
    stage.inputs['rope_delta'].fill_(spoken.rope_delta)
    stage.inputs['length'].fill_(PROMPT)
    for row, anchor in enumerate(anchors):
        stage.inputs['start'].fill_(anchor)
        stage.inputs['since'].fill_(0)
        stage.enqueue()
        known = stage.outputs['logits'].isfinite()
        assert torch.allclose(answer.logits[row][known], stage.outputs['logits'][known],
                              atol=2e-4, rtol=1e-4)
        assert answer.proposals[row].tolist() == stage.outputs['proposals'].tolist()


@pytest.mark.parametrize('kind, window', list(itertools.product(
    ('dflash', 'eagle3'), (0, 4))))
def test_weights_of_one_anchor_sum_to_one_and_ignore_what_is_hidden(target, kind, window):
    draft = make(target, kind, window, 'flat')
    spoken, _ = speak(target, draft)
    columns = torch.ones(len(spoken.ids), dtype=torch.bool)
    columns[PROMPT - 3] = False
    answer = ask(draft, spoken, [PROMPT], Reading('flat', window, columns))
    assert torch.allclose(answer.weights.sum(-1), torch.ones(()), atol=1e-5)
    assert PROMPT - 3 not in answer.context.tolist()
    rows = draft.cfg.block if kind == 'dflash' else draft.cfg.block - 1
    assert answer.weights.shape[-2:] == (rows, len(answer.context) + rows)
    changed = spoken.taps.clone()
    changed[:, PROMPT - 3] += 5.0
    again = ask(draft, Spoken(spoken.ids, PROMPT, changed, spoken.positions, -6), [PROMPT],
                Reading('flat', window, columns))
    # an EAGLE-3 slot holds the token behind it, so only the hidden slot itself may vanish
    assert torch.equal(answer.logits, again.logits)


def test_a_swapped_rotary_is_another_question(target):
    draft = make(target, 'dflash', 0, 'flat')
    spoken, _ = speak(target, draft)
    assert as_trained(draft) == Reading('flat', 0)
    own = ask(draft, spoken, [PROMPT]).logits
    swapped = ask(draft, spoken, [PROMPT], Reading('mirror', 0)).logits
    assert not torch.allclose(own[own.isfinite()], swapped[swapped.isfinite()], atol=1e-3)


def test_walk_counts_matches_bonus_stop_and_rule():
    text = [1, 2, 3, 4, 8, 9]  # 9 stops, 8 is followed by 9
    nothing = torch.zeros((5, 3), dtype=torch.int64)
    assert walk(text, nothing, (9,), {}) == [1] * 5
    perfect = torch.tensor([[2, 3, 4], [0, 0, 0], [0, 0, 0], [0, 0, 0], [9, 0, 0]])
    assert walk(text, perfect, (9,), {}) == [4, 1]
    ruled = torch.tensor([[2, 3, 0], [0, 0, 0], [0, 0, 0], [8, 7, 7], [0, 0, 0]])
    assert walk(text, ruled, (9,), {}) == walk(text, ruled, (9,), {8: 9}) == [3, 2]
    # a rule that the target does not follow costs the tokens behind it
    assert walk(text, ruled, (9,), {3: 7}) == [3, 2]
    assert walk(text, ruled, (9,), {2: 7}) == [2, 1, 2]
