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
"""
The engine commands on `tiny` as it is shipped; `alpamayo-r1` is in test_engine_full_shapes.

What is claimed of a machine without a GPU is run here: export, build ahead of time, check on
ONNX Runtime, and the loop over the graphs beside the loop over PyTorch.
"""

from contextlib import chdir
import json

import pytest

from rspec_planner.cli import main
from rspec_planner.engine.engine_manifest import list_manifests
from rspec_planner.engine.stages import STAGE_NAMES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip('tensorrt_rtx', reason='tensorrt_rtx is not installed '
                    '(pip install -r requirements-engine.txt)')
pytest.importorskip('onnxruntime', reason='onnxruntime is missing: requirements-engine.txt')

SMS = ['86', '89', '120']
TARGETS = ['--flavour', 'tensorrt_rtx', '--sm', ','.join(SMS), '--json']


class Commands:
    """Runs `rspec engine` in a folder of its own and returns the JSON of the last line."""

    def __init__(self, folder):
        self.folder = folder

    def run(self, capsys, *arguments, code=0):
        with chdir(self.folder):
            found = main(['engine', *arguments])
        out = capsys.readouterr().out
        assert found == code, out
        return json.loads(out.splitlines()[-1])


@pytest.fixture(scope='module')
def commands(tmp_path_factory):
    return Commands(tmp_path_factory.mktemp('work'))


def test_the_shipped_target_is_built_for_three_gpus_and_checked(commands, capsys):
    built = commands.run(capsys, 'build', '--profile', 'tiny', *TARGETS)['engines']
    assert [one['stage'] for one in built] == list(STAGE_NAMES)
    assert all(one['sm'] == SMS and not one['reused'] and not one['checked'] for one in built)
    found = commands.run(capsys, 'check', '--clips', '2', '--frames', '2', '--random', '1',
                         '--json')
    assert found['ok'] is True
    assert sorted(found['manifests']) == sorted(STAGE_NAMES)
    for one in found['engines']:
        assert one['checked'] is True, one
        assert 0 <= one['error'] < one['tolerance'] == 0.02
    assert found['loop']['token_mismatches'] == found['loop']['trajectory_mismatches'] == 0
    folder = commands.folder / 'engines' / 'tiny-fp16'
    errors = {one['stage']: one['error'] for one in found['engines']}
    for manifest in list_manifests(folder):
        assert manifest.numerics['error'] == errors[manifest.stage]
        assert manifest.numerics['loop']['clips'] == 2
        assert manifest.revision == '' or len(manifest.revision) >= 40
    listed = commands.run(capsys, 'list', '--json')['engines']
    assert [one['checked'] for one in listed] == [True] * 5
    again = commands.run(capsys, 'build', '--profile', 'tiny', *TARGETS)['engines']
    assert all(one['reused'] and one['checked'] for one in again)


def test_the_loop_over_the_graphs_is_the_loop_over_pytorch(commands, capsys):
    found = commands.run(capsys, 'check', '--precision', 'fp32', '--clips', '50', '--frames',
                         '1', '--random', '1', '--json')
    loop = found['loop']
    assert (loop['clips'], loop['token_mismatches'], loop['iteration_mismatches']) == (50, 0, 0)
    assert loop['trajectory_mismatches'] == 0
    assert loop['largest_deviation_m'] <= 1e-3 == loop['tolerance_m']
    assert all(one['checked'] and one['error'] < 1e-4 for one in found['engines'])


def test_one_stage_is_exported_into_a_folder_of_choice(commands, capsys):
    found = commands.run(capsys, 'export', '--stage', 'draft', '--precision', 'fp16', '--out',
                         'alone', '--json')
    (one,) = found['engines']
    assert (one['stage'], one['precision'], one['flavour']) == ('draft', 'fp16', 'onnx')
    assert 0 < one['weights'] < one['inputs']
    assert (commands.folder / 'alone' / one['file']).stat().st_size == one['bytes']
