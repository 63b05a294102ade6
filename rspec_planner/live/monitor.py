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

Nothing is asked of the node; what is shown was published by it. When /clock ticks, ages follow
that clock, so that a replayed bag reads like a live drive.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
import json
import math
import os
import sys
import threading
import time
from typing import Any, TextIO

from diagnostic_msgs.msg import DiagnosticArray
import numpy as np
from rclpy.exceptions import InvalidNamespaceException
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data, QoSProfile
from rclpy.validate_namespace import validate_namespace
from rosgraph_msgs.msg import Clock
from std_msgs.msg import Float64, String
from trajectory_msgs.msg import MultiDOFJointTrajectory

from rspec_planner.errors import ConfigurationError, InputError, RspecError
from rspec_planner.live.session import ros_node, stop_on_signals
from rspec_planner.planner.timing import LatencyWindow
from rspec_planner.ros_conversions import stamp_to_ns

NAMESPACE = '/planning/rspec_planner'
RATE_WINDOW_S = 5.0
REFRESH_S = 0.5
FIRST_PLAN_S = 15.0  # how long `once` waits
LEVELS = ('OK', 'WARN', 'ERROR', 'STALE')


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


def end_in_ego_frame(message: MultiDOFJointTrajectory) -> tuple[float, float]:
    """Return the last point of a trajectory as seen from its first one."""
    first, last = (point.transforms[0] for point in (message.points[0], message.points[-1]))
    q = first.rotation
    yaw = np.arctan2(2 * (q.w * q.z + q.x * q.y), 1 - 2 * (q.y * q.y + q.z * q.z))
    dx, dy = (last.translation.x - first.translation.x, last.translation.y - first.translation.y)
    return (float(np.cos(yaw) * dx + np.sin(yaw) * dy),
            float(-np.sin(yaw) * dx + np.cos(yaw) * dy))


def _adder(window: LatencyWindow) -> Callable[[Float64], None]:
    """Return a callback with exactly one parameter: rclpy passes a second one if it can."""
    def add(message: Float64) -> None:
        window.add(message.data)
    return add


