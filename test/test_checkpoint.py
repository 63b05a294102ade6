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
import hashlib
import json

from model_reference import small_target
import pytest
from safetensors.torch import load_file, save_file
import torch

from rspec_planner.errors import EngineError
from rspec_planner.model import checkpoint
from rspec_planner.model.checkpoint import load_target, read_files, read_manifest, save_target
from rspec_planner.model.config import tiny, TokenIds
from rspec_planner.model.target import Target


@pytest.fixture
def folder(tmp_path):
    save_target(small_target(), tmp_path, {'data_seed': 7}, extra_files={'tokenizer.json': b'{}'})
    return tmp_path


def fails(folder, *parts: str) -> None:
    """Loading must fail in one line that holds all parts and a remedy."""
    with pytest.raises(EngineError) as caught:
        load_target(folder)
    line = str(caught.value)
    assert '\n' not in line
    for part in (*parts, ': '):
        assert part in line, line


def vouch(folder, name: str) -> None:
    """Make the manifest agree with a file that a test has changed."""
    path = folder / 'manifest.json'
    manifest = json.loads(path.read_text())
    manifest['files'][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))


def rewrite(folder, change) -> None:
    """Change the tensors of the only shard and keep the manifest honest."""
    [path] = folder.glob('*.safetensors')
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    vouch(folder, path.name)


def test_round_trip_in_half_precision(folder):
    target, loaded = small_target(), load_target(folder)
    assert loaded.cfg == target.cfg and not loaded.training
    for name, weight in target.state_dict().items():
        assert loaded.state_dict()[name].dtype == torch.float32
        torch.testing.assert_close(loaded.state_dict()[name], weight.half().float(),
                                   rtol=0, atol=0)
    assert torch.equal(loaded.expert.action_in_proj.sinus[0].freqs,
                       target.expert.action_in_proj.sinus[0].freqs)
    assert read_manifest(folder)['data_seed'] == 7
    assert 'tokenizer.json' in read_manifest(folder)['files']


def test_saving_what_was_loaded_changes_no_bit(folder, tmp_path):
    save_target(load_target(folder), tmp_path / 'again', {})
    before, after = (read_manifest(x)['files'] for x in (folder, tmp_path / 'again'))
    assert after == {name: digest for name, digest in before.items() if name in after}


def test_full_precision_is_an_option(tmp_path):
    target = small_target()
    save_target(target, tmp_path, {}, dtype=torch.float32)
    state = load_target(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in target.state_dict().items())
    assert load_target(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_loaded_target_can_be_trained_on(folder):
    target = load_target(folder).train()
    target.text.logits(target.text.embed(torch.tensor([[1]]))).sum().backward()
    assert target.text.lm_head.weight.grad is not None


def test_shards_of_the_embedded_profile_stay_below_the_limit(tmp_path):
    torch.manual_seed(0)
    target = Target(tiny(TokenIds(*range(15)), 1_400))
    save_target(target, tmp_path, {})
    shards = sorted(tmp_path.glob('model-*-of-*.safetensors'))
    assert len(shards) >= 2
    assert shards[0].name == f'model-00001-of-{len(shards):05d}.safetensors'
    assert max(path.stat().st_size for path in shards) <= 8_000_000
    assert load_target(tmp_path).num_parameters() == target.num_parameters()
    save_target(small_target(), tmp_path, {})
    assert len(list(tmp_path.glob('*.safetensors'))) == 1  # no shard of the old target stays


def test_a_missing_folder(tmp_path):
    fails(tmp_path / 'nowhere', 'nowhere', 'does not exist')


@pytest.mark.parametrize('name', ['manifest.json', 'config.json',
                                  'model-00001-of-00001.safetensors', 'tokenizer.json'])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    fails(folder, name, 'No such file', 'restore')


@pytest.mark.parametrize('name', ['config.json', 'model-00001-of-00001.safetensors',
                                  'tokenizer.json'])
def test_a_changed_file_is_named(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    fails(folder, name, 'sha256', 'restore')


def test_a_truncated_shard_with_a_matching_hash(folder):
    name = 'model-00001-of-00001.safetensors'
    (folder / name).write_bytes((folder / name).read_bytes()[:5_000])
    vouch(folder, name)
    fails(folder, name, 'not safetensors', 'restore')


@pytest.mark.parametrize('content', ['not json', '[]', '{"data_seed": 1}'])
def test_a_broken_manifest(folder, content):
    (folder / 'manifest.json').write_text(content)
    fails(folder, 'manifest.json', 'restore')


@pytest.mark.parametrize('content', ['not json', '[]', '{"name": "tiny"}',
                                     '{"text": {"surprise": 1}}'])
def test_a_broken_config(folder, content):
    (folder / 'config.json').write_text(content)
    vouch(folder, 'config.json')
    fails(folder, 'config.json', 'restore')


def test_a_manifest_that_leaves_the_folder(folder):
    manifest = json.loads((folder / 'manifest.json').read_text())
    manifest['files']['../config.json'] = '0'
    (folder / 'manifest.json').write_text(json.dumps(manifest))
    fails(folder, '../config.json', 'restore')


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda tensors: tensors.pop('expert.norm.weight'))
    fails(folder, 'lacks tensor expert.norm.weight', 'restore')


def test_a_surplus_tensor_is_named(folder):
    rewrite(folder, lambda tensors: tensors.update(extra=torch.zeros(2)))
    fails(folder, 'surplus tensor extra', 'restore')


def test_a_misshaped_tensor_is_named(folder):
    rewrite(folder, lambda tensors: tensors.update({'text.norm.weight': torch.zeros(3)}))
    fails(folder, 'text.norm.weight', '(3,)', '(64,)', 'restore')


def test_the_header_room_is_kept_for_many_small_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, 'MAX_SHARD_BYTES', checkpoint.HEADER_BYTES + 150_000)
    save_target(small_target(), tmp_path, {})
    assert len(list(tmp_path.glob('*.safetensors'))) >= 3
    assert max(p.stat().st_size for p in tmp_path.glob('*.safetensors')) \
        <= checkpoint.MAX_SHARD_BYTES
    load_target(tmp_path)


@pytest.mark.parametrize('name', ['', 'config.json\x00', '\x00'])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    """A NUL byte raised ValueError; found by fuzzing."""
    (tmp_path / 'manifest.json').write_text(json.dumps({'files': {name: ''}}))
    with pytest.raises(EngineError, match='no plain file name'):
        read_files(tmp_path)


def test_json_that_nests_too_deep_is_refused(tmp_path):
    """The parser raised RecursionError; found by fuzzing."""
    (tmp_path / 'manifest.json').write_text('[' * 100_000)
    with pytest.raises(EngineError, match='is not valid JSON'):
        read_files(tmp_path)
