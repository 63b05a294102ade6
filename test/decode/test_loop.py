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
"""The loop against naive decoding, with a scripted target and with random weights."""

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch

from rspec_planner.decode.loop import close, decode
from rspec_planner.decode.state import DecodeState
from rspec_planner.engine.torch_executor import TorchExecutor, verify_executor
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import tiny
from rspec_planner.model.rope import flat_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache
from rspec_planner.planner.tokenizer import build_tokenizer

STOP = 99


def scripted(script, prompt_length, width):
    """Return a verify that continues `script` where the block agrees with it, else says 0."""
    def body(inputs, outputs):
        start = int(inputs['start']) - prompt_length
        agrees = True
        for row, token in enumerate(inputs['ids'].tolist()):
            index = start + row
            agrees = agrees and index < len(script) and token == script[index]
            known = agrees and index + 1 < len(script)
            outputs['best'][row] = script[index + 1] if known else 0
    return TorchExecutor(body, {'ids': torch.zeros(width, dtype=torch.int64),
                                'start': torch.zeros(1, dtype=torch.int64)},
                         {'best': torch.zeros(width, dtype=torch.int64)})


def drafting(proposals_at, prompt_length, width):
    """Return a draft that proposes `proposals_at(index of the anchor in the script)`."""
    def body(inputs, outputs):
        wanted = proposals_at(int(inputs['start']) - prompt_length)
        outputs['proposals'].copy_(torch.tensor(wanted))
    return TorchExecutor(body, {name: torch.zeros(1, dtype=torch.int64)
                                for name in ('start', 'since', 'length')},
                         {'proposals': torch.zeros(width - 1, dtype=torch.int64)})


def started(script, prompt_length=5):
    state = DecodeState(64)
    state.start(torch.arange(prompt_length), script[0], (STOP,))
    return state


def test_greedy_commits_one_token_an_iteration():
    script = [3, 4, 5, STOP, 7]
    state = started(script)
    stats = decode(scripted(script, 5, 1), state, (STOP,), 20)
    assert state.generated == (3, 4, 5, STOP)
    assert state.done
    assert stats.iterations == 3
    assert stats.committed == (1, 1, 1)
    assert stats.accepted_length == 1.0
    assert stats.verify_ms > 0.0


def test_stop_in_the_prefill_needs_no_iteration():
    state = started([STOP])
    stats = decode(scripted([STOP], 5, 1), state, (STOP,), 20)
    assert stats.iterations == 0
    assert stats.accepted_length == 0.0
    assert state.generated == (STOP,)


def test_budget_ends_the_loop():
    script = list(range(1, 30))
    state = started(script)
    decode(scripted(script, 5, 1), state, (STOP,), 7)
    assert state.generated == tuple(script[:7])
    assert not state.done


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(2, 8),
       st.integers(0, 2 ** 31))
@settings(max_examples=150, deadline=None)
def test_any_draft_gives_the_greedy_text(words, width, seed):
    script = [*words, STOP]
    generator = torch.Generator().manual_seed(seed)

    def propose(index):
        wanted = (script + [0] * width)[index + 1:index + width]
        wrong = torch.rand(width - 1, generator=generator) < 0.3
        return [0 if bad else token for bad, token in zip(wrong.tolist(), wanted)]

    state = started(script)
    stats = decode(scripted(script, 5, width), state, (STOP,), 40,
                   drafting(propose, 5, width))
    assert state.generated == tuple(script)
    assert sum(stats.committed) == len(script) - 1
    assert stats.iterations == len(stats.committed)


def test_width_must_fit_the_draft():
    with pytest.raises(ConfigurationError, match='width 4'):
        decode(scripted([1], 5, 4), started([1]), (STOP,), 4)


TOKENIZER = build_tokenizer(['alpha beta gamma delta'])
PROFILE = tiny(TOKENIZER.token_ids, TOKENIZER.vocab_size)


def random_target(seed):
    torch.manual_seed(seed)
    target = Target(PROFILE).eval().requires_grad_(False)
    target.text.embed_tokens.weight.normal_(std=1.0)
    return target


