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
    return TorchExecutor(body, {'anchor': torch.zeros(1, dtype=torch.int64),
                                'start': torch.zeros(1, dtype=torch.int64)},
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


@pytest.mark.parametrize('stopped', [True, False])
def test_close_writes_the_end_token_into_the_cache(stopped):
    target = random_target(1)
    end = PROFILE.tokens.traj_future_start
    prompt = torch.randint(0, PROFILE.tokens.forbidden_start, (11,))
    cache, first = prefilled(target, prompt)
    state = DecodeState(cache.capacity)
    verify = verify_executor(target, cache, 1)
    state.start(prompt, first, ())
    decode(verify, state, (), 3)
    generated = state.generated
    if stopped:  # as if the target had said the end token itself
        verify.inputs['ids'][0], verify.inputs['start'][0] = state.anchor, state.p
        verify.enqueue()
        state.commit((end,), True)
    length = close(verify, state, end)
    whole = torch.tensor([*prompt.tolist(), *generated, end])
    assert length == len(whole)
    reference = KVCache(PROFILE.text, 1, 96)
    everything = verify_executor(target, reference, length)
    everything.inputs['ids'].copy_(whole)
    everything.enqueue()
    assert torch.allclose(cache.keys[:, :, :, :length], reference.keys[:, :, :, :length],
                          atol=1e-5)
    assert torch.allclose(cache.values[:, :, :, :length], reference.values[:, :, :, :length],
                          atol=1e-5)
