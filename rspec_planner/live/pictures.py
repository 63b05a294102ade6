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
One picture of one plan, understood at a glance: cameras, trajectory, bird's-eye view, reasoning.

ROS-free, deterministic, 1600 x 900. The trajectory is a band on the ground, coloured by speed;
the reasoning is written with its decision in amber and its cause in blue. Nothing is drawn that
the planner did not see or say, except what `Extras` labels as ground truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np

from rspec_planner import drawing as d
from rspec_planner.errors import InputError
from rspec_planner.live.birdseye import draw_birdseye
from rspec_planner.overlay import draw_trajectory, reasoning_runs, TOP_SPEED_MPS
from rspec_planner.planner.plan import Plan
from rspec_planner.projection import CameraRig

WIDTH, HEIGHT = 1600, 900
MAIN_CAMERA = 'front_wide'
STAGES = (('encode', (96, 165, 250)), ('prefill', (167, 139, 250)), ('decode', (255, 190, 70)),
          ('action', (74, 222, 128)))
OTHER_STAGES = (120, 130, 150)
HEADER = (0, 0, WIDTH, 64)
MAIN = (16, 76, 1040, 588)  # 1024 x 512
SMALL_TOP, SMALL_HEIGHT, GAP = 600, 168, 8
REASONING = (16, 780, 1040, 886)
BIRDSEYE = (1052, 76, 1584, 660)
CHARTS = (1052, 672, 1584, 886)


@dataclass(frozen=True)
class Extras:
    """What a picture may say beyond the plan itself."""

    title: str = 'rspec_planner'
    elapsed_s: float | None = None  # time since the start of the drive
    plan_number: int | None = None
    ground_truth: str = ''  # the CoC that the expert of the world would give, if known
    history: np.ndarray | None = None  # (n, 2) ego-frame positions before t0, metres
    agents: np.ndarray | None = None  # (n, 5) x, y, yaw, length, width in the ego frame at t0
    notes: tuple[str, ...] = field(default_factory=tuple)  # short remarks for the header


def draw_frame(images: np.ndarray, plan: Plan, rig: CameraRig,
               extras: Extras | None = None) -> np.ndarray:
    """
    Draw one plan over the frames it was made from; return (900, 1600, 3) uint8 RGB.

    `images` are the four frames at t0, (4, H, W, 3) uint8 RGB in `rig.names` order.
    Raises InputError when they do not fit the rig.
    """
    if images.ndim != 4 or images.shape[0] != len(rig.names) or images.dtype != np.uint8:
        raise InputError(f'images of a picture: shape {images.shape} {images.dtype}, expected '
                         f'({len(rig.names)}, H, W, 3) uint8; pass one RGB frame per camera')
    extras = extras or Extras()
    canvas = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    canvas[:] = d.BACKGROUND
    _header(canvas, plan, extras)
    names = list(rig.names)
    main = names.index(MAIN_CAMERA) if MAIN_CAMERA in names else 0
    _camera(canvas, MAIN, images[main], plan, rig, names[main], d.BOLD)
    others = [i for i in range(len(names)) if i != main]
    for box, i in zip(_small_boxes(len(others)), others):
        _camera(canvas, box, images[i], plan, rig, names[i], d.REGULAR)
    draw_birdseye(canvas, BIRDSEYE, images, plan, rig, extras.history, extras.agents,
                  TOP_SPEED_MPS)
    _reasoning(canvas, plan, extras)
    _charts(canvas, plan)
    return canvas