def naive_greedy(target, prompt, rope_delta, count):
    """Recompute the whole sequence for every token, without a cache."""
    ids = prompt.tolist()
    text = PROFILE.text
    with torch.inference_mode():
        for _ in range(count):
            positions = torch.arange(len(ids)) + rope_delta
            cos, sin = flat_cos_sin(positions, text.head_dim, text.rope_theta)
            hidden = target.text(target.text.embed(torch.tensor([ids])), cos, sin)
            logits = target.text.logits(hidden[0, -1])
            logits[PROFILE.tokens.forbidden_start:PROFILE.tokens.forbidden_end] = -torch.inf
            ids.append(int(logits.argmax()))
    return tuple(ids[len(prompt):])


def prefilled(target, prompt, width=1):
    """Fill a cache with the prompt through a wide verify; return cache and the first token."""
    cache = KVCache(PROFILE.text, 1, 96)
    whole = verify_executor(target, cache, len(prompt))
    whole.inputs['ids'].copy_(prompt)
    whole.enqueue()
    return cache, int(whole.outputs['best'][-1])


@pytest.mark.parametrize('seed', range(6))
def test_cached_greedy_equals_full_recomputation(seed):
    target = random_target(seed)
    prompt = torch.randint(0, PROFILE.tokens.forbidden_start, (23,))
    expected = naive_greedy(target, prompt, 0, 12)
    cache, first = prefilled(target, prompt)
    state = DecodeState(cache.capacity)
    state.start(prompt, first, ())
    decode(verify_executor(target, cache, 1), state, (), 12)
    assert state.generated == expected
    assert len(set(expected)) > 1  # otherwise the comparison would prove little


@pytest.mark.parametrize('seed', range(3))
def test_blocks_with_a_draft_equal_greedy(seed):
    target = random_target(seed)
    prompt = torch.randint(0, PROFILE.tokens.forbidden_start, (17,))
    expected = naive_greedy(target, prompt, 0, 14)
    cache, first = prefilled(target, prompt)
    state = DecodeState(cache.capacity)
    state.start(prompt, first, ())

    def propose(index):
        good = [*expected, 0, 0, 0, 0, 0][index + 1:index + 5]
        good[(index + seed) % 4] += index % 2  # sometimes wrong
        return good

    stats = decode(verify_executor(target, cache, 5), state, (), 14, drafting(propose, 17, 5))
    assert state.generated == expected
    assert stats.accepted_length > 1.5


def test_stale_rows_are_never_read():
    target = random_target(0)
    prompt = torch.randint(0, PROFILE.tokens.forbidden_start, (20,))
    texts = []
    for poison in (0.0, 1e4):
        cache, first = prefilled(target, prompt)
        cache.keys[:, :, :, 20:] = poison
        cache.values[:, :, :, 20:] = poison
        state = DecodeState(cache.capacity)
        state.start(prompt, first, ())
        decode(verify_executor(target, cache, 1), state, (), 10)
        texts.append(state.generated)
    assert texts[0] == texts[1]


def run(target, prompt, count, width=1, propose=None, **options):
    """Prefill and decode; return cache, verify, state and stats."""
    cache, first = prefilled(target, prompt)
    state = DecodeState(cache.capacity)
    stops = options.pop('stops', ())
    state.start(prompt, first, stops)
    verify = verify_executor(target, cache, width)
    draft = drafting(propose, len(prompt), width) if propose else None
    stats = decode(verify, state, stops, count, draft, **options)
    return cache, verify, state, stats


def assert_context(target, cache, ids):
    """The cache rows of `ids` are those of one wide pass over them."""
    reference = KVCache(PROFILE.text, 1, 96)
    everything = verify_executor(target, reference, len(ids))
    everything.inputs['ids'].copy_(torch.tensor(ids))
    everything.enqueue()
    for mine, want in ((cache.keys, reference.keys), (cache.values, reference.values)):
        torch.testing.assert_close(mine[:, :, :, :len(ids)], want[:, :, :, :len(ids)],
                                   rtol=0, atol=1e-5)


