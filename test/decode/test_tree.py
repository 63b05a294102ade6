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
"""Trees: best first, acceptance along a path, and decoding equal to plain greedy."""

from itertools import product

import pytest
import torch

from rspec_planner.decode.accept import Acceptance
from rspec_planner.decode.loop import close, decode
from rspec_planner.decode.sampling import Sampler, SamplingRule
from rspec_planner.decode.state import DecodeState
from rspec_planner.decode.tree import accept_tree, build_tree, decode_tree, MarginalTrees, Tree
from rspec_planner.engine.torch_executor import (
    TorchExecutor,
    tree_verify_executor,
    verify_executor,
)
from rspec_planner.model.config import tiny
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache
from rspec_planner.planner.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(['alpha beta gamma delta'])
PROFILE = tiny(TOKENIZER.token_ids, TOKENIZER.vocab_size)
ALLOWED = PROFILE.tokens.forbidden_start
ROWS, LAYERS = 128, (0, 1, 2)


def prefixes(tree):
    """Return the proposals on the path to each reachable node."""
    paths = [()]
    for node in range(1, len(tree.ids)):
        if tree.parents[node] < 0:
            break
        paths.append((*paths[tree.parents[node]], tree.ids[node]))
    return paths


@pytest.mark.parametrize('seed', range(20))
def test_the_most_probable_prefixes_are_chosen(seed):
    generator = torch.Generator().manual_seed(seed)
    depth, vocabulary, top_k = 4, 6, 1 + seed % 4
    budget = 2 + seed
    logprobs = torch.randn(depth, vocabulary, generator=generator).mul(2).log_softmax(-1)
    tree = build_tree(logprobs, None, budget, top_k)
    allowed = [row.topk(top_k).indices.tolist() for row in logprobs]
    every = {path: sum(float(logprobs[d, t]) for d, t in enumerate(path))
             for length in range(depth + 1) for path in product(*allowed[:length])}
    want = sorted(every, key=lambda path: -every[path])[:budget]
    found = prefixes(tree)
    assert set(found) == set(want)
    assert len(set(found)) == len(found)
    assert [tree.depths[k] for k in range(len(found))] == [len(path) for path in found]


def test_one_sibling_makes_a_chain():
    logprobs = torch.randn(5, 9).log_softmax(-1)
    tree = build_tree(logprobs, None, 6, 1, anchor=7)
    assert tree.ids == (7, *logprobs.argmax(-1).tolist())
    assert tree.parents == (-1, 0, 1, 2, 3, 4)
    assert torch.equal(tree.ancestors, torch.ones(6, 6, dtype=torch.bool).tril())


def test_ancestors_are_the_path_to_the_node():
    tree = build_tree(torch.randn(4, 8).log_softmax(-1), None, 25, 3)
    for node in range(25):
        path, at = {node}, node
        while tree.parents[at] >= 0:
            at = tree.parents[at]
            path.add(at)
        assert set(tree.ancestors[node].nonzero()[:, 0].tolist()) == path
        assert len(path) == tree.depths[node] + 1


def test_reduced_vocabularies_speak_target_ids():
    logprobs = torch.tensor([[0.6, 0.3, 0.1]]).log()
    tree = build_tree(logprobs, torch.tensor([50, 7, 33]), 4, 3)
    assert tree.ids[1:] == (50, 7, 33)


def test_impossible_tokens_get_no_node_and_fillers_no_parent():
    logprobs = torch.tensor([[0.0, float('-inf'), float('-inf')]])
    tree = build_tree(logprobs, None, 4, 3)
    assert tree.ids == (0, 0, 0, 0) and tree.parents == (-1, 0, -1, -1)
    assert tree.ancestors[2:].sum() == 2  # each filler sees itself: no row is empty
    taken, path = accept_tree(tree, [0, 0, 0, 0], (), 9)
    assert (taken.committed, path) == ((0, 0), (0, 1))


