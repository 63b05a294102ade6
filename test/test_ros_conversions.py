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
import math

from builtin_interfaces.msg import Time
from hypothesis import given
from hypothesis import strategies as st
from nav_msgs.msg import Path
from node_rig import plan_at, T0, turned
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import CompressedImage, Image, PointCloud2
from trajectory_msgs.msg import MultiDOFJointTrajectory

from rspec_planner.errors import InputError
from rspec_planner.planner.history import rotation_matrices
from rspec_planner.planner.images import decode_message
from rspec_planner.ros_conversions import (
    camera_info_message,
    candidate_cloud,
    compressed_image_message,
    image_message,
    ns_to_duration,
    ns_to_stamp,
    odometry_message,
    odometry_sample,
    plan_path,
    plan_trajectory,
    quaternions_of,
    stamp_to_ns,
    transform_message,
)
from rspec_planner.wire import path_bytes, trajectory_bytes

QUATERNIONS = st.tuples(*[st.floats(-1, 1)] * 4).filter(
    lambda q: sum(c * c for c in q) > 1e-3)


def picture(height=6, width=8):
    return np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)


@given(st.integers(0, 2**31 * 10**9 - 1))
def test_stamps_survive_both_ways(stamp_ns):
    stamp = ns_to_stamp(stamp_ns)
    assert 0 <= stamp.nanosec < 10**9
    assert stamp_to_ns(stamp) == stamp_ns


def test_time_from_start_is_integer():
    # 43 * 0.1 s as a float ends 1 ns short
    assert stamp_to_ns(ns_to_duration(43 * 100_000_000)) == 4_300_000_000
    assert ns_to_stamp(T0) == Time(sec=1_700_000_000, nanosec=123_456_789)


@pytest.mark.parametrize('encoding, pixels', [
    ('rgb8', lambda rgb: rgb),
    ('bgr8', lambda rgb: rgb[..., ::-1]),
    ('rgba8', lambda rgb: np.dstack([rgb, np.full(rgb.shape[:2], 7, np.uint8)])),
    ('bgra8', lambda rgb: np.dstack([rgb[..., ::-1], np.full(rgb.shape[:2], 7, np.uint8)])),
])
@pytest.mark.parametrize('padding', [0, 5])
def test_raw_images_become_rgb(encoding, pixels, padding):
    rgb = picture()
    rows = np.ascontiguousarray(pixels(rgb)).reshape(rgb.shape[0], -1)
    rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=99)
    message = Image(height=rgb.shape[0], width=rgb.shape[1], encoding=encoding,
                    step=rows.shape[1], data=rows.tobytes())
    assert_array_equal(decode_message(message), rgb)


def test_mono_image_becomes_grey_rgb():
    grey = picture()[..., 0]
    message = Image(height=6, width=8, encoding='mono8', step=8, data=grey.tobytes())
    assert_array_equal(decode_message(message), np.dstack([grey] * 3))


@pytest.mark.parametrize('changes, part', [
    ({'encoding': '32FC1'}, "'32FC1'"), ({'encoding': 'RGB8'}, "'RGB8'"),
    ({'step': 10}, 'step 10'), ({'height': 0}, 'size 8x0'), ({'width': 0}, 'size 0x6'),
    ({'data': b'123'}, '3 bytes'), ({'data': bytes(145)}, '145 bytes'),
])
def test_unreadable_image_names_the_field(changes, part):
    message = image_message(picture(), T0, 'front_wide')
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(InputError, match=part):
        decode_message(message)


@pytest.mark.parametrize('encoding', ['rgb8', 'bgr8'])
def test_image_message_round_trip_through_the_wire(encoding):
    rgb = picture()
    message = image_message(rgb, T0, 'front_wide', encoding)
    again = deserialize_message(serialize_message(message), Image)
    assert (again.encoding, again.step, again.header.frame_id) == (encoding, 24, 'front_wide')
    assert stamp_to_ns(again.header.stamp) == T0
    assert_array_equal(decode_message(again), rgb)


