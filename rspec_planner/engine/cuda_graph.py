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
How the launches of a frame reach the GPU: graphs, and who decides that the text is complete.

Three graphs are captured, of the prefill, of one iteration and of the flow. Between them:

- 'while': the iteration repeats on the device, the host waits once, at the end of the frame;
- 'sync': the host reads after every iteration whether another one is needed;
- 'pipelined': it reads that of the iteration before while the next one already runs, so that
  the GPU never waits, at the price of one iteration too many, which changes nothing;
- 'eager': no graphs at all, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_while import WhileGraph
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.launch import overlapped
from rspec_planner.errors import ConfigurationError

MODES = ('while', 'sync', 'pipelined', 'eager')
#: runs before a capture: kernels are compiled, workspaces and scratch grow
WARM_UP = 2
STAGES = ('encode', 'prefill', 'decode', 'action')


def capture(body: Callable[[], None], pool: Any = None,
            keep: bool = False) -> torch.cuda.CUDAGraph:
    """Return a captured graph of `body`, which has run before; keep: for `WhileGraph`."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    with torch.inference_mode(), torch.cuda.graph(graph, pool=pool,
                                                  capture_error_mode='thread_local'):
        body()
    return graph


def _event(timing: bool = False) -> Any:
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


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
        self._flag = torch.zeros(2, dtype=torch.int64,
                                 pin_memory=device.frame.device.type == 'cuda')
        self._encode = encode or (lambda: None)
        if mode == 'eager':
            return
        self._events = [_event(True) for _ in range(len(STAGES) + 1)]
        self._marks = [_event() for _ in range(2)]
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), overlapped(pdl):
            self._capture(encode)

    def _capture(self, encode: Callable[[], None] | None) -> None:
        device = self.device
        state = device.frame.numbers.clone()
        with torch.inference_mode():
            for _ in range(WARM_UP):
                device.frame.numbers.copy_(state)
                for part in (self._encode, device.prefill, device.iterate, device.flow):
                    part()
        torch.cuda.synchronize()

        def finish() -> None:
            device.flow()
            device.frame.fetch()

        self._graphs = {'prefill': capture(device.prefill)}
        pool = self._graphs['prefill'].pool()
        if encode is not None:
            self._graphs['encode'] = capture(encode, pool)
        self._graphs['iterate'] = capture(device.iterate, pool, keep=self.mode == 'while')
        self._graphs['action'] = capture(finish, pool)
        self._loop = {'sync': self._sync, 'pipelined': self._pipelined}.get(self.mode) or \
            WhileGraph(self._graphs['iterate'], device.frame.at(Slot.ACTIVE)).replay

    def run(self) -> None:
        """Run the frame that was begun; afterwards its result can be read."""
        self.host_syncs = 0
        if self.mode == 'eager':
            with torch.inference_mode():
                self._encode()
            self.device.run()
            return
        with self._streaming():
            self._events[0].record()
            if 'encode' in self._graphs:
                self._graphs['encode'].replay()
            self._events[1].record()
            self._graphs['prefill'].replay()
            self._events[2].record()
            self._loop()
            self._events[3].record()
            self._graphs['action'].replay()
            self._events[4].record()
        self._events[4].synchronize()
        self.host_syncs += 1

    def prefill(self) -> float:
        """Run encode and prefill of the frame that was begun; return their milliseconds."""
        if self.mode == 'eager':
            return self._eagerly(self._encode, self.device.prefill)
        with self._streaming():
            self._events[0].record()
            if 'encode' in self._graphs:
                self._graphs['encode'].replay()
            self._graphs['prefill'].replay()
            self._events[2].record()
        self._events[2].synchronize()
        return float(self._events[0].elapsed_time(self._events[2]))

    def decode(self) -> float:
        """Run the iterations alone, and fetch; return the iterations' milliseconds."""
        self.host_syncs = 0
        if self.mode == 'eager':
            spent = self._eagerly(self.device.decode)
            self._eagerly(self.device.frame.fetch)
            return spent
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
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _eagerly(self, *parts: Callable[[], None]) -> float:
        started = perf_counter()
        with torch.inference_mode():
            for part in parts:
                part()
            if self.device.frame.device.type == 'cuda':
                torch.cuda.synchronize()
        return 1e3 * (perf_counter() - started)

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

    def _sync(self) -> None:
        self._read(0)
        while self._wait(0):
            self._graphs['iterate'].replay()
            self._read(0)

    def _pipelined(self) -> None:
        mark = 0
        self._read(mark)
        active = True
        while active:
            self._graphs['iterate'].replay()
            self._read(1 - mark)
            active = self._wait(mark)
            mark = 1 - mark
