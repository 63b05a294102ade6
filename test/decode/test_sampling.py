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
"""Sampling: the generator, the rule, and chi-square tests that a draft changes no distribution."""

from itertools import product

import pytest
import torch

from rspec_planner.decode.loop import decode
from rspec_planner.decode.sampling import (
    draw,
    philox,
    rejection_choice,
    Sampler,
    SamplingRule,
    uniforms,
)
from rspec_planner.decode.state import DecodeState
from rspec_planner.engine.torch_executor import TorchExecutor
from rspec_planner.errors import ConfigurationError

DRAWS = 200_000
SIGNIFICANCE = 1e-4  # seeds are fixed: a test either always passes or shows a defect


def chi_square(counts, probabilities):
    """Return the p value of counts under probabilities; what is impossible must not occur."""
    counts, expected = counts.double(), probabilities.double() * counts.sum()
    assert not counts[expected == 0].any()
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1  # the survival function of chi-square, as a gamma function
    return float(torch.special.gammaincc(freedom.double() / 2, statistic / 2))


@pytest.mark.parametrize(('counter', 'key', 'words'), [
    # known answers published with Random123
    ((0,) * 4, (0, 0), (0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8)),
    ((0xffffffff,) * 4, (0xffffffff,) * 2, (0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd)),
    ((0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344), (0xa4093822, 0x299f31d0),
     (0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1)),
])
def test_philox_known_answers(counter, key, words):
    made = philox([torch.tensor([word]) for word in counter], key)
    assert tuple(int(word) for word in made) == words


def test_numbers_depend_on_seed_and_position_only():
    whole = uniforms(7, torch.arange(100))
    assert torch.equal(uniforms(7, torch.tensor([42]))[0], whole[42])
    assert torch.equal(uniforms(7, torch.arange(100).view(4, 25)).view(100, 4), whole)
    assert not torch.isclose(uniforms(8, torch.arange(100)), whole).any()
    assert not torch.equal(uniforms(7 + (1 << 40), torch.arange(100)), whole)
    assert 0.0 < whole.min() and whole.max() < 1.0


def test_a_sampler_uses_the_numbers_of_its_positions():
    """Short runs come from pages kept at hand; they must not differ from any other way."""
    sampler = Sampler(SamplingRule(1.0, 1.0), 11)
    logits = torch.randn(200, 30)
    whole = sampler.draw(logits, 0)
    for first, count in ((0, 1), (5, 24), (60, 16), (63, 64), (130, 70)):
        assert sampler.draw(logits[first:first + count], first) == whole[first:first + count]
    order = torch.randperm(200)
    assert sampler.draw(logits[order], order) == [whole[k] for k in order.tolist()]


def test_numbers_are_uniform_and_their_columns_independent():
    u = uniforms(3, torch.arange(DRAWS))
    cells = (u * 10).long()
    for left, right in ((0, 1), (1, 2), (0, 2), (2, 3)):
        counts = torch.bincount(cells[:, left] * 10 + cells[:, right], minlength=100)
        assert chi_square(counts, torch.full((100,), 0.01)) > SIGNIFICANCE


def test_probabilities_of_hand_computed_cases():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    plain = SamplingRule(1.0, 1.0).probabilities(logits)
    torch.testing.assert_close(plain, torch.tensor([0.5, 0.3, 0.15, 0.05]).double(),
                               rtol=1e-6, atol=0)
    nucleus = SamplingRule(1.0, 0.75).probabilities(logits)  # 0.5 + 0.3 is the first above
    torch.testing.assert_close(nucleus, torch.tensor([0.625, 0.375, 0, 0]).double(), rtol=1e-6,
                               atol=0)
    sharp = SamplingRule(0.5, 1.0).probabilities(logits)
    squares = torch.tensor([0.25, 0.09, 0.0225, 0.0025]).double()
    torch.testing.assert_close(sharp, squares / squares.sum(), rtol=1e-6, atol=0)
    tiny_nucleus = SamplingRule(1.0, 1e-9).probabilities(logits)  # the best always stays
    assert tiny_nucleus.tolist() == [1.0, 0.0, 0.0, 0.0]
    barred = SamplingRule(1.0, 0.9).probabilities(torch.tensor([0.0, float('-inf'), 0.0]))
    assert barred.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(('temperature', 'top_p'), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0),
                                                    (1.0, 1.1), (float('nan'), 0.5)])
def test_impossible_rules_are_refused(temperature, top_p):
    with pytest.raises(ConfigurationError):
        SamplingRule(temperature, top_p)


def test_draws_never_hit_an_impossible_token():
    weights = torch.tensor([0.0, 0.2, 0.0, 0.3, 0.0], dtype=torch.float64).expand(4, 5)
    u = torch.tensor([1e-12, 0.4 - 1e-9, 0.4 + 1e-9, 1 - 1e-12], dtype=torch.float64)
    assert draw(weights, u).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('top_p', [1.0, 0.8])
