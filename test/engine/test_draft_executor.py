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

from draft_reference import Reading, small_draft, small_target
import pytest
import torch

from rspec_planner.engine.draft_executor import draft_executor, kept_rows
from rspec_planner.errors import ConfigurationError
from rspec_planner.model import draft_packed
from rspec_planner.model.draft import DraftRotary
from rspec_planner.model.taps import TapBuffer

CAPACITY, POISON = 48, 1e4


@pytest.fixture(scope='module')
def target():
    return small_target()


class Rig:
    """An executor over random frames, and what the formulas say about the same frames."""

    def __init__(self, target, draft, seed):
        self.draft = draft
        self.generator = torch.Generator().manual_seed(seed)
        device = target.device
        self.tokens = torch.zeros(CAPACITY, dtype=torch.int64, device=device)
        self.taps = TapBuffer(draft.cfg.taps, 1, CAPACITY, 32, device=device)
        self.positions = torch.zeros((3, CAPACITY), dtype=torch.int64, device=device)
        self.kept = kept_rows(draft, CAPACITY)
        self.executor = draft_executor(draft, target, self.tokens, self.taps, self.positions,
                                       self.kept)

    def number(self, low, high):
        return int(torch.randint(low, high, (), generator=self.generator))

    def begin(self):
        """Draw a frame; every row is poison until it becomes valid."""
        self.length, self.delta = self.number(1, 20), self.number(0, 4)
        self.words = torch.randint(0, 17, (CAPACITY,), generator=self.generator)
        self.states = torch.randn(3, CAPACITY, 32, generator=self.generator)
        self.prompt = torch.randint(0, 9, (3, CAPACITY), generator=self.generator)
        self.positions.copy_(self.prompt)
        self.tokens.fill_(16)
        self.taps.rows.fill_(POISON)
        self.kept.fill_(POISON)
        self.since = 0
        self.p = self.length + self.number(0, 3)  # reuse may have committed more than one
        return self

    def propose(self):
        """Return the executor's proposals and logits for the anchor at p."""
        p = self.p
        self.tokens[:p + 1] = self.words[:p + 1]
        self.taps.rows[:, 0, :p] = self.states[:, :p]
        self.taps.rows[:, 0, p:] = POISON
        for name, value in (('start', p), ('since', self.since), ('length', self.length),
                            ('rope_delta', self.delta)):
            self.executor.inputs[name].fill_(value)
        self.executor.enqueue()
        return [self.executor.outputs[name].cpu().clone() for name in ('proposals', 'logits')]

    def expected(self):
        """Return the same from the formulas."""
        positions = DraftRotary.sequence_positions(self.prompt, self.length, self.delta,
                                                   CAPACITY + 32)
        reading = Reading(self.draft, self.states, self.words, positions)
        anchor = int(self.words[self.p])
        if self.draft.cfg.kind == 'eagle3':
            return reading.eagle3(self.p, anchor)
        logits = reading.dflash(self.p, anchor)
        return self.draft.target_ids(logits.argmax(-1)), logits

    def advance(self):
        """Commit a random number of tokens."""
        self.since = self.p
        self.p += self.number(1, self.draft.cfg.block + 1)


def check(rig):
    proposals, logits = rig.propose()
    expected, reference = rig.expected()
    assert torch.equal(proposals, expected)
    torch.testing.assert_close(logits, reference.float(), atol=2e-3, rtol=2e-3)


CASES = [('dflash', {'num_layers': layers, 'block': block, 'window': window})
         for layers, block, window in ((1, 6, 8), (2, 4, 3), (4, 3, 1), (2, 5, 0), (1, 2, 0))]
CASES += [('dflash', {'num_layers': 1, 'block': 7, 'window': 4, 'correction_rank': 5})]
CASES += [('eagle3', {'block': block, 'window': window})
          for block, window in ((2, 8), (4, 1), (5, 3), (4, 0))]


@pytest.mark.parametrize('kind, over', CASES)
@pytest.mark.parametrize('rotary', ['flat', 'mirror'])
@pytest.mark.parametrize('reduced', [False, True])
def test_proposals_equal_the_direct_reading(target, kind, over, rotary, reduced):
    draft = small_draft(target, kind, seed=over['block'], reduced=reduced, rotary=rotary, **over)
    rig = Rig(target, draft, seed=over['window'])
    for _ in range(2):
        rig.begin()
        for _ in range(3):
            check(rig)
            rig.advance()


@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
def test_a_large_vocabulary_goes_without_a_table(target, kind, monkeypatch):
    draft = small_draft(target, kind, block=4, window=2)
    plain = Rig(target, draft, seed=5).begin().propose()
    monkeypatch.setattr(draft_packed, 'TABLE_NUMBERS', 0)
    for found, expected in zip(Rig(target, draft, seed=5).begin().propose(), plain):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
@pytest.mark.parametrize('window', [0, 3])
def test_cuda_proposes_what_the_cpu_proposes(target, kind, window):
    there = small_target().to('cuda')
    over = {'block': 6, 'window': window, 'rotary': 'mirror', 'reduced': True}
    rigs = [Rig(owner, small_draft(owner, kind, **over), seed=7).begin()
            for owner in (target, there)]
    for _ in range(3):
        (here, expected), (found, logits) = (rig.propose() for rig in rigs)
        assert torch.equal(found, here)
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
        for rig in rigs:
            rig.advance()


@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
@pytest.mark.parametrize('window', [0, 3])
def test_what_lies_at_or_behind_the_anchor_changes_no_bit(target, kind, window):
    draft = small_draft(target, kind, block=5, window=window)
    rig = Rig(target, draft, seed=2).begin()
    rig.p = 20
    first = rig.propose()
    rig.taps.rows[:, :, 20:].normal_()
    rig.tokens[21:] = 1
    rig.kept.fill_(-POISON)
    rig.executor.enqueue()
    for name, value in zip(('proposals', 'logits'), first):
        assert torch.equal(rig.executor.outputs[name], value)


@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
def test_a_call_without_new_rows_repeats_itself(target, kind):
    rig = Rig(target, small_draft(target, kind, block=4, window=0), seed=3).begin()
    proposals, logits = rig.propose()
    rig.since = rig.p
    again, close = rig.propose()
    assert torch.equal(again, proposals)
    torch.testing.assert_close(close, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
def test_buffers_keep_their_addresses(target, kind):
    rig = Rig(target, small_draft(target, kind), seed=0).begin()
    executor = rig.executor
    before = [t.data_ptr() for t in (*executor.inputs.values(), *executor.outputs.values())]
    rig.propose()
    after = [t.data_ptr() for t in (*executor.inputs.values(), *executor.outputs.values())]
    assert before == after
    assert executor.outputs['proposals'].shape == (rig.draft.cfg.block - 1,)
    assert executor.outputs['logits'].shape == (rig.draft.cfg.block - 1, 40)
    assert bool(executor.outputs['logits'][:, 17:23].isinf().all())


def test_taps_of_other_layers_are_refused(target):
    draft = small_draft(target, 'dflash')
    with pytest.raises(ConfigurationError, match='reads layers'):
        draft_executor(draft, target, torch.zeros(8, dtype=torch.int64),
                       TapBuffer((0, 1, 2), 1, 8, 32), torch.zeros((3, 8), dtype=torch.int64))
