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

from rspec_planner.errors import EngineError

onnx = pytest.importorskip('onnx', reason='onnx is missing: requirements-engine.txt')
from onnx import helper, TensorProto  # noqa: E402

from rspec_planner.engine import onnx_rules  # noqa: E402
from rspec_planner.engine.onnx_rules import check_graph  # noqa: E402

FLOAT, HALF, INT64, BOOL, DOUBLE = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64,
                                    TensorProto.BOOL, TensorProto.DOUBLE)
Q, KV, CACHE, MASK = (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 16, 8), (1, 1, 4, 16)


def value(name, kind, shape):
    return helper.make_tensor_value_info(name, kind, shape)


def save(path, nodes, inputs, outputs, *, opset=24, constants=(), functions=(), domains=()):
    graph = helper.make_graph(nodes, 'test', inputs, outputs, initializer=list(constants))
    imports = [helper.make_opsetid('', opset),
               *(helper.make_opsetid(domain, 1) for domain in domains)]
    onnx.save(helper.make_model(graph, opset_imports=imports, functions=list(functions)), path)
    return path


def attention(path, *, mask=FLOAT, inputs=None, extra=(), outputs=('y',), opset=24, **attributes):
    """Save an attention of 4 rows over a cache of 16, as the stages have it."""
    names = inputs or ['q', 'k', 'v', 'mask']
    node = helper.make_node('Attention', names, list(outputs), name='mix', **attributes)
    values = [value('q', FLOAT, Q), value('k', FLOAT, CACHE), value('v', FLOAT, CACHE),
              value('mask', mask, MASK), *extra]
    results = [value('y', FLOAT, Q)]
    return save(path, [node], [v for v in values if v.name in names], results, opset=opset)


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'stage.onnx'


def refused(path, said):
    with pytest.raises(EngineError, match=said) as caught:
        check_graph(path)
    assert str(path) in str(caught.value)
    assert '\n' not in str(caught.value)


def test_the_idiom_of_the_stages_is_accepted(path):
    check_graph(attention(path))
    check_graph(attention(path, is_causal=0, softcap=0.0))
    check_graph(attention(path, inputs=['q', 'k', 'v']))


def test_causal_attention(path):
    refused(attention(path, inputs=['q', 'k', 'v'], is_causal=1), "'mix'.*is_causal: .*upper-left")


def test_a_length_beside_the_mask(path):
    names = ['q', 'k', 'v', 'mask', '', '', 'length']
    refused(attention(path, inputs=names, extra=[value('length', INT64, (1,))]),
            'nonpad_kv_seqlen: TensorRT drops it')


@pytest.mark.parametrize('name', ['left_window_size', 'right_window_size'])
def test_a_window(path, monkeypatch, name):
    monkeypatch.setattr(onnx_rules, 'OPSET', 25)
    refused(attention(path, opset=25, **{name: 8}), f'{name}: TensorRT drops it')
    check_graph(attention(path, opset=25, **{name: -1}))


def test_another_opset(path):
    refused(attention(path, opset=25), 'opset 25, must be 24')


def test_past_keys_softcap_and_a_second_output(path):
    past = [value('pk', FLOAT, CACHE), value('pv', FLOAT, CACHE)]
    names = ['q', 'k', 'v', '', 'pk', 'pv']
    refused(attention(path, inputs=names, extra=past, outputs=('y', 'nk', 'nv')), 'past_key')
    refused(attention(path, softcap=30.0), 'softcap: the parser refuses it')
    refused(attention(path, outputs=('y', '', '', 'scores')), 'more than one output')


def test_a_boolean_mask(path):
    refused(attention(path, mask=BOOL), 'mask of bool over float32: make it additive')


def test_a_free_dimension(path):
    node = helper.make_node('Relu', ['x'], ['y'])
    save(path, [node], [value('x', FLOAT, ('rows', 4))], [value('y', FLOAT, ('rows', 4))])
    refused(path, 'x has a dimension rows that is no number')


def test_a_shape_that_the_host_reads(path):
    nodes = [helper.make_node('Shape', ['x'], ['size'], name='read'),
             helper.make_node('Identity', ['size'], ['y'])]
    save(path, nodes, [value('x', FLOAT, (2, 4))], [value('y', INT64, (2,))])
    refused(path, r"'read' \(Shape\): reads a shape on the host")


def test_a_computed_bound(path):
    ends = helper.make_tensor('starts', INT64, [1], [0])
    nodes = [helper.make_node('Slice', ['x', 'starts', 'length'], ['y'], name='cut')]
    save(path, nodes, [value('x', FLOAT, (4,)), value('length', INT64, (1,))],
         [value('y', FLOAT, (4,))], constants=[ends])
    refused(path, "'cut'.*takes its shape from length")


def test_results_whose_shape_depends_on_values(path):
    nodes = [helper.make_node('NonZero', ['x'], ['y'])]
    save(path, nodes, [value('x', FLOAT, (4,))], [value('y', INT64, (1, 4))])
    refused(path, 'NonZero.*shape depends on values')


def test_control_flow(path):
    branch = helper.make_graph([helper.make_node('Identity', ['x'], ['z'])], 'then', [],
                               [value('z', FLOAT, (4,))])
    nodes = [helper.make_node('If', ['flag'], ['y'], then_branch=branch, else_branch=branch)]
    save(path, nodes, [value('flag', BOOL, ()), value('x', FLOAT, (4,))],
         [value('y', FLOAT, (4,))])
    with pytest.raises(EngineError, match='branches|read by no node'):
        check_graph(path)


