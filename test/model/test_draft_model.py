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

from dataclasses import replace
import json

from draft_reference import FORBIDDEN, REDUCED, small_draft, small_profile, small_target
import pytest
import torch

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.config import alpamayo_r1, tiny
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import (
    dflash_config,
    dflash_taps,
    DraftConfig,
    DraftRotary,
    eagle3_config,
    eagle3_taps,
)
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.planner.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(['left'])
TINY = tiny(TOKENIZER.token_ids, TOKENIZER.vocab_size)


@pytest.fixture(scope='module')
def target():
    return small_target()


@pytest.mark.parametrize('rotary', ['flat', 'mirror'])
@pytest.mark.parametrize('reduced', [0, 100])
@pytest.mark.parametrize('window', [0, 1, 8])
def test_every_tiny_draft_has_at_most_two_million_weights(rotary, reduced, window):
    over = {'rotary': rotary, 'draft_vocab': reduced, 'window': window}
    with torch.device('meta'):
        drafts = [Dflash(dflash_config(TINY, num_layers=layers, block=block, **over))
                  for layers in (1, 2, 4) for block in (8, 16, 24)]
        drafts += [Dflash(dflash_config(TINY, num_layers=4, correction_rank=32, **over))]
        drafts += [Eagle3(eagle3_config(TINY, block=block, **over)) for block in (8, 16)]
    assert all(0 < draft.num_parameters() <= 2_000_000 for draft in drafts)


def test_parameters_are_the_drafts_own(target):
    draft = small_draft(target, 'dflash', num_layers=1)
    size, heads, middle = 32, 16, 48
    layer = 2 * size * heads * (6 + 2) + 3 * size * middle + 2 * size + 2 * heads
    assert draft.num_parameters() == 3 * size * size + layer + 3 * size
    assert not any('embed_tokens' in name or 'lm_head' in name for name in draft.state_dict())


def test_published_taps():
    assert dflash_taps(36) == (1, 9, 17, 25, 33)
    assert eagle3_taps(36) == (1, 17, 32)
    assert dflash_taps(4) == eagle3_taps(4) == (1, 2, 3)
    assert [dflash_taps(n)[-1] < n for n in range(1, 50)] == [True] * 49
    assert dflash_config(alpamayo_r1()).intermediate_size == 12_288


def test_names():
    assert dflash_config(TINY).name == 'dflash-l2-b16-w8-flat'
    assert eagle3_config(TINY, window=0, draft_vocab=99).name == 'eagle3-b8-wall-flat-rv'
    assert dflash_config(TINY, name='x').name == 'x'
    assert dflash_config(TINY, correction_rank=16).name == 'dflash-l2-b16-w8-flat-c16'


def test_a_configuration_survives_json():
    cfg = eagle3_config(TINY, rotary='mirror')
    assert DraftConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg


@pytest.mark.parametrize('over', [
    {'kind': 'medusa'}, {'rotary': '2d'}, {'block': 1}, {'window': -1}, {'num_layers': 0},
    {'draft_vocab': 10_000_000}, {'taps': (2, 1)}, {'taps': ()}, {'colour': 1},
    {'kind': 'eagle3', 'num_layers': 2}, {'correction_rank': -1},
    {'kind': 'eagle3', 'num_layers': 1, 'correction_rank': 4}])
def test_wrong_configurations_are_refused(over):
    with pytest.raises(ConfigurationError):
        dflash_config(TINY, **over)


def image_and_text(profile):
    """Return flat indexes (S,) and three-axis positions (3, S): 4 text, 3 x 5 image, 4 text."""
    rows, cols = 3, 5
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(cols)).T
    image = torch.cat((torch.zeros(1, rows * cols, dtype=torch.int64), grid)) + 4
    text = torch.arange(4).expand(3, -1)
    positions = torch.cat((text, image, text + 4 + max(rows, cols)), dim=1)
    return torch.arange(positions.shape[1]), positions


def test_one_image_row_differs_on_the_column_pairs_only():
    profile = replace(TINY, text=replace(TINY.text, head_dim=128, mrope_section=(24, 20, 20)))
    index, positions = image_and_text(profile)
    column = torch.tensor([pair % 3 == 2 and pair < 60 for pair in range(64)])
    cos, sin = DraftRotary.tables(dflash_config(profile, rotary='mirror'), index, positions)
    same = ((cos[5] == cos[6]) & (sin[5] == sin[6]))[:64]
    assert torch.equal(same, ~column)
    row = torch.tensor([pair % 3 == 1 and pair < 60 for pair in range(64)])
    assert torch.equal(((cos[5] == cos[10]) & (sin[5] == sin[10]))[:64], ~row)


