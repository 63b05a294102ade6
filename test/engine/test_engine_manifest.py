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
import dataclasses
import json

import pytest
from tensorrt_rig import CHECKPOINTS, INPUTS, manifest_of, OUTPUTS, rtx_plan, write_engine

from rspec_planner.engine.engine_manifest import (
    check_plan,
    describe,
    EngineManifest,
    Expectation,
    list_manifests,
    load_verified,
    manifest_path,
    SCHEMA,
)
from rspec_planner.errors import EngineError

EXPECTED = Expectation('tensorrt_rtx', '1.7.1.116', '86', 'linux-x86_64', 'fp16', CHECKPOINTS,
                       INPUTS + OUTPUTS)


def expecting(**changes):
    return dataclasses.replace(EXPECTED, **changes)


def rewrite(folder, **changes):
    """Change fields of the manifest of verify; None removes one."""
    path = manifest_path(folder, 'verify', 'tensorrt_rtx')
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_a_manifest_survives_the_file(tmp_path):
    written = write_engine(tmp_path)
    found, plan = load_verified(tmp_path, 'verify', EXPECTED)
    assert found == written
    assert plan == rtx_plan(fill=b'v')
    assert EngineManifest.from_dict(json.loads(json.dumps(written.to_dict()))) == written
    assert list_manifests(tmp_path) == [written]


def no_engine(folder):
    (folder / 'verify.tensorrt_rtx.engine').unlink()


def no_manifest(folder):
    (folder / 'verify.tensorrt_rtx.json').unlink()


def changed_byte(folder):
    path = folder / 'verify.tensorrt_rtx.engine'
    path.write_bytes(path.read_bytes()[:-1] + b'?')


def truncated(folder):
    path = folder / 'verify.tensorrt_rtx.engine'
    path.write_bytes(path.read_bytes()[:-1])


def truncated_before_it_was_hashed(folder):
    write_engine(folder, plan=rtx_plan()[:-1])


def swapped_engines(folder):
    write_engine(folder, 'prefill')
    one, other = (folder / f'{name}.tensorrt_rtx.engine' for name in ('verify', 'prefill'))
    plans = one.read_bytes(), other.read_bytes()
    other.write_bytes(plans[0])
    one.write_bytes(plans[1])


def swapped_pairs(folder):
    write_engine(folder, 'prefill')
    for suffix in ('engine', 'json'):
        one, other = (folder / f'{name}.tensorrt_rtx.{suffix}' for name in ('verify', 'prefill'))
        plans = one.read_bytes(), other.read_bytes()
        other.write_bytes(plans[0])
        one.write_bytes(plans[1])


def no_json(folder):
    manifest_path(folder, 'verify', 'tensorrt_rtx').write_bytes(b'\xff{')


def list_instead(folder):
    manifest_path(folder, 'verify', 'tensorrt_rtx').write_text('[]')


def climbs_out(folder):
    rewrite(folder, file='../verify.tensorrt_rtx.engine')


OTHER_CACHE = (dataclasses.replace(INPUTS[0], shape=(1, 9, 64)), *INPUTS[1:], *OUTPUTS)
NO_ALIAS = (*INPUTS, OUTPUTS[0], dataclasses.replace(OUTPUTS[1], alias=''), OUTPUTS[2])

#: name -> (what is broken, what the process expects, what the line must say, the remedy)
BROKEN = {
    'missing engine': (no_engine, EXPECTED, 'does not exist but its manifest does', 'build'),
    'missing manifest': (no_manifest, EXPECTED, 'there is no verify engine', 'rspec engine build'),
    'wrong hash': (changed_byte, EXPECTED, 'has sha256', 'copy it again'),
    'truncated': (truncated, EXPECTED, '399 bytes, its manifest says 400', 'copy it again'),
    'truncated from the start': (truncated_before_it_was_hashed, EXPECTED, 'no complete plan',
                                 'build it again'),
    'wrong sm': (None, expecting(sm='120'), 'compute capability 86, 89, this GPU has 120',
                 '--sm 120'),
    'hopper': (None, expecting(sm='90'), 'this GPU has 90', 'engines of tensorrt'),
    'wrong version': (None, expecting(version='1.8.0'), '1.7.1.116, installed is 1.8.0',
                      'install that version'),
    'wrong host': (None, expecting(host='linux-aarch64'), 'linux-x86_64, this is linux-aarch64',
                   'build'),
    'wrong shape': (None, expecting(ports=OTHER_CACHE), 'x float16[1, 8, 64], needed is x float16'
                    '[1, 9, 64]', 'export and build it again'),
    'missing port': (None, expecting(ports=(*INPUTS, *OUTPUTS, dataclasses.replace(
        OUTPUTS[0], name='z'))), 'lacks z', 'export'),
    'surplus port': (None, expecting(ports=INPUTS), 'surplus y float16', 'export'),
    'not in place': (None, expecting(ports=NO_ALIAS), '= k0, needed is k0_out', 'export'),
    'wrong precision': (None, expecting(precision='bf16'), 'is fp16, bf16 is asked for',
                        '--precision bf16'),
    'stale weights': (None, expecting(checkpoints={'target': 'd' * 64}),
                      'target weights aaaaaaaaaaaa, loaded are dddddddddddd',
                      'load that checkpoint'),
    'other draft': (None, expecting(checkpoints={**CHECKPOINTS, 'draft': 'e' * 64}),
                    'draft weights bbbbbbbbbbbb', 'load that checkpoint'),
    'swapped engines': (swapped_engines, EXPECTED, 'has sha256', 'copy it again'),
    'swapped stages': (swapped_pairs, EXPECTED, 'describes stage prefill', 'renamed or swapped'),
    'unreadable manifest': (no_json, EXPECTED, 'is not valid JSON', 'rspec engine build'),
    'no manifest at all': (list_instead, EXPECTED, 'names no schema', 'rspec engine build'),
    'newer schema': (lambda folder: rewrite(folder, schema=SCHEMA + 1), EXPECTED,
                     f'has schema {SCHEMA + 1}', 'update rspec_planner'),
    'missing field': (lambda folder: rewrite(folder, targets=None), EXPECTED,
                      '"targets" is missing', 'build'),
    'unknown field': (lambda folder: rewrite(folder, colour='red'), EXPECTED,
                      '"colour" is not a known field', 'build'),
    'field of another kind': (lambda folder: rewrite(folder, bytes='many'), EXPECTED,
                              "\"bytes\" is 'many'", 'build'),
    'broken port': (lambda folder: rewrite(folder, inputs=[{'name': 'x'}]), EXPECTED,
                    '"inputs" holds', 'build'),
    'path outside': (climbs_out, EXPECTED, 'no plain file name', 'build'),
}


