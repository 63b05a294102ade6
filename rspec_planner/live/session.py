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
"""A ROS node of the command line: own context, Fast DDS profile, stop on Ctrl-C, no residue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import importlib
import signal
import threading
from types import FrameType
from typing import Any

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from rspec_planner.errors import InputError
from rspec_planner.transport import fastdds_applied


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set instead of ending the process."""
    stopped = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stopped.set()

    # only the main thread may install handlers; elsewhere the caller stops by the event alone
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ros_node(name: str, domain_id: int | None = None, *, viewer: bool = False
             ) -> Iterator[tuple[Node, SingleThreadedExecutor]]:
    """
    Yield a node and its executor in a context of their own; both are gone afterwards.

    Without a `domain_id` the environment's ROS_DOMAIN_ID counts. A `viewer` shares no memory with
    others, so that nothing waits for it when it is stopped.
    """
    context = rclpy.Context()
    try:
        with fastdds_applied(viewer=viewer):
            rclpy.init(args=[], context=context, domain_id=domain_id,
                       signal_handler_options=SignalHandlerOptions.NO)
            # the participant, which reads the profile, is made with the context's first node
            node = Node(name, context=context, use_global_arguments=False)
        executor = SingleThreadedExecutor(context=context)
        executor.add_node(node)
        try:
            yield node, executor
        finally:
            executor.shutdown()
            node.destroy_node()
    finally:
        context.try_shutdown()


def message_class(kind: str) -> Any:
    """
    Return the message class of a type name such as 'sensor_msgs/msg/Image'.

    Raises InputError naming the package when it is not installed.
    """
    package, _, name = kind.partition('/msg/')
    try:
        return getattr(importlib.import_module(f'{package}.msg'), name)
    except (ImportError, AttributeError):
        raise InputError(f'message type {kind} is not installed; install the ROS 2 package '
                         f'{package} or do without its topics') from None