def test_mono_message_and_unknown_encoding():
    assert image_message(picture(), T0, 'x', 'mono8').step == 8
    with pytest.raises(InputError, match="'yuv9'"):
        image_message(picture(), T0, 'x', 'yuv9')


@pytest.mark.parametrize('lie', ['png', 'jpeg', '', 'bgr8; jpeg compressed bgr8'])
@pytest.mark.parametrize('kind', ['jpeg', 'png'])
def test_compressed_image_is_read_by_its_first_bytes(kind, lie):
    rgb = np.full((32, 48, 3), (200, 100, 20), np.uint8)
    message = compressed_image_message(rgb, T0, 'front_wide', kind)
    message.format = lie
    again = deserialize_message(serialize_message(message), CompressedImage)
    assert np.abs(decode_message(again).astype(int) - rgb).max() <= (0 if kind == 'png' else 4)


def test_other_compression_is_refused_by_name():
    with pytest.raises(InputError, match="'webp'"):
        compressed_image_message(picture(), T0, 'x', 'webp')
    with pytest.raises(InputError, match='neither JPEG nor PNG'):
        decode_message(CompressedImage(format='jpeg', data=b'RIFF0000WEBP'))


@given(QUATERNIONS)
def test_quaternions_of_any_rotation(quaternion):
    rotation = rotation_matrices(np.array([quaternion]))
    found = quaternions_of(rotation)
    assert_allclose(np.linalg.norm(found), 1.0, atol=1e-12)
    assert found[0, 3] >= 0
    assert_allclose(rotation_matrices(found), rotation, atol=1e-9)


def test_odometry_round_trip():
    message = odometry_message(T0, turned(0.5), 7.5, 0.1)
    sample = odometry_sample(message)
    assert (sample.stamp_ns, sample.speed_mps) == (T0, 7.5)
    assert (sample.frame_id, sample.child_frame_id) == ('map', 'base_link')
    assert_allclose(sample.position, [100.0, -20.0, 1.0])
    assert_allclose(sample.quaternion_xyzw, [0, 0, math.sin(0.25), math.cos(0.25)], atol=1e-12)
    assert message.twist.twist.angular.z == 0.1


def test_path_has_65_poses_in_the_odometry_frame_stamped_from_t0():
    path = plan_path(plan_at(turned(math.pi / 2)), 'odometry')
    assert len(path.poses) == 65
    assert path.header.frame_id == 'map'
    assert stamp_to_ns(path.header.stamp) == T0
    stamps = [stamp_to_ns(pose.header.stamp) - T0 for pose in path.poses]
    assert stamps == [i * 100_000_000 for i in range(65)]
    last = path.poses[-1].pose
    # 6.4 s straight ahead at 4 m/s, while ahead is +y of the map
    assert_allclose([last.position.x, last.position.y, last.position.z],
                    [100.0, -20.0 + 25.6, 1.0], atol=1e-9)
    assert_allclose([last.orientation.z, last.orientation.w], [math.sqrt(0.5)] * 2, atol=1e-9)


def test_path_in_base_link_is_the_plan_itself():
    path = plan_path(plan_at(turned(1.0)), 'base_link')
    assert path.header.frame_id == 'base_link'
    assert_allclose([path.poses[64].pose.position.x, path.poses[64].pose.position.y], [25.6, 0.0])


def test_trajectory_carries_speed_heading_rate_and_integer_time():
    message = deserialize_message(serialize_message(plan_trajectory(
        plan_at(turned(0.0)), 'odometry')), MultiDOFJointTrajectory)
    assert len(message.points) == 65
    assert message.joint_names == ['base_link']
    assert stamp_to_ns(message.header.stamp) == T0
    times = [stamp_to_ns(point.time_from_start) for point in message.points]
    assert times == [i * 100_000_000 for i in range(65)]
    first = message.points[0]
    assert_allclose([first.transforms[0].translation.x, first.transforms[0].translation.y],
                    [100.0, -20.0])
    assert first.velocities[0].linear.x == 4.0
    assert first.velocities[0].angular.z == pytest.approx(0.04)
    assert first.accelerations[0].linear.x == 0.0