@pytest.mark.parametrize('name', BROKEN)
def test_a_broken_engine_folder_is_refused_in_one_line(tmp_path, name):
    damage, expected, says, remedy = BROKEN[name]
    write_engine(tmp_path)
    if damage:
        damage(tmp_path)
    with pytest.raises(EngineError) as caught:
        load_verified(tmp_path, 'verify', expected)
    line = str(caught.value)
    assert '\n' not in line
    assert str(tmp_path) in line
    assert says in line
    assert remedy in line


def test_every_broken_folder_has_its_own_line(tmp_path):
    lines = set()
    for index, (damage, expected, _, _) in enumerate(BROKEN.values()):
        folder = tmp_path / str(index)
        folder.mkdir()
        write_engine(folder)
        if damage:
            damage(folder)
        with pytest.raises(EngineError) as caught:
            load_verified(folder, 'verify', expected)
        lines.add(str(caught.value).replace(str(folder), ''))
    assert len(lines) == len(BROKEN)


@pytest.mark.parametrize('suffix', ['json', 'engine'])
def test_a_file_without_permission_says_so(tmp_path, monkeypatch, suffix):
    from pathlib import Path
    write_engine(tmp_path)
    forbidden = tmp_path / f'verify.tensorrt_rtx.{suffix}'
    read = {name: getattr(Path, name) for name in ('read_bytes', 'open')}

    def refusing(name):  # the tests may run as root, whom no permission stops
        def reader(path, *args, **kwargs):
            if path == forbidden:
                raise PermissionError(13, 'Permission denied', str(path))
            return read[name](path, *args, **kwargs)
        return reader

    for name in read:
        monkeypatch.setattr(Path, name, refusing(name))
    with pytest.raises(EngineError) as caught:
        load_verified(tmp_path, 'verify', EXPECTED)
    assert str(caught.value) == (f'{forbidden} cannot be read (Permission denied): check its '
                                 'permissions')


def test_the_first_fault_in_the_stated_order_is_told(tmp_path):
    write_engine(tmp_path)
    faults = {'version': ('2', 'installed is 2'), 'host': ('x', 'this is x'),
              'sm': ('90', 'GPU has 90'), 'precision': ('bf16', 'bf16 is asked for'),
              'checkpoints': ({'target': ''}, 'loaded are none'), 'ports': ((), 'surplus x')}
    for index, (_, says) in enumerate(faults.values()):
        wrong = {name: value for name, (value, _) in list(faults.items())[index:]}
        with pytest.raises(EngineError, match=says):
            load_verified(tmp_path, 'verify', expecting(**wrong))
    changed_byte(tmp_path)
    with pytest.raises(EngineError, match='has sha256'):
        load_verified(tmp_path, 'verify', expecting(version='2'))
    rewrite(tmp_path, stage='prefill')
    with pytest.raises(EngineError, match='describes stage prefill'):
        load_verified(tmp_path, 'verify', expecting(version='2'))


def test_full_tensorrt_plans_have_no_form_that_we_know():
    check_plan(b'anything', 'tensorrt', 'here')
    with pytest.raises(EngineError, match='here is no complete plan'):
        check_plan(b'anything', 'tensorrt_rtx', 'here')


def test_a_port_is_described_with_what_is_bound_to_it():
    assert describe(INPUTS[0]) == 'x float16[1, 8, 64]'
    assert describe(INPUTS[7]) == 'wq float16[64, 64] = target layers.0.q'
    assert describe(OUTPUTS[1]) == 'k0_out float16[1, 2, 64, 16] = k0'


def test_an_empty_folder_has_no_engines_and_a_missing_one_is_told(tmp_path):
    assert list_manifests(tmp_path) == []
    with pytest.raises(EngineError, match='does not exist: rspec engine build'):
        list_manifests(tmp_path / 'none')


def test_a_manifest_states_its_schema():
    assert manifest_of(b'x').to_dict()['schema'] == SCHEMA