def write_picture(path: str | Path, picture: np.ndarray) -> None:
    """Write an RGB picture as PNG or JPEG, by the suffix of `path`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if not cv2.imwrite(str(path), cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)):
        raise InputError(f'{path}: cannot be written; use a .png or .jpg name in a '
                         'writable folder')


def contact_sheet(pictures: Sequence[np.ndarray], columns: int = 3,
                  width: int = 2400) -> np.ndarray:
    """Tile pictures of one size row by row; return one RGB sheet."""
    if not pictures:
        raise InputError('contact sheet: no picture to tile; draw at least one frame')
    cell_w = width // columns
    cell_h = round(cell_w * pictures[0].shape[0] / pictures[0].shape[1])
    rows = -(-len(pictures) // columns)
    sheet = np.empty((rows * cell_h, columns * cell_w, 3), np.uint8)
    sheet[:] = d.BACKGROUND
    for i, picture in enumerate(pictures):
        top, left = i // columns * cell_h, i % columns * cell_w
        sheet[top:top + cell_h, left:left + cell_w] = cv2.resize(
            picture, (cell_w, cell_h), interpolation=cv2.INTER_AREA)
    return sheet


def _small_boxes(count: int) -> list[tuple[int, int, int, int]]:
    """Return the boxes of the smaller cameras, side by side below the main one."""
    width = (MAIN[2] - MAIN[0] - GAP * (count - 1)) // max(count, 1)
    return [(MAIN[0] + i * (width + GAP), SMALL_TOP, MAIN[0] + i * (width + GAP) + width,
             SMALL_TOP + SMALL_HEIGHT) for i in range(count)]


def _camera(canvas: np.ndarray, box: tuple[int, int, int, int], image: np.ndarray, plan: Plan,
            rig: CameraRig, name: str, weight: int) -> None:
    """Fill a box with one camera, trajectory and name tag; crop what does not fit."""
    left, top, right, bottom = box
    scale = max((right - left) / image.shape[1], (bottom - top) / image.shape[0])
    size = (round(image.shape[1] * scale), round(image.shape[0] * scale))
    view = cv2.resize(image, size, interpolation=cv2.INTER_CUBIC)
    draw_trajectory(view, plan, rig, name, scale)
    skip_x, skip_y = (size[0] - right + left) // 2, (size[1] - bottom + top) // 2
    canvas[top:bottom, left:right] = view[skip_y:skip_y + bottom - top,
                                          skip_x:skip_x + right - left]
    label, type_size = name.replace('_', ' '), 17 if weight == d.BOLD else 15
    tag = (left + 8, top + 8, left + 24 + d.text_width(label, type_size, weight),
           top + 18 + type_size)
    d.rounded_panel(canvas, tag, d.BACKGROUND, 5)
    d.put_text(canvas, label, (tag[0] + 8, tag[3] - 8), d.TEXT, type_size, weight)


def _header(canvas: np.ndarray, plan: Plan, extras: Extras) -> None:
    """Write title, t0, speed, latency and accepted length across the top."""
    x = d.put_text(canvas, extras.title, (18, 42), d.TEXT, 26, d.BOLD)
    if extras.notes:
        d.put_text(canvas, '  '.join(extras.notes), (x + 18, 42), d.MUTED, 17)
    stats = plan.reasoning.stats
    figures = [('accepted length', f'{stats.accepted_length:.1f}') if stats.iterations
               else ('reused', f'{stats.reused + 1} tokens'),
               ('latency', f'{plan.times.total_ms:.0f} ms'),
               ('speed', f'{plan.speeds[0]:.1f} m/s'),
               ('t0', f'{plan.t0_ns / 1e9:.3f} s' if extras.elapsed_s is None
                else f'{extras.elapsed_s:.1f} s')]
    if extras.plan_number is not None:
        figures.append(('plan', f'#{extras.plan_number}'))
    right = WIDTH - 18
    for label, value in figures:
        right = d.put_text_right(canvas, value, (right, 42), d.TEXT, 24, d.BOLD) - 8
        right = d.put_text_right(canvas, label, (right, 42), d.MUTED, 17) - 30


def _reasoning(canvas: np.ndarray, plan: Plan, extras: Extras) -> None:
    """Write the CoC large, decision and cause accented, at most two lines."""
    d.rounded_panel(canvas, REASONING)
    runs = reasoning_runs(plan.reasoning.text)
    left, top, right, bottom = REASONING
    room = bottom - top - (22 if extras.ground_truth else 0)
    for size in (31, 28, 25, 22, 19, 16):
        lines = d.wrap_runs(runs, right - left - 40, size)
        leading = round(size * 1.32)
        if len(lines) * leading <= room - 14:
            break
    first = top + (room - len(lines) * leading) // 2 + round(size * 1.02)
    d.put_runs(canvas, lines, (left + 20, first), size, leading)
    cv2.rectangle(canvas, (left, top + 8), (left + 5, bottom - 8), d.ACCENT, -1)
    if extras.ground_truth:
        d.put_text(canvas, f'expert: {extras.ground_truth}', (left + 20, bottom - 10),
                   d.MUTED, 15)


def _charts(canvas: np.ndarray, plan: Plan) -> None:
    """Draw the speed profile over the horizon and where the frame's time went."""
    left, top, right, bottom = CHARTS
    d.rounded_panel(canvas, CHARTS)
    _speed_profile(canvas, (left + 62, top + 42, right - 20, bottom - 96), plan)
    d.put_text(canvas, 'planned speed, m/s', (left + 16, top + 26), d.MUTED, 15)
    total = plan.times.total_ms
    times = [(name, float(getattr(plan.times, f'{name}_ms')), colour) for name, colour in STAGES]
    times.append(('other', total - sum(value for _, value, _ in times), OTHER_STAGES))
    d.put_text(canvas, f'frame {total:.0f} ms', (left + 16, bottom - 48), d.MUTED, 15)
    d.stacked_bar(canvas, (left + 128, bottom - 62, right - 20, bottom - 46),
                  [(value, colour) for _, value, colour in times], max(100.0, total))
    x = left + 16
    for name, value, colour in times:
        cv2.circle(canvas, (x + 5, bottom - 21), 5, colour, -1, cv2.LINE_AA)
        x = d.put_text(canvas, f'{name} {value:.0f}', (x + 16, bottom - 16), d.TEXT, 15) + 16


def _speed_profile(canvas: np.ndarray, box: tuple[int, int, int, int], plan: Plan) -> None:
    """Plot speed over 0..6.4 s as a coloured line over a faint grid."""
    left, top, right, bottom = box
    seconds = np.arange(len(plan.speeds)) * 0.1
    ceiling = max(5.0, float(np.ceil(plan.speeds.max() / 5.0 + 0.05)) * 5.0)
    for level in (0.0, ceiling / 2, ceiling):
        y = round(bottom - (bottom - top) * level / ceiling)
        cv2.line(canvas, (left, y), (right, y), d.LINE, 1, cv2.LINE_AA)
        d.put_text_right(canvas, f'{level:g}', (left - 10, y + 5), d.MUTED, 14)
    for second in range(0, 7, 2):
        x = round(left + (right - left) * second / seconds[-1])
        d.put_text(canvas, f'{second} s', (x - 8, bottom + 20), d.MUTED, 14)
    xs = left + (right - left) * seconds / seconds[-1]
    ys = bottom - (bottom - top) * np.clip(plan.speeds, 0, ceiling) / ceiling
    points = np.round(np.stack([xs, ys], -1) * 16).astype(np.int32)
    for i in range(len(points) - 1):
        cv2.polylines(canvas, [points[i:i + 2]], False,
                      d.speed_colour(plan.speeds[i], TOP_SPEED_MPS), 3, cv2.LINE_AA, 4)
