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
"""Contact sheets of failed closed-loop runs: camera and plan view at six instants, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from rspec_planner.evaluate.closed_world import ClosedRun, Outcome
from rspec_planner.world.simulation import EGO_CENTRE, EGO_LENGTH, EGO_WIDTH

_COLUMNS = 6
_VIEW = (300, 240)  # width, height of the plan view, pixels
_SCALE = 5.0  # pixels per metre
_BEHIND_M = 8.0


def _pixels(points: np.ndarray) -> np.ndarray:
    """Return pixels (n, 2) int32 of ego-frame metres: forward is right, left is up."""
    return np.stack([(points[:, 0] + _BEHIND_M) * _SCALE,
                     _VIEW[1] / 2 - points[:, 1] * _SCALE], axis=1).round().astype(np.int32)


def _box(x: float, y: float, yaw: float, length: float, width: float) -> np.ndarray:
    corners = np.array([(1, 1), (1, -1), (-1, -1), (-1, 1)]) * (length / 2, width / 2)
    turn = np.array([[np.cos(yaw), np.sin(yaw)], [-np.sin(yaw), np.cos(yaw)]])
    return _pixels(corners @ turn + (x, y))


def _plan_view(agents: np.ndarray, polygons: Sequence[np.ndarray], path: np.ndarray
               ) -> np.ndarray:
    """Return the ground from above, BGR: road grey, ego green, its drive yellow."""
    canvas = np.full((_VIEW[1], _VIEW[0], 3), (60, 90, 60), np.uint8)
    for polygon in polygons:
        cv2.fillPoly(canvas, [_pixels(polygon)], (95, 95, 95))
    cv2.polylines(canvas, [_pixels(path)], False, (60, 220, 250), 1, cv2.LINE_AA)
    for agent in agents:
        cv2.fillPoly(canvas, [_box(*agent[:5])], (80, 80, 235))
    cv2.fillPoly(canvas, [_box(EGO_CENTRE, 0.0, 0.0, EGO_LENGTH, EGO_WIDTH)], (90, 220, 90))
    return canvas


def _column(run: ClosedRun, path: np.ndarray, pose: tuple[float, ...], text: str) -> np.ndarray:
    images, agents, polygons = run.snapshot()
    front = cv2.resize(cv2.cvtColor(images[1], cv2.COLOR_RGB2BGR), (_VIEW[0], 180))
    x, y, yaw = pose[:3]
    turn = np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]])
    column = np.concatenate([front, _plan_view(agents, polygons, (path[:, :2] - (x, y)) @ turn)])
    cv2.putText(column, text, (6, 16), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (255, 255, 255), 1,
                cv2.LINE_AA)
    return column


def reasons(outcome: Outcome) -> str:
    """Return what went wrong in words."""
    fault = '' if outcome.at_fault else ', struck'
    parts = [f'collision with {outcome.collision}{fault}'] if outcome.collision else []
    parts += [name.replace('_', ' ') for name in ('off_road', 'red_light', 'stop_line')
              if getattr(outcome, name)]
    return ', '.join(parts)


def contact_sheet(outcome: Outcome, width: int, height: int) -> np.ndarray:
    """Return the picture of one run, BGR: the recorded drive played again."""
    run = ClosedRun(outcome.spec, width, height, period=1)
    path, last = np.array(outcome.path), len(outcome.path) - 1
    shown = sorted({round(last * share / (_COLUMNS - 1)) for share in range(_COLUMNS)})
    columns = []
    for tick in range(last + 1):
        run.next_plan = tick + 1  # render every tick
        if tick:
            run.replay(outcome.path[tick])
        if tick in shown:
            speed = outcome.path[tick][3]
            columns.append(_column(run, path, outcome.path[tick],
                                   f't0+{tick / 10:.1f} s  {speed:.1f} m/s'))
    sheet = np.concatenate(columns, axis=1)
    band = np.full((44, sheet.shape[1], 3), 25, np.uint8)
    spec = outcome.spec
    title = (f'{spec.split} {spec.variant} {spec.family} {spec.index} '
             f'{"event" if spec.event else "twin"}: {reasons(outcome) or "no failure"}')
    said = outcome.texts[-1] if outcome.texts else ''
    for row, text in enumerate((title, said)):
        cv2.putText(band, text, (8, 17 + 20 * row), cv2.FONT_HERSHEY_SIMPLEX, 0.5,
                    (255, 255, 255), 1, cv2.LINE_AA)
    return np.concatenate([band, sheet])


def write_sheets(outcomes: Sequence[Outcome], folder: Path, width: int, height: int,
                 most: int = 12) -> list[str]:
    """Write a PNG of each failed run, at most so many; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for outcome in [o for o in outcomes if o.failed][:most]:
        spec = outcome.spec
        name = '_'.join(filter(None, (spec.split, spec.variant, spec.family, str(spec.index),
                                      'event' if spec.event else 'twin')))
        path = folder / f'{name}.png'
        cv2.imwrite(str(path), contact_sheet(outcome, width, height))
        written.append(str(path))
    return written
