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
"""One recorded clip of the embedded world: what a planner sees, and what the expert did."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

#: kinds of CoC tokens, for routing analysis (`Clip.token_kind`)
ROUTINE_HISTORY, ROUTINE_PHRASE, DELIBERATIVE, STOP = 0, 1, 2, 3


@dataclass(frozen=True)
class ClipSpec:
    """The seed of a clip. Two specs that differ only in `event` are twins."""

    split: str  # 'train', 'val', 'on-shelf', 'off-shelf', 'extra'
    family: str  # for example 'lead_brake'
    index: int  # within (split, family); seed = blake2(split, family, index)
    event: bool  # True: the causal event happens; False: its harmless twin
    variant: str = ''  # off-shelf part: '', 'combination', 'double', 'family', 'rig'
    drive: int = 0  # above 0: shown later, in mid-manoeuvre; the number seeds how, see `onward`

    @property
    def pair_id(self) -> str:
        """Return the name that both twins share."""
        drive = f'/drive{self.drive}' if self.drive else ''
        return f'{self.split}/{self.family}/{self.index}/{self.variant}{drive}'


@dataclass(frozen=True)
class Decision:
    """What the expert does and why; text and trajectory are both written from it."""

    action: str  # for example 'brake', 'follow', 'nudge_left'
    cause: str  # for example 'lead_braking', 'lead_driving'
    attributes: dict[str, str] = field(default_factory=dict)  # colour, vehicle, side, distance


@dataclass(frozen=True)
class Clip:
    """A clip at t0, in the ego frame at t0 (rear axle, x forward, y left, yaw left positive)."""

    spec: ClipSpec
    t0_ns: int
    images: np.ndarray | None  # (4, 4, H, W, 3) uint8 RGB, camera-major, t0-0.3 .. t0
    history: np.ndarray  # (16, 4) float32: x, y, z, yaw at t0-1.5 .. t0, step 0.1 s
    speed: float  # m/s at t0
    future: np.ndarray  # (64, 4) float32: x, y, z, yaw at t0+0.1 .. t0+6.4
    speeds: np.ndarray  # (64,) float32, m/s
    actions: np.ndarray  # (64, 2) float32: acceleration m/s^2, curvature 1/m
    reasoning: str  # CoC text, lower case words, e.g. 'cruising straight, brake behind ...'
    token_kind: np.ndarray  # (n,) uint8 over words and punctuation, then one STOP
    decision: Decision
    navigation_text: str  # '' or the command, e.g. 'Turn left at the junction'
    agents: np.ndarray  # (80, n, 7) float32: x, y, yaw, length, width, speed, kind index
    stop_line_x: float | None  # metres ahead of the ego rear axle at t0, along the lane
    paints_polygons: list[np.ndarray] = field(default_factory=list)  # drivable area, ego frame
