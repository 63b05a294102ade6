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
From an ONNX file to a TensorRT network: what the parser refuses, and what it must not drop.

The parser ignores some inputs and attributes without an error: measured with TensorRT-RTX 1.7.1,
the only trace of a dropped input is the builder's warning "Unused Input". So that one and all
but one of the parser's are errors here, and the layers that stand for attention, cache update
and rotary embedding are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
import re
from typing import Any

from rspec_planner.engine.onnx_rules import source_line
from rspec_planner.engine.stages import Port
from rspec_planner.engine.tensorrt_library import Library
from rspec_planner.errors import EngineError

#: every int64 input and output causes it; we bind int64 tensors
_EXPECTED_WARNING = re.compile(r'Make sure (in|out)put \S+ has Int64 binding')
#: the builder's word for an input that no layer reads
_UNUSED = 'Unused Input'
#: ONNX operator -> the fused layer that it must become
_FUSED = {'Attention': 'ATTENTION_INPUT', 'TensorScatter': 'KV_CACHE_UPDATE',
          'RotaryEmbedding': 'ROTARY_EMBEDDING'}
#: library's name of a type -> PyTorch's
_DTYPES = {'FLOAT': 'float32', 'HALF': 'float16', 'BF16': 'bfloat16', 'INT64': 'int64',
           'INT32': 'int32', 'INT8': 'int8', 'UINT8': 'uint8', 'BOOL': 'bool',
           'FP8': 'float8_e4m3fn'}


@dataclass(frozen=True)
class Graph:
    """
    What an ONNX file says of itself.

    counts: operator -> nodes. constant_bytes: size of all initializers. sources: node index ->
    'file.py:line'.
    """

    counts: dict[str, int]
    constant_bytes: int
    sources: dict[int, str]


def read_graph(path: str | Path) -> Graph:
    """Return the summary of an ONNX file, without its weights; EngineError if it is none."""
    import onnx
    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError as error:
        raise EngineError(f'{path} does not exist: rspec engine export writes it') from error
    except OSError as error:
        raise EngineError(f'{path} cannot be read ({error.strerror}): check its '
                          'permissions') from error
    except Exception as error:  # protobuf's own class, which moves between its releases
        raise EngineError(f'{path} is no ONNX file ({" ".join(str(error).split())}): export it '
                          'again') from error
    nodes = model.graph.node
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    size = sum(onnx.helper.tensor_dtype_to_np_dtype(entry.data_type).itemsize
               * _product(entry.dims) for entry in model.graph.initializer)
    sources = {index: source for index, node in enumerate(nodes)
               if (source := source_line(node))}
    return Graph(counts, size, sources)


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


class Network:
    """A parsed network with all that must outlive its build."""

    def __init__(self, library: Library, path: str | Path) -> None:
        trt = library.module
        self.library, self.path = library, Path(path)
        self.builder = trt.Builder(library.log)
        strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = self.builder.create_network(strongly_typed)
        self.parser = trt.OnnxParser(self.network, library.log)

    def parse(self, graph: Graph) -> None:
        """
        Parse the file and check what came of it.

        Raises EngineError with node, operator, line of the model's code and the parser's reason.
        """
        self.library.log.messages.clear()
        parsed = self.parser.parse_from_file(str(self.path))
        errors = [_described(self.parser.get_error(index), graph)
                  for index in range(self.parser.num_errors)]
        if errors or not parsed:
            more = f' (and {len(errors) - 1} more)' if len(errors) > 1 else ''
            raise EngineError(f'{self.path}: {errors[0] if errors else self.library.log.errors()}'
                              f'{more}; change the export')
        self._refuse_warnings()
        self._refuse_dropped_layers(graph)
        self._refuse_host_inputs()

    def ports(self) -> tuple[Port, ...]:
        """Return inputs, then outputs, with name, dtype and shape only."""
        net = self.network
        tensors = [*(net.get_input(index) for index in range(net.num_inputs)),
                   *(net.get_output(index) for index in range(net.num_outputs))]
        return tuple(Port(tensor.name, dtype_name(tensor.dtype), tuple(tensor.shape))
                     for tensor in tensors)

    def refuse_unused(self, warnings: Sequence[str]) -> None:
        """Raise EngineError when the builder found an input that nothing reads."""
        for text in warnings:
            if text.startswith(_UNUSED):
                raise EngineError(f'{self.path}: "{text}": the parser dropped what reads it; '
                                  'change the export')

    def _refuse_warnings(self) -> None:
        for severity, text in self.library.log.messages:
            if severity == 'WARNING' and not _EXPECTED_WARNING.search(text):
                raise EngineError(f'{self.path}: the parser warns "{text}": it may have dropped '
                                  'something; change the export')

    def _refuse_dropped_layers(self, graph: Graph) -> None:
        found = list(self._layer_types())
        for operator, layer in _FUSED.items():
            wanted = graph.counts.get(operator, 0)
            if found.count(layer) != wanted:
                raise EngineError(f'{self.path}: {wanted} {operator} nodes became '
                                  f'{found.count(layer)} {layer} layers: change the export')

    def _layer_types(self) -> Iterator[str]:
        for index in range(self.network.num_layers):
            yield self.network.get_layer(index).type.name

    def _refuse_host_inputs(self) -> None:
        """Refuse inputs that the host would have to read or to shape before every call."""
        for index in range(self.network.num_inputs):
            tensor = self.network.get_input(index)
            if tensor.is_shape_tensor:
                raise EngineError(f'{self.path}: input {tensor.name} is read by the host to '
                                  'shape another tensor; export static shapes')
            if any(size < 0 for size in tensor.shape):
                raise EngineError(f'{self.path}: input {tensor.name} has shape '
                                  f'{list(tensor.shape)}; export static shapes')


def dtype_name(dtype: Any) -> str:
    """Return PyTorch's name of a type of the library."""
    return _DTYPES.get(dtype.name, str(dtype.name).lower())


def _described(error: Any, graph: Graph) -> str:
    """Return one parser error: node, operator, our source line, reason, the parser's place."""
    source = graph.sources.get(error.node())
    where = f' from {source}' if source else ''
    reason = ' '.join(error.desc().split())
    if reason == 'false':  # what the parser says of an operator that it does not know
        reason = 'TensorRT has no such operator'
    return (f"node {error.node()} '{error.node_name()}' ({error.node_operator()}){where}: "
            f'{reason} [{error.file()}:{error.line()}]')
