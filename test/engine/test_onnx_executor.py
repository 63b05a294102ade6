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

import pytest
import torch

from rspec_planner.engine.stages import Port, StageFile, Weight
from rspec_planner.errors import EngineError

onnx = pytest.importorskip('onnx', reason='onnx is missing: requirements-engine.txt')
pytest.importorskip('onnxruntime', reason='onnxruntime is missing: requirements-engine.txt')
from onnx import helper, TensorProto  # noqa: E402

from rspec_planner.engine.onnx_executor import OnnxExecutor  # noqa: E402
from rspec_planner.engine.onnx_widen import widened  # noqa: E402

CACHE, ROWS = (1, 1, 8, 4), (1, 1, 2, 4)


def graph(kind=TensorProto.FLOAT):
    """Write x @ w into two rows of a cache at `start`, and return the sum of the cache."""
    def value(name, shape, of=kind):
        return helper.make_tensor_value_info(name, of, shape)

    nodes = [helper.make_node('MatMul', ['x', 'w'], ['rows'], name='product'),
             helper.make_node('TensorScatter', ['k0', 'rows', 'start'], ['k0_out'], axis=-2,
                              name='write'),
             helper.make_node('ReduceSum', ['k0_out', 'axes'], ['total'], keepdims=0, name='sum')]
    axes = helper.make_tensor('axes', TensorProto.INT64, [4], [0, 1, 2, 3])
    inputs = [value('x', ROWS), value('start', (1,), TensorProto.INT64), value('k0', CACHE),
              value('w', (4, 4))]
    made = helper.make_graph(nodes, 'g', inputs, [value('total', ()), value('k0_out', CACHE)],
                             initializer=[axes], value_info=[value('rows', ROWS)])
    return helper.make_model(made, opset_imports=[helper.make_opsetid('', 24)], ir_version=10)


def stage(folder, dtype='float32'):
    kind = {'float32': TensorProto.FLOAT, 'bfloat16': TensorProto.BFLOAT16}[dtype]
    onnx.save(graph(kind), folder / 'g.onnx')
    return StageFile('verify', 'g.onnx', '', 0, 24, (
        Port('x', dtype, ROWS), Port('start', 'int64', (1,)), Port('k0', dtype, CACHE),
        Port('w', dtype, (4, 4), Weight('target', 'text.w'))),
        (Port('total', dtype, ()), Port('k0_out', dtype, CACHE, alias='k0')))


def test_buffers_are_updated_where_they_are(tmp_path):
    weight, cache = torch.randn(4, 4), torch.ones(CACHE)
    executor = OnnxExecutor(stage(tmp_path), tmp_path, {'w': weight, 'k0': cache})
    assert set(executor.inputs) == {'x', 'start', 'k0'}
    assert executor.outputs['k0_out'] is cache
    wanted = torch.ones(CACHE)
    for start in (5, 0):
        rows = torch.randn(ROWS)
        executor.inputs['x'].copy_(rows)
        executor.inputs['start'].fill_(start)
        executor.enqueue()
        wanted[:, :, start:start + 2] = rows @ weight
        torch.testing.assert_close(cache, wanted)
        torch.testing.assert_close(executor.outputs['total'], wanted.sum())
    weight.zero_()  # weights are bound, not copied
    executor.enqueue()
    assert cache[:, :, :2].eq(0).all()
    assert cache[:, :, 5:7].abs().sum() > 0


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    made, good = stage(tmp_path), torch.randn(4, 4)
    for bound, said in (({}, 'needs weight text.w of the target'),
                        ({'w': good.half()}, r'w is float32 \(4, 4\), given is float16'),
                        ({'w': torch.randn(4, 5)}, r'given is float32 \(4, 5\)'),
                        ({'w': good.t()}, 'contiguous: False')):
        with pytest.raises(EngineError, match=said):
            OnnxExecutor(made, tmp_path, bound)


def test_a_bf16_graph_rounds_behind_every_node(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(shape, generator=generator).bfloat16()
                    for shape in ((4, 4), ROWS))
    executor = OnnxExecutor(stage(tmp_path, 'bfloat16'), tmp_path, {'w': weight})
    executor.inputs['x'].copy_(rows)
    executor.enqueue()
    product = (rows.float() @ weight.float()).bfloat16()
    assert torch.equal(executor.outputs['k0_out'][:, :, :2], product)
    assert torch.equal(executor.outputs['total'], product.float().sum().bfloat16())


def test_widening_changes_no_port_and_no_node_of_another_type():
    narrow = graph(TensorProto.BFLOAT16)
    wide = widened(narrow)
    assert [value.SerializeToString() for value in (*wide.graph.input, *wide.graph.output)] == [
        value.SerializeToString() for value in (*narrow.graph.input, *narrow.graph.output)]
    kinds = [node.op_type for node in wide.graph.node]
    assert [kind for kind in kinds if kind != 'Cast'] == ['MatMul', 'TensorScatter', 'ReduceSum']
    assert kinds.count('Cast') == 2 + 1 + 2 + 1 + 1 + 1
    same = graph()
    assert [node.op_type for node in widened(same).graph.node] == [
        node.op_type for node in same.graph.node]
