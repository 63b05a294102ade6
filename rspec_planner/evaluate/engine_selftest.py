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
`rspec engine selftest`: what only a GPU that runs the engines can show, on one set folder.

CHECKS is the list; test/engine/test_tensorrt_gpu.py runs the same. `engine_check` does parity
and loop on the CPU with the very graphs that the engines were built from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
import time
from typing import Any

import torch
from torch import Tensor

from rspec_planner.engine.executor import Executor
from rspec_planner.engine.stage_buffers import make_stage, shared_buffers
from rspec_planner.engine.tensorrt_executor import EngineSet, load_set
from rspec_planner.engine.tensorrt_library import Library
from rspec_planner.engine.tensorrt_runtime import Gpu
from rspec_planner.evaluate.engine_check import (
    Amount,
    check_cases,
    check_loop,
    Progress,
    stage_rows,
)
from rspec_planner.evaluate.engine_numerics import compare_sides, Side, torch_side
from rspec_planner.planner.checkpoints import open_tokenizer
from rspec_planner.planner.staging import Source
from rspec_planner.planner.tokenizer import TextTokenizer

#: what a GPU has to show -> how
CHECKS = {
    'parity': 'every stage beside PyTorch on the same GPU, in the same precision',
    'capture': 'every stage in a CUDA graph writes what a plain call writes, over NaN before',
    'replay': 'a thousand replays write the same bits',
    'loop': 'two planners, over engines and over PyTorch, say the same words on held-out clips',
    'timing': "every stage has a time of a replay by the device's clock",
    'restart': 'a second start finds the kernels that the first one compiled',
}
REPLAYS = 1000
#: makes a function that repeats a call on the device without the host's help
Capture = Callable[[Callable[[], None]], Callable[[], None]]
#: returns how long a function keeps the device busy, in milliseconds
Clock = Callable[[Callable[[], None]], float]


@dataclass(frozen=True)
class Device:
    """What a selftest asks of the GPU; a test gives it something else."""

    stream: Any
    capture: Capture
    clock: Clock
    synchronize: Callable[[], None]


def cuda_device(gpu: Gpu) -> Device:
    """Return capture and clock of a real GPU, on a stream of their own."""
    stream = torch.cuda.Stream(gpu.device)  # type: ignore[no-untyped-call]

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may use the GPU meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode='thread_local'):
            call()

        def replay() -> None:
            with torch.cuda.stream(stream):
                graph.replay()  # type: ignore[no-untyped-call]
        return replay

    def clock(call: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                      for _ in range(2))
        begin.record(stream)  # type: ignore[no-untyped-call]
        call()
        end.record(stream)  # type: ignore[no-untyped-call]
        end.synchronize()  # type: ignore[no-untyped-call]
        return float(begin.elapsed_time(end))  # type: ignore[no-untyped-call]

    return Device(stream, capture, clock, stream.synchronize)


def moved(source: Source, gpu: Gpu) -> Source:
    """Return the networks on a GPU."""
    target = source.target.to(gpu.device).pack()
    draft = source.draft
    if draft is not None:
        draft = draft.to(gpu.device).bind(target.text, target.cfg.tokens)
    return replace(source, target=target, draft=draft)


def selftest(library: Library, gpu: Gpu, folder: Path, source: Source, checkpoint: Path,
             amount: Amount, device: Device, replays: int = REPLAYS,
             progress: Progress = lambda label, done, total: None) -> dict[str, Any]:
    """
    Return the report of all checks, 'ok' true when everything holds.

    source: the networks, already on the GPU. checkpoint: folder of the target, with its
    tokenizer. EngineError when an engine is refused: then nothing else is tried.
    """
    tokenizer = open_tokenizer(checkpoint, source.target.cfg)
    engines, first = _started(library, gpu, folder, source)
    kind = {'flavour': engines.describe()['backend'], 'sm': [gpu.sm]}
    rows = {row['stage']: {**row, **kind}
            for row in _parity(engines, source, tokenizer, amount, progress)}
    engines.prepare(device.stream)
    for index, (name, executor) in enumerate(engines.executors.items(), start=1):
        rows[name].update(captured(executor, device, replays))
        progress('capture', index, len(engines.executors))
    loop = check_loop(engines.stages, engines.make, source, tokenizer, amount.clips, progress) \
        if amount.clips else None
    again = _started(library, gpu, folder, source)[1]
    found = list(rows.values())
    checks = {'parity': all(row['checked'] for row in found),
              'capture': all(row['captured'] for row in found),
              'replay': all(row['replayed'] for row in found),
              'loop': loop is None or bool(loop['ok']),
              'timing': all(0.0 < row['ms_p50'] <= row['ms_p99'] for row in found),
              'restart': again['kernels'] in ('warm', 'none')}
    return {**engines.describe(), 'gpu': gpu.name, 'gpu_sm': gpu.sm, 'folder': str(folder),
            'replays': replays, 'engines': found, 'loop': loop, 'first_start': first,
            'second_start': again, 'checks': checks, 'ok': all(checks.values())}


def _started(library: Library, gpu: Gpu, folder: Path,
             source: Source) -> tuple[EngineSet, dict[str, Any]]:
    """Return the engines, how many seconds loading took, and whether kernels were known."""
    began = time.perf_counter()
    engines = load_set(library, gpu, folder, source.checkpoints)
    return engines, {'seconds': time.perf_counter() - began,
                     'kernels': engines.describe()['engine_kernels']}


def _parity(engines: EngineSet, source: Source, tokenizer: TextTokenizer, amount: Amount,
            progress: Progress) -> list[dict[str, Any]]:
    """Return the error of every stage over random and real frames."""
    stages = engines.stages
    shared = shared_buffers(stages, source.target, source.draft)
    found = Side({stage.name: make_stage(stage, stages, shared, engines.make)
                  for stage in stages.stages}, shared)
    done = iter(range(1, amount.random + amount.frames + 1))
    errors = compare_sides(
        torch_side(stages, source.target, source.draft), found, stages, source.target.cfg,
        check_cases(stages, source, tokenizer, amount),
        lambda: progress('parity', next(done), amount.random + amount.frames))
    return list(stage_rows(stages, errors))


def captured(executor: Executor, device: Device, replays: int) -> dict[str, Any]:
    """
    Return whether a captured stage writes what a plain call wrote, and how long one takes.

    Outputs are poisoned before: a graph captured on the wrong device is empty and says nothing.
    States are not, as they are inputs too; a call writes the same rows each time.
    """
    fresh = {name: tensor for name, tensor in executor.outputs.items()
             if all(tensor.data_ptr() != one.data_ptr() for one in executor.inputs.values())}
    executor.enqueue(device.stream)
    device.synchronize()
    wanted = {name: tensor.clone() for name, tensor in executor.outputs.items()}
    replay = device.capture(lambda: executor.enqueue(device.stream))
    _poison(fresh)
    replay()
    device.synchronize()
    first = _same(executor.outputs, wanted)
    _poison(fresh)
    milliseconds = sorted(device.clock(replay) for _ in range(replays))
    device.synchronize()
    return {'captured': first, 'replayed': _same(executor.outputs, wanted),
            'ms_p50': milliseconds[len(milliseconds) // 2],
            'ms_p99': milliseconds[int(0.99 * (len(milliseconds) - 1))]}


def _poison(tensors: Mapping[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(float('nan') if tensor.is_floating_point() else -1)


def _same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Return whether all bits are equal; equal NaNs are not, as nothing writes one."""
    return all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
