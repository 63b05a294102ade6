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
"""A drive without a renderer, for tests of the processes around the node; run it as a program."""

from __future__ import annotations

from dataclasses import dataclass
import math
import sys

import numpy as np


@dataclass(frozen=True)
class FakeEgo:
    """Constant speed and curvature from the origin."""

    x: float = 0.0
    y: float = 0.0
    yaw: float = 0.0
    speed: float = 8.0
    acceleration: float = 0.0
    curvature: float = 0.01

    def at(self, dt: float) -> FakeEgo:
        """Return the exact state `dt` seconds later."""
        turn, radius = self.speed * self.curvature * dt, 1.0 / self.curvature
        return FakeEgo(self.x + radius * (math.sin(self.yaw + turn) - math.sin(self.yaw)),
                       self.y - radius * (math.cos(self.yaw + turn) - math.cos(self.yaw)),
                       self.yaw + turn, self.speed, 0.0, self.curvature)


@dataclass(frozen=True)
class FakeFrame:
    """What `Drive.frame` returns."""

    time_s: float
    images: np.ndarray
    ego: FakeEgo
    family: str = 'fake'
    decision: object = None
    reasoning: str = 'cruising left, keep speed because the road is free.'
    future: object = None
    navigation_text: str = ''


class FakeDrive:
    """The interface of `world.drive.Drive`; frame k is painted with the grey level k."""

    def __init__(self, height: int = 192, width: int = 384) -> None:
        self._shape = (4, height, width, 3)
        self._index, self._ego = 0, FakeEgo()

    def step(self) -> None:
        """Advance 0.1 s."""
        self._index += 1
        self._ego = self._ego.at(0.1)

    def frame(self) -> FakeFrame:
        """Return the present instant."""
        images = np.full(self._shape, self._index % 256, np.uint8)
        return FakeFrame(self._index * 0.1, images, self._ego)


def main() -> int:
    """Publish the fake world with the options of the real one."""
    from rspec_planner.live.world_publisher import main as publish
    return publish(make_drive=lambda families, seed, rig: FakeDrive())


if __name__ == '__main__':
    sys.exit(main())
