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
"""A drive without a world, for tests of bags: 10 m/s straight on, numbered pictures."""

from dataclasses import dataclass, replace
import math

import numpy as np

from rspec_planner.world.rig import Rig

RIG = Rig(width=64, height=32)


@dataclass
class Ego:
    x: float = 0.0
    y: float = 0.0
    yaw: float = 0.1
    speed: float = 10.0
    acceleration: float = 0.0
    curvature: float = 0.0

    def at(self, dt):
        return replace(self, x=self.x + self.speed * dt * math.cos(self.yaw),
                       y=self.y + self.speed * dt * math.sin(self.yaw))


@dataclass
class Frame:
    time_s: float
    images: np.ndarray
    ego: Ego
    family: str
    reasoning: str
    navigation_text: str = ''


class StraightDrive:
    """A drive at 10 m/s whose pictures are filled with their frame and camera number."""

    def __init__(self):
        self.index = 0

    def frame(self):
        images = np.zeros((4, 32, 64, 3), np.uint8)
        for camera in range(4):
            images[camera] = (self.index, camera * 50, 200)
        family = ('lead_brake', '', 'red_light', 'red_light')[min(self.index // 3, 3)]
        reasoning = f'reason {self.index}' if family else ''
        return Frame(self.index * 0.1, images, self.ego(), family, reasoning,
                     'Turn left' if self.index >= 20 else '')

    def ego(self):
        return Ego().at(self.index * 0.1)

    def step(self):
        self.index += 1
