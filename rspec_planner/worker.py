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
One thread that does the slow work, with a one-slot mailbox where the latest item wins.

The thread owns the model: loading, planning and resetting all run on it, so device contexts
and thread pools are never touched from two sides. Knows nothing of ROS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
import threading
from typing import Any, Generic, TypeVar

T = TypeVar('T')
R = TypeVar('R')


class Worker(Generic[T]):
    """Handle submitted items one at a time; `on_error` gets what a handler raised."""

    def __init__(self, handle: Callable[[T], None],
                 on_error: Callable[[Exception], None], name: str = 'planner') -> None:
        self._handle = handle
        self._on_error = on_error
        self._changed = threading.Condition()
        self._slot: list[T] = []  # at most one item
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._busy = False
        self._name = name
        self._thread = self._new_thread()
        self._started = False

    def _new_thread(self) -> threading.Thread:
        # A daemon: a plan that hangs in native code must not keep the process from ending.
        return threading.Thread(target=self._run, name=self._name, daemon=True)

    @property
    def running(self) -> bool:
        """Return whether the thread is alive."""
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Return whether the thread works on something."""
        return self._busy

    @property
    def waiting(self) -> bool:
        """Return whether an item is in the mailbox."""
        return bool(self._slot)

    def start(self) -> None:
        """Start the thread."""
        self._started = True
        self._thread.start()

    def _revive(self) -> bool:
        """Start another thread when the last one died of what no handler may raise."""
        if not self._started or self._stopping or self._thread.is_alive():
            return False
        self._thread = self._new_thread()
        self._thread.start()
        return True

    def stop(self, timeout_s: float) -> bool:
        """Drop what waits, end after the current item; False when it did not end in time."""
        with self._changed:
            self._stopping = True
            self._slot.clear()
            for _, future in self._calls:
                future.cancel()
            self._calls.clear()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, item: T) -> bool:
        """
        Put an item into the mailbox; True when it replaced one that was still waiting.

        A thread that has died, of a SystemExit for example, is told to `on_error` and replaced.
        """
        if self._revive():
            self._on_error(RuntimeError('the planning thread had ended; another one was started'))
        with self._changed:
            replaced = bool(self._slot)
            self._slot[:] = [item]
            self._changed.notify_all()
            return replaced

    def clear(self) -> bool:
        """Empty the mailbox; True when something was in it."""
        with self._changed:
            waited = bool(self._slot)
            self._slot.clear()
            return waited

    def call(self, function: Callable[[], R]) -> Future[R]:
        """Run a function on the thread, before the next item; its future holds the result."""
        future: Future[R] = Future()
        with self._changed:
            if self._stopping:
                future.cancel()
            else:
                self._calls.append((function, future))
                self._changed.notify_all()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.wait_for(lambda: self._stopping or self._calls or self._slot)
                if self._stopping:
                    return
                call = self._calls.popleft() if self._calls else None
                item = self._slot.pop() if call is None else None
                self._busy = True
            if call is not None:
                self._answer(*call)
            else:
                self._work(item)  # type: ignore[arg-type]

    def _work(self, item: T) -> None:
        try:
            self._handle(item)
        except Exception as error:  # noqa: B902 - the one place where anything may arrive
            self._on_error(error)

    @staticmethod
    def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
