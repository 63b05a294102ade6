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

A family is a function Draw -> Blueprint. `FAMILIES` are trained: those of `CATALOGUE`, of
`TRAINED_DOUBLES` (two causes at once) and the `FREE_ROAD` between situations. Those of `OFF_SHELF`
and `DOUBLES` (other pairs of causes) only occur in the off-shelf test.
"""

from __future__ import annotations

from collections.abc import Callable

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.scenarios import (
    doubles,
    doubles_more,
    free,
    junctions,
    offshelf,
    roadside,
    traffic,
)
from rspec_planner.world.scenarios.base import Blueprint, DAY_ONLY, Draw, Rejected, Stage, STRAIGHT

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
#: both causes are trained alone too; these teach which one is the more urgent
TRAINED_DOUBLES: dict[str, Family] = {
    'person_and_sign': doubles.person_and_sign,
    'person_and_green': doubles.person_and_green,
    'parked_and_cut_in': doubles.parked_and_cut_in,
    'cones_and_lead_brake': doubles.cones_and_lead_brake,
    'cyclist_and_cut_in': doubles_more.cyclist_and_cut_in,
    'green_and_lead_brake': doubles_more.green_and_lead_brake,
    'parked_and_person': doubles_more.parked_and_person,
}
#: what lies between two situations; a drive shows it without asking for it
FREE_ROAD: dict[str, Family] = {'free_road': free.free_road}
FAMILIES = (*CATALOGUE, *TRAINED_DOUBLES, *FREE_ROAD)
OFF_SHELF: dict[str, Family] = {
    'emergency': offshelf.emergency,
    'level_crossing': offshelf.level_crossing,
    'animal': offshelf.animal,
    'narrowing': offshelf.narrowing,
    'roundabout': offshelf.roundabout,
}
DOUBLES: dict[str, Family] = {
    'cones_and_cut_in': offshelf.cones_and_cut_in,
    'person_and_red': offshelf.person_and_red,
}
__all__ = ['Blueprint', 'CATALOGUE', 'DAY_ONLY', 'DOUBLES', 'Draw', 'draw_blueprint', 'FAMILIES',
           'Family', 'FREE_ROAD', 'OFF_SHELF', 'Rejected', 'Stage', 'STRAIGHT', 'TRAINED_DOUBLES']


def draw_blueprint(name: str, seed: int, attempt: int, want_held_out: bool = False) -> Blueprint:
    """
    Return one drawn scenario of a family.

    Raises ConfigurationError for an unknown family and Rejected when its numbers do not fit.
    """
    known = {**CATALOGUE, **TRAINED_DOUBLES, **FREE_ROAD, **OFF_SHELF, **DOUBLES}
    family = known.get(name)
    if family is None:
        raise ConfigurationError(f'family {name!r} is unknown; use one of '
                                 f'{", ".join(known)}')
    return family(Draw(name, seed, attempt, want_held_out))
