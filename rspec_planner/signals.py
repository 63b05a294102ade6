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
What SIGINT and SIGTERM do to a program of ours, from its first line to its last.

Both are how it normally ends, so the exit code is 0 whenever they come. Standard library only:
this is imported before anything that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def leave_at_once() -> None:
    """Let a signal end the process while it only imports, when there is nothing to give back."""
    for number in NUMBERS:
        signal.signal(number, lambda number, frame: os._exit(0))


def leave(code: int) -> None:
    """
    End the process with everything printed, whatever its threads do.

    Signals are ignored first: Python restores their defaults while it finalizes, and a second
    one would then decide the exit code. A thread that hangs in native code does not delay this.
    """
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class StopSignals:
    """
    Raises KeyboardInterrupt for the first signal while that is allowed, never a second time.

    Other ones only set `seen`: what ends the program must not be interrupted itself.
    """

    def __init__(self) -> None:
        self.seen = False
        self._raises = False
        for number in NUMBERS:
            signal.signal(number, self._handle)

    def allow(self) -> None:
        """Raise for the first signal from now on, and now for one that has come already."""
        self._raises = not self.seen
        if self.seen:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """Raise nothing from now on."""
        self._raises = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt
