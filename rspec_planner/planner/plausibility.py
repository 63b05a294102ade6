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
Inputs that arrive in time and in form and yet cannot be true.

Odometry that jumps or contradicts its own speed; cameras that are black, show noise, or repeat
one picture while the ego moves. A reasoning model describes such pictures as if they were real,
so no plan may come of them.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from rspec_planner.planner.observation import Observation

REASONS = ('odometry_jump', 'odometry_contradicts_speed', 'camera_black', 'camera_noise',
           'camera_frozen')

_STEP_S = 0.1
#: a step of the history may differ so far from its neighbours: 20 m/s within 0.1 s
JUMP_M = 2.0
#: the pose's speed over the last 0.3 s, and over the last 0.1 s, from the twist's, m/s
CONTRADICTION_MPS = ((3, 3.0), (1, 5.0))
#: no pixel of a black picture is brighter, of 255; night scenes have lamps
BLACK = 8
#: neighbouring pixels of white noise are apart by 1.13 (Gaussian) or 1.15 (uniform) standard
#: deviations on average; of the embedded world's pictures by at most 0.3
NOISE, NOISE_SPREAD = 0.9, 12.0
#: below this speed a picture may stay the same to the bit
MOVING_MPS = 1.0
_STRIDE = 8


def implausible(observation: Observation, check_content: bool = True) -> tuple[str, str] | None:
    """Return the reason, from REASONS, and a line about it; None for inputs that may be true."""
    return _odometry(observation) or (_content(observation) if check_content else None)


def _odometry(observation: Observation) -> tuple[str, str] | None:
    steps = np.linalg.norm(np.diff(observation.ego_poses[:, :3, 3], axis=0), axis=1)
    apart = np.abs(steps - np.median(steps))
    worst = int(np.argmax(apart))
    if apart[worst] > JUMP_M:
        return ('odometry_jump', f'odometry: {steps[worst]:.1f} m within 0.1 s, '
                f'{(len(steps) - worst) * _STEP_S:.1f} s before t0, others are '
                f'{np.median(steps):.1f} m; check the localization')
    for count, limit in CONTRADICTION_MPS:
        recent = float(steps[-count:].mean()) / _STEP_S
        if abs(recent - abs(observation.speed_mps)) > limit:
            return ('odometry_contradicts_speed', f'odometry: the pose moves with {recent:.1f} '
                    f'm/s, the twist says {observation.speed_mps:.1f} m/s; check the localization')
    return None


def _content(observation: Observation) -> tuple[str, str] | None:
    moving = abs(observation.speed_mps) > MOVING_MPS
    for name, frames in zip(observation.camera_names, observation.images):
        small = frames[:, ::_STRIDE, ::_STRIDE]
        if int(small[-1].max()) <= BLACK:
            return ('camera_black', f'camera {name}: no pixel is brighter than {BLACK} of 255; '
                    'uncover or restart it')
        roughness = _roughness(frames[-1])
        if roughness > NOISE:
            return ('camera_noise', f'camera {name}: neighbouring pixels differ by '
                    f'{roughness:.2f} standard deviations, as in noise; check its link')
        if moving and len(frames) > 1 and all(np.array_equal(small[0], other)
                                              for other in small[1:]):
            return ('camera_frozen', f'camera {name}: {len(frames)} frames are the same to the '
                    f'bit at {observation.speed_mps:.1f} m/s; restart it')
    return None


def _roughness(frame: NDArray[np.uint8]) -> float:
    """Return the mean step between neighbours in standard deviations, 0 for even pictures."""
    rows = np.ascontiguousarray(frame[::_STRIDE, :, 1])
    spread = float(cv2.meanStdDev(rows)[1].item())
    if spread <= NOISE_SPREAD:
        return 0.0
    return cv2.norm(rows[:, 1:], rows[:, :-1], cv2.NORM_L1) / rows[:, 1:].size / spread
