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
The scenario catalogue: every family by its name.

A family is a function Draw -> Blueprint. `FAMILIES` are trained; `OFF_SHELF_FAMILIES` and
`DOUBLE_FAMILIES` only occur in the off-shelf test.
"""

from __future__ import annotations

from collections.abc import Callable

from rspec_planner.world.scenarios import junctions, roadside, traffic
from rspec_planner.world.scenarios.base import Blueprint, Draw, Rejected, Stage

Family = Callable[[Draw], Blueprint]

CATALOGUE: dict[str, Family] = {
    'lead_brake': traffic.lead_brake,
    'lead_departs': traffic.lead_departs,
    'red_light': junctions.red_light,
    'light_change': junctions.light_change,
    'stop_sign': junctions.stop_sign,
    'crosswalk': roadside.crosswalk_person,
    'dart_out': roadside.dart_out,
    'cut_in': traffic.cut_in,
    'cyclist': roadside.cyclist,
    'parked': roadside.parked,
    'construction': roadside.construction,
    'blocked_lane': traffic.blocked_lane,
    'left_turn': junctions.left_turn,
    'right_turn': junctions.right_turn,
    'curve': junctions.curve,
    'bus_stop': traffic.bus_stop,
}
FAMILIES = tuple(CATALOGUE)
#: families that need a straight road at t0
STRAIGHT = frozenset(('lead_departs', 'light_change', 'left_turn', 'right_turn',
                      'level_crossing', 'roundabout', 'emergency', 'narrowing'))

__all__ = ['Blueprint', 'CATALOGUE', 'Draw', 'FAMILIES', 'Family', 'Rejected', 'Stage',
           'STRAIGHT']
