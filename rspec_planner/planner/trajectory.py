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
from rspec_planner.planner.plan import Plan, PLAN_POINTS, Verdict

Floats = NDArray[np.float64]

REJECT_REASONS = ('wrong_t0', 'wrong_shape', 'not_finite', 'start_jump', 'speed_mismatch',
                  'point_jump', 'reverse', 'acceleration_out_of_bounds',
                  'curvature_out_of_bounds', 'lateral_acceleration_out_of_bounds',
                  'inconsistent', 'reasoning_incomplete', 'reasoning_empty', 'stamp_in_future')

ACCEPTED = Verdict(accepted=True)
#: a stop computed in float32 may end this much below zero, which is no driving backwards
_ROUNDING_MPS = 1e-4


@dataclass(frozen=True)
class TrajectoryLimits:
    """What a trajectory may do; distances in metres between points 0.1 s apart."""

    start_m: float = 2.0  # first waypoint from v0 * 0.1 s ahead
    speed_mps: float = 3.0  # first waypoint's speed from the measured speed
    step_m: float = 10.0  # between neighbours: 100 m/s
    retreat_m: float = 2.0  # against its own heading in all; a U-turn may well end behind t0
    backward_m: float = 0.1  # one step against its own heading
    allow_reverse: bool = False
    standing_mps: float = 0.1  # below this speed a curvature has no effect
    acceleration_mps2: tuple[float, float] = ActionSpaceConfig.accel_bounds
    curvature_1pm: tuple[float, float] = ActionSpaceConfig.curvature_bounds
    lateral_mps2: float = 9.8  # speed^2 * curvature; dry tyres hold no more
    length_m: float = 0.5  # a step's length from what its speeds cover in 0.1 s
    turn_rad: float = 0.05  # a step's turn from what its curvature does over that length


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
    return (_check_start(poses, speeds, limits) or _check_steps(poses, speeds, limits)
            or _check_bounds(speeds, accelerations, curvatures, limits)
            or _check_consistency(poses, speeds, curvatures, limits) or ACCEPTED)


def check_plan(plan: Plan, t0_ns: int, limits: TrajectoryLimits = DEFAULT_LIMITS) -> Verdict:
    """
    Return the verdict on a whole plan for the input at t0, whoever made it.

    The planner's own verdict counts first. Everything that is published must be finite, other
    candidates and the ego pose too: a consumer may choose any of them.
    """
    if not plan.verdict.accepted:
        return plan.verdict
    if plan.t0_ns != t0_ns:
        return Verdict(False, 'wrong_t0', f'the plan is stamped {plan.t0_ns}, its input {t0_ns}')
    for name, values, shape in _published(plan):
        if values.shape != shape:
            return Verdict(False, 'wrong_shape', f'{name}: {values.shape}, must be {shape}')
        if not np.isfinite(values).all():
            return Verdict(False, 'not_finite', f'{name}: {int((~np.isfinite(values)).sum())} '
                           'values are not finite')
    return check_trajectory(plan.poses, plan.speeds, plan.accelerations, plan.curvatures, limits)


def _published(plan: Plan) -> list[tuple[str, Floats, tuple[int, ...]]]:
    """Return name, values and shape of every array that leaves with a plan."""
    samples = len(plan.candidates)
    return [('poses', plan.poses, (PLAN_POINTS, 4)), ('speeds', plan.speeds, (PLAN_POINTS,)),
            ('accelerations', plan.accelerations, (PLAN_POINTS,)),
            ('curvatures', plan.curvatures, (PLAN_POINTS,)),
            ('candidates', plan.candidates, (samples, PLAN_POINTS, 4)),
            ('candidate_speeds', plan.candidate_speeds, (samples, PLAN_POINTS)),
            ('ego_pose_at_t0', plan.ego_pose_at_t0, (4, 4))]


def _check_start(poses: Floats, speeds: Floats, limits: TrajectoryLimits) -> Verdict | None:
    """Return a failure when the first waypoint does not follow from the measured speed."""
    origin = float(np.linalg.norm(poses[0]))
    if origin > 0.01:
        return Verdict(False, 'start_jump', f'point 0 is {origin:.2f} away from the ego at t0, '
                       'which it must be')
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


