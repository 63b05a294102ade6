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
The line of a manoeuvre, laid anew through where the ego is.

A scenario's shifts begin where the ego was at t0. Who looks in mid-manoeuvre cannot see that
place: an ego beside its line looks like one on it, a little earlier or later. So the label of a
drive clip goes on from the present place at the manoeuvre's own pace, faster where the obstacle
leaves less room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rspec_planner.world.expert import Maneuver, quintic, Shift
from rspec_planner.world.simulation import Actor, EGO_FRONT, EGO_WIDTH, SOLID

_BESIDE_M = 0.45  # to an obstacle when the front reaches it; the finished shift keeps 0.55 to 0.8
_SHORTEST_M, _SHORTEST_S = 6.0, 1.3  # of a whole shift
_DONE = 0.98  # of a shift: the rest is the business of steering


def progress_of(share: float) -> float:
    """Return u in [0, 1] at which the minimum-jerk step has the value `share`."""
    if share <= 0.0 or share >= 1.0:
        return min(max(share, 0.0), 1.0)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if quintic(middle)[0] < share else (low, middle)
    return 0.5 * (low + high)


def anchored(maneuver: Maneuver, s: float, d: float, speed: float,
             actors: Sequence[Actor]) -> Maneuver:
    """
    Return the manoeuvre with the shift under way laid through station s and place d.

    Shifts that lie ahead stay where they are: an obstacle in view places them.
    """
    begun = [shift for shift in maneuver.shifts if shift.start < s]
    ahead = [shift for shift in maneuver.shifts if shift.start >= s]
    if not begun:
        return maneuver
    shift, origin = begun[-1], begun[-2].target if len(begun) > 1 else 0.0
    rise = shift.target - origin
    if abs(rise) < 1e-6:
        return maneuver
    done = progress_of((d - origin) / rise)
    length = shift.length
    if abs(shift.target) > abs(origin):
        length = min(length, _room(shift.target, rise, origin, done, s, speed, actors))
    length = max(length, _SHORTEST_M, _SHORTEST_S * speed)
    laid = [Shift(s - done * length, length, shift.target)]
    if origin:
        laid.insert(0, Shift(s - done * length - 2.0, 1.0, origin))
    return replace(maneuver, shifts=(*laid, *ahead))


def _room(target: float, rise: float, origin: float, done: float, s: float, speed: float,
          actors: Sequence[Actor]) -> float:
    """Return the length at which the shift clears the first obstacle when the front is there."""
    least = float('inf')
    for actor in actors:
        gap = actor.rear - EGO_FRONT - s
        if actor.kind not in SOLID or actor.reverse or gap < 0.0 or actor.speed >= speed:
            continue
        apart = 0.5 * (actor.size[1] + EGO_WIDTH) + _BESIDE_M
        if abs(target - actor.d) < apart - 0.3 or (target > 0.0) == (actor.d > target):
            continue  # on the other side, or not passed by this shift
        needed = actor.d + apart if target > 0.0 else actor.d - apart
        clear = progress_of(min((needed - origin) / rise, _DONE))
        reached = gap * speed / (speed - actor.speed)
        if clear > done:
            least = min(least, reached / (clear - done))
    return least
