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
The bird's-eye view of a picture: metres, ego box, chosen trajectory and candidates.

The backdrop is the ground as the four cameras see it, warped flat; it shows lanes and lines
where they are and smears whatever stands up, which is why it is dimmed.
"""

from __future__ import annotations

import cv2
import numpy as np

from rspec_planner import drawing as d
from rspec_planner.planner.plan import Plan
from rspec_planner.projection import CameraRig, densify, ground_view, ribbon_edges

Box = tuple[int, int, int, int]

BEHIND_M = 9.0
AHEAD_CHOICES_M = (32.0, 48.0, 68.0, 96.0, 130.0)
EGO_LENGTH_M, EGO_WIDTH_M, REAR_OVERHANG_M = 4.8, 1.9, 1.0


class _Frame:
    """Metres of the ego frame to 1/16 pixels of the panel: forward is up, left is left."""

    def __init__(self, box: Box, ahead_m: float) -> None:
        self.ahead_m = ahead_m
        self.width, self.height = box[2] - box[0], box[3] - box[1]
        self.scale = self.height / (ahead_m + BEHIND_M)  # pixels per metre

    def pixels(self, points: np.ndarray) -> np.ndarray:
        """Return (n, 2) fixed-point pixels of ego-frame points (n, 2 or more)."""
        u = self.width / 2 - points[:, 1] * self.scale
        v = (self.ahead_m - points[:, 0]) * self.scale
        return np.asarray(np.round(np.clip(np.stack([u, v], -1), -8000, 8000) * 16), np.int32)

    def grid(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ego-frame x and y of every pixel of the panel."""
        v, u = np.mgrid[0:self.height, 0:self.width] + 0.5
        return self.ahead_m - v / self.scale, (self.width / 2 - u) / self.scale


def draw_birdseye(canvas: np.ndarray, box: Box, images: np.ndarray, plan: Plan, rig: CameraRig,
                  history: np.ndarray | None, agents: np.ndarray | None,
                  top_speed_mps: float) -> None:
    """Fill `box` of the canvas with the bird's-eye view of a plan."""
    reach = max(float(plan.poses[:, 0].max()), float(np.abs(plan.poses[:, 1]).max()) * 1.2)
    ahead = next((a for a in AHEAD_CHOICES_M if a >= reach * 1.12 + 4.0), AHEAD_CHOICES_M[-1])
    frame = _Frame(box, ahead)
    panel = _backdrop(frame, images, rig)
    _grid(panel, frame)
    for candidate in plan.candidates:
        _line(panel, frame, candidate[:, :2], (205, 210, 220), 1)
    if history is not None and len(history) > 1:
        _line(panel, frame, history, d.MUTED, 2)
    for agent in agents if agents is not None else ():
        _box(panel, frame, agent, (214, 120, 255))
    _chosen(panel, frame, plan, top_speed_mps)
    _ego(panel, frame)
    _legend(panel, top_speed_mps)
    canvas[box[1]:box[3], box[0]:box[2]] = panel


