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
"""What can be seen of an agent at one instant, small enough to serve as a cache key."""

from __future__ import annotations

from dataclasses import dataclass
import math

from rspec_planner.world.scene import AgentState, Colour

BLINK_HZ = 1.5  # indicators
BLINK_DUTY = 0.6  # share lit; four frames at 10 Hz then always catch a lit one
FLASH_HZ = 2.0  # emergency and level-crossing lamps change sides twice per period
PHASES = 24  # steps of one gait cycle
STEER_STEP = 0.02  # radians


@dataclass(frozen=True)
class Look:
    """Sizes in metres, colours RGB; agents with equal looks share their shape."""

    kind: str
    length: float
    width: float
    height: float
    colour: Colour
    brake: bool
    left: bool  # indicator lit now
    right: bool
    lamp: str  # traffic_light: colour lit; emergency and gate: 'a' or 'b', the side lit now
    swing: float  # -1 .. 1, the limbs' position in the gait cycle
    running: bool
    steer: float
    open: float
    night: bool


def look_of(agent: AgentState, time_s: float, night: bool) -> Look:
    """Return what `agent` shows at `time_s`."""
    blink = (time_s * BLINK_HZ + 0.37 * (agent.agent_id % 7)) % 1.0 < BLINK_DUTY
    lamp = agent.lamp
    if lamp == 'flash':
        lamp = 'a' if (time_s * FLASH_HZ) % 1.0 < 0.5 else 'b'
    swing = 0.0
    if agent.gait > 0.0:
        phase = round((time_s * agent.gait + 0.21 * (agent.agent_id % 5)) * PHASES) % PHASES
        swing = math.sin(2.0 * math.pi * phase / PHASES)
    return Look(
        agent.kind, agent.length, agent.width, agent.height, agent.colour, agent.brake,
        blink and agent.indicator in ('left', 'hazard'),
        blink and agent.indicator in ('right', 'hazard'),
        lamp, swing, agent.gait > 2.2, round(agent.steer / STEER_STEP) * STEER_STEP,
        round(agent.open * 50) / 50, night)
