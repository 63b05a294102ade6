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

from __future__ import annotations

import threading

from node_rig import wait_until
import pytest

from rspec_planner.worker import Worker


@pytest.fixture
def worker():
    errors = []
    made = Worker(lambda item: item(), errors.append)
    made.errors = errors
    made.start()
    yield made
    assert made.stop(5.0)


def test_latest_item_wins_while_the_worker_is_busy(worker):
    busy, release, done, seen = (threading.Event(), threading.Event(), threading.Event(), [])

    def block():
        busy.set()
        assert release.wait(5)
    assert not worker.submit(block)
    assert busy.wait(5)
    assert not worker.submit(lambda: seen.append('old'))
    assert worker.submit(lambda: (seen.append('new'), done.set()))
    release.set()
    assert done.wait(5)
    assert seen == ['new']


def test_the_worker_tells_what_it_does(worker):
    started, release = threading.Event(), threading.Event()
    assert not worker.busy and not worker.waiting
    worker.submit(lambda: (started.set(), release.wait(5)))
    assert started.wait(5) and worker.busy and not worker.waiting
    worker.submit(lambda: None)
    assert worker.waiting
    release.set()
    worker.call(lambda: None).result(5)


def test_an_exception_reaches_the_handler_and_the_worker_goes_on(worker):
    def fail():
        raise ValueError('broken')
    worker.submit(fail)
    worker.call(lambda: None).result(5)
    done = threading.Event()
    worker.submit(done.set)
    assert done.wait(5)
    assert [str(error) for error in worker.errors] == ['broken']


def test_calls_run_on_the_worker_and_return_or_raise(worker):
    assert worker.call(threading.current_thread).result(5).name == 'planner'
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0).result(5)
    assert worker.errors == []


def test_calls_go_before_a_waiting_item(worker):
    busy, release, order = threading.Event(), threading.Event(), []

    def block():
        busy.set()
        assert release.wait(5)
    worker.submit(block)
    assert busy.wait(5)
    finished = threading.Event()
    worker.submit(lambda: (order.append('item'), finished.set()))
    worker.call(lambda: order.append('call'))
    release.set()
    assert finished.wait(5)
    assert order == ['call', 'item']


def test_clear_empties_the_mailbox(worker):
    busy, release = threading.Event(), threading.Event()
    worker.submit(lambda: (busy.set(), release.wait(5)))
    assert busy.wait(5)
    worker.submit(lambda: pytest.fail('cleared items must not run'))
    assert worker.clear()
    assert not worker.clear()
    release.set()
    worker.call(lambda: None).result(5)
    assert worker.errors == []


def test_stop_cancels_what_waits():
    worker = Worker(lambda item: None, lambda error: None)
    waiting = worker.call(lambda: 1)
    assert worker.stop(1.0)  # never started: nothing to wait for
    assert waiting.cancelled()
    assert worker.call(lambda: 1).cancelled()


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_thread_that_died_is_told_and_replaced():
    """SystemExit of a library ends a thread without a word; the next item must be handled."""
    seen, errors = [], []

    def handle(item):
        if item == 'exit':
            raise SystemExit(3)
        seen.append(item)
    worker = Worker(handle, errors.append)
    worker.start()
    worker.submit('exit')
    wait_until(lambda: not worker.running, 'the death')
    worker.submit('next')
    wait_until(lambda: seen == ['next'], 'the next item')
    assert 'another one was started' in str(errors[0]) and len(errors) == 1
    assert worker.stop(5.0)
    worker.submit('late')
    assert not worker.running and seen == ['next']