def _check_steps(poses: Floats, speeds: Floats, limits: TrajectoryLimits) -> Verdict | None:
    """Return a failure for a jump between neighbours or for driving backwards."""
    steps = np.diff(poses[:, :3], axis=0)
    lengths = np.linalg.norm(steps, axis=1)
    worst = int(np.argmax(lengths))
    if lengths[worst] > limits.step_m:
        return Verdict(False, 'point_jump', f'points {worst} and {worst + 1} are '
                       f'{lengths[worst]:.2f} m apart, limit {limits.step_m:.2f} m')
    return None if limits.allow_reverse else _check_forward(poses, speeds, steps, limits)


def _check_forward(poses: Floats, speeds: Floats, steps: Floats,
                   limits: TrajectoryLimits) -> Verdict | None:
    """Return a failure for driving backwards, in points, steps (n - 1, 3) or speeds."""
    slowest = int(np.argmin(speeds))
    if speeds[slowest] < -_ROUNDING_MPS:
        return Verdict(False, 'reverse', f'point {slowest} has {speeds[slowest]:.2f} m/s; '
                       'guard.allow_reverse is false')
    middle = 0.5 * (poses[1:, 3] + poses[:-1, 3])
    along = steps[:, 0] * np.cos(middle) + steps[:, 1] * np.sin(middle)
    worst = int(np.argmin(along))
    if along[worst] < -limits.backward_m:
        return Verdict(False, 'reverse', f'step {worst} goes {-along[worst]:.2f} m backwards, '
                       f'limit {limits.backward_m:.2f} m')
    retreat = -float(np.minimum(along, 0.0).sum())
    if retreat > limits.retreat_m:
        return Verdict(False, 'reverse', f'{retreat:.2f} m are driven backwards in all, limit '
                       f'{limits.retreat_m:.2f} m')
    return None


def _check_bounds(speeds: Floats, accelerations: Floats, curvatures: Floats,
                  limits: TrajectoryLimits) -> Verdict | None:
    """Return a failure when an action leaves the action space."""
    moving = np.where(speeds > limits.standing_mps, curvatures, 0.0)
    lateral = (-limits.lateral_mps2, limits.lateral_mps2)
    for reason, values, (low, high), unit in (
            ('acceleration_out_of_bounds', accelerations, limits.acceleration_mps2, 'm/s^2'),
            ('curvature_out_of_bounds', moving, limits.curvature_1pm, '1/m'),
            ('lateral_acceleration_out_of_bounds', moving * speeds ** 2, lateral, 'm/s^2')):
        outside = np.maximum(values - high, low - values)
        worst = int(np.argmax(outside))
        if outside[worst] > 0:
            return Verdict(False, reason, f'point {worst}: {values[worst]:.3f} {unit}, limits '
                           f'{low:.2f} ... {high:.2f} {unit}')
    return None


def _check_consistency(poses: Floats, speeds: Floats, curvatures: Floats,
                       limits: TrajectoryLimits) -> Verdict | None:
    """Return a failure when points and speeds, or headings and curvatures, tell two stories."""
    covered = 0.05 * (speeds[1:] + speeds[:-1])
    apart = np.abs(np.linalg.norm(np.diff(poses[:, :3], axis=0), axis=1) - np.abs(covered))
    worst = int(np.argmax(apart))
    if apart[worst] > limits.length_m:
        return Verdict(False, 'inconsistent', f'step {worst} is {apart[worst]:.2f} m from what '
                       f'its speeds cover, limit {limits.length_m:.2f} m')
    turned = np.diff(poses[:, 3]) - curvatures[:-1] * covered
    turned = np.abs(np.arctan2(np.sin(turned), np.cos(turned)))
    worst = int(np.argmax(turned))
    if turned[worst] > limits.turn_rad:
        return Verdict(False, 'inconsistent', f'step {worst} turns {turned[worst]:.3f} rad from '
                       f'what its curvature does, limit {limits.turn_rad:.3f} rad')
    return None
