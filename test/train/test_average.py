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
"""The mean of two targets' weights."""

import json

from draft_toys import toy_target
import pytest
import torch

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.checkpoint import read_manifest, read_weights, replace_config, save_target
from rspec_planner.model.draft_checkpoint import target_digest
from rspec_planner.train.average import average, main


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    made = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f'target{seed}')
        save_target(toy_target(seed), folder, {'kind': 'target', 'steps': seed, 'other': 1},
                    extra_files={'tokenizer.json': b'{"seed": %d}' % seed})
        replace_config(folder, caution={'enter_below': 0.5, 'leave_above': 0.6})
        made.append(folder)
    return made


@pytest.mark.parametrize('share', [0.0, 0.35, 1.0])
def test_every_weight_lies_that_far_between_both(folders, tmp_path, share):
    average(*folders, share, tmp_path)
    before, after = (read_weights(folder, dtype=torch.float64)[0] for folder in folders)
    found, _ = read_weights(tmp_path, dtype=torch.float64)
    assert found.keys() == after.keys()
    for name, tensor in found.items():
        wanted = ((1 - share) * before[name] + share * after[name]).half().double()
        assert torch.equal(tensor, wanted), name
    assert any(not torch.equal(before[name], after[name]) for name in after)


def test_the_manifest_tells_where_it_comes_from_and_no_caution_is_kept(folders, tmp_path):
    manifest = average(*folders, 0.35, tmp_path)
    assert manifest == read_manifest(tmp_path)
    assert manifest['kind'] == 'target' and 'steps' not in manifest and 'other' not in manifest
    told = manifest['average']
    assert told['share'] == 0.35
    for name, folder, steps in zip(('first', 'second'), folders, (1, 2)):
        assert told[name] == {'target': target_digest(folder), 'steps': steps}
    _, config = read_weights(tmp_path)
    assert config['caution'] is None
    assert json.loads((tmp_path / 'tokenizer.json').read_text()) == {'seed': 2}


@pytest.mark.parametrize('share', [-0.1, 1.1, float('nan')])
def test_a_share_beyond_both_is_refused(folders, tmp_path, share):
    with pytest.raises(ConfigurationError, match='choose 0'):
        average(*folders, share, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_other_tensors_and_no_checkpoint_are_refused_in_one_line(folders, tmp_path, capsys):
    save_target(toy_target(3, layers=2), tmp_path / 'other', {})
    with pytest.raises(EngineError, match='lacks tensor'):
        average(tmp_path / 'other', folders[1], 0.5, tmp_path / 'out')
    assert main([str(tmp_path / 'none'), str(folders[1]), '--share', '0.5', '--out',
                 str(tmp_path / 'out')]) == 1
    assert capsys.readouterr().err.count('\n') == 1
    assert not (tmp_path / 'out').exists()
    assert main([*map(str, folders), '--share', '0.5', '--out', str(tmp_path / 'out')]) == 0
    assert json.loads(capsys.readouterr().out) == {'share': 0.5, 'out': str(tmp_path / 'out')}
