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
"""From a bag and a folder of the released layout to a draft that the planner uses."""

import shutil

import pytest
from qwen_folder import write_tokenizer_folder
from safetensors.torch import load_file, save_file
from upstream_rig import released_profile

from rspec_planner.errors import EngineError
from rspec_planner.evaluate.synthetic_checkpoint import write_checkpoint
from rspec_planner.loading import warm_up_observation
from rspec_planner.offline_observations import bag_observations
from rspec_planner.planner.pipeline import Planner
from rspec_planner.train.cache_parts import load_cache, part_folders
from rspec_planner.train.cache_target import cache_target
from rspec_planner.train.draft import train_draft
from rspec_planner.world.drive import Drive
from rspec_planner.world.record import record_world, RecordOptions
from rspec_planner.world.rig import Rig

TOKENS = 6


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp('released')
    write_checkpoint(made, released_profile(), 'alpamayo_r1', shards=2)
    write_tokenizer_folder(made / 'tokenizer')
    return made


@pytest.fixture(scope='module')
def bag(tmp_path_factory):
    path = tmp_path_factory.mktemp('bag') / 'drive.mcap'
    rig = Rig(width=576, height=320)
    record_world(path, Drive(('crosswalk',), 1, rig=rig), 2.4, RecordOptions(encoding='jpeg'),
                 rig=rig)
    return path


def test_a_draft_from_a_bag_serves_the_released_folder(folder, bag, tmp_path):
    made = cache_target(tmp_path / 'cache', target=str(folder), bag=(bag,),
                        bag_source=bag_observations, device='cpu', max_tokens=TOKENS, limit=6,
                        val_share=0.5)
    assert made['clips'] == 6 and not made['synthetic']
    cache = load_cache(tmp_path / 'cache')
    assert cache.profile.name == 'alpamayo-r1'
    assert not bool(cache.finished.any())  # noise never says that it is done
    _end_texts(tmp_path / 'cache', cache)
    trained = train_draft('dflash', None, tmp_path / 'draft', target=str(folder),
                          cache=tmp_path / 'cache', epochs=1.0, batch_clips=2, block=4,
                          window=4, keep_state=False)
    plain = Planner.load(folder, draft=None, max_reasoning_tokens=TOKENS)
    seen = warm_up_observation(plain.profile)
    alone = plain.plan(seen).reasoning
    shutil.copytree(trained['checkpoint'], folder / 'drafts' / 'default')
    drafted = Planner.load(folder, draft='default', max_reasoning_tokens=TOKENS)
    assert drafted.draft_name == trained['name'] == 'dflash-l2-b4-w4-flat'
    with_draft = drafted.plan(seen).reasoning
    assert with_draft.token_ids == alone.token_ids
    assert (with_draft.stats.block, alone.stats.block) == (4, 1)


def _end_texts(folder, cache):
    """Let every text end where it was cut, and put one clip into the training split."""
    part = part_folders(folder)[0]
    ids = load_file(part / 'ids.safetensors')['ids']
    ids[:, -1] = cache.profile.tokens.traj_future_start
    save_file({'ids': ids}, part / 'ids.safetensors')
    meta = part / 'cache.json'
    meta.write_text(meta.read_text().replace('"val"', '"train"').replace('"train"', '"val"', 1))


def test_a_draft_of_another_folder_is_refused(folder, bag, tmp_path):
    other = tmp_path / 'other'
    write_checkpoint(other, released_profile(), 'alpamayo_r1', shards=2, seed=5)
    write_tokenizer_folder(other / 'tokenizer')
    cache_target(tmp_path / 'cache', target=str(folder), bag=(bag,),
                 bag_source=bag_observations, device='cpu', max_tokens=2, limit=1)
    with pytest.raises(EngineError, match='build the cache again'):
        train_draft('dflash', None, tmp_path / 'draft', target=str(other),
                    cache=tmp_path / 'cache')
