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
Thousands of random tiny models: decoding with a scripted draft against a plain greedy loop.

The draft knows the true continuation, so every number of matched proposals can be forced. Stale
rows of cache and taps hold large values before each verify and must change no logit.
"""

from dataclasses import dataclass, replace
import random

from draft_reference import plain_forward
import pytest
import torch

from rspec_planner.decode.loop import close, decode
from rspec_planner.decode.state import DecodeState
from rspec_planner.engine.torch_executor import TorchExecutor, verify_executor
from rspec_planner.model.config import TextConfig, tiny
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache
from rspec_planner.planner.tokenizer import build_tokenizer

VOCABULARY, ALLOWED, ROWS, LAYERS, POISON = 64, 60, 64, (0, 1), 1e4
SEEDS, CHUNK = 2304, 96  # 24 widths x 96
NEAR_TIE = 1e-3  # below it two correct orders of summation may choose differently


def profile(hidden, heads, kv_heads, head_dim, section):
    tokenizer = build_tokenizer([''])
    tokens = replace(tokenizer.token_ids, forbidden_start=ALLOWED, forbidden_end=VOCABULARY)
    text = TextConfig(VOCABULARY, hidden, 2, heads, kv_heads, head_dim, 2 * hidden, section,
                      rope_theta=100.0)
    return replace(tiny(tokens, VOCABULARY), text=text)


@pytest.fixture(scope='module')
def targets():
    shapes = ((16, 2, 1, 8, (2, 1, 1)), (24, 4, 2, 8, (2, 1, 1)), (32, 3, 3, 12, (2, 2, 2)))
    return [Target(profile(*shape)).requires_grad_(False) for shape in shapes]


def randomise(target, seed, packed):
    """Give the text decoder new weights; every second model runs with joined projections."""
    generator = torch.Generator().manual_seed(seed)
    target.text.train().eval()  # drops the joined weights of the last model
    for weight in target.text.parameters():
        if weight.dim() == 2:
            weight.normal_(std=2.0 * weight.shape[1] ** -0.5, generator=generator)
        else:
            weight.uniform_(0.5, 1.5, generator=generator)
    for layer in target.text.layers if packed else ():
        layer.pack()


def plain_greedy(target, prompt, delta, count):
    """Return `count` greedy tokens and the smallest lead that a winner had."""
    ids, lead = list(prompt), float('inf')
    for _ in range(count):
        hidden = plain_forward(target, ids, delta)
        top = target.text.logits(hidden[0, -1])[:ALLOWED].topk(2)
        lead = min(lead, float(top.values[0] - top.values[1]))
        ids.append(int(top.indices[0]))
    return ids[len(prompt):], lead


@dataclass
class Case:
    """One model, prompt, true continuation and what the draft shall get right."""

    seed: int
    width: int
    prompt: list
    delta: int
    budget: int
    text: list
    stop: int
    follow: dict
    matches: list


def make_case(target, seed):
    rng = random.Random(seed)
    width = 1 + seed % 24
    prompt = [rng.randrange(ALLOWED) for _ in range(rng.randint(2, 7))]
    delta, budget = rng.randint(0, 3), rng.randint(1, 9)
    for attempt in range(50):
        randomise(target, 50 * seed + attempt, packed=seed % 2 == 1)
        text, lead = plain_greedy(target, prompt, delta, budget)
        if lead > NEAR_TIE:
            break
    else:
        raise AssertionError('no model without near ties')
    at = rng.randrange(budget)
    stop = text[at] if rng.random() < 0.6 else VOCABULARY - 1  # the latter is never said
    follow = {text[at - 1]: stop} if at and rng.random() < 0.3 else {}
    matches = [(seed // 24) % width, *(rng.randrange(width) for _ in range(budget))]
    return Case(seed, width, prompt, delta, budget, text, stop, follow, matches)


class Session:
    """Cache, taps and state of one case, with every check that runs inside the loop."""

    def __init__(self, target, case):
        self.case, cfg = case, target.cfg.text
        self.cache = KVCache(cfg, 1, ROWS)
        self.taps = TapBuffer(LAYERS, 1, ROWS, cfg.hidden_size)
        self.mirror = torch.full_like(self.taps.rows, float('nan'))
        self.state = DecodeState(ROWS)
        self.matches = iter(case.matches)
        whole = self._verify(target, len(case.prompt))
        whole.inputs['ids'].copy_(torch.tensor(case.prompt))
        whole.enqueue()
        self.state.start(torch.tensor(case.prompt), int(whole.outputs['best'][-1]), (case.stop,))
        self.plain = self._verify(target, case.width)
        self.verify = TorchExecutor(self.poisoned, self.plain.inputs, self.plain.outputs)
        self.draft = TorchExecutor(
            self.propose, {name: torch.zeros(1, dtype=torch.int64)
                           for name in ('start', 'since', 'length')},
            {'proposals': torch.zeros(case.width - 1, dtype=torch.int64)})

    def _verify(self, target, width):
        made = verify_executor(target, self.cache, width, self.taps)
        made.inputs['rope_delta'].fill_(self.case.delta)
        return made

    def poisoned(self, inputs, outputs):
        """Verify twice, the second time over large values in all that is stale."""
        start = int(inputs['start'])
        assert start == self.state.cached
        self.plain.enqueue()
        clean = outputs['logits'].clone()
        for stale in (self.cache.keys, self.cache.values, self.taps.rows):
            stale[..., start:, :] = POISON
        self.plain.enqueue()
        assert torch.equal(outputs['logits'], clean)

    def propose(self, inputs, outputs):
        """The true continuation for as long as wanted, then a certain mistake."""
        case, start, since = self.case, int(inputs['start']), int(inputs['since'])
        self.mirror[:, :, since:start] = self.taps.rows[:, :, since:start]
        assert torch.equal(self.mirror[:, :, :start], self.taps.rows[:, :, :start])
        assert int(self.state.tokens[start]) == self.state.anchor
        wanted, index = next(self.matches), start - int(inputs['length'])
        for row in range(case.width - 1):
            known = index + 1 + row < len(case.text)
            truth = case.text[index + 1 + row] if known else row
            outputs['proposals'][row] = truth if row < wanted else (truth + 1) % ALLOWED

    def expected_commits(self):
        """Return how many tokens each iteration must commit, and whether the last proposed it."""
        case = self.case
        total = case.text.index(case.stop) + 1 if case.stop in case.text else case.budget
        done, counts, proposed = 1, [], False
        for wanted in case.matches:
            if done >= total:
                break
            counts.append(min(wanted + 1, total - done))
            done += counts[-1]
            proposed = counts[-1] <= wanted
        return tuple(counts), proposed


def check(target, case):
    session = Session(target, case)
    state = session.state
    stats = decode(session.verify, state, (case.stop,), case.budget,
                   session.draft if case.width > 1 else None, follow=case.follow)
    text = case.text
    if case.stop in text:
        text = text[:text.index(case.stop) + 1]
    assert list(state.generated) == text
    assert state.done == (case.stop in text)
    assert 1 + sum(stats.committed) == len(text)
    if not case.follow:
        counts, proposed = session.expected_commits()
        assert stats.committed == counts
        assert state.cached == state.p + proposed

    end = case.stop if state.done else VOCABULARY - 2
    was_closed = state.closed
    length, forwards = close(session.verify, state, end)
    whole = [*case.prompt, *text] if state.anchor == text[-1] else [*case.prompt, *text, end]
    assert length == len(whole) == state.cached
    assert (forwards == 0) == was_closed
    _, taps, keys, values = plain_forward(target, whole, case.delta, taps=LAYERS, return_kv=True)
    for mine, want in ((session.cache.keys, keys), (session.cache.values, values),
                       (session.taps.rows, torch.stack(taps))):
        assert torch.allclose(mine[..., :length, :], want, rtol=1e-4, atol=1e-4)
    return was_closed


@torch.inference_mode()
@pytest.mark.parametrize('chunk', range(SEEDS // CHUNK))
def test_decoding_equals_the_plain_loop(targets, chunk):
    closed = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        target = targets[seed % len(targets)]
        case = make_case(target, seed)
        try:
            closed += check(target, case)
        except AssertionError as error:
            raise AssertionError(f'{case}') from error
    assert closed > 0  # the piggy-backed end is among what was tested


def test_every_forced_acceptance_is_covered():
    covered = {(1 + seed % 24, (seed // 24) % (1 + seed % 24)) for seed in range(SEEDS)}
    assert covered == {(width, match) for width in range(1, 25) for match in range(width)}
