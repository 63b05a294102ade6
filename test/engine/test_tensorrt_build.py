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
"""Real builds of TensorRT-RTX, ahead of time and without a GPU."""

import dataclasses
import json

import onnx
from onnx import helper, TensorProto
import pytest
from tensorrt_rig import decoder_model, INPUTS, OUTPUTS, write_set

from rspec_planner.engine import tensorrt_build, tensorrt_memory, tensorrt_network
from rspec_planner.engine.engine_manifest import check_ports, read_engine, read_manifest
from rspec_planner.engine.stages import Port
from rspec_planner.engine.tensorrt_build import build_engine
from rspec_planner.engine.tensorrt_library import load_library
from rspec_planner.engine.tensorrt_network import read_graph
from rspec_planner.engine.tensorrt_set import build_set, examine_set, record_numerics
from rspec_planner.errors import ConfigurationError, EngineError

pytest.importorskip('tensorrt_rtx', reason='tensorrt_rtx is not installed '
                    '(pip install -r requirements-engine.txt)')
SMS = ('86', '89', '120')


@pytest.fixture(scope='module')
def library():
    return load_library('tensorrt_rtx')


@pytest.fixture
def save(tmp_path):
    def write(model):
        path = tmp_path / 'graph.onnx'
        onnx.save(model, str(path))
        return path
    return write


def test_one_plan_serves_three_targets(library, save):
    done = []
    built = build_engine(library, save(decoder_model()), SMS,
                         progress=lambda part, whole: done.append(part / whole))
    assert bytes(built.plan[:4]) == b'vtrt'
    check_ports(built.ports, [Port(port.name, port.dtype, port.shape)
                              for port in INPUTS + OUTPUTS], 'graph')
    assert built.warnings == ()
    assert done == sorted(done)
    assert len(set(done)) > 10
    assert done[-1] <= 1.0


@pytest.mark.parametrize('last, says', [
    ([('Unique', ['mixed'], {}), ('MatMul', ('mixed', 'wo'), {})],
     r"node 16 'node_step_0' \(Unique\).*no such operator"),
    ([('NonZero', ['mixed'], {}), ('MatMul', ('mixed', 'wo'), {})],
     r"node 16 'node_step_0' \(NonZero\)"),
    ([('MatMul', ('start', 'wo'), {})], r"node 16 'node_y' \(MatMul\).*INT64"),
])
def test_a_parser_error_names_the_node(library, save, last, says):
    with pytest.raises(EngineError, match=says) as caught:
        build_engine(library, save(decoder_model(last=last)), SMS)
    assert '\n' not in str(caught.value)
    assert 'graph.onnx' in str(caught.value)


def test_a_parser_error_names_the_line_of_the_model(library, save):
    trace = ('File "/opt/torch/nn/module.py", line 7, in __call__\n'
             'File "/src/rspec_planner/model/text.py", line 42, in forward\n'
             'File "/opt/torch/functional.py", line 9, in sdpa')
    model = decoder_model(attention={'softcap': 30.0}, trace=trace)
    with pytest.raises(EngineError) as caught:
        build_engine(library, save(model), SMS)
    assert "'node_seen' (Attention) from rspec_planner/model/text.py:42: " in str(caught.value)


@pytest.mark.parametrize('name, inputs, attributes', [
    ('nonpad_kv_seqlen', ['mask', '', '', 'lengths'], {}),
    ('is_causal', [], {'is_causal': 1}),
])
def test_what_the_parser_drops_without_a_word_is_refused(library, save, name, inputs, attributes):
    lengths = helper.make_tensor_value_info('lengths', TensorProto.INT64, [1])
    model = decoder_model(attention=attributes, extra_inputs=[lengths] if inputs else [])
    attention = next(node for node in model.graph.node if node.op_type == 'Attention')
    del attention.input[3]
    attention.input.extend(inputs)
    with pytest.raises(EngineError, match='"Unused Input: (lengths|mask)": the parser dropped'):
        build_engine(library, save(model), SMS)


def test_a_layer_that_is_not_fused_is_refused(library, save, monkeypatch):
    monkeypatch.setitem(tensorrt_network._FUSED, 'MatMul', 'KV_CACHE_UPDATE')
    with pytest.raises(EngineError, match='4 MatMul nodes became 2 KV_CACHE_UPDATE layers'):
        build_engine(library, save(decoder_model()), SMS)


