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
"""Which executor runs the node, and that it sleeps while nothing happens."""

from __future__ import annotations

import sys
import time

from node_rig import private_domain
import pytest
import rclpy

from rspec_planner import process
from rspec_planner.process import event_executor

pytestmark = pytest.mark.ros


@pytest.fixture
def context():
    private_domain()
    rclpy.init()
    yield
    rclpy.try_shutdown()


def kind(executor):
    return type(executor).__name__


def test_fast_dds_tells_what_is_ready_and_no_other_middleware_is_trusted_to(context, monkeypatch):
    assert kind(event_executor()) == 'EventsExecutor'
    monkeypatch.setattr(process, 'get_rmw_implementation_identifier', lambda: 'rmw_other_cpp')
    assert kind(event_executor()) == 'SingleThreadedExecutor'


def test_an_older_rclpy_has_the_plain_executor(context, monkeypatch):
    monkeypatch.setitem(sys.modules, 'rclpy.experimental.events_executor', None)
    assert kind(event_executor()) == 'SingleThreadedExecutor'


def test_it_sleeps_until_something_comes_and_wakes_for_it(context):
    node = rclpy.create_node('idle')
    executor, called = event_executor(), []
    executor.add_node(node)
    for _ in range(5):  # what the node's own start has left
        executor.spin_once(timeout_sec=0.05)
    used, started = time.process_time(), time.monotonic()
    executor.spin_once(timeout_sec=0.5)
    assert time.monotonic() - started > 0.4 and time.process_time() - used < 0.2
    node.create_timer(0.1, lambda: called.append(time.monotonic()))
    started = time.monotonic()
    while not called and time.monotonic() - started < 5.0:
        executor.spin_once(timeout_sec=5.0)
    assert 0.05 < called[0] - started < 2.0
    executor.shutdown()
    node.destroy_node()