@pytest.mark.parametrize(('width', 'forwards'), [(1, 2), (4, 1)])
def test_close_appends_the_end_token_to_an_exhausted_budget(width, forwards):
    target, end = random_target(1), PROFILE.tokens.traj_future_start
    prompt = torch.randint(0, PROFILE.tokens.forbidden_start, (11,))
    draft = (lambda index: [0] * (width - 1)) if width > 1 else None
    cache, verify, state, _ = run(target, prompt, 3, width, draft)
    generated = state.generated
    assert close(verify, state, end) == (15, forwards)
    assert_context(target, cache, [*prompt.tolist(), *generated, end])


@pytest.mark.parametrize('width', [1, 4])
def test_close_writes_the_row_of_a_stop_that_came_as_bonus(width):
    target = random_target(1)
    prompt = torch.randint(0, PROFILE.tokens.forbidden_start, (11,))
    text = naive_greedy(target, prompt, 0, 4)
    draft = (lambda index: [0] * (width - 1)) if width > 1 else None
    cache, verify, state, _ = run(target, prompt, 9, width, draft, stops=(text[3],))
    assert state.done and not state.closed
    assert close(verify, state, text[3]) == (11 + len(state.generated), 1)
    assert close(verify, state, text[3])[1] == 0  # nothing is left to do
    assert_context(target, cache, [*prompt.tolist(), *state.generated])


def test_a_stop_behind_its_herald_rides_along():
    """Following {herald: stop} the verify that accepts the herald also writes the stop's row."""
    target = random_target(2)
    prompt = torch.randint(0, PROFILE.tokens.forbidden_start, (13,))
    text = naive_greedy(target, prompt, 0, 12)
    at = next(i for i in range(2, 11)
              if text[i] not in text[:i] and text[i + 1] not in text[:i + 1])
    herald, stop = text[at:at + 2]

    def propose(index):  # right up to the herald, wrong behind it
        return [text[k] if k <= at else 0 for k in range(index + 1, index + 6)]

    outcomes = {}
    for name, follow in (('plain', {}), ('follow', {herald: stop})):
        cache, verify, state, stats = run(target, prompt, 12, 6, propose, stops=(stop,),
                                          follow=follow)
        assert state.generated == text[:at + 2]
        closed = state.closed
        length, forwards = close(verify, state, stop)
        assert length == 13 + at + 2
        assert_context(target, cache, [*prompt.tolist(), *state.generated])
        outcomes[name] = (closed, forwards)
    assert outcomes == {'plain': (False, 1), 'follow': (True, 0)}


def test_the_draft_is_told_what_is_new_to_it():
    script = [*range(1, 9), STOP]
    seen = []

    def propose(index):
        seen.append({name: int(draft.inputs[name]) for name in ('start', 'since', 'length')})
        return [script[index + 1], 0, 0]  # one right, two wrong

    draft = drafting(propose, 5, 4)
    for _ in range(2):  # a new frame starts over
        seen.clear()
        decode(scripted(script, 5, 4), started(script), (STOP,), 20, draft)
        assert [s['start'] for s in seen] == [5, 7, 9, 11]
        assert [s['since'] for s in seen] == [0, 5, 7, 9]
        assert {s['length'] for s in seen} == {5}


def test_valid_rows_are_counted():
    script = [3, 4, 5, 6, STOP]
    state = started(script)
    assert state.cached == 5
    decode(scripted(script, 5, 3), state, (STOP,), 3,
           drafting(lambda index: script[index + 1:index + 3], 5, 3))
    # the budget ended on the second proposal, whose row is written
    assert (state.generated, state.cached, state.done, state.closed) == \
        ((3, 4, 5), 8, False, False)


def test_a_text_longer_than_its_buffer_is_refused():
    with pytest.raises(ConfigurationError, match='needs 66 tokens, the buffer holds 64'):
        decode(scripted([1], 5, 1), started([1]), (STOP,), 60)
