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
All layers of a verify or of a flow step in one launch, see `kernels/persistent.cu`.

A selectable way of running what `cuda_rows` runs in nine launches a layer. The weights are kept
a second time, in the order in which the kernel streams them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from rspec_planner.engine.cuda_decoder import Verify
from rspec_planner.engine.cuda_flow import Flow
from rspec_planner.engine.cuda_rows import LayerWeights
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.persistent import (
    bindings,
    done,
    HEAD_DIM,
    machine_code,
    packed,
    PersistentPlan,
    SHARED,
    THREADS,
)
from rspec_planner.errors import ConfigurationError

#: phases of a layer in their order, and the one before all layers
PHASES = ('qkv', 'rotate', 'attend', 'join', 'out', 'gather', 'gate_up', 'down', 'gather_down')
FIRST = 'norm'
#: cycle counts of a phase: begun, what it needs is there, ended; waited for weights, for rows
MARKS = 5
_POINTERS = ('layers', 'hidden', 'middle', 'normed', 'mixed', 'gated', 'parts', 'q', 'peak',
             'total', 'seen', 'cos', 'sin', 'context', 'angle', 'own_keys', 'own_values',
             'counters', 'trace')


class Args(ctypes.Structure):
    """The kernel's argument, `Args` of persistent.cu."""

    _fields_ = [*((name, ctypes.c_uint64) for name in _POINTERS),
                *((name, ctypes.c_uint64) for name in ('count', 'rows', 'head_stride',
                                                       'tap_stride')),
                ('eps', ctypes.c_double), ('scale', ctypes.c_double)]


Launch = Callable[[Args], None]


class CudaLaunch:
    """The compiled kernel of one plan, launched on the current stream."""

    def __init__(self, plan: PersistentPlan, trace: bool = False, free: bool = False) -> None:
        """Compile, see `machine_code`, and load. EngineError where either is refused."""
        self._driver, _ = bindings()
        self._blocks = plan.blocks
        code, self.report = machine_code(plan, trace, free)
        self._module = done(self._driver.cuModuleLoadData(code))
        self._kernel = done(self._driver.cuModuleGetFunction(self._module, b'persistent'))
        limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        done(self._driver.cuFuncSetAttribute(self._kernel, limit, SHARED))

    def __call__(self, args: Args) -> None:
        """Enqueue; cooperative, so that the driver refuses what could not run side by side."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        done(self._driver.cuLaunchCooperativeKernel(
            self._kernel, self._blocks, 1, 1, THREADS, 1, 1, SHARED,
            torch.cuda.current_stream().cuda_stream, ctypes.addressof(pointers)))


@dataclass(frozen=True)
class Context:
    """Where the layers' keys and values are, one-element tensors on the device for places."""

    caches: Sequence[tuple[Tensor, Tensor]]  # of each layer, (KV, capacity, d)
    tables: tuple[Tensor, Tensor]  # cos and sin (positions, d / 2) fp32
    start: Tensor  # rows of the cache that are there before a launch
    angle: Tensor  # rotary position of the first row
    own: tuple[Tensor, Tensor] | None = None  # (KV, rows, d), for rows that leave the cache alone