def test_a_shape_that_the_host_must_set_is_refused(library, save):
    model = decoder_model()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = 'rows'
    with pytest.raises(EngineError, match=r'input x has shape \[1, -1, 64\]; export static'):
        build_engine(library, save(model), SMS)


def test_a_value_that_the_host_must_read_is_refused(library, save):
    shape = helper.make_tensor_value_info('rows', TensorProto.INT64, [3])
    model = decoder_model(last=[('MatMul', ('mixed', 'wo'), {}), ('Reshape', ('step_0', 'rows'),
                                                                  {})], extra_inputs=[shape])
    with pytest.raises(EngineError, match='input rows is read by the host to shape another'):
        build_engine(library, save(model), SMS)


def test_a_type_that_a_target_lacks_is_refused_by_the_builder(library, save):
    model = decoder_model(dtype='BFLOAT16')
    build_engine(library, save(model), ('80',))
    with pytest.raises(EngineError, match='builds no engine for compute capability 75'):
        build_engine(library, save(model), ('75',))


def test_files_that_are_no_graph_are_told(library, tmp_path):
    with pytest.raises(EngineError, match='none.onnx does not exist: rspec engine export'):
        build_engine(library, tmp_path / 'none.onnx', SMS)
    (tmp_path / 'bad.onnx').write_bytes(b'nonsense')
    with pytest.raises(EngineError, match='bad.onnx is no ONNX file'):
        build_engine(library, tmp_path / 'bad.onnx', SMS)


def test_a_build_that_would_swap_does_not_start(library, save, monkeypatch):
    path = save(decoder_model())
    monkeypatch.setattr(tensorrt_memory, 'available_bytes', lambda: 2**30)
    with pytest.raises(EngineError, match='needs about 1024 MiB of memory .* and 256 MiB are '
                       'free: end other programs'):
        build_engine(library, path, SMS)


def test_a_build_ends_when_memory_runs_out(library, save, monkeypatch):
    path = save(decoder_model())
    monkeypatch.setattr(tensorrt_build, 'is_exhausted', lambda: True)
    with pytest.raises(EngineError, match='graph.onnx: the machine runs out of memory'):
        build_engine(library, path, SMS)
    monkeypatch.undo()
    assert build_engine(library, path, SMS).plan


def test_an_interrupt_passes_through_the_library(library, save):
    def interrupt(done, total):
        if done > total // 10:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        build_engine(library, save(decoder_model()), SMS, progress=interrupt)


def test_the_graph_is_summed_up(save):
    graph = read_graph(save(decoder_model()))
    assert graph.counts['Attention'] == 1
    assert graph.counts['TensorScatter'] == 2
    assert graph.constant_bytes == (3 * 4 + 3) * 8  # three shapes of four sizes, one of three
    assert graph.sources == {}


def test_a_set_gets_manifests_and_is_built_once(library, tmp_path):
    stages = write_set(tmp_path, names=('prefill', 'verify'))
    bars = []

    class Bar:
        def __init__(self, label):
            bars.append(label)

        def __enter__(self):
            return lambda done, total: None

        def __exit__(self, *caught):
            return None

    first = build_set(library, tmp_path, SMS, bar=Bar)
    assert [one['stage'] for one in first] == ['prefill', 'verify']
    assert bars == ['building prefill', 'building verify']
    for one in first:
        manifest = read_manifest(tmp_path, one['stage'], 'tensorrt_rtx')
        assert (one['reused'], one['sm'], one['checked']) == (False, list(SMS), False)
        assert manifest.sha256 == one['sha256']
        assert manifest.onnx_sha256 == stages.stage(one['stage']).sha256
        assert manifest.checkpoints == stages.checkpoints
        assert manifest.build['flags'] == ['REQUIRE_USER_ALLOCATION']
        assert len(read_engine(tmp_path, manifest)) == one['bytes']
        assert (manifest.inputs, manifest.outputs) == (INPUTS, OUTPUTS)
    again = build_set(library, tmp_path, SMS)
    assert [one['reused'] for one in again] == [True, True]
    assert [one['sha256'] for one in again] == [one['sha256'] for one in first]
    json.dumps(again)
    assert [one['fault'] for one in examine_set(tmp_path)] == ['', '']
    assert not list(tmp_path.glob('.*'))


