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
What the device-resident planner has to reach on one H200 at the R1 shapes, and what was measured.

Every goal is read from the file of the step that measures it; a goal whose step has not run says
so. Of several ways the loop that waits once a frame counts, or the one that ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import json
from pathlib import Path
from typing import Any

Found = Mapping[str, Mapping[str, Any]]
#: frames without a difference that count as proof
FRAMES_EXACT, FRAMES_REPEATED = 500, 1000


@dataclass(frozen=True)
class Goal:
    """One line of the table."""

    key: str
    steps: tuple[str, ...]  # files that may hold it, the best first
    limit: float
    at_most: bool
    read: Callable[[Mapping[str, Any]], float | None]
    frames: int = 0  # so many frames must have run


def _way(values: Mapping[str, float], name: str) -> float | None:
    """Return the value of 'name, while', else that of the first loop that ran it."""
    if f'{name}, while' in values:
        return values[f'{name}, while']
    return next((value for key, value in values.items()
                 if key == name or key.startswith(f'{name}, ')), None)


def _of(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda found: found.get(key)


def _ratio(key: str, name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda found: _way(found.get(key) or {}, name)


def _median(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda found: (found.get(key) or {}).get('p50')


_FRAMES, _SCALE = ('frame1000', 'frame'), ('frame1000',)
GOALS = (
    Goal('verify16_over_floor', ('decode',), 1.25, True, _of('verify_over_floor')),
    Goal('c', ('decode',), 0.08, True, _of('c')),
    Goal('reasoning_speedup_vs_eager', ('decode',), 30.0, False,
         _ratio('reasoning_speedup_vs_eager', 'L=4.6')),
    Goal('reasoning_speedup_vs_graphed_ar', ('decode',), 4.4, False,
         _ratio('reasoning_speedup_vs_graphed_ar', 'trace')),
    Goal('prefill_3006_ms', ('decode',), 65.0, True, _median('prefill_ms')),
    Goal('flow10_ms', ('decode',), 14.0, True, _of('flow_ms')),
    Goal('frame_ms.p99', _FRAMES, 100.0, True, _of('p99')),
    Goal('frame_speedup_vs_original', _FRAMES, 12.0, False,
         _ratio('frame_speedup_vs_original', 'L=4.6')),
    Goal('frame_fp8_ms.p99', ('frame_fp8',), 65.0, True, _of('p99')),
    Goal('host_syncs_per_frame', _FRAMES, 1.0, True, _of('host_syncs_per_frame')),
    Goal('allocations_after_warmup', _FRAMES, 0.0, True, _of('allocations_after_warmup')),
    Goal('token_mismatches', _SCALE, 0.0, True, _of('token_mismatches'), FRAMES_EXACT),
    Goal('nondeterministic_frames', _SCALE, 0.0, True, _of('nondeterministic_frames'),
         FRAMES_REPEATED),
)


def read_steps(folder: Path, profile: str, device: str) -> dict[str, dict[str, Any]]:
    """Return what the step files of a folder hold, as far as they are of a profile and device."""
    found = {}
    for path in sorted(folder.glob('*.json')):
        try:
            step = json.loads(path.read_text(encoding='utf-8'))
        except (OSError, ValueError):
            continue
        if isinstance(step, dict) and (step.get('profile'), step.get('device')) == (
                profile, device):
            found[path.stem] = step
    return found


def judge(goal: Goal, found: Found) -> dict[str, Any]:
    """Return a goal with its value, the step that measured it, and whether it was met."""
    sign = '<=' if goal.at_most else '>='
    line: dict[str, Any] = {'goal': f'{sign} {goal.limit:g}', 'value': None, 'met': None,
                            'step': None}
    for step in goal.steps:
        value = goal.read(found.get(step, {}))
        if value is None:
            continue
        frames = int(found[step].get('frames', 0))
        reached = value <= goal.limit if goal.at_most else value >= goal.limit
        line.update(value=round(float(value), 4), step=step, frames=frames, met=reached)
        if reached and frames < goal.frames:
            line['met'] = None
            line['why'] = f'{frames} frames ran, {goal.frames} are needed'
        return line
    line['why'] = f'not measured: run {goal.steps[0]}'
    return line


def goal_table(folder: Path, profile: str, device: str) -> dict[str, Any]:
    """Return every goal by key; met is None where nothing was measured."""
    found = read_steps(folder, profile, device)
    return {goal.key: judge(goal, found) for goal in GOALS}


def lines(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table for people."""
    word = {True: 'met', False: 'missed', None: 'open'}
    return [f'{key:32} {line["goal"]:>8}  {line["value"]!s:>10}  {word[line["met"]]}'
            for key, line in table.items()]
