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
"""Timing discipline of the node, over DDS: clocks, loops, starts, deadlines, rivals, leaks."""

from __future__ import annotations

import gc
import os
from pathlib import Path
import threading
import time

from lifecycle_msgs.msg import Transition
from node_rig import CAMERAS, NodeRig, PATIENT, running, values_of, wait_until
import pytest
from rosgraph_msgs.msg import Clock
from test_node import now, SECOND
from test_node_lifecycle import transition
from trajectory_msgs.msg import MultiDOFJointTrajectory

from rspec_planner.live.processes import Processes
from rspec_planner.loading import memory_values
from rspec_planner.ros_conversions import ns_to_stamp, stamp_to_ns
from rspec_planner.world.bag import BagReader
from rspec_planner.world.drive import Drive
from rspec_planner.world.record import record_world, RecordOptions
from rspec_planner.world.rig import Rig

pytestmark = [pytest.mark.ros, pytest.mark.usefixtures('ros')]
NODE = '/planning/rspec_planner'


@pytest.fixture(scope='module')
def bag(tmp_path_factory) -> Path:
    """Return 4 s of the world; its stamps start where every bag of the world starts."""
    path = tmp_path_factory.mktemp('bag') / 'drive.mcap'
    rig = Rig(width=64, height=32)
    record_world(path, Drive((), 1, rig=rig), 4.0, RecordOptions(encoding='raw'), rig=rig)
    return path


def set_clock(rig, clock, stamp_ns):
    clock.publish(Clock(clock=ns_to_stamp(stamp_ns)))
    wait_until(lambda: rig.node._now_ns() == stamp_ns, 'the clock')


def last_reset(rig):
    return rig.node._last_reset