class PlanMonitor:
    """Subscriptions to one planner and what they have brought so far."""

    def __init__(self, node: Node, namespace: str = NAMESPACE) -> None:
        self._node = node
        self.plans = 0
        self.newest: SeenPlan | None = None
        self.fresh: deque[SeenPlan] = deque(maxlen=200)  # for `echo`; the reader empties it
        self.diagnostics: dict[str, tuple[int, str, dict[str, str]]] = {}
        self._texts: dict[int, str] = {}
        self._trajectories: dict[int, MultiDOFJointTrajectory] = {}
        self._arrivals: deque[float] = deque()
        self._sim_ns: int | None = None
        self._windows = {name: LatencyWindow() for name in (
            'processing_time_ms', 'pipeline_latency_ms', 'speculation/mean_accepted_length',
            'speculation/iterations', 'speculation/reused_tokens')}
        latest = QoSProfile(depth=10)
        node.create_subscription(String, f'{namespace}/output/reasoning_stamped',
                                 self._on_reasoning, latest)
        node.create_subscription(MultiDOFJointTrajectory, f'{namespace}/output/trajectory',
                                 self._on_trajectory, latest)
        node.create_subscription(DiagnosticArray, '/diagnostics', self._on_diagnostics, latest)
        node.create_subscription(Clock, '/clock', self._on_clock, qos_profile_sensor_data)
        for name, window in self._windows.items():
            node.create_subscription(Float64, f'{namespace}/debug/{name}',
                                     _adder(window), latest)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as a JSON-ready dict."""
        plan = self.newest
        return {
            'plans': self.plans, 'rate_hz': round(self.rate_hz(), 2),
            't0_ns': plan.t0_ns if plan else None,
            'age_ms': round(plan.age_ms, 1) if plan else None,
            'reasoning': plan.reasoning if plan else '',
            'speed_mps': round(plan.speed_mps, 2) if plan else None,
            'end_m': [round(v, 2) for v in plan.end] if plan else None,
            'processing_ms': self._windows['processing_time_ms'].summary(),
            'pipeline_latency_ms': self._windows['pipeline_latency_ms'].summary(),
            'accepted_length': round(self._windows['speculation/mean_accepted_length'].p50, 3),
            'iterations': round(self._windows['speculation/iterations'].p50, 1),
            'reused_tokens': round(self._windows['speculation/reused_tokens'].p50, 1),
            'skipped': self.skipped(),
            'diagnostics': {task: {'level': LEVELS[level], 'message': message}
                            for task, (level, message, _) in sorted(self.diagnostics.items())}}

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
        values = self.diagnostics.get('inputs', (0, '', {}))[2]
        return any(key.startswith('image') and key.endswith('_received') and value != '0'
                   for key, value in values.items()) or self.plans > 0

    def skipped(self) -> dict[str, int]:
        """Return how often each named reason skipped a cycle."""
        values = self.diagnostics.get('inputs', (0, '', {}))[2]
        return {key.removeprefix('skipped_'): int(value) for key, value in sorted(values.items())
                if key.startswith('skipped_') and key != 'skipped_total'}

    def _on_reasoning(self, message: String) -> None:
        data = json.loads(message.data)
        self._texts[int(data['t0_ns'])] = str(data['text'])
        self._join(int(data['t0_ns']))

    def _on_trajectory(self, message: MultiDOFJointTrajectory) -> None:
        t0_ns = stamp_to_ns(message.header.stamp)
        self._trajectories[t0_ns] = message
        self._join(t0_ns)

    def _join(self, t0_ns: int) -> None:
        """Count a plan when both its parts have arrived; only t0 joins them."""
        if t0_ns not in self._texts or t0_ns not in self._trajectories:
            return
        text, message = self._texts.pop(t0_ns), self._trajectories.pop(t0_ns)
        for parts in (self._texts, self._trajectories):
            while len(parts) > 20:
                parts.pop(next(iter(parts)))
        now_ns = self._sim_ns or self._node.get_clock().now().nanoseconds
        velocities = message.points[0].velocities
        self.newest = SeenPlan(t0_ns, (now_ns - t0_ns) / 1e6, text,
                               velocities[0].linear.x if velocities else float('nan'),
                               end_in_ego_frame(message))
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


def view(state: dict[str, Any]) -> list[str]:
    """Return a snapshot as lines for a terminal."""
    times = '  '.join(f'{label} p50 {state[key]["p50"]:.0f} p95 {state[key]["p95"]:.0f} ms'
                      for label, key in (('processing', 'processing_ms'),
                                         ('since t0', 'pipeline_latency_ms')))
    lines = [f'plans     {state["plans"]}   {state["rate_hz"]:.1f} Hz', f'latency   {times}']
    if state['t0_ns'] is not None:
        lines += [f't0        {state["t0_ns"] / 1e9:.3f}   age {state["age_ms"]:.0f} ms   '
                  f'{state["speed_mps"]:.1f} m/s   end {state["end_m"][0]:.1f} ahead, '
                  f'{state["end_m"][1]:+.1f} left',
                  f'accepted  {state["accepted_length"]:.2f} tokens per iteration, '
                  f'{state["iterations"]:.0f} iterations, {state["reused_tokens"]:.0f} reused',
                  f'reasoning {state["reasoning"]}']
    else:
        lines.append('t0        no plan seen yet')
    skips = ', '.join(f'{reason} {count}' for reason, count in state['skipped'].items())
    lines.append(f'skipped   {skips or "none"}')
    lines += [f'{task:<17}{entry["level"]:<6}{entry["message"]}'
              for task, entry in state['diagnostics'].items()]
    return lines


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
    with stop_on_signals() as stopped, ros_node('rspec_monitor') as (node, executor):
        monitor = PlanMonitor(node, namespace)
        while not (stopped.is_set() or (stop is not None and stop.is_set())):
            executor.spin_once(timeout_sec=0.05)
            now = time.monotonic()
            if stream is not None and echo:
                while monitor.fresh:
                    print(monitor.fresh.popleft().line(), file=stream, flush=True)
            elif stream is not None and not once and now - shown >= REFRESH_S:
                _refresh(stream, view(monitor.snapshot()))
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


def _refresh(stream: TextIO, lines: list[str]) -> None:
    """Redraw in place on a terminal; elsewhere append a block."""
    if stream.isatty():
        stream.write('\x1b[H\x1b[J')
    print('\n'.join(lines), file=stream, flush=True)


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
