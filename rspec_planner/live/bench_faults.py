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
`rspec bench faults`: break one thing after another around a live node and see what it does.

The node is a process of its own; this one is its world. Per fault: is the reason named in the
diagnostics, does the process live, did a plan leave that nobody may drive or that was relabelled,
and how long after the fault is gone do plans come again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
import os
from pathlib import Path
import shutil
import subprocess
import tempfile
import threading
import time
from typing import Any

from rspec_planner.errors import ConfigurationError
from rspec_planner.live.fault_actions import PROCESS, QUICK
from rspec_planner.live.fault_feed import Feed
from rspec_planner.live.fault_list import CLOCK, ENGINE, Fault, IMAGES, ODOMETRY
from rspec_planner.live.fault_node import VARIABLE
from rspec_planner.live.processes import Child, free_domain_id, Processes
from rspec_planner.live.session import ros_node
from rspec_planner.planner.drafts import EMBEDDED

FAULTS = (*IMAGES, *ODOMETRY, *CLOCK, *ENGINE, *PROCESS)
#: so long may a node need until its plans flow, and until they flow again
_START_S, _HEAL_S = 60.0, 12.0
_STEADY = 3  # plans in a row before the next fault
#: diagnostics come once a second; so long must a healthy node say nothing that names a fault
_REPORT_S, _HEALTHY_S = 4.0, 2.0
#: the node that is broken
NODE = 'rspec_planner.live.fault_node'


@dataclass(frozen=True)
class Verdict:
    """What one fault led to."""

    name: str
    group: str
    what: str
    named: str  # the diagnostic, '' when nothing was said
    needed: bool  # whether something had to be said
    crashed: bool
    invalid_plans: int
    relabelled_plans: int
    plans_during: int
    since_heal_s: float  # until the first plan after the fault was gone; -1 for none
    recovery_s: float  # of these, beyond the history that the model must see again

    @property
    def ok(self) -> bool:
        """Tell whether the node did what it must."""
        unheard = not self.named if self.needed else self.plans_during == 0
        return not (self.crashed or self.invalid_plans or self.relabelled_plans or unheard
                    or not 0.0 <= self.recovery_s <= 1.0)


