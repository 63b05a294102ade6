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
import math

from drives import RIG, StraightDrive
import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.planner.images import decode_compressed, decode_image
from rspec_planner.world.bag import BagReader
from rspec_planner.world.messages import quaternion_of
from rspec_planner.world.record import (
    image_topic,
    ODOMETRY_TOPIC,
    REASONING_TOPIC,
    record_world,
    RecordOptions,
)
from rspec_planner.world.rig import Rig

START = RecordOptions().start_ns


def record(path, seconds=1.0, drive=None, **options):
    storage = {k: options.pop(k) for k in ('storage', 'overwrite') if k in options}
    return record_world(path, drive or StraightDrive(), seconds, RecordOptions(**options),
                        rig=RIG, **storage)


def read(path):
    messages = {}
    with BagReader(path) as bag:
        for item in bag.read():
            messages.setdefault(item.topic, []).append(item)
    return messages


def stamp(item):
    header = item.content.header
    return header.stamp.sec * 10**9 + header.stamp.nanosec


def test_summary_counts_what_the_bag_holds(tmp_path):
    result = record(tmp_path / 'a.mcap')
    got = read(tmp_path / 'a.mcap')
    assert result.messages == sum(map(len, got.values()))
    assert result.scenarios == ('lead_brake', 'red_light')
    assert result.bag == tmp_path / 'a.mcap'


@pytest.mark.parametrize('encoding', ['raw', 'png', 'jpeg'])
def test_pictures_survive_in_every_encoding(tmp_path, encoding):
    record(tmp_path / 'a.mcap', encoding=encoding)
    got = read(tmp_path / 'a.mcap')
    for camera, name in enumerate(RIG.names):
        topic = image_topic(name) + ('' if encoding == 'raw' else '/compressed')
        assert len(got[topic]) == 10
        for index, item in enumerate(got[topic]):
            image = item.content
            assert stamp(item) == item.log_ns == START + index * 10**8
            assert image.header.frame_id == f'{name}_optical'
            rgb = decode_compressed(image.data) if encoding != 'raw' else decode_image(
                image.encoding, image.height, image.width, image.step, image.data)
            off = np.abs(rgb.astype(int) - (index, camera * 50, 200)).max()
            assert off <= (4 if encoding == 'jpeg' else 0)


def test_odometry_lies_on_the_exact_path_at_its_rate(tmp_path):
    record(tmp_path / 'a.db3', odometry_hz=50.0)
    items = read(tmp_path / 'a.db3')[ODOMETRY_TOPIC]
    assert [stamp(i) - START for i in items] == [k * 20_000_000 for k in range(46)]
    for item in items:
        t = (stamp(item) - START) * 1e-9
        pose, twist = item.content.pose.pose, item.content.twist.twist
        assert pose.position.x == pytest.approx(10 * t * math.cos(0.1), abs=1e-6)
        assert pose.position.y == pytest.approx(10 * t * math.sin(0.1), abs=1e-6)
        assert 2 * math.atan2(pose.orientation.z, pose.orientation.w) == pytest.approx(0.1)
        assert twist.linear.x == 10.0
    assert items[0].content.header.frame_id == 'map'
    assert items[0].content.child_frame_id == 'base_link'


def test_odometry_grid_survives_a_rate_that_does_not_divide_the_frame(tmp_path):
    record(tmp_path / 'a.mcap', odometry_hz=30.0)
    stamps = np.array([stamp(i) for i in read(tmp_path / 'a.mcap')[ODOMETRY_TOPIC]])
    assert np.ptp(np.diff(stamps)) == 0


def test_every_instant_with_a_frame_has_odometry_at_100_hz(tmp_path):
    record(tmp_path / 'a.mcap')
    got = read(tmp_path / 'a.mcap')
    odometry = {stamp(i) for i in got[ODOMETRY_TOPIC]}
    frames = {stamp(i) for i in got[image_topic('front_wide') + '/compressed']}
    assert frames <= odometry


def test_transforms_place_the_cameras(tmp_path):
    record(tmp_path / 'a.mcap')
    got = read(tmp_path / 'a.mcap')
    mounts = {t.child_frame_id: t for t in got['/tf_static'][0].content.transforms}
    for name in RIG.names:
        mount = mounts[f'{name}_optical']
        assert mount.header.frame_id == 'base_link'
        q = mount.transform.rotation
        x, y, z, w = q.x, q.y, q.z, q.w
        forward = [2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)]
        assert forward == pytest.approx(RIG.extrinsics[name][:3, 2], abs=1e-9)
    first = got['/tf'][0].content.transforms[0]
    assert (first.header.frame_id, first.child_frame_id) == ('map', 'base_link')


