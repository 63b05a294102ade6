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
"""Inputs of the node over DDS: encodings, roles, calibrations, rates, and where plans end up."""

from __future__ import annotations

from dataclasses import replace
import math
import threading
import time

from nav_msgs.msg import Odometry
from node_rig import CAMERAS, FakePlanner, running, values_of, wait_until
import numpy as np
from numpy.testing import assert_array_equal
import pytest
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, CompressedImage, Image, PointCloud2
from test_images import mosaic
from test_node import now, SECOND

from rspec_planner import subscriptions
from rspec_planner.planner.camera_roles import ROLES
from rspec_planner.planner.images import decode_message, ENCODINGS
from rspec_planner.ros_conversions import (
    camera_info_message,
    image_message,
    make_header,
    ns_to_stamp,
    odometry_message,
    stamp_to_ns,
)

pytestmark = [pytest.mark.ros, pytest.mark.usefixtures('ros')]
ROOT = '/planning/rspec_planner'
MS = 1_000_000
ANCHOR_LAST = sorted(CAMERAS.names, key=lambda name: name == CAMERAS.anchor)


def yuv_of(colour):
    """Return luma and colour differences of BT.601 with video range, closed form."""
    red, green, blue = (c / 255 for c in colour)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    return (16 + 219 * luma, 128 + 224 * (blue - luma) / 1.772,
            128 + 224 * (red - luma) / 1.402)


