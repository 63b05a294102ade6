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
"""A stage as a TensorRT engine: binds our tensors by address and runs on our stream."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rspec_planner.engine.stages import Port
from rspec_planner.engine.tensorrt_runtime import LoadedEngine
from rspec_planner.errors import EngineError

#: TensorRT wants its working memory and its tensors at multiples of this
ALIGNMENT_BYTES = 256


class TensorRTExecutor:
    """
    Runs a loaded engine on buffers that stay where they are.

    `enqueue` is one call of the library: it allocates nothing and waits for nothing, so a
    CUDA graph can hold it between other kernels once `prepare` has run. Tensors that were bound
    are kept alive.
    """

    def __init__(self, loaded: LoadedEngine, inputs: Mapping[str, Tensor],
                 outputs: Mapping[str, Tensor], held: tuple[Tensor, ...]) -> None:
        self._loaded = loaded
        self._inputs = dict(inputs)
        self._outputs = dict(outputs)
        self._held = held

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that the caller fills in place."""
        return self._inputs

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that `enqueue` overwrites."""
        return self._outputs

    def enqueue(self, stream: torch.cuda.Stream | None = None) -> None:
        """Run the stage on `stream`, or on the current stream; EngineError when refused."""
        chosen = stream or torch.cuda.current_stream(self._loaded.gpu.device)
        if not self._loaded.context.execute_async_v3(chosen.cuda_stream):
            raise EngineError(f'engine {self._loaded.manifest.stage} was not enqueued '
                              f'({self._loaded.library.log.errors()}): run rspec engine selftest')

    def prepare(self, stream: torch.cuda.Stream) -> None:
        """
        Run once and wait, which a capture of this stage demands, then keep compiled kernels.

        The call reads and writes the bound buffers, so it belongs before the first frame.
        Raises EngineError when the engine says that it cannot be captured on `stream`.
        """
        loaded = self._loaded
        self.enqueue(stream)
        stream.synchronize()
        if loaded.library.flavour.ahead_of_time and not loaded.context.is_stream_capturable(
                stream.cuda_stream):
            raise EngineError(f'engine {loaded.manifest.stage} cannot be captured in a CUDA '
                              'graph: build it again with this version of rspec_planner')
        loaded.save_cache()


def bind(loaded: LoadedEngine, buffers: Mapping[str, Tensor],
         scratch: Tensor) -> TensorRTExecutor:
    """
    Return an executor over these tensors, each bound by its address.

    buffers: a tensor for every port of the manifest: data, weights, states; an output that
    updates an input in place takes that input's buffer. scratch: uint8 working memory of
    `scratch_bytes` or more; engines that run one after the other on one stream may share it.
    Raises EngineError for a tensor that is missing, surplus, of another dtype, shape or device,
    or not contiguous.
    """
    manifest, context = loaded.manifest, loaded.context
    tensors = {port.name: _buffer(loaded, port, buffers) for port in manifest.ports}
    surplus = sorted(set(buffers) - set(tensors))
    if surplus:
        raise EngineError(f'engine {manifest.stage} has no tensor {surplus[0]}, only '
                          f'{", ".join(tensors)}')
    _check_scratch(loaded, scratch)
    context.set_device_memory(scratch.data_ptr(), scratch.nbytes)
    for name, tensor in tensors.items():
        if not context.set_tensor_address(name, tensor.data_ptr()):
            raise EngineError(f'engine {manifest.stage} refuses the buffer of {name} '
                              f'({loaded.library.log.errors()})')
    states = {port.alias for port in manifest.outputs if port.alias}
    inputs = {port.name: tensors[port.name] for port in manifest.inputs
              if port.weight is None and port.name not in states}
    outputs = {port.name: tensors[port.name] for port in manifest.outputs if not port.alias}
    return TensorRTExecutor(loaded, inputs, outputs, (*tensors.values(), scratch))


def _buffer(loaded: LoadedEngine, port: Port, buffers: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor for a port; EngineError when it is not exactly of its kind."""
    stage = loaded.manifest.stage
    tensor = buffers.get(port.name, buffers.get(port.alias) if port.alias else None)
    if tensor is None:
        raise EngineError(f'engine {stage} has no buffer for {port.name}: give one of '
                          f'{port.dtype}{list(port.shape)}')
    found = (str(tensor.dtype).removeprefix('torch.'), tuple(tensor.shape))
    if found != (port.dtype, port.shape):
        raise EngineError(f'engine {stage}: {port.name} is {found[0]}{list(found[1])}, needed is '
                          f'{port.dtype}{list(port.shape)}')
    if port.alias and tensor.data_ptr() != buffers[port.alias].data_ptr():
        raise EngineError(f'engine {stage}: {port.name} is updated in place and must be the '
                          f'buffer of {port.alias}')
    if tensor.device != loaded.gpu.device or not tensor.is_contiguous():
        raise EngineError(f'engine {stage}: {port.name} must be contiguous on '
                          f'{loaded.gpu.device}, it is on {tensor.device}')
    return tensor


def _check_scratch(loaded: LoadedEngine, scratch: Tensor) -> None:
    if (scratch.device != loaded.gpu.device or scratch.nbytes < loaded.scratch_bytes
            or scratch.data_ptr() % ALIGNMENT_BYTES):
        raise EngineError(f'engine {loaded.manifest.stage} works in {loaded.scratch_bytes} bytes '
                          f'on {loaded.gpu.device}, aligned to {ALIGNMENT_BYTES}; given are '
                          f'{scratch.nbytes} bytes on {scratch.device}')
