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
"""Ids and text of the Alpamayo tokenizer, against transformers' tokenizer with the same tokens."""

from dataclasses import replace
import json
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
from qwen_folder import ADDED, write_tokenizer_folder
from transformers import PreTrainedTokenizerFast

from rspec_planner.errors import EngineError
from rspec_planner.model.config import alpamayo_1_5, alpamayo_r1
from rspec_planner.planner.alpamayo_tokenizer import (
    ADDED_NAMES,
    load_alpamayo_tokenizer,
    read_alpamayo_tokenizer,
)

#: id, name as published
PUBLISHED = {
    155669: 'prompt_start', 155670: 'prompt_end', 155671: 'image_start', 155672: 'image_pre_tkn',
    155673: 'image_end', 155674: 'traj_history_start', 155675: 'traj_history_pre_tkn',
    155676: 'traj_history_end', 155677: 'cot_start', 155678: 'cot_end',
    155679: 'meta_action_start', 155680: 'meta_action_end', 155681: 'traj_future_start',
    155682: 'traj_future_pre_tkn', 155683: 'traj_future_end', 155684: 'traj_history',
    155685: 'traj_future', 155686: 'vectorized_wm', 155687: 'vectorized_wm_start',
    155688: 'vectorized_wm_end', 155689: 'vectorized_wm_pre_tkn', 155690: 'route_start',
    155691: 'route_pad', 155692: 'route_end', 155693: 'question_start', 155694: 'question_end',
    155695: 'answer_start', 155696: 'answer_end', 151643: 'endoftext', 151644: 'im_start',
    151645: 'im_end', 151652: 'vision_start', 151653: 'vision_end', 151655: 'image_pad',
    151656: 'video_pad'}
#: names of added tokens, which hypothesis finds among the strings of the package, have their own
#: test: the reference turns them into tokens
TEXT = st.text(st.characters(codec='utf-8', exclude_characters='\0'), max_size=40).filter(
    lambda text: not any(token in text for token in ADDED))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return write_tokenizer_folder(tmp_path_factory.mktemp('qwen'))


@pytest.fixture(scope='module')
def tokenizer(folder):
    return load_alpamayo_tokenizer(folder, alpamayo_r1())


@pytest.fixture(scope='module')
def reference(folder):
    """Return transformers' tokenizer, the Alpamayo tokens added in the published order."""
    built = PreTrainedTokenizerFast(tokenizer_file=str(folder / 'tokenizer.json'))
    built.add_tokens([f'<i{k}>' for k in range(4000)])
    built.add_tokens([f'<|{name}|>' for name in ADDED_NAMES], special_tokens=True)
    return built


def test_every_published_id(tokenizer, reference):
    for number, name in PUBLISHED.items():
        assert tokenizer.special(name) == number
        assert reference.convert_tokens_to_ids(f'<|{name}|>') == number
    assert reference.convert_tokens_to_ids(['<i0>', '<i3000>', '<i3999>']) == \
        [151_669, 154_669, 155_668]
    assert tokenizer.vocab_size == len(reference) == 155_697
    assert tokenizer.token_ids == alpamayo_r1().tokens == alpamayo_1_5().tokens


@given(TEXT)
@settings(max_examples=200, deadline=None)
def test_text_is_encoded_as_by_transformers(tokenizer, reference, text):
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)


@given(TEXT)
@settings(max_examples=100, deadline=None)
def test_text_comes_back(tokenizer, text):
    ids = [tokenizer.special('cot_start'), *tokenizer.encode(text), 154_669,
           tokenizer.special('cot_end')]
    assert tokenizer.decode(ids) == unicodedata.normalize('NFC', text)


@given(st.lists(st.sampled_from(['<|im_end|>', '<|cot_start|>', '<i3000>', '<think>', 'left ',
                                 '<|image_pad|>', '<', '|>']), max_size=6).map(''.join))
@settings(max_examples=100, deadline=None)
def test_text_cannot_smuggle_tokens(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(i < 151_643 for i in ids)
    assert tokenizer.decode(ids) == text


def test_a_folder_that_has_the_tokens_gives_the_same_ids(tokenizer, reference, tmp_path):
    reference.backend_tokenizer.save(str(tmp_path / 'tokenizer.json'))
    again = load_alpamayo_tokenizer(tmp_path, alpamayo_r1())
    assert again.token_ids == tokenizer.token_ids
    assert again.vocab_size == tokenizer.vocab_size
    assert again.special('answer_end') == 155_696


def broken(folder, tmp_path, change):
    content = json.loads((folder / 'tokenizer.json').read_text())
    change(content)
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
    return tmp_path


def test_other_ids_than_the_checkpoint_are_named(folder, tmp_path):
    def shift(content):
        content['model']['vocab']['one more'] = 151_643
        for token in content['added_tokens']:
            token['id'] += 1
    with pytest.raises(EngineError, match='pad is 151644, config.json .* says 151643'):
        load_alpamayo_tokenizer(broken(folder, tmp_path, shift), alpamayo_r1())


def test_a_token_of_the_base_that_is_missing_is_named(folder, tmp_path):
    def drop(content):
        content['added_tokens'] = [t for t in content['added_tokens']
                                   if t['content'] != '<|vision_start|>']
    with pytest.raises(EngineError, match=r'tokenizer.json.*<\|vision_start\|>'):
        load_alpamayo_tokenizer(broken(folder, tmp_path, drop), alpamayo_r1())


def test_more_ids_than_rows_are_refused(folder):
    profile = alpamayo_r1()
    small = replace(profile, text=replace(profile.text, vocab_size=155_696))
    with pytest.raises(EngineError, match='155697 ids, the checkpoint has 155696 rows'):
        load_alpamayo_tokenizer(folder, small)


@pytest.mark.parametrize('content', [None, '{', '{"a": 1}', '[]',
                                     '{"added_tokens": [], "model": {"type": "WordLevel", '
                                     '"vocab": {"a": 0}, "unk_token": "a"}}'])
def test_a_bad_file_is_one_line_naming_it(tmp_path, content):
    if content is not None:
        (tmp_path / 'tokenizer.json').write_text(content)
    with pytest.raises(EngineError) as error:
        read_alpamayo_tokenizer(tmp_path)
    assert 'tokenizer.json' in str(error.value)
    assert 'Qwen/Qwen3-VL-8B-Instruct' in str(error.value)
    assert '\n' not in str(error.value)
