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
What the node costs beside the planner: transport, waiting, decoding, publishing, memory.

Real processes over DDS: four cameras and odometry in one, the node with a planner that takes no
time in another. A plan needs four frames and the first odometry that is not older than they are;
its overhead runs from the moment at which the last of these inputs was handed to the middleware
until trajectory, path and reasoning are published, without the planner's own time. So it holds
transport, waiting, decoding, selection and publication. `age_ms` is the same from t0 on;
`start_ms` to `publish_ms` add up to it, plan by plan. `bare_decode_ms` is what decoding the four
new frames takes alone, beside nothing at all.
`transport_loss` is the share of frames that never reached the node's process; frames that did, and
were pushed out of the queue before a busy computer took them, are `overflowed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
import json
import os
from pathlib import Path
import platform
import tempfile
import time
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
import numpy as np
from tqdm import tqdm

from rspec_planner.errors import ConfigurationError
from rspec_planner.live.bench_processes import CAMERAS, frame_messages
from rspec_planner.live.processes import Child, ChildError, free_domain_id, Processes
from rspec_planner.live.session import ros_node, stop_on_signals
from rspec_planner.planner.buffers import SelectionLimits
from rspec_planner.planner.frames import CameraFrame, FrameDecoder
from rspec_planner.planner.images import decode_message
from rspec_planner.planner.timing import LatencyWindow, STAGES
from rspec_planner.transport import PROFILE_VARIABLE

MODULE = 'rspec_planner.live.bench_processes'
SECONDS = (5.0, 3600.0)
#: of the age of a plan, which they add up to: until the cycle starts, waiting for inputs, for the
#: decoding of the newest frames, choosing by time, checks and publication
PARTS = ('start', 'wait', 'images', 'select', 'publish')
START_S = 60.0
#: before memory is compared: windows of statistics and the allocator fill in the first minutes
SETTLED_S, SETTLED_SHARE = 5.0, 0.2
#: what the inputs diagnostic says of messages that are missing
CAUSES = {'transport': 'lost in transport: set', 'computer': 'this computer is too busy'}
#: Fast DDS as it is without any profile: a file, because every process of ours sets one otherwise
DEFAULT_PROFILE = """<?xml version="1.0" encoding="UTF-8" ?>
<dds><profiles xmlns="http://www.eprosima.com">
<participant profile_name="plain" is_default_profile="true"><rtps/></participant>
</profiles></dds>
"""


@dataclass(frozen=True)
class Case:
    """One stream of camera frames through one transport."""

    encoding: str  # 'jpeg' or 'raw'
    rate_hz: float
    profile: str = 'shipped'  # or 'default': Fast DDS without a profile

    @property
    def name(self) -> str:
        """Return the case in words."""
        return f'{self.encoding} {self.rate_hz:g} Hz, {self.profile} profile'


CASES = tuple(Case(encoding, rate, profile) for profile in ('shipped', 'default')
              for encoding, rate in (('jpeg', 10.0), ('jpeg', 30.0), ('raw', 10.0)))


@dataclass
class Heard:
    """What the node's diagnostics said in one case."""

    last: dict[str, dict[str, str]] = field(default_factory=dict)  # task -> values
    cycles: dict[int, dict[str, float]] = field(default_factory=dict)  # t0 -> times
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, private MiB
    causes: set[str] = field(default_factory=set)  # of losses, 'transport' or 'computer'

    def take(self, message: DiagnosticArray) -> None:
        """File one array."""
        for status in message.status:
            owner, _, task = status.name.partition(': ')
            if owner == 'rspec_planner':
                self.last[task] = {item.key: item.value for item in status.values}
                self.causes.update(cause for cause, words in CAUSES.items()
                                   if task == 'inputs' and words in status.message)
        engine, latency = self.last.get('engine', {}), self.last.get('latency', {})
        if 'memory_private_mib' in engine:
            self.memory.append((time.monotonic(), float(engine['memory_private_mib'])))
        if 'pipeline_latency_ms' in latency:
            self.cycles[int(latency['t0_ns'])] = {
                key.removesuffix('_ms'): float(value) for key, value in latency.items()
                if key.endswith('_ms')}

    def count(self, task: str, key: str) -> int:
        """Return a counter of the last array."""
        return int(self.last.get(task, {}).get(key, 0))


def bench_node(*, seconds: float = 10.0, width: int = 1920, height: int = 1080,
               cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """
    Measure every case for `seconds` and return the report.

    Raises ConfigurationError for a length out of range, ChildError when a process dies.
    """
    if not SECONDS[0] <= seconds <= SECONDS[1]:
        raise ConfigurationError(f'seconds {seconds} is out of range; use {SECONDS[0]:.0f} to '
                                 f'{SECONDS[1]:.0f}')
    results = [_run(case, seconds, width, height)
               for case in tqdm(cases, unit='case', disable=None, leave=False)]
    shipped = [result for result in results if result['profile'] == 'shipped']
    default = [result for result in results if result['profile'] == 'default']
    return {'processor': platform.processor() or platform.machine(),
            'processors': len(os.sched_getaffinity(0)), 'width': width, 'height': height,
            'seconds': seconds,
            'overhead_ms': max((r['overhead_ms'] for r in shipped),
                               key=lambda window: window['p95'], default=None),
            'transport_loss': max((r['transport_loss'] for r in shipped), default=None),
            'transport_loss_default_profile': max((r['transport_loss'] for r in default),
                                                  default=None),
            'cases': results}


def _run(case: Case, seconds: float, width: int, height: int) -> dict[str, Any]:
    """Measure one case."""
    heard, bare = Heard(), bare_decode(case, width, height)
    domain = free_domain_id()
    with tempfile.TemporaryDirectory(prefix='rspec-bench-') as folder, \
            stop_on_signals() as stopped, _profile(case, Path(folder)), \
            Processes(folder, domain_id=domain) as processes, \
            ros_node('rspec_bench', domain) as (node, executor):
        node.create_subscription(DiagnosticArray, '/diagnostics', heard.take, 100)
        planner = processes.start_module('node', MODULE, 'node')
        cameras = processes.start_module(
            'cameras', MODULE, 'cameras', '--encoding', case.encoding, '--rate',
            str(case.rate_hz), '--seconds', str(seconds), '--width', str(width), '--height',
            str(height))
        deadline = time.monotonic() + seconds + START_S
        used = Used(planner)
        while cameras.running:
            executor.spin_once(timeout_sec=0.05)
            if heard.cycles:
                used.begin()
            processes.check(ended_well=('cameras',))
            if stopped.is_set() or time.monotonic() > deadline:
                raise ChildError(f'{case.name}: the cameras did not finish; the node says: '
                                 f'{planner.cause()}')
        _drain(executor, heard)
        sent = json.loads(cameras.log.read_text().splitlines()[-1])
        share = used.share()
    return {**report_of(case, heard, sent, share), 'bare_decode_ms': bare.summary()}


def windows_of(heard: Heard, inputs_ms: Mapping[int, float]) -> dict[str, LatencyWindow]:
    """Return the times of all plans whose inputs are known; `inputs_ms` by t0."""
    windows = {name: LatencyWindow(1_000_000) for name in (
        'overhead', 'age', 'inputs', *PARTS)}
    for t0_ns, times in heard.cycles.items():
        if t0_ns not in inputs_ms:
            continue
        planner_ms = sum(times[stage] for stage in STAGES)
        age_ms = times['pipeline_latency'] - planner_ms
        node_ms = times['processing_time'] - planner_ms
        known = {name: times[name] for name in ('wait', 'images', 'select')}
        values = {'overhead': age_ms - inputs_ms[t0_ns], 'age': age_ms,
                  'inputs': inputs_ms[t0_ns], 'start': age_ms - node_ms, **known,
                  'publish': node_ms - sum(known.values())}
        for name, value in values.items():
            windows[name].add(value)
    return windows


def bare_decode(case: Case, width: int, height: int, repeats: int = 20) -> LatencyWindow:
    """Return how long the node's decoder takes for one new frame of each camera, milliseconds."""
    decoder, window = FrameDecoder(CAMERAS, SelectionLimits.aspect_tolerance), LatencyWindow()
    messages = frame_messages(case.encoding, width, height)
    for repeat in range(repeats):
        time.sleep(1.0 / case.rate_hz)  # as cold as between two plans
        source = partial(decode_message, messages[repeat % len(messages)],
                         (CAMERAS.height, CAMERAS.width))
        frames = {name: [CameraFrame(source)] for name in CAMERAS.names}
        started = time.perf_counter()
        decoder.finish(frames)
        window.add(1e3 * (time.perf_counter() - started))
    decoder.close()
    return window


@contextmanager
def _profile(case: Case, folder: Path) -> Iterator[None]:
    """Let the children and this process use the transport of a case."""
    before = os.environ.pop(PROFILE_VARIABLE, None)
    if case.profile == 'default':
        path = folder / 'default.xml'
        path.write_text(DEFAULT_PROFILE, encoding='utf-8')
        os.environ[PROFILE_VARIABLE] = str(path)
    try:
        yield
    finally:
        os.environ.pop(PROFILE_VARIABLE, None)
        if before is not None:
            os.environ[PROFILE_VARIABLE] = before


def _drain(executor: Any, heard: Heard) -> None:
    """Listen until the beat after the last frame, whose counts are complete."""
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        executor.spin_once(timeout_sec=0.1)


def _processor_s(child: Child) -> float:
    """Return user and system time of a running child, seconds."""
    fields = Path(f'/proc/{child.process.pid}/stat').read_text().rsplit(') ', 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


class Used:
    """The share of a processor that a child uses from the first plan on."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._began: tuple[float, float] | None = None

    def begin(self) -> None:
        """Start to count, the first time that this is called."""
        if self._began is None:
            self._began = time.monotonic(), _processor_s(self._child)

    def share(self) -> float:
        """Return processor seconds per second, 0 when nothing was counted."""
        if self._began is None:
            return 0.0
        seconds = time.monotonic() - self._began[0]
        return (_processor_s(self._child) - self._began[1]) / seconds if seconds else 0.0


def report_of(case: Case, heard: Heard, sent: Mapping[str, Any],
              processor_share: float) -> dict[str, Any]:
    """Return the figures of one case; `sent` is what the cameras reported."""
    windows = windows_of(heard, {int(t0): ms for t0, ms in sent['inputs_ms'].items()})
    streams = [key for key in heard.last.get('inputs', {})
               if key.startswith('image') and key.endswith('_received')]
    received = [heard.count('inputs', key) for key in sorted(streams)]
    frames = int(sent['frames'])
    overflowed = sum(heard.count('inputs', f'image{i}_overflowed') for i in range(len(received)))
    loss = 1.0 - (sum(received) + overflowed) / (frames * len(received)) \
        if received and frames else 1.0
    anchor = received[1] if len(received) > 1 else 0
    by_design = {name.removesuffix('_total'): heard.count(task, name) for task, name in (
        ('inputs', 'skipped_total'), ('inference_status', 'superseded_total'),
        ('inference_status', 'rate_limited_total'), ('inference_status', 'rejected_total'),
        ('latency', 'deadline_misses'))}
    published = heard.count('inference_status', 'published_total')
    return {'name': case.name, 'encoding': case.encoding, 'rate_hz': case.rate_hz,
            'profile': case.profile, 'frame_bytes': sent['frame_bytes'],
            'sent': frames * len(received), 'received': sum(received),
            'overflowed': overflowed, 'named_causes': sorted(heard.causes),
            'transport_loss': round(max(loss, 0.0), 4), 'plans': published, **by_design,
            'unaccounted': anchor - published - sum(by_design.values()),
            **{f'{name}_ms': window.summary() for name, window in windows.items()},
            'processor_share': round(processor_share, 3), **memory_of(heard.memory)}


def memory_of(samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    """
    Return private memory in MiB, its slope and its growth once the process has settled.

    Growth is the median of the last tenth minus that of the first tenth, MiB; `samples` are
    seconds and MiB.
    """
    spent = samples[-1][0] - samples[0][0] if samples else 0.0
    settled = [(t, mib) for t, mib in samples
               if t >= samples[0][0] + max(SETTLED_S, SETTLED_SHARE * spent)]
    if len(settled) < 2:
        return {'memory_mib': settled[-1][1] if settled else 0.0, 'memory_mib_per_minute': 0.0,
                'memory_growth_mib': 0.0}
    times, values = (np.array(column) for column in zip(*settled))
    slope = float(np.polyfit((times - times[0]) / 60.0, values, 1)[0])
    tenth = max(1, len(values) // 10)
    growth = float(np.median(values[-tenth:]) - np.median(values[:tenth]))
    return {'memory_mib': round(float(values[-1]), 1), 'memory_mib_per_minute': round(slope, 3),
            'memory_growth_mib': round(growth, 2)}
