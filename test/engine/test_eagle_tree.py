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
"""Branch trees beside a beam search that runs every branch alone through the formulas."""

from dataclasses import replace

from draft_reference import Reading, REDUCED, small_draft, small_target, VOCAB
import pytest
import torch

from rspec_planner.engine.draft_executor import draft_executor, kept_rows
from rspec_planner.engine.eagle_tree import branch_tree_executor, keep, TreeShape
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.draft import DraftRotary
from rspec_planner.model.taps import TapBuffer

CAPACITY, POISON = 32, 1e4


@pytest.fixture(scope='module')
def target():
    return small_target()


class Branch(Reading):
    """The formulas along a given path in place of the best tokens."""

    def _target_id(self, row):
        return next(self.path)

    def logprobs(self, p, anchor, path):
        """Return log q (V_d,) behind anchor and path."""
        self.cfg = replace(self.cfg, block=len(path) + 2)
        self.path = iter((*path, 0))
        return self.eagle3(p, anchor)[1][-1].log_softmax(-1)


class Frame:
    """Random committed rows; all that is not valid is poison."""

    def __init__(self, target, draft, seed, shape, **rules):
        self.draft, self.shape, self.rules = draft, shape, rules
        generator = torch.Generator().manual_seed(seed)
        self.p = 6 + seed % 9
        self.words = torch.randint(0, 17, (CAPACITY,), generator=generator)
        self.states = torch.randn(3, CAPACITY, 32, generator=generator)
        self.positions = torch.randint(0, 9, (3, CAPACITY), generator=generator)
        device = target.device
        self.tokens = torch.full((CAPACITY,), 16, device=device)
        self.tokens[:self.p + 1] = self.words[:self.p + 1]
        self.taps = TapBuffer(draft.cfg.taps, 1, CAPACITY, 32, device=device)
        self.taps.rows.fill_(POISON)
        self.taps.rows[:, 0, :self.p] = self.states[:, :self.p]
        kept = kept_rows(draft, CAPACITY, shape.beams * shape.depth).fill_(POISON)
        self.executor = branch_tree_executor(draft, target, self.tokens, self.taps,
                                             self.positions.to(device), shape, kept=kept,
                                             **rules)

    def run(self, executor=None):
        """Return the outputs of one call, since the start of the frame."""
        executor = executor or self.executor
        for name, value in (('start', self.p), ('since', 0), ('length', 5), ('rope_delta', 2)):
            executor.inputs[name].fill_(value)
        executor.enqueue()
        return {name: value.cpu().clone() for name, value in executor.outputs.items()}

    def paths(self):
        """Return joint log q by path of the grown tree, checked for its form on the way."""
        found = self.run()
        paths, ids = [()], found['ids'].tolist()
        assert ids[0] == self.words[self.p]
        for node, parent in enumerate(found['parents'].tolist()):
            seen = set(found['ancestors'][node].nonzero()[:, 0].tolist())
            if parent < 0:
                assert node == 0 or ids[node] == found['depths'][node] == 0
                assert seen == {node}
            else:
                assert parent < node and node == len(paths)  # no filler among the nodes
                paths.append((*paths[parent], ids[node]))
                assert found['depths'][node] == len(paths[node])
                above = set(found['ancestors'][parent].nonzero()[:, 0].tolist())
                assert seen == {*above, node}
        scores = found['scores'].tolist()
        assert scores[len(paths):] == [float('-inf')] * (len(ids) - len(paths))
        return dict(zip(paths, scores))

    def expected(self):
        """Return the same of a beam search that reads each branch alone."""
        positions = DraftRotary.sequence_positions(self.positions, 5, 2, CAPACITY + 32)
        reading = Branch(self.draft, self.states, self.words, positions)
        ids = REDUCED if self.draft.cfg.draft_vocab else range(VOCAB)
        follow, ends = (self.rules.get(name, ()) for name in ('follow', 'ends'))
        anchor, shape = int(self.words[self.p]), self.shape
        offers, beam = {(): 0.0}, [()]
        for _ in range(shape.depth):
            new = {}
            for path in beam:
                last = path[-1] if path else anchor
                if last in follow:
                    new[*path, follow[last]] = offers[path]
                elif last not in ends:
                    logq = reading.logprobs(self.p, anchor, path)
                    best = logq.topk(min(shape.beams, len(logq)))
                    for value, index in zip(best.values.tolist(), best.indices.tolist()):
                        if value > float('-inf'):
                            new[*path, ids[index]] = offers[path] + value
            beam = sorted(new, key=lambda path: -new[path])[:shape.beams]
            offers.update(new)
        best = sorted(offers, key=lambda path: (-offers[path], len(path)))[:shape.nodes]
        return {path: offers[path] for path in best}


def close_to(scores):
    return pytest.approx(scores, abs=1e-3)


SHAPES = [TreeShape(nodes=12, depth=3, beams=3), TreeShape(9, 4, 2), TreeShape(20, 2, 6),
          TreeShape(2, 1, 1), TreeShape(5, 1, 8)]


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('rotary, window, reduced', [
    ('flat', 4, False), ('mirror', 3, True), ('flat', 0, True), ('mirror', 1, False)])
