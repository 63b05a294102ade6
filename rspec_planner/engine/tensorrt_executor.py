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
from pathlib import Path

import torch
from torch import Tensor

from rspec_planner.engine.engine_manifest import ONNX_FOLDER, told_numerics
from rspec_planner.engine.stages import Port, read_stages, StageFile, StageSet
from rspec_planner.engine.tensorrt_library import Library
from rspec_planner.engine.tensorrt_runtime import Gpu, load_engine, LoadedEngine
from rspec_planner.errors import EngineError

#: TensorRT wants its working memory at multiples of this
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
        """Return the buffers that the caller fills in place; weights are not among them."""
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


def bind(loaded: LoadedEngine, given: Mapping[str, Tensor],
         scratch: Tensor) -> TensorRTExecutor:
    """
    Return an executor over these tensors, each bound by its address.

    given: all weights, and whatever else exists already, caches among it; other inputs and
    outputs are made here. An output that updates an input in place takes that input's buffer.
    scratch: uint8 working memory of `scratch_bytes` or more; engines that run one after the
    other on one stream may share it.
    Raises EngineError for a tensor that is missing, surplus, of another dtype, shape or device,
    or not contiguous.
    """
    manifest, context = loaded.manifest, loaded.context
    tensors = {port.name: _tensor(loaded, port, given) for port in manifest.ports
               if not port.alias}
    tensors.update({port.name: tensors[port.alias] for port in manifest.outputs if port.alias})
    surplus = sorted(set(given) - set(tensors))
    if surplus:
        raise EngineError(f'engine {manifest.stage} has no tensor {surplus[0]}, only '
                          f'{", ".join(tensors)}')
    _check_scratch(loaded, scratch)
    context.set_device_memory(scratch.data_ptr(), scratch.nbytes)
    for name, tensor in tensors.items():
        if not context.set_tensor_address(name, tensor.data_ptr()):
            raise EngineError(f'engine {manifest.stage} refuses the buffer of {name} '
                              f'({loaded.library.log.errors()})')
    inputs = {port.name: tensors[port.name] for port in manifest.inputs if port.weight is None}
    outputs = {port.name: tensors[port.name] for port in manifest.outputs}
    return TensorRTExecutor(loaded, inputs, outputs, (*tensors.values(), scratch))


def _tensor(loaded: LoadedEngine, port: Port, given: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of a port, checked, or a new one of zeros."""
    stage, device = loaded.manifest.stage, loaded.gpu.device
    tensor = given.get(port.name)
    if tensor is None:
        if port.weight is not None:
            raise EngineError(f'engine {stage} needs weight {port.weight.tensor} of the '
                              f'{port.weight.checkpoint}: bind it')
        return torch.zeros(port.shape, dtype=getattr(torch, port.dtype), device=device)
    found = (str(tensor.dtype).removeprefix('torch.'), tuple(tensor.shape))
    if found != (port.dtype, port.shape):
        raise EngineError(f'engine {stage}: {port.name} is {found[0]}{list(found[1])}, needed is '
                          f'{port.dtype}{list(port.shape)}')
    if tensor.device != device or not tensor.is_contiguous():
        raise EngineError(f'engine {stage}: {port.name} must be contiguous on {device}, it is on '
                          f'{tensor.device}')
    return tensor


def _check_scratch(loaded: LoadedEngine, scratch: Tensor) -> None:
    if (scratch.device != loaded.gpu.device or scratch.nbytes < loaded.scratch_bytes
            or scratch.data_ptr() % ALIGNMENT_BYTES):
        raise EngineError(f'engine {loaded.manifest.stage} works in {loaded.scratch_bytes} bytes '
                          f'on {loaded.gpu.device}, aligned to {ALIGNMENT_BYTES}; given are '
                          f'{scratch.nbytes} bytes on {scratch.device}')


class EngineSet:
    """The engines of one folder; `make` is what `graph_stages` takes."""

    def __init__(self, stages: StageSet, engines: Mapping[str, LoadedEngine],
                 scratch: Tensor) -> None:
        self.stages = stages
        self.engines = dict(engines)
        self.executors: dict[str, TensorRTExecutor] = {}
        self._scratch = scratch

    def make(self, stage: StageFile, given: Mapping[str, Tensor]) -> TensorRTExecutor:
        """Return the executor of a stage; all share one working memory and so one stream."""
        self.executors[stage.name] = bind(self.engines[stage.name], given, self._scratch)
        return self.executors[stage.name]

    def prepare(self, stream: torch.cuda.Stream) -> None:
        """Run every stage once and keep what was compiled: seconds to minutes at a first start."""
        for executor in self.executors.values():
            executor.prepare(stream)

    def describe(self) -> dict[str, str]:
        """Return what a diagnostic shows: flavour, version, precision, GPUs, check, hashes."""
        manifests = [engine.manifest for engine in self.engines.values()]
        first = manifests[0]
        return {'backend': first.flavour, 'tensorrt_version': first.version,
                'engine_precision': first.precision, 'engine_sm': ','.join(first.targets),
                'engine_kernels': ','.join(sorted({engine.cache_state for engine
                                                   in self.engines.values()})),
                'engine_numerics': told_numerics(manifests),
                **{f'{one.stage}_sha256': one.sha256 for one in manifests}}


def load_set(library: Library, gpu: Gpu, folder: str | Path,
             checkpoints: Mapping[str, str]) -> EngineSet:
    """
    Return all engines of a set folder, each verified; EngineError for the first that does not fit.

    checkpoints: 'target', 'draft' -> digest of the loaded weights.
    """
    stages = read_stages(Path(folder) / ONNX_FOLDER, verify=False)  # graphs are not read here
    engines = {stage.name: load_engine(library, gpu, folder, stages, stage.name, checkpoints)
               for stage in stages.stages}
    size = max(engine.scratch_bytes for engine in engines.values())
    return EngineSet(stages, engines, torch.empty(size, dtype=torch.uint8, device=gpu.device))
