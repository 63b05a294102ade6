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
How every agent kind looks: an `AgentState` at a time becomes coloured, convex parts.

Lamps and signs are drawn somewhat larger than life, because the cameras are small. A traffic
light, sign or gate faces along -x of its own frame. A crossing gate stands at the -y end of its
footprint and its arm spans the width.
"""

from __future__ import annotations

from functools import lru_cache

from rspec_planner.errors import ConfigurationError
from rspec_planner.world import furniture, living, vehicles
from rspec_planner.world.look import Look, look_of
from rspec_planner.world.scene import AGENT_KINDS, AgentState
from rspec_planner.world.shapes import Part

_SHAPES = {
    'car': vehicles.car, 'van': vehicles.van, 'truck': vehicles.truck, 'bus': vehicles.bus,
    'emergency': vehicles.emergency, 'cyclist': living.cyclist, 'adult': living.adult,
    'child': living.child, 'dog': living.dog, 'deer': living.deer, 'cone': furniture.cone,
    'barrier': furniture.barrier, 'traffic_light': furniture.traffic_light,
    'stop_sign': furniture.stop_sign, 'bus_stop': furniture.bus_stop,
    'crossing_gate': furniture.crossing_gate, 'tree': furniture.tree,
    'building': furniture.building, 'pole': furniture.pole,
}


def parts_of(agent: AgentState, time_s: float, night: bool) -> tuple[Part, ...]:
    """
    Return the parts of `agent` in its own frame; equal looks return the same object.

    Raises ConfigurationError for a kind that is not in `AGENT_KINDS`.
    """
    return _parts(look_of(agent, time_s, night))


@lru_cache(maxsize=8192)
def _parts(look: Look) -> tuple[Part, ...]:
    """Build the shape of a look."""
    shape = _SHAPES.get(look.kind)
    if shape is None:
        raise ConfigurationError(
            f'agent kind {look.kind!r} is unknown; use one of {", ".join(AGENT_KINDS)}')
    return shape(look)
