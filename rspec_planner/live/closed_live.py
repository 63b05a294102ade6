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
Closed-loop runs through a live node: real topics, the node's own buffers, cycle and guard.

The world stands still on /clock while a plan is made and then follows it with the same modelled
latency as offline, so that the drive must be the one that `evaluate/closed_loop.py` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
import tempfile
import threading
import time
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Odometry
import numpy as np
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image
from std_msgs.msg import String
from trajectory_msgs.msg import MultiDOFJointTrajectory

from rspec_planner.command_line import camera_topic, NAVIGATION_TOPIC, ODOMETRY_TOPIC
from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.closed_farm import RunFarm
from rspec_planner.evaluate.closed_latency import Latency
from rspec_planner.evaluate.closed_loop import (
    closed_specs,
    ClosedLoop,
    ClosedOptions,
    compared,
    key_of,
    spread,
)
from rspec_planner.evaluate.closed_world import ClosedRun, Outcome
from rspec_planner.live.processes import Child, free_domain_id, Processes
from rspec_planner.live.session import ros_node
from rspec_planner.ros_conversions import (
    image_message,
    local_matrices,
    ns_to_stamp,
    odometry_message,
    stamp_to_ns,
)
from rspec_planner.world.clip import ClipSpec
from rspec_planner.world.generate import CAMERAS, HISTORY

ROOT = '/planning/rspec_planner'
_START_S, _PLAN_S = 90.0, 30.0
ANCHOR = 'front_wide'


def arrays_of(message: MultiDOFJointTrajectory, ego: tuple[float, float, float]
              ) -> tuple[np.ndarray, ...]:
    """Return poses (65, 4), speeds, accelerations, curvatures in the ego frame at t0."""
    rows = np.array([(t.translation.x, t.translation.y,
                      2.0 * np.arctan2(t.rotation.z, t.rotation.w), v.linear.x, v.angular.z,
                      a.linear.x) for p in message.points
                     for t, v, a in [(p.transforms[0], p.velocities[0], p.accelerations[0])]])
    x, y, yaw = ego
    cosine, sine = np.cos(yaw), np.sin(yaw)
    dx, dy = rows[:, 0] - x, rows[:, 1] - y
    poses = np.stack([dx * cosine + dy * sine, dy * cosine - dx * sine, np.zeros(len(rows)),
                      np.unwrap(np.arctan2(np.sin(rows[:, 2] - yaw), np.cos(rows[:, 2] - yaw)))],
                     axis=1)
    speeds = rows[:, 3]
    curvatures = np.where(speeds > 0.01, rows[:, 4] / np.maximum(speeds, 0.01), 0.0)
    return poses, speeds, rows[:, 5], curvatures


class LiveWorld:
    """Publishes what a run's sensors see, and hears the node's plans."""

    def __init__(self, node: Node) -> None:
        self._plans: dict[int, MultiDOFJointTrajectory] = {}
        self._texts: dict[int, str] = {}
        self._arrived = threading.Condition()
        self._clock = node.create_publisher(Clock, '/clock', 10)
        self._odometry = node.create_publisher(Odometry, ODOMETRY_TOPIC, 50)
        self._navigation = node.create_publisher(String, NAVIGATION_TOPIC, 1)
        self._images = {name: node.create_publisher(Image, camera_topic(name),
                                                    qos_profile_sensor_data) for name in CAMERAS}
        node.create_subscription(MultiDOFJointTrajectory, f'{ROOT}/output/trajectory',
                                 self._on_plan, 10)
        node.create_subscription(String, f'{ROOT}/output/reasoning_stamped', self._on_text, 10)
        node.create_subscription(DiagnosticArray, '/diagnostics', self._on_diagnostics, 10)
        self._said: dict[str, str] = {}
        self._refused: dict[int, str] = {}  # t0 -> text

    def matched(self) -> bool:
        """Tell whether the node hears every topic."""
        return all(p.get_subscription_count() for p in (self._odometry, *self._images.values()))

    def _on_plan(self, message: MultiDOFJointTrajectory) -> None:
        with self._arrived:
            self._plans[stamp_to_ns(message.header.stamp)] = message
            self._arrived.notify_all()

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        """Note refused plans, whose text only the diagnostics tell."""
        tasks = {status.name.partition(': ')[2]: status for status in message.status}
        self._said.update({name: status.message for name, status in tasks.items()})
        if 'latency' not in tasks or 'plan rejected' not in self._said['inference_status']:
            return
        times, facts = ({item.key: item.value for item in tasks[name].values}
                        for name in ('latency', 'inference_status'))
        with self._arrived:
            self._refused[int(times['t0_ns'])] = facts['message']
            self._arrived.notify_all()

    def _on_text(self, message: String) -> None:
        import json
        content = json.loads(message.data)
        with self._arrived:
            self._texts[content['t0_ns']] = content['text']
            self._arrived.notify_all()

    def ask(self, run: ClosedRun, shown: int) -> tuple[tuple[np.ndarray, ...] | None, str]:
        """
        Show everything since tick `shown`; return the node's plan at this tick and its text.

        None stands for a plan that the guard refused.
        """
        view = run.view()
        with self._arrived:  # twins have the same stamps
            for heard in (self._plans, self._texts, self._refused):
                heard.clear()
        self._clock.publish(Clock(clock=ns_to_stamp(view.t0_ns)))
        self._navigation.publish(String(data=view.navigation))
        time.sleep(0.3)  # a clock that went back resets the node before anything else comes
        for tick in range(shown + 1, view.tick + 1):
            x, y, yaw, speed = run.motion(tick)
            pose = local_matrices(np.array([[x, y, 0.0, yaw]]))[0]
            self._odometry.publish(odometry_message(self._stamp(view.t0_ns, view.tick, tick), pose,
                                                    speed))
        time.sleep(0.1)
        for tick, frames in sorted(view.images.items()):
            stamp_ns = self._stamp(view.t0_ns, view.tick, tick)
            for name in sorted(CAMERAS, key=lambda name: name == ANCHOR):
                self._images[name].publish(image_message(frames[CAMERAS.index(name)], stamp_ns,
                                                         f'{name}_optical'))
            time.sleep(0.02)
        with self._arrived:
            known = self._arrived.wait_for(
                lambda: view.t0_ns in self._refused or (
                    view.t0_ns in self._plans and view.t0_ns in self._texts), _PLAN_S)
        if not known:
            raise ConfigurationError(f'no plan of {key_of(run.spec)} at tick {view.tick} within '
                                     f'{_PLAN_S:.0f} s; the node says {self._said}')
        if view.t0_ns in self._refused:
            return None, self._refused[view.t0_ns]
        return arrays_of(self._plans[view.t0_ns], run.motion(view.tick)[:3]), \
            self._texts[view.t0_ns]

    @staticmethod
    def _stamp(t0_ns: int, now: int, tick: int) -> int:
        return t0_ns + (tick - now) * 100_000_000


