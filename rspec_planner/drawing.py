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
Drawing primitives of the pictures: type, colours, panels, bars.

Everything works on RGB uint8 canvases and knows nothing of plans or cameras.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

Colour = tuple[int, int, int]

BACKGROUND: Colour = (15, 18, 24)
PANEL: Colour = (26, 30, 39)
LINE: Colour = (58, 65, 80)
MUTED: Colour = (140, 150, 168)
TEXT: Colour = (236, 240, 246)
ACCENT: Colour = (255, 190, 70)  # the decision
CAUSE: Colour = (110, 215, 255)  # what the decision rests on
ALARM: Colour = (255, 92, 84)

REGULAR, BOLD = 400, 700


def text_width(text: str, size: int, weight: int = REGULAR) -> int:
    """Return the advance of one line in pixels, trailing blanks included."""
    if not text:
        return 0
    # the measured box ends with the ink, so a blank is measured between two bars
    return _ink_width(f'|{text}|', size, weight) - _ink_width('||', size, weight)


def put_text(canvas: np.ndarray, text: str, origin: tuple[int, int], colour: Colour = TEXT,
             size: int = 20, weight: int = REGULAR) -> int:
    """Write one line with its baseline left end at `origin`; return the x where it ends."""
    if hasattr(cv2, 'FontFace'):
        cv2.putText(canvas, text, origin, colour, cv2.FontFace('sans'), size, weight)
    else:
        cv2.putText(canvas, text, origin, cv2.FONT_HERSHEY_SIMPLEX, size / 32.0, colour,
                    2 if weight >= BOLD else 1, cv2.LINE_AA)
    return origin[0] + text_width(text, size, weight)


def put_text_right(canvas: np.ndarray, text: str, right: tuple[int, int],
                   colour: Colour = TEXT, size: int = 20, weight: int = REGULAR) -> int:
    """Write one line with its baseline right end at `right`; return the x where it starts."""
    left = right[0] - text_width(text, size, weight)
    put_text(canvas, text, (left, right[1]), colour, size, weight)
    return left


def _ink_width(text: str, size: int, weight: int) -> int:
    """Return the width of the drawn box; OpenCV 4 has only stroke fonts."""
    if hasattr(cv2, 'FontFace'):
        box = cv2.getTextSize((4096, 256), text, (0, 0), cv2.FontFace('sans'), size, weight)
        return int(box[2])
    (width, _), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, size / 32.0,
                                    2 if weight >= BOLD else 1)
    return int(width)


def wrap_runs(runs: Sequence[tuple[str, Colour, int]], width: int,
              size: int) -> list[list[tuple[str, Colour, int]]]:
    """Break coloured runs of (text, colour, weight) into lines that fit `width` pixels."""
    lines: list[list[tuple[str, Colour, int]]] = [[]]
    used = 0
    for text, colour, weight in runs:
        for word in text.split():
            advance = text_width(word + ' ', size, weight)
            if used and used + text_width(word, size, weight) > width:
                lines.append([])
                used = 0
            lines[-1].append((word, colour, weight))
            used += advance
    return lines


def put_runs(canvas: np.ndarray, lines: Sequence[Sequence[tuple[str, Colour, int]]],
             origin: tuple[int, int], size: int, leading: int) -> None:
    """Write wrapped runs, first baseline at `origin`, one line every `leading` pixels."""
    for row, line in enumerate(lines):
        x = origin[0]
        for word, colour, weight in line:
            put_text(canvas, word, (x, origin[1] + row * leading), colour, size, weight)
            x += text_width(word + ' ', size, weight)


def rounded_panel(canvas: np.ndarray, box: tuple[int, int, int, int], colour: Colour = PANEL,
                  radius: int = 8) -> None:
    """Fill a panel (left, top, right, bottom) with rounded corners."""
    left, top, right, bottom = box
    cv2.rectangle(canvas, (left + radius, top), (right - radius, bottom), colour, -1)
    cv2.rectangle(canvas, (left, top + radius), (right, bottom - radius), colour, -1)
    for x in (left + radius, right - radius):
        for y in (top + radius, bottom - radius):
            cv2.circle(canvas, (x, y), radius, colour, -1, cv2.LINE_AA)


def blend(canvas: np.ndarray, overlay: np.ndarray, mask: np.ndarray) -> None:
    """Lay `overlay` over `canvas` in place, with per-pixel weights 0..255 of `mask`."""
    weight = mask.astype(np.float32)[..., None] / 255.0
    canvas[:] = np.rint(canvas + (overlay.astype(np.float32) - canvas) * weight).astype(np.uint8)


def stacked_bar(canvas: np.ndarray, box: tuple[int, int, int, int],
                parts: Sequence[tuple[float, Colour]], full: float) -> None:
    """Draw parts side by side; `full` is the value of the whole width."""
    left, top, right, bottom = box
    cv2.rectangle(canvas, (left, top), (right, bottom), LINE, -1)
    start = float(left)
    for value, colour in parts:
        end = min(start + (right - left) * value / max(full, 1e-9), float(right))
        if end - start >= 1.0:
            cv2.rectangle(canvas, (round(start), top), (round(end) - 1, bottom), colour, -1)
        start = end


def speed_colour(speed_mps: float, top_mps: float) -> Colour:
    """Map 0..top to red, amber, green, cyan: what stops glows red, what flows is cool."""
    stops = np.array([[255, 70, 70], [255, 176, 58], [120, 222, 110], [70, 205, 235]], float)
    at = np.clip(speed_mps / max(top_mps, 1e-6), 0.0, 1.0) * (len(stops) - 1)
    low = min(int(at), len(stops) - 2)
    mixed = stops[low] + (stops[low + 1] - stops[low]) * (at - low)
    return (int(mixed[0]), int(mixed[1]), int(mixed[2]))
