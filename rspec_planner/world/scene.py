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
What the renderer draws: painted ground, boxes that move, weather.

World frame: x forward at the start of the road, y left, z up; metres, radians, seconds.
Ego frame: origin at the rear-axle centre on the ground, x forward, y left (`base_link`).
The scenario side fills these; the renderer only reads them, so the two never import each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Colour = tuple[int, int, int]  # RGB, 0..255

AGENT_KINDS = (
    'car', 'van', 'truck', 'bus', 'emergency', 'cyclist', 'adult', 'child', 'dog', 'deer',
    'cone', 'barrier', 'traffic_light', 'stop_sign', 'bus_stop', 'crossing_gate',
    'tree', 'building', 'pole',
)


@dataclass(frozen=True)
class Paint:
    """One filled polygon on the ground; later paints cover earlier ones."""

    polygon: np.ndarray  # (n, 2) float64, world frame, metres
    colour: Colour
    kind: str  # 'road', 'shoulder', 'marking', 'stop_line', 'crosswalk', 'arrow', 'path', ...


@dataclass
class AgentState:
    """Everything visible about one agent or object at one instant."""

    kind: str  # one of AGENT_KINDS
    x: float  # centre of the footprint, world frame, metres
    y: float
    yaw: float  # radians; a traffic light or sign faces along -x of its own frame
    length: float
    width: float
    height: float
    colour: Colour = (120, 120, 120)
    speed: float = 0.0  # m/s, along yaw
    brake: bool = False  # brake lamps lit
    indicator: str = ''  # '', 'left', 'right', 'hazard'
    lamp: str = ''  # traffic_light: 'red', 'amber', 'green'; emergency: 'flash'; gate: 'flash'
    gait: float = 0.0  # 0 standing, otherwise step frequency in Hz (limbs swing)
    steer: float = 0.0  # front wheel angle, radians (visible on bus and car)
    open: float = 1.0  # crossing_gate: 0 arm down, 1 arm up
    agent_id: int = 0


@dataclass(frozen=True)
class Weather:
    """Light and air, constant over a clip."""

    light: float = 1.0  # exposure factor, 0.55..1.1 by day
    fog: float = 0.0  # extinction, 1/m
    rain: float = 0.0  # 0 dry .. 1 heavy: streaks, darker and shinier road
    night: bool = False  # dark ambient, headlight cone, emissive lamps


@dataclass
class Scene:
    """One instant of the world, complete for rendering."""

    time_s: float
    ego_x: float
    ego_y: float
    ego_yaw: float
    paints: list[Paint] = field(default_factory=list)
    agents: list[AgentState] = field(default_factory=list)
    weather: Weather = field(default_factory=Weather)
    noise_seed: int = 0  # per scene; with time_s it fixes the sensor noise
