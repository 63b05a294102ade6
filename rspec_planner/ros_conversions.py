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
"""
Messages to arrays and back; every conversion between ROS and the planner happens here.

Arrays are RGB, metres, radians, seconds; stamps are integer nanoseconds. Uses only the common
message packages, and tf2 messages not at all (a TransformStamped is a geometry message).
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
import sys
from typing import Any

from builtin_interfaces.msg import Duration, Time
import cv2
from geometry_msgs.msg import (
    Pose,
    PoseStamped,
    Transform,
    TransformStamped,
    Twist,
    Vector3,
)
from nav_msgs.msg import Odometry, Path
import numpy as np
from numpy.typing import NDArray
from sensor_msgs.msg import CameraInfo, CompressedImage, Image, PointCloud2, PointField
from std_msgs.msg import Header
from trajectory_msgs.msg import MultiDOFJointTrajectory, MultiDOFJointTrajectoryPoint

from rspec_planner.errors import InputError
from rspec_planner.planner.plan import Plan, STEP_NS

Floats = NDArray[np.float64]
BASE_FRAME = 'base_link'
#: of the candidates' point cloud; `time` is from t0 in seconds
CLOUD_FIELDS = ('x', 'y', 'z', 'speed', 'time', 'candidate')
_NS = 1_000_000_000


def stamp_to_ns(stamp: Any) -> int:
    """Return a Time or Duration message as integer nanoseconds."""
    return int(stamp.sec) * _NS + int(stamp.nanosec)


def ns_to_stamp(stamp_ns: int) -> Time:
    """Return integer nanoseconds as a Time message; floats would lose 1 ns at 4.3 s."""
    seconds, nanoseconds = divmod(int(stamp_ns), _NS)
    return Time(sec=seconds, nanosec=nanoseconds)


def ns_to_duration(duration_ns: int) -> Duration:
    """Return integer nanoseconds as a Duration message."""
    seconds, nanoseconds = divmod(int(duration_ns), _NS)
    return Duration(sec=seconds, nanosec=nanoseconds)


def make_header(stamp_ns: int, frame_id: str) -> Header:
    """Return a header."""
    return Header(stamp=ns_to_stamp(stamp_ns), frame_id=frame_id)


@dataclass(frozen=True)
class OdometrySample:
    """One odometry message: where the rear axle was, and how fast along its own x axis."""

    stamp_ns: int
    position: Floats  # (3,) metres, in frame_id
    quaternion_xyzw: Floats  # (4,) as received, not normalised
    speed_mps: float  # longitudinal, in child_frame_id
    frame_id: str
    child_frame_id: str


def odometry_sample(message: Odometry) -> OdometrySample:
    """Return the fields of an odometry message; values are not judged here."""
    pose = message.pose.pose
    return OdometrySample(
        stamp_ns=stamp_to_ns(message.header.stamp),
        position=np.array([pose.position.x, pose.position.y, pose.position.z]),
        quaternion_xyzw=np.array([pose.orientation.x, pose.orientation.y,
                                  pose.orientation.z, pose.orientation.w]),
        speed_mps=message.twist.twist.linear.x,
        frame_id=message.header.frame_id, child_frame_id=message.child_frame_id)


def quaternions_of(rotations: Floats) -> Floats:
    """
    Return unit quaternions (n, 4) x, y, z, w of rotation matrices (n, 3, 3), w not negative.

    Each of the four squared components is computed and the largest one divides, so that no
    rotation (not even half a turn) divides by nearly zero.
    """
    m = np.asarray(rotations, dtype=np.float64)
    xx, yy, zz = m[:, 0, 0], m[:, 1, 1], m[:, 2, 2]
    squares = np.stack([1 + xx - yy - zz, 1 - xx + yy - zz, 1 - xx - yy + zz,
                        1 + xx + yy + zz], axis=1)
    xy, xz, yz = m[:, 0, 1] + m[:, 1, 0], m[:, 0, 2] + m[:, 2, 0], m[:, 1, 2] + m[:, 2, 1]
    wx, wy, wz = m[:, 2, 1] - m[:, 1, 2], m[:, 0, 2] - m[:, 2, 0], m[:, 1, 0] - m[:, 0, 1]
    rows = np.stack([np.stack([squares[:, 0], xy, xz, wx], axis=1),
                     np.stack([xy, squares[:, 1], yz, wy], axis=1),
                     np.stack([xz, yz, squares[:, 2], wz], axis=1),
                     np.stack([wx, wy, wz, squares[:, 3]], axis=1)], axis=1)
    best = rows[np.arange(len(m)), np.argmax(squares, axis=1)]
    unit = best / np.linalg.norm(best, axis=1, keepdims=True)
    upright: Floats = np.where(unit[:, 3:] < 0, -unit, unit)
    return upright


def local_matrices(poses: Floats) -> Floats:
    """Return (n, 4, 4) homogeneous matrices of (n, 4) rows x, y, z, yaw."""
    matrices = np.tile(np.eye(4), (len(poses), 1, 1))
    cosine, sine = np.cos(poses[:, 3]), np.sin(poses[:, 3])
    matrices[:, 0, 0], matrices[:, 0, 1] = cosine, -sine
    matrices[:, 1, 0], matrices[:, 1, 1] = sine, cosine
    matrices[:, :3, 3] = poses[:, :3]
    return matrices


def published_poses(plan: Plan, poses: Floats, frame: str) -> tuple[str, Floats]:
    """
    Return frame id and (n, 4, 4) matrices of ego-frame `poses` (n, 4) in the published frame.

    `frame` is 'odometry' (moved by the ego pose at t0, never by a later one) or 'base_link'.
    """
    local = local_matrices(poses)
    if frame == BASE_FRAME:
        return BASE_FRAME, local
    return plan.odometry_frame, plan.ego_pose_at_t0[None] @ local


@dataclass(frozen=True)
class Motion:
    """How one trajectory is driven, 65 points, ego frame at t0."""

    poses: Floats  # (65, 4) x, y, z m; yaw rad
    speeds: Floats  # (65,) m/s
    accelerations: Floats  # (65,) m/s^2
    heading_rates: Floats  # (65,) rad/s, left positive


def chosen_candidate(plan: Plan) -> int:
    """Return the index of the candidate that is the plan, -1 when none is."""
    same = [i for i, poses in enumerate(plan.candidates) if np.array_equal(poses, plan.poses)]
    return same[0] if same else -1


def candidate_motion(plan: Plan, index: int | None) -> Motion:
    """
    Return the motion of a candidate, of the plan itself for None.

    The plan carries its actions. Those of another candidate are the rates of its speeds and
    headings, which the unicycle model holds constant within a step; never of its positions.
    """
    if index is None or index == chosen_candidate(plan):
        return Motion(plan.poses, plan.speeds, plan.accelerations, plan.speeds * plan.curvatures)
    poses, speeds = plan.candidates[index], plan.candidate_speeds[index]
    accelerations, heading_rates = (
        np.append(rates, rates[-1]) for rates in (
            np.diff(speeds) * _NS / STEP_NS, np.diff(np.unwrap(poses[:, 3])) * _NS / STEP_NS))
    return Motion(poses, speeds, accelerations, heading_rates)


def candidate_cloud(plan: Plan, frame: str) -> PointCloud2:
    """
    Return every point of every candidate, candidate by candidate, 65 each.

    Fields are float32, because RViz reads x, y, z as such: 50 km from the origin of the map that
    is 4 mm. Made here and not by sensor_msgs_py, which a plain installation may lack.
    """
    poses = plan.candidates.reshape(-1, 4)
    frame_id, matrices = published_poses(plan, poses, frame)
    count, points = plan.candidates.shape[:2]
    rows = np.column_stack([
        matrices[:, :3, 3], plan.candidate_speeds.reshape(-1),
        np.tile(np.arange(points) * (STEP_NS / _NS), count),
        np.repeat(np.arange(count), points)]).astype(np.float32)
    fields = [PointField(name=name, offset=4 * place, datatype=PointField.FLOAT32, count=1)
              for place, name in enumerate(CLOUD_FIELDS)]
    return PointCloud2(
        header=make_header(plan.t0_ns, frame_id), height=1, width=len(rows), fields=fields,
        is_bigendian=sys.byteorder == 'big', point_step=4 * len(fields),
        row_step=rows.nbytes, data=array.array('B', rows.tobytes()), is_dense=True)


def set_pose(pose: Pose | Transform, position: Sequence[float], turn: Sequence[float]) -> None:
    """Write position x y z and quaternion x y z w into a Pose or a Transform."""
    place, rotation = (pose.position, pose.orientation) if isinstance(pose, Pose) else \
        (pose.translation, pose.rotation)
    place.x, place.y, place.z = position
    rotation.x, rotation.y, rotation.z, rotation.w = turn


def pose_values(matrices: Floats) -> Iterator[tuple[list[float], list[float]]]:
    """Yield position x y z and quaternion x y z w of (n, 4, 4) matrices."""
    return zip(matrices[:, :3, 3].tolist(), quaternions_of(matrices[:, :3, :3]).tolist())


def pose_message(matrix: Floats) -> Pose:
    """Return a Pose of a matrix (4, 4)."""
    pose = Pose()
    set_pose(pose, *next(pose_values(np.asarray(matrix, dtype=np.float64)[None])))
    return pose


def resized(items: list[Any], count: int, make: Callable[[], Any]) -> list[Any]:
    """
    Return the first `count` items, new ones made by `make` behind them.

    Making the 65 points of a trajectory takes rclpy 5 ms, writing into old ones a tenth of that;
    publishing does not keep a message.
    """
    return [*items[:count], *(make() for _ in range(count - len(items)))]


def plan_path(plan: Plan, frame: str) -> Path:
    """Return the plan as a Path; each pose carries the time at which it is reached."""
    frame_id, matrices = published_poses(plan, plan.poses, frame)
    path = Path(header=make_header(plan.t0_ns, frame_id),
                poses=[PoseStamped() for _ in matrices])
    for index, (item, (position, turn)) in enumerate(zip(path.poses, pose_values(matrices))):
        stamp, item.header.frame_id = item.header.stamp, frame_id
        stamp.sec, stamp.nanosec = divmod(plan.t0_ns + index * STEP_NS, _NS)
        set_pose(item.pose, position, turn)
    return path


def plan_trajectory(plan: Plan, frame: str) -> MultiDOFJointTrajectory:
    """
    Return the plan as 65 points with speeds, stamped t0; point 0 is the ego at t0.

    Transforms are in the header's frame. Velocities and accelerations are those of the vehicle
    along its own axes: linear.x is speed and its rate, angular.z is speed times curvature.
    """
    frame_id, matrices = published_poses(plan, plan.poses, frame)
    message = MultiDOFJointTrajectory(
        header=make_header(plan.t0_ns, frame_id), joint_names=[BASE_FRAME],
        points=[_trajectory_point() for _ in matrices])
    motion = zip(message.points, pose_values(matrices), plan.speeds.tolist(),
                 plan.accelerations.tolist(), (plan.speeds * plan.curvatures).tolist())
    for index, (point, (position, turn), speed, acceleration, rate) in enumerate(motion):
        set_pose(point.transforms[0], position, turn)
        velocity, late = point.velocities[0], point.time_from_start
        velocity.linear.x, velocity.angular.z = speed, rate
        point.accelerations[0].linear.x = acceleration
        late.sec, late.nanosec = divmod(index * STEP_NS, _NS)
    return message


def _trajectory_point() -> MultiDOFJointTrajectoryPoint:
    return MultiDOFJointTrajectoryPoint(transforms=[Transform()], velocities=[Twist()],
                                        accelerations=[Twist()])


def image_message(image: NDArray[np.uint8], stamp_ns: int, frame_id: str,
                  encoding: str = 'rgb8') -> Image:
    """Return (H, W, 3) uint8 RGB as an Image; encodings rgb8, bgr8, mono8."""
    if encoding == 'bgr8':
        image = image[..., ::-1]
    elif encoding == 'mono8':
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), dtype=np.uint8)
    elif encoding != 'rgb8':
        raise InputError(f"image encoding '{encoding}' cannot be written; "
                         'use rgb8, bgr8 or mono8')
    height, width = image.shape[:2]
    # An array of bytes passes through the setter; a list would take 80 ms for 1.7 MB.
    return Image(header=make_header(stamp_ns, frame_id), height=height, width=width,
                 encoding=encoding, step=image.nbytes // height,
                 data=array.array('B', np.ascontiguousarray(image).tobytes()))


def compressed_image_message(image: NDArray[np.uint8], stamp_ns: int, frame_id: str,
                             kind: str = 'jpeg', quality: int = 90) -> CompressedImage:
    """Return (H, W, 3) uint8 RGB as a CompressedImage; kinds jpeg and png."""
    if kind not in ('jpeg', 'png'):
        raise InputError(f"compression '{kind}' cannot be written; use jpeg or png")
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if kind == 'jpeg' else []
    # OpenCV writes BGR arrays.
    good, data = cv2.imencode(f'.{kind}', np.ascontiguousarray(image[..., ::-1]), options)
    if not good:
        raise InputError(f'image {image.shape} cannot be written as {kind}; check its size')
    return CompressedImage(header=make_header(stamp_ns, frame_id),
                           format=f'rgb8; {kind} compressed bgr8',
                           data=array.array('B', data.tobytes()))


def camera_info_message(intrinsics: Floats, width: int, height: int, stamp_ns: int,
                        frame_id: str) -> CameraInfo:
    """Return an undistorted pinhole CameraInfo of `intrinsics` (3, 3)."""
    projection = np.hstack([intrinsics, np.zeros((3, 1))])
    return CameraInfo(header=make_header(stamp_ns, frame_id), width=width, height=height,
                      distortion_model='plumb_bob', d=[0.0] * 5,
                      k=np.asarray(intrinsics, dtype=np.float64).reshape(-1),
                      r=np.eye(3).reshape(-1), p=projection.reshape(-1))


def odometry_message(stamp_ns: int, pose: Floats, speed_mps: float, heading_rate_rps: float = 0.0,
                     frame_id: str = 'map', child_frame_id: str = BASE_FRAME) -> Odometry:
    """Return odometry of `pose` (4, 4), the rear axle in `frame_id`; twist in the ego frame."""
    message = Odometry(header=make_header(stamp_ns, frame_id), child_frame_id=child_frame_id)
    message.pose.pose = pose_message(pose)
    message.twist.twist.linear.x = float(speed_mps)
    message.twist.twist.angular.z = float(heading_rate_rps)
    return message


def transform_message(stamp_ns: int, pose: Floats, frame_id: str,
                      child_frame_id: str) -> TransformStamped:
    """Return the transform frame_id <- child_frame_id of `pose` (4, 4)."""
    made = pose_message(pose)
    return TransformStamped(
        header=make_header(stamp_ns, frame_id), child_frame_id=child_frame_id,
        transform=Transform(translation=Vector3(x=made.position.x, y=made.position.y,
                                                z=made.position.z), rotation=made.orientation))
