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
"""What is published for a plan, and the numbers below ~/debug/speculation/."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
import json
import math
from types import SimpleNamespace

import autoware_messages
from nav_msgs.msg import Path
from node_rig import plan_at, T0, TEXT
import numpy as np
import pytest
from rclpy.serialization import deserialize_message
from test_message_sets import turning_plan
from trajectory_msgs.msg import MultiDOFJointTrajectory

from rspec_planner.cycle import CycleResult, Outcome
from rspec_planner.decode.stats import DecodeStats
from rspec_planner.outputs import Outputs, SPECULATION, speculation_numbers
from rspec_planner.parameters import load_yaml_parameters, NodeParameters
from rspec_planner.planner.plan import StageTimes
from rspec_planner.planner.timing import STAGES
from rspec_planner.ros_conversions import plan_path, plan_trajectory, stamp_to_ns
from rspec_planner.transport import config_path

ROOT = '/planning/rspec_planner'
NOW = T0 + 123_000_000


class FakeNode:
    """Keeps what is published by topic; everybody subscribes unless told otherwise."""

    def __init__(self, mapped=None):
        self.sent = defaultdict(list)
        self.kinds = {}
        self.subscribers = defaultdict(lambda: 1)
        self.mapped = mapped or {}

    def resolve_topic_name(self, topic):
        topic = topic.replace('~', ROOT)
        return self.mapped.get(topic, topic)

    def get_clock(self):
        return SimpleNamespace(now=lambda: SimpleNamespace(nanoseconds=NOW))

    def create_lifecycle_publisher(self, kind, topic, qos, **options):
        topic = self.resolve_topic_name(topic)
        self.kinds[topic] = kind.__name__
        return SimpleNamespace(publish=self.sent[topic].append,
                               get_subscription_count=lambda: self.subscribers[topic])

    def destroy_lifecycle_publisher(self, publisher):
        self.kinds.popitem()


def outputs_of(node, message_set='common'):
    values = load_yaml_parameters(config_path('rspec_planner.param.yaml'))
    values['output.message_set'] = message_set
    return Outputs(node, NodeParameters.from_values(values))


def times_of(plan):
    return CycleResult(T0, Outcome.PUBLISHED, plan=plan, processing_ms=90.0,
                       pipeline_latency_ms=120.0, cyclic_ms=100.0)


def test_common_set():
    node = FakeNode()
    outputs = outputs_of(node)
    plan = turning_plan()
    outputs.publish_plan(plan)
    outputs.publish_debug()
    outputs.publish_debug()  # nothing new to draw
    outputs.publish_stop(plan)
    outputs.publish_times(times_of(plan))
    sent = {topic.removeprefix(ROOT): messages for topic, messages in node.sent.items()}
    assert all(len(messages) == 1 for messages in sent.values())
    assert {topic for topic in sent if '/output/' in topic} == {
        '/output/path', '/output/trajectory', '/output/reasoning', '/output/reasoning_stamped',
        '/output/stop_trajectory'}
    assert deserialize_message(sent['/output/path'][0], Path) == plan_path(plan, 'odometry')
    assert deserialize_message(sent['/output/trajectory'][0], MultiDOFJointTrajectory) \
        == sent['/output/stop_trajectory'][0] == plan_trajectory(plan, 'odometry')
    assert sent['/output/reasoning'][0].data == TEXT
    stamped = json.loads(sent['/output/reasoning_stamped'][0].data)
    assert stamped == {'t0_ns': T0, 'text': TEXT}
    assert {f'/debug/{stage}/processing_time_ms' for stage in STAGES} <= set(sent)
    assert sent['/debug/processing_time_ms'][0].data == 90.0
    outputs.destroy()
    assert node.kinds == {}


def test_autoware_set(monkeypatch):
    autoware_messages.install(monkeypatch)
    mapped = {f'{ROOT}/output/trajectory': '/planning/trajectory'}
    node = FakeNode(mapped)
    outputs = outputs_of(node, 'autoware')
    plan = turning_plan()
    outputs.publish_plan(plan)
    outputs.publish_debug()
    outputs.publish_debug()  # nothing new to draw
    outputs.publish_stop(plan)
    outputs.publish_times(times_of(plan))
    assert all(len(messages) == 1 for messages in node.sent.values())
    assert node.kinds['/planning/trajectory'] == 'Trajectory'
    assert node.kinds[f'{ROOT}/output/trajectories'] == 'CandidateTrajectories'
    published = node.sent['/planning/trajectory/debug/published_time'][0]
    assert stamp_to_ns(published.header.stamp) == T0
    assert stamp_to_ns(published.published_stamp) == NOW
    reasoning = node.sent[f'{ROOT}/output/reasoning'][0]
    assert (reasoning.data, stamp_to_ns(reasoning.stamp)) == (TEXT, T0)
    number = node.sent[f'{ROOT}/debug/pipeline_latency_ms'][0]
    assert (number.data, stamp_to_ns(number.stamp)) == (120.0, NOW)  # the end of the interval
    path = deserialize_message(node.sent[f'{ROOT}/output/path'][0], Path)
    assert path == plan_path(plan, 'odometry')
    outputs.destroy()
    assert node.kinds == {}


def test_what_nobody_hears_is_not_made(monkeypatch):
    autoware_messages.install(monkeypatch)
    node = FakeNode()
    node.subscribers.default_factory = int
    outputs = outputs_of(node, 'autoware')
    outputs.publish_plan(turning_plan())
    outputs.publish_debug()
    silent = {topic.removeprefix(ROOT) for topic, messages in node.sent.items() if not messages}
    assert {topic for topic in silent if not topic.endswith('_ms')
            and '/speculation/' not in topic} == {
        '/debug/marker', '/debug/candidates', '/output/stop_trajectory',
        '/output/trajectory/debug/published_time'}


def plan_with(stats):
    plan = plan_at(np.eye(4))
    return replace(plan, reasoning=replace(plan.reasoning, stats=stats),
                   times=StageTimes(decode_ms=8.0))


def test_numbers_of_a_speculative_plan():
    numbers = speculation_numbers(plan_with(DecodeStats(2, (10, 6), 1.5, 6.0, reused=2, block=24,
                                                log_probability=math.log(0.75))))
    assert set(numbers) == set(SPECULATION)
    assert (numbers['iterations'], numbers['mean_accepted_length']) == (2, 8.0)
    assert (numbers['reused_tokens'], numbers['draft_ms'], numbers['verify_ms']) == (2, 1.5, 6.0)
    assert numbers['tokens_per_second'] == pytest.approx(16 / 0.008)
    assert numbers['confidence'] == pytest.approx(0.75)


def test_a_plan_without_an_iteration_claims_no_length_and_no_rate():
    numbers = speculation_numbers(plan_with(DecodeStats(0, (), reused=17, block=24)))
    assert (numbers['iterations'], numbers['reused_tokens']) == (0, 17)
    assert 'mean_accepted_length' not in numbers and 'tokens_per_second' not in numbers
    assert 'confidence' not in numbers  # that loop did not tell