@pytest.mark.parametrize('frame_id', ['m', 'map', 'odom', 'world', 'ego/odom', 'k\u00e4rt', ''])
@pytest.mark.parametrize('make, written, kind', [
    (plan_path, path_bytes, Path), (plan_trajectory, trajectory_bytes, MultiDOFJointTrajectory)])
def test_bytes_of_a_plan_are_those_of_its_message(make, written, kind, frame_id):
    plan = replace(plan_at(turned(1.0)), t0_ns=T0 + 1, odometry_frame=frame_id,
                   accelerations=np.linspace(-1.0, 2.0, 65))
    short = replace(plan, poses=plan.poses[:1], speeds=plan.speeds[:1],
                    accelerations=plan.accelerations[:1], curvatures=plan.curvatures[:1])
    for item in (plan, short):
        for frame in ('odometry', 'base_link'):
            message = make(item, frame)
            serialized, data = serialize_message(message), written(item, frame)
            assert len(data) == len(serialized) and data[:4] == serialized[:4]
            assert deserialize_message(data, kind) == message  # padding may hold anything


def test_camera_info_and_transform():
    matrix = np.array([[200.0, 0.0, 32.0], [0.0, 210.0, 16.0], [0.0, 0.0, 1.0]])
    info = camera_info_message(matrix, 64, 32, T0, 'front_wide')
    assert_allclose(np.reshape(info.k, (3, 3)), matrix)
    assert_allclose(np.reshape(info.p, (3, 4))[:, :3], matrix)
    assert (info.width, info.height, list(info.d)) == (64, 32, [0.0] * 5)
    made = transform_message(T0, turned(0.3), 'map', 'base_link')
    assert (made.header.frame_id, made.child_frame_id) == ('map', 'base_link')
    assert made.transform.translation.x == 100.0
    assert made.transform.rotation.z == pytest.approx(math.sin(0.15))


def test_cloud_holds_every_point_of_every_candidate():
    plan = plan_at(turned(math.pi / 2))
    cloud = deserialize_message(serialize_message(candidate_cloud(plan, 'odometry')), PointCloud2)
    assert stamp_to_ns(cloud.header.stamp) == T0
    assert (cloud.header.frame_id, cloud.height, cloud.width) == ('map', 1, 2 * 65)
    assert [field.name for field in cloud.fields] == ['x', 'y', 'z', 'speed', 'time', 'candidate']
    assert [field.offset for field in cloud.fields] == [0, 4, 8, 12, 16, 20]
    assert cloud.point_step == 24 and cloud.row_step == len(cloud.data) == 24 * 130
    rows = np.frombuffer(cloud.data, np.float32).reshape(2, 65, 6)
    times = np.arange(65) * 0.1
    # the first candidate is 0.1 m left of the plan, which is -x of the map
    assert_allclose(rows[0, :, 0], 100.0 - 0.1, atol=1e-5)
    assert_allclose(rows[1, :, 0], 100.0, atol=1e-5)
    assert_allclose(rows[:, :, 1], np.stack([-20.0 + 4.0 * times] * 2), atol=1e-5)
    assert_allclose(rows[:, :, 2], 1.0)
    assert_allclose(rows[:, :, 3], 4.0)
    assert_allclose(rows[:, :, 4], np.stack([times] * 2), atol=1e-6)
    assert_allclose(rows[:, :, 5], [[0.0] * 65, [1.0] * 65])


def test_cloud_is_what_sensor_msgs_py_reads():
    point_cloud2 = pytest.importorskip(
        'sensor_msgs_py.point_cloud2', reason='sensor_msgs_py is not installed (no wheel)')
    cloud = candidate_cloud(plan_at(turned(0.0)), 'base_link')
    x, y = (point_cloud2.read_points(cloud, [name])[name] for name in ('x', 'y'))
    assert_allclose([x[64], y[64]], [25.6, 0.1], atol=1e-5)
