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
Motion: the ego as an exact unicycle, other agents as scripts over road coordinates.

Inputs are constant over each 0.1 s step, so a recorded future has an exact form in
acceleration and curvature. Nothing here draws random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
import math

import numpy as np

from rspec_planner.world.road import Path
from rspec_planner.world.scene import AGENT_KINDS, AgentState, Colour

DT = 0.1  # seconds
EGO_LENGTH, EGO_WIDTH = 4.5, 1.85  # metres
EGO_CENTRE = 1.35  # centre of the box ahead of the rear axle, metres
EGO_FRONT = EGO_CENTRE + EGO_LENGTH / 2.0  # front bumper ahead of the rear axle

#: length, width, height of each kind, metres
SIZES: dict[str, tuple[float, float, float]] = {
    'car': (4.5, 1.85, 1.5), 'van': (5.4, 2.0, 2.3), 'truck': (8.0, 2.4, 3.3),
    'bus': (10.5, 2.5, 3.1), 'emergency': (5.8, 2.1, 2.5), 'cyclist': (1.8, 0.6, 1.75),
    'adult': (0.4, 0.55, 1.78), 'child': (0.35, 0.42, 1.15), 'dog': (0.95, 0.32, 0.65),
    'deer': (1.7, 0.55, 1.5), 'cone': (0.45, 0.45, 0.75), 'barrier': (0.3, 2.4, 1.0),
    'traffic_light': (0.4, 0.4, 3.6), 'stop_sign': (0.1, 0.85, 2.5),
    'bus_stop': (1.4, 3.0, 2.6), 'crossing_gate': (0.4, 5.0, 3.0), 'pole': (0.15, 0.15, 4.0),
    'tree': (2.6, 2.6, 6.6), 'building': (10.0, 8.0, 8.0),
}
#: kinds that the ego may not touch
SOLID = frozenset(('car', 'van', 'truck', 'bus', 'emergency', 'cyclist', 'adult', 'child', 'dog',
                   'deer', 'cone', 'barrier'))


@dataclass(frozen=True)
class EgoState:
    """The ego at one instant; acceleration and curvature hold until the next step."""

    x: float  # rear axle, world frame, metres
    y: float
    yaw: float  # radians
    speed: float  # m/s, never negative
    acceleration: float = 0.0  # m/s^2
    curvature: float = 0.0  # 1/m, left positive

    def at(self, dt: float) -> EgoState:
        """Return the state `dt` seconds later under the same inputs (dt <= one step)."""
        speed = max(0.0, self.speed + self.acceleration * dt)
        yaw = self.yaw + self.curvature * (self.speed * dt + 0.5 * self.acceleration * dt * dt)
        return EgoState(
            self.x + 0.5 * dt * (self.speed * math.cos(self.yaw) + speed * math.cos(yaw)),
            self.y + 0.5 * dt * (self.speed * math.sin(self.yaw) + speed * math.sin(yaw)),
            yaw, speed, self.acceleration, self.curvature)

    def driven(self, acceleration: float, curvature: float) -> EgoState:
        """Return the same pose with new inputs; braking ends at standstill within the step."""
        return EgoState(self.x, self.y, self.yaw, self.speed,
                        max(acceleration, -self.speed / DT), curvature)


class Actor:
    """
    One agent or object on a path.

    `script(actor, tau)` is called on entering each instant and sets speed, d and lamps there;
    the station follows by the mean of old and new speed.
    """

    __slots__ = ('kind', 'path', 's', 'd', 'speed', 'reverse', 'turned', 'size', 'colour',
                 'brake', 'indicator', 'lamp', 'gait', 'steer', 'open', 'visible', 'drift',
                 'script', 'agent_id', 'crossing')

    def __init__(self, kind: str, path: Path, s: float, d: float, *, speed: float = 0.0,
                 reverse: bool = False, colour: Colour = (120, 120, 120),
                 size: tuple[float, float, float] | None = None, turned: float = 0.0,
                 script: Callable[[Actor, float], None] | None = None, lamp: str = '',
                 indicator: str = '', brake: bool = False) -> None:
        """Place the actor; `turned` is added to the heading, `reverse` faces it against s."""
        self.kind, self.path, self.s, self.d, self.speed = kind, path, s, d, speed
        self.reverse, self.turned, self.colour = reverse, turned, colour
        self.size = size or SIZES[kind]
        self.brake, self.indicator, self.lamp = brake, indicator, lamp
        self.gait, self.steer, self.open, self.visible = 0.0, 0.0, 1.0, True
        self.drift = 0.0  # d per metre of station, turns the body; set by scripts
        self.crossing = False  # a person on or before the ego's lane
        self.script, self.agent_id = script, 0

    def advance(self, tau: float) -> None:
        """Move to the instant tau, one step after the last one."""
        before = self.speed
        if self.script is not None:
            self.script(self, tau)
        moved = 0.5 * (before + self.speed) * DT
        self.s += -moved if self.reverse else moved

    @property
    def rear(self) -> float:
        """Return the station of the end nearer to the start of the path."""
        return self.s - self.size[0] / 2.0

    def pose(self) -> tuple[float, float, float]:
        """Return x, y and yaw in the world frame."""
        x, y, heading = self.path.pose(self.s, self.d)
        heading += self.turned + math.atan(self.drift)
        return x, y, heading + math.pi if self.reverse else heading

    def state(self) -> AgentState:
        """Return everything visible at this instant."""
        x, y, yaw = self.pose()
        return AgentState(
            self.kind, x, y, yaw, *self.size, colour=self.colour, speed=self.speed,
            brake=self.brake, indicator=self.indicator, lamp=self.lamp, gait=self.gait,
            steer=self.steer, open=self.open, agent_id=self.agent_id)


