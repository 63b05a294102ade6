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
A MarkerArray as RViz shows it: third-person view behind the ego, grid, lines, spheres, text.

Where no RViz can be opened, this draws the very message that RViz would get. Only the kinds of
marker that the planner publishes are known; another one is refused, so that none is overlooked.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from rspec_planner import drawing as d
from rspec_planner.errors import InputError
from rspec_planner.overlay import CameraView
from rspec_planner.planner.history import rotation_matrices
from rspec_planner.projection import project

WIDTH, HEIGHT = 1280, 720
BACKGROUND: d.Colour = (30, 30, 34)
GRID: d.Colour = (66, 66, 70)
_VIEW = 'rviz'
#: the view of config/rspec_planner.rviz: metres from the ego, radians down
_DISTANCE_M, _PITCH, _FIELD_OF_VIEW = 25.0, 0.45, math.pi / 4
_NEAR_M = 1.0
_CELL_M, _CELLS = 10.0, 12
#: values of visualization_msgs/Marker
_LINE_STRIP, _SPHERE_LIST, _TEXT = 4, 7, 9
BASE_FRAME = 'base_link'

Floats = NDArray[np.float64]


def draw_markers(markers: Sequence[Any], ego_pose: Floats) -> np.ndarray:
    """
    Draw markers as RViz does; return (720, 1280, 3) uint8 RGB.

    `ego_pose` (4, 4) is odometry frame <- ego at t0, where the view follows the ego; markers are
    in that frame or in base_link. Raises InputError for a kind that is not known.
    """
    canvas = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    canvas[:] = BACKGROUND
    view = follower_view()
    _grid(canvas, ego_pose, view)
    for marker in sorted(markers, key=lambda marker: marker.type == _TEXT):  # text in front
        points = _in_ego_frame(marker, ego_pose)
        if marker.type == _LINE_STRIP:
            _line(canvas, points, _colours(marker, len(points)), marker.scale.x, view)
        elif marker.type == _SPHERE_LIST:
            _spheres(canvas, points, _colours(marker, len(points)), marker.scale.x, view)
        elif marker.type == _TEXT:
            _text(canvas, points[0], marker.text, _colours(marker, 1)[0], marker.scale.z, view)
        else:
            raise InputError(f"marker '{marker.ns}' is of type {marker.type}; teach "
                             'live/marker_view.py to draw it')
    return canvas


def follower_view() -> CameraView:
    """Return the camera behind and above the ego that looks ahead and down at it."""
    focal = HEIGHT / 2 / math.tan(_FIELD_OF_VIEW / 2)
    matrix = np.array([[focal, 0.0, WIDTH / 2], [0.0, focal, HEIGHT / 2], [0.0, 0.0, 1.0]])
    cosine, sine = math.cos(_PITCH), math.sin(_PITCH)
    pose = np.eye(4)
    # columns: image right, image down, line of sight, in the ego frame
    pose[:3, :3] = np.array([[0.0, -sine, cosine], [-1.0, 0.0, 0.0], [0.0, -cosine, -sine]])
    pose[:3, 3] = -_DISTANCE_M * cosine, 0.0, _DISTANCE_M * sine
    return CameraView(_VIEW, matrix, pose)


def _in_ego_frame(marker: Any, ego_pose: Floats) -> Floats:
    """Return a marker's points (n, 3), or its own position, in the ego frame at t0."""
    p, q = marker.pose.position, marker.pose.orientation
    local = np.array([[v.x, v.y, v.z] for v in marker.points]).reshape(-1, 3) \
        if len(marker.points) else np.zeros((1, 3))
    turn = rotation_matrices(np.array([[q.x, q.y, q.z, q.w]]))[0]
    points = local @ turn.T + np.array([p.x, p.y, p.z])
    if marker.header.frame_id == BASE_FRAME:
        return np.asarray(points)
    return np.asarray((points - ego_pose[:3, 3]) @ ego_pose[:3, :3])


