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
Unicycle action space: poses from normalised acceleration and curvature, and back.

Speed is not an input of the model: it is estimated from the 16 past poses by a regularised
least-squares solve. All solves run in fp64 and return the dtype of their input.
Frame: ego at t0, x forward, y left, yaw and curvature positive to the left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rspec_planner.model.config import ActionSpaceConfig

#: below this speed a curvature label is noise (m/s); labels are set to zero there
LABEL_MIN_SPEED = 0.6


def unwrap(yaw: Tensor) -> Tensor:
    """Return (B, T) angles without jumps of 2 pi along the last dimension."""
    step = torch.diff(yaw, dim=-1)
    turns = torch.round(step / (2 * math.pi))
    return torch.cat((yaw[..., :1], yaw[..., 1:] - 2 * math.pi * turns.cumsum(-1)), dim=-1)


def difference_penalty(size: int, order: int, weight: float, like: Tensor) -> Tensor:
    """Return weight * D^T D of the order-th difference matrix D, (size, size)."""
    matrix = torch.eye(size, dtype=like.dtype, device=like.device)
    for _ in range(order):
        matrix = torch.diff(matrix, dim=0)
    return weight * matrix.T @ matrix


def _solve(normal: Tensor, right: Tensor) -> Tensor:
    """Return x of the SPD systems normal (B, n, n) x = right (B, n)."""
    factor = torch.linalg.cholesky(normal)
    return torch.cholesky_solve(right[..., None], factor)[..., 0]


