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

from draft_reference import REDUCED, small_draft, small_profile, small_target
import pytest
from safetensors.torch import load_file
import torch

from rspec_planner.engine.draft_executor import draft_executor
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.checkpoint import read_weights, save_target, write_weights
from rspec_planner.model.draft_checkpoint import (
    build_draft,
    check_target,
    load_draft,
    save_draft,
    target_digest,
)
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target


@pytest.fixture(scope='module')
def target():
    return small_target()


@pytest.fixture
def home(target, tmp_path):
    """Return the folder of the target."""
    save_target(target, tmp_path / 'target', {'seed': 0})
    return tmp_path / 'target'


def saved(draft, home):
    folder = home.parent / draft.cfg.name
    save_draft(draft, folder, {'target': target_digest(home), 'L': 5.0}, torch.float32)
    return folder


def proposals(draft, target):
    generator = torch.Generator().manual_seed(0)
    taps = TapBuffer(draft.cfg.taps, 1, 20, 32)
    taps.rows.normal_(generator=generator)
    tokens = torch.randint(0, 17, (20,), generator=generator)
    executor = draft_executor(draft, target, tokens, taps, torch.zeros((3, 20)).long())
    executor.inputs['start'].fill_(15)
    executor.inputs['length'].fill_(12)
    executor.enqueue()
    return executor.outputs


@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
@pytest.mark.parametrize('reduced', [False, True])
def test_a_draft_survives_its_folder(target, home, kind, reduced):
    draft = small_draft(target, kind, seed=4, reduced=reduced, block=4)
    loaded = load_draft(saved(draft, home), target, checkpoint=home)
    assert loaded.cfg == draft.cfg
    assert not loaded.training
    assert not any(weight.requires_grad for weight in loaded.parameters())
    state = loaded.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in draft.state_dict().items())
    for name, value in proposals(draft, target).items():
        assert torch.equal(proposals(loaded, target)[name], value)


def test_ids_beyond_half_precision_survive(target, home):
    draft = small_draft(target, 'dflash', reduced=True)
    folder = saved(draft, home)
    config = json.loads((folder / 'config.json').read_text())
    assert config['draft_ids'] == list(REDUCED)
    names = {name for shard in folder.glob('*.safetensors') for name in load_file(shard)}
    assert 'draft_ids' not in names and 'fc.weight' in names


def test_the_digest_follows_the_weights_alone(target, home):
    before = target_digest(home)
    manifest = json.loads((home / 'manifest.json').read_text())
    (home / 'manifest.json').write_text(json.dumps({**manifest, 'note': 'measured again'}))
    assert target_digest(home) == before
    save_target(small_target(seed=1), home, {'seed': 0})
    assert target_digest(home) != before


def test_a_draft_of_other_weights_is_refused(target, home):
    folder = saved(small_draft(target, 'eagle3'), home)
    digest = target_digest(home)
    check_target(folder, digest)
    save_target(small_target(seed=1), home, {'seed': 0})
    with pytest.raises(EngineError, match='trained for target') as refusal:
        load_draft(folder, target, checkpoint=home)
    message = str(refusal.value)
    assert digest[:12] in message and target_digest(home)[:12] in message and '\n' not in message


def test_a_draft_of_another_shape_is_refused(target, home):
    folder = saved(small_draft(target, 'dflash'), home)
    profile = small_profile()
    other = Target(replace(profile, text=replace(profile.text, rope_theta=10_000.0)))
    with pytest.raises(EngineError, match='rope_theta'):
        load_draft(folder, other)


def test_a_manifest_without_a_target_is_refused(target, tmp_path):
    with pytest.raises(ConfigurationError, match='target_digest'):
        save_draft(small_draft(target, 'dflash'), tmp_path / 'x', {})


@pytest.mark.parametrize('change', [
    {'draft': {'kind': 'dflash'}}, {'draft': None}, {'draft_ids': [1, 2]}])
def test_a_damaged_folder_is_refused(target, home, change):
    draft = small_draft(target, 'dflash', reduced=True)
    folder = saved(draft, home)
    tensors, config = read_weights(folder)
    write_weights(tensors, {**config, **change}, folder, {'target': target_digest(home)})
    with pytest.raises(EngineError):
        load_draft(folder, target, checkpoint=home)


def test_build_draft_follows_the_kind(target):
    for kind in ('dflash', 'eagle3'):
        cfg = small_draft(target, kind).cfg
        assert build_draft(cfg).cfg.kind == kind
        assert type(build_draft(cfg)).__name__.lower() == kind
