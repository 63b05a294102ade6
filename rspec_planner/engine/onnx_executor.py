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
Run an exported stage with ONNX Runtime on the CPU.

This is the check of the very graph that TensorRT parses, not a fast path. Buffers are bound by
address: an output that updates an input in place gets the address of that input, so caches are
not copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rspec_planner.engine.stages import Port, StageFile
from rspec_planner.errors import EngineError


class OnnxExecutor:
    """One stage behind the `Executor` interface."""

    def __init__(self, stage: StageFile, folder: str | Path,
                 bound: Mapping[str, Tensor]) -> None:
        """
        Load the graph and bind every tensor.

        bound: inputs that exist already, all weights and shared caches among them; the others
        are made here. EngineError names a tensor that is missing or does not fit its port.
        """
        self._inputs = {port.name: _tensor(stage, port, bound) for port in stage.inputs}
        self._outputs = {port.name: self._inputs[port.alias] if port.alias else _zeros(port)
                         for port in stage.outputs}
        self._session, self._binding = _bind(stage, Path(folder) / stage.file, self._inputs,
                                             self._outputs)
        weights = {port.name for port in stage.weights}
        self._free = {name: tensor for name, tensor in self._inputs.items()
                      if name not in weights}

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that the caller fills in place; weights are not among them."""
        return self._free

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that `enqueue` overwrites."""
        return self._outputs

    def enqueue(self, stream: torch.cuda.Stream | None = None) -> None:
        """Run the stage at once; the CPU has no streams."""
        self._session.run_with_iobinding(self._binding)


def _zeros(port: Port) -> Tensor:
    return torch.zeros(port.shape, dtype=getattr(torch, port.dtype))


def _tensor(stage: StageFile, port: Port, bound: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of an input, checked."""
    tensor = bound.get(port.name)
    if tensor is None:
        if port.weight is not None:
            raise EngineError(f'stage {stage.name} needs weight {port.weight.tensor} of the '
                              f'{port.weight.checkpoint}: bind it, or export this checkpoint')
        return _zeros(port)
    found = (str(tensor.dtype).removeprefix('torch.'), tuple(tensor.shape))
    if found != (port.dtype, port.shape) or not tensor.is_contiguous():
        raise EngineError(f'stage {stage.name}: {port.name} is {port.dtype} {port.shape}, given '
                          f'is {found[0]} {found[1]}, contiguous: {tensor.is_contiguous()}; '
                          'export this checkpoint in this precision')
    return tensor


def _bind(stage: StageFile, path: Path, inputs: Mapping[str, Tensor],
          outputs: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Return the session and its binding of every tensor by address."""
    import onnx
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    model: Any = str(path)
    if any(port.dtype == 'bfloat16' for port in stage.inputs):
        from rspec_planner.engine.onnx_widen import widened
        model = widened(onnx.load(path)).SerializeToString()
        # fusing away a cast to bf16 and back would take its rounding away
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=['CPUExecutionProvider'])
    kinds = {'float32': onnx.TensorProto.FLOAT, 'float16': onnx.TensorProto.FLOAT16,
             'bfloat16': onnx.TensorProto.BFLOAT16, 'int64': onnx.TensorProto.INT64,
             'uint8': onnx.TensorProto.UINT8, 'bool': onnx.TensorProto.BOOL,
             'int8': onnx.TensorProto.INT8, 'float8_e4m3fn': onnx.TensorProto.FLOAT8E4M3FN}
    binding = session.io_binding()
    for bind, ports, tensors in ((binding.bind_input, stage.inputs, inputs),
                                 (binding.bind_output, stage.outputs, outputs)):
        for port in ports:
            bind(port.name, 'cpu', 0, kinds[port.dtype], list(port.shape),
                 tensors[port.name].data_ptr())
    return session, binding
