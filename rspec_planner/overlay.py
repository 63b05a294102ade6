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
The plan laid over a camera image: a band on the road, coloured by speed, and the reasoning.

One drawing for `~/debug/image_overlay` and for the pictures of a demo; knows no ROS. The road is
taken as flat, and where nobody says how the camera is mounted, the picture says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import math

import cv2
import numpy as np

from rspec_planner import drawing as d
from rspec_planner.planner.calibration import Calibration
from rspec_planner.planner.camera_roles import BY_NAME
from rspec_planner.planner.plan import Plan
from rspec_planner.projection import CameraRig, densify, NEAR_M, project, ribbon_edges

VEHICLE_WIDTH_M = 1.9
TOP_SPEED_MPS = 15.0  # the cool end of the speed colours
OVERLAY_WIDTH = 960  # pixels

#: where a camera is taken to be when nobody says: metres ahead of the rear axle, metres up
_MOUNT_X, _MOUNT_Z, _PITCH_DOWN_DEG = 1.6, 1.5, 3.0
_YAW_LEFT_DEG = {'cross_left': 55.0, 'cross_right': -55.0, 'rear_left': 140.0,
                 'rear_tele': 180.0, 'rear_right': -140.0}


@dataclass(frozen=True)
class CameraView:
    """Where the pixels of one camera look; a rig of one camera."""

    name: str
    matrix: np.ndarray  # (3, 3) K of the image that is drawn on
    pose: np.ndarray  # (4, 4) ego (rear axle on the ground) <- camera optical
    assumed: str = ''  # what is nominal rather than known, for the picture

    @property
    def names(self) -> Sequence[str]:
        """Return the one name."""
        return (self.name,)

    @property
    def intrinsics(self) -> Mapping[str, np.ndarray]:
        """Return K by name."""
        return {self.name: self.matrix}

    @property
    def extrinsics(self) -> Mapping[str, np.ndarray]:
        """Return the pose by name."""
        return {self.name: self.pose}


def camera_view(name: str, size: tuple[int, int], calibration: Calibration | None,
                pose: np.ndarray | None) -> CameraView:
    """
    Return the view of a camera whose image is resized to `size` (rows, columns).

    Without a calibration or a pose (4, 4) the nominal one of the role stands in, and is named.
    """
    rows, columns = size
    if calibration is not None and not calibration.usable:
        calibration = None
    assumed = [what for what, known in (('lens', calibration), ('mounting', pose))
               if known is None]
    if calibration is None:
        focal = columns / 2 / math.tan(math.radians(BY_NAME[name].fov_deg / 2)) \
            if name in BY_NAME else float(columns)
        matrix = np.array([[focal, 0.0, (columns - 1) / 2], [0.0, focal, (rows - 1) / 2],
                           [0.0, 0.0, 1.0]])
    else:
        scale = np.array([columns / calibration.width, rows / calibration.height])
        matrix = calibration.matrix.copy()
        # Pixel centres lie at integers: the corner at -0.5 keeps its place.
        matrix[:2] *= scale[:, None]
        matrix[:2, 2] += scale / 2 - 0.5
    return CameraView(name, matrix, nominal_pose(name) if pose is None else pose,
                      f'nominal {" and ".join(assumed)}' if assumed else '')


def nominal_pose(name: str) -> np.ndarray:
    """Return ego <- camera optical (4, 4) of a role: looking its way, slightly down."""
    yaw, pitch = math.radians(_YAW_LEFT_DEG.get(name, 0.0)), math.radians(_PITCH_DOWN_DEG)
    forward = np.array([math.cos(yaw) * math.cos(pitch), math.sin(yaw) * math.cos(pitch),
                        -math.sin(pitch)])
    right = np.array([math.sin(yaw), -math.cos(yaw), 0.0])
    pose = np.eye(4)
    pose[:3, :3] = np.stack([right, np.cross(forward, right), forward], axis=1)
    pose[:3, 3] = _MOUNT_X, 0.0, _MOUNT_Z
    return pose