def test_follow_leaves_one_certain_child():
    logprobs = torch.tensor([[0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [0.4, 0.3, 0.3]]).log()
    tree = build_tree(logprobs, None, 40, 3, anchor=0, follow={1: 9})
    behind = [tree.ids[k] for k in range(1, 40)
              if tree.parents[k] >= 0 and tree.ids[tree.parents[k]] == 1]
    assert behind and set(behind) == {9}
    anchored = build_tree(logprobs, None, 10, 3, anchor=1, follow={1: 9})
    assert [tree_id for tree_id, p in zip(anchored.ids, anchored.parents) if p == 0] == [9]


def test_nothing_is_proposed_behind_an_end():
    logprobs = torch.tensor([[0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [0.4, 0.3, 0.3]]).log()
    tree = build_tree(logprobs, None, 40, 3, ends=(1,))
    assert 1 in tree.ids
    assert all(tree.ids[parent] != 1 for parent in tree.parents if parent >= 0)


#       0 anchor
#      / \
#    5:1  6:2
#    / \    \
#  7:3 9:4  7:5
TREE = Tree((1, 5, 6, 7, 9, 7), (-1, 0, 0, 1, 1, 2), (0, 1, 1, 2, 2, 2), torch.eye(6).bool())


@pytest.mark.parametrize(('best', 'limit', 'committed', 'stopped', 'path'), [
    ([5, 7, 0, 8, 0, 0], 9, (5, 7, 8), False, (0, 1, 3)),
    ([6, 0, 7, 0, 0, 8], 9, (6, 7, 8), False, (0, 2, 5)),  # not the other 7
    ([4, 0, 0, 0, 0, 0], 9, (4,), False, (0,)),
    ([9, 0, 0, 0, 0, 0], 9, (9,), True, (0,)),  # a stop as bonus
    ([5, 9, 0, 0, 3, 0], 9, (5, 9), True, (0, 1, 4)),  # a stop that was proposed
    ([5, 7, 0, 8, 0, 0], 2, (5, 7), False, (0, 1, 3)),
    ([5, 8, 0, 0, 0, 0], 2, (5, 8), False, (0, 1)),
])
def test_acceptance_follows_the_choices(best, limit, committed, stopped, path):
    taken, walked = accept_tree(TREE, best, (9,), limit)
    assert taken == Acceptance(committed, stopped, len(path) - 1)
    assert walked == path


def random_target(seed):
    torch.manual_seed(seed)
    target = Target(PROFILE).eval().requires_grad_(False)
    for weight in target.text.parameters():
        if weight.dim() == 2:  # layers strong enough to keep the text from repeating itself
            weight.normal_(std=2.0 * weight.shape[1] ** -0.5)
    return target


def noisy_draft(text, length, block, seed, noise=2.5):
    """Logits that favour the true continuation, but not always most."""
    generator = torch.Generator().manual_seed(seed)

    def body(inputs, outputs):
        logits = torch.randn(block - 1, ALLOWED, generator=generator) * noise
        index = int(inputs['start']) - length
        for row, token in enumerate(text[index + 1:index + block]):
            logits[row, token] += 6.0
        outputs['logits'].copy_(logits)
        outputs['proposals'].copy_(logits.argmax(-1))

    return TorchExecutor(body, {name: torch.zeros(1, dtype=torch.int64)
                                for name in ('start', 'since', 'length')},
                         {'logits': torch.zeros(block - 1, ALLOWED),
                          'proposals': torch.zeros(block - 1, dtype=torch.int64)})


class Run:
    """A prompt in the cache and its first token."""

    def __init__(self, target, prompt, sampler=None):
        self.cache = KVCache(PROFILE.text, 1, ROWS)
        self.taps = TapBuffer(LAYERS, 1, ROWS, PROFILE.text.hidden_size)
        whole = verify_executor(target, self.cache, len(prompt), self.taps)
        whole.inputs['ids'].copy_(prompt)
        whole.enqueue()
        first = int(whole.outputs['best'][-1]) if sampler is None else \
            sampler.draw(whole.outputs['logits'][-1:], len(prompt))[0]
        self.state = DecodeState(ROWS)
        self.state.start(prompt, first, ())


def poisoned(verify, run):
    """Fill all that is stale with a large value before each forward."""
    def body(inputs, outputs):
        p = run.state.p
        for rows in (run.cache.keys, run.cache.values):
            rows[:, :, :, p:] = 1e4
        run.taps.rows[:, :, p:] = 1e4
        verify.enqueue()
    return TorchExecutor(body, verify.inputs, verify.outputs)


@pytest.mark.parametrize('seed', range(6))
@pytest.mark.parametrize('sampled', [False, True])
def test_a_tree_changes_no_token_and_no_row(seed, sampled):
    target, count = random_target(seed), 24
    prompt = torch.randint(0, ALLOWED, (15,))
    sampler = Sampler(SamplingRule(1.0, 0.95), seed) if sampled else None
    plain = Run(target, prompt, sampler)
    step = verify_executor(target, plain.cache, 1, plain.taps)
    decode(step, plain.state, (), count, sampler=sampler)
    text = plain.state.generated
    assert len(set(text)) > 9

    run = Run(target, prompt, sampler)
    verify = tree_verify_executor(target, run.cache, 24, run.taps)
    stats = decode_tree(poisoned(verify, run), run.state, (), count,
                        MarginalTrees(noisy_draft(text, 15, 6, seed), 24, top_k=4),
                        (run.cache, run.taps), sampler)
    assert run.state.generated == text
    assert stats.accepted_length > 2.0
    rows = min(run.state.cached, plain.state.cached)
    assert rows >= 15 + count - 2
    for mine, want in ((run.cache.keys, plain.cache.keys),
                       (run.cache.values, plain.cache.values),
                       (run.taps.rows, plain.taps.rows)):
        torch.testing.assert_close(mine[..., :rows, :], want[..., :rows, :], rtol=0, atol=1e-4)


def test_trees_accept_more_than_chains():
    target, count = random_target(3), 40
    prompt = torch.randint(0, ALLOWED, (15,))
    plain = Run(target, prompt)
    decode(verify_executor(target, plain.cache, 1), plain.state, (), count)
    text = plain.state.generated
    run = Run(target, prompt)
    chain = decode(verify_executor(target, run.cache, 6), run.state, (), count,
                   noisy_draft(text, 15, 6, 0))
    other = Run(target, prompt)
    tree = decode_tree(tree_verify_executor(target, other.cache, 24), other.state, (), count,
                       MarginalTrees(noisy_draft(text, 15, 6, 0), 24, top_k=4), (other.cache,))
    assert run.state.generated == other.state.generated == text
    assert tree.accepted_length > chain.accepted_length > 1.0


def test_an_end_token_on_the_path_closes_the_context():
    target = random_target(5)
    prompt = torch.randint(0, ALLOWED, (15,))
    plain = Run(target, prompt)
    decode(verify_executor(target, plain.cache, 1), plain.state, (), 12)
    text = plain.state.generated
    at = next(i for i in range(3, 12) if text[i] not in text[:i])
    run = Run(target, prompt)
    decode_tree(tree_verify_executor(target, run.cache, 16), run.state, (text[at],), 20,
                MarginalTrees(noisy_draft(text, 15, 6, 0, noise=0.5), 16, top_k=3,
                              follow={text[at - 1]: text[at]}), (run.cache,))
    assert run.state.generated == text[:at + 1]
    assert run.state.closed
    assert close(verify_executor(target, run.cache, 2), run.state, text[at]) == (15 + at + 1, 0)
