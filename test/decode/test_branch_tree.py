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
Random tiny models: decoding with branch trees against a plain greedy loop.

Draft and target are both random. One random path of every tree is given the true continuation,
so that paths of any length and place are accepted and gathered. Whatever is stale in cache, taps
and the draft's own rows holds large values before each call.
"""

import random

from draft_reference import (
    FORBIDDEN,
    plain_forward,
    randomise,
    small_draft,
    small_target,
    VOCAB,
)
import pytest
import torch

from rspec_planner.decode.loop import close, decode
from rspec_planner.decode.sampling import Sampler, SamplingRule
from rspec_planner.decode.state import DecodeState
from rspec_planner.decode.tree import BranchTrees, decode_tree
from rspec_planner.engine.draft_executor import kept_rows
from rspec_planner.engine.eagle_tree import branch_tree_executor, TreeShape
from rspec_planner.engine.torch_executor import (
    TorchExecutor,
    tree_verify_executor,
    verify_executor,
)
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.text import KVCache

ROWS, POISON, NEAR_TIE, NEVER = 96, 1e4, 1e-3, 20
SEEDS, CHUNK = 120, 30


@pytest.fixture(scope='module')
def target():
    return small_target()


def plain_greedy(target, prompt, delta, count):
    """Return `count` greedy tokens and the smallest lead that a winner had."""
    ids, lead = list(prompt), float('inf')
    for _ in range(count):
        logits = target.text.logits(plain_forward(target, ids, delta)[0, -1])
        logits[FORBIDDEN[0]:FORBIDDEN[1]] = float('-inf')
        top = logits.topk(2)
        lead = min(lead, float(top.values[0] - top.values[1]))
        ids.append(int(top.indices[0]))
    return ids[len(prompt):], lead


class Session:
    """One random model with its buffers; every call first spoils what must not be read."""

    def __init__(self, target, seed, sampler=None):
        rng = self.rng = random.Random(seed)
        self.target, self.sampler = target, sampler
        self.prompt = [rng.randrange(17) for _ in range(rng.randint(3, 9))]
        self.delta, self.budget = rng.randint(0, 3), rng.randint(6, 14)
        for attempt in range(50):
            randomise(target, 100 * seed + attempt)
            self.text, lead = plain_greedy(target, self.prompt, self.delta, self.budget)
            if lead > NEAR_TIE:
                break
        else:
            raise AssertionError('no model without near ties')
        at = rng.randrange(1, self.budget)
        self.stop = self.text[at] if rng.random() < 0.6 else NEVER
        self.follow = {self.text[at - 1]: self.stop} if rng.random() < 0.4 else {}
        self.draft = small_draft(target, 'eagle3', seed=seed, reduced=seed % 3 == 0,
                                 rotary=('flat', 'mirror')[seed % 2], window=seed % 5)
        self.shape = TreeShape(nodes=rng.randint(2, 30), depth=rng.randint(1, 5),
                               beams=rng.randint(1, 8))
        self.build()

    def build(self):
        target, text = self.target, self.target.cfg.text
        self.cache = KVCache(text, 1, ROWS)
        self.taps = TapBuffer(self.draft.cfg.taps, 1, ROWS, text.hidden_size)
        whole = verify_executor(target, self.cache, len(self.prompt), self.taps)
        whole.inputs['ids'].copy_(torch.tensor(self.prompt))
        whole.inputs['rope_delta'].fill_(self.delta)
        whole.enqueue()
        first = int(whole.outputs['best'][-1]) if self.sampler is None else \
            self.sampler.draw(whole.outputs['logits'][-1:], len(self.prompt))[0]
        self.state = DecodeState(ROWS)
        self.state.start(torch.tensor(self.prompt), first, (self.stop,))
        self.kept, self.grow = self.branches()
        self.fresh_kept, self.fresh = self.branches()
        self.wide = tree_verify_executor(target, self.cache, self.shape.nodes, self.taps)
        self.wide.inputs['rope_delta'].fill_(self.delta)
        self.verify = TorchExecutor(self.poisoned_verify, self.wide.inputs, self.wide.outputs)
        self.trees = BranchTrees(TorchExecutor(self.checked_growth, self.grow.inputs,
                                               self.grow.outputs))

    def branches(self):
        kept = kept_rows(self.draft, ROWS, self.shape.beams * self.shape.depth)
        made = branch_tree_executor(self.draft, self.target, self.state.tokens, self.taps,
                                    torch.arange(ROWS).expand(3, -1), self.shape, kept=kept,
                                    follow=self.follow, ends=(self.stop,))
        made.inputs['rope_delta'].fill_(self.delta)
        return kept, made

    def checked_growth(self, inputs, outputs):
        """Grow over spoilt rows, and compare with a draft that never saw the frame before."""
        p, since = int(inputs['start']), int(inputs['since'])
        self.taps.rows[:, :, p:] = POISON
        self.kept[:, since:] = POISON
        self.fresh_kept.fill_(POISON)
        self.grow.enqueue()
        for name, value in inputs.items():
            self.fresh.inputs[name].copy_(value)
        self.fresh.inputs['since'].zero_()
        self.fresh.enqueue()
        low = max(p - self.draft.cfg.window, 0) if self.draft.cfg.window else 0
        torch.testing.assert_close(self.kept[:, low:p], self.fresh_kept[:, low:p], rtol=1e-4,
                                   atol=1e-4)
        torch.testing.assert_close(outputs['scores'].sort().values,
                                   self.fresh.outputs['scores'].sort().values, rtol=1e-3,
                                   atol=1e-3)
        if self.sampler is None:
            self.hint(outputs, p - len(self.prompt))

    def hint(self, outputs, index):
        """Let the path to a random node say what comes after token `index` of the text."""
        real = [0, *(outputs['parents'] >= 0).nonzero()[:, 0].tolist()]
        path = outputs['ancestors'][self.rng.choice(real)].nonzero()[1:, 0]
        truth = torch.tensor(self.text[index + 1:])[:len(path)]
        outputs['ids'][path[:len(truth)]] = truth

    def poisoned_verify(self, inputs, outputs):
        p = self.state.p
        for rows in (self.cache.keys, self.cache.values, self.taps.rows):
            rows[..., p:, :] = POISON
        self.wide.enqueue()

    def run(self):
        return decode_tree(self.verify, self.state, (self.stop,), self.budget, self.trees,
                           (self.cache, self.taps), self.sampler)


def check(session):
    """Compare text, cache and taps with the plain loop; return the run's numbers."""
    stats, text, state = session.run(), session.text, session.state
    if session.stop in text:
        text = text[:text.index(session.stop) + 1]
    assert list(state.generated) == text
    assert state.done == (session.stop in text)
    assert 1 + sum(stats.committed) == len(text)
    closed = state.closed
    narrow = verify_executor(session.target, session.cache, 2, session.taps)
    narrow.inputs['rope_delta'].fill_(session.delta)
    length, _ = close(narrow, state, session.stop if state.done else VOCAB - 1)
    whole = state.tokens[:length].tolist()
    layers = session.draft.cfg.taps
    _, taps, keys, values = plain_forward(session.target, whole, session.delta, taps=layers,
                                          return_kv=True)
    for mine, want in ((session.cache.keys, keys), (session.cache.values, values),
                       (session.taps.rows, torch.stack(taps))):
        torch.testing.assert_close(mine[..., :length, :], want, rtol=1e-3, atol=1e-3)
    return stats, closed


@torch.inference_mode()
@pytest.mark.parametrize('chunk', range(SEEDS // CHUNK))
def test_branch_trees_change_no_token_and_no_row(target, chunk):
    tokens = iterations = closed = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        stats, ended = check(Session(target, seed))
        tokens, iterations = tokens + sum(stats.committed), iterations + stats.iterations
        closed += ended
    assert tokens > 1.5 * iterations
    assert closed > 0


@torch.inference_mode()
@pytest.mark.parametrize('seed', range(10))
def test_sampled_text_does_not_depend_on_the_tree(target, seed):
    session = Session(target, seed, Sampler(SamplingRule(1.0, 0.9), seed))
    session.run()
    found = session.state.generated
    session.build()
    narrow = verify_executor(target, session.cache, 1, session.taps)
    narrow.inputs['rope_delta'].fill_(session.delta)
    decode(narrow, session.state, (session.stop,), session.budget, sampler=session.sampler)
    assert session.state.generated == found
