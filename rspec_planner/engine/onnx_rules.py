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
What an exported graph must not contain, checked before anybody builds or runs it.

Some ONNX idioms are dropped or read differently by TensorRT without an error (measured with
TensorRT-RTX 1.7.1: `is_causal` aligns upper-left whatever the opset says, `nonpad_kv_seqlen` and
`left_window_size` are ignored). Others make the host wait for the device or forbid a CUDA graph:
shapes that depend on data, lengths that the host reads, control flow. All are refused here, with
the node and the source line that it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
import re
from typing import Any

from rspec_planner.engine.stage_ops import OPSET
from rspec_planner.engine.stages import Port, PRECISIONS, StageFile
from rspec_planner.errors import EngineError

#: weights are inputs; what remains are masks, index ranges and rotary constants of the vision
MAX_CONSTANT_BYTES = 4 << 20
DEFAULT_DOMAINS = ('', 'ai.onnx')
#: operators whose result has a shape that depends on values, or that branch on them
DATA_DEPENDENT = ('Compress', 'If', 'Loop', 'NonMaxSuppression', 'NonZero', 'Scan', 'Unique',
                  'StringSplit', 'SequenceConstruct', 'SequenceAt', 'SplitToSequence')
#: operators that read a shape on the host; exported shapes are numbers
SHAPE_READERS = ('Shape', 'Size')
#: operators that copy a whole cache to change a row of it
COPYING_SCATTERS = ('Scatter', 'ScatterElements', 'ScatterND')
#: operator -> inputs that decide the shape of its result and must be constants
SHAPE_INPUTS = {'ConstantOfShape': (0,), 'Expand': (1,), 'OneHot': (1,), 'Pad': (1,),
                'Range': (0, 1, 2), 'Reshape': (1,), 'Resize': (2, 3), 'Slice': (1, 2, 3, 4),
                'Split': (1,), 'Squeeze': (1,), 'Tile': (1,), 'TopK': (1,), 'Unsqueeze': (1,)}
#: attribute of Attention -> what it must be, and why nothing else
ATTENTION_ATTRIBUTES = {
    'is_causal': (0, 'TensorRT aligns it upper-left, which is wrong once the cache has more rows '
                     'than the block; add an explicit mask'),
    'left_window_size': (-1, 'TensorRT drops it; put the window into the mask'),
    'right_window_size': (-1, 'TensorRT drops it; put the window into the mask'),
    'softcap': (0.0, 'the parser refuses it; apply it outside')}
#: input of Attention -> why it must not be connected
ATTENTION_INPUTS = {
    4: ('past_key', 'the parser refuses it; update the cache with TensorScatter'),
    5: ('past_value', 'the parser refuses it; update the cache with TensorScatter'),
    6: ('nonpad_kv_seqlen', 'TensorRT drops it; put the length into the mask')}
#: operators that do the arithmetic and must do it in the precision of the graph
ARITHMETIC = ('Attention', 'Gemm', 'MatMul')
#: under which name the exporter of PyTorch keeps where a node came from, and our part of it
STACK_TRACE = 'pkg.torch.onnx.stack_trace'
OWN_LINE = re.compile(r'File "[^"]*?(rspec_planner/[^"]+)", line (\d+)')


def source_line(node: Any) -> str:
    """Return the innermost line of our code that a node came from, '' when it is unknown."""
    trace = {entry.key: entry.value for entry in node.metadata_props}.get(STACK_TRACE, '')
    found = OWN_LINE.findall(trace)
    return f'{found[-1][0]}:{found[-1][1]}' if found else ''


def check_graph(path: str | Path, stage: StageFile | None = None,
                precision: str | None = None) -> None:
    """
    Raise EngineError for the first thing in an ONNX file that must not be there.

    stage: also compare names, dtypes, shapes and in-place pairs with their description.
    precision: of PRECISIONS; matrix products and attention must be of this dtype.
    """
    import onnx
    model = onnx.load(str(path), load_external_data=False)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        raise EngineError(f'{path}: types or shapes contradict each other '
                          f'({" ".join(str(error).split())}); change the export') from error
    for problem in _problems(inferred, stage, precision):
        raise EngineError(f'{path}: {problem}')


