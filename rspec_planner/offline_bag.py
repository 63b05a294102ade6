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
"""Write plans into a bag, on the topics on which the node publishes them; log times are t0."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from rspec_planner.planner.plan import Plan, STEP_NS
from rspec_planner.world.bag import BagWriter, message
from rspec_planner.world.messages import (
    make_header,
    pose_message,
    quaternion_of,
    transform_of,
    twist_message,
)

OUTPUT = '/planning/rspec_planner/output'
BASE_FRAME = 'base_link'
TOPICS = {f'{OUTPUT}/path': 'nav_msgs/Path',
          f'{OUTPUT}/trajectory': 'trajectory_msgs/MultiDOFJointTrajectory',
          f'{OUTPUT}/reasoning': 'std_msgs/String',
          f'{OUTPUT}/reasoning_stamped': 'std_msgs/String'}


class PlanBag:
    """A bag of plans; `frame` is 'odometry' or 'base_link', as in the node's parameters."""

    def __init__(self, path: Path, frame: str, overwrite: bool) -> None:
        self._bag = BagWriter(path, overwrite=overwrite)
        self._frame = frame

    def __enter__(self) -> Self:
        self._bag.__enter__()
        for topic, kind in TOPICS.items():
            self._bag.add_topic(topic, kind)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._bag.__exit__(kind, error, trace)

    def write(self, plan: Plan) -> None:
        """Append one plan."""
        stamped = json.dumps({'t0_ns': plan.t0_ns, 'text': plan.reasoning.text})
        contents = (*_motion(plan, self._frame),
                    message('std_msgs/String', data=plan.reasoning.text),
                    message('std_msgs/String', data=stamped))
        for topic, content in zip(TOPICS, contents):
            self._bag.write(topic, plan.t0_ns, content)


def _motion(plan: Plan, frame: str) -> tuple[Any, Any]:
    """Return the Path and the trajectory of a plan, both stamped t0."""
    frame_id = BASE_FRAME if frame == BASE_FRAME else plan.odometry_frame
    header = make_header(plan.t0_ns, frame_id)
    poses, points = [], []
    for index, matrix in enumerate(_matrices(plan, frame)):
        position, turn = matrix[:3, 3], quaternion_of(matrix[:3, :3])
        late = make_header(index * STEP_NS, '').stamp
        poses.append(message('geometry_msgs/PoseStamped', pose=pose_message(position, turn),
                             header=make_header(plan.t0_ns + index * STEP_NS, frame_id)))
        points.append(message(
            'trajectory_msgs/MultiDOFJointTrajectoryPoint',
            transforms=[transform_of(position, turn)],
            velocities=[twist_message(plan.speeds[index],
                                      plan.speeds[index] * plan.curvatures[index])],
            accelerations=[twist_message(plan.accelerations[index])],
            time_from_start=message('builtin_interfaces/Duration', sec=late.sec,
                                    nanosec=late.nanosec)))
    return (message('nav_msgs/Path', header=header, poses=poses),
            message('trajectory_msgs/MultiDOFJointTrajectory', header=header,
                    joint_names=[BASE_FRAME], points=points))


def _matrices(plan: Plan, frame: str) -> np.ndarray:
    """Return (65, 4, 4): the planned poses in the published frame."""
    cosine, sine = np.cos(plan.poses[:, 3]), np.sin(plan.poses[:, 3])
    local = np.tile(np.eye(4), (len(plan.poses), 1, 1))
    local[:, 0, 0], local[:, 0, 1], local[:, 1, 0], local[:, 1, 1] = cosine, -sine, sine, cosine
    local[:, :3, 3] = plan.poses[:, :3]
    return local if frame == BASE_FRAME else np.asarray(plan.ego_pose_at_t0 @ local)
