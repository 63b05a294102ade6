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
"""Which forms of a draft are compared, and that a wider chain is the same draft."""

from rspec_planner.evaluate.tree_runs import Variant, variant_pairs, variants, with_block
from rspec_planner.model.draft import dflash_config, eagle3_config
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.train.profiles import new_target

PROFILE = new_target(smoke=True)[0].cfg
DRAFTS = {'corrected': dflash_config(PROFILE, correction_rank=4),
          'block': dflash_config(PROFILE, block=8), 'other': dflash_config(PROFILE, block=4),
          'chain': eagle3_config(PROFILE, block=16), 'second': eagle3_config(PROFILE)}


def test_the_first_draft_of_each_kind_is_varied_and_no_chain_is_made_twice():
    found = {variant.name: variant for variant in variants(DRAFTS, (16, 32, 64))}
    assert list(found) == [
        'block+tree16', 'block+tree32', 'block+tree64', 'chain+chain32',
        'chain+tree16', 'chain+branch16', 'chain+tree32', 'chain+branch32',
        'chain+tree64', 'chain+branch64']
    assert found['block+tree64'].block == 8  # a block reaches no further
    assert [found[f'chain+branch{n}'].block for n in (16, 32, 64)] == [16, 32, 32]
    assert variants(DRAFTS, ()) == []
    assert {v.base for v in variants({'block': DRAFTS['block']}, (8,))} == {'block'}


def test_trees_are_compared_with_the_chain_of_their_reach():
    pairs = variant_pairs(variants(DRAFTS, (16, 64)), DRAFTS)
    assert pairs == [
        ('block+tree16', 'block'), ('block+tree64', 'block'),
        ('chain+tree16', 'chain'), ('chain+branch16', 'chain'),
        ('chain+branch16', 'chain+tree16'), ('chain+tree64', 'chain+chain32'),
        ('chain+branch64', 'chain+chain32'), ('chain+branch64', 'chain+tree64')]
    names = {variant.name for variant in variants(DRAFTS, (16, 64))} | set(DRAFTS)
    assert {name for pair in pairs for name in pair} <= names
    assert Variant('a', 'branch', 8, 4).name == 'a+branch8'


def test_another_block_shares_the_weights_and_leaves_the_draft_as_it_was():
    draft = Eagle3(DRAFTS['chain'])
    wider = with_block(draft, 32)
    assert (draft.cfg.block, wider.cfg.block) == (16, 32)
    assert wider.fc.weight is draft.fc.weight
