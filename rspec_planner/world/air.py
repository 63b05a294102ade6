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
"""One camera's constant maps, and what a weather makes of them: sky, haze, headlight cone."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from rspec_planner.world.ground import atlas_coordinates
from rspec_planner.world.rig import Rig
from rspec_planner.world.scene import Weather

HAZE_DAY = (206, 216, 226)
HAZE_NIGHT = (20, 23, 32)
AMBIENT_NIGHT = 0.15
_HEADLIGHT_X = 3.7  # metres ahead of the rear axle
_HORIZON_M = 140.0  # distance given to the sky and to ground beyond the atlas
_RAIN_EXTINCTION = 0.006  # 1/m at full rain
_STEPS = 4096.0  # weights are rounded to this, so that the last bit of exp cannot matter


@dataclass(frozen=True)
class View:
    """Constant geometry of one camera; ground arrays cover the rows from `horizon` down."""

    rotation: np.ndarray  # (3, 3) camera <- ego
    focal: float
    centre: tuple[float, float]
    horizon: int  # first row that sees the ground
    maps: tuple[np.ndarray, np.ndarray]  # fixed-point remap into the atlas
    ground: np.ndarray  # (rows, W, 2) ego x, y
    distance: np.ndarray  # (rows, W) metres
    elevation: np.ndarray  # (H, W) sine of the angle above the horizon


@dataclass(frozen=True)
class Air:
    """What one weather adds to one view."""

    sky: np.ndarray  # (horizon, W, 3) uint8
    keep: np.ndarray | None  # (rows, W) float32 weight of the ground; None: all of it
    lose: np.ndarray | None  # 1 - keep
    veil: np.ndarray  # (rows, W, 3) uint8, what the lost weight shows
    light: tuple[np.ndarray, np.ndarray] | None  # night: ground brightness and its complement


def build_view(rig: Rig, name: str) -> View:
    """Return the constant maps of camera `name`."""
    intrinsics, pose = rig.intrinsics[name], rig.extrinsics[name]
    focal, centre = float(intrinsics[0, 0]), (float(intrinsics[0, 2]), float(intrinsics[1, 2]))
    u, v = np.meshgrid(np.arange(rig.width), np.arange(rig.height))
    rays = np.stack([(u - centre[0]) / focal, (v - centre[1]) / focal, np.ones_like(u)], -1)
    rays = rays @ pose[:3, :3].T
    elevation = rays[..., 2] / np.sqrt((rays ** 2).sum(-1))
    below = rays[..., 2].max(axis=1) < -1e-3
    horizon = int(np.argmax(below)) if below.any() else rig.height
    down = rays[horizon:]
    scale = pose[2, 3] / np.maximum(-down[..., 2], 1e-6)
    x, y = pose[0, 3] + scale * down[..., 0], pose[1, 3] + scale * down[..., 1]
    distance = np.minimum(np.hypot(x - pose[0, 3], y), _HORIZON_M)
    footprint = np.hypot(x - pose[0, 3], y) ** 2 / (focal * pose[2, 3])
    columns, rows = atlas_coordinates(x, y, footprint, tele=focal > 2 * rig.width / 2)
    maps = cv2.convertMaps(columns, rows, cv2.CV_16SC2)
    return View(pose[:3, :3].T.copy(), focal, centre, horizon, (maps[0], maps[1]),
                np.stack([x, y], -1), distance, elevation)


def headlight(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the brightness 0..1 that the ego's headlights and a dark sky give at (x, y)."""
    ahead = np.maximum(x - _HEADLIGHT_X, 0.0)
    spread = np.exp(-(y / (0.36 * ahead + 0.9)) ** 2)
    reach = 1.0 / (1.0 + (ahead / 34.0) ** 2)
    beam = np.where(x > _HEADLIGHT_X - 0.5, spread * reach, 0.0)
    return _rounded(np.minimum(AMBIENT_NIGHT + 0.9 * beam, 1.0))


def extinction(weather: Weather) -> float:
    """Return fog and rain together, 1/m."""
    return weather.fog + _RAIN_EXTINCTION * weather.rain


def haze_colour(weather: Weather) -> np.ndarray:
    """Return the colour (3,) float64 that fog fades to."""
    return np.array(HAZE_NIGHT if weather.night else HAZE_DAY, np.float64)


def build_air(view: View, weather: Weather) -> Air:
    """Return the images and weights that depend on the weather only."""
    haze = haze_colour(weather)
    sigma = extinction(weather)
    height = view.elevation[:view.horizon, :, None]
    high = np.array((10, 13, 26) if weather.night else (112, 156, 214), np.float64)
    clear = np.clip(height * 1.6, 0.0, 1.0) ** 0.7 * (1.0 - 0.85 * weather.rain)
    clear = clear * np.exp(-sigma * 40.0)
    sky = np.round(haze + (high - haze) * clear).astype(np.uint8)
    keep = np.exp(-sigma * view.distance)
    if weather.rain > 0.0:  # a wet road mirrors the sky where one looks along it
        grazing = np.clip(1.0 + view.elevation[view.horizon:] * 3.0, 0.0, 1.0) ** 2
        keep = keep * (1.0 - 0.35 * weather.rain * grazing)
    veil = np.empty((*view.distance.shape, 3), np.uint8)
    veil[:] = haze.astype(np.uint8)
    light = None
    if weather.night:
        bright = headlight(view.ground[..., 0], view.ground[..., 1]).astype(np.float32)
        light = (bright, 1.0 - bright)
    if sigma <= 0.0:
        return Air(sky, None, None, veil, light)
    weight = _rounded(keep).astype(np.float32)
    return Air(sky, weight, 1.0 - weight, veil, light)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Round weights to a grid that absorbs the last bits of transcendental functions."""
    return np.round(values * _STEPS) / _STEPS
