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
How the launches of a frame reach the device: graphs, and who decides that the text is complete.

Three graphs are captured, of the prefill, of one iteration and of the flow. Between them:

- 'while': the iteration repeats on the device, the host waits once, at the end of the frame;
- 'sync': the host reads after every iteration whether another one is needed;
- 'pipelined': it reads that of the iteration before while the next one already runs, so that
  the GPU never waits, at the price of one iteration too many, which changes nothing;
- 'eager': as 'sync', without graphs.

On a CPU there are no graphs: the same launches run one by one, and only reading is decided as
above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_while import WhileGraph
from rspec_planner.engine.executor import Executor
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.launch import overlapped
from rspec_planner.errors import ConfigurationError

MODES = ('while', 'sync', 'pipelined', 'eager')
#: runs before a capture: kernels are compiled, workspaces and scratch grow
WARM_UP = 2
STAGES = ('encode', 'prefill', 'decode', 'action')


class Part(Protocol):
    """Launches of one part of a frame."""

    def replay(self) -> None:
        """Enqueue them."""


class Launches:
    """A part without a graph."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    def replay(self) -> None:
        """Enqueue them one by one."""
        with torch.inference_mode():
            self._body()


class _Stamp:
    """A point in time of a CPU, with the interface of a CUDA event."""

    def record(self) -> None:
        self.at = perf_counter()

    def synchronize(self) -> None:
        """Return at once: a CPU has finished what was called."""

    def elapsed_time(self, later: _Stamp) -> float:
        return 1e3 * (later.at - self.at)


def capture(body: Callable[[], None], pool: Any = None,
            keep: bool = False) -> torch.cuda.CUDAGraph:
    """Return a captured graph of `body`, which has run before; keep: for `WhileGraph`."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    with torch.inference_mode(), torch.cuda.graph(graph, pool=pool,
                                                  capture_error_mode='thread_local'):
        body()
    return graph


