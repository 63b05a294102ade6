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
The vehicle of the closed loop: a bicycle with slow actuators, and a controller that tracks plans.

Both are plain: the point is that a plan is followed as a car would follow it, late and not
perfectly, so that neither a wild plan nor an old one goes unpunished.
"""

from __future__ import annotations

from dataclasses import dataclass
import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SUBSTEP_S = 0.02
_POINT_S = 0.1  # between the points of a plan


@dataclass(frozen=True)
class VehicleModel:
    """Kinematic bicycle about the rear axle; first-order actuators with limits."""

    wheelbase_m: float = 2.8
    steer_rad: float = 0.55  # curvature 0.22 1/m; the expert turns with 0.17
    steer_rate_rps: float = 0.8
    steer_lag_s: float = 0.1
    drive_lag_s: float = 0.15
    jerk_mps3: float = 20.0
    brake_mps2: float = 8.0
    accelerate_mps2: float = 3.0


@dataclass
class VehicleState:
    """Pose of the rear axle in the world, motion, and where the actuators stand."""

    x: float
    y: float
    yaw: float
    speed: float
    acceleration: float = 0.0
    steer: float = 0.0

    def curvature(self, model: VehicleModel) -> float:
        """Return the curvature that the wheels drive, 1/m."""
        return math.tan(self.steer) / model.wheelbase_m

    def advance(self, acceleration: float, curvature: float, model: VehicleModel) -> None:
        """Move by one substep under a commanded acceleration and curvature."""
        dt = SUBSTEP_S
        wanted = min(max(math.atan(curvature * model.wheelbase_m), -model.steer_rad),
                     model.steer_rad)
        most = model.steer_rate_rps * dt
        self.steer += min(max((wanted - self.steer) * dt / model.steer_lag_s, -most), most)
        pushed = min(max(acceleration, -model.brake_mps2), model.accelerate_mps2)
        most = model.jerk_mps3 * dt
        self.acceleration += min(max((pushed - self.acceleration) * dt / model.drive_lag_s,
                                     -most), most)
        before = self.speed
        self.speed = max(0.0, before + self.acceleration * dt)
        if self.speed == 0.0:
            self.acceleration = 0.0
        moved = 0.5 * (before + self.speed) * dt
        turned = moved * self.curvature(model)
        self.x += moved * math.cos(self.yaw + 0.5 * turned)
        self.y += moved * math.sin(self.yaw + 0.5 * turned)
        self.yaw += turned


@dataclass(frozen=True)
class WorldPlan:
    """A plan in the world frame; point i is at t0_s + 0.1 i."""

    t0_s: float
    poses: Floats  # (65, 3) x, y, yaw
    speeds: Floats  # (65,)
    accelerations: Floats  # (65,)
    curvatures: Floats  # (65,)
    stations: Floats  # (65,) arc length

    @staticmethod
    def placed(t0_s: float, ego: tuple[float, float, float], poses: Floats, speeds: Floats,
               accelerations: Floats, curvatures: Floats) -> WorldPlan:
        """Move a plan (65, 4) from the ego frame at t0 to the world."""
        x, y, yaw = ego
        cosine, sine = math.cos(yaw), math.sin(yaw)
        world = np.stack([x + poses[:, 0] * cosine - poses[:, 1] * sine,
                          y + poses[:, 0] * sine + poses[:, 1] * cosine,
                          yaw + poses[:, 3]], axis=1)
        steps = np.linalg.norm(np.diff(world[:, :2], axis=0), axis=1)
        return WorldPlan(t0_s, world, speeds, accelerations, curvatures,
                         np.concatenate([[0.0], np.cumsum(steps)]))


def _project(plan: WorldPlan, x: float, y: float) -> tuple[float, float, float]:
    """Return station, offset (left positive) and heading of the plan's nearest point."""
    apart = np.hypot(plan.poses[:, 0] - x, plan.poses[:, 1] - y)
    nearest = int(np.argmin(apart))
    px, py, yaw = plan.poses[nearest]
    along = (x - px) * math.cos(yaw) + (y - py) * math.sin(yaw)
    bend = float(plan.curvatures[nearest])
    heading = yaw + bend * along
    offset = (y - py) * math.cos(yaw) - (x - px) * math.sin(yaw) - 0.5 * bend * along * along
    return float(plan.stations[nearest]) + along, offset, heading


def track(plan: WorldPlan, time_s: float, state: VehicleState, model: VehicleModel
          ) -> tuple[float, float]:
    """
    Return commanded acceleration and curvature.

    Along the path the plan's own time counts: an ego that is ahead of it, because the plan came
    late, brakes harder. Across it the nearest point counts, with the curvature a lag ahead.
    """
    points = _POINT_S * np.arange(len(plan.speeds))
    due = time_s - plan.t0_s
    station, offset, heading = _project(plan, state.x, state.y)
    speed = float(np.interp(due, points, plan.speeds))
    push = float(plan.accelerations[min(max(int((due + model.drive_lag_s) / _POINT_S), 0),
                                        len(plan.speeds) - 1)])
    behind = float(np.interp(due, points, plan.stations)) - station
    acceleration = push + 1.5 * (speed - state.speed) + min(max(0.6 * behind, -2.5), 1.0)
    if speed < 0.1 and state.speed < 0.4:
        acceleration = -2.0  # held at rest: no creeping after the last centimetres
    ahead = station + state.speed * 2.0 * model.steer_lag_s
    bend = float(np.interp(ahead, plan.stations, plan.curvatures))
    look = min(max(0.9 * state.speed, 3.0), 12.0)
    turn = math.atan2(math.sin(state.yaw - heading), math.cos(state.yaw - heading))
    return acceleration, bend - 2.0 * offset / look ** 2 - 2.0 * math.sin(turn) / look
