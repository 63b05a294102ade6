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
A controlled stop for the moment when there is no valid plan but the inputs are good.

It is made from the ego's own motion alone and sees no obstacle: braking along the way that was
planned last, else along the arc that the ego drives. It never stands in for a plan; it leaves on
a topic of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rspec_planner.decode.stats import DecodeStats
from rspec_planner.planner.history import yaw_of
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plan import DT, Plan, PLAN_POINTS, Reasoning, StageTimes
from rspec_planner.planner.trajectory import ACCEPTED, TrajectoryLimits

Floats = NDArray[np.float64]

#: the last plan's way is followed while the ego is so near to it, metres
_NEAR_M = 1.0
#: a shorter way says nothing about its curvature, metres
_MOVED_M = 0.5


def stop_plan(observation: Observation, previous: Plan | None, deceleration: float,
              reason: str, limits: TrajectoryLimits) -> Plan:
    """
    Return a plan at the observation's t0 that brakes with `deceleration`, m/s^2, and stands.

    The unicycle is integrated as the model's own actions are; the curvature is bounded by the
    limits at every speed.
    """
    t = DT * np.arange(PLAN_POINTS)
    start = max(float(observation.speed_mps), 0.0)
    speeds = np.maximum(0.0, start - deceleration * t)
    lengths = 0.5 * DT * (speeds[1:] + speeds[:-1])
    stations = np.concatenate([[0.0], np.cumsum(lengths)])
    curvatures = _bounded(_way(observation, previous, stations), speeds, limits)
    yaw = np.concatenate([[0.0], np.cumsum(curvatures[:-1] * lengths)])
    poses = np.zeros((PLAN_POINTS, 4))
    for axis, along in ((0, np.cos(yaw)), (1, np.sin(yaw))):
        steps = 0.5 * DT * (speeds[1:] * along[1:] + speeds[:-1] * along[:-1])
        poses[1:, axis] = np.cumsum(steps)
    poses[:, 3] = yaw
    applied = np.maximum(np.diff(speeds) / DT, -deceleration)  # a rounded limit is no breach
    return Plan(
        t0_ns=observation.t0_ns, poses=poses, speeds=speeds,
        accelerations=np.append(applied, applied[-1]), curvatures=curvatures,
        candidates=poses[None], candidate_speeds=speeds[None],
        ego_pose_at_t0=observation.ego_pose_at_t0, odometry_frame=observation.odometry_frame,
        reasoning=Reasoning((), f'controlled stop: {reason}', True, DecodeStats(0, ())),
        times=StageTimes(), verdict=ACCEPTED, ages_ms=dict(observation.ages_ms))


def _way(observation: Observation, previous: Plan | None, stations: Floats) -> Floats:
    """Return the curvature at each station: of the last plan's way, or of the arc driven."""
    if previous is not None and previous.odometry_frame == observation.odometry_frame:
        relative = np.linalg.inv(previous.ego_pose_at_t0) @ observation.ego_pose_at_t0
        apart = np.linalg.norm(previous.poses[:, :2] - relative[:2, 3], axis=1)
        nearest = int(np.argmin(apart))
        if apart[nearest] < _NEAR_M:
            steps = np.linalg.norm(np.diff(previous.poses[:, :2], axis=0), axis=1)
            known = np.concatenate([[0.0], np.cumsum(steps)])
            found: Floats = np.interp(known[nearest] + stations, known, previous.curvatures)
            return found
    poses = observation.ego_poses[-6:]
    moved = float(np.linalg.norm(np.diff(poses[:, :2, 3], axis=0), axis=1).sum())
    yaw = yaw_of(poses)
    turned = float(np.arctan2(np.sin(yaw[-1] - yaw[0]), np.cos(yaw[-1] - yaw[0])))
    return np.full(len(stations), turned / moved if moved > _MOVED_M else 0.0)


def _bounded(curvatures: Floats, speeds: Floats, limits: TrajectoryLimits) -> Floats:
    """Return curvatures inside the limits, the lateral one included."""
    most = np.minimum(limits.curvature_1pm[1],
                      limits.lateral_mps2 / np.maximum(speeds, limits.standing_mps) ** 2)
    bounded: Floats = np.clip(curvatures, -0.999 * most, 0.999 * most)
    return bounded