def idm(speed: float, desired: float, gap: float, lead_speed: float) -> float:
    """Return the acceleration of the intelligent driver model (T 1.2 s, s0 2 m), m/s^2."""
    wish = 2.0 + max(0.0, 1.2 * speed + speed * (speed - lead_speed) / (2 * math.sqrt(1.4 * 2.2)))
    free = 1.0 - (speed / max(desired, 0.1)) ** 4
    return 1.4 * (free - (wish / max(gap, 0.3)) ** 2)


def follow_ego(actor: Actor, gap: float, ego_speed: float) -> None:
    """Drive the car behind by IDM to the ego; `gap` is bumper to bumper, metres."""
    acceleration = min(max(idm(actor.speed, 15.0, gap, ego_speed), -6.0), 1.4)
    actor.speed = max(0.0, actor.speed + acceleration * DT)


def agent_rows(actors: Iterable[Actor]) -> list[tuple[float, ...]]:
    """Return x, y, yaw, length, width, speed, kind index of each actor, world frame."""
    return [(*a.pose(), a.size[0], a.size[1], a.speed, float(AGENT_KINDS.index(a.kind)))
            for a in actors]


def boxes_overlap(x: np.ndarray, y: np.ndarray, yaw: np.ndarray, agents: np.ndarray
                  ) -> np.ndarray:
    """
    Tell where the ego box touches an agent box, (T, n) bool, by separating axes.

    `x`, `y`, `yaw` (T,) are rear-axle poses, `agents` (T, n, >=5) in the same frame.
    """
    half = np.array([EGO_LENGTH / 2.0, EGO_WIDTH / 2.0])
    centre = np.stack([x + EGO_CENTRE * np.cos(yaw), y + EGO_CENTRE * np.sin(yaw)], axis=-1)
    offset = agents[..., :2] - centre[:, None]
    other = agents[..., 3:5] / 2.0
    turn = agents[..., 2] - yaw[:, None]
    cosine, sine = np.abs(np.cos(turn)), np.abs(np.sin(turn))
    touch = np.ones(turn.shape, bool)
    for angle, mine, theirs in ((yaw[:, None], half, other), (agents[..., 2], other, half)):
        along = offset[..., 0] * np.cos(angle) + offset[..., 1] * np.sin(angle)
        across = -offset[..., 0] * np.sin(angle) + offset[..., 1] * np.cos(angle)
        length, width = theirs[..., 0], theirs[..., 1]
        touch &= np.abs(along) < mine[..., 0] + length * cosine + width * sine
        touch &= np.abs(across) < mine[..., 1] + length * sine + width * cosine
    return touch


def ego_corners(x: np.ndarray, y: np.ndarray, yaw: np.ndarray) -> np.ndarray:
    """Return the corners of the ego box, (T, 4, 2), for rear-axle poses (T,)."""
    along = EGO_CENTRE + np.array([1, 1, -1, -1]) * EGO_LENGTH / 2.0
    across = np.array([1, -1, -1, 1]) * EGO_WIDTH / 2.0
    cosine, sine = np.cos(yaw)[:, None], np.sin(yaw)[:, None]
    return np.stack([x[:, None] + along * cosine - across * sine,
                     y[:, None] + along * sine + across * cosine], axis=-1)
