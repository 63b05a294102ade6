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
"""`rspec engine build`, `list`, `inspect` and `selftest` from the command line."""

import json
import shutil

import pytest
from tensorrt_rig import write_set
import torch

from rspec_planner.cli import main
from rspec_planner.engine import tensorrt_runtime
from rspec_planner.engine.tensorrt_library import load_library
from rspec_planner.engine.tensorrt_set import build_set
from rspec_planner.evaluate import engine_selftest
from rspec_planner.planner import staging

pytest.importorskip('tensorrt_rtx', reason='tensorrt_rtx is not installed '
                    '(pip install -r requirements-engine.txt)')


@pytest.fixture
def folder(tmp_path):
    write_set(tmp_path)
    build_set(load_library('tensorrt_rtx'), tmp_path, ('86', '89', '120'))
    return tmp_path


def told(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_list_names_every_engine_and_its_fault(folder, capsys):
    assert main(['engine', 'list', str(folder), '--json']) == 0
    found = told(capsys)['engines'][0]
    assert {'stage': 'verify', 'precision': 'fp16', 'flavour': 'tensorrt_rtx',
            'sm': ['86', '89', '120'], 'checked': False, 'fault': ''}.items() <= found.items()
    assert {'bytes', 'sha256', 'version', 'seconds', 'peak_mib'} <= set(found)
    engine = folder / 'verify.tensorrt_rtx.engine'
    engine.write_bytes(engine.read_bytes()[:-1])
    assert main(['engine', 'list', str(folder)]) == 1
    assert 'truncated' in capsys.readouterr().out


def test_a_list_without_folders_finds_sets_whose_graphs_were_removed(folder, tmp_path, capsys,
                                                                     monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(['engine', 'list', '--json']) == 0
    assert told(capsys) == {'engines': [], 'ok': True}
    shutil.copytree(folder, tmp_path / 'engines' / 'mine', ignore=lambda *_: ['onnx'])
    assert main(['engine', 'list', '--json']) == 0
    assert [one['folder'] for one in told(capsys)['engines']] == ['engines/mine']


def test_an_unreadable_manifest_hides_no_other_engine(folder, capsys):
    (folder / 'draft.tensorrt_rtx.json').write_text('{')
    assert main(['engine', 'list', str(folder), '--json']) == 1
    draft, verify = told(capsys)['engines']
    assert (draft['stage'], draft['flavour'], draft['checked']) == ('draft', 'tensorrt_rtx', False)
    assert 'draft.tensorrt_rtx.json is not valid JSON' in draft['fault']
    assert (verify['stage'], verify['fault'], verify.keys()) == ('verify', '', draft.keys())
    assert main(['engine', 'list', str(folder)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_an_inspection_shows_the_manifest(folder, capsys):
    assert main(['engine', 'inspect', str(folder), 'verify', '--json']) == 0
    found = told(capsys)
    assert 'k0_out float16[1, 2, 64, 16] = k0' in found['outputs']
    assert found['intact'] is True
    assert main(['engine', 'inspect', str(folder), 'draft']) == 2
    assert 'there is no draft engine' in capsys.readouterr().err


@pytest.mark.parametrize('arguments, says', [
    (['build', '--sm', '90'], 'does not serve compute capability 9.0'),
    (['build'], 'needs --sm'),
    (['build', '--sm', '86', '--precision', 'fp8'], '8.6 has no fp8'),
    (['build', '--sm', '75', '--precision', 'int8'], '7.5 has no int8'),
    (['build', '--flavour', 'onnx', '--sm', '86'], "flavour 'onnx' is not known"),
    (['list', '/nowhere'], 'engine folder /nowhere does not exist'),
    (['check', '--folder', '/nowhere'], '/nowhere/stages.json cannot be read'),
    (['check', '--profile', '/nowhere'], '/nowhere'),
    (['export', '--profile', '/nowhere'], '/nowhere'),
    (['export', '--draft', 'nobody'], "draft 'nobody' of"),
])
def test_a_refusal_is_one_line(arguments, says, capsys):
    assert main(['engine', *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count('\n') == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason='this machine has a GPU')
def test_a_selftest_without_a_gpu_says_what_it_needs(folder, capsys):
    assert main(['engine', 'selftest', str(folder)]) == 2
    error = capsys.readouterr().err
    assert 'TensorRT engines need an NVIDIA GPU' in error
    assert error.count('\n') == 1


def test_a_selftest_is_told_stage_by_stage_and_fails_by_its_exit_code(folder, capsys, monkeypatch):
    row = {'stage': 'verify', 'error': 1e-3, 'tolerance': 2e-2, 'checked': True, 'captured': True,
           'replayed': False, 'ms_p50': 1.25, 'ms_p99': 1.5}
    report = {'engines': [row], 'backend': 'tensorrt_rtx', 'tensorrt_version': '1.7.1.116',
              'gpu': 'a GPU', 'loop': {'ok': True, 'clips': 3, 'token_mismatches': 0,
                                       'trajectory_mismatches': 0},
              'first_start': {'seconds': 61.0, 'kernels': 'cold'},
              'second_start': {'seconds': 2.0, 'kernels': 'warm'},
              'checks': {'parity': True, 'replay': False}, 'ok': False}
    given = []
    monkeypatch.setattr(engine_selftest, 'selftest', lambda *all: given.append(all) or report)
    monkeypatch.setattr(engine_selftest, 'moved', lambda source, gpu: source)
    monkeypatch.setattr(engine_selftest, 'cuda_device', lambda gpu: 'device')
    monkeypatch.setattr(tensorrt_runtime, 'find_gpu', lambda device: device)
    monkeypatch.setattr(staging, 'read_source', lambda *which, weights: (*which, weights))
    assert main(['engine', 'selftest', str(folder), '--replays', '7', '--clips', '3']) == 1
    out = capsys.readouterr().out
    assert 'FAIL verify     error 1.0e-03 of 2e-02, 1.250 ms p50' in out
    assert 'not replayed' in out
    assert 'first start     61.0 s, kernels cold' in out
    assert out.rstrip().endswith('tensorrt_rtx 1.7.1.116 on a GPU: FAIL replay')
    library, gpu, where, source, *_ = given[0]
    assert (gpu, where, source[:2], source[-1]) == ('cuda', folder, ('tiny', 'fp16'), True)
    assert given[0][7] == 7
    assert main(['engine', 'selftest', str(folder), '--json']) == 1
    assert told(capsys) == report