def encoded(encoding, colour, stamp_ns, height=33, width=66, padding=6):
    """Return an Image of one colour with an odd height and padded rows."""
    rgb = np.full((height, width, 3), colour, np.uint8)
    y, u, v = np.rint(yuv_of(colour))
    alpha = np.full((height, width, 1), 7, np.uint8)
    pairs, planes = np.ones((height, width // 2, 4)), np.ones((-(-height // 2), width // 2, 2))
    rows = {
        'rgb8': rgb, 'bgr8': rgb[..., ::-1], 'rgba8': np.dstack([rgb, alpha]),
        'bgra8': np.dstack([rgb[..., ::-1], alpha]), 'mono8': rgb[..., 0],
        'uyvy': pairs * [u, y, v, y], 'yuv422': pairs * [u, y, v, y],
        'yuyv': pairs * [y, u, y, v], 'yuv422_yuy2': pairs * [y, u, y, v],
        'nv12': np.vstack([np.full((height, width), y), (planes * [u, v]).reshape(-1, width)]),
        'nv21': np.vstack([np.full((height, width), y), (planes * [v, u]).reshape(-1, width)]),
        **{f'bayer_{p}8': mosaic(rgb, p) for p in ('rggb', 'bggr', 'gbrg', 'grbg')}}[encoding]
    rows = rows.reshape(len(rows), -1).astype(np.uint8)
    data = np.pad(rows, ((0, 0), (0, padding)), constant_values=255)
    return Image(header=make_header(stamp_ns, ''), height=height, width=width,
                 encoding=encoding, step=data.shape[1], data=data.tobytes())


def heard(rig, stream, count):
    """Wait until a stream has delivered so many messages; bursts would overflow its queue."""
    wait_until(lambda: next(state.received for state in rig.node._watch.states()
                            if state.name == stream) >= count, f'{count} messages of {stream}')


def test_every_encoding_arrives_as_the_same_colour():
    with running() as rig:
        for index, encoding in enumerate(ENCODINGS):
            colour = (200 - 8 * index, 60 + 8 * index, 40 + 4 * index)
            time.sleep(0.12)  # a quick machine would otherwise ask for more than 10 plans a second
            t0 = now()
            rig.drive(t0, cameras=())
            for step in (3, 2, 1, 0):
                for name in ANCHOR_LAST:
                    rig.publisher(Image, f'/sensing/camera/{name}/image_raw').publish(
                        encoded(encoding, colour, t0 - step * 100 * MS))
                for stream in range(4):
                    heard(rig, f'image{stream}', 4 * index + 4 - step)
            rig.path_at(t0)
            seen = rig.planner.observations[-1].images[:, -1]
            assert seen.shape == (4, CAMERAS.height, CAMERAS.width, 3)
            expected = (colour[0],) * 3 if encoding == 'mono8' else colour
            assert np.abs(seen.astype(int) - expected).max() <= 4, encoding


def test_only_frames_of_a_plan_are_decoded_and_never_on_the_executor(monkeypatch):
    decoded = []

    def watched(message, at_least):
        decoded.append((stamp_to_ns(message.header.stamp), threading.current_thread().name))
        return decode_message(message, at_least)
    monkeypatch.setattr(subscriptions, 'decode_message', watched)
    with running() as rig:
        t0 = now()
        rig.drive(t0, cameras=())
        rig.image(CAMERAS.anchor, t0 - 300 * MS)
        rig.image(CAMERAS.anchor, t0 - 200 * MS)
        rig.image(CAMERAS.anchor, t0 - 100 * MS)
        for offset in range(-500, 1, 20):  # 50 Hz
            for name in ANCHOR_LAST[:3]:
                rig.image(name, t0 + offset * MS)
            heard(rig, 'image3', (offset + 520) // 20)
        rig.image(CAMERAS.anchor, t0)
        wait_until(lambda: rig.received['path'], 'a plan')
        first = rig.planner.observations[-1]
        assert sorted({stamp for stamp, _ in decoded}) == sorted(set(
            first.image_stamps_ns.ravel().tolist()))
        assert len(decoded) == 16
        assert {name.split('_')[0] for _, name in decoded} == {'decode'}


@pytest.mark.parametrize('ids', [[1], [1, 6], [0, 1, 2, 3, 5, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_one_to_seven_cameras_by_role(ids):
    names = tuple(ROLES[index].name for index in ids)
    planner = FakePlanner()
    planner.profile = replace(planner.profile, cameras=replace(
        CAMERAS, names=names, ids=tuple(ids)))
    with running(f'cameras.ids:={ids}', f'cameras.transport:={["raw"] * len(ids)}',
                 load=lambda parameters: planner) as rig:
        t0 = now()
        rig.drive(t0, cameras=())
        for step in (3, 2, 1, 0):
            for name in sorted(names, key=lambda name: name == 'front_wide'):
                colour = (30 * (names.index(name) + 1),) * 3
                rig.publisher(Image, f'/sensing/camera/{name}/image_raw').publish(
                    encoded('rgb8', colour, t0 - step * 100 * MS))
        rig.path_at(t0)
        seen = planner.observations[-1]
        assert seen.camera_names == names
        assert_array_equal(seen.images[:, -1, 0, 0, 0], 30 * np.arange(1, len(ids) + 1))


def test_cameras_of_another_checkpoint_are_refused(capfd):
    rig = None
    with pytest.raises(AssertionError):
        with running('cameras.ids:=[0, 1]', 'cameras.transport:=[raw, raw]') as rig:
            pass
    assert rig is None
    assert "'cameras.ids' [0, 1] does not fit the checkpoint" in capfd.readouterr().err


def test_a_nearer_frame_that_comes_late_is_awaited():
    with running('sync.image_wait_ms:=200.0') as rig:
        t0 = now()
        rig.drive(t0, cameras=())
        others = [name for name in ANCHOR_LAST if name != 'cross_left']
        for offset in np.arange(-325, 0, 100 / 3):  # 30 Hz, out of step with the anchor
            rig.image('cross_left', t0 + int(offset * MS))
        for step in (3, 2, 1, 0):
            for name in others:
                rig.image(name, t0 - step * 100 * MS)
        wait_until(lambda: rig.node._watch.states()[1].newest_ns == t0, 'the trigger')
        time.sleep(0.02)
        late = t0 - 325 * MS + 10 * 100_000_000 // 3
        rig.image('cross_left', late)
        rig.path_at(t0)
        assert rig.planner.observations[-1].image_stamps_ns[0, -1] == late


def test_cameras_of_30_and_10_hz_are_planned_together():
    start = 2000 * SECOND
    streams = {'front_wide': (30, 0), 'cross_left': (30, 9), 'cross_right': (10, 0),
               'front_tele': (10, 21)}  # Hz, phase in ms
    sent = {name: [start + phase * MS + k * SECOND // hz for k in range(16 * hz // 10)]
            for name, (hz, phase) in streams.items()}
    # the anchor takes 30 ms longer, so that what belongs to its frames is there already
    order = sorted((stamp + 30 * MS * (name == CAMERAS.anchor), stamp, name)
                   for name in sent for stamp in sent[name])
    places = {name: f'image{CAMERAS.names.index(name)}' for name in CAMERAS.names}
    # a clock that stands still: nothing grows too old on a slow machine
    with running('use_sim_time:=true') as rig:
        rig.publisher(Clock, '/clock').publish(Clock(clock=ns_to_stamp(start + 2 * SECOND)))
        wait_until(lambda: rig.node._now_ns() == start + 2 * SECOND, 'the clock')
        for offset in range(-2000, 1650, 50):
            rig.odometry(start + offset * MS)
            if offset % 500 == 0:
                rig.settle()
        rig.settle()
        counts = dict.fromkeys(CAMERAS.names, 0)
        for _, stamp, name in order:
            rig.image(name, stamp)
            counts[name] += 1
            heard(rig, places[name], counts[name])
        last = start + 15 * SECOND // 10
        rig.path_at(last)
        seen = [o for o in rig.planner.observations if o.t0_ns >= start]
        limited = rig.node._made.statistics.rate_limited
    assert limited == 30 + 2  # two of three frames of the anchor
    assert len(seen) >= 4 and {(o.t0_ns - start) % (SECOND // 10) for o in seen} == {0}
    for observation in seen:
        wanted = observation.t0_ns - np.arange(3, -1, -1) * SECOND // 10
        for name, chosen in zip(CAMERAS.names, observation.image_stamps_ns):
            stamps = np.array(sent[name])
            before = stamps[stamps <= observation.t0_ns + 50 * MS]
            nearest = [np.abs(before - w).min() for w in wanted]
            assert np.abs(chosen - wanted).tolist() == nearest, name


def test_frames_beyond_the_budget_are_counted_and_named():
    with running('sync.image_buffer_mib:=1.0') as rig:
        t0 = now()
        rig.drive(t0, cameras=())
        large = np.full((512, 1024, 3), 90, np.uint8)  # 1.5 MiB
        for step in (3, 2, 1, 0):
            for name in ANCHOR_LAST:
                rig.publisher(Image, f'/sensing/camera/{name}/image_raw').publish(
                    image_message(large, t0 - step * 100 * MS, name))
            for stream in range(4):
                heard(rig, f'image{stream}', 4 - step)
        status = rig.status('inputs', lambda s: values_of(s)['skip_reason'] == 'image_buffer_full',
                            'the skip')
        assert 'see sync.image_buffer_mib' in status.message
        assert int(values_of(status)['messages_image_buffer_full']) >= 1
        assert rig.received['path'] == []


def calibrate(rig, name, fov_deg, frame_id='', width=1920, height=960):
    focal = width / 2 / math.tan(math.radians(fov_deg) / 2)
    matrix = np.array([[focal, 0, width / 2 - 0.5], [0, focal, height / 2 - 0.5], [0, 0, 1]])
    rig.publisher(CameraInfo, f'/sensing/camera/{name}/camera_info').publish(
        camera_info_message(matrix, width, height, now(), frame_id))


def test_an_unfit_camera_is_named_counted_and_planned_with():
    with running() as rig:
        for name, fov_deg in zip(CAMERAS.names, (120.0, 120.0, 120.0, 30.0)):
            calibrate(rig, name, fov_deg, f'{name}_optical')
        calibrate(rig, 'front_wide', 30.0)
        calibrate(rig, 'cross_left', 120.0, 'cross_right_optical')
        status = rig.status('inputs', lambda s: values_of(s).get(
            'messages_camera_info_role') == '2', 'the complaints')
        assert "camera 'front_wide': it sees 30.0 deg, which fits 'front_tele'" in status.message
        assert "its frame_id 'cross_right_optical' is that of 'cross_right'" in status.message
        rig.path_at(rig.drive(now()))
        calibrate(rig, 'front_wide', 119.0)
        calibrate(rig, 'cross_left', 121.0)
        rig.status('inputs', lambda s: 'camera_info' not in s.message, 'healing')


def test_an_unfit_camera_can_stop_planning_until_it_fits():
    with running('cameras.info_check:=refuse') as rig:
        calibrate(rig, 'front_tele', 75.0)
        wait_until(lambda: rig.node._made.inputs.counts.get('camera_info_field_of_view'),
                   'the complaint')
        rig.drive(now() - SECOND)
        status = rig.status('inputs', lambda s: values_of(s)['skip_reason']
                            == 'camera_info_field_of_view', 'the skip')
        assert "'front_tele' sees 75.0 deg, its role 30 deg within 15" in status.message
        assert values_of(status)['skipped_camera_info_field_of_view'] == '1'
        assert rig.received['path'] == []
        calibrate(rig, 'front_tele', 31.0)
        wait_until(lambda: not rig.node._made.inputs.calibration.faults, 'healing')
        rig.path_at(rig.drive(now()))


def test_dropped_messages_are_counted_by_reason():
    with running() as rig:
        t0 = rig.drive(now())
        rig.path_at(t0)
        for _ in range(2):
            rig.odometry(t0)
        rig.odometry(t0 + MS, x=float('nan'))
        rig.image('cross_left', 0)
        status = rig.status('inputs', lambda s: values_of(s).get(
            'messages_stamp_invalid') == '1', 'the counts')
        assert values_of(status)['messages_duplicate_stamp'] == '2'
        assert values_of(status)['messages_odometry_not_finite'] == '1'


def test_two_publishers_on_one_camera_are_named():
    with running() as rig:
        topic = '/sensing/camera/cross_left/image_raw'
        rig.publisher(Image, topic)
        second = rig.peer.create_publisher(Image, topic, 1)
        status = rig.status('inputs', lambda s: '2 publishers' in s.message, 'the complaint')
        assert f'2 publishers on {topic} alternate; stop all but one' in status.message
        rig.peer.destroy_publisher(second)


def test_a_camera_that_restarts_with_another_resolution_goes_on():
    with running() as rig:
        t0 = now()
        rig.drive(t0, cameras=())
        for step, (height, width) in zip((3, 2, 1, 0), ((32, 64), (32, 64), (96, 192), (64, 128))):
            for name in ANCHOR_LAST:
                rig.publisher(Image, f'/sensing/camera/{name}/image_raw').publish(encoded(
                    'rgb8', (9, 90, 200), t0 - step * 100 * MS, height, width))
        rig.path_at(t0)
        assert (rig.planner.observations[-1].images == (9, 90, 200)).all()


def test_overlay_and_cloud_while_somebody_looks():
    with running() as rig:
        clouds = rig.subscribe(PointCloud2, f'{ROOT}/debug/candidates')
        pictures = []
        rig.peer.create_subscription(
            CompressedImage, f'{ROOT}/debug/image_overlay/compressed', pictures.append,
            rig.input_qos)
        made = rig.node._made.outputs
        wait_until(lambda: made._cloud.get_subscription_count()
                   and made._overlay._publisher.get_subscription_count(), 'the match')
        t0 = rig.drive(now())
        cloud = wait_until(lambda: clouds, 'a cloud')[0]
        picture = wait_until(lambda: pictures, 'a picture')[0]
        assert {stamp_to_ns(m.header.stamp) for m in (cloud, picture)} == {t0}
        assert (cloud.header.frame_id, cloud.width) == ('map', 130)
        image = decode_message(picture)
        assert image.shape[1] == 960 and image.shape[0] > 480
        assert np.ptp(image[:480].astype(int), axis=(0, 1)).min() > 50  # the band on plain grey


def circle(stamp_ns, speed, curvature=0.01):
    """Return the exact pose (4, 4) of a drive along a circle, at a stamp."""
    angle = speed * curvature * (stamp_ns % 10**15) / 1e9
    cosine, sine = math.cos(angle), math.sin(angle)
    return np.array([[cosine, -sine, 0, sine / curvature], [sine, cosine, 0,
                     (1 - cosine) / curvature], [0, 0, 1, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize('hz', [10, 20, 50, 100, 200])
def test_plans_start_where_the_vehicle_was_at_t0_however_slow_the_planner(hz):
    speed, period_ns = 15.0, SECOND // hz
    random = np.random.default_rng(hz)
    with running() as rig:
        rig.planner.before = lambda observation: time.sleep(0.6)
        publisher = rig.publisher(Odometry, '/localization/kinematic_state')
        t0 = now()
        stamps = np.arange(t0 - 2 * SECOND, t0 + SECOND // 5, period_ns)
        stamps += random.integers(-period_ns // 5, period_ns // 5, len(stamps))
        doubled = np.concatenate([stamps, stamps[::7]]).tolist()  # duplicates, out of order
        for sent, stamp in enumerate(doubled):
            publisher.publish(odometry_message(stamp, circle(stamp, speed), speed))
            heard(rig, 'odometry', sent - 20)
        heard(rig, 'odometry', len(doubled))
        rig.drive(t0, odometry=False)
        path = rig.path_at(t0)
        latency = (now() - t0) / 1e9
        assert latency > 0.6
        expected = circle(t0, speed) @ np.array([1.5 * np.arange(65), np.zeros(65), np.zeros(65),
                                                 np.ones(65)])
        found = np.array([[p.pose.position.x, p.pose.position.y] for p in path.poses])
        assert np.abs(found[0] - expected[:2, 0]).max() < 0.01
        assert np.abs(found - expected[:2].T).max() < 0.01  # 96 m ahead, so the heading too