def _backdrop(frame: _Frame, images: np.ndarray, rig: CameraRig) -> np.ndarray:
    """Return the dimmed, flattened view of all cameras."""
    x, y = frame.grid()
    view, seen = ground_view(images, rig, x, y)
    grey = cv2.cvtColor(cv2.cvtColor(view, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    dimmed = cv2.addWeighted(view, 0.26, grey, 0.26, 6)
    panel = np.empty_like(view)
    panel[:] = d.PANEL
    d.blend(panel, dimmed, cv2.GaussianBlur(seen, (9, 9), 0))
    return panel


def _grid(panel: np.ndarray, frame: _Frame) -> None:
    """Draw a line every 10 m (20 m when far) and its distance along the left edge."""
    step = 10 if frame.ahead_m < 90 else 20
    faint = panel.copy()
    half = frame.width / 2 / frame.scale
    for x in range(0, int(frame.ahead_m), step):
        v = round((frame.ahead_m - x) * frame.scale)
        cv2.line(faint, (0, v), (frame.width, v), (190, 200, 220), 1, cv2.LINE_AA)
    for k in range(int(-half // step), int(half // step) + 1):
        u = round(frame.width / 2 - k * step * frame.scale)
        cv2.line(faint, (u, 0), (u, frame.height), (190, 200, 220), 1, cv2.LINE_AA)
    cv2.addWeighted(faint, 0.28, panel, 0.72, 0, dst=panel)
    for x in range(0, int(frame.ahead_m), step):
        v = round((frame.ahead_m - x) * frame.scale)
        if v > 40:
            d.put_text(panel, f'{x} m', (8, v - 4), d.MUTED, 14)


def _line(panel: np.ndarray, frame: _Frame, points: np.ndarray, colour: d.Colour,
          thickness: int) -> None:
    """Draw a path (n, 2) as one line."""
    cv2.polylines(panel, [frame.pixels(points)], False, colour, thickness, cv2.LINE_AA, 4)


def _chosen(panel: np.ndarray, frame: _Frame, plan: Plan, top_speed_mps: float) -> None:
    """Draw the chosen trajectory as a band in speed colours with a dot every second."""
    path, speeds = densify(plan.poses[:, :2], plan.speeds, 0.5)
    if len(path) > 1:
        left, right = (frame.pixels(edge) for edge in ribbon_edges(path, EGO_WIDTH_M))
        overlay = panel.copy()
        for i in range(len(path) - 1):
            quad = np.stack([left[i], left[i + 1], right[i + 1], right[i]])
            cv2.fillConvexPoly(overlay, quad, d.speed_colour(speeds[i], top_speed_mps),
                               cv2.LINE_AA, 4)
        cv2.addWeighted(overlay, 0.72, panel, 0.28, 0, dst=panel)
        for edge in (left, right):
            cv2.polylines(panel, [edge], False, (250, 252, 255), 1, cv2.LINE_AA, 4)
    for point in frame.pixels(plan.poses[10::10, :2]):
        cv2.circle(panel, (int(point[0]), int(point[1])), 3 * 16, (255, 255, 255), -1,
                   cv2.LINE_AA, 4)
    if plan.speeds[-1] < 0.5:
        x, y, _, yaw = plan.poses[-1]
        _box(panel, frame, np.array([x, y, yaw, 0.5, 3.4]), d.ALARM)


def _box(panel: np.ndarray, frame: _Frame, agent: np.ndarray, colour: d.Colour) -> None:
    """Fill an oriented box given as x, y, yaw, length, width."""
    x, y, yaw, length, width = agent[:5]
    corners = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) * [length / 2, width / 2]
    turn = np.array([[np.cos(yaw), np.sin(yaw)], [-np.sin(yaw), np.cos(yaw)]])
    cv2.fillConvexPoly(panel, frame.pixels(corners @ turn + [x, y]), colour, cv2.LINE_AA, 4)


def _ego(panel: np.ndarray, frame: _Frame) -> None:
    """Draw the ego vehicle; the origin is its rear axle."""
    centre = EGO_LENGTH_M / 2 - REAR_OVERHANG_M
    _box(panel, frame, np.array([centre, 0, 0, EGO_LENGTH_M + 0.5, EGO_WIDTH_M + 0.5]),
         d.BACKGROUND)
    _box(panel, frame, np.array([centre, 0, 0, EGO_LENGTH_M, EGO_WIDTH_M]), d.TEXT)
    _box(panel, frame, np.array([centre + 0.75, 0, 0, 0.9, EGO_WIDTH_M - 0.45]), (70, 80, 98))


def _legend(panel: np.ndarray, top_speed_mps: float) -> None:
    """Name the view and explain the speed colours."""
    height, width = panel.shape[:2]
    d.rounded_panel(panel, (8, 8, 16 + d.text_width("bird's-eye view", 15), 33), d.BACKGROUND, 5)
    d.put_text(panel, "bird's-eye view", (12, 26), d.TEXT, 15)
    left, top, span = width - 188, height - 22, 110
    d.rounded_panel(panel, (left - 28, top - 10, width - 8, height - 6), d.BACKGROUND, 5)
    d.put_text(panel, '0', (left - 18, top + 9), d.MUTED, 14)
    for i in range(span):
        colour = d.speed_colour(i / span * top_speed_mps, top_speed_mps)
        cv2.line(panel, (left + i, top), (left + i, top + 8), colour, 1)
    d.put_text(panel, f'{top_speed_mps:g} m/s', (left + span + 8, top + 9), d.MUTED, 14)