def test_flat_separates_neighbours_on_every_pair():
    index, positions = image_and_text(TINY)
    cos, sin = DraftRotary.tables(dflash_config(TINY), index, positions)
    assert bool(((cos[5] != cos[6]) | (sin[5] != sin[6])).all())
    angle = 5 * 10_000.0 ** (-2 * 3 / 32)
    torch.testing.assert_close(cos[5, 3], torch.tensor(angle).cos())
    torch.testing.assert_close(sin[5, 3 + 16], torch.tensor(angle).sin())


def test_flat_and_mirror_agree_on_text_alone():
    index = torch.arange(9)
    flat = DraftRotary.tables(dflash_config(TINY), index)
    mirror = DraftRotary.tables(dflash_config(TINY, rotary='mirror'), index, index.expand(3, -1))
    torch.testing.assert_close(flat, mirror)


def test_positions_continue_behind_the_prompt():
    index, prompt = image_and_text(TINY)
    length = prompt.shape[1]
    delta = int(prompt[0, -1]) + 1 - length
    noise = torch.full((3, 6), 77)
    found = DraftRotary.sequence_positions(torch.cat((prompt, noise), dim=1), length, delta, 40)
    assert torch.equal(found[:, :length], prompt)
    assert torch.equal(found[:, length:], (torch.arange(length, 40) + delta).expand(3, -1))
    pair = DraftRotary.sequence_positions(
        torch.stack((prompt, prompt)), torch.tensor([length, 4]), torch.tensor([delta, 2]), 30)
    assert torch.equal(pair[0], found[:, :30])
    assert torch.equal(pair[1, :, 4:], (torch.arange(4, 30) + 2).expand(3, -1))


@pytest.mark.parametrize('name, value', [
    ('rope_theta', 10_000.0), ('hidden_size', 64), ('vocab_size', 41),
    ('mrope_section', (2, 3, 3))])
def test_another_target_is_refused(target, name, value):
    from rspec_planner.model.text import TextDecoder
    draft = Dflash(dflash_config(small_profile(), rotary='mirror'))
    other = TextDecoder(replace(target.cfg.text, **{name: value}))
    with pytest.raises(ConfigurationError, match=name):
        draft.bind(other, target.cfg.tokens)


def test_an_unbound_draft_says_what_to_do():
    with pytest.raises(EngineError, match='bind'):
        Dflash(dflash_config(small_profile())).embed(torch.tensor([1]))


@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
def test_heads(target, kind):
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 32)
    whole = small_draft(target, kind).head(hidden)
    full = target.text.logits(hidden)
    allowed = torch.ones(40, dtype=torch.bool)
    allowed[FORBIDDEN[0]:FORBIDDEN[1]] = False
    torch.testing.assert_close(whole[..., allowed], full[..., allowed])
    assert bool((whole[..., ~allowed] == float('-inf')).all())
    reduced = small_draft(target, kind, reduced=True)
    torch.testing.assert_close(reduced.head(hidden), full[..., list(REDUCED)])
    assert torch.equal(reduced.target_ids(torch.arange(len(REDUCED))), torch.tensor(REDUCED))


def test_draft_index_inverts_target_ids(target):
    reduced = small_draft(target, 'dflash', reduced=True)
    found = reduced.draft_index(torch.arange(40))
    for token in range(40):
        assert found[token] == (REDUCED.index(token) if token in REDUCED else -1)
    whole = small_draft(target, 'dflash')
    assert torch.equal(whole.draft_index(torch.arange(40)), torch.arange(40))


@pytest.mark.parametrize('ids', [(1, 2), (3, 2, 1), (1, 1, 2), (-1, 2, 3), (1, 2, 40),
                                 (1, 2, FORBIDDEN[0])])
def test_wrong_vocabularies_are_refused(target, ids):
    draft = Dflash(dflash_config(target.cfg, draft_vocab=3)).bind(target.text, target.cfg.tokens)
    with pytest.raises(ConfigurationError):
        draft.set_vocabulary(ids)


def test_loading_a_state_moves_the_head(target):
    source = small_draft(target, 'eagle3', reduced=True)
    fresh = Eagle3(source.cfg).bind(target.text, target.cfg.tokens)
    fresh.load_state_dict(source.state_dict())
    hidden = torch.randn(3, 32)
    assert torch.equal(fresh.head(hidden), source.head(hidden))
