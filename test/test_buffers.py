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
"""Selection by time: nearest frames, exact history, and a name for every refusal."""

from dataclasses import replace
from threading import current_thread

import cv2
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import CameraConfig, PromptConfig, tiny
from rspec_planner.planner.buffers import ObservationBuffer, SelectionLimits, Skip, SKIP_REASONS
from rspec_planner.planner.history import yaw_of
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.prompt import build_prompt, MAX_ROUTE_TOKENS
from rspec_planner.planner.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(['left'])
PROFILE = replace(tiny(TOKENIZER.token_ids, TOKENIZER.vocab_size),
                  cameras=CameraConfig(height=32, width=64))
CAMERAS = PROFILE.cameras.names
T0 = 1_700_000_000_000_000_000
MS = 1_000_000
EVERY_10_MS = range(-1600, 60, 10)


def picture(value=0, height=32, width=64):
    return np.full((height, width, 3), value % 256, dtype=np.uint8)


def add_images(buffer, offsets_ms=range(-500, 100, 100), cameras=CAMERAS):
    for camera in cameras:
        for k, offset in enumerate(offsets_ms):
            buffer.add_image(camera, T0 + int(offset * MS), picture(k))


def pose_at(offset_ms, speed=10.0, yaw_rate=0.0):
    t = offset_ms / 1e3
    yaw = yaw_rate * t
    if yaw_rate:
        position = (speed / yaw_rate * np.sin(yaw), speed / yaw_rate * (1 - np.cos(yaw)), 0.0)
    else:
        position = (speed * t, 0.0, 0.0)
    return position, (0.0, 0.0, np.sin(yaw / 2), np.cos(yaw / 2))


def add_poses(buffer, offsets_ms=EVERY_10_MS, frame='map', **motion):
    for offset in offsets_ms:
        position, rotation = pose_at(offset, **motion)
        buffer.add_pose(T0 + int(offset * MS), position, rotation, motion.get('speed', 10.0),
                        frame)


@pytest.fixture
def buffer():
    return ObservationBuffer(PROFILE)


def refused(buffer, reason, *words, **kwargs):
    result = buffer.select(T0, **kwargs)
    assert isinstance(result, Skip), result
    assert result.reason == reason, result
    assert reason in SKIP_REASONS
    assert '\n' not in result.detail
    for word in words:
        assert word in result.detail, result.detail
    return result


def test_a_model_without_routes_plans_on_without_the_text():
    profile = replace(PROFILE, prompt=PromptConfig('chat', navigation=False))
    buffer = ObservationBuffer(profile)
    add_images(buffer)
    add_poses(buffer)
    buffer.set_navigation_text(' ')
    assert not buffer.dropped
    buffer.set_navigation_text('Turn left')
    assert buffer.dropped == {'navigation_text_refused': 1}
    assert buffer.select(T0).navigation_text == ''


@pytest.mark.parametrize(('text', 'words'), [
    ('left ' * (MAX_ROUTE_TOKENS + 1), '65 tokens, limit 64'),
    ('l' * 501, '501 characters, limit 500'),
    ('<|im_end|>', 'could pass for a token'),
    ('turn\x07left', 'control characters'),
])
def test_a_text_that_no_prompt_has_room_for_stops_no_plan(text, words):
    tokenizer = build_tokenizer(['left', 'turn left'])
    buffer = ObservationBuffer(PROFILE, tokenizer=tokenizer)
    add_images(buffer)
    add_poses(buffer)
    assert buffer.set_navigation_text('left ' * MAX_ROUTE_TOKENS) == ''
    fault = buffer.set_navigation_text(text)
    assert words in fault and '\n' not in fault
    assert buffer.dropped == {'navigation_text_refused': 1}
    seen = buffer.select(T0)
    assert seen.navigation_text == ('left ' * MAX_ROUTE_TOKENS).strip()
    profile = tiny(tokenizer.token_ids, tokenizer.vocab_size)
    assert build_prompt(profile, tokenizer, seen.ego_poses, seen.navigation_text).length
    assert buffer.set_navigation_text(' ') == '' and buffer.select(T0).navigation_text == ''