class Harness:
    """One node and its world; faults act through it."""

    def __init__(self, feed: Feed, child: Child, folder: Path, domain: int) -> None:
        self.feed, self._node, self.folder, self.domain = feed, child, folder, domain
        self.flooding = threading.Event()
        self.flood: threading.Thread | None = None
        self.extra: list[Any] = []
        self.child: subprocess.Popen[bytes] | None = None
        self.weights = next((folder / 'checkpoint').glob('*.safetensors'))
        self._clients: dict[str, Any] = {}
        self._healed_s = 0.0
        self._counted = 0, 0  # invalid and relabelled plans that a verdict holds

    @property
    def pid(self) -> int:
        """Return the node's process."""
        return self._node.process.pid

    def planner(self, fault: str) -> None:
        """Tell the node's planner how to fail."""
        path = self.folder / 'fault'
        (self.folder / 'fault.new').write_text(fault, encoding='utf-8')
        os.replace(self.folder / 'fault.new', path)

    @staticmethod
    def flip(path: Path) -> None:
        """Change one byte near the end of a file, or change it back."""
        with path.open('r+b') as file:
            file.seek(-100, os.SEEK_END)
            byte = file.read(1)
            file.seek(-100, os.SEEK_END)
            file.write(bytes([byte[0] ^ 0xff]))

    def client(self, kind: Any, name: str) -> Any:
        """Return a service client that is connected."""
        if name not in self._clients:
            self._clients[name] = self.feed.node.create_client(kind, name)
            if not self._clients[name].wait_for_service(10.0):
                raise ConfigurationError(f'{name} is not there; see the log of the node')
        return self._clients[name]

    def call(self, client: Any, request: Any, timeout_s: float = 10.0) -> Any:
        """Return the answer to a request; another thread spins."""
        done = threading.Event()
        future = client.call_async(request)
        future.add_done_callback(lambda _: done.set())
        if not done.wait(timeout_s):
            raise ConfigurationError(f'{client.srv_name} did not answer in {timeout_s:.0f} s')
        return future.result()

    def healed_now(self) -> None:
        """Count the recovery from here: what came before was the repair itself."""
        self._healed_s = time.monotonic()

    def steady(self, timeout_s: float = _START_S) -> bool:
        """Wait until some plans came in a row."""
        start, count = time.monotonic(), len(self.feed.heard.plans)
        while time.monotonic() - start < timeout_s and self._node.running:
            if len(self.feed.heard.plans) >= count + _STEADY:
                return True
            time.sleep(0.02)
        return False

    def said_now(self) -> dict[str, str]:
        """Return the next report on all tasks: what was counted up to now names no fault."""
        start = time.monotonic()
        while time.monotonic() - start < _REPORT_S and self._node.running:
            said = self.feed.said(start)
            if 'inputs.skipped_total' in said:
                return said
            time.sleep(0.01)
        return {}

    def healthy_names(self, faults: Sequence[Fault]) -> list[str]:
        """Return the faults that would be named although nothing happens, of three tries."""
        left = [fault for fault in faults if fault.names]
        for _ in range(3):
            before, began = self.said_now(), time.monotonic()
            time.sleep(_HEALTHY_S)
            said = self.feed.said(began)
            left = [fault for fault in left if name_of(fault, before, said)]
            if not left:
                break
        return [fault.name for fault in left]

    def _misjudged(self) -> tuple[int, int]:
        """Return how many invalid and relabelled plans came since the last call."""
        seen = len(self.feed.heard.invalid), len(self.feed.heard.relabelled)
        new = seen[0] - self._counted[0], seen[1] - self._counted[1]
        self._counted = seen
        return new

    def inject(self, fault: Fault) -> Verdict:
        """Break, heal and judge."""
        heard = self.feed.heard
        before, began, plans = self.said_now(), time.monotonic(), len(heard.plans)
        unreadable = heard.unreadable
        evidence = fault.start(self) or ''
        time.sleep(fault.seconds)
        during = len(heard.plans) - plans
        self._healed_s = time.monotonic()
        newest_ns = self.feed.now_ns
        fault.stop(self)
        since = self._recovered(newest_ns if fault.group != 'clock' else 0)
        said = self.feed.said(began)
        named = evidence if not fault.names else name_of(fault, before, said)
        if heard.unreadable > unreadable:  # nobody could read what names the fault
            named, evidence = '', ''
        if evidence.startswith('accepted'):
            named, since = '', -1.0
        return Verdict(
            fault.name, fault.group, fault.what, named or evidence * (not fault.names),
            bool(fault.names) or bool(evidence), not self._node.running, *self._misjudged(),
            during,
            round(since, 3), round(max(0.0, since - fault.history_s) if since >= 0 else -1.0, 3))

    def _recovered(self, after_ns: int) -> float:
        """Return the time from healing to the first plan of a frame after it."""
        while time.monotonic() - self._healed_s < _HEAL_S and self._node.running:
            fresh = [arrived for arrived, stamp in list(self.feed.heard.plans)
                     if arrived >= self._healed_s and stamp >= after_ns]
            if fresh:
                return fresh[0] - self._healed_s
            time.sleep(0.005)
        return -1.0


def name_of(fault: Fault, before: dict[str, str], said: dict[str, str]) -> str:
    """Return the diagnostic that names a fault: a message or value that was not there before."""
    for name in fault.names:
        for key, value in said.items():
            if before.get(key) == value:
                continue
            if name in key and value not in ('', '0', '0.000'):
                return _part(key, name) if value == '!' else f'{key} = {value}'
            if name in value:
                return f'{key} = {value}'
    return ''


def _part(message: str, name: str) -> str:
    """Return the complaint of several, 'task: one; two', that holds a name."""
    task, _, said = message.partition(': ')
    return f'{task}: ' + next((part for part in said.split('; ') if name in part), said)


