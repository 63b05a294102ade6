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
"""`rspec engine build` of `alpamayo-r1` at full shapes, 36 layers, without weights or a GPU."""

from contextlib import chdir
import json

import pytest

from rspec_planner.cli import main
from rspec_planner.engine.engine_manifest import list_manifests
from rspec_planner.engine.stages import STAGE_NAMES

pytest.importorskip('tensorrt_rtx', reason='tensorrt_rtx is not installed '
                    '(pip install -r requirements-engine.txt)')

SMS = ['86', '89', '120']


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_five_engines_of_full_shapes_are_small_and_cheap_to_build(tmp_path, capsys):
    with chdir(tmp_path):
        assert main(['engine', 'build', '--profile', 'alpamayo-r1', '--flavour', 'tensorrt_rtx',
                     '--sm', ','.join(SMS), '--precision', 'bf16', '--json']) == 0
    built = json.loads(capsys.readouterr().out.splitlines()[-1])['engines']
    assert [one['stage'] for one in built] == list(STAGE_NAMES)
    for one in built:
        assert one['sm'] == SMS
        assert 2**20 < one['bytes'] < 16 * 2**20  # weights are inputs
        assert one['peak_mib'] < 2048
    manifests = {one.stage: one for one in list_manifests(
        tmp_path / 'engines' / 'alpamayo-r1-bf16')}
    for stage, caches in (('vision', 0), ('prefill', 72), ('verify', 72), ('flow_step', 72)):
        kept = [port.alias for port in manifests[stage].outputs if port.alias[:1] in ('k', 'v')]
        assert len(kept) == caches, stage
    assert all(one.build['warnings'] == [] for one in manifests.values())
    assert all(port.weight is None or port.dtype == 'bfloat16'
               for one in manifests.values() for port in one.inputs)
