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
Watch a running planner from its topics: reasoning, rate, latency, skips, accepted length.

Nothing is asked of the node; what is shown was published by it, on topics that are the same for
every message set. When /clock ticks, ages follow that clock, so that a replayed bag reads like a
live drive.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
import json
import math
import os
import sys
import threading
import time
from typing import Any, TextIO

from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Path
import numpy as np
from rclpy.exceptions import InvalidNamespaceException
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data, QoSProfile
from rclpy.validate_namespace import validate_namespace
from rosgraph_msgs.msg import Clock
from std_msgs.msg import String

from rspec_planner.errors import ConfigurationError, InputError, RspecError
from rspec_planner.live.monitor_view import refresh, TIMES, view
from rspec_planner.live.session import ros_node, stop_on_signals
from rspec_planner.planner.timing import PERCENTILES
from rspec_planner.ros_conversions import stamp_to_ns

NAMESPACE = '/planning/rspec_planner'
RATE_WINDOW_S = 5.0
REFRESH_S = 0.5
FIRST_PLAN_S = 15.0  # how long `once` waits
LEVELS = ('OK', 'WARN', 'ERROR', 'STALE')
#: counts of the view -> task and key of the diagnostics
COUNTS = {'published': ('inference_status', 'published_total'),
          'superseded': ('inference_status', 'superseded_total'),
          'rate limited': ('inference_status', 'rate_limited_total'),
          'rejected': ('inference_status', 'rejected_total'),
          'failed': ('inference_status', 'failed_total'),
          'repeated': ('inference_status', 'repeated_total'),
          'deadline misses': ('latency', 'deadline_misses'),
          'budget misses': ('latency', 'budget_misses')}


@dataclass(frozen=True)
class SeenPlan:
    """One published plan, as far as topics tell."""

    t0_ns: int
    age_ms: float  # arrival minus t0
    reasoning: str
    speed_mps: float  # at t0
    end: tuple[float, float]  # last point in the ego frame at t0, metres

    def line(self) -> str:
        """Return the plan as one line."""
        return (f't0 {self.t0_ns / 1e9:.3f}  age {self.age_ms:6.0f} ms  {self.speed_mps:5.1f} m/s'
                f'  end {self.end[0]:6.1f} {self.end[1]:+6.1f} m  {self.reasoning}')


def end_in_ego_frame(path: Path) -> tuple[float, float]:
    """Return the last pose of a path as seen from its first one, metres ahead and to the left."""
    first, last = path.poses[0].pose, path.poses[-1].pose
    q = first.orientation
    yaw = np.arctan2(2 * (q.w * q.z + q.x * q.y), 1 - 2 * (q.y * q.y + q.z * q.z))
    dx, dy = (last.position.x - first.position.x, last.position.y - first.position.y)
    return (float(np.cos(yaw) * dx + np.sin(yaw) * dy),
            float(-np.sin(yaw) * dx + np.cos(yaw) * dy))


def first_speed(path: Path) -> float:
    """Return the mean speed between the first two poses, m/s, by their own stamps."""
    first, second = path.poses[:2]
    step_s = (stamp_to_ns(second.header.stamp) - stamp_to_ns(first.header.stamp)) / 1e9
    a, b = first.pose.position, second.pose.position
    return math.hypot(b.x - a.x, b.y - a.y) / step_s if step_s > 0 else 0.0


