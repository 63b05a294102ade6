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

from export_rig import camera_target, errors_of, exported, source_of
import pytest
import torch

from rspec_planner.decode.accept import accept as host_accept
from rspec_planner.engine.onnx_rules import check_graph, source_line
from rspec_planner.engine.stage_decoder import accept
from rspec_planner.engine.stages import (
    file_sha256,
    read_stages,
    STAGE_NAMES,
    STAGES_NAME,
    write_stages,
)
from rspec_planner.errors import EngineError
from rspec_planner.evaluate.engine_numerics import (
    compare_sides,
    graph_side,
    random_case,
    torch_side,
)
from rspec_planner.model.target import Target

onnx = pytest.importorskip('onnx', reason='onnx is missing: requirements-engine.txt')
pytest.importorskip('onnxruntime', reason='onnxruntime is missing: requirements-engine.txt')

CLOSE = 2e-5


@pytest.fixture(scope='module')
def target():
    return camera_target()


@pytest.fixture(scope='module')
def whole(target, tmp_path_factory):
    """All five stages with a block draft."""
    folder = tmp_path_factory.mktemp('whole')
    source = source_of(target, 'dflash', block=6, window=3, num_layers=2)
    return source, exported(source, folder), folder


def test_every_stage_computes_what_pytorch_computes(whole):
    source, stages, folder = whole
    errors = errors_of(source, stages, folder)
    assert set(errors) == set(STAGE_NAMES)
    assert max(errors.values()) < CLOSE, errors


def test_graphs_over_other_weights_are_told_apart_in_every_stage(whole):
    source, stages, folder = whole
    other = source_of(camera_target(seed=1), 'dflash', seed=1, block=6, window=3, num_layers=2)
    found = compare_sides(
        torch_side(stages, source.target, source.draft),
        graph_side(stages, folder, other.target, other.draft), stages, source.target.cfg,
        [random_case(source.target.cfg, stages, 0)])
    assert set(found.worst) == set(STAGE_NAMES)
    assert min(error for error, _ in found.worst.values()) > 100 * CLOSE, found.worst


@pytest.mark.parametrize(('kind', 'over'), [
    ('dflash', {'block': 5, 'window': 0, 'rotary': 'mirror'}),
    ('dflash', {'block': 4, 'window': 40, 'correction_rank': 3}),
    ('dflash', {'block': 4, 'window': 2, 'correction_rank': 3, 'reduced': True}),
    ('eagle3', {'block': 5, 'window': 4}),
    ('eagle3', {'block': 3, 'window': 0, 'rotary': 'mirror', 'reduced': True})])
def test_every_kind_of_draft_is_one_static_step(target, tmp_path, kind, over):
    source = source_of(target, kind, **over)
    stages = exported(source, tmp_path, names=('prefill', 'draft', 'verify'))
    errors = errors_of(source, stages, tmp_path)
    assert max(errors.values()) < CLOSE, errors


def test_without_a_draft_a_verify_reads_one_token(target, tmp_path):
    source = source_of(target, '')
    stages = exported(source, tmp_path)
    assert [stage.name for stage in stages.stages] == ['vision', 'prefill', 'verify', 'flow_step']
    assert stages.stage('verify').inputs[0].shape == (1,)
    assert max(errors_of(source, stages, tmp_path, [0, 1]).values()) < CLOSE
    with pytest.raises(EngineError, match='has no stage draft'):
        stages.stage('draft')


def test_several_samples_share_one_context(target, tmp_path):
    source = source_of(target, '', samples=3)
    stages = exported(source, tmp_path, names=('flow_step', 'prefill', 'verify'))
    assert stages.stage('flow_step').inputs[0].shape == (3, 64, 2)
    assert errors_of(source, stages, tmp_path)['flow_step'] < CLOSE


@pytest.mark.parametrize(('precision', 'dtype', 'tolerance'), [
    ('fp16', torch.float16, 2e-2), ('bf16', torch.bfloat16, 1e-1)])
def test_half_precision(tmp_path, precision, dtype, tolerance):
    source = source_of(camera_target(dtype=dtype), 'dflash', block=4, window=2)
    stages = exported(source, tmp_path, precision)
    errors = errors_of(source, stages, tmp_path, [0, 1])
    assert max(errors.values()) < tolerance, errors
    assert min(errors.values()) > 1e-5, 'half precision rounds: these are fp32 results'
    name = str(dtype).removeprefix('torch.')
    assert {port.dtype for stage in stages.stages for port in stage.weights} == {name}


def test_the_graphs_depend_on_shapes_alone(whole, tmp_path):
    """No weight is read: a target on the meta device gives the same files, byte for byte."""
    source, stages, _ = whole
    with torch.device('meta'):
        empty = Target(source.target.cfg).eval().requires_grad_(False)
    empty.expert.reset_frequencies(torch.device('cpu'))
    again = exported(replace(source, target=empty), tmp_path)
    assert [stage.sha256 for stage in again.stages] == [stage.sha256 for stage in stages.stages]


