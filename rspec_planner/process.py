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
The process of the node: command line, transport, executor, signals, exit code.

SIGINT and SIGTERM are how it normally ends, also while it still starts; the exit code is then 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import ctypes
import os
import sys
from typing import Protocol

import rclpy
from rclpy.executors import Executor, ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.utilities import get_rmw_implementation_identifier, remove_ros_args

from rspec_planner.command_line import check_leftover, ros_arguments, USAGE
from rspec_planner.errors import ConfigurationError, RspecError
from rspec_planner.signals import StopSignals
from rspec_planner.transport import apply_fastdds_environment

PROGRAM = 'rspec_planner_node'
#: longest sleep of the executor; it is woken for whatever it has to do
_IDLE_S = 1.0
#: middlewares that EventsExecutor was tried with; one that cannot tell would end the node
_TELLS = ('rmw_fastrtps_cpp', 'rmw_fastrtps_dynamic_cpp')
#: malloc.h: smaller blocks come from the heap (32 MiB is the most), whose end is kept up to a size
_M_TRIM_THRESHOLD, _KEPT = -1, 2 ** 27
_M_MMAP_THRESHOLD, _LARGEST_BLOCK = -3, 2 ** 25


class Runnable(Protocol):
    """What the process needs of its node."""

    def start(self) -> bool:
        """Configure and activate when asked to; False when that failed."""

    def close(self) -> None:
        """End what the node started."""


def run_node(make: Callable[[Sequence[str]], Runnable], arguments: Sequence[str] | None) -> int:
    """
    Run the node that `make` builds from the full ROS command line; return the exit code.

    0 after a signal, 1 when the node could not be started, 2 for a wrong command line.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {'-h', '--help'} & set(given):
        print(USAGE)
        return 0
    try:
        full = ros_arguments(given)
        check_leftover(_without_ros_arguments(full))
    except RspecError as error:
        print(f'{PROGRAM}: error: {error}', file=sys.stderr)
        return 2
    apply_fastdds_environment()
    _limit_spinning()
    _keep_blocks()
    return _run(make, full, StopSignals())


def _without_ros_arguments(full: Sequence[str]) -> list[str]:
    """Return what rcl does not know; raises ConfigurationError for what it cannot parse."""
    try:
        return remove_ros_args(['', *full])[1:]
    except RuntimeError as error:  # the base of every error of the rclpy extension
        reason = str(error).split(', at /')[0].split(' Error: ')[0].rstrip('.')
        reason = reason.removeprefix('Failed to parse ROS arguments: ')
        raise ConfigurationError(f'ROS arguments cannot be parsed: {reason}; see --help '
                                 'for the forms') from None


def _limit_spinning() -> None:
    """
    Let OpenMP threads sleep after a short spin; PyTorch reads this when it is imported.

    On two cores shared with the cameras' processes, threads that spin at barriers wait for each
    other: with two other busy processes 4 plans in 9 s instead of 10, and a warm-up of 3.2 s
    instead of 0.35 s. This count costs an idle machine 5 % (190 instead of 180 ms a frame).
    """
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ.setdefault('GOMP_SPINCOUNT', '50000')


def _keep_blocks() -> None:
    """
    Let glibc keep freed memory of an image's size for the next image.

    Otherwise it may give a block of 6 MB back and take it anew for each raw frame: with four such
    cameras up to 1,300 page faults and 4 ms of system time a plan, in some runs and not in others.
    """
    adjust = getattr(ctypes.CDLL(None), 'mallopt', None)  # other C libraries have none
    if adjust is not None:
        adjust(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
        adjust(_M_TRIM_THRESHOLD, _KEPT)


def _run(make: Callable[[Sequence[str]], Runnable], full: Sequence[str],
         signals: StopSignals) -> int:
    made: list[Runnable] = []
    try:
        if not _start(make, full, signals, made):
            return 0 if signals.seen or not rclpy.ok() else 1
        if not signals.seen:
            _spin(made[0])
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    except Exception:
        # A signal invalidates the context at once; whatever is being set up then fails.
        if rclpy.ok() and not signals.seen:
            raise
    finally:
        for node in made:
            node.close()
        rclpy.try_shutdown()
    return 0


def _start(make: Callable[[Sequence[str]], Runnable], full: Sequence[str],
           signals: StopSignals, made: list[Runnable]) -> bool:
    """
    Make the node, put it into `made` and start it; a signal interrupts this.

    Nothing outside can be interrupted: an error of rclpy, which a signal causes too, is judged
    and the node closed in peace.
    """
    try:
        signals.allow()
        rclpy.init(args=[PROGRAM, *full])  # its handlers run ours after their own work
        made.append(make(full))
        return made[0].start()
    finally:
        signals.hold()


def _spin(node: Runnable) -> None:
    """
    Run callbacks until a signal ends the context, which wakes the executor.

    One at a time and with a limit: without one, EventsExecutor does not sleep (rclpy 9.1.2 from
    a wheel, whose wait until the end of time overflows).
    """
    executor = event_executor()
    if isinstance(node, Node):
        executor.add_node(node)
        try:
            while node.context.ok():
                executor.spin_once(timeout_sec=_IDLE_S)
        finally:  # an executor that still knows the node keeps its participant alive
            executor.remove_node(node)
            executor.shutdown()


def event_executor() -> Executor:
    """
    Return an executor of one thread, told by the middleware what is ready where that is possible.

    The plain one asks each of the node's 53 entities, in Python, whenever something wakes it: 16
    to 20 instead of 12 ms of processor time a plan with small images, so much later each frame.
    """
    if get_rmw_implementation_identifier() in _TELLS:
        try:
            from rclpy.experimental.events_executor import EventsExecutor
            return EventsExecutor()
        except ImportError:  # before Kilted
            pass
    return SingleThreadedExecutor()