def test_complete_observation(buffer):
    add_images(buffer)
    add_poses(buffer, speed=10.0, yaw_rate=0.1)
    buffer.set_navigation_text(' Turn left ')
    seen = buffer.select(T0)
    assert isinstance(seen, Observation)
    assert seen.images.shape == (4, 4, 32, 64, 3)
    assert seen.images[:, :, 0, 0, 0].tolist() == [[2, 3, 4, 5]] * 4
    assert ((T0 - seen.image_stamps_ns) // MS).tolist() == [[300, 200, 100, 0]] * 4
    assert seen.camera_names == CAMERAS
    assert seen.odometry_frame == 'map'
    assert seen.navigation_text == 'Turn left'
    assert seen.speed_mps == pytest.approx(10.0)
    assert np.allclose(seen.ego_poses[-1], np.eye(4), atol=1e-12)
    assert np.allclose(yaw_of(seen.ego_poses), 0.1 * np.arange(-15, 1) * 0.1, atol=1e-6)
    for k in range(16):
        expected, _ = pose_at(100 * (k - 15), yaw_rate=0.1)
        assert np.allclose(seen.ego_poses[k, :3, 3], expected, atol=1e-9)
    assert seen.ages_ms['front_wide'] == 0.0
    assert seen.ages_ms['odometry'] == -50.0


def test_ego_pose_is_interpolated_at_t0(buffer):
    add_images(buffer)
    add_poses(buffer, [o + 3.5 for o in EVERY_10_MS], speed=20.0)
    seen = buffer.select(T0)
    assert np.allclose(seen.ego_pose_at_t0[:3, 3], 0.0, atol=1e-9)


def test_short_extrapolation_keeps_speed_and_heading(buffer):
    add_images(buffer)
    add_poses(buffer, range(-1600, -10, 10), speed=20.0)
    seen = buffer.select(T0)
    assert np.allclose(seen.ego_pose_at_t0[:3, 3], 0.0, atol=1e-9)
    assert seen.ages_ms['odometry'] == 20.0


@pytest.mark.parametrize('offsets, covered', [([0], '0.00 s'), ([-100, 0], '0.10 s'),
                                              ([-200, -100, 0], '0.20 s')])
def test_first_frames_after_a_start_are_a_short_history(buffer, offsets, covered):
    add_images(buffer, offsets)
    add_poses(buffer)
    refused(buffer, 'history_short', f'camera cross_left covers {covered} before t0',
            'needs 0.30 s')


def test_one_camera_that_starts_later_is_a_short_history(buffer):
    add_images(buffer, cameras=CAMERAS[:3])
    add_images(buffer, [-100, 0], cameras=CAMERAS[3:])
    add_poses(buffer)
    refused(buffer, 'history_short', f'camera {CAMERAS[3]} covers 0.10 s')


def test_a_hole_and_a_camera_ahead_of_time_are_out_of_tolerance(buffer):
    add_images(buffer, [-500, -400, -300, -100, 0])
    add_poses(buffer)
    refused(buffer, 'image_out_of_tolerance', 't0-0.2 s is 100.0 ms away')
    buffer.clear('test')
    add_images(buffer, [1000, 1100, 1200])
    add_poses(buffer)
    refused(buffer, 'image_out_of_tolerance', 't0-0.3 s is 1300.0 ms away')


@pytest.mark.parametrize('yaw_rate', [0.3, -0.3])
def test_short_extrapolation_keeps_the_turn(buffer, yaw_rate):
    add_images(buffer)
    add_poses(buffer, range(-1600, -10, 10), speed=20.0, yaw_rate=yaw_rate)
    seen = buffer.select(T0)
    assert np.allclose(seen.ego_pose_at_t0[:3, 3], 0.0, atol=1e-4)
    assert yaw_of(seen.ego_pose_at_t0[None])[0] == pytest.approx(0.0, abs=1e-9)


def test_late_odometry_is_a_gap(buffer):
    add_images(buffer)
    add_poses(buffer, range(-1600, -70, 10))
    refused(buffer, 'odometry_gap', '80.0 ms', 'limit 20.0 ms')


def test_hole_in_odometry_is_a_gap(buffer):
    add_images(buffer)
    add_poses(buffer, [o for o in EVERY_10_MS if not -700 < o < -550])
    refused(buffer, 'odometry_gap', '150.0 ms', 'limit 100.0 ms', '0.70 s')


def test_short_history(buffer):
    add_images(buffer)
    add_poses(buffer, range(-800, 20, 10))
    refused(buffer, 'history_short', '0.80 s', '1.50 s')


def test_missing_inputs_are_named(buffer):
    refused(buffer, 'camera_missing', 'cross_left')
    add_images(buffer, cameras=('cross_left', 'front_wide', 'front_tele'))
    refused(buffer, 'camera_missing', 'cross_right')
    add_images(buffer, cameras=('cross_right',))
    refused(buffer, 'odometry_missing', 'odometry')
    add_poses(buffer)
    assert isinstance(buffer.select(T0), Observation)


def test_frame_out_of_tolerance(buffer):
    add_images(buffer, cameras=CAMERAS[1:])
    add_images(buffer, [-300, -200, -30, 0], cameras=CAMERAS[:1])
    add_poses(buffer)
    refused(buffer, 'image_out_of_tolerance', 'cross_left', 't0-0.1 s', '70.0 ms', '50.0 ms')


def test_nan_odometry_is_named_and_heals(buffer):
    add_images(buffer)
    add_poses(buffer)
    buffer.add_pose(T0 - 205 * MS, (np.nan, 0, 0), (0, 0, 0, 1), 1.0, 'map')
    refused(buffer, 'odometry_not_finite', 'position is nan', '0.20 s')
    buffer.add_pose(T0 - 204 * MS, (0, 0, 0), (0, 0, 0, 1), float('inf'), 'map')
    refused(buffer, 'odometry_not_finite', 'speed is inf', '2 such')
    buffer.add_pose(T0 - 203 * MS, (0, 0, 0), (0, 0, 0, 0), 1.0, 'map')
    refused(buffer, 'odometry_not_finite', 'norm 0')
    assert buffer.dropped['odometry_not_finite'] == 3
    later = T0 + 1400 * MS
    for camera in CAMERAS:
        for offset in (-300, -200, -100, 0):
            buffer.add_image(camera, later + offset * MS, picture())
    add_poses(buffer, range(60, 1410, 10))
    assert isinstance(buffer.select(later), Observation)


def test_changed_frame_id_is_named(buffer):
    add_images(buffer)
    add_poses(buffer, range(-1600, -700, 10), frame='map')
    add_poses(buffer, range(-700, 20, 10), frame='odom')
    refused(buffer, 'odometry_frame_changed', "'map'", "'odom'", '0.71 s')


def test_stamps_must_be_positive(buffer):
    add_images(buffer)
    buffer.add_pose(0, (0, 0, 0), (0, 0, 0, 1), 0.0, 'map')
    refused(buffer, 'stamp_invalid', 'odometry', '0 ns')
    assert buffer.select(0).reason == 'stamp_invalid'
    add_poses(buffer)
    assert isinstance(buffer.select(T0), Observation)


def test_old_t0_is_refused(buffer):
    add_images(buffer)
    add_poses(buffer)
    refused(buffer, 'input_too_old', '301.0 ms', '300.0 ms', now_ns=T0 + 301 * MS)
    assert isinstance(buffer.select(T0, now_ns=T0 + 299 * MS), Observation)


def test_unknown_camera_is_a_wiring_error(buffer):
    with pytest.raises(ConfigurationError, match='rear'):
        buffer.add_image('rear', T0, picture())


def test_clear_explains_the_next_skip(buffer):
    add_images(buffer)
    add_poses(buffer)
    buffer.clear('clock jump')
    assert buffer.newest_stamp_ns('odometry') is None
    refused(buffer, 'camera_missing', 'clock jump')


def test_each_frame_is_decoded_once_and_only_when_chosen(buffer):
    calls = []

    def source(offset):
        def decode():
            calls.append(offset)
            return picture(offset)
        return decode

    for offset in range(-500, 150, 50):
        buffer.add_image('front_wide', T0 + offset * MS, source(offset))
    add_images(buffer, range(-500, 150, 50), [c for c in CAMERAS if c != 'front_wide'])
    add_poses(buffer, range(-1600, 160, 10))
    buffer.select(T0)
    assert sorted(calls) == [-300, -200, -100, 0]
    buffer.select(T0)
    buffer.select(T0 + 100 * MS)
    assert sorted(calls) == [-300, -200, -100, 0, 100]


def test_decode_failures_are_named_and_heal(buffer):
    def broken():
        raise ValueError('bad magic bytes\nsecond line')

    add_images(buffer)
    add_poses(buffer)
    buffer.add_image('front_tele', T0 - 1 * MS, broken)
    assert isinstance(buffer.select(T0), Observation)  # not the nearest: never decoded
    refused_at = buffer.select(T0 - 1 * MS)
    assert refused_at.reason == 'image_decode_failed'
    assert refused_at.detail == 'camera front_tele: bad magic bytes'


@pytest.mark.parametrize('image', [None, np.zeros((32, 64), np.uint8),
                                   np.zeros((32, 64, 3), np.float32)])
def test_decoder_must_return_rgb_bytes(buffer, image):
    add_images(buffer, cameras=CAMERAS[1:])
    add_poses(buffer)
    for offset in (-300, -200, -100, 0):
        buffer.add_image(CAMERAS[0], T0 + offset * MS, lambda: image)
    refused(buffer, 'image_decode_failed', 'cross_left', 'uint8')


def test_other_sizes_are_averaged_down(buffer):
    big = np.random.default_rng(0).integers(0, 256, (64, 128, 3), dtype=np.uint8)
    add_images(buffer, cameras=CAMERAS[1:])
    add_poses(buffer)
    for offset in (-300, -200, -100, 0):
        buffer.add_image(CAMERAS[0], T0 + offset * MS, big)
    seen = buffer.select(T0).images[0, 0]
    assert np.array_equal(seen, cv2.resize(big, (64, 32), interpolation=cv2.INTER_AREA))
    means = big.reshape(32, 2, 64, 2, 3).mean(axis=(1, 3))
    assert np.abs(seen - means).max() <= 0.5


def test_wrong_aspect_ratio_is_named(buffer):
    add_images(buffer, cameras=CAMERAS[1:])
    add_poses(buffer)
    for offset in (-300, -200, -100, 0):
        buffer.add_image(CAMERAS[0], T0 + offset * MS, picture(height=48))
    refused(buffer, 'image_wrong_size', 'cross_left', '64x48', '64x32')


def test_duplicates_keep_the_first(buffer):
    add_images(buffer)
    add_poses(buffer)
    first = buffer.select(T0)
    buffer.add_image('front_wide', T0, picture(99))
    buffer.add_pose(T0, (50.0, 0, 0), (0, 0, 0, 1), 3.0, 'map')
    second = buffer.select(T0)
    assert np.array_equal(first.images, second.images)
    assert np.array_equal(first.ego_poses, second.ego_poses)
    assert buffer.dropped['duplicate_stamp'] == 2


def test_buffers_are_bounded_by_time(buffer):
    add_images(buffer, range(-20_000, -500, 100))
    add_poses(buffer, range(-20_000, 60, 10))
    # 0.3 s of history, 0.05 of tolerance, 0.3 of age and 0.4 of waiting before the newest
    assert len(buffer._frames['front_wide'].stamps) == 11
    assert len(buffer._poses.stamps) == 301
    for t0 in range(-500, 2100, 100):
        add_images(buffer, [t0])
        add_poses(buffer, range(t0, t0 + 100, 10))
        assert isinstance(buffer.select(T0 + t0 * MS), Observation)
    assert len(buffer._frames['front_wide'].stamps) == 21  # decoded frames are small
    assert buffer._frames.held == 0


def test_an_old_trigger_finds_its_frames_when_its_age_is_allowed(buffer):
    buffer.allow_age(1500.0)
    add_images(buffer, range(-2000, 1500, 100))
    add_poses(buffer, range(-1600, 20, 10))
    assert isinstance(buffer.select(T0), Observation)


def test_frames_beyond_the_budget_are_dropped_counted_and_named():
    size = 2**20
    buffer = ObservationBuffer(PROFILE, SelectionLimits(image_buffer_mib=8.0))
    add_poses(buffer)
    for offset in (-300, -200, -100, 0):
        for camera in CAMERAS:
            buffer.add_image(camera, T0 + offset * MS, picture, size=size)
            assert buffer._frames.held <= 8 * size
    assert buffer.dropped == {'image_buffer_full': 8}
    refused(buffer, 'image_buffer_full', 'cross_left', 'sync.image_buffer_mib')
    add_poses(buffer, range(60, 310, 10))
    for offset in (100, 200, 300):
        for camera in CAMERAS:
            buffer.add_image(camera, T0 + offset * MS, picture, size=size,
                             expected_ns=T0 + offset * MS)
    assert isinstance(buffer.select(T0 + 300 * MS), Observation)  # expected: decoded at once
    assert buffer.dropped == {'image_buffer_full': 8}


@pytest.mark.parametrize('hz, late_ms, early', [
    (10, 0, True), (10, 49, True), (10, 51, False), (30, 16, True), (30, 17, False)])
def test_an_expected_frame_is_decoded_when_it_comes(buffer, hz, late_ms, early):
    threads = []
    for step in range(10, 0, -1):
        buffer.add_image('front_wide', T0 + late_ms * MS - step * 1_000_000_000 // hz, picture())
    buffer.add_image('front_wide', T0 + late_ms * MS,
                     lambda: threads.append(current_thread().name) or picture(), expected_ns=T0)
    buffer.decoder.close()  # what has been begun is finished
    assert [name.split('_')[0] for name in threads] == ['decode'] * early


def test_one_stamp_in_the_future_heals(buffer):
    buffer.add_image('front_wide', T0 + 3600 * 1000 * MS, picture())
    buffer.add_pose(T0 + 3600 * 1000 * MS, (0, 0, 0), (0, 0, 0, 1), 0.0, 'map')
    add_images(buffer)
    add_poses(buffer)
    assert isinstance(buffer.select(T0), Observation)


@pytest.mark.parametrize('hz, half_period_ms', [
    (30, 1000 / 60), (20, 25.0), (10, 50.0), (5, 50.0)])
def test_a_frame_is_settled_when_the_next_one_will_be_farther(buffer, hz, half_period_ms):
    for offset in np.arange(-500, -40, 1000 / hz):
        buffer.add_image('front_wide', T0 + int(offset * MS), picture())
    awaited = buffer.awaited_stamps(T0)
    assert awaited['front_wide'] == pytest.approx(T0 - half_period_ms * MS, abs=1000)
    assert awaited['front_tele'] == T0 - 50 * MS  # never seen: the tolerance


def test_a_camera_that_does_not_fit_its_role_is_a_skip_until_it_does(buffer):
    add_images(buffer)
    add_poses(buffer)
    buffer.refuse_camera('front_tele', Skip('camera_info_role', 'it looks back'))
    assert buffer.select(T0) == Skip('camera_info_role', 'it looks back')
    buffer.refuse_camera('front_tele', None)
    assert isinstance(buffer.select(T0), Observation)


def test_limits_are_checked():
    with pytest.raises(ConfigurationError, match='image_tolerance_ms'):
        SelectionLimits(image_tolerance_ms=-1.0)


@st.composite
def streams(draw, low_hz, high_hz, span_ms):
    """Offsets in ns around T0 with jitter, drops, duplicates and disorder."""
    rate = draw(st.floats(low_hz, high_hz))
    seed = draw(st.integers(0, 2 ** 31))
    rng = np.random.default_rng(seed)
    period = 1e3 / rate
    times = np.arange(-span_ms, 60, period) + draw(st.floats(0, 1)) * period
    times = times + rng.uniform(-0.4, 0.4, len(times)) * period
    times = times[rng.random(len(times)) > draw(st.sampled_from([0.0, 0.05, 0.3]))]
    offsets = (times * MS).astype(np.int64)
    if len(offsets) > 2 and draw(st.booleans()):
        offsets = np.concatenate([offsets, offsets[:3]])
        swap = rng.integers(0, len(offsets) - 1)
        offsets[[swap, swap + 1]] = offsets[[swap + 1, swap]]
    return offsets.tolist()


@given(st.lists(streams(5, 60, 700), min_size=4, max_size=4), streams(10, 200, 1700))
@settings(max_examples=60, deadline=None)
def test_selection_against_brute_force(images, odometry):
    buffer = ObservationBuffer(PROFILE)
    for camera, offsets in zip(CAMERAS, images):
        for offset in offsets:
            buffer.add_image(camera, T0 + offset, picture(abs(offset) // 1000))
    for offset in odometry:
        position, rotation = pose_at(offset / MS, speed=8.0, yaw_rate=0.2)
        buffer.add_pose(T0 + offset, position, rotation, 8.0, 'map')
    seen = buffer.select(T0)
    targets = np.arange(-3, 1) * 100 * MS
    errors = [[min((abs(o - t) for o in offsets), default=10 ** 18) for t in targets]
              for offsets in images]
    if isinstance(seen, Skip):
        stamps = np.unique(odometry)
        inside = stamps[max(np.searchsorted(stamps, -1500 * MS, 'right') - 1, 0):]
        inside = inside[:np.searchsorted(inside, 0) + 1]
        assert (max(map(max, errors)) > 50 * MS or len(stamps) == 0 or stamps[0] > -1500 * MS
                or stamps[-1] < -20 * MS or np.diff(inside).max() > 100 * MS), seen
        return
    chosen = seen.image_stamps_ns - T0
    assert np.array_equal(np.abs(chosen - targets), np.array(errors))
    for c in range(4):
        for k in range(4):
            assert seen.images[c, k, 0, 0, 0] == abs(int(chosen[c, k])) // 1000 % 256
    assert np.isfinite(seen.ego_poses).all()
    assert np.isfinite(seen.ego_pose_at_t0).all()
    # chords of a 40 m radius arc, at most 100 ms long, stay within 2 cm of it
    expected = np.array([pose_at(100 * k, speed=8.0, yaw_rate=0.2)[0] for k in range(-15, 1)])
    local = seen.ego_poses[:, :3, 3]
    at_t0 = seen.ego_pose_at_t0
    world = local @ at_t0[:3, :3].T + at_t0[:3, 3]
    assert np.abs(world - expected).max() < 0.02


def test_prepared_frames_are_decoded_once_and_faults_wait_for_the_selection(buffer):
    calls = []

    def decode():
        calls.append(1)
        return picture()
    for camera in CAMERAS:
        for offset in (-300, -200, -100, 0):
            buffer.add_image(camera, T0 + offset * MS, decode)
    buffer.prepare(T0)  # without any odometry
    assert len(calls) == 16
    add_poses(buffer)
    assert isinstance(buffer.select(T0), Observation) and len(calls) == 16
    buffer.add_image(CAMERAS[0], T0 + 100 * MS, lambda: 1 / 0)
    buffer.prepare(T0 + 100 * MS)
    buffer.prepare(T0 + 5000 * MS)
    assert isinstance(buffer.select(T0), Observation) and len(calls) == 16
