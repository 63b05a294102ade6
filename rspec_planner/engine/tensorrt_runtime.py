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
Engines from disk to the GPU: verified, deserialised, compared with their manifest.

Order: manifest, hash, version, host, GPU, precision, weights, ports (engine_manifest.py), then
the library's own opinion of the plan's header, then deserialisation, then what the engine
itself reports. Nothing is rebuilt here and nothing else is taken instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
import re
from typing import Any

import torch

from rspec_planner.engine.engine_manifest import (
    bare,
    check_ports,
    EngineManifest,
    Expectation,
    load_verified,
    write_atomically,
)
from rspec_planner.engine.stages import Port, StageSet
from rspec_planner.engine.tensorrt_library import host_name, Library
from rspec_planner.engine.tensorrt_network import dtype_name
from rspec_planner.errors import EngineError


@dataclass(frozen=True)
class Gpu:
    """The GPU that engines run on. sm: compute capability, '86' for 8.6."""

    device: torch.device
    name: str
    sm: str


def find_gpu(device: str) -> Gpu:
    """Return the GPU 'cuda' or 'cuda:<index>'; EngineError when PyTorch finds none."""
    if not torch.cuda.is_available():
        raise EngineError('TensorRT engines need an NVIDIA GPU and PyTorch finds none: check the '
                          'driver and that PyTorch is a CUDA build, or set engine.backend to '
                          'torch')
    index = torch.cuda.current_device() if device == 'cuda' else torch.device(device).index
    major, minor = torch.cuda.get_device_capability(index)
    return Gpu(torch.device('cuda', index), torch.cuda.get_device_name(index), f'{major}{minor}')


@dataclass(frozen=True)
class LoadedEngine:
    """
    A deserialised engine and a context to run it.

    scratch_bytes: device memory that a call works in; the caller provides it. cache: the
    flavour's cache of compiled kernels, None where it has none. cache_state: 'warm' when kernels
    of an earlier start were found, 'cold' when they are compiled now, 'none' without a cache.
    """

    manifest: EngineManifest
    engine: Any
    context: Any
    gpu: Gpu
    library: Library
    scratch_bytes: int
    cache: Any
    cache_path: Path
    cache_state: str

    def save_cache(self) -> None:
        """Write compiled kernels for the next start; call it after the warm-up, never in one."""
        if self.cache is not None:
            write_atomically(self.cache_path, memoryview(self.cache.serialize()))


def load_engine(library: Library, gpu: Gpu, folder: str | Path, stages: StageSet, stage: str,
                checkpoints: Mapping[str, str]) -> LoadedEngine:
    """
    Return a verified engine of an engine folder.

    stages: the folder's stages.json. checkpoints: digests of the loaded weights, see
    `Expectation`. Raises EngineError for the first thing that does not fit.
    """
    wanted = stages.stage(stage)
    expected = Expectation(library.flavour.name, library.version, gpu.sm, host_name(),
                           stages.precision, checkpoints, wanted.inputs + wanted.outputs)
    manifest, plan = load_verified(folder, stage, expected)
    origin = str(Path(folder) / manifest.file)
    if manifest.onnx_sha256 != wanted.sha256:
        raise EngineError(f'{origin} was built from an older export: rspec engine build --stage '
                          f'{stage} --flavour {manifest.flavour}')
    library.log.messages.clear()
    with torch.cuda.device(gpu.device):  # an engine belongs to the device that is current here
        runtime = library.module.Runtime(library.log)
        _ask_library(library, runtime, plan, origin)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise EngineError(f'{origin}: {library.flavour.name} does not read it '
                              f'({library.log.errors()}): build it again on this version')
        check_ports(engine_ports(engine), bare(manifest.ports), origin)
        _check_aliases(engine, manifest, origin)
        cache_path = _cache_path(Path(folder), manifest, gpu)
        context, cache, state = _create_context(library, engine, cache_path)
    if context is None:
        raise EngineError(f'{origin}: no execution context ({library.log.errors()}): free memory '
                          'of the GPU')
    return LoadedEngine(manifest, engine, context, gpu, library,
                        int(engine.device_memory_size_v2), cache, cache_path, state)


def _ask_library(library: Library, runtime: Any, plan: bytes, origin: str) -> None:
    """Let TensorRT-RTX judge the header of a plan before it reads the rest."""
    if not library.flavour.ahead_of_time:
        return
    validity, bits = runtime.get_engine_validity(plan[:runtime.engine_header_size])
    if validity.name == 'INVALID':
        kinds = library.module.EngineInvalidityDiagnostics.__members__
        reasons = [name for name, kind in kinds.items() if int(bits) & int(kind)]
        raise EngineError(f'{origin}: {library.flavour.name} calls it invalid here '
                          f'({", ".join(reasons) or library.log.errors()}): update the driver, or '
                          'build it again for this GPU')


def engine_ports(engine: Any) -> tuple[Port, ...]:
    """Return what an engine reports of its inputs and outputs: name, dtype, shape."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return tuple(Port(name, dtype_name(engine.get_tensor_dtype(name)),
                      tuple(engine.get_tensor_shape(name))) for name in names)


def _check_aliases(engine: Any, manifest: EngineManifest, origin: str) -> None:
    """Refuse an engine that would copy a cache instead of updating it, or the reverse."""
    for port in manifest.outputs:
        found = engine.get_aliased_input_tensor(port.name) or ''
        if found != port.alias:
            raise EngineError(f'{origin}: output {port.name} shares the buffer of '
                              f'{found or "no input"}, expected is {port.alias or "none"}: build '
                              'it again')


def _cache_path(folder: Path, manifest: EngineManifest, gpu: Gpu) -> Path:
    """Return where compiled kernels lie: they fit one plan and one kind of GPU."""
    card = re.sub(r'[^A-Za-z0-9]+', '-', gpu.name).strip('-')
    return (folder / 'runtime_cache' /
            f'{manifest.stage}.{manifest.sha256[:16]}.{card}.{manifest.version}.cache')


def _create_context(library: Library, engine: Any, cache_path: Path) -> tuple[Any, Any, str]:
    """
    Return context, cache and cache state; the context gets its memory from the caller.

    With TensorRT-RTX kernels are compiled here and at the first call. EAGER: no kernel is
    swapped later, which would break a capture. No CUDA graphs of its own: we capture.
    """
    trt = library.module
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(
        trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    if not library.flavour.ahead_of_time:
        return engine.create_execution_context(config), None, 'none'
    config.dynamic_shapes_kernel_specialization_strategy = (
        trt.DynamicShapesKernelSpecializationStrategy.EAGER)
    config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
    cache = config.create_runtime_cache()
    state = 'cold'
    # a cache of another driver or card is refused by the library, and written anew
    if cache_path.is_file() and cache.deserialize(cache_path.read_bytes()):
        state = 'warm'
    config.set_runtime_cache(cache)
    return engine.create_execution_context(config), cache, state
