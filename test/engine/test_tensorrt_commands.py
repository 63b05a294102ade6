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

import pytest
from tensorrt_rig import write_set

from rspec_planner.cli import main
from rspec_planner.engine.tensorrt_library import load_library
from rspec_planner.engine.tensorrt_set import build_set

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
    assert main(['engine', 'list', str(folder)]) == 0
    assert 'truncated' in capsys.readouterr().out


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
])
def test_a_refusal_is_one_line(arguments, says, capsys):
    assert main(['engine', *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count('\n') == 1