def test_the_tree_is_that_of_a_beam_search_over_lone_branches(target, shape, rotary, window,
                                                              reduced):
    for seed in range(3):
        draft = small_draft(target, 'eagle3', seed=seed, reduced=reduced, rotary=rotary,
                            window=window, block=3)
        frame = Frame(target, draft, seed, shape)
        assert frame.paths() == close_to(frame.expected())


def test_enough_beams_give_the_most_probable_of_all_prefixes(target):
    draft = small_draft(target, 'eagle3', reduced=True)
    frame = Frame(target, draft, 1, TreeShape(nodes=25, depth=2, beams=64))
    reading = Branch(draft, frame.states, frame.words, frame.positions)
    anchor = int(frame.words[frame.p])
    first = dict(zip(REDUCED, reading.logprobs(frame.p, anchor, ()).tolist()))
    every = {(): 0.0, **{(a,): value for a, value in first.items()}}
    for a in REDUCED:
        second = reading.logprobs(frame.p, anchor, (a,)).tolist()
        every.update({(a, b): first[a] + value for b, value in zip(REDUCED, second)})
    best = sorted(every, key=lambda path: -every[path])[:25]
    assert frame.paths() == close_to({path: every[path] for path in best})


@pytest.mark.parametrize('reduced', [False, True])
def test_one_beam_is_the_chain(target, reduced):
    draft = small_draft(target, 'eagle3', seed=4, block=6, window=3, reduced=reduced)
    frame = Frame(target, draft, 2, TreeShape(nodes=6, depth=5, beams=1))
    chain = draft_executor(draft, target, frame.tokens, frame.taps, frame.positions)
    proposals = frame.run(chain)['proposals'].tolist()
    assert frame.run()['ids'].tolist() == [int(frame.words[frame.p]), *proposals]


def test_rules_dictate_and_end(target):
    draft = small_draft(target, 'eagle3', seed=3, reduced=True)
    shape = TreeShape(nodes=40, depth=4, beams=5)
    free = Frame(target, draft, 3, shape).paths()
    often = [path[0] for path in free if len(path) == 1]
    rules = {'follow': {often[0]: often[1]}, 'ends': (often[1],)}
    frame = Frame(target, draft, 3, shape, **rules)
    paths = frame.paths()
    assert paths == close_to(frame.expected())
    assert (often[0], often[1]) in paths  # as certain as its parent, and behind it
    for path in paths:
        assert often[1] not in path[:-1]
        assert all(after == often[1] for token, after in zip(path, path[1:])
                   if token == often[0])
    anchored = Frame(target, draft, 3, shape, follow={int(frame.words[frame.p]): 20})
    assert {path[0] for path in anchored.paths() if path} == {20}
    ended = Frame(target, draft, 3, shape, ends=(int(frame.words[frame.p]),))
    assert list(ended.paths()) == [()]


def test_what_lies_at_or_behind_the_anchor_changes_no_bit(target):
    frame = Frame(target, small_draft(target, 'eagle3', window=3), 5, TreeShape(16, 4, 4))
    first = frame.run()
    frame.taps.rows[:, :, frame.p:].normal_()
    frame.tokens[frame.p + 1:] = 1
    again = frame.run()  # over the branches of the first call
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_certain_child_never_displaces_its_parent():
    outputs = {name: torch.zeros(3, dtype=torch.int64) for name in ('ids', 'parents', 'depths')}
    outputs['ancestors'] = torch.zeros(3, 3, dtype=torch.bool)
    outputs['scores'] = torch.zeros(3)
    scores = torch.tensor([0.0, -1.0, -0.5, -1.0, -0.5, float('-inf')])
    keep(scores, torch.tensor([7, 1, 2, 3, 4, 5]), torch.tensor([0, 0, 0, 1, 2, 2]),
         torch.tensor([0, 1, 1, 2, 2, 2]), outputs)
    assert outputs['ids'].tolist() == [7, 2, 4]
    assert outputs['parents'].tolist() == [-1, 0, 1]
    assert torch.equal(outputs['ancestors'], torch.ones(3, 3, dtype=torch.bool).tril())


@pytest.mark.gpu
def test_cuda_grows_the_tree_of_the_cpu(target):
    there = small_target().to('cuda')
    shape = TreeShape(nodes=20, depth=4, beams=4)
    found, expected = (Frame(owner, small_draft(owner, 'eagle3', window=3), 6, shape).paths()
                       for owner in (there, target))
    assert found == close_to(expected)


def test_buffers_keep_their_addresses(target):
    frame = Frame(target, small_draft(target, 'eagle3'), 0, TreeShape(8, 3, 3))
    before = [value.data_ptr() for value in frame.executor.outputs.values()]
    frame.run()
    assert [value.data_ptr() for value in frame.executor.outputs.values()] == before


def test_refusals_name_the_remedy(target):
    with pytest.raises(ConfigurationError, match='nodes is 1'):
        TreeShape(nodes=1, depth=3)
    with pytest.raises(ConfigurationError, match='of kind dflash'):
        Frame(target, small_draft(target, 'dflash'), 0, TreeShape(4, 2))