class PersistentLayers:
    """Packed weights and buffers of layers that run in one launch over `hidden`, in its place."""

    def __init__(self, plan: PersistentPlan, layers: Sequence[LayerWeights], context: Context,
                 rows: int, eps: float, launch: Launch,
                 taps: Mapping[int, Tensor] | None = None, trace: bool = False) -> None:
        """
        Pack the weights and make the buffers.

        rows: how many of the plan's rows are used. taps: by layer, (rows, H) tensors of one
        stride that receive the layer's output too. Raises ConfigurationError for weights that
        are not bf16 or heads that are not 128 wide.
        """
        first = layers[0]
        if first.qkv.dtype != torch.bfloat16 or len(first.norms[0]) != HEAD_DIM:
            raise ConfigurationError(
                f'{first.qkv.dtype} weights and heads of {len(first.norms[0])}: the persistent '
                f'kernel takes bfloat16 and heads of {HEAD_DIM}; run the layers one by one')
        self.plan, self._launch, self._context = plan, launch, context
        device = first.qkv.device
        self.hidden = torch.zeros((plan.rows, plan.hidden), dtype=torch.bfloat16, device=device)
        self.trace = torch.zeros((1 + len(PHASES) * len(layers), MARKS), dtype=torch.int64,
                                 device=device) if trace else None
        self._weights = [self._pack(weights) for weights in layers]
        self._norms = [(weights.input_norm, weights.post_norm, *weights.norms)
                       for weights in layers]
        self._taps = dict(taps or {})
        self._table = self._layer_table(device)
        self._held = self._buffers(device)
        self._args = Args(
            count=len(layers), rows=rows, head_stride=context.caches[0][0].stride(0),
            tap_stride=next((tap.stride(0) for tap in self._taps.values()), 0), eps=eps,
            scale=HEAD_DIM ** -0.5 * 1.4426950408889634,
            **{name: tensor.data_ptr() for name, tensor in self._held.items()})

    def _buffers(self, device: torch.device) -> dict[str, Tensor]:
        """Return what the kernel reads and writes, by the names of its argument."""
        plan, context = self.plan, self._context

        def bf16(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.bfloat16, device=device)

        def fp32(*sizes: int) -> Tensor:
            return torch.zeros(sizes, device=device)

        wide = plan.heads * HEAD_DIM
        columns = wide + 2 * plan.kv_heads * HEAD_DIM
        most = max(plan.qkv.split * columns, plan.out.split * plan.hidden,
                   plan.down.split * plan.hidden)
        seen = plan.key_parts * plan.kv_heads * plan.queries
        own = context.own or (bf16(1), bf16(1))
        return {
            'layers': self._table, 'hidden': self.hidden, 'middle': bf16(plan.rows, plan.hidden),
            'normed': bf16(plan.rows, plan.hidden), 'mixed': bf16(plan.rows, wide),
            'gated': bf16(plan.rows, plan.intermediate), 'parts': fp32(most * plan.rows),
            'q': bf16(plan.rows, wide), 'peak': fp32(seen), 'total': fp32(seen),
            'seen': fp32(seen, HEAD_DIM), 'cos': context.tables[0], 'sin': context.tables[1],
            'context': context.start, 'angle': context.angle, 'own_keys': own[0],
            'own_values': own[1],
            'counters': torch.zeros(2, dtype=torch.int32, device=device),
            'trace': self._table if self.trace is None else self.trace}

    def _pack(self, weights: LayerWeights) -> tuple[Tensor, ...]:
        plan = self.plan
        return (packed(weights.qkv, plan.qkv.wide), packed(weights.out, plan.out.wide),
                packed(weights.gate_up, plan.up.wide, gated=True),
                packed(weights.down, plan.down.wide))

    def _layer_table(self, device: torch.device) -> Tensor:
        """Return the addresses of every layer, `Layer` of persistent.cu."""
        rows = []
        for index, (matrices, norms) in enumerate(zip(self._weights, self._norms)):
            tap = self._taps.get(index)
            tensors = (*matrices, *norms, *self._context.caches[index])
            rows.append([*(tensor.data_ptr() for tensor in tensors),
                         0 if tap is None else tap.data_ptr()])
        return torch.tensor(rows, dtype=torch.int64, device=device)

    def first(self, count: int, launch: Launch) -> PersistentLayers:
        """Return a twin over the same buffers that runs the first layers, through a launch."""
        twin = copy(self)
        twin._launch, twin._args = launch, Args.from_buffer_copy(self._args)
        twin._args.count = count
        return twin

    def with_rows(self, rows: int, taps: Mapping[int, Tensor]) -> PersistentLayers:
        """Return a twin over the same weights and buffers that uses other rows and taps."""
        twin = copy(self)
        twin._taps = dict(taps)
        twin._table = twin._layer_table(self._table.device)
        twin._args = Args.from_buffer_copy(self._args)
        twin._args.rows, twin._args.layers = rows, twin._table.data_ptr()
        twin._args.tap_stride = next((tap.stride(0) for tap in taps.values()), 0)
        return twin

    def __call__(self) -> None:
        """Enqueue one launch."""
        self._launch(self._args)