def test_rejection_commits_tokens_of_the_target(seed, top_p):
    """Whatever q is, with mass where the target has none and none where it has."""
    torch.manual_seed(seed)
    p = SamplingRule(0.8, top_p).probabilities(torch.randn(12) * 1.5)
    q = SamplingRule(1.0, 0.9).probabilities(torch.randn(12))
    u = uniforms(seed, torch.arange(DRAWS))
    proposals = draw(q.expand(DRAWS, -1), u[:, 2])
    assert chi_square(torch.bincount(proposals, minlength=12), q) > SIGNIFICANCE
    made = rejection_choice(p.expand(DRAWS, -1), q.expand(DRAWS, -1), proposals, u)
    assert chi_square(torch.bincount(made, minlength=12), p) > SIGNIFICANCE
    kept = (made == proposals).double().mean()
    assert abs(float(kept - torch.minimum(p, q).sum())) < 0.01  # the best rate there is


def test_the_chi_square_test_notices_a_wrong_rule():
    """Redrawing from p instead of the residual is the classic mistake."""
    torch.manual_seed(0)
    p = torch.randn(12).softmax(-1).double()
    q = torch.randn(12).softmax(-1).double()
    u = uniforms(0, torch.arange(DRAWS))
    proposals = draw(q.expand(DRAWS, -1), u[:, 2])
    keeps = u[:, 0] * q[proposals] < p[proposals]
    wrong = torch.where(keeps, proposals, draw(p.expand(DRAWS, -1), u[:, 1]))
    assert chi_square(torch.bincount(wrong, minlength=12), p) < 1e-12


VOCABULARY, LENGTH, BLOCK, STOP = 4, 3, 4, 3