def test_the_result_of_a_check_goes_into_the_manifest(library, tmp_path):
    stages = write_set(tmp_path)
    build_set(library, tmp_path, SMS)
    row = {'stage': 'verify', 'sha256': stages.stage('verify').sha256, 'checked': True,
           'error': 4e-3, 'worst_output': 'logits', 'tolerance': 2e-2, 'bytes': 1}
    checks = tmp_path / 'onnx' / 'checks.json'
    report = {'engines': [row], 'random_frames': 3, 'world_frames': 2, 'loop': {'clips': 50}}
    checks.write_text(json.dumps(report))
    again = build_set(library, tmp_path, SMS)[0]
    assert (again['reused'], again['checked']) == (True, True)
    numerics = {'checked': True, 'error': 4e-3, 'worst_output': 'logits', 'tolerance': 2e-2,
                'random_frames': 3, 'world_frames': 2, 'loop': {'clips': 50}}
    assert read_manifest(tmp_path, 'verify', 'tensorrt_rtx').numerics == numerics
    checks.write_text(json.dumps({**report, 'engines': [{**row, 'error': 5e-3}]}))
    assert record_numerics(tmp_path) == ['verify']  # what a check does that runs after the build
    assert read_manifest(tmp_path, 'verify', 'tensorrt_rtx').numerics == {
        **numerics, 'error': 5e-3}
    checks.write_text(json.dumps({**report, 'engines': [{**row, 'sha256': 'of an older one'}]}))
    assert build_set(library, tmp_path, SMS)[0]['checked'] is False
    checks.write_text('[]')
    with pytest.raises(EngineError, match='checks.json is no report of a check'):
        build_set(library, tmp_path, SMS)


def test_what_no_longer_fits_is_built_again(library, tmp_path):
    write_set(tmp_path)
    build_set(library, tmp_path, SMS)
    engine = tmp_path / 'verify.tensorrt_rtx.engine'
    assert build_set(library, tmp_path, ('86',))[0]['reused'] is False
    engine.write_bytes(engine.read_bytes()[:-1])
    assert 'truncated' in examine_set(tmp_path)[0]['fault']
    assert build_set(library, tmp_path, ('86',))[0]['reused'] is False
    write_set(tmp_path, decoder_model(attention={'scale': 0.5}))
    assert build_set(library, tmp_path, ('86',))[0]['reused'] is False
    assert build_set(library, tmp_path, ('86',), rebuild=True)[0]['reused'] is False
    assert build_set(library, tmp_path, ('86',))[0]['reused'] is True


def test_a_failed_build_leaves_no_engine(library, tmp_path):
    write_set(tmp_path)
    build_set(library, tmp_path, SMS)
    write_set(tmp_path, decoder_model(attention={'softcap': 3.0}))
    with pytest.raises(EngineError, match='softcap'):
        build_set(library, tmp_path, SMS)
    assert not list(tmp_path.glob('.*'))


@pytest.mark.parametrize('inputs, outputs, says', [
    ((dataclasses.replace(INPUTS[0], shape=(1, 9, 64)), *INPUTS[1:]), OUTPUTS,
     r'x float16 \[1, 8, 64\] where x float16 \[1, 9, 64\] is described'),
    (INPUTS, (OUTPUTS[0], dataclasses.replace(OUTPUTS[1], alias='v0'), OUTPUTS[2]),
     'updates other caches in place than described'),
])
def test_a_graph_unlike_its_description_is_refused(library, tmp_path, inputs, outputs, says):
    write_set(tmp_path, inputs=inputs, outputs=outputs)
    with pytest.raises(EngineError, match=says):
        build_set(library, tmp_path, SMS)
    assert not list(tmp_path.glob('*.engine'))


def test_a_graph_that_changed_after_its_export_is_refused(library, tmp_path):
    write_set(tmp_path)
    onnx.save(decoder_model(attention={'scale': 0.5}), str(tmp_path / 'onnx' / 'verify.onnx'))
    with pytest.raises(EngineError, match='verify.onnx has sha256 .* export again'):
        build_set(library, tmp_path, SMS)


def test_a_network_unlike_its_graph_is_refused(library, tmp_path, monkeypatch):
    write_set(tmp_path)
    monkeypatch.setitem(tensorrt_network._DTYPES, 'HALF', 'float32')
    with pytest.raises(EngineError, match=r'has x float32\[1, 8, 64\], needed is x float16'):
        build_set(library, tmp_path, SMS)
    assert not list(tmp_path.glob('*.engine'))


def test_hopper_is_refused_before_anything_is_built(library, tmp_path):
    write_set(tmp_path)
    with pytest.raises(ConfigurationError, match='does not serve compute capability 9.0'):
        build_set(library, tmp_path, ('86', '90'))
