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
"""A drive without end: families of the catalogue chained along one road."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rspec_planner.world.clip import Decision
from rspec_planner.world.rig import Rig
from rspec_planner.world.scene import Weather
from rspec_planner.world.simulation import EgoState

__all__ = ['Drive', 'DriveFrame', 'EgoState']


@dataclass(frozen=True)
class DriveFrame:
    """What there is at one instant of a drive."""

    time_s: float
    images: np.ndarray | None  # (4, H, W, 3) uint8 RGB in rig order, None without rendering
    ego: EgoState  # rear axle, world frame; ego.at(dt) interpolates within the step
    family: str  # of the active script, '' on free road
    decision: Decision | None
    reasoning: str  # the expert's CoC while a script is active, else ''
    future: np.ndarray | None  # (64, 4) float32 x, y, z, yaw in the ego frame, or None
    navigation_text: str = ''


class Drive:
    """Chained scenarios: `frame()` describes now, `step()` moves on by 0.1 s."""

    def __init__(self, families: Sequence[str], seed: int, *, rig: Rig | None = None,
                 render: bool = True, weather: Weather | None = None) -> None:
        """Plan a route that repeats `families`; raises ConfigurationError if one is unknown."""
        raise NotImplementedError

    def step(self) -> None:
        """Advance the world by 0.1 s."""
        raise NotImplementedError

    def frame(self) -> DriveFrame:
        """Return everything about the present instant."""
        raise NotImplementedError