def test_camera_info_is_the_rig(tmp_path):
    record(tmp_path / 'a.mcap')
    item = read(tmp_path / 'a.mcap')['/sensing/camera/front_tele/camera_info'][0].content
    assert (item.width, item.height) == (64, 32)
    assert np.array_equal(item.k.reshape(3, 3), RIG.intrinsics['front_tele'])
    assert np.array_equal(item.p.reshape(3, 4)[:, :3], RIG.intrinsics['front_tele'])


def test_reasoning_and_clock_are_recorded_on_request(tmp_path):
    record(tmp_path / 'a.mcap', clock=True)
    got = read(tmp_path / 'a.mcap')
    assert [i.content.data for i in got[REASONING_TOPIC]] == [
        f'reason {k}' for k in (0, 1, 2, 6, 7, 8, 9)]
    assert len(got['/clock']) == len(got[ODOMETRY_TOPIC])
    record(tmp_path / 'b.mcap', reasoning=False)
    assert not {REASONING_TOPIC, '/clock'} & set(read(tmp_path / 'b.mcap'))


def test_log_times_never_go_back(tmp_path):
    record(tmp_path / 'a.mcap', seconds=2.0, jitter_ms=8.0, phase_ms={'cross_left': -15.0})
    from mcap.reader import make_reader
    with (tmp_path / 'a.mcap').open('rb') as stream:
        order = [m.log_time for _, _, m in make_reader(stream).iter_messages(
            log_time_order=False)]
    assert order == sorted(order)


def test_phase_jitter_and_drops_follow_the_seed(tmp_path):
    late = {'front_tele': 12.0}
    record(tmp_path / 'a.mcap', phase_ms=late)
    tele = read(tmp_path / 'a.mcap')[image_topic('front_tele') + '/compressed']
    assert [stamp(i) - START for i in tele] == [k * 10**8 + 12_000_000 for k in range(10)]
    noisy = {'jitter_ms': 5.0, 'drop': 0.3, 'seconds': 3.0}
    for name, seed in (('b', 1), ('c', 1), ('d', 2)):
        record(tmp_path / name / 'a.db3', seed=seed, **noisy)
    b, c, d = ((tmp_path / name / 'a.db3').read_bytes() for name in 'bcd')
    assert b == c != d
    kept = sum(len(v) for k, v in read(tmp_path / 'b/a.db3').items() if k.endswith('compressed'))
    assert 60 <= kept <= 105  # 120 frames, 30 % lost


def test_same_arguments_same_bytes(tmp_path):
    for name in ('x', 'y'):
        record(tmp_path / name / 'a.mcap')
    assert (tmp_path / 'x/a.mcap').read_bytes() == (tmp_path / 'y/a.mcap').read_bytes()


@pytest.mark.parametrize('options, names', [
    ({'encoding': 'webp'}, "'webp'"),
    ({'odometry_hz': 5.0}, '5 Hz'),
    ({'odometry_hz': math.nan}, 'nan Hz'),
    ({'drop': 1.0}, 'drop 1'),
    ({'jitter_ms': 20.0}, '60 ms'),
    ({'phase_ms': {'front_wide': 41.0}}, '41 ms'),
    ({'phase_ms': {'front_wide': 1.0, 'front_tele': math.nan}}, 'nan ms'),
    ({'jitter_ms': math.nan}, 'nan ms'),
    ({'seconds': 0.0}, 'seconds 0'),
    ({'seconds': math.nan}, 'seconds nan'),
    ({'seconds': math.inf}, 'seconds inf'),
])
def test_options_out_of_range_are_named(tmp_path, options, names):
    with pytest.raises(ConfigurationError, match=names):
        record(tmp_path / 'a.mcap', **options)
    assert list(tmp_path.iterdir()) == []


def test_quaternions_turn_like_their_matrices():
    random = np.random.default_rng(5)
    for _ in range(50):
        rotation, _ = np.linalg.qr(random.normal(size=(3, 3)))
        rotation *= np.sign(np.linalg.det(rotation))
        x, y, z, w = quaternion_of(rotation)
        back = np.array([
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]])
        assert np.allclose(back, rotation, atol=1e-12)
        assert w >= 0


@pytest.mark.parametrize('family', ['lead_brake', 'red_light'])
def test_the_real_world_records_deterministically(tmp_path, family):
    from rspec_planner.world.drive import Drive
    for name in ('x', 'y'):
        rig = Rig()
        record_world(tmp_path / name / 'a.mcap', Drive([family], 3, rig=rig), 2.0,
                     RecordOptions(), rig=rig)
    assert (tmp_path / 'x/a.mcap').read_bytes() == (tmp_path / 'y/a.mcap').read_bytes()
    got = read(tmp_path / 'x/a.mcap')
    moved = [i.content.pose.pose.position.x for i in got[ODOMETRY_TOPIC]]
    assert moved[-1] - moved[0] > 1.0
    steps = np.abs(np.diff(moved, n=2))
    assert steps.max() < 0.01  # 100 Hz odometry is smooth across the frames of the world