def _problems(model: Any, stage: StageFile | None, precision: str | None) -> Iterator[str]:
    """Yield what is wrong with a model, one line each."""
    graph = model.graph
    types = _types(graph)
    yield from _header(model)
    yield from _static(graph)
    constants = _constants(graph)
    for node in graph.node:
        for reason in _node_problems(node, constants, types):
            yield _at(node, reason)
        if precision is not None and node.op_type in ARITHMETIC:
            found = types.get(node.input[0], '')
            if found != PRECISIONS[precision]:
                yield _at(node, f'computes in {found or "an unknown type"}, the graph is '
                                f'{precision}: cast its inputs')
    yield from _caches(graph)
    if stage is not None:
        yield from _contract(graph, stage)


def _at(node: Any, reason: str) -> str:
    line = source_line(node)
    return f"node '{node.name}' ({node.op_type}){f' from {line}' if line else ''}: {reason}"


def _header(model: Any) -> Iterator[str]:
    """Yield what is wrong with opset, domains, functions and the amount of constants."""
    import onnx
    for entry in model.opset_import:
        if entry.domain in DEFAULT_DOMAINS and entry.version != OPSET:
            yield f'opset {entry.version}, must be {OPSET}: export with the pinned versions'
    if model.functions:
        yield f'holds the function {model.functions[0].name}: inline it'
    sizes = {value.name: onnx.numpy_helper.to_array(value).nbytes
             for value in model.graph.initializer}
    if sum(sizes.values()) > MAX_CONSTANT_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        yield (f'holds {sum(sizes.values())} bytes of constants, the largest is {largest}: '
               f'weights must be inputs, {MAX_CONSTANT_BYTES} bytes are allowed')


def _static(graph: Any) -> Iterator[str]:
    """Yield values without a fixed shape, and inputs that nothing reads."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if not size.HasField('dim_value'):
                yield (f'{value.name} has a dimension {size.dim_param or "?"} that is no number: '
                       'export static shapes, lengths stay on the device')
    read = {name for node in graph.node for name in node.input}
    for value in graph.input:
        if value.name not in read:
            yield f'input {value.name} is read by no node: drop it'


def _constants(graph: Any) -> set[str]:
    """Return the names of values that are known before the graph runs."""
    known = {value.name for value in graph.initializer}
    for node in graph.node:
        if node.op_type == 'Constant':
            known.update(node.output)
    return known


def _types(graph: Any) -> dict[str, str]:
    """Return the dtype of every value, as PyTorch calls it."""
    from onnx import TensorProto
    values = {value.name: value.type.tensor_type.elem_type
              for value in (*graph.input, *graph.output, *graph.value_info)}
    values.update({value.name: value.data_type for value in graph.initializer})
    names = {'FLOAT': 'float32', 'DOUBLE': 'float64', 'FLOAT8E4M3FN': 'float8_e4m3fn'}
    return {name: names.get(kind, kind.lower()) for name, kind in
            ((name, TensorProto.DataType.Name(code)) for name, code in values.items())}


def _node_problems(node: Any, constants: set[str], types: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with one node."""
    kind = node.op_type
    if node.domain not in DEFAULT_DOMAINS:
        yield f'is of domain {node.domain}: only standard operators reach every engine'
    if kind in DATA_DEPENDENT:
        yield 'has a result whose shape depends on values, or branches: use masks and gathers'
    if kind in SHAPE_READERS:
        yield 'reads a shape on the host: shapes are fixed at export, use the number'
    if kind in COPYING_SCATTERS:
        yield 'copies the whole buffer: update caches with TensorScatter'
    for index in SHAPE_INPUTS.get(kind, ()):
        if index < len(node.input) and node.input[index] not in {'', *constants}:
            yield (f'takes its shape from {node.input[index]}, which is computed: shapes and '
                   'bounds must be constants')
    attributes = {entry.name: entry for entry in node.attribute}
    if kind == 'Attention':
        yield from _attention(node, attributes, types)
    if kind == 'RotaryEmbedding':
        yield from _rotary(node, attributes, types)
    if any(types.get(name) == 'float64' for name in (*node.input, *node.output)):
        yield 'computes in fp64, which no engine does: use fp32'


