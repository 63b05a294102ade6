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
"""Temporal reuse: a guess in the prefill, against a plain prefill and greedy decoding."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rspec_planner.decode.loop import close, decode
from rspec_planner.decode.reuse import place_guess, start_from_guess
from rspec_planner.decode.state import DecodeState
from rspec_planner.engine.torch_executor import (
    feature_buffers,
    prefill_executor,
    verify_executor,
)
from rspec_planner.model.config import CameraConfig, tiny
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache
from rspec_planner.planner.prompt import build_prompt
from rspec_planner.planner.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(['alpha beta gamma delta'])
PROFILE = replace(tiny(TOKENIZER.token_ids, TOKENIZER.vocab_size),
                  cameras=CameraConfig(height=64, width=128))
CAPACITY, BUDGET, LAYERS = 448, 10, (0, 2)


class Frame:
    """One target with a prompt in its prefill; `decode` runs it with a guess."""

    def __init__(self):
        torch.manual_seed(4)
        self.target = Target(PROFILE).eval().requires_grad_(False)
        self.target.text.embed_tokens.weight.normal_()
        self.prompt = build_prompt(PROFILE, TOKENIZER, np.tile(np.eye(4), (16, 1, 1)))
        self.features = feature_buffers(self.target, 16)
        for value in self.features.values():
            value.normal_()

    def decode(self, guess, room=BUDGET, stops=(), tail=1):
        self.cache = KVCache(PROFILE.text, 1, CAPACITY)
        self.taps = TapBuffer(LAYERS, 1, CAPACITY, PROFILE.text.hidden_size)
        prefill = prefill_executor(self.target, self.cache, CAPACITY, self.taps, room, tail)
        length = self.prompt.length
        ids = torch.from_numpy(self.prompt.token_ids)
        prefill.inputs['ids'][:length] = ids
        prefill.inputs['positions'][:, :length] = torch.from_numpy(self.prompt.positions)
        for name, value in self.features.items():
            prefill.inputs[name].copy_(value)
        kept = place_guess(prefill, length, self.prompt.rope_delta, guess)
        prefill.enqueue()
        self.prefill, self.state = prefill, DecodeState(CAPACITY)
        start_from_guess(prefill, self.state, ids, kept, stops, BUDGET)
        self.verify = verify_executor(self.target, self.cache, 1, self.taps)
        self.verify.inputs['rope_delta'].fill_(self.prompt.rope_delta)
        self.stats = decode(self.verify, self.state, stops, BUDGET)
        return self.state.generated


@pytest.fixture(scope='module')
def frame():
    return Frame()


@pytest.fixture(scope='module')
def text(frame):
    found = frame.decode(())
    assert len(set(found)) > 3
    return found


@pytest.mark.parametrize('agreed', range(BUDGET + 1))
def test_any_guess_leaves_the_text_as_it_is(frame, text, agreed):
    wrong = [0 if token else 1 for token in text[agreed:]]
    assert frame.decode([*text[:agreed], *wrong]) == text
    assert frame.stats.reused == min(agreed, BUDGET - 1)
    assert frame.stats.iterations == BUDGET - min(agreed + 1, BUDGET)


def test_a_full_match_leaves_nothing_to_do(frame, text):
    at = next(i for i in range(3, BUDGET) if text[i] not in text[:i])
    stop = text[at]
    assert frame.decode(text[:at + 1], stops=(stop,)) == text[:at + 1]
    assert frame.stats.iterations == 0
    assert frame.state.closed
    assert close(frame.verify, frame.state, stop) == (frame.prompt.length + at + 1, 0)


def test_rows_of_a_confirmed_guess_are_those_of_decoding(frame, text):
    frame.decode(())
    length = frame.state.cached
    keys, values = frame.cache.keys.clone(), frame.cache.values.clone()
    taps = frame.taps.rows.clone()
    frame.decode(text)
    assert frame.state.cached == length + 1  # the last token was a verified proposal
    for mine, want in ((frame.cache.keys, keys), (frame.cache.values, values)):
        torch.testing.assert_close(mine[..., :length, :], want[..., :length, :], rtol=0,
                                   atol=2e-5)
    first = frame.prompt.length - 1  # of the last layer only the tail is kept
    torch.testing.assert_close(frame.taps.rows[0, :, :length], taps[0, :, :length], rtol=0,
                               atol=1e-4)
    torch.testing.assert_close(frame.taps.rows[1, :, first:length], taps[1, :, first:length],
                               rtol=0, atol=1e-4)
    assert not frame.taps.rows[1, :, :first].any()


def test_the_tail_of_the_last_layer_is_as_long_as_asked(frame, text):
    whole = {}
    for tail in (0, 1, 7):
        frame.decode(text[:3], tail=tail)
        whole[tail] = frame.taps.rows[1, :, :frame.prompt.length + 3].clone()
    for tail in (1, 7):
        skipped = frame.prompt.length - tail
        assert not whole[tail][:, :skipped].any()
        torch.testing.assert_close(whole[tail][:, skipped:], whole[0][:, skipped:], rtol=0,
                                   atol=1e-4)


def test_a_guessed_image_pad_is_a_word(frame, text):
    """The prompt's features stay where they are, whatever the guess holds."""
    guess = [text[0], PROFILE.tokens.image_pad, text[2]]
    assert frame.decode(guess) == text


def test_a_guess_is_cut_to_the_room(frame, text):
    assert frame.decode(text, room=4) == text
    assert frame.stats.reused == 4
    assert frame.decode(text, room=0) == text
    assert frame.stats.reused == 0


def test_logits_of_the_guess_equal_those_of_single_steps(frame, text):
    frame.decode(text[:5])
    wide = frame.prefill.outputs['logits'][:6].clone()
    length = frame.prompt.length
    for row in range(1, 6):
        frame.verify.inputs['ids'][0] = text[row - 1]
        frame.verify.inputs['start'].fill_(length + row - 1)
        frame.verify.enqueue()
        allowed = slice(0, PROFILE.tokens.forbidden_start)
        torch.testing.assert_close(frame.verify.outputs['logits'][0, allowed],
                                   wide[row, allowed], rtol=0, atol=1e-4)
    assert torch.isinf(wide[:, PROFILE.tokens.forbidden_start:]).all()


def test_an_impossible_guess_length_is_refused(frame, text):
    frame.decode(text, room=3)
    frame.prefill.inputs['guess_length'].fill_(4)
    with pytest.raises(ValueError, match=r'guess_length 4 is outside 0\.\.3'):
        frame.prefill.enqueue()
