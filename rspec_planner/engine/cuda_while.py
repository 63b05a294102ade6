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
A CUDA graph that repeats another one while a number on the device is not zero.

PyTorch captures graphs but knows no conditional nodes, so the outer graph is built through the
driver (cuda-bindings): a kernel sets the condition, a WHILE node holds the captured graph as a
child and the same kernel behind it. Nothing of it returns to the host before the loop has ended.
CUDA 12.4 and later (CUDA C++ programming guide, conditional graph nodes).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from rspec_planner.engine.kernels.driver import driver_result
from rspec_planner.errors import EngineError

_SOURCE = b"""
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);
extern "C" __global__ void set_condition(cudaGraphConditionalHandle handle,
                                         const long long* number) {
  cudaGraphSetConditional(handle, *number != 0);
}
"""
_ASSIGN_DEFAULT = 1  # every launch begins with the default value


def _bindings() -> tuple[Any, Any]:
    """Return the driver and NVRTC modules of cuda-bindings."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise EngineError(f"Python module '{error.name}' is missing and the WHILE loop needs it: "
                          'pip install -r requirements-cuda.txt, or choose another loop '
                          '(sync, pipelined)') from None
    return driver, nvrtc


def _done(result: tuple[Any, ...]) -> Any:
    """Return what a driver call gave; EngineError with its code otherwise."""
    return driver_result(result, 'the driver refused a step of the WHILE loop; choose another '
                         'loop (sync, pipelined)')


def condition_kernel(capability: tuple[int, int]) -> bytes:
    """Return the machine code of the kernel that sets a condition, for one compute capability."""
    _, nvrtc = _bindings()
    program = _done(nvrtc.nvrtcCreateProgram(_SOURCE, b'condition.cu', 0, [], []))
    arch = f'--gpu-architecture=sm_{capability[0]}{capability[1]}'.encode()
    _done(nvrtc.nvrtcCompileProgram(program, 1, [arch]))
    code = b' ' * int(_done(nvrtc.nvrtcGetCUBINSize(program)))
    _done(nvrtc.nvrtcGetCUBIN(program, code))
    return code


class WhileGraph:
    """Repeats a captured graph while `number` (1,) int64 on the device is not zero."""

    def __init__(self, body: torch.cuda.CUDAGraph, number: Tensor) -> None:
        """Build it; `body` was captured with keep_graph=True and is kept alive here."""
        driver, _ = _bindings()
        self._driver, self._body, self._number = driver, body, number
        context = _done(driver.cuCtxGetCurrent())
        self._graph = _done(driver.cuGraphCreate(0))
        handle = _done(driver.cuGraphConditionalHandleCreate(self._graph, context, 0,
                                                             _ASSIGN_DEFAULT))
        code = condition_kernel(torch.cuda.get_device_capability(number.device))
        self._module = _done(driver.cuModuleLoadData(code))
        kernel = _done(driver.cuModuleGetFunction(self._module, b'set_condition'))
        self._parameters = self._kernel_parameters(kernel, handle)
        first = _done(driver.cuGraphAddKernelNode(self._graph, None, 0, self._parameters))
        inner = self._add_while(handle, context, first)
        child = _done(driver.cuGraphAddChildGraphNode(
            inner, None, 0, driver.CUgraph(body.raw_cuda_graph())))
        _done(driver.cuGraphAddKernelNode(inner, [child], 1, self._parameters))
        self._exec = _done(driver.cuGraphInstantiate(self._graph, 0))
        _done(driver.cuGraphUpload(self._exec, torch.cuda.current_stream().cuda_stream))

    def _kernel_parameters(self, kernel: Any, handle: Any) -> Any:
        """Return the launch of one thread that sets the condition."""
        parameters = self._driver.CUDA_KERNEL_NODE_PARAMS()
        parameters.func = kernel
        parameters.gridDimX = parameters.gridDimY = parameters.gridDimZ = 1
        parameters.blockDimX = parameters.blockDimY = parameters.blockDimZ = 1
        parameters.sharedMemBytes = 0
        parameters.kernelParams = ((int(handle), self._number.data_ptr()),
                                   (ctypes.c_uint64, ctypes.c_void_p))
        return parameters

    def _add_while(self, handle: Any, context: Any, before: Any) -> Any:
        """Add the WHILE node behind a node; return the graph of its body."""
        driver = self._driver
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        node.conditional.ctx = context
        _done(driver.cuGraphAddNode(self._graph, [before], None, 1, node))
        bodies = node.conditional.phGraph_out
        return bodies[0] if isinstance(bodies, list | tuple) else bodies

    def replay(self) -> None:
        """Launch on the current stream."""
        _done(self._driver.cuGraphLaunch(self._exec, torch.cuda.current_stream().cuda_stream))
