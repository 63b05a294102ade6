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
"""The prompt, token by token, and the tokenizers."""

from dataclasses import replace
import json

from autovla_reference import small_config
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rspec_planner.errors import ConfigurationError, EngineError, InputError
from rspec_planner.model.autovla_config import autovla, autovla_tiny
from rspec_planner.planner.action_tokenizer import (
    action_name,
    ActionTokenizer,
    build_action_tokenizer,
    load_action_tokenizer,
    SPECIALS,
)
from rspec_planner.planner.autovla_prompt import (
    build_prompt,
    DEFAULT_WORDING,
    VehicleState,
    video_positions,
    Wording,
)


def byte_backend():
    """A byte-level tokenizer as Qwen's is, without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS.values()))
    return backend


@pytest.fixture(scope='module')
def codec():
    return ActionTokenizer(byte_backend(), 64)


def whole_text(cfg, codec, ids):
    """The chat text of ids, special tokens by name."""
    names = {getattr(codec.tokens, field): name for field, name in SPECIALS.items()}
    text, run = '', []
    for token in [*ids, None]:
        if token in names or token is None:
            text += codec.decode(run) + names.get(token, '')
            run = []
        else:
            run.append(token)
    pads = SPECIALS['video_pad'] * (cfg.slots * cfg.tokens_per_image)
    return text.replace(pads, '[video]')


def test_the_prompt_is_the_chat_text(codec):
    cfg = replace(autovla_tiny(codec.tokens))
    wording = Wording('SYSTEM line.', 'Three cameras.', ('First:', 'Second:', 'Third:'),
                      'At {velocity} m/s and {acceleration} m/s²; {instruction}.')
    prompt = build_prompt(cfg, codec, wording, VehicleState(3.14159, -0.5, ' Turn LEFT '))
    assert whole_text(cfg, codec, prompt.token_ids.tolist()) == (
        '<|im_start|>system\nSYSTEM line.<|im_end|>\n<|im_start|>user\nThree cameras.'
        'First:Video 1: <|vision_start|>[video]<|vision_end|>'
        'Second:Video 2: <|vision_start|>[video]<|vision_end|>'
        'Third:Video 3: <|vision_start|>[video]<|vision_end|>'
        'At 3.142 m/s and -0.500 m/s²; turn left.<|im_end|>\n<|im_start|>assistant\n')
    assert prompt.length == len(prompt.token_ids) == prompt.positions.shape[1]


def test_positions_are_those_of_the_layout(codec):
    cfg = autovla_tiny(codec.tokens)
    prompt = build_prompt(cfg, codec, DEFAULT_WORDING, VehicleState(1.0, 0.0))
    video = prompt.token_ids == cfg.tokens.video_pad
    edges = np.flatnonzero(np.diff(np.r_[0, video.astype(int), 0]))
    runs = np.diff(np.r_[0, edges, prompt.length])[::2]
    positions, delta = video_positions(cfg, runs.tolist())
    assert np.array_equal(positions, prompt.positions) and delta == prompt.rope_delta
    assert int(video.sum()) == cfg.num_images * cfg.tokens_per_image


@pytest.mark.parametrize(('state', 'message'), [
    (VehicleState(float('nan'), 0.0), 'velocity nan'),
    (VehicleState(1.0, float('inf')), 'acceleration inf'),
    (VehicleState(1.0, 0.0, 'left<|im_end|>'), 'without <'),
    (VehicleState(1.0, 0.0, 'left <action_3>'), 'without <'),
    (VehicleState(1.0, 0.0, 'x' * 201), 'at most 200'),
    (VehicleState(1.0, 0.0, 'go\nleft'), 'printable')])
def test_what_cannot_be_said_is_refused(codec, state, message):
    cfg = autovla_tiny(codec.tokens)
    with pytest.raises(InputError, match=message):
        build_prompt(cfg, codec, DEFAULT_WORDING, state)


def test_an_instruction_fills_no_placeholder(codec):
    state = VehicleState(1.0, 2.0, '{velocity}')
    assert state.sentence('{instruction}') == '{velocity}'


def test_wordings(tmp_path, codec):
    with pytest.raises(ConfigurationError, match='no wording'):
        Wording.read(tmp_path)
    path = tmp_path / 'wording.json'
    good = {'system': 's', 'introduction': 'i', 'videos': ['a', 'b', 'c'], 'state': 't'}
    path.write_text(json.dumps(good))
    assert Wording.read(tmp_path) == Wording('s', 'i', ('a', 'b', 'c'), 't')
    for bad in ({**good, 'more': 1}, {**good, 'videos': 3}, {**good, 'state': 7}, [], 'x'):
        path.write_text(json.dumps(bad))
        with pytest.raises(ConfigurationError, match='wording.json'):
            Wording.read(tmp_path)
    with pytest.raises(ConfigurationError, match='3 videos, the profile 2'):
        build_prompt(small_config(), codec, DEFAULT_WORDING, VehicleState(1.0, 0.0))


def test_actions_are_appended_to_a_tokenizer_that_lacks_them(tmp_path):
    backend = byte_backend()
    size = backend.get_vocab_size()
    codec = ActionTokenizer(backend, 64)
    assert codec.tokens.action_start == size and codec.tokens.action_end == size + 64
    assert codec.encode('<action_7><action_63>') == [size + 7, size + 63]
    codec.save(tmp_path)
    again = load_action_tokenizer(tmp_path, 64)
    assert again.tokens == codec.tokens
    assert again.encode('now <action_0>') == codec.encode('now <action_0>')
    with pytest.raises(EngineError, match='must be the last entries'):
        load_action_tokenizer(tmp_path, 63)
    with pytest.raises(EngineError, match='file is missing'):
        load_action_tokenizer(tmp_path / 'x', 64)
    (tmp_path / 'tokenizer.json').write_text('{}')
    with pytest.raises(EngineError, match='not a tokenizer file'):
        load_action_tokenizer(tmp_path, 64)


def test_special_tokens_are_no_text(codec):
    ids = codec.encode('a<|im_end|>b')
    assert codec.tokens.im_end not in ids
    assert codec.decode(ids) == 'a<|im_end|>b'
    assert codec.decode([codec.tokens.im_end, *codec.encode('x')]) == 'x'


def test_the_tokenizer_of_words():
    codec = build_action_tokenizer(['Yield to the cross-traffic; stop.'], 64)
    assert codec.tokens.num_actions == 64
    again = build_action_tokenizer(['stop. to the Yield cross-traffic;'], 64)
    assert again.tokens == codec.tokens
    ids = codec.encode('<think>\nYield to the cross-traffic.\n</think>')
    assert len(ids) == 9 and codec.encode('unheard') == codec.encode('<unk>')
    text = codec.decode(ids)
    assert text.split() == ['<think>', 'Yield', 'to', 'the', 'cross-traffic', '.', '</think>']
    assert codec.encode(''.join(map(action_name, (1, 63)))) == [
        codec.tokens.action_start + 1, codec.tokens.action_start + 63]
    cfg = autovla_tiny(codec.tokens)
    prompt = build_prompt(cfg, codec, DEFAULT_WORDING, VehicleState(12.5, 0.25, 'go straight'))
    unknown = codec.encode('<unk>')[0]
    assert int((prompt.token_ids == unknown).sum()) == 2  # 'go' and 'straight'


def test_full_profile_ids_are_those_of_the_released_tokenizer():
    tokens = autovla().tokens
    assert tokens.action_start == 151_665  # entries of Qwen2.5-VL's tokenizer
    assert tokens.stop_ids == (151_645, 151_643)
    assert tokens.forbidden_start == tokens.forbidden_end == tokens.action_end == 153_713
