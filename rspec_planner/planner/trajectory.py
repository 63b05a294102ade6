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
Checks of a planned trajectory before anyone may drive it; each failure has its own name.

The integrator cannot produce most of these from sane actions. The checks are for the day when
actions are not sane: a public Alpamayo runtime met a rollout that began 10.6 m behind the car.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rspec_planner.model.config import ActionSpaceConfig
from rspec_planner.planner.plan import Verdict

Floats = NDArray[np.float64]

REJECT_REASONS = ('not_finite', 'start_jump', 'speed_mismatch', 'point_jump', 'reverse',
                  'acceleration_out_of_bounds', 'curvature_out_of_bounds',
                  'reasoning_incomplete')

ACCEPTED = Verdict(accepted=True)


@dataclass(frozen=True)
class TrajectoryLimits:
    """What a trajectory may do; distances in metres between points 0.1 s apart."""

    start_m: float = 2.0  # first waypoint from v0 * 0.1 s ahead
    speed_mps: float = 3.0  # first waypoint's speed from the measured speed
    step_m: float = 10.0  # between neighbours: 100 m/s
    behind_m: float = 2.0  # any waypoint behind the rear axle at t0
    backward_m: float = 0.1  # one step against its own heading
    standing_mps: float = 0.1  # below this speed a curvature has no effect
    acceleration_mps2: tuple[float, float] = ActionSpaceConfig.accel_bounds
    curvature_1pm: tuple[float, float] = ActionSpaceConfig.curvature_bounds


DEFAULT_LIMITS = TrajectoryLimits()


def check_trajectory(poses: Floats, speeds: Floats, accelerations: Floats, curvatures: Floats,
                     limits: TrajectoryLimits = DEFAULT_LIMITS) -> Verdict:
    """
    Return the first failed check, or acceptance.

    poses (n, 4) x, y, z, yaw in the ego frame at t0; speeds, accelerations, curvatures (n,);
    point 0 is the ego at t0 with its measured speed.
    """
    for name, values in (('poses', poses), ('speeds', speeds), ('accelerations', accelerations),
                         ('curvatures', curvatures)):
        if not np.isfinite(values).all():
            count = int((~np.isfinite(values)).sum())
            return Verdict(False, 'not_finite', f'{name}: {count} values are not finite')
    return (_check_start(poses, speeds, limits) or _check_steps(poses, limits)
            or _check_bounds(speeds, accelerations, curvatures, limits) or ACCEPTED)


def _check_start(poses: Floats, speeds: Floats, limits: TrajectoryLimits) -> Verdict | None:
    """Return a failure when the first waypoint does not follow from the measured speed."""
    expected = np.array([0.1 * speeds[0], 0.0, 0.0])
    distance = float(np.linalg.norm(poses[1, :3] - expected))
    if distance > limits.start_m:
        return Verdict(False, 'start_jump', f'first waypoint is {distance:.2f} m from where '
                       f'{speeds[0]:.2f} m/s leads, limit {limits.start_m:.2f} m')
    difference = abs(float(speeds[1] - speeds[0]))
    if difference > limits.speed_mps:
        return Verdict(False, 'speed_mismatch', f'first waypoint has {speeds[1]:.2f} m/s, '
                       f'measured {speeds[0]:.2f} m/s, limit {limits.speed_mps:.2f} m/s apart')
    return None


def _check_steps(poses: Floats, limits: TrajectoryLimits) -> Verdict | None:
    """Return a failure for a jump between neighbours or for driving backwards."""
    steps = np.diff(poses[:, :3], axis=0)
    lengths = np.linalg.norm(steps, axis=1)
    worst = int(np.argmax(lengths))
    if lengths[worst] > limits.step_m:
        return Verdict(False, 'point_jump', f'points {worst} and {worst + 1} are '
                       f'{lengths[worst]:.2f} m apart, limit {limits.step_m:.2f} m')
    behind = int(np.argmin(poses[:, 0]))
    if poses[behind, 0] < -limits.behind_m:
        return Verdict(False, 'reverse', f'point {behind} is {-poses[behind, 0]:.2f} m behind '
                       f'the ego, limit {limits.behind_m:.2f} m')
    middle = 0.5 * (poses[1:, 3] + poses[:-1, 3])
    along = steps[:, 0] * np.cos(middle) + steps[:, 1] * np.sin(middle)
    worst = int(np.argmin(along))
    if along[worst] < -limits.backward_m:
        return Verdict(False, 'reverse', f'step {worst} goes {-along[worst]:.2f} m backwards, '
                       f'limit {limits.backward_m:.2f} m')
    return None


def _check_bounds(speeds: Floats, accelerations: Floats, curvatures: Floats,
                  limits: TrajectoryLimits) -> Verdict | None:
    """Return a failure when an action leaves the action space."""
    moving = np.where(speeds > limits.standing_mps, curvatures, 0.0)
    for reason, values, (low, high), unit in (
            ('acceleration_out_of_bounds', accelerations, limits.acceleration_mps2, 'm/s^2'),
            ('curvature_out_of_bounds', moving, limits.curvature_1pm, '1/m')):
        outside = np.maximum(values - high, low - values)
        worst = int(np.argmax(outside))
        if outside[worst] > 0:
            return Verdict(False, reason, f'point {worst}: {values[worst]:.3f} {unit}, limits '
                           f'{low:.2f} ... {high:.2f} {unit}')
    return None
