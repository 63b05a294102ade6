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
"""Fifteen and more folders, one fault each; the right verdict, nothing executed, no crash."""

import hashlib
import json
import os
import pickle
import shutil
import sys
import time

from click.testing import CliRunner
from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import pytest
from qwen_folder import write_tokenizer_folder
import torch
from upstream_rig import (
    edit_config,
    edit_shard,
    hollow_folder,
    released_profile,
    written_config,
)

from rspec_planner.cli import cli, main
from rspec_planner.doctor_checkpoint import examine_checkpoint
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate import roofline
from rspec_planner.evaluate.synthetic_checkpoint import write_checkpoint
from rspec_planner.model.checkpoint import load_target
from rspec_planner.model.config import alpamayo_r1
from rspec_planner.model.upstream_folder import examine_folder, INDEX_NAME

OPENED = []


def _watch(event, arguments):
    if event == 'open' and OPENED and isinstance(arguments[0], str | bytes | os.PathLike):
        OPENED.append(os.fsdecode(arguments[0]))


sys.addaudithook(_watch)


@pytest.fixture(scope='module')
def good(tmp_path_factory):
    """Return model_type -> a folder that is whole."""
    tokenizer = write_tokenizer_folder(tmp_path_factory.mktemp('qwen')) / 'tokenizer.json'
    made = {}
    for kind in ('alpamayo_r1', 'alpamayo1_5'):
        made[kind] = tmp_path_factory.mktemp(kind)
        write_checkpoint(made[kind], released_profile(), kind, shards=3)
        shutil.copy(tokenizer, made[kind])
    return made


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    """Measure nothing: a device of one test is not that of another."""
    rates = roofline.Rates(1e11, 1e12)
    monkeypatch.setattr('rspec_planner.doctor_checkpoint.measure_rates', lambda *_: rates)


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good['alpamayo_r1'], tmp_path / 'folder')


def verdict(folder):
    report = examine_checkpoint(str(folder), 'cpu')
    json.dumps(report)
    assert report['ok'] == all(check['ok'] for check in report['checks'])
    return report


def check(report, name):
    [found] = [each for each in report['checks'] if each['name'] == name]
    return found


def refused(folder, name, *parts):
    """The folder must fail in one check that names all parts; loading must say the same."""
    report = verdict(folder)
    assert not report['ok']
    found = check(report, name)
    assert not found['ok'] and found['fix']
    assert '\n' not in found['detail']
    for part in parts:
        assert part in found['detail'], found['detail']
    if name != 'tokenizer':
        with pytest.raises(EngineError) as caught:
            load_target(folder)
        assert '\n' not in str(caught.value)
        assert any(part in str(caught.value) for part in parts), str(caught.value)
    return report


@pytest.mark.parametrize(('kind', 'profile', 'buffers'), [
    ('alpamayo_r1', 'alpamayo-r1', 7), ('alpamayo1_5', 'alpamayo-1.5', 0)])
def test_1_2_good_folders(good, kind, profile, buffers):
    report = verdict(good[kind])
    assert report['ok'] and not report['problems']
    assert (report['model_type'], report['profile']) == (kind, profile)
    weights = check(report, 'weights')['detail']
    assert ('7 buffers' in weights) == bool(buffers)
    assert report['parameters'] == load_target(good[kind]).num_parameters()
    assert report['memory_bytes']['weights'] == 4 * report['parameters']
    assert report['frame_ms']['expected_total']['draft'] \
        < report['frame_ms']['expected_total']['no_draft']


def test_3_a_missing_shard(folder):
    (folder / 'model-00002-of-00003.safetensors').unlink()
    report = refused(folder, 'files', 'model-00002-of-00003.safetensors', 'not in the folder',
                     'tensors are lost')
    assert not check(report, 'weights')['ok']


def test_4_a_wrong_shape(folder):
    name = 'vlm.model.visual.patch_embed.proj.bias'
    edit_shard(folder, lambda tensors: tensors.update({name: torch.zeros(47)}))
    refused(folder, 'weights', name, 'shape [47]', 'needs [48]')


def test_5_a_tied_head(folder):
    edit_shard(folder, lambda tensors: tensors.pop('vlm.lm_head.weight', None))
    for number in (1, 2):
        edit_shard(folder, lambda tensors: tensors.pop('vlm.lm_head.weight', None), number)
    refused(folder, 'weights', 'vlm.lm_head.weight', 'missing', 'not tied')


def test_5b_a_config_that_ties_the_head(folder):
    edit_config(folder, tie_word_embeddings=True)
    refused(folder, 'config', 'tie_word_embeddings')


def test_6_an_extra_tensor(folder):
    edit_shard(folder, lambda tensors: tensors.update({'vlm.surprise': torch.zeros(2)}))
    refused(folder, 'weights', 'vlm.surprise', 'model-00001-of-00003', 'not part of the model')


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), 'w'))