def chosen_faults(only: Sequence[str], quick: bool) -> list[Fault]:
    """Return the faults of a run; raises ConfigurationError for an unknown name."""
    known = {fault.name: fault for fault in FAULTS}
    for name in only:
        if name not in known:
            raise ConfigurationError(f'fault {name!r} is unknown; use one of '
                                     f'{", ".join(known)}')
    names = list(only) or (QUICK if quick else list(known))
    return [known[name] for name in names]


def bench_faults(*, only: Sequence[str] = (), quick: bool = False, log_folder: Path | None = None,
                 progress: Callable[[int, int], None] | None = None, module: str = NODE
                 ) -> dict[str, Any]:
    """
    Run the matrix; the report's `ok` says whether every fault was survived by name.

    module: what is run as the node; a test takes its guard out.
    """
    faults = chosen_faults(only, quick)
    with tempfile.TemporaryDirectory(prefix='rspec_faults_') as name:
        folder = Path(name)
        shutil.copytree(EMBEDDED / 'tiny', folder / 'checkpoint')
        (folder / 'fault').write_text('', encoding='utf-8')
        domain = free_domain_id()
        with Processes(log_folder or folder / 'logs', domain_id=domain) as processes:
            child = processes.start_module(
                'node', module, '--ros-args', '-p', 'use_sim_time:=true',
                '-p', f'model.checkpoint:={folder / "checkpoint"}',
                extra_environment={VARIABLE: str(folder / 'fault')})
            healthy, verdicts = _run(faults, child, folder, domain, progress)
            code = processes.stop(child)
    return report_of(verdicts, code, healthy)


def _run(faults: Sequence[Fault], child: Child, folder: Path, domain: int,
         progress: Callable[[int, int], None] | None) -> tuple[list[str], list[Verdict]]:
    """Return the faults that a healthy node would name, and what each of them led to."""
    os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
    with ros_node('fault_world', domain) as (node, executor):
        feed = Feed(node)
        spinning = threading.Event()

        def spin() -> None:
            while not spinning.is_set():
                executor.spin_once(timeout_sec=0.05)
        thread = threading.Thread(target=spin, name='ears', daemon=True)
        thread.start()
        feed.start()
        try:
            harness = Harness(feed, child, folder, domain)
            if not harness.steady():
                raise ConfigurationError(f'no plan within {_START_S:.0f} s; last lines of the '
                                         f'node:\n{child.tail()}')
            healthy, verdicts = harness.healthy_names(faults), []
            for fault in faults:
                verdicts.append(harness.inject(fault))
                harness.steady(_HEAL_S)
                if progress is not None:
                    progress(len(verdicts), len(faults))
                if not child.running:
                    break
            return healthy, verdicts
        finally:
            feed.stop()
            spinning.set()
            thread.join(5.0)


def report_of(verdicts: Sequence[Verdict], exit_code: int, healthy: Sequence[str] = ()
              ) -> dict[str, Any]:
    """Return the report of a matrix; `healthy` are faults whose names prove nothing."""
    recovery = [v.recovery_s for v in verdicts if v.recovery_s >= 0]
    since = [v.since_heal_s for v in verdicts if v.since_heal_s >= 0]
    return {'faults': len(verdicts), 'crashes': sum(v.crashed for v in verdicts),
            'invalid_plans': sum(v.invalid_plans for v in verdicts),
            'relabelled_plans': sum(v.relabelled_plans for v in verdicts),
            'unnamed': sum(v.needed and not v.named for v in verdicts),
            'not_recovered': sum(v.recovery_s < 0 for v in verdicts),
            'recovery_s': {'max': max(recovery, default=0.0)},
            'since_heal_s': {'max': max(since, default=0.0)}, 'exit_code': exit_code,
            'named_without_fault': list(healthy),
            'ok': exit_code == 0 and not healthy and all(v.ok for v in verdicts),
            'failed': [v.name for v in verdicts if not v.ok],
            'verdicts': [{**asdict(v), 'ok': v.ok} for v in verdicts]}
