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
Start the processes around the node, watch them, and end them.

Every child gets the Fast DDS profile for camera streams, a domain of its own and a log file.
A child that dies early is reported with the last lines of its log; nothing is left running,
also when this process is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import ctypes
from dataclasses import dataclass
import os
from pathlib import Path
import random
import signal
import socket
import subprocess
import sys
import time
from types import TracebackType

from rspec_planner.errors import ConfigurationError, RspecError
from rspec_planner.shared_memory import dead_segments, free_segments
from rspec_planner.transport import fastdds_environment

#: domains whose ports stay below the ephemeral range of Linux
DOMAINS = range(0, 102)
POLL_S = 0.1
TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ChildError(RspecError):
    """A child process died or did not become ready; the message carries its last lines."""


def free_domain_id(seed: int | None = None) -> int:
    """
    Return a ROS domain that no participant of this machine uses.

    A participant binds the first free UDP port of 7410, 7412, ... + 250 * domain, so a domain
    is free when those ports can be bound. The search order differs between processes.
    """
    order = list(DOMAINS)[1:]
    random.Random(os.getpid() if seed is None else seed).shuffle(order)
    for domain in order:
        if all(_port_is_free(7410 + 250 * domain + 2 * i) for i in range(8)):
            return domain
    raise ConfigurationError('ROS_DOMAIN_ID: all domains 1..101 are in use on this machine; '
                             'end the processes that use them')


def _port_is_free(port: int) -> bool:
    """Tell whether a UDP port can be bound alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(('', port))
        except OSError:
            return False
    return True


def child_environment(domain_id: int | None = None,
                      extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """
    Return the environment of a child: this one, the Fast DDS profile, this package on the path.

    With a `domain_id` the child also keeps its discovery on this machine.
    """
    environment = {**os.environ, **fastdds_environment(), 'PYTHONUNBUFFERED': '1'}
    package_root = str(Path(__file__).resolve().parents[2])
    path = environment.get('PYTHONPATH', '')
    if package_root not in path.split(os.pathsep):
        environment['PYTHONPATH'] = os.pathsep.join(p for p in (package_root, path) if p)
    if domain_id is not None:
        environment['ROS_DOMAIN_ID'] = str(domain_id)
        environment['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
    return {**environment, **(extra or {})}


def end_with_parent(number: int = signal.SIGTERM) -> Callable[[], None]:
    """
    Return what a child does before its program: ask the kernel for a signal when its parent ends.

    Whatever ends the parent, a signal included, then ends the child. Strictly, it is the thread
    that started the child whose end counts (prctl(2)); start children from one that stays.
    """
    prctl, parent = getattr(ctypes.CDLL(None), 'prctl', None), os.getpid()

    def ask() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, number)
            if os.getppid() != parent:  # it ended before this was asked
                os._exit(1)
    return ask


@dataclass
class Child:
    """One running child process and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def running(self) -> bool:
        """Tell whether the process has not ended yet."""
        return self.process.poll() is None

    def tail(self) -> str:
        """Return the last lines of the log, indented."""
        lines = self.log.read_text(errors='replace').splitlines()[-TAIL_LINES:]
        return '\n'.join(f'  {line}' for line in lines) or '  (the log is empty)'

    def cause(self) -> str:
        """Return the line of the log that most likely names the cause of a death."""
        lines = [line.strip() for line in self.log.read_text(errors='replace').splitlines()
                 if line.strip()]
        named = [line for line in lines if 'rror' in line.split(':')[0] or line[:1] == 'E']
        return (named or lines or ['the log is empty'])[-1]


class Processes:
    """The children of one run; use it as a context manager so that all of them end."""

    def __init__(self, log_folder: str | Path, *, domain_id: int | None = None) -> None:
        self.log_folder = Path(log_folder)
        self.domain_id = domain_id
        self.children: list[Child] = []

    def __enter__(self) -> Processes:
        """Return the group itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """End every child, the newest first."""
        self.stop_all()

    def start(self, name: str, command: Sequence[str], *,
              extra_environment: Mapping[str, str] | None = None) -> Child:
        """Start a child with its output in `<log_folder>/<name>.log`."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        log = self.log_folder / f'{name}.log'
        with log.open('wb') as stream:
            # an own session keeps the terminal's Ctrl-C away, so that the parent decides the order
            process = subprocess.Popen(
                list(command), stdout=stream, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
                env=child_environment(self.domain_id, extra_environment),
                preexec_fn=end_with_parent())
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def start_module(self, name: str, module: str, *arguments: str,
                     extra_environment: Mapping[str, str] | None = None) -> Child:
        """Start `python -m module arguments` with this interpreter."""
        return self.start(name, [sys.executable, '-m', module, *arguments],
                          extra_environment=extra_environment)

    def check(self, *, ended_well: Sequence[str] = ()) -> None:
        """Raise ChildError when a child has died; names in `ended_well` may end with 0."""
        for child in self.children:
            code = child.process.poll()
            if code is not None and not (code == 0 and child.name in ended_well):
                raise ChildError(
                    f'{child.name} ended early with exit code {code}: {child.cause()} '
                    f'(log: {child.log})')

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float,
                 *, ended_well: Sequence[str] = ()) -> None:
        """Wait until `condition` holds; raise ChildError on a death or after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check(ended_well=ended_well)
            if time.monotonic() > deadline:
                raise ChildError(f'{what} did not happen within {timeout_s:.0f} s; '
                                 f'see the logs in {self.log_folder}')
            time.sleep(POLL_S)

    def stop(self, child: Child, timeout_s: float = 10.0) -> int:
        """Interrupt a child, terminate it, at last kill it; return its exit code."""
        # a parent in the background may have passed an ignored SIGINT on, hence the second try
        for number in (signal.SIGINT, signal.SIGTERM):
            if child.running:
                child.process.send_signal(number)
                try:
                    child.process.wait(timeout_s / 2)
                except subprocess.TimeoutExpired:
                    continue
        if child.running:
            child.process.kill()
        return child.process.wait()

    def stop_all(self, timeout_s: float = 10.0) -> None:
        """Interrupt all children, the newest first, and kill those that stay."""
        codes = [self.stop(child, timeout_s) for child in reversed(self.children)]
        if min(codes, default=0) < 0:  # who ends by a signal leaves its shared memory behind
            free_segments(dead_segments())