def device_ms(run: Callable[[], Any]) -> float:
    """Return the milliseconds between two events around what `run` launches."""
    begin, end = (torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                  for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


class CapturedExecutor:
    """An executor whose launches are captured at its first call, on a GPU."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._graph: torch.cuda.CUDAGraph | None = None
        self._cuda = any(x.device.type == 'cuda' for x in executor.inputs.values())

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that the caller fills in place."""
        return self._executor.inputs

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that `enqueue` overwrites."""
        return self._executor.outputs

    def enqueue(self, stream: torch.cuda.Stream | None = None) -> None:
        """Run on `stream`, or on the current stream."""
        with torch.cuda.stream(stream) if stream else nullcontext():
            if not self._cuda:
                self._executor.enqueue()
                return
            if self._graph is None:
                for _ in range(WARM_UP):
                    self._executor.enqueue()
                torch.cuda.synchronize()
                self._graph = capture(self._executor.enqueue)
            self._graph.replay()


class FrameRunner:
    """Runs the frames of a `DeviceFrame`: `begin` one, call `run`, read its result."""

    def __init__(self, device: DeviceFrame, mode: str = 'while', *,
                 encode: Callable[[], None] | None = None, pdl: bool = False) -> None:
        """
        Warm up and capture. A frame must have been begun on `device`, and is spent here.

        encode: launches that come before the prefill, such as the vision tower's. pdl: capture
        with programmatic dependent launch. Raises ConfigurationError for an unknown mode.
        """
        if mode not in MODES:
            raise ConfigurationError(f"loop '{mode}': use one of {', '.join(MODES)}")
        self.device, self.mode = device, mode
        self.host_syncs = 0  # of the last frame
        place = device.frame.device
        self._cuda = place.type == 'cuda'
        self._flag = torch.zeros(2, dtype=torch.int64, pin_memory=self._cuda)
        self._events = [self._event(True) for _ in range(len(STAGES) + 1)]
        self._marks = [self._event(False) for _ in range(2)]
        self._stream = torch.cuda.Stream(place) if self._cuda else None  # type: ignore[no-untyped-call]
        bodies = {'encode': encode or _nothing, 'prefill': device.open,
                  'iterate': device.iterate, 'action': self._finish}
        with self._streaming(), overlapped(pdl):
            self._parts = self._capture(bodies) if self._cuda and mode != 'eager' else {
                name: Launches(body) for name, body in bodies.items()}
        self._loop = {'while': self._while, 'pipelined': self._pipelined}.get(mode, self._sync)

    def _event(self, timing: bool) -> Any:
        return torch.cuda.Event(enable_timing=timing) if self._cuda else _Stamp()  # type: ignore[no-untyped-call]

    def _finish(self) -> None:
        self.device.flow()
        self.device.frame.fetch()

    def _capture(self, bodies: Mapping[str, Callable[[], None]]) -> dict[str, Part]:
        """Run every part on the frame that was begun, then capture it."""
        numbers = self.device.frame.numbers
        state = numbers.clone()
        with torch.inference_mode():
            for _ in range(WARM_UP):
                numbers.copy_(state)
                for name, body in bodies.items():
                    if name != 'action':
                        body()
                self.device.flow()
        torch.cuda.synchronize()
        pool, parts = None, dict[str, Part]()
        for name, body in bodies.items():
            if body is _nothing:
                parts[name] = Launches(body)
                continue
            repeated = name == 'iterate' and self.mode == 'while'
            graph = capture(body, pool, keep=repeated)
            pool = pool or graph.pool()
            parts[name] = WhileGraph(graph, self.device.frame.at(Slot.ACTIVE)) if repeated \
                else graph
        return parts

    def run(self) -> None:
        """Run the frame that was begun; afterwards its result can be read."""
        self.host_syncs = 0
        with self._streaming():
            self._events[0].record()
            self._parts['encode'].replay()
            self._events[1].record()
            self._parts['prefill'].replay()
            self._events[2].record()
            self._loop()
            self._events[3].record()
            self._parts['action'].replay()
            self._events[4].record()
        self._events[4].synchronize()
        self.host_syncs += 1

    def prefill(self) -> float:
        """Run encode and prefill of the frame that was begun; return their milliseconds."""
        with self._streaming():
            self._events[0].record()
            self._parts['encode'].replay()
            self._parts['prefill'].replay()
            self._events[2].record()
        self._events[2].synchronize()
        return float(self._events[0].elapsed_time(self._events[2]))

    def decode(self) -> float:
        """Run the iterations alone, and fetch; return the iterations' milliseconds."""
        self.host_syncs = 0
        with self._streaming():
            self._events[2].record()
            self._loop()
            self._events[3].record()
            self.device.frame.fetch()
            self._events[4].record()
        self._events[4].synchronize()
        self.host_syncs += 1
        return float(self._events[2].elapsed_time(self._events[3]))

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        """Work on the runner's stream, behind whatever wrote the frame's inputs."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    @property
    def stage_ms(self) -> dict[str, float]:
        """Return the milliseconds of each stage of the last frame, on the device's clock."""
        return {name: before.elapsed_time(after) for name, before, after in zip(
            STAGES, self._events, self._events[1:])}

    def _read(self, mark: int) -> None:
        """Enqueue the copy of ACTIVE to the host."""
        self._flag[mark:mark + 1].copy_(self.device.frame.at(Slot.ACTIVE), non_blocking=True)
        self._marks[mark].record()

    def _wait(self, mark: int) -> bool:
        """Wait for a copy; return whether another iteration is needed."""
        self._marks[mark].synchronize()
        self.host_syncs += 1
        return bool(self._flag[mark])

    def _while(self) -> None:
        part = self._parts['iterate']
        if self._cuda:
            part.replay()
            return
        while int(self.device.frame.at(Slot.ACTIVE)):
            part.replay()

    def _sync(self) -> None:
        self._read(0)
        while self._wait(0):
            self._parts['iterate'].replay()
            self._read(0)

    def _pipelined(self) -> None:
        mark = 0
        self._read(mark)
        active = True
        while active:
            self._parts['iterate'].replay()
            self._read(1 - mark)
            active = self._wait(mark)
            mark = 1 - mark


def _nothing() -> None:
    """Stand for a part that a frame does not have."""
