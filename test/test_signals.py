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
"""Signals interrupt a start once and nothing else, whenever they come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from rspec_planner.signals import NUMBERS, StopSignals


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize('number', NUMBERS)
def test_the_first_signal_interrupts_what_may_be_interrupted(number):
    signals = StopSignals()
    signals.allow()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)  # somebody in a hurry
    assert signals.seen


def test_nothing_is_interrupted_outside():
    signals = StopSignals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.seen
    with pytest.raises(KeyboardInterrupt):
        signals.allow()  # it came before the start began
    signals = StopSignals()
    signals.allow()
    signals.hold()
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.seen


@pytest.mark.parametrize('code', [0, 3])
def test_leaving_prints_everything_and_a_late_signal_does_not_change_the_code(code):
    program = ('import os, signal, sys, threading\n'
               'from rspec_planner.signals import leave\n'
               'threading.Thread(target=threading.Event().wait).start()\n'
               'class Late:\n'
               '    def write(self, text): pass\n'
               '    def flush(self): os.kill(os.getpid(), signal.SIGTERM)\n'
               'sys.stderr = Late()\n'
               f'print("said", end=""); leave({code})\n')
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True,
                          timeout=30)
    assert (done.returncode, done.stdout) == (code, 'said')


def test_a_signal_while_importing_is_a_normal_end():
    program = ('import os, signal\nfrom rspec_planner.signals import leave_at_once\n'
               'leave_at_once()\nos.kill(os.getpid(), signal.SIGTERM)\nraise SystemExit(5)\n')
    assert subprocess.run([sys.executable, '-c', program], timeout=30).returncode == 0