def _colours(marker: Any, count: int) -> Floats:
    """Return one RGBA row (count, 4) in 0..1 per point."""
    given = list(marker.colors) if len(marker.colors) == count else [marker.color] * count
    return np.array([[c.r, c.g, c.b, c.a] for c in given])


def _grid(canvas: np.ndarray, ego_pose: Floats, view: CameraView) -> None:
    """Draw the ground's grid, fixed in the odometry frame, around the ego."""
    centre = np.round(ego_pose[:2, 3] / _CELL_M) * _CELL_M
    reach = np.linspace(-_CELLS * _CELL_M, _CELLS * _CELL_M, 8 * _CELLS + 1)
    for offset in np.arange(-_CELLS, _CELLS + 1) * _CELL_M:
        for line in (np.column_stack([np.full_like(reach, offset), reach]),
                     np.column_stack([reach, np.full_like(reach, offset)])):
            ground = np.column_stack([line + centre, np.full(len(reach), ego_pose[2, 3])])
            points = (ground - ego_pose[:3, 3]) @ ego_pose[:3, :3]
            for start, end, _ in _visible(points, view):
                cv2.line(canvas, start, end, GRID, 1, cv2.LINE_AA)


def _line(canvas: np.ndarray, points: Floats, colours: Floats, width_m: float,
          view: CameraView) -> None:
    """Draw a line whose width is in metres, far pieces first, each in its own colour."""
    pieces = list(_visible(points, view))
    overlay = canvas.copy()
    for start, end, i in reversed(pieces):
        depth = float(np.mean(_depth(points[i:i + 2], view)))
        thickness = max(1, round(width_m * view.matrix[0, 0] / depth))
        cv2.line(overlay, start, end, _rgb(colours[i:i + 2].mean(0)), thickness, cv2.LINE_AA)
    alpha = float(colours[:, 3].mean())
    cv2.addWeighted(overlay, alpha, canvas, 1.0 - alpha, 0.0, dst=canvas)


def _spheres(canvas: np.ndarray, points: Floats, colours: Floats, diameter_m: float,
             view: CameraView) -> None:
    pixels, depth = project(points, view, _VIEW)
    for i in np.argsort(-depth):
        if depth[i] > _NEAR_M:
            radius = max(2, round(diameter_m / 2 * view.matrix[0, 0] / depth[i]))
            cv2.circle(canvas, _point(pixels[i]), radius, _rgb(colours[i]), -1, cv2.LINE_AA)


def _text(canvas: np.ndarray, point: Floats, text: str, colour: Floats, height_m: float,
          view: CameraView) -> None:
    """Write lines centred on a point; the height of a letter is in metres."""
    pixels, depth = project(point[None], view, _VIEW)
    if depth[0] <= _NEAR_M:
        return
    size = max(6, round(height_m * view.matrix[0, 0] / depth[0]))
    lines = text.split('\n')
    x, y = _point(pixels[0])
    top = y - round(size * 1.2 * (len(lines) - 1) / 2)
    for i, line in enumerate(lines):
        left = x - d.text_width(line, size) // 2
        d.put_text(canvas, line, (left, top + round(size * (1.2 * i + 0.35))), _rgb(colour), size)


def _visible(points: Floats, view: CameraView) -> list[tuple[tuple[int, int], tuple[int, int],
                                                             int]]:
    """Return start, end and index of the pieces of a line that are before the camera."""
    pixels, depth = project(points, view, _VIEW)
    return [(_point(pixels[i]), _point(pixels[i + 1]), i) for i in range(len(points) - 1)
            if depth[i] > _NEAR_M and depth[i + 1] > _NEAR_M]


def _depth(points: Floats, view: CameraView) -> Floats:
    return np.asarray(project(points, view, _VIEW)[1])


def _point(pixel: Floats) -> tuple[int, int]:
    x, y = np.clip(np.round(pixel), -20_000, 20_000).astype(int)
    return int(x), int(y)


def _rgb(colour: Floats) -> d.Colour:
    r, g, b = np.clip(np.round(colour[:3] * 255), 0, 255).astype(int)
    return int(r), int(g), int(b)