def scatter(path, nodes, outputs=('out',)):
    inputs = [value('cache', FLOAT, CACHE), value('rows', FLOAT, KV), value('start', INT64, (1,))]
    used = {name for node in nodes for name in node.input}
    return save(path, nodes, [v for v in inputs if v.name in used],
                [value(name, FLOAT, CACHE) for name in outputs])


def update(source='cache', result='out', **attributes):
    return helper.make_node('TensorScatter', [source, 'rows', 'start'], [result], name='write',
                            **{'axis': -2, **attributes})


def test_cache_updates(path):
    check_graph(scatter(path, [update()]))
    refused(scatter(path, [update(mode='circular')]), 'axis -2, mode circular')
    refused(scatter(path, [update(axis=2)]), 'axis 2, mode linear')
    refused(scatter(path, [update(), update(result='two')], ('out', 'two')),
            'updates cache a second time')
    refused(scatter(path, [update(result='inner'), helper.make_node('Relu', ['inner'], ['out'])]),
            'the cache must be an input and the result an output')
    refused(scatter(path, [helper.make_node('TensorScatter', ['cache', 'rows'], ['out'],
                                            axis=-2)]), 'has no start')


def test_a_scatter_that_copies(path):
    node = helper.make_node('ScatterND', ['cache', 'at', 'row'], ['out'])
    save(path, [node], [value('cache', FLOAT, (16, 8)), value('at', INT64, (1, 1)),
                        value('row', FLOAT, (1, 8))], [value('out', FLOAT, (16, 8))])
    refused(path, 'ScatterND.*copies the whole buffer')


def rotary(path, table=FLOAT, **attributes):
    node = helper.make_node('RotaryEmbedding', ['x', 'cos', 'sin'], ['y'], **attributes)
    tables = [value(name, table, (1, 4, 4)) for name in ('cos', 'sin')]
    return save(path, [node], [value('x', FLOAT, Q), *tables], [value('y', FLOAT, Q)])


def test_rotary_tables(path):
    check_graph(rotary(path))
    refused(rotary(path, interleaved=1), 'is interleaved')
    with pytest.raises(EngineError, match='another dtype|contradict'):
        check_graph(rotary(path, table=HALF))


def test_an_unused_input(path):
    save(path, [helper.make_node('Relu', ['x'], ['y'])],
         [value('x', FLOAT, (4,)), value('length', INT64, (1,))], [value('y', FLOAT, (4,))])
    refused(path, 'input length is read by no node')


def test_weights_inside(path, monkeypatch):
    monkeypatch.setattr(onnx_rules, 'MAX_CONSTANT_BYTES', 63)
    weight = helper.make_tensor('weight', FLOAT, [4, 4], [0.0] * 16)
    save(path, [helper.make_node('MatMul', ['x', 'weight'], ['y'])], [value('x', FLOAT, (2, 4))],
         [value('y', FLOAT, (2, 4))], constants=[weight])
    refused(path, 'holds 64 bytes of constants, the largest is weight: weights must be inputs')


def test_precision(path):
    save(path, [helper.make_node('MatMul', ['x', 'w'], ['y'], name='product')],
         [value('x', FLOAT, (2, 4)), value('w', FLOAT, (4, 4))], [value('y', FLOAT, (2, 4))])
    check_graph(path, precision='fp32')
    with pytest.raises(EngineError, match="'product'.*computes in float32, the graph is fp16"):
        check_graph(path, precision='fp16')
    save(path, [helper.make_node('Relu', ['x'], ['y'])], [value('x', DOUBLE, (4,))],
         [value('y', DOUBLE, (4,))])
    refused(path, 'computes in fp64')


def test_types_that_contradict_each_other(path):
    save(path, [helper.make_node('Add', ['x', 'z'], ['y'])],
         [value('x', FLOAT, (4,)), value('z', HALF, (4,))], [value('y', FLOAT, (4,))])
    refused(path, 'types or shapes contradict each other')


def test_foreign_operators_and_functions(path):
    save(path, [helper.make_node('Gelu', ['x'], ['y'], domain='com.example')],
         [value('x', FLOAT, (4,))], [value('y', FLOAT, (4,))], domains=['com.example'])
    refused(path, 'domain com.example')
    inner = helper.make_function('mine', 'Twice', ['a'], ['b'],
                                 [helper.make_node('Add', ['a', 'a'], ['b'])],
                                 [helper.make_opsetid('', 24)])
    save(path, [helper.make_node('Twice', ['x'], ['y'], domain='mine')], [value('x', FLOAT, (4,))],
         [value('y', FLOAT, (4,))], functions=[inner], domains=['mine'])
    refused(path, 'holds the function Twice')


def test_the_source_line_of_a_node_is_named(path):
    node = helper.make_node('Attention', ['q', 'k', 'v'], ['y'], is_causal=1)
    entry = node.metadata_props.add()
    entry.key = onnx_rules.STACK_TRACE
    entry.value = ('File "/a/torch/nn.py", line 3\n File "/b/rspec_planner/engine/stage_x.py", '
                   'line 17, in forward\n File "/a/torch/f.py", line 9')
    save(path, [node], [value('q', FLOAT, Q), value('k', FLOAT, CACHE), value('v', FLOAT, CACHE)],
         [value('y', FLOAT, Q)])
    refused(path, r'from rspec_planner/engine/stage_x\.py:17: has is_causal')