def _attention(node: Any, attributes: Mapping[str, Any],
               types: Mapping[str, str]) -> Iterator[str]:
    from onnx.helper import get_attribute_value
    for name, (unset, reason) in ATTENTION_ATTRIBUTES.items():
        if name in attributes and get_attribute_value(attributes[name]) != unset:
            yield f'has {name}: {reason}'
    for index, (name, reason) in ATTENTION_INPUTS.items():
        if index < len(node.input) and node.input[index]:
            yield f'has {name}: {reason}'
    if any(name for name in node.output[1:]):
        yield 'has more than one output: the parser refuses it'
    mask = node.input[3] if len(node.input) > 3 else ''
    if mask and types.get(mask) != types.get(node.input[0]):
        yield (f'has a mask of {types.get(mask)} over {types.get(node.input[0])}: make it '
               'additive, in the dtype of the query')


def _rotary(node: Any, attributes: Mapping[str, Any], types: Mapping[str, str]) -> Iterator[str]:
    if 'interleaved' in attributes and attributes['interleaved'].i:
        yield 'is interleaved: the model turns dimension i with i + d / 2'
    if len({types.get(name) for name in node.input[:3]}) > 1:
        yield 'turns a tensor by tables of another dtype: cast first'


def _caches(graph: Any) -> Iterator[str]:
    """Yield cache updates that TensorRT cannot do in place."""
    inputs, outputs = ({value.name for value in part} for part in (graph.input, graph.output))
    seen: set[str] = set()
    for node in graph.node:
        if node.op_type != 'TensorScatter':
            continue
        attributes = {entry.name: entry for entry in node.attribute}
        axis = attributes['axis'].i if 'axis' in attributes else -2
        mode = attributes['mode'].s.decode() if 'mode' in attributes else 'linear'
        if (axis, mode) != (-2, 'linear'):
            yield _at(node, f'has axis {axis}, mode {mode}: only -2, linear is supported')
        if node.input[0] not in inputs or node.output[0] not in outputs:
            yield _at(node, f'updates {node.input[0]} into {node.output[0]}: the cache must be an '
                            'input and the result an output of the graph')
        if node.input[0] in seen:
            yield _at(node, f'updates {node.input[0]} a second time: one update per cache')
        if len(node.input) < 3 or not node.input[2]:
            yield _at(node, 'has no start: give it as a tensor')
        seen.add(node.input[0])


def _contract(graph: Any, stage: StageFile) -> Iterator[str]:
    """Yield where a graph differs from its description."""
    types = _types(graph)
    for what, ports, values in (('inputs', stage.inputs, graph.input),
                                ('outputs', stage.outputs, graph.output)):
        found = tuple(Port(value.name, types[value.name],
                           tuple(size.dim_value for size in value.type.tensor_type.shape.dim))
                      for value in values)
        wanted = tuple(Port(port.name, port.dtype, port.shape) for port in ports)
        for one, other in zip(found, wanted):
            if one != other:
                yield f'{what} has {_spelt(one)} where {_spelt(other)} is described'
        if len(found) != len(wanted):
            yield f'has {len(found)} {what}, described are {len(wanted)}'
    updates = {node.output[0]: node.input[0] for node in graph.node
               if node.op_type == 'TensorScatter'}
    if updates != stage.aliases:
        differing = sorted(set(updates.items()) ^ set(stage.aliases.items()))
        yield f'updates other caches in place than described, see {differing[0]}'


def _spelt(port: Port) -> str:
    return f'{port.name} {port.dtype} {list(port.shape)}'