def compare_live(options: ClosedOptions, runs: int,
                 progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Drive so many runs of each split live and offline, at the rate of the drafts' comparison."""
    specs = [spec for split in options.splits
             for spec in spread(closed_specs(split, options.runs), runs)]
    with RunFarm(0) as farm:
        loop = ClosedLoop(options, farm)
        return drive_live(loop, specs, loop.iso_period,
                          Latency('fixed', options.latencies[0].fixed_ms), progress=progress)


def drive_live(loop: ClosedLoop, specs: Sequence[ClipSpec], period: int, latency: Latency, *,
               logs: Path | None = None,
               progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Drive the same runs live and offline; return how they differ, see `compared`."""
    how = loop.stepping(True, period)
    offline = {key_of(o.spec): o for o in loop.drive(specs, loop.planner('default'), how, latency)}
    live: dict[str, Outcome] = {}
    domain = free_domain_id()
    with tempfile.TemporaryDirectory(prefix='rspec_closed_') as name, \
            Processes(logs or Path(name), domain_id=domain) as processes:
        child = processes.start_module(
            'node', 'rspec_planner', '--ros-args', '-p', 'use_sim_time:=true', '-p',
            'deadline.max_pipeline_latency_ms:=10000.0', '-p', 'sync.max_input_age_ms:=1000.0')
        with ros_node('closed_world', domain) as (node, executor):
            world, done = LiveWorld(node), threading.Event()

            def spin() -> None:
                while not done.is_set():
                    executor.spin_once(timeout_sec=0.05)
            thread = threading.Thread(target=spin, daemon=True)
            thread.start()
            try:
                _await(world, child)
                for spec in specs:
                    live[key_of(spec)] = _drive(world, ClosedRun(spec, *loop.size, period=period),
                                                latency)
                    if progress is not None:
                        progress(len(live), len(specs))
            finally:
                done.set()
                thread.join(5.0)
    return {**compared(offline, live), 'collisions': sum(bool(o.collision) for o in live.values())}


def _await(world: LiveWorld, child: Child) -> None:
    deadline = time.monotonic() + _START_S
    while not world.matched():
        if time.monotonic() > deadline or not child.running:
            raise ConfigurationError(f'the node did not subscribe within {_START_S:.0f} s:\n'
                                     f'{child.tail()}')
        time.sleep(0.1)
    time.sleep(1.0)  # readers match a little later than writers


def _drive(world: LiveWorld, run: ClosedRun, latency: Latency) -> Outcome:
    shown = -HISTORY
    while not run.done:
        if run.wants_plan:
            tick = run.tick
            plan, text = world.ask(run, shown)
            run.apply(plan, latency.seconds(0), text)
            shown = tick
        run.step()
    return run.finish()