class UnicycleActionSpace:
    """Constants of one action space and the maps between poses and actions."""

    def __init__(self, cfg: ActionSpaceConfig) -> None:
        self.cfg = cfg

    def _scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean = like.new_tensor([self.cfg.accel_mean, self.cfg.curvature_mean])
        std = like.new_tensor([self.cfg.accel_std, self.cfg.curvature_std])
        return mean, std

    def normalise(self, actions: Tensor) -> Tensor:
        """Return dimensionless (..., 2) of acceleration (m/s^2) and curvature (1/m)."""
        mean, std = self._scale(actions)
        return (actions - mean) / std

    def denormalise(self, actions: Tensor) -> Tensor:
        """Return acceleration (m/s^2) and curvature (1/m), (..., 2)."""
        mean, std = self._scale(actions)
        return actions * std + mean

    def is_within_bounds(self, actions: Tensor) -> Tensor:
        """Return (...) bool, True where physical (..., 2) actions lie within the bounds."""
        low = actions.new_tensor([self.cfg.accel_bounds[0], self.cfg.curvature_bounds[0]])
        high = actions.new_tensor([self.cfg.accel_bounds[1], self.cfg.curvature_bounds[1]])
        return ((actions >= low) & (actions <= high)).all(-1)

    def _speed_system(self, xy: Tensor, yaw: Tensor) -> tuple[Tensor, Tensor]:
        """
        Return the normal equations of the speeds at T poses, (B, T, T) and (B, T).

        Data term: v_t u_t + v_{t+1} u_{t+1} = 2 dp_t / dt with u the heading; third
        differences and a ridge regularise it.
        """
        dt, size = self.cfg.dt, xy.shape[-2]
        heading = torch.stack((yaw.cos(), yaw.sin()), dim=-1)
        target = 2.0 * torch.diff(xy, dim=-2) / dt
        design = xy.new_zeros(*xy.shape[:-2], size - 1, 2, size)
        step = torch.arange(size - 1, device=xy.device)
        design[..., step, :, step] = heading[..., :-1, :].movedim(-2, 0)
        design[..., step, :, step + 1] = heading[..., 1:, :].movedim(-2, 0)
        design = design.flatten(-3, -2)
        normal = design.mT @ design
        normal = normal + difference_penalty(size, 3, self.cfg.v_lambda / dt ** 6, xy)
        normal = normal + self.cfg.v_ridge * torch.eye(size, dtype=xy.dtype, device=xy.device)
        return normal, (design.mT @ target.flatten(-2)[..., None])[..., 0]

    def initial_speed(self, xy: Tensor, yaw: Tensor) -> Tensor:
        """
        Estimate the speed at t0 from the past, (B,) m/s.

        xy: (B, 16, 2) m; yaw: (B, 16) rad; oldest first, dt apart, the last one at t0.
        """
        normal, right = self._speed_system(xy.double(), unwrap(yaw.double()))
        return _solve(normal, right)[..., -1].to(xy.dtype)

    def integrate(self, actions: Tensor, v0: Tensor,
                  floor_at_zero: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """
        Roll normalised actions out from the origin with heading zero.

        actions: (B, W, 2); v0: (B,) m/s. floor_at_zero: a vehicle that has braked to a stop
        stays there instead of reversing; the pose is then held.
        Returns xy (B, W, 2) m, yaw (B, W) rad and speed (B, W) m/s at dt, 2 dt, ... W dt.
        """
        dt = self.cfg.dt
        accel, curvature = self.denormalise(actions).unbind(-1)
        first = v0[..., None].to(accel.dtype)
        if floor_at_zero:
            first = first.clamp(min=0.0)
        speed = torch.cat((first, first + (accel * dt).cumsum(-1)), dim=-1)
        if floor_at_zero:
            # v <- max(0, v + a dt) step by step equals the sum minus its running deficit
            speed = speed - speed.cummin(-1).values.clamp(max=0.0)
        # v dt + a dt^2 / 2 with the acceleration that was really applied
        distance = 0.5 * dt * (speed[..., :-1] + speed[..., 1:])
        yaw = torch.cat((torch.zeros_like(first), (curvature * distance).cumsum(-1)), dim=-1)
        forward = torch.stack((speed * yaw.cos(), speed * yaw.sin()), dim=-1)
        step = 0.5 * dt * (forward[..., :-1, :] + forward[..., 1:, :])
        return step.cumsum(-2), yaw[..., 1:], speed[..., 1:]

    def actions_from_trajectory(self, xy: Tensor, yaw: Tensor, v0: Tensor) -> Tensor:
        """
        Return the normalised actions (B, W, 2) that reproduce a trajectory: training labels.

        xy: (B, W, 2) m and yaw: (B, W) rad at dt, 2 dt, ... in the ego frame at t0;
        v0: (B,) m/s as estimated by `initial_speed`, so that integration closes the loop.
        """
        start = xy.new_zeros(*xy.shape[:-2], 1, 2).double()
        points = torch.cat((start, xy.double()), dim=-2)
        theta = self._smooth_yaw(torch.cat((start[..., 0], yaw.double()), dim=-1))
        speed = self._speeds(points, theta, v0.double())
        accel = self._accelerations(speed)
        curvature = self._curvatures(theta, speed, accel)
        return self.normalise(torch.stack((accel, curvature), dim=-1)).to(xy.dtype)

    def _smooth_yaw(self, yaw: Tensor) -> Tensor:
        """Return (B, W + 1) yaw with penalised third differences, the first one fixed at 0."""
        yaw = unwrap(yaw)
        size = yaw.shape[-1]
        eye = torch.eye(size, dtype=yaw.dtype, device=yaw.device)
        normal = difference_penalty(size, 3, self.cfg.theta_lambda / self.cfg.dt ** 6, yaw)
        normal = (normal + (1.0 + self.cfg.theta_ridge) * eye)[1:, 1:]
        free = _solve(normal.expand(*yaw.shape[:-1], -1, -1), yaw[..., 1:])
        return torch.cat((torch.zeros_like(yaw[..., :1]), free), dim=-1)

    def _speeds(self, points: Tensor, theta: Tensor, v0: Tensor) -> Tensor:
        """Return (B, W + 1) speeds, the first one fixed at v0."""
        normal, right = self._speed_system(points, theta)
        right = right[..., 1:] - normal[..., 1:, 0] * v0[..., None]
        return torch.cat((v0[..., None], _solve(normal[..., 1:, 1:], right)), dim=-1)

    def _accelerations(self, speed: Tensor) -> Tensor:
        """Return (B, W) accelerations, smoothed difference quotients of the speed."""
        quotient = torch.diff(speed, dim=-1) / self.cfg.dt
        size = quotient.shape[-1]
        normal = difference_penalty(size, 2, self.cfg.a_lambda / self.cfg.dt ** 4, speed)
        normal = normal + (1.0 + self.cfg.a_ridge) * torch.eye(
            size, dtype=speed.dtype, device=speed.device)
        return _solve(normal.expand(*quotient.shape[:-1], -1, -1), quotient)

    def _curvatures(self, theta: Tensor, speed: Tensor, accel: Tensor) -> Tensor:
        """Return (B, W) curvatures of yaw steps = curvature * distance, within the bounds."""
        dt = self.cfg.dt
        distance = speed[..., :-1] * dt + 0.5 * accel * dt ** 2
        size = distance.shape[-1]
        normal = difference_penalty(size, 2, self.cfg.kappa_lambda / dt ** 4, theta)
        normal = normal + torch.diag_embed(distance.square() + self.cfg.kappa_ridge)
        curvature = _solve(normal, distance * torch.diff(theta, dim=-1))
        slow = speed.abs() < LABEL_MIN_SPEED
        curvature = curvature.masked_fill(slow[..., :-1] | slow[..., 1:], 0.0)
        return curvature.clamp(*self.cfg.curvature_bounds)