class PlanMonitor:
    """Subscriptions to one planner and what they have brought so far."""

    def __init__(self, node: Node, namespace: str = NAMESPACE) -> None:
        self._node = node
        self._namespace = namespace
        self.plans = 0
        self.newest: SeenPlan | None = None
        self.fresh: deque[SeenPlan] = deque(maxlen=200)  # for `echo`; the reader empties it
        self.diagnostics: dict[str, tuple[int, str, dict[str, str]]] = {}
        self._texts: dict[int, str] = {}
        self._paths: dict[int, Path] = {}
        self._arrivals: deque[float] = deque()
        self._sim_ns: int | None = None
        latest = QoSProfile(depth=10)
        node.create_subscription(String, f'{namespace}/output/reasoning_stamped',
                                 self._on_reasoning, latest)
        node.create_subscription(Path, f'{namespace}/output/path', self._on_path, latest)
        node.create_subscription(DiagnosticArray, '/diagnostics', self._on_diagnostics, latest)
        node.create_subscription(Clock, '/clock', self._on_clock, qos_profile_sensor_data)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as a JSON-ready dict."""
        plan, times = self.newest, self.times()
        return {
            'namespace': self._namespace,
            'plans': self.plans, 'rate_hz': round(self.rate_hz(), 2),
            't0_ns': plan.t0_ns if plan else None,
            'age_ms': round(plan.age_ms, 1) if plan else None,
            'reasoning': plan.reasoning if plan else '',
            'speed_mps': round(plan.speed_mps, 2) if plan else None,
            'end_m': [round(v, 2) for v in plan.end] if plan else None,
            'processing_ms': times.get('processing', {}),
            'pipeline_latency_ms': times.get('pipeline_latency', {}),
            'times_ms': times,
            'accepted_length': self._number('speculation', 'window_accepted_length'),
            'iterations': self._number('speculation', 'iterations'),
            'reused_tokens': self._number('speculation', 'reused_tokens'),
            'tokens_per_second': self._number('speculation', 'tokens_per_second'),
            'confidence': self._number('inference_status', 'confidence')
            if 'confidence' in self._values('inference_status') else None,
            'inputs': self.inputs(),
            'counts': {name: int(self._number(task, key))
                       for name, (task, key) in COUNTS.items() if key in self._values(task)},
            'skipped': self.skipped(),
            'diagnostics': {task: {'level': LEVELS[level], 'message': message}
                            for task, (level, message, _) in sorted(self.diagnostics.items())}}

    def times(self) -> dict[str, dict[str, float]]:
        """Return now, p50, p95 and p99 of each time in milliseconds, as the node measures it."""
        found = {}
        for name in TIMES:
            prefix = '' if name == 'processing' else f'{name}_'
            now = 'processing_time_ms' if name == 'processing' else f'{name}_ms'
            if f'{prefix}p50_ms' in self._values('latency'):
                found[name] = {'now': self._number('latency', now),
                               **{key: self._number('latency', f'{prefix}{key}_ms')
                                  for key in PERCENTILES}}
        return found

    def inputs(self) -> dict[str, dict[str, float]]:
        """Return rate and age of each stream."""
        names = [key.removesuffix('_rate_hz') for key in self._values('inputs')
                 if key.endswith('_rate_hz')]
        return {name: {'rate_hz': self._number('inputs', f'{name}_rate_hz'),
                       'age_ms': self._number('inputs', f'{name}_age_ms')} for name in names}

    def rate_hz(self) -> float:
        """Return plans per second over the last seconds."""
        now = time.monotonic()
        while self._arrivals and now - self._arrivals[0] > RATE_WINDOW_S:
            self._arrivals.popleft()
        if len(self._arrivals) < 2:
            return 0.0
        return (len(self._arrivals) - 1) / (self._arrivals[-1] - self._arrivals[0])

    def streaming(self) -> bool:
        """Tell whether the node has received camera frames, by its own diagnostics."""
        values = self._values('inputs')
        return any(key.startswith('image') and key.endswith('_received') and value != '0'
                   for key, value in values.items()) or self.plans > 0

    def skipped(self) -> dict[str, int]:
        """Return how often each named reason skipped a cycle."""
        values = self._values('inputs')
        return {key.removeprefix('skipped_'): int(value) for key, value in sorted(values.items())
                if key.startswith('skipped_') and key != 'skipped_total'}

    def _values(self, task: str) -> dict[str, str]:
        return self.diagnostics.get(task, (0, '', {}))[2]

    def _number(self, task: str, key: str) -> float:
        try:
            return float(self._values(task).get(key, 0.0))
        except ValueError:
            return 0.0

    def _on_reasoning(self, message: String) -> None:
        data = json.loads(message.data)
        self._texts[int(data['t0_ns'])] = str(data['text'])
        self._join(int(data['t0_ns']))

    def _on_path(self, message: Path) -> None:
        t0_ns = stamp_to_ns(message.header.stamp)
        self._paths[t0_ns] = message
        self._join(t0_ns)

    def _join(self, t0_ns: int) -> None:
        """Count a plan when both its parts have arrived; only t0 joins them."""
        if t0_ns not in self._texts or t0_ns not in self._paths:
            return
        text, path = self._texts.pop(t0_ns), self._paths.pop(t0_ns)
        for parts in (self._texts, self._paths):
            while len(parts) > 20:
                parts.pop(next(iter(parts)))
        if self.newest is not None and self.newest.t0_ns == t0_ns:
            return  # a deadline miss repeats the last plan with its old stamp
        now_ns = self._sim_ns or self._node.get_clock().now().nanoseconds
        self.newest = SeenPlan(t0_ns, (now_ns - t0_ns) / 1e6, text, first_speed(path),
                               end_in_ego_frame(path))
        self.fresh.append(self.newest)
        self.plans += 1
        self._arrivals.append(time.monotonic())

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            owner, _, task = status.name.partition(': ')
            if owner == 'rspec_planner':
                self.diagnostics[task] = (status.level[0], status.message,
                                          {v.key: v.value for v in status.values})

    def _on_clock(self, message: Clock) -> None:
        self._sim_ns = stamp_to_ns(message.clock)


def run_monitor(*, seconds: float = 0.0, once: bool = False, echo: bool = False,
                namespace: str = NAMESPACE, stream: TextIO | None = None,
                stop: threading.Event | None = None) -> dict[str, Any]:
    """
    Show a planner until Ctrl-C (or for `seconds`, or with `once` until the first plan).

    `stream` is where the view goes (None: nowhere); `echo` writes one line per plan instead.
    Returns the last snapshot. Raises InputError when `once` sees no plan in time,
    ConfigurationError for a time or namespace that cannot be.
    """
    if not 0.0 <= seconds < math.inf:
        raise ConfigurationError(f'seconds {seconds:g} is out of range; use 0 (until Ctrl-C) or '
                                 'above')
    _check_namespace(namespace)
    began = shown = time.monotonic()
    with stop_on_signals() as stopped, ros_node(
            'rspec_monitor', viewer=True) as (node, executor):
        monitor = PlanMonitor(node, namespace)
        while not (stopped.is_set() or (stop is not None and stop.is_set())):
            executor.spin_once(timeout_sec=0.05)
            now = time.monotonic()
            if stream is not None and echo:
                while monitor.fresh:
                    print(monitor.fresh.popleft().line(), file=stream, flush=True)
            elif stream is not None and not once and now - shown >= REFRESH_S:
                refresh(stream, monitor.snapshot())
                shown = now
            if once and monitor.plans and (monitor.diagnostics or now - began > 2.0):
                break
            if once and now - began > (seconds or FIRST_PLAN_S):
                domain = os.environ.get('ROS_DOMAIN_ID', '0')
                raise InputError(
                    f'{namespace}/output: no plan within {seconds or FIRST_PLAN_S:.0f} s; check '
                    f'that the node is active and in ROS_DOMAIN_ID {domain}, and its '
                    '/diagnostics')
            if not once and seconds and now - began >= seconds:
                break
        state = monitor.snapshot()
    if once and stream is not None and not echo:
        print('\n'.join(view(state)), file=stream, flush=True)
    return state


def _check_namespace(namespace: str) -> None:
    """Raise ConfigurationError for a name that no node can have."""
    try:
        validate_namespace(namespace)
    except InvalidNamespaceException as error:
        reason = str(error).splitlines()[0].rstrip(':')
        raise ConfigurationError(f"'{namespace}': {reason}; give it like {NAMESPACE}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the monitor as a process."""
    parser = argparse.ArgumentParser(prog='monitor', description='Watch a running planner.')
    parser.add_argument('--seconds', type=float, default=0.0)
    parser.add_argument('--once', action='store_true', help='end after the first plan')
    parser.add_argument('--echo', action='store_true', help='one line per plan')
    parser.add_argument('--json', action='store_true', help='print the last state as JSON')
    parser.add_argument('--namespace', default=NAMESPACE)
    options = parser.parse_args(argv)
    try:
        state = run_monitor(seconds=options.seconds, once=options.once, echo=options.echo,
                            namespace=options.namespace,
                            stream=sys.stderr if options.json else sys.stdout)
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(state), flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
