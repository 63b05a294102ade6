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
Build one engine from one ONNX file, for either flavour of TensorRT.

TensorRT-RTX builds ahead of time for several compute capabilities at once and needs no GPU;
full TensorRT times kernels on the GPU at hand and remembers the times in a timing cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
import threading
import time
from typing import Any

from rspec_planner.engine.engine_manifest import write_atomically
from rspec_planner.engine.stages import Port
from rspec_planner.engine.tensorrt_library import Library
from rspec_planner.engine.tensorrt_memory import check_memory, is_exhausted, MIB, peak_memory
from rspec_planner.engine.tensorrt_network import Network, read_graph
from rspec_planner.errors import EngineError

#: done and total steps of a build
Progress = Callable[[int, int], None]
PROGRESS_STEPS = 1000


@dataclass(frozen=True)
class BuiltEngine:
    """
    A plan in memory and what is known of it.

    ports: inputs, then outputs, with name, dtype and shape only. seconds: wall clock of parsing
    and building. cpu_seconds: processor time of the same. peak_mib: largest resident size of
    the process meanwhile, 0 where it cannot be measured. warnings: of the build, those of the
    parser are errors.
    """

    plan: Any
    ports: tuple[Port, ...]
    flags: tuple[str, ...]
    warnings: tuple[str, ...]
    seconds: float
    cpu_seconds: float
    peak_mib: int


def build_engine(library: Library, onnx_path: str | Path, targets: tuple[str, ...],
                 timing_cache: Path | None = None,
                 progress: Progress | None = None) -> BuiltEngine:
    """
    Return the engine of an ONNX file for the compute capabilities in `targets`.

    timing_cache: file that full TensorRT reads and updates, the other flavour has no use for it.
    Raises EngineError when the parser or the builder refuses, or when memory runs out.
    """
    graph = read_graph(onnx_path)
    check_memory(str(onnx_path), graph.constant_bytes)
    started, started_cpu = time.perf_counter(), time.process_time()
    with peak_memory() as peak:
        network = Network(library, onnx_path)
        network.parse(graph)
        library.log.messages.clear()
        monitor = _monitor(library.module, progress)
        config, flags = _configure(network, targets, timing_cache, monitor)
        plan = network.builder.build_serialized_network(network.network, config)
    monitor.raise_reason(str(onnx_path))
    if plan is None:
        raise EngineError(f'{onnx_path}: {library.flavour.name} builds no engine for compute '
                          f'capability {", ".join(targets)}: {library.log.errors()}')
    warnings = tuple(text for severity, text in library.log.messages if severity == 'WARNING')
    network.refuse_unused(warnings)
    if timing_cache and _has_timing_cache(library):
        write_atomically(timing_cache, memoryview(config.get_timing_cache().serialize()))
    return BuiltEngine(memoryview(plan), network.ports(), flags, warnings,
                       time.perf_counter() - started, time.process_time() - started_cpu,
                       peak[0] // MIB if peak else 0)


def _has_timing_cache(library: Library) -> bool:
    """Return whether a flavour times kernels; with TensorRT-RTX these calls do nothing."""
    return not library.flavour.ahead_of_time


def _configure(network: Network, targets: tuple[str, ...], timing_cache: Path | None,
               monitor: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the builder's configuration and the names of its flags."""
    library, trt = network.library, network.library.module
    config = network.builder.create_builder_config()
    config.progress_monitor = monitor
    config.max_aux_streams = 0  # one stream, so that a caller's CUDA graph holds everything
    if library.flavour.ahead_of_time:
        config.num_compute_capabilities = len(targets)
        for index, sm in enumerate(targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, f'SM{sm}'), index)
        # nothing is allocated inside an enqueue, or the build fails: what a capture needs
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        return config, ('REQUIRE_USER_ALLOCATION',)
    if timing_cache is not None:
        known = timing_cache.read_bytes() if timing_cache.is_file() else b''
        config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)
    return config, ()


class _Phases:
    """How much of a build is done; phases nest, overlap and repeat."""

    def __init__(self) -> None:
        self._running: dict[str, list[Any]] = {}  # name -> [name of the one above, steps, done]
        self._shown = 0.0

    def start(self, name: str, above: str | None, steps: int) -> None:
        """Begin a phase of so many steps."""
        self._running[name] = [above, steps, 0]

    def finish(self, name: str) -> None:
        """End a phase."""
        self._running.pop(name, None)

    def step(self, name: str, step: int) -> float:
        """Count a step, from 0; return the share of the build that is done, never a smaller."""
        if name in self._running:
            self._running[name][2] = step + 1
        self._shown = max(self._shown, self._share(None))
        return self._shown

    def _share(self, above: str | None) -> float:
        for name, (parent, steps, done) in self._running.items():
            if parent == above:
                return float(min(1.0, (done + self._share(name)) / max(steps, 1)))
        return 0.0


def _monitor(trt: Any, progress: Progress | None) -> Any:
    """
    Return a progress monitor that ends the build when memory runs out or the user interrupts.

    The library calls it from its own threads; an exception must not cross them.
    """
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._lock, self._phases = threading.Lock(), _Phases()
            self._reason: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                self._phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                with self._lock:
                    done = self._phases.step(phase_name, step)
                    if progress is not None:
                        progress(int(PROGRESS_STEPS * done), PROGRESS_STEPS)
                if is_exhausted():
                    raise EngineError('the machine runs out of memory, so the build was ended: '
                                      'end other programs or export with weights as inputs')
            except BaseException as error:
                self._reason = self._reason or error
            return self._reason is None

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                self._phases.finish(phase_name)

        def raise_reason(self, origin: str) -> None:
            """Raise what ended the build, if anything did."""
            if isinstance(self._reason, EngineError):
                raise EngineError(f'{origin}: {self._reason}')
            if self._reason is not None:
                raise self._reason

    return Monitor()
