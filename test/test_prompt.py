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
"""Prompt order, positions and the visual share."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from rspec_planner.errors import InputError
from rspec_planner.model.config import tiny
from rspec_planner.planner.prompt import (
    build_prompt,
    max_prompt_length,
    MAX_ROUTE_TOKENS,
    segment_positions,
    visual_mask,
)
from rspec_planner.planner.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(['turn left at the junction', 'brake because'])
PROFILE = tiny(TOKENIZER.token_ids, TOKENIZER.vocab_size)
NAVIGATION = 'Turn left at the junction'


def poses(speed=10.0):
    result = np.tile(np.eye(4), (16, 1, 1))
    result[:, 0, 3] = speed * np.arange(-15, 1) * 0.1
    return result


def test_r1_layout_has_the_published_positions():
    segments = [17, *[1, (10, 18), 1] * 16, 126 - 17 - 32]
    positions, rope_delta = segment_positions(segments)
    assert positions.shape == (3, 3006)
    assert rope_delta == -2592
    assert positions[:, -1].tolist() == [413, 413, 413]


def test_image_positions_follow_rows_and_columns():
    positions, _ = segment_positions([2, (2, 3), 1])
    assert positions[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5]
    assert positions[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5]


@given(st.lists(st.one_of(st.integers(1, 9),
                          st.tuples(st.integers(1, 5), st.integers(1, 5))), min_size=1))
@settings(max_examples=100, deadline=None)
def test_rope_delta_continues_the_positions(segments):
    positions, rope_delta = segment_positions([*segments, 1])
    length = positions.shape[1]
    assert positions[:, -1].tolist() == [length - 1 + rope_delta] * 3
    used = sum(s if isinstance(s, int) else max(s) for s in segments)
    assert positions[0, -1] == used


def test_pieces_come_in_order():
    prompt = build_prompt(PROFILE, TOKENIZER, poses())
    t = PROFILE.tokens
    ids = prompt.token_ids
    assert prompt.length == len(ids) == prompt.positions.shape[1]
    assert ids[0] == t.im_start
    assert ids[-1] == t.cot_start
    assert TOKENIZER.decode(ids[:15]) == \
        'system you are a driving assistant that generates safe and accurate actions.'
    images = visual_mask(PROFILE, ids)
    assert images.sum() == 16 * 72
    starts = np.flatnonzero(ids == t.vision_start)
    assert len(starts) == 16
    assert all(ids[s + 1:s + 73].tolist() == [t.image_pad] * 72 and ids[s + 73] == t.vision_end
               for s in starts)
    first = int(np.flatnonzero(ids == t.traj_history_start)[0])
    assert first == starts[-1] + 74
    bins = ids[first + 1:first + 49]
    assert (bins - TOKENIZER.id_of('<i3000>'))[:6].tolist() == [0, 500, 500, 624, 500, 500]
    assert ids[first + 49] == t.traj_history_end
    assert t.traj_history not in ids
    assert TOKENIZER.unknown_id not in ids


def test_visual_tokens_are_nine_tenths():
    for text in ('', NAVIGATION):
        prompt = build_prompt(PROFILE, TOKENIZER, poses(), text)
        assert visual_mask(PROFILE, prompt.token_ids).sum() / prompt.length >= 0.9


def test_route_block_only_with_text():
    plain = build_prompt(PROFILE, TOKENIZER, poses()).token_ids
    blank = build_prompt(PROFILE, TOKENIZER, poses(), ' \n').token_ids
    routed = build_prompt(PROFILE, TOKENIZER, poses(), NAVIGATION).token_ids
    assert np.array_equal(plain, blank)
    end = int(np.flatnonzero(routed == PROFILE.tokens.traj_history_end)[0])
    block = [TOKENIZER.special('route_start'), *TOKENIZER.encode(NAVIGATION),
             TOKENIZER.special('route_end')]
    assert routed[end + 1:end + 1 + len(block)].tolist() == block
    assert np.array_equal(np.delete(routed, np.s_[end + 1:end + 1 + len(block)]), plain)


def test_positions_of_the_built_prompt():
    prompt = build_prompt(PROFILE, TOKENIZER, poses(), NAVIGATION)
    assert prompt.rope_delta == 16 * (12 - 72)
    assert prompt.positions[:, -1].tolist() == [prompt.length - 1 + prompt.rope_delta] * 3
    start = int(np.flatnonzero(prompt.token_ids == PROFILE.tokens.image_pad)[0])
    image = prompt.positions[:, start:start + 72] - start
    assert image[0].max() == 0
    assert image[1].reshape(6, 12)[:, 0].tolist() == list(range(6))
    assert image[2].reshape(6, 12)[0].tolist() == list(range(12))


def test_history_of_wrong_length_is_named():
    with pytest.raises(InputError, match='ego_poses'):
        build_prompt(PROFILE, TOKENIZER, poses()[:10])


def test_longest_prompt_is_known():
    longest = build_prompt(PROFILE, TOKENIZER, poses(), 'left ' * MAX_ROUTE_TOKENS)
    assert longest.length == max_prompt_length(PROFILE, TOKENIZER)
    with pytest.raises(InputError, match='65 tokens'):
        build_prompt(PROFILE, TOKENIZER, poses(), 'left ' * (MAX_ROUTE_TOKENS + 1))