def multiprocessors(device: torch.device) -> int:
    """Return how many blocks run side by side."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class PersistentFlow(Flow):
    """The flow of another one, every step's layers in one launch."""

    def __init__(self, flow: Flow, launch: Launch | None = None, blocks: int = 0,
                 trace: bool = False) -> None:
        """
        Pack the expert's layers.

        launch, blocks: by default the kernel on the flow's GPU. Raises ConfigurationError for
        several candidates or other shapes than the kernel takes.
        """
        self.__dict__.update(flow.__dict__)
        shape, frame = flow.rows.shape, flow._frame
        if shape.samples != 1:
            raise ConfigurationError(f'{shape.samples} candidates: the persistent flow takes one')
        plan = PersistentPlan.of(
            shape.rows, shape.hidden, shape.heads, shape.kv_heads, shape.intermediate, False,
            blocks or multiprocessors(frame.device))
        if plan.rows != shape.rows:
            raise ConfigurationError(f'{shape.rows} waypoints: the persistent flow takes '
                                     f'{plan.rows}')
        cache = flow._cache
        context = Context(
            [(cache.keys[index, 0], cache.values[index, 0]) for index in range(len(flow.layers))],
            flow.rows._tables, frame.at(Slot.CONTEXT), frame.at(Slot.CONTEXT_ANGLE),
            (flow.own[0][0], flow.own[1][0]))
        self.persistent = PersistentLayers(plan, flow.layers, context, shape.rows, shape.eps,
                                           launch or CudaLaunch(plan, trace), trace=trace)

    def _velocity(self, noisy: Tensor, step: int) -> Tensor:
        """Return the velocity (1, W, 2) fp32 at one of the steps' times."""
        hidden = self.persistent.hidden
        hidden.copy_(self._entry(noisy, step))
        self.persistent()
        normed = torch.empty_like(hidden)
        self._kernels.norm(hidden, self._norm, normed, self._eps)
        out: Tensor = self._out(normed)
        return out.float().view_as(noisy)


class PersistentVerify(Verify):
    """The verify of another one, all layers in one launch."""

    persistent: PersistentLayers

    def __init__(self, verify: Verify, launch: Launch | None = None, blocks: int = 0,
                 trace: bool = False, like: PersistentVerify | None = None) -> None:
        """
        Pack the target's layers, or share them with `like`, of which rows must round as these.

        launch, blocks: by default the kernel on the verify's GPU. Raises ConfigurationError for
        shapes that the kernel does not take.
        """
        self.__dict__.update(verify.__dict__)
        shape, width = verify.runner.shape, len(verify.ids)
        taps = {index: verify._staged[:, column] for index in range(len(verify.layers))
                if (column := verify.taps.column(index)) is not None}
        if like is not None:
            self.persistent = like.persistent.with_rows(width, taps)
            return
        plan = PersistentPlan.of(
            verify.widest, shape.hidden, shape.heads, shape.kv_heads, shape.intermediate, True,
            blocks or multiprocessors(verify.device))
        caches = [(verify.cache.keys[index, 0], verify.cache.values[index, 0])
                  for index in range(len(verify.layers))]
        context = Context(caches, verify.tables, verify.frame.at(Slot.START),
                          verify.frame.at(Slot.ANGLE))
        self.persistent = PersistentLayers(plan, verify.layers, context, width, shape.eps,
                                           launch or CudaLaunch(plan, trace), taps, trace)

    def __call__(self) -> None:
        """Enqueue one forward."""
        x = self.persistent.hidden[:len(self.ids)]
        torch.index_select(self.embedding, 0, self.ids, out=x)
        self.persistent()
        self.choose(x, self.best, self.widest)
        if self.taps.layers:
            torch.add(self._index, self.frame.at(Slot.START), out=self._slots)
            self.taps.rows.index_copy_(0, self._slots, self._staged)
