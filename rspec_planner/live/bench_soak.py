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
`rspec bench soak`: the node at its full rate for long, and what it holds at the beginning and end.

Inputs come from the harness of the faults, on the wall's pace. Memory, handles and threads are
those of /proc; latency is that of the node's own diagnostics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import json
import os
from pathlib import Path
import tempfile
import threading
import time
from typing import Any

import numpy as np

from rspec_planner.errors import ConfigurationError
from rspec_planner.live.fault_feed import Feed
from rspec_planner.live.fault_node import CAMERAS, VARIABLE
from rspec_planner.live.processes import Child, free_domain_id, Processes
from rspec_planner.live.session import ros_node
from rspec_planner.model.config import CameraConfig, ProfileConfig
from rspec_planner.planner.drafts import EMBEDDED

_START_S, _SAMPLE_S = 90.0, 1.0
#: what of a run is start-up: allocators and caches fill, threads appear
_SETTLE_SHARE, _SETTLE_S = 0.2, 60.0
#: a window is a sixth of the rest at most, ten minutes of an hour
_WINDOW_SHARE, _WINDOW_S = 1 / 3, 600.0
_MIB = 2 ** 20
LIMITS = {'memory_mib': 0.01, 'handles': 0.0, 'threads': 0.0, 'p99_ms': 0.10}


@dataclass(frozen=True)
class Sample:
    """The process at one instant."""

    time_s: float
    memory_mib: float
    handles: int
    threads: int


def sample_of(pid: int, time_s: float) -> Sample:
    """Return what a process holds; raises OSError when it is gone."""
    pages = int(Path(f'/proc/{pid}/statm').read_text(encoding='ascii').split()[1])
    return Sample(time_s, pages * os.sysconf('SC_PAGE_SIZE') / _MIB,
                  len(os.listdir(f'/proc/{pid}/fd')), len(os.listdir(f'/proc/{pid}/task')))


def bench_soak(minutes: float, *, planner: str = 'tiny', rate_hz: float = 10.0,
               progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Run and judge; `ok` says whether everything stayed flat."""
    with tempfile.TemporaryDirectory(prefix='rspec_soak_') as name:
        folder, domain = Path(name), free_domain_id()
        (folder / 'fault').write_text('', encoding='utf-8')
        module = 'rspec_planner' if planner == 'tiny' else 'rspec_planner.live.fault_node'
        with Processes(folder / 'logs', domain_id=domain) as processes:
            child = processes.start_module(
                'node', module, '--ros-args', '-p', 'use_sim_time:=true',
                '-p', f'planning.rate_hz:={rate_hz}',
                extra_environment={VARIABLE: str(folder / 'fault')})
            samples, feed = _run(child, minutes, domain, planner, progress)
            code = processes.stop(child)
    return report_of(samples, list(feed.heard.processing.values()), feed.said(0.0), minutes,
                     planner, code)


def _run(child: Child, minutes: float, domain: int, planner: str,
         progress: Callable[[int, int], None] | None) -> tuple[list[Sample], Feed]:
    os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
    with ros_node('soak_world', domain) as (node, executor):
        feed = Feed(node, CAMERAS if planner == 'none' else tiny_cameras())
        done = threading.Event()

        def spin() -> None:
            while not done.is_set():
                executor.spin_once(timeout_sec=0.05)
        thread = threading.Thread(target=spin, name='ears', daemon=True)
        thread.start()
        feed.start()
        try:
            _await_plan(feed, child)
            return _watch(child, minutes, progress), feed
        finally:
            feed.stop()
            done.set()
            thread.join(5.0)


def tiny_cameras() -> CameraConfig:
    """Return the cameras of the shipped model."""
    config = json.loads((EMBEDDED / 'tiny' / 'config.json').read_text(encoding='utf-8'))
    return ProfileConfig.from_dict(config).cameras


def _await_plan(feed: Feed, child: Child) -> None:
    deadline = time.monotonic() + _START_S
    while not feed.heard.plans:
        if time.monotonic() > deadline or not child.running:
            raise ConfigurationError(f'no plan within {_START_S:.0f} s; last lines of the node:\n'
                                     f'{child.tail()}')
        time.sleep(0.1)


def _watch(child: Child, minutes: float, progress: Callable[[int, int], None] | None
           ) -> list[Sample]:
    samples, start = [], time.monotonic()
    while (now := time.monotonic()) - start < 60.0 * minutes and child.running:
        samples.append(sample_of(child.process.pid, now))
        if progress is not None:
            progress(round(now - start), round(60.0 * minutes))
        time.sleep(_SAMPLE_S)
    return samples


def report_of(samples: list[Sample], latencies: list[tuple[float, float]],
              said: Mapping[str, str], minutes: float, planner: str, exit_code: int
              ) -> dict[str, Any]:
    """Compare the first and the last window after the start-up."""
    begin, end = samples[0].time_s, samples[-1].time_s
    settled = min(_SETTLE_SHARE * (end - begin), _SETTLE_S)
    window = min((end - begin - settled) * _WINDOW_SHARE, _WINDOW_S)
    spans = ((begin + settled, begin + settled + window), (end - window, end))
    windows: dict[str, dict[str, float]] = {}
    for name in ('memory_mib', 'handles', 'threads'):
        first, last = (float(np.median([getattr(s, name) for s in samples
                                        if low <= s.time_s <= high])) for low, high in spans)
        windows[name] = {'first': first, 'last': last, 'growth': last / first - 1.0}
    for name, share in (('p50_ms', 50), ('p99_ms', 99)):
        first, last = (_percentile(latencies, span, share) for span in spans)
        windows[name] = {'first': first, 'last': last, 'growth': last / max(first, 1e-9) - 1.0}
    flat = {name: windows[name]['growth'] <= limit for name, limit in LIMITS.items()}
    count = {key: int(said.get(f'{task}.{key}', 0)) for task, key in (
        ('inference_status', 'published_total'), ('inference_status', 'failed_total'),
        ('inputs', 'skipped_total'))}
    return {'minutes': round((end - begin) / 60.0, 2), 'planner': planner,
            'plans': count['published_total'], 'failed': count['failed_total'],
            'skipped': count['skipped_total'], 'settled_s': settled, 'window_s': window,
            'windows': windows, 'flat': flat, 'exit_code': exit_code,
            'ok': all(flat.values()) and exit_code == 0 and not count['failed_total']}


def _percentile(latencies: list[tuple[float, float]], span: tuple[float, float], share: int
                ) -> float:
    inside = [value for arrived, value in latencies if span[0] <= arrived <= span[1]]
    return round(float(np.percentile(inside, share)), 3) if inside else 0.0
