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
The two message sets: the common ROS packages, and Autoware's own messages beside them.

Autoware's packages are imported when that set is asked for and nowhere else, so that everything
here works on a plain ROS installation. Field names follow autoware_msgs and
autoware_internal_msgs; fields that are not named here keep their zero.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol
import uuid

from std_msgs.msg import Float64, String
from trajectory_msgs.msg import MultiDOFJointTrajectory
from unique_identifier_msgs.msg import UUID

from rspec_planner.errors import ConfigurationError
from rspec_planner.parameters import NODE_NAME
from rspec_planner.planner.plan import Plan, STEP_NS
from rspec_planner.ros_conversions import (
    candidate_motion,
    make_header,
    Motion,
    ns_to_duration,
    ns_to_stamp,
    plan_trajectory,
    pose_values,
    published_poses,
    resized,
    set_pose,
)

AUTOWARE_PACKAGES = ('autoware_planning_msgs', 'autoware_internal_planning_msgs',
                     'autoware_internal_debug_msgs', 'autoware_internal_msgs')
_GENERATOR_ID = UUID(uuid=list(uuid.uuid4().bytes))  # one per process


class MessageSet(Protocol):
    """Types of the topics that differ between the sets, and how to fill them."""

    trajectory_type: type[Any]
    text_type: type[Any]
    number_type: type[Any]

    def trajectory(self, plan: Plan, frame: str) -> Any:
        """Return the plan as 65 points with speeds, stamped t0."""

    def text(self, stamp_ns: int, text: str) -> Any:
        """Return a text; `stamp_ns` is t0."""

    def number(self, stamp_ns: int, value: float) -> Any:
        """Return a number; `stamp_ns` is the end of the measured interval."""


class CommonMessages:
    """What every ROS installation has; String and Float64 carry no stamp."""

    trajectory_type = MultiDOFJointTrajectory
    text_type = String
    number_type = Float64

    def trajectory(self, plan: Plan, frame: str) -> Any:
        """Return the plan as a MultiDOFJointTrajectory."""
        return plan_trajectory(plan, frame)

    def text(self, stamp_ns: int, text: str) -> Any:
        """Return a String."""
        return String(data=text)

    def number(self, stamp_ns: int, value: float) -> Any:
        """Return a Float64."""
        return Float64(data=float(value))


class AutowareMessages:
    """
    Autoware's trajectory, candidates, stamped texts and numbers.

    Raises ConfigurationError that names the first package that is not installed.
    """

    def __init__(self) -> None:
        planning, internal, debug, published = (_load(name) for name in AUTOWARE_PACKAGES)
        self.trajectory_type = planning.Trajectory
        self.text_type = debug.StringStamped
        self.number_type = debug.Float64Stamped
        self.candidates_type = internal.CandidateTrajectories
        self.published_time_type = published.PublishedTime
        self._point = planning.TrajectoryPoint
        self._candidate = internal.CandidateTrajectory
        self._generator = internal.GeneratorInfo

    def trajectory(self, plan: Plan, frame: str, into: Any = None) -> Any:
        """Return an autoware_planning_msgs/Trajectory, written into an earlier one if given."""
        message = self.trajectory_type() if into is None else into
        frame_id = published_poses(plan, plan.poses[:1], frame)[0]
        message.header = make_header(plan.t0_ns, frame_id)
        message.points = self._points(plan, candidate_motion(plan, None), frame, message.points)
        return message

    def candidates(self, plan: Plan, frame: str) -> Any:
        """Return all samples, in the order in which they were drawn."""
        message = self.candidates_type()
        frame_id = published_poses(plan, plan.poses[:1], frame)[0]
        for index in range(len(plan.candidates)):
            points = self._points(plan, candidate_motion(plan, index), frame)
            message.candidate_trajectories.append(self._candidate(
                header=make_header(plan.t0_ns, frame_id), generator_id=_GENERATOR_ID,
                points=points))
            message.generator_info.append(self._generator(
                generator_id=_GENERATOR_ID,
                generator_name=String(data=f'{NODE_NAME}_{index}')))
        return message

    def text(self, stamp_ns: int, text: str) -> Any:
        """Return a StringStamped."""
        return self.text_type(stamp=ns_to_stamp(stamp_ns), data=text)

    def number(self, stamp_ns: int, value: float) -> Any:
        """Return a Float64Stamped."""
        return self.number_type(stamp=ns_to_stamp(stamp_ns), data=float(value))

    def published_time(self, plan: Plan, frame: str, now_ns: int) -> Any:
        """Return when a plan was published, under the header of the plan."""
        frame_id = published_poses(plan, plan.poses[:1], frame)[0]
        return self.published_time_type(header=make_header(plan.t0_ns, frame_id),
                                        published_stamp=ns_to_stamp(now_ns))

    def _points(self, plan: Plan, motion: Motion, frame: str, into: list[Any] | None = None
                ) -> list[Any]:
        """Return 65 TrajectoryPoints; speeds are longitudinal, wheel angles are not known."""
        _, matrices = published_poses(plan, motion.poses, frame)
        points = resized(into or [], len(matrices), self._point)
        values = zip(points, pose_values(matrices), motion.speeds.tolist(),
                     motion.accelerations.tolist(), motion.heading_rates.tolist())
        for index, (point, (position, turn), speed, acceleration, rate) in enumerate(values):
            set_pose(point.pose, position, turn)
            point.longitudinal_velocity_mps, point.acceleration_mps2 = speed, acceleration
            point.heading_rate_rps = rate
            point.time_from_start = ns_to_duration(index * STEP_NS)
        return points


def load_message_set(name: str) -> CommonMessages | AutowareMessages:
    """Return the set of `output.message_set`; raises ConfigurationError with the remedy."""
    return AutowareMessages() if name == 'autoware' else CommonMessages()


def _load(package: str) -> Any:
    """Return the messages of an Autoware package."""
    try:
        return importlib.import_module(f'{package}.msg')
    except ImportError:
        raise ConfigurationError(
            f"'output.message_set' is 'autoware' but the package '{package}' is not "
            "installed; source an Autoware workspace or set it to 'common'") from None