def draw_overlay(image: np.ndarray, plan: Plan, view: CameraView) -> np.ndarray:
    """Draw a plan and its reasoning over an image (H, W, 3) uint8 RGB; return a new picture."""
    scale = OVERLAY_WIDTH / image.shape[1]
    size = (OVERLAY_WIDTH, round(image.shape[0] * scale))
    scene = cv2.resize(image, size, interpolation=cv2.INTER_CUBIC)
    draw_trajectory(scene, plan, view, view.name, scale)
    _tag(scene, f'{view.name.replace("_", " ")}   {plan.speeds[0]:.1f} m/s', 10, d.TEXT)
    if view.assumed:
        _tag(scene, view.assumed, 42, d.MUTED)
    type_size = 24
    lines = d.wrap_runs(reasoning_runs(plan.reasoning.text), OVERLAY_WIDTH - 40, type_size)
    leading = round(type_size * 1.4)
    panel = np.empty((len(lines) * leading + 16, OVERLAY_WIDTH, 3), np.uint8)
    panel[:] = d.PANEL
    d.put_runs(panel, lines, (20, leading), type_size, leading)
    return np.vstack([scene, panel])


def _tag(canvas: np.ndarray, text: str, top: int, colour: d.Colour) -> None:
    """Write a short text on a dark ground at the left."""
    d.rounded_panel(canvas, (10, top, 26 + d.text_width(text, 17), top + 28), d.BACKGROUND, 5)
    d.put_text(canvas, text, (18, top + 20), colour, 17)


def split_reasoning(text: str) -> tuple[str, str, str]:
    """Split a CoC, `opener, decision because cause.`, into its three parts."""
    head, comma, rest = text.partition(',')
    opener, rest = (head + comma, rest) if comma else ('', text)
    decision, because, cause = rest.partition(' because ')
    return opener.strip(), decision.strip(), f'because {cause}'.strip() if because else ''


def reasoning_runs(text: str) -> list[tuple[str, d.Colour, int]]:
    """Return the reasoning as coloured runs: opener, decision, cause."""
    opener, decision, cause = split_reasoning(text or 'no reasoning')
    return [(opener.capitalize(), d.MUTED, d.REGULAR), (decision, d.ACCENT, d.BOLD),
            (cause, d.CAUSE, d.REGULAR)]


def draw_trajectory(view: np.ndarray, plan: Plan, rig: CameraRig, name: str,
                    scale: float) -> None:
    """Lay the plan as a speed-coloured band on the ground of a camera view, in place."""
    path, speeds = densify(plan.poses[:, :2], plan.speeds, 0.4)
    if len(path) < 2:
        return
    left, right = ribbon_edges(path, VEHICLE_WIDTH_M)
    (left_px, left_z), (right_px, right_z) = (project(p, rig, name) for p in (left, right))
    shown = (left_z > NEAR_M) & (right_z > NEAR_M)
    # 1/16 pixel fixed point keeps far, thin slices smooth
    edges = [np.round(np.clip((p + 0.5) * scale - 0.5, -8000, 8000) * 16).astype(np.int32)
             for p in (left_px, right_px)]
    overlay, mask = view.copy(), np.zeros(view.shape[:2], np.uint8)
    # far slices first, so that a bend never paints the far road over the near one
    for i in range(len(path) - 2, -1, -1):
        if not (shown[i] and shown[i + 1]):
            continue
        quad = np.stack([edges[0][i], edges[0][i + 1], edges[1][i + 1], edges[1][i]])
        cv2.fillConvexPoly(overlay, quad, d.speed_colour(speeds[i], TOP_SPEED_MPS), cv2.LINE_8, 4)
        cv2.fillConvexPoly(mask, quad, 150, cv2.LINE_8, 4)
    d.blend(view, overlay, cv2.GaussianBlur(mask, (3, 3), 0))
    _outline(view, edges, shown, 2 if view.shape[1] > 600 else 1)
    _stop_bar(view, edges, shown, speeds)


def _outline(view: np.ndarray, edges: list[np.ndarray], shown: np.ndarray,
             thickness: int) -> None:
    """Draw the band's edges, as far as the band is wider than its outline."""
    width = np.abs(edges[0] - edges[1]).sum(-1) / 16.0
    for edge in edges:
        line = edge[shown & (width > 4 * thickness)]
        if len(line) > 1:
            cv2.polylines(view, [line], False, (250, 252, 255), thickness, cv2.LINE_AA, 4)


def _stop_bar(view: np.ndarray, edges: list[np.ndarray], shown: np.ndarray,
              speeds: np.ndarray) -> None:
    """Close the band with a red bar where the plan comes to rest."""
    if speeds[-1] < 0.5 and shown[-1]:
        for colour, thickness in (((255, 255, 255), 8), (d.ALARM, 5)):
            cv2.polylines(view, [np.stack([edges[0][-1], edges[1][-1]])], False, colour,
                          thickness, cv2.LINE_AA, 4)