def test_7_pickles_and_scripts_are_named_and_stay_closed(folder, tmp_path):
    sprung = tmp_path / 'sprung'
    traps = {'pytorch_model.bin': pickle.dumps(Trap(sprung)),
             'training_args.bin': pickle.dumps(Trap(sprung)), 'optimizer.pt': b'\x80\x04junk',
             'modeling_alpamayo.py': f"open({str(sprung)!r}, 'w')".encode()}
    for name, data in traps.items():
        (folder / name).write_bytes(data)
    edit_config(folder, auto_map={'AutoModel': 'modeling_alpamayo.AlpamayoR1'})
    OPENED[:] = ['watching']
    report = verdict(folder)
    load_target(folder)
    opened, OPENED[:] = list(OPENED), []
    assert report['ok']
    for name in traps:
        assert name in check(report, 'ignored')['detail']
        assert not any(path.endswith(name) for path in opened)
    assert any(path.endswith('config.json') for path in opened)  # the watch works
    assert not sprung.exists()


def test_7b_pickles_alone_are_no_weights(folder):
    for path in [*folder.glob('*.safetensors'), folder / INDEX_NAME]:
        path.unlink()
    (folder / 'pytorch_model.bin').write_bytes(b'\x80\x04junk')
    report = refused(folder, 'files', INDEX_NAME, 'missing')
    assert 'pytorch_model.bin' in check(report, 'ignored')['detail']


@pytest.mark.parametrize('kind', ['qwen3_vl', 'alpamayo2_edge', '', 7])
def test_8_a_wrong_model_type(folder, kind):
    edit_config(folder, model_type=kind)
    refused(folder, 'config', 'model_type', repr(kind))


def test_9_a_missing_tokenizer(folder):
    (folder / 'tokenizer.json').unlink()
    report = refused(folder, 'tokenizer', 'tokenizer.json', 'Qwen/Qwen3-VL-8B-Instruct')
    assert check(report, 'weights')['ok'] and not report['problems']


@pytest.mark.parametrize(('dtype', 'kind'), [
    (torch.int8, 'I8'), (torch.float8_e4m3fn, 'F8_E4M3'), (torch.float64, 'F64')])
def test_10_a_wrong_dtype(folder, dtype, kind):
    def cast(tensors):
        name = 'vlm.model.visual.merger.norm.weight'
        if name in tensors:
            tensors[name] = tensors[name].to(dtype)

    for number in range(3):
        edit_shard(folder, cast, number)
    refused(folder, 'weights', 'visual.merger.norm.weight', f'stored as {kind}', 'BF16')


@pytest.mark.parametrize('keep', [0, 4, 100, -100])
def test_11_a_truncated_shard(folder, keep):
    path = folder / 'model-00003-of-00003.safetensors'
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, 'files', path.name, 'damaged or cut off')


def test_12_an_index_that_names_an_absent_file(folder):
    index = json.loads((folder / INDEX_NAME).read_text())
    index['weight_map']['vlm.lm_head.weight'] = 'model-00009-of-00009.safetensors'
    (folder / INDEX_NAME).write_text(json.dumps(index))
    refused(folder, 'files', 'model-00009-of-00009.safetensors', 'vlm.lm_head.weight')


def test_13_an_expert_that_cannot_read_the_cache(folder):
    def narrow(tensors):
        for name in [n for n in tensors if n.startswith('expert.') and 'k_proj' in n]:
            tensors[name] = tensors[name][:24].clone()

    for number in range(3):
        edit_shard(folder, narrow, number)
    report = refused(folder, 'weights', 'keys of the expert have 24 values', '48')
    assert report['problems'][0].startswith('keys of the expert')


def test_13b_an_expert_config_that_differs(folder):
    config = json.loads((folder / 'config.json').read_text())
    edit_config(folder, expert_cfg={**config['expert_cfg'], 'num_key_value_heads': 4})
    refused(folder, 'config', 'expert_cfg.num_key_value_heads is 4', 'has 2')


def test_14_no_config(folder):
    (folder / 'config.json').unlink()
    refused(folder, 'config', 'config.json', 'No such file')


@pytest.mark.parametrize('name', ['../model-00001-of-00003.safetensors', '/etc/passwd',
                                  'sub/../../x.safetensors', '..\\x.safetensors', 'x.bin', 7])
def test_15_path_traversal_in_the_index(folder, name):
    secret = folder.parent / 'model-00001-of-00003.safetensors'
    shutil.copy(folder / secret.name, secret)
    index = json.loads((folder / INDEX_NAME).read_text())
    index['weight_map']['vlm.lm_head.weight'] = name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    refused(folder, 'files', 'no file name inside the folder', 'nothing was opened')