def test_every_stored_tensor_is_bound_as_it_is_stored(whole):
    source, stages, _ = whole
    bound = {}
    for stage in stages.stages:
        for port in stage.weights:
            bound[port.weight.checkpoint, port.weight.tensor] = (port.shape, port.dtype)
    stored = {(name, key): (tuple(value.shape), 'float32')
              for name, model in (('target', source.target), ('draft', source.draft))
              for key, value in model.state_dict().items()}
    assert bound == stored


def test_what_each_stage_updates_in_place(whole):
    _, stages, _ = whole
    layers, taps = range(4), range(3)
    caches = {f'{kind}{layer}' for layer in layers for kind in 'kv'}
    written = {stage.name: set(stage.aliases.values()) for stage in stages.stages}
    assert written == {'vision': set(), 'draft': set(), 'flow_step': caches,
                       'prefill': caches | {f'tap{j}' for j in taps},
                       'verify': caches | {f'tap{j}' for j in taps}}
    assert all(name == f'{source}_out' for stage in stages.stages
               for name, source in stage.aliases.items())


def test_nodes_remember_their_source_line_and_nothing_of_this_machine(whole):
    _, stages, folder = whole
    for stage in stages.stages:
        model = onnx.load(folder / stage.file)
        known = [source_line(node) for node in model.graph.node]
        assert sum('rspec_planner/engine/stage_' in line for line in known) > len(known) / 2
        assert str(folder.anchor + 'work').encode() not in (folder / stage.file).read_bytes()


def test_the_description_fits_the_file(whole):
    _, stages, folder = whole
    verify = stages.stage('verify')
    check_graph(folder / verify.file, verify, 'fp32')
    port = verify.inputs[1]
    wrong = replace(verify, inputs=(verify.inputs[0], replace(port, dtype='int32'),
                                    *verify.inputs[2:]))
    with pytest.raises(EngineError, match=r'has start int64 \[1\] where start int32'):
        check_graph(folder / verify.file, wrong)
    fewer = replace(verify, outputs=verify.outputs[:-1])
    with pytest.raises(EngineError, match='outputs, described are'):
        check_graph(folder / verify.file, fewer)


def test_acceptance_on_the_device_is_that_of_the_host():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(500):
        width = int(torch.randint(1, 7, (), generator=generator))
        ids, other = (torch.randint(0, 4, (width,), generator=generator) for _ in range(2))
        agree = torch.rand(width, generator=generator) < 0.8
        best = torch.where(agree, ids.roll(-1), other)
        limit = int(torch.randint(1, 8, (), generator=generator))
        committed, matched = accept(ids, best, torch.tensor([limit]), (2, 9))
        wanted = host_accept(ids.tolist(), best.tolist(), (2, 9), limit)
        assert (int(committed), int(matched)) == (len(wanted.committed), wanted.matched)
        seen.add((int(committed), int(matched)))
    assert len(seen) > 10


def test_the_folder_reads_back_as_it_was_written(whole):
    _, stages, folder = whole
    assert read_stages(folder) == stages
    assert json.loads((folder / STAGES_NAME).read_text())['stages'][0]['name'] == 'vision'
    assert not list(folder.glob('*.part'))


def test_a_broken_folder_names_the_file_and_the_remedy(whole, tmp_path):
    _, stages, folder = whole
    with pytest.raises(EngineError, match='stages.json cannot be read .*rspec engine export'):
        read_stages(tmp_path)
    write_stages(stages, tmp_path)
    with pytest.raises(EngineError, match=r'vision\.onnx cannot be read'):
        read_stages(tmp_path)
    for stage in stages.stages:
        (tmp_path / stage.file).write_bytes((folder / stage.file).read_bytes())
    assert read_stages(tmp_path) == stages
    path = tmp_path / 'draft.onnx'
    path.write_bytes(path.read_bytes()[:-1])
    assert file_sha256(path) != stages.stage('draft').sha256
    with pytest.raises(EngineError, match=r'draft\.onnx has sha256 .*stages.json says'):
        read_stages(tmp_path)
    assert read_stages(tmp_path, verify=False) == stages


@pytest.mark.parametrize(('text', 'said'), [
    ('{"schema": 2}', 'has schema 2, this version reads 1'), ('{', 'is not an export'),
    ('[]', 'is not an export'), ('{"schema": 1}', 'is not an export')])
def test_an_unreadable_description_is_refused(tmp_path, text, said):
    (tmp_path / STAGES_NAME).write_text(text)
    with pytest.raises(EngineError, match=said):
        read_stages(tmp_path)
