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
"""Ids, splitting and persistence of the word-level tokenizer."""

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from rspec_planner.errors import EngineError
from rspec_planner.planner.tokenizer import (
    build_tokenizer,
    INSTRUCTION_TEXT,
    load_tokenizer,
    split_words,
    SYSTEM_TEXT,
)

WORDS = ['cruising straight, brake behind the red car because it is slowing.', 'left', '12']
BUILT = build_tokenizer(WORDS)


@pytest.fixture
def tokenizer():
    return BUILT


def test_ids_do_not_depend_on_word_order(tokenizer):
    other = build_tokenizer(list(reversed(WORDS)) + ['left', 'Left'])
    text = ' '.join(WORDS)
    assert other.encode(text) == tokenizer.encode(text)
    assert other.token_ids == tokenizer.token_ids


def test_rows_are_padded_and_bins_are_forbidden(tokenizer):
    ids = tokenizer.token_ids
    assert tokenizer.vocab_size % 64 == 0
    first = tokenizer.id_of('<i3000>')
    assert ids.traj_token_start + 3000 == first
    assert tokenizer.id_of('<i3999>') == first + 999
    assert (ids.forbidden_start, ids.forbidden_end) == (first, tokenizer.vocab_size)
    words = tokenizer.encode(' '.join(WORDS))
    assert max(words) < first
    assert all(not ids.forbidden_start <= s < ids.forbidden_end for s in ids.stop_ids)


def test_special_ids_are_distinct(tokenizer):
    ids = tokenizer.token_ids
    named = [ids.pad, ids.image_pad, ids.vision_start, ids.vision_end, ids.im_start, ids.im_end,
             ids.cot_start, ids.cot_end, ids.traj_history_start, ids.traj_history,
             ids.traj_history_end, ids.traj_future_start, tokenizer.special('route_start'),
             tokenizer.special('route_end'), tokenizer.unknown_id]
    assert len(set(named)) == len(named)


def test_prompt_text_has_no_unknown_words(tokenizer):
    for text in (SYSTEM_TEXT, INSTRUCTION_TEXT, 'system\n', 'user\n', 'assistant\n'):
        assert tokenizer.unknown_id not in tokenizer.encode(text)


def test_round_trip(tokenizer):
    text = WORDS[0]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode('Brake , LEFT.')) == 'brake, left.'


def test_decode_drops_special_tokens(tokenizer):
    ids = [tokenizer.special('cot_start'), *tokenizer.encode('brake'),
           tokenizer.special('cot_end'), tokenizer.special('traj_future_start')]
    assert tokenizer.decode(ids) == 'brake'


def test_text_cannot_smuggle_special_tokens(tokenizer):
    ids = tokenizer.encode('left <|im_end|><|cot_start|> <i3000> left')
    special = {tokenizer.special('im_end'), tokenizer.special('cot_start')}
    assert not special & set(ids)
    assert max(ids) < tokenizer.token_ids.forbidden_start
    assert ids[0] == ids[-1] != tokenizer.unknown_id


@given(st.text(alphabet=[chr(c) for c in range(32, 127)] + ['\n'], max_size=60))
@settings(max_examples=200, deadline=None)
def test_one_id_per_word(text):
    assert len(BUILT.encode(text)) == len(split_words(text))


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.token_ids == tokenizer.token_ids
    assert loaded.encode('brake <|im_end|>, 12') == tokenizer.encode('brake <|im_end|>, 12')


@pytest.mark.parametrize('content', [None, '{', '{"a": 1}'])
def test_bad_file_is_one_line_naming_it(tmp_path, content):
    if content is not None:
        (tmp_path / 'tokenizer.json').write_text(content)
    with pytest.raises(EngineError) as error:
        load_tokenizer(tmp_path)
    assert 'tokenizer.json' in str(error.value)
    assert '\n' not in str(error.value)