@pytest.mark.parametrize('text', ['[]', '{"weight_map": 7}', '[' * 100_000, '\xff'])
def test_a_broken_index(folder, text):
    (folder / INDEX_NAME).write_text(text, encoding='latin-1')
    refused(folder, 'files', INDEX_NAME)


@pytest.mark.parametrize('text', ['', '[]', '{"model_type": "alpamayo_r1"}', '[' * 100_000])
def test_a_broken_config(folder, text):
    (folder / 'config.json').write_text(text)
    refused(folder, 'config', 'config.json')


def test_an_export_of_reinforcement_learning(folder):
    def strip(tensors):
        for name in [n for n in tensors if not n.startswith('vlm.')]:
            del tensors[name]

    for number in range(3):
        edit_shard(folder, strip, number)
    report = refused(folder, 'weights', 'no action expert')
    assert report['problems'][0].startswith('only vlm.*')


def test_a_tensor_in_two_shards(folder):
    name = edit_shard(folder, lambda t: t.update({'vlm.lm_head.weight': torch.zeros(2)}), 0)
    for number in (1, 2):
        edit_shard(folder, lambda t: t.update({'vlm.lm_head.weight': torch.zeros(2)}), number)
    refused(folder, 'files', 'vlm.lm_head.weight', name, 'as well')


def test_a_target_string_that_names_something_else(folder, tmp_path):
    edit_config(folder, action_out_proj_cfg={'_target_': 'os.system', 'command': 'touch x'})
    refused(folder, 'config', 'action_out_proj_cfg._target_', 'os.system', 'Linear')


def test_every_problem_is_a_line_of_its_own(folder):
    def spoil(tensors):
        tensors['one'] = torch.zeros(1)
        tensors['two'] = torch.zeros(1)
        for name in [n for n in tensors if n.endswith('norm1.weight')]:
            del tensors[name]

    edit_shard(folder, spoil)
    report = verdict(folder)
    lost = [line for line in report['problems'] if 'norm1.weight [48] is missing' in line]
    assert len(lost) == 5
    assert sum('not part of the model' in line for line in report['problems']) == 2
    with pytest.raises(EngineError, match=r'and \d more; rspec doctor --checkpoint'):
        load_target(folder)


def record(folder, how):
    """Write down the sums of the shards as one of the three ways does."""
    for path in sorted(folder.glob('*.safetensors')):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if how == 'sums':
            with (folder / 'SHA256SUMS').open('a') as file:
                file.write(f'{digest} *{path.name}\n')
        elif how == 'hub':
            metadata = folder / '.cache/huggingface/download' / f'{path.name}.metadata'
            metadata.parent.mkdir(parents=True, exist_ok=True)
            metadata.write_text(f'{"a" * 40}\n{digest}\n1796000000.5\n')
        else:
            blob = folder.parent / 'blobs' / digest
            blob.parent.mkdir(exist_ok=True)
            path.rename(blob)
            path.symlink_to(blob)


@pytest.mark.parametrize('how', ['sums', 'hub', 'cache'])
def test_the_sums_of_the_download_are_compared(folder, how):
    def asked():
        return check(examine_checkpoint(str(folder), 'cpu', hashes=True), 'hashes')

    assert not asked()['ok'] and 'no sum is recorded' in asked()['detail']
    record(folder, how)
    assert asked()['ok'] and '3 shards' in asked()['detail']
    path = folder / 'model-00002-of-00003.safetensors'
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # inside the weights, where no header looks
    path.write_bytes(bytes(data))
    assert not asked()['ok'] and path.name in asked()['detail']
    assert verdict(folder)['ok']  # headers alone cannot see it


def test_memory_that_does_not_fit(folder, monkeypatch):
    monkeypatch.setattr('rspec_planner.doctor_checkpoint._free', lambda _: (10 ** 6, 'a toy'))
    report = verdict(folder)
    assert not report['ok'] and not check(report, 'memory')['ok']
    assert 'a toy' in check(report, 'memory')['detail']


def test_fp8_is_offered_where_it_helps(folder, monkeypatch):
    cuda = torch.device('cuda')
    monkeypatch.setattr('rspec_planner.doctor_checkpoint._device', lambda _: cuda)
    monkeypatch.setattr('rspec_planner.doctor_checkpoint._free', lambda _: (2 ** 40, 'a toy'))
    need = verdict(folder)['memory_bytes']
    assert need['weights'] + need['process'] <= need['fp8_total'] < need['total']
    monkeypatch.setattr('rspec_planner.doctor_checkpoint._free',
                        lambda _: (need['fp8_total'], 'a toy'))
    assert 'model.precision: fp8' in check(verdict(folder), 'memory')['fix']


