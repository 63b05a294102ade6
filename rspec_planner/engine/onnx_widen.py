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
Make a bf16 graph run where only fp32 kernels exist.

ONNX Runtime has next to no bf16 kernels for the CPU. Every node that reads or writes bf16 gets
casts around it: it computes in fp32 from bf16 inputs and its results are rounded to bf16, which
is what a bf16 kernel with an fp32 accumulator does. Nodes, wiring and the graph's own inputs and
outputs stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WIDE_TYPES = ('Cast',)  # ONNX Runtime casts bf16 itself


def widened(model: Any) -> Any:
    """Return a copy of an onnx.ModelProto whose nodes compute in fp32 where they said bf16."""
    import onnx
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    narrow = _narrow_values(copy)
    nodes = [made for node in copy.graph.node for made in _wide_node(node, narrow)]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    del copy.graph.value_info[:]
    return copy


def _narrow_values(model: Any) -> set[str]:
    """Return the names of all bf16 values of the graph."""
    import onnx
    graph = model.graph
    kind = onnx.TensorProto.BFLOAT16
    typed = [*graph.input, *graph.output, *graph.value_info]
    names = {value.name for value in typed if value.type.tensor_type.elem_type == kind}
    return names | {value.name for value in graph.initializer if value.data_type == kind}


def _wide_node(node: Any, narrow: set[str]) -> Iterator[Any]:
    """Yield a node with the casts that it needs."""
    from onnx import helper, TensorProto
    if node.op_type in WIDE_TYPES or not narrow & {*node.input, *node.output}:
        yield node
        return
    for index, name in enumerate(node.input):
        if name in narrow:
            node.input[index] = f'{node.name}/{index}:fp32'
            yield helper.make_node('Cast', [name], [node.input[index]], to=TensorProto.FLOAT)
    back = []
    for index, name in enumerate(node.output):
        if name in narrow:
            node.output[index] = f'{name}:fp32'
            back.append(helper.make_node('Cast', [node.output[index]], [name],
                                         to=TensorProto.BFLOAT16))
    yield node
    yield from back
