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

from dataclasses import replace
import json
import threading
import time

from geometry_msgs.msg import Quaternion
from node_rig import CAMERAS, FakePlanner, running, TEXT, values_of, wait_until
import numpy as np
import pytest
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import Float64, String

from rspec_planner.planner.tokenizer import build_tokenizer
from rspec_planner.ros_conversions import compressed_image_message, ns_to_stamp, stamp_to_ns

pytestmark = [pytest.mark.ros, pytest.mark.usefixtures('ros')]
ROOT = '/planning/rspec_planner'
SECOND = 1_000_000_000


def now():
    return time.time_ns()


@pytest.mark.parametrize('reliable', [False, True])
@pytest.mark.parametrize('latched', [False, True])
def test_every_publisher_qos_reaches_the_planner(reliable, latched):
    with running(reliable_inputs=reliable, latched_inputs=latched) as rig:
        path = rig.path_at(rig.drive(now()))
        assert len(path.poses) == 65


def test_outputs_are_stamped_t0_and_carry_the_reasoning():
    with running() as rig:
        times = rig.subscribe(Float64, f'{ROOT}/debug/decode/processing_time_ms')
        rate = rig.subscribe(Float64, f'{ROOT}/debug/speculation/tokens_per_second')
        t0 = rig.drive(now())
        path = rig.path_at(t0)
        assert path.header.frame_id == 'map'
        trajectory = wait_until(lambda: rig.received['trajectory'], 'a trajectory')[-1]
        assert stamp_to_ns(trajectory.header.stamp) == t0
        assert len(trajectory.points) == 65
        assert trajectory.points[0].velocities[0].linear.x == pytest.approx(5.0)
        assert wait_until(lambda: rig.received['reasoning'], 'a reasoning')[-1].data == TEXT
        stamped = wait_until(lambda: rig.received['reasoning_stamped'], 'its stamp')[-1]
        assert json.loads(stamped.data) == {'t0_ns': t0, 'text': TEXT}
        markers = wait_until(lambda: rig.received['marker'], 'markers')[-1].markers
        assert {stamp_to_ns(marker.header.stamp) for marker in markers} == {t0}
        assert wait_until(lambda: times, 'a stage time')[-1].data == 4.0
        assert wait_until(lambda: rate, 'a token rate')[-1].data == pytest.approx(500.0)
        assert rig.planner.threads == {'planner'}