def test_a_folder_of_the_released_size_is_examined_and_not_read(tmp_path, monkeypatch):
    config = written_config(alpamayo_r1())
    del config['vlm_config']  # as released: the backbone is named
    folder = hollow_folder(tmp_path / 'full', alpamayo_r1(), config)
    assert sum(p.stat().st_blocks for p in folder.iterdir()) * 512 < 10e6
    monkeypatch.setattr('rspec_planner.doctor_checkpoint._free', lambda _: (2 ** 40, 'a toy'))
    started = time.perf_counter()
    report = verdict(folder)
    assert time.perf_counter() - started < 60  # seconds, also on a busy machine
    assert check(report, 'weights')['ok'] and not report['problems']
    assert '22.157 GB' in check(report, 'files')['detail']
    assert report['parameters'] == 11_078_526_194
    monkeypatch.setattr('rspec_planner.model.upstream_checkpoint.free_bytes', lambda _: 20e9)
    with pytest.raises(EngineError, match='44.3 GB of weights in float32, 20.0 GB are free'):
        load_target(folder)


def test_our_own_folders_are_examined_too():
    report = verdict('tiny')
    assert report['ok'] and report['kind'] == 'own' and report['profile'] == 'tiny'
    assert 'all hashes match' in check(report, 'files')['detail']


def test_what_is_no_folder_and_no_device(folder):
    with pytest.raises(EngineError, match='does not exist'):
        examine_checkpoint('/nowhere')
    for device in ('nonsense', 'meta', 'cuda' if not torch.cuda.is_available() else 'mps'):
        with pytest.raises(ConfigurationError, match=device):
            examine_checkpoint(str(folder), device)


def test_the_command_line(folder, capsys):
    arguments = ['doctor', '--checkpoint', str(folder), '--device', 'cpu', '--json']
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])['ok']
    (folder / 'config.json').write_text('{}')
    assert main(arguments) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not report['ok'] and 'model_type is missing' in report['problems'][0]


PARTS = ('config.json', INDEX_NAME, 'model-00002-of-00003.safetensors')


@settings(max_examples=60, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(PARTS), edits=st.lists(st.tuples(
    st.integers(0, 3000), st.sampled_from((b'', b'\0', b'9', b'"', b'[', b'}', b'null', b'-1',
                                           b'1e999', b'\xff\xfe'))), min_size=1, max_size=3))
def test_any_damage_is_a_verdict_and_never_a_crash(folder, name, edits):
    """Replace bytes near the beginning, where JSON and headers lie, and look at it again."""
    path = folder / name
    whole = path.read_bytes()
    try:
        data = bytearray(whole)
        for place, new in edits:
            at = place % max(len(data) - 8, 1)
            data[at:at + max(len(new), 1)] = new
        path.write_bytes(bytes(data))
        report = examine_folder(folder)
        assert all('\n' not in line for line in report.problems)
        try:
            load_target(folder)
            loaded = True
        except EngineError as error:
            assert '\n' not in str(error)
            loaded = False
        assert loaded == (not report.problems)
    finally:
        path.write_bytes(whole)


def _numbers(values, path=()):
    """Yield the path of every number in a JSON value."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, dict | list):
            yield from _numbers(value, (*path, key))
        elif not isinstance(value, bool) and isinstance(value, int | float):
            yield (*path, key)


@pytest.mark.parametrize('extreme', [2 ** 31 - 1, 0, -1, 1, 1e308])
def test_no_number_of_the_config_costs_time_or_a_crash(folder, extreme):
    """10^9 layers would be counted one by one, and 10^9 wide ones overflow."""
    whole = (folder / 'config.json').read_text()
    paths = list(_numbers(json.loads(whole)))
    assert len(paths) > 50
    refused_ones = set()
    for path in paths:
        config = json.loads(whole)
        inner = config
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = extreme
        (folder / 'config.json').write_text(json.dumps(config))
        started = time.monotonic()
        report = examine_folder(folder)
        assert time.monotonic() - started < 10.0, path
        assert all('\n' not in line for line in report.problems)
        if report.problems:
            refused_ones.add(path[-1])
    assert refused_ones >= {'num_hidden_layers', 'depth', 'hidden_size', 'num_enc_layers',
                            'vocab_size', 'patch_size', 'num_position_embeddings'}
    if extreme in (0, -1):
        assert refused_ones >= {'max_freq', 'rope_theta', 'rms_norm_eps', 'dt', 'accel_std'}


def test_a_tower_whose_heads_do_not_divide_its_width_is_refused(folder):
    config = json.loads((folder / 'config.json').read_text())['vlm_config']
    config['vision_config']['num_heads'] = 5
    edit_config(folder, vlm_config=config)
    refused(folder, 'config', 'num_heads is 5', '48')
