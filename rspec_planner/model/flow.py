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
Flow matching (arXiv 2210.02747): t = 0 is noise, t = 1 is data.

The path is x_t = t * data + (1 - t) * noise and the velocity data - noise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

VelocityFn = Callable[[Tensor, Tensor], Tensor]

BETA_ALPHA = 1.5  # time b ~ Beta(1.5, 1), t = 0.999 * (1 - b): mass towards the noise
TIME_SCALE = 0.999


def euler_sample(velocity_fn: VelocityFn, noise: Tensor, num_steps: int = 10) -> Tensor:
    """
    Integrate the velocity field from noise to data with equal Euler steps.

    velocity_fn: (x (B, ...), t (B,)) -> velocity (B, ...). noise: (B, ...) fp32, scaled by the
    caller. Returns the sample, shaped like noise.
    """
    x = noise
    times = torch.arange(num_steps, dtype=torch.float32, device=noise.device) / num_steps
    for t in times:
        x = x + velocity_fn(x, t.expand(x.shape[0])) / num_steps
    return x


def start_noise(noise: Tensor, scale: float) -> Tensor:
    """
    Return standard normal noise (..., K, W, 2) with the first of K samples times `scale`.

    The first sample is what a planner without a choice publishes, frame after frame from the same
    noise: whatever the noise leaves in it is a push to one side that never averages out. From
    0 it is the middle of what the model deems possible; the other samples show the spread.
    """
    if scale == 1.0:
        return noise
    first, others = noise[..., :1, :, :] * scale, noise[..., 1:, :, :]
    return torch.cat((first, others), dim=-3)


def sample_time(count: int, generator: torch.Generator | None = None,
                device: torch.device | str = 'cpu') -> Tensor:
    """Return (count,) fp32 training times in [0, 0.999], denser towards the noise."""
    uniform = torch.rand(count, generator=generator, device=device)
    return TIME_SCALE * (1.0 - uniform ** (1.0 / BETA_ALPHA))


def interpolate(data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Return the point x_t of the straight path, (B, ...), for times (B,)."""
    weight = t.view(-1, *([1] * (data.dim() - 1)))
    return weight * data + (1.0 - weight) * noise


def flow_matching_loss(velocity_fn: VelocityFn, data: Tensor, noise: Tensor, t: Tensor,
                       weight: Tensor | None = None) -> Tensor:
    """
    Return the mean squared error of the velocity at x_t, a scalar.

    data, noise: (B, ...); t: (B,); weight: broadcastable to data, or None for ones.
    """
    predicted = velocity_fn(interpolate(data, noise, t), t)
    if weight is None:
        return functional.mse_loss(predicted, data - noise)
    return (weight * (predicted - (data - noise)).square()).mean()
