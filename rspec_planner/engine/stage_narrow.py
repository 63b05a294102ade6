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
Weights of eight bits: which they are, how they are rounded, and how a graph reads them.

The projections of the decoder layers (target, action expert, draft) hold nearly all bytes that a
token reads; embeddings, head, norms and the vision tower stay as they are. A row becomes codes
of eight bits and a scale that is a power of two, so a rounded weight is a bf16 number exactly:
PyTorch with rounded weights computes what an engine computes, and rounding twice changes
nothing. A power of two costs e4m3 a binade of its range and nothing of its precision; it costs
int8 up to one of its seven bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
import re
from typing import Any

import torch
from torch import nn, Tensor

from rspec_planner.engine.stages import NARROW, Port

#: ends the name of the input that holds the scales of the weight it is named after
SCALE = '.scale'
#: precision -> largest code
LARGEST = {'fp8': 448.0, 'int8': 127.0}
_PROJECTION = re.compile(r'\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj\.weight$')


def is_narrow(name: str, precision: str) -> bool:
    """Return whether a parameter of a stage has eight bits in this precision."""
    return precision in NARROW and _PROJECTION.search(name) is not None


def narrowed(weight: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """
    Return codes (N, K) and scales (N,) of weight (N, K): codes * scales is the rounded weight.

    Scales have the dtype of the weight and are the smallest powers of two that keep the codes
    of a row within LARGEST; a row of zeros has 1.
    """
    largest = LARGEST[precision]
    wide = weight.float()
    fraction, exponent = torch.frexp(wide.abs().amax(dim=1) / largest)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent)  # a power of two already
    scale = torch.ldexp(torch.ones_like(fraction), exponent)
    scale = torch.where(fraction == 0, torch.ones_like(scale), scale)
    codes = (wide / scale[:, None]).clamp(-largest, largest)
    if precision == 'int8':
        codes = codes.round()
    return codes.to(getattr(torch, NARROW[precision])), scale.to(weight.dtype)


def rounded(weight: Tensor, precision: str) -> Tensor:
    """Return the weight (N, K) that codes and scales stand for, in its own dtype."""
    codes, scale = narrowed(weight, precision)
    return codes.to(weight.dtype) * scale[:, None]


@torch.no_grad()
def round_weights(model: nn.Module, precision: str) -> None:
    """Round the projections of a model in place; nothing happens in a wide precision."""
    for name, weight in model.named_parameters():
        if is_narrow(f'.{name}', precision) and weight.device.type != 'meta':
            weight.copy_(rounded(weight, precision))


def narrow_inputs(weights: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """Return what a graph binds for the weights of a state dict: codes and scales, or neither."""
    found = dict(weights)
    for name in weights:
        if is_narrow(name, precision):
            found[name], found[name + SCALE] = narrowed(weights[name], precision)
    return found


def narrow_ports(ports: Iterable[Port], precision: str) -> tuple[Port, ...]:
    """Return the inputs of a graph after `narrow_graph`, scales last."""
    codes, scales = [], []
    for port in ports:
        if port.weight is None or not is_narrow(port.name, precision):
            codes.append(port)
            continue
        codes.append(replace(port, dtype=NARROW[precision]))
        scales.append(replace(port, name=port.name + SCALE, shape=port.shape[:1],
                              weight=replace(port.weight, part='scale')))
    return (*codes, *scales)


def narrow_graph(model: Any, precision: str) -> None:
    """
    Let an onnx.ModelProto read its projections as codes and scales.

    Each input becomes two, followed by one DequantizeLinear node over its rows. The scales are
    the last inputs of the graph.
    """
    from onnx import helper, TensorProto
    graph = model.graph
    codes = {'fp8': TensorProto.FLOAT8E4M3FN, 'int8': TensorProto.INT8}
    made, scales = [], []
    for value in graph.input:
        if not is_narrow(value.name, precision):
            continue
        kind = value.type.tensor_type
        scale, wide = value.name + SCALE, f'{value.name}:wide'
        scales.append(helper.make_tensor_value_info(scale, kind.elem_type,
                                                    [kind.shape.dim[0].dim_value]))
        kind.elem_type = codes[precision]
        node = helper.make_node('DequantizeLinear', [value.name, scale], [wide],
                                name=f'dequantize {value.name}', axis=0)
        readers = [reader for reader in graph.node if value.name in reader.input]
        node.metadata_props.extend(readers[0].metadata_props)  # the line of the model
        for reader in readers:
            reader.input[:] = [wide if name == value.name else name for name in reader.input]
        made.append(node)
    nodes = [*made, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.extend(scales)
