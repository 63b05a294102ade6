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
Rotary embeddings: interleaved three-axis (M-RoPE), flat one-axis, and the vision tower's 2-D.

Angles are always computed in fp32. The three-axis layout is that of Qwen3-VL, where the axes
take turns along the frequencies (T H W T H W ...) until the H and W sections are used up, or
that of Qwen2.5-VL, where each axis has one section of them (T ... H ... W ...).
"""

from __future__ import annotations

import torch
from torch import Tensor

VISION_THETA = 10_000.0


def inverse_frequencies(dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return theta^(-2i/dim) for i < dim/2, (dim/2,) fp32."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / theta ** steps


def axis_of_angle(half_dim: int, section: tuple[int, int, int],
                  device: torch.device | None = None, interleaved: bool = True) -> Tensor:
    """
    Return which axis (0 T, 1 H, 2 W) drives each of half_dim angles, (half_dim,) int64.

    Interleaved, angle i takes H when i % 3 == 1 and i < 3 * section[1], W when i % 3 == 2 and
    i < 3 * section[2], T otherwise. Else T, H and W take section[0], section[1] and section[2]
    angles, one after the other; ValueError when these are not half_dim together.
    """
    if not interleaved:
        if sum(section) != half_dim:
            raise ValueError(f'rotary sections {section} are not {half_dim} angles together')
        counts = torch.tensor(section, device=device)
        return torch.arange(3, device=device).repeat_interleave(counts)
    index = torch.arange(half_dim, device=device)
    axis = torch.zeros(half_dim, dtype=torch.int64, device=device)
    axis[(index % 3 == 1) & (index < 3 * section[1])] = 1
    axis[(index % 3 == 2) & (index < 3 * section[2])] = 2
    return axis


def _cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of (..., d/2) angles, duplicated to (..., d) for rotate-half."""
    return (torch.cat((angles.cos(),) * 2, dim=-1), torch.cat((angles.sin(),) * 2, dim=-1))


def mrope_cos_sin(positions: Tensor, head_dim: int, theta: float,
                  section: tuple[int, int, int],
                  interleaved: bool = True) -> tuple[Tensor, Tensor]:
    """
    Return the three-axis cos and sin.

    positions: (3, S) or (B, 3, S) integers, axes T, H, W. interleaved: see `axis_of_angle`.
    Returns two (S, head_dim) or (B, S, head_dim) fp32 tensors on the device of positions.
    """
    frequencies = inverse_frequencies(head_dim, theta, positions.device)
    axis = axis_of_angle(head_dim // 2, section, positions.device, interleaved)
    per_angle = positions.float().index_select(-2, axis).transpose(-1, -2)
    return _cos_sin(per_angle * frequencies)


def flat_cos_sin(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return one-axis cos and sin, (..., S) positions to (..., S, head_dim) fp32."""
    frequencies = inverse_frequencies(head_dim, theta, positions.device)
    return _cos_sin(positions.float()[..., None] * frequencies)


def merge_order(rows: int, cols: int, merge: int,
                device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """
    Return row and column of every patch in tower order, two (rows * cols,) int64.

    The merge x merge patches of one visual token follow each other, tokens run row-major.
    """
    grid = torch.arange(rows * cols, device=device).view(
        rows // merge, merge, cols // merge, merge)
    flat = grid.permute(0, 2, 1, 3).reshape(-1)
    return flat // cols, flat % cols


def vision_cos_sin(rows: int, cols: int, head_dim: int, merge: int,
                   device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """
    Return the vision tower's axial cos and sin, (rows * cols, head_dim) fp32, in tower order.

    A quarter of the head turns with the patch row, the next quarter with the column.
    """
    frequencies = inverse_frequencies(head_dim // 2, VISION_THETA, device)
    row, col = merge_order(rows, cols, merge, device)
    angles = torch.cat((row.float()[:, None] * frequencies, col.float()[:, None] * frequencies),
                       dim=-1)
    return _cos_sin(angles)


def signed_sin(sin: Tensor) -> Tensor:
    """Return sin (..., d) with its first half negated: rotate-half as a multiply-add."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def turn(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    """
    Return x turned by the angles, pairing dimension i with i + d/2.

    cos, signed (see `signed_sin`) must broadcast against x (..., d) as they are.
    The arithmetic is fp32 whatever the dtype of x; the result has the dtype of x.
    """
    partner = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, partner, signed).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, heads, S, d) turned by (S, d) or (B, S, d) fp32 tables."""
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return turn(x, cos, signed_sin(sin))


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k turned by the same angles; shapes as in `rotate`."""
    return rotate(q, cos, sin), rotate(k, cos, sin)