def test_first_frames_after_a_start_say_history_short_and_nothing_else():
    with running() as rig:
        t0 = rig.drive(now(), frames=3)
        status = rig.status('inputs', lambda s: values_of(s)['skip_reason'] == 'history_short',
                            'the skip')
        assert 'covers' in status.message
        for name in sorted(CAMERAS.names, key=lambda name: name == CAMERAS.anchor):
            rig.image(name, t0 + SECOND // 10)
        rig.odometry(t0 + SECOND // 10)
        rig.path_at(t0 + SECOND // 10)
        assert set(rig.node._made.statistics.skipped) == {'history_short'}


def test_the_start_of_the_clock_is_no_reset_and_a_jump_ahead_is_one():
    with running('use_sim_time:=true') as rig:
        clock = rig.publisher(Clock, '/clock')
        set_clock(rig, clock, 1000 * SECOND)
        rig.path_at(rig.drive(1000 * SECOND))
        assert last_reset(rig) == ''
        set_clock(rig, clock, 1001 * SECOND)  # a slow second is no jump
        assert last_reset(rig) == ''
        set_clock(rig, clock, 5000 * SECOND)
        wait_until(lambda: last_reset(rig) == 'reset: clock jump of +3999.0 s', 'the reset')
        rig.drive(5000 * SECOND, frames=1)
        rig.status('inputs', lambda s: (values_of(s)['skip_reason'], values_of(s)['last_reset'])
                   == ('history_short', 'reset: clock jump of +3999.0 s'), 'the skip')
        set_clock(rig, clock, 5002 * SECOND)
        rig.path_at(rig.drive(5002 * SECOND))
        assert rig.planner.resets >= 2


def test_a_looping_bag_is_planned_anew_in_every_round(bag, tmp_path):
    with running('use_sim_time:=true', 'sync.max_input_age_ms:=1000.0') as rig, \
            Processes(tmp_path, domain_id=int(os.environ['ROS_DOMAIN_ID'])) as processes:
        player = processes.start_module('player', 'rspec_planner.live.replay', str(bag), '--loop')

        warm_up = len(rig.planner.observations)

        def rounds():
            stamps = [o.t0_ns for o in list(rig.planner.observations)[warm_up:]]
            return sum(b < a for a, b in zip(stamps, stamps[1:]))
        wait_until(lambda: rounds() >= 2 or not player.running, 'the third round', 60.0)
        assert player.running, player.tail()
        seen = list(rig.planner.observations)[warm_up:]
        wait_until(lambda: any('clock jump of -' in values_of(status)['last_reset']
                               for array in list(rig.received['diagnostics'])
                               for status in array.status if status.name.endswith(': inputs')),
                   'the reset')
    starts = [b.t0_ns for a, b in zip(seen, seen[1:]) if b.t0_ns < a.t0_ns]
    with BagReader(bag) as reader:
        began = next(reader.read()).log_ns
    # every round waits for its own 1.5 s of history: nothing is left of the round before
    assert all(start >= began + 3 * SECOND // 2 for start in starts), (began, starts)
    for observation in seen:
        assert observation.image_stamps_ns.max() <= observation.t0_ns + SECOND // 20
        assert observation.image_stamps_ns.min() >= observation.t0_ns - SECOND * 35 // 100
    assert rig.planner.resets >= 3


def test_a_miss_repeats_the_last_plan_with_its_old_stamp():
    with running('deadline.max_pipeline_latency_ms:=3000.0',
                 'deadline.on_miss:=last_valid') as rig:
        good = rig.drive(now())
        rig.path_at(good)
        rig.planner.before = lambda observation: time.sleep(4.2)
        time.sleep(max(0.0, 1e-9 * (good + SECOND - now())))  # a stamp to come is no input
        late = rig.drive(good + SECOND)
        status = rig.status('latency', lambda s: s.level == b'\x02', 'the miss')
        assert 'the limit is 3000 ms' in status.message
        wait_until(lambda: len(rig.received['path']) >= 2, 'the repetition')
        stamps = {stamp_to_ns(path.header.stamp) for path in rig.received['path']}
        assert good in stamps and late not in stamps
        status = rig.status('inference_status',
                            lambda s: int(values_of(s)['repeated_total']) >= 1, 'the count')
        assert 'published again with its old stamp' in status.message


def test_two_nodes_of_one_name_are_told_by_both():
    with running() as rig:
        assert rig.node.get_fully_qualified_name() == NODE
        second = NodeRig([])
        try:
            second.start()
            for one in (rig, second):
                status = one.status('inference_status', lambda s: s.level == b'\x01', 'the rival')
                assert status.message.startswith(f'2 nodes are called {NODE}; end the others')
        finally:
            second.close()
        rig.received['diagnostics'].clear()
        rig.status('inference_status', lambda s: s.message == 'no plan yet', 'healing')


def test_another_planner_on_the_same_output_is_named():
    with running() as rig:
        publisher = rig.peer.create_publisher(MultiDOFJointTrajectory,
                                              f'{NODE}/output/trajectory', 1)
        status = rig.status('inference_status', lambda s: s.level == b'\x01', 'the rival')
        assert status.message.startswith(f'/peer also publishes {NODE}/output/trajectory')
        rig.peer.destroy_publisher(publisher)


def test_a_planner_that_hangs_is_told_while_it_hangs():
    release = threading.Event()
    with running() as rig:
        rig.planner.before = lambda observation: release.wait(20)
        rig.drive(now())
        status = rig.status('inference_status', lambda s: 'in the making' in s.message, 'the note')
        assert status.level == b'\x01' and float(values_of(status)['busy_ms']) > 1000.0
        release.set()
        rig.status('inference_status', lambda s: s.message == 'plan published', 'the plan')


def test_twenty_lifecycles_leave_nothing_behind():
    rig = NodeRig(['--ros-args', '-p', 'autostart:=false',
                   *(part for argument in PATIENT for part in ('-p', argument))])

    def held():
        gc.collect()
        return (threading.active_count(), len(os.listdir('/proc/self/fd')),
                len(list(rig.node.publishers)), len(list(rig.node.subscriptions)),
                memory_values('cpu')['memory_mib'])

    def cycle():
        assert transition(rig, Transition.TRANSITION_CONFIGURE)
        assert transition(rig, Transition.TRANSITION_ACTIVATE)
        rig.path_at(rig.drive(now()))
        assert transition(rig, Transition.TRANSITION_DEACTIVATE)
        assert transition(rig, Transition.TRANSITION_CLEANUP)
        rig.forget_publishers()
        for messages in rig.received.values():
            messages.clear()
        rig.planner.observations.clear()
    try:
        rig.start()
        for _ in range(3):  # what is made once is made now
            cycle()
        before = held()
        for _ in range(20):
            cycle()
        after = held()
    finally:
        rig.close()
    assert after[:4] == before[:4]
    assert after[4] - before[4] < 20.0, f'{before[4]:.1f} to {after[4]:.1f} MiB'