def test_observation_is_chosen_by_time_and_in_the_pose_at_t0():
    with running() as rig:
        t0 = rig.drive(now())
        rig.path_at(t0)
        seen = next(o for o in rig.planner.observations if o.t0_ns == t0)
        expected = [t0 - step * SECOND // 10 for step in (3, 2, 1, 0)]
        assert seen.image_stamps_ns.tolist() == [expected] * 4
        assert seen.images.shape == (4, 4, CAMERAS.height, CAMERAS.width, 3)
        np.testing.assert_allclose(seen.ego_poses[:, 0, 3], 5.0 * np.arange(-1.5, 0.05, 0.1),
                                   atol=1e-6)


def test_compressed_images_come_through_the_same_parameters():
    with running() as rig:
        t0 = now()
        pixels = np.full((CAMERAS.height, CAMERAS.width, 3), (200, 20, 20), np.uint8)
        rig.drive(t0, cameras=())
        for step in (3, 2, 1, 0):
            for name in sorted(CAMERAS.names, key=lambda name: name == CAMERAS.anchor):
                topic = f'/sensing/camera/{name}/image_raw/compressed'
                rig.publisher(CompressedImage, topic).publish(compressed_image_message(
                    pixels, t0 - step * SECOND // 10, name))
        rig.path_at(t0)
        assert rig.planner.observations[-1].images[0, 0, 0, 0, 0] > 180


def test_odometry_that_comes_a_little_later_is_awaited():
    with running('sync.odometry_wait_ms:=200.0') as rig:
        t0 = now()
        for step in range(34, 0, -1):
            rig.odometry(t0 - step * 50_000_000)
        rig.settle()
        rig.drive(t0, odometry=False)
        wait_until(lambda: rig.node._watch.states()[1].newest_ns == t0, 'the trigger')
        rig.odometry(t0 + 1_000_000)
        rig.path_at(t0)


def test_odometry_that_stays_away_is_named():
    with running() as rig:
        t0 = now()
        for step in range(34, 0, -1):
            rig.odometry(t0 - step * 50_000_000)
        rig.settle()
        rig.drive(t0, odometry=False)
        status = rig.status('inputs', lambda s: values_of(s)['skip_reason'] == 'odometry_gap',
                            'the skip')
        assert 'odometry ends 50.0 ms before t0' in status.message


def test_missing_camera_is_named_and_heals():
    with running('sync.image_wait_ms:=1.0') as rig:
        start = now() - 4 * SECOND
        rig.drive(start, cameras=CAMERAS.names[:3])
        status = rig.status('inputs', lambda s: values_of(s)['skip_reason'] == 'camera_missing',
                            'the skip')
        assert status.level == b'\x02'
        assert "camera 'front_tele' on /sensing/camera/front_tele/image_raw" in status.message
        assert 'was never received; no publisher is there' in status.message
        assert rig.received['path'] == []
        rig.path_at(rig.drive(start + 2 * SECOND))
        healed = rig.status('inputs', lambda s: values_of(s)['history_ok'] == 'true', 'healing')
        assert values_of(healed)['skip_reason'] == ''
        assert int(values_of(healed)['skipped_camera_missing']) >= 1


@pytest.mark.parametrize('fault', [
    {'x': float('nan')}, {'x': float('inf')}, {'orientation': Quaternion(w=0.0)}])
def test_unusable_odometry_is_named_and_heals(fault):
    with running() as rig:
        start = now() - 4 * SECOND
        rig.drive(start, cameras=())
        rig.odometry(start - 10_000_000, **fault)
        rig.settle()
        rig.drive(start, odometry=False)
        status = rig.status(
            'inputs', lambda s: values_of(s)['skip_reason'] == 'odometry_not_finite', 'the skip')
        assert 'odometry' in status.message and 'localization' in status.message
        rig.path_at(rig.drive(start + 2 * SECOND))


def test_unknown_encoding_is_named_and_heals():
    with running() as rig:
        start = now() - 4 * SECOND
        rig.drive(start, encoding='32FC1')
        status = rig.status(
            'inputs', lambda s: values_of(s)['skip_reason'] == 'image_decode_failed', 'the skip')
        assert "'32FC1' is not supported; publish one of rgb8" in status.message
        rig.path_at(rig.drive(start + 2 * SECOND))


def test_unset_stamp_is_named():
    with running() as rig:
        rig.drive(now(), frames=0)
        for name in CAMERAS.names:
            rig.image(name, 0)
        status = rig.status('inputs', lambda s: values_of(s)['skip_reason'] == 'stamp_invalid',
                            'the skip')
        assert 'header.stamp' in status.message


def test_latest_frame_wins_while_the_planner_is_slow():
    with running() as rig:
        start = now() - 3 * SECOND
        rig.path_at(rig.drive(start))
        busy, release = threading.Event(), threading.Event()

        def block(observation):
            busy.set()
            assert release.wait(10)
        rig.planner.before = block
        for step in range(1, 11):
            stamp = start + step * SECOND // 10
            rig.odometry(stamp)
            for name in sorted(CAMERAS.names, key=lambda name: name == CAMERAS.anchor):
                rig.image(name, stamp)
            wait_until(lambda stamp=stamp: all(
                state.newest_ns == stamp for state in rig.node._watch.states()), 'the frames')
            assert busy.wait(10)
        rig.planner.before = lambda observation: None
        release.set()
        rig.path_at(start + SECOND)
        planned = [o.t0_ns - start for o in rig.planner.observations if o.t0_ns > start]
        assert planned == [SECOND // 10, SECOND]
        status = rig.status('inference_status',
                            lambda s: int(values_of(s)['superseded_total']) >= 8, 'the count')
        assert status.message == 'plan published'


def test_planner_exception_is_a_diagnostic_and_heals(capfd):
    with running() as rig:
        def fail(observation):
            raise RuntimeError('the engine lost its mind')
        rig.planner.before = fail
        start = now() - 5 * SECOND
        for step in range(3):
            rig.drive(start + step * SECOND)
            status = rig.status(
                'inference_status',
                lambda s, count=step + 1: int(values_of(s)['failed_total']) >= count, 'failure')
        assert status.level == b'\x02'
        assert 'RuntimeError: the engine lost its mind' in status.message
        rig.planner.before = lambda observation: None
        rig.path_at(rig.drive(start + 4 * SECOND))
        rig.status('inference_status', lambda s: s.message == 'plan published', 'healing')
    assert capfd.readouterr().err.count('Traceback') == 1


def test_words_that_a_draft_decided_are_an_error_in_check_mode():
    planner = FakePlanner()
    planner.alone = FakePlanner  # says the same
    with running('speculation.check_every:=2', load=lambda parameters: planner) as rig:
        start = now() - 8 * SECOND
        for step in range(2):
            rig.path_at(rig.drive(start + step * SECOND))
        status = rig.status('speculation', lambda s: values_of(s)['checked_total'] == '1', 'check')
        assert status.level == b'\x00' and values_of(status)['mismatch_total'] == '0'
        made = planner.plan

        def other(observation):
            plan = made(observation)
            return replace(plan, reasoning=replace(plan.reasoning, token_ids=(9, 9)))
        planner.plan = other
        for step in range(2, 4):
            rig.path_at(rig.drive(start + step * SECOND))
        status = rig.status('speculation', lambda s: s.level == b'\x02', 'the mismatch')
        assert 'output mismatch in 1 of 2 checked plans' in status.message


def test_rejected_plan_is_counted_and_not_published():
    with running() as rig:
        rig.planner.accept = False
        rig.drive(now())
        status = rig.status('inference_status',
                            lambda s: values_of(s)['reject_reason'] == 'start_jump', 'rejection')
        assert '9.0 m, limit 2.0 m' in status.message
        assert rig.received['path'] == []


def test_clock_jump_resets_and_planning_goes_on():
    with running('use_sim_time:=true') as rig:
        clock = rig.publisher(Clock, '/clock')

        def set_clock(stamp_ns):
            clock.publish(Clock(clock=ns_to_stamp(stamp_ns)))
            wait_until(lambda: rig.node._now_ns() == stamp_ns, 'the clock')
        set_clock(1000 * SECOND)
        rig.path_at(rig.drive(1000 * SECOND))
        resets = rig.planner.resets
        set_clock(500 * SECOND)
        status = rig.status('inputs', lambda s: 'jump of -500.0 s' in values_of(s)['last_reset'],
                            'the reset')
        assert values_of(status)['last_reset'] == 'reset: clock jump of -500.0 s'
        wait_until(lambda: rig.planner.resets == resets + 1, 'the reset of the planner')
        rig.path_at(rig.drive(500 * SECOND))


def test_simulated_time_without_a_clock_is_named():
    with running('use_sim_time:=true') as rig:
        rig.drive(1000 * SECOND)
        status = rig.status('inputs', lambda s: values_of(s)['skip_reason'] == 'clock_not_running',
                            'the skip')
        assert 'nothing came on /clock' in status.message


def test_old_recording_without_its_clock_is_named():
    with running('sync.max_input_age_ms:=300.0') as rig:
        rig.drive(1000 * SECOND)
        status = rig.status('inputs', lambda s: values_of(s)['skip_reason'] == 'input_too_old',
                            'the skip')
        assert '--clock and use_sim_time' in status.message


def test_anchor_stamps_that_go_back_reset_without_a_clock_jump():
    with running() as rig:
        start = now()
        rig.path_at(rig.drive(start))
        rig.drive(start - 6 * SECOND)  # the anchor's first frame resets what came before it
        status = rig.status('inputs', lambda s: 'went back' in values_of(s)['last_reset'],
                            'the reset')
        assert 'went back by' in values_of(status)['last_reset']
        rig.path_at(rig.drive(start - 4 * SECOND))
        assert rig.planner.resets >= 2  # the warm-up and the way back


def test_odometry_of_another_point_is_named():
    with running() as rig:
        rig.path_at(rig.drive(now() - SECOND))
        rig.odometry(now(), child_frame_id='imu_link')
        status = rig.status('inputs', lambda s: 'imu_link' in s.message, 'the note')
        assert "child_frame_id is 'imu_link', plans need 'base_link'" in status.message
        assert 'child_frame_id changed' in values_of(status)['last_reset']


def test_incompatible_qos_names_topic_and_policy():
    topic = '/localization/kinematic_state'
    with running(f'qos_overrides.{topic}.subscription.reliability:=reliable') as rig:
        from nav_msgs.msg import Odometry
        rig.peer.create_publisher(Odometry, topic, QoSProfile(
            depth=1, reliability=ReliabilityPolicy.BEST_EFFORT))
        status = rig.status('inputs', lambda s: 'incompatible' in s.message, 'the mismatch')
        assert topic in status.message and 'RELIABILITY' in status.message


def test_both_transports_at_once_deliver_each_frame_once():
    with running() as rig:
        pixels = np.zeros((CAMERAS.height, CAMERAS.width, 3), np.uint8)
        topic = f'/sensing/camera/{CAMERAS.names[0]}/image_raw/compressed'
        publisher = rig.publisher(CompressedImage, topic)
        start = now()
        for step in range(5):
            rig.image(CAMERAS.names[0], start + step * SECOND // 10)
            wait_until(lambda count=step + 1: rig.node._watch.states()[0].received == count,
                       'the raw frame')
            publisher.publish(compressed_image_message(pixels, start + step * SECOND // 10, ''))
        rig.path_at(rig.drive(start))  # everything sent before has been handled by then
        state = rig.node._watch.states()[0]
        assert state.received == 5 + 4


def test_navigation_text_reaches_the_observation():
    with running(reliable_inputs=True) as rig:
        rig.publisher(String, f'{ROOT}/input/navigation_text').publish(
            String(data='Turn left at the junction'))
        wait_until(lambda: rig.node._made.buffer._navigation_text, 'the text')
        rig.path_at(rig.drive(now()))
        assert rig.planner.observations[-1].navigation_text == 'Turn left at the junction'


def test_a_route_without_room_in_the_prompt_is_told_and_not_used():
    planner = FakePlanner()
    planner.tokenizer = build_tokenizer(['left'])
    with running(reliable_inputs=True, load=lambda parameters: planner) as rig:
        text = rig.publisher(String, f'{ROOT}/input/navigation_text')
        text.publish(String(data='left ' * 65))
        rig.status('inputs', lambda s: '65 tokens, limit 64' in s.message, 'the complaint')
        rig.path_at(rig.drive(now()))
        assert planner.observations[-1].navigation_text == ''
        assert rig.node._made.inputs.counts['navigation_text_refused'] == 1


def test_diagnostics_have_all_tasks_once_a_second_without_input():
    with running() as rig:
        rig.status('inputs', lambda s: 'was never received' in s.message, 'the complaint')
        wait_until(lambda: len(rig.received['diagnostics']) >= 3, 'the beat')
        newest = rig.received['diagnostics'][-1]
        names = [status.name for status in newest.status]
        assert names == [f'rspec_planner: {task}' for task in (
            'engine', 'inputs', 'inference_status', 'latency', 'speculation')]
        assert {status.hardware_id for status in newest.status} == {'rspec_planner'}
        assert stamp_to_ns(newest.header.stamp) > 0