class Chain:
    """A target that is a Markov chain, with a block draft that knows the anchor only."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.next = torch.randn(VOCABULARY, VOCABULARY) * 1.5  # logits behind each token
        self.draft = torch.randn(VOCABULARY, BLOCK - 1, VOCABULARY)
        self.state = DecodeState(16)
        self.verify = TorchExecutor(
            self._verify, {'ids': torch.zeros(BLOCK, dtype=torch.int64),
                           'start': torch.zeros(1, dtype=torch.int64)},
            {'best': torch.zeros(BLOCK, dtype=torch.int64),
             'logits': torch.zeros(BLOCK, VOCABULARY)})
        self.propose = TorchExecutor(
            self._propose, {name: torch.zeros(1, dtype=torch.int64)
                            for name in ('start', 'since', 'length')},
            {'proposals': torch.zeros(BLOCK - 1, dtype=torch.int64),
             'logits': torch.zeros(BLOCK - 1, VOCABULARY)})

    def _verify(self, inputs, outputs):
        outputs['logits'].copy_(self.next[inputs['ids']])

    def _propose(self, inputs, outputs):
        outputs['logits'].copy_(self.draft[self.state.anchor])
        outputs['proposals'].copy_(outputs['logits'].argmax(-1))

    def text(self, sampler, follow):
        """Return LENGTH tokens behind an anchor 0, fewer if the stop token came."""
        self.state.start(torch.tensor([1, 1]), 0, (STOP,))
        decode(self.verify, self.state, (STOP,), LENGTH + 1, self.propose, follow=follow,
               sampler=sampler)
        return self.state.generated[1:]

    def distribution(self, rule):
        """Return the probability of every text by multiplying along the chain."""
        p = rule.probabilities(self.next)
        found = {}
        for text in product(range(VOCABULARY), repeat=LENGTH):
            text = text[:text.index(STOP) + 1] if STOP in text else text
            chance = 1.0
            for before, token in zip((0, *text), text):
                chance *= float(p[before, token])
            found[text] = chance
        return found


@pytest.mark.parametrize('rejection', [False, True])
@pytest.mark.parametrize('follow', [{}, {1: STOP}])
def test_decoding_with_a_draft_samples_whole_texts_of_the_target(rejection, follow):
    chain, rule = Chain(1), SamplingRule(0.9, 0.97)
    want = chain.distribution(rule)
    assert sum(want.values()) == pytest.approx(1.0)
    texts = {text: index for index, text in enumerate(want)}
    counts = torch.zeros(len(texts))
    for seed in range(1_200):
        counts[texts[chain.text(Sampler(rule, seed, rejection), follow)]] += 1
    assert (counts > 0).sum() > 12
    rare = torch.tensor(list(want.values())) * counts.sum() < 5  # too few for the test
    merged = torch.cat((counts[~rare], counts[rare].sum()[None]))
    chances = torch.tensor(list(want.values())).double()
    assert chi_square(merged, torch.cat((chances[~rare], chances[rare].sum()[None]))) \
        > SIGNIFICANCE


class Batch:
    """The same loop for many seeds at once, in tensors: the first tokens of 2 x 10^5 texts."""

    def __init__(self, chain, rule, rejection):
        self.chain, self.rejection = chain, rejection
        self.p = rule.probabilities(chain.next)
        self.q = SamplingRule(1.0, 1.0).probabilities(chain.draft)
        count = LENGTH + BLOCK
        self.u = uniforms(9, torch.arange(DRAWS * count).view(DRAWS, count))

    def texts(self):
        tokens = torch.zeros(DRAWS, LENGTH + BLOCK + 1, dtype=torch.int64)
        at = torch.zeros(DRAWS, dtype=torch.int64)  # the anchor's place; tokens start as 0
        rows = torch.arange(DRAWS)
        while bool((at < LENGTH).any()):
            live, anchor = at < LENGTH, tokens[rows, at]
            u = self.u[rows[:, None], at.clamp(max=LENGTH)[:, None] + torch.arange(BLOCK)]
            q = self.q[anchor]
            drawn = draw(q, u[:, :-1, 2]) if self.rejection \
                else self.chain.draft[anchor].argmax(-1)
            p = self.p[torch.cat((anchor[:, None], drawn), 1)]
            best = draw(p, u[..., 1])
            if self.rejection:
                best[:, :-1] = rejection_choice(p[:, :-1], q, drawn, u[:, :-1])
            matched = (best[:, :-1] == drawn).long().cumprod(1).sum(1)
            for k in range(BLOCK):
                takes = live & (k <= matched)
                tokens[rows[takes], at[takes] + 1 + k] = best[takes, k]
            at = torch.where(live, at + matched + 1, at)
        return tokens[:, 1:LENGTH + 1]


@pytest.mark.parametrize('rejection', [False, True])
@pytest.mark.parametrize('seed', range(3))
def test_first_tokens_of_many_texts_are_those_of_the_target(rejection, seed):
    chain, rule = Chain(seed), SamplingRule(1.1, 1.0)
    texts = Batch(chain, rule, rejection).texts()
    p = rule.probabilities(chain.next)
    want = p[0][:, None, None] * p[:, :, None] * p[None]
    code = (texts * torch.tensor([VOCABULARY ** 2, VOCABULARY, 1])).sum(1)
    counts = torch.bincount(code, minlength=VOCABULARY ** LENGTH)
    assert chi_square(counts, want.flatten() / want.sum()) > SIGNIFICANCE


def test_by_the_match_rule_the_text_does_not_depend_on_the_draft():
    rule, texts = SamplingRule(1.0, 0.9), []
    for seed in range(200):
        chain = Chain(3)
        texts.append([])
        for draft in range(3):
            chain.draft = torch.randn(chain.draft.shape, generator=torch.manual_seed(draft))
            texts[-1].append(chain.text(Sampler(rule, seed), {}))
    assert all(one == two == three for one, two, three in texts)
    assert len({one for one, *_ in texts}) > 10


def test_a_reduced_draft_vocabulary_proposes_target_ids():
    """Its q is zero elsewhere, and so are its proposals."""
    draft_ids = torch.tensor([6, 1, 4])
    sampler = Sampler(SamplingRule(1.0, 1.0), 5, True, draft_ids=draft_ids)
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(DRAWS, -1)
    ids = sampler.propose({'logits': logits}, 0)
    want = torch.zeros(8).index_copy_(0, draft_ids, torch.tensor([0.2, 0.5, 0.3]))
    assert chi_square(torch.bincount(ids, minlength=8), want) > SIGNIFICANCE


@pytest.mark.parametrize('reduced', [False, True])
def test_each_row_is_tested_against_its_own_q(reduced):
    """One block of very many rows: each commits a token of the target's distribution."""
    torch.manual_seed(6)
    vocabulary, kinds = 7, 5
    draft_ids = torch.tensor([5, 0, 3]) if reduced else None
    sampler = Sampler(SamplingRule(0.7, 0.9), 8, True, draft_ids=draft_ids)
    p, q = torch.randn(kinds, vocabulary), torch.randn(kinds, 3 if reduced else vocabulary)
    draft = {'logits': q.repeat(DRAWS // kinds, 1)}
    verified = {'logits': torch.cat((p.repeat(DRAWS // kinds, 1), p[:1]))}
    block = [1, *sampler.propose(draft, 11).tolist()]
    made = torch.tensor(sampler.choose(block, verified, draft, {}, 11)[:-1]).view(-1, kinds)
    for kind in range(kinds):
        counts = torch.bincount(made[:, kind], minlength=vocabulary)
        assert chi_square(counts, sampler.rule.probabilities(p[kind])) > SIGNIFICANCE
