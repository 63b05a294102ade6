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
Renders a `Scene` into the four cameras on a CPU, byte for byte the same everywhere.

Ground: one remap per camera from a bird's-eye atlas. Objects: flat-shaded quads in painter's
order. Then haze, exposure and sensor noise. Only OpenCV calls whose results are equal between
4.12 and 5.0 and across vector instruction sets are used: fixed-point or nearest `remap`,
`fillPoly`, `fillConvexPoly`, `pyrDown`, `blendLinear`, `convertScaleAbs`, `GaussianBlur`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
import hashlib
import math

import cv2
import numpy as np

from rspec_planner.world.air import (
    Air,
    build_air,
    build_view,
    extinction,
    haze_colour,
    headlight,
    View,
)
from rspec_planner.world.appearance import parts_of
from rspec_planner.world.ground import Atlas, SUB, TIE
from rspec_planner.world.painter import draw_order
from rspec_planner.world.rig import Rig
from rspec_planner.world.scene import Scene, Weather
from rspec_planner.world.shapes import Part

_NEAR_M = 0.3  # nothing closer to the image plane is drawn
_REACH_M = 150.0  # objects farther than this are left out
_BEHIND_M = 20.0
_SLACK = 64  # pixels by which noise and rain images exceed a frame, so that they can shift
_WEATHERS = 4  # kept sets of weather maps
_LIMIT = 4000.0  # pixels; projected corners are clipped to this
_MIN_SIZE = 0.4  # pixels; smaller faces that do not shine are left out
_SUN = np.array([-0.12, 0.10, 0.27])  # world-frame shading of a face by its normal
_BASE = 0.72
_JITTER = 0.02  # exposure varies by this between frames


@dataclass(frozen=True)
class _Soup:
    """All quads that face the rig, far to near, ego axes."""

    corners: np.ndarray  # (3, 4, n) x y z of each corner, relative to the optical centre
    colours: np.ndarray  # (n, 3) after shading and haze
    shines: np.ndarray  # (n,) bool


class Renderer:
    """
    Draws scenes for one rig; keeps maps and caches, so reuse it, one per process or thread.

    `render` depends on nothing but its scene and the rig.
    """

    def __init__(self, rig: Rig | None = None) -> None:
        self.rig = rig or Rig()
        self._atlas = Atlas()
        self._airs: OrderedDict[Weather, tuple[Air, ...]] = OrderedDict()

    def render(self, scene: Scene) -> np.ndarray:
        """
        Return (4, H, W, 3) uint8 RGB, cameras in `rig.names` order.

        Raises ConfigurationError for an unknown agent kind.
        """
        soup, shadows = self._gather(scene)
        self._atlas.draw(scene.paints, (scene.ego_x, scene.ego_y, scene.ego_yaw), shadows,
                         scene.weather.rain)
        rig = self.rig
        frames = np.empty((len(rig.names), rig.height, rig.width, 3), np.uint8)
        key = f'{scene.noise_seed}/{round(scene.time_s * 1000)}'.encode()
        random = hashlib.blake2b(key, digest_size=64).digest()
        airs = self._air(scene.weather)
        for i, (view, air) in enumerate(zip(self._views, airs)):
            self._draw_ground(frames[i], view, air)
            _draw_soup(frames[i], view, soup)
            self._expose(frames[i], scene.weather, random[8 * i:8 * i + 8])
        return frames

    @cached_property
    def _views(self) -> tuple[View, ...]:
        return tuple(build_view(self.rig, name) for name in self.rig.names)

    @cached_property
    def _noise(self) -> np.ndarray:
        """Return the sensor noise bank (H + slack, W + slack, 3)."""
        shape = (self.rig.height + _SLACK, self.rig.width + _SLACK)
        grain = np.random.RandomState(1).randint(0, 9, shape).astype(np.uint8)
        return np.repeat(grain[:, :, None], 3, axis=2)

    @cached_property
    def _streaks(self) -> np.ndarray:
        """Return the rain bank: slanted bright streaks on black."""
        height, width = self.rig.height + _SLACK, self.rig.width + _SLACK
        bank = np.zeros((height, width, 3), np.uint8)
        state = np.random.RandomState(2)
        for _ in range(width * height // 260):
            x, y = state.randint(0, width * 16), state.randint(0, height * 16)
            length, level = state.randint(6, 20) * 16, state.randint(24, 90)
            quad = np.array([[x, y], [x + 8, y], [x + 8 + length // 6, y + length],
                             [x + length // 6, y + length]], np.int32)
            cv2.fillConvexPoly(bank, quad, (level, level, level), cv2.LINE_AA, SUB)
        return bank

    def _air(self, weather: Weather) -> tuple[Air, ...]:
        """Return the weather maps of all views, from the cache when possible."""
        airs = self._airs.get(weather)
        if airs is None:
            airs = tuple(build_air(view, weather) for view in self._views)
            self._airs[weather] = airs
            while len(self._airs) > _WEATHERS:
                self._airs.popitem(last=False)
        return airs

    def _gather(self, scene: Scene) -> tuple[_Soup, np.ndarray]:
        """Return the visible quads of all agents and the footprints (n, 4, 2) of shadows."""
        c, s = math.cos(scene.ego_yaw), math.sin(scene.ego_yaw)
        parts: list[Part] = []
        poses: list[tuple[float, float, float, float]] = []  # ego x, y, cos, sin
        for agent in scene.agents:
            dx, dy = agent.x - scene.ego_x, agent.y - scene.ego_y
            x, y = dx * c + dy * s, dy * c - dx * s
            reach = 0.5 * math.hypot(agent.length, agent.width) + 1.0
            if x < -_BEHIND_M - reach or math.hypot(x, y) > _REACH_M:
                continue
            turn = agent.yaw - scene.ego_yaw
            for part in parts_of(agent, scene.time_s, scene.weather.night):
                parts.append(part)
                poses.append((x, y, math.cos(turn), math.sin(turn)))
        if not parts:
            return _Soup(np.zeros((3, 4, 0)), np.zeros((0, 3)), np.zeros(0, bool)), \
                np.zeros((0, 4, 2))
        placed = np.array(poses)
        prints = _turn(np.stack([part.footprint for part in parts]), placed)
        order = draw_order(prints, self.rig.position[:2])
        shaded = np.array([part.shadow for part in parts])
        return self._soup(scene, [parts[i] for i in order], placed[order]), prints[shaded]

    def _soup(self, scene: Scene, parts: list[Part], placed: np.ndarray) -> _Soup:
        """Return the quads of `parts` in their order, culled, shaded, with haze."""
        where = np.repeat(placed, [len(part.quads) for part in parts], axis=0)
        corners = _turn(np.concatenate([part.quads for part in parts]), where)
        normals = np.concatenate([part.normals for part in parts])
        glow = np.concatenate([part.glow for part in parts])[:, None]
        colours = np.concatenate([part.colours for part in parts])
        nx = normals[:, 0] * where[:, 2] - normals[:, 1] * where[:, 3]
        ny = normals[:, 0] * where[:, 3] + normals[:, 1] * where[:, 2]
        nz = normals[:, 2]
        centre = corners.mean(axis=1)
        to_eye = self.rig.position - centre
        facing = nx * to_eye[:, 0] + ny * to_eye[:, 1] + nz * to_eye[:, 2] > 1e-9
        c, s = math.cos(scene.ego_yaw), math.sin(scene.ego_yaw)
        shade = _BASE + _SUN[0] * (nx * c - ny * s) + _SUN[1] * (nx * s + ny * c) + _SUN[2] * nz
        weather = scene.weather
        if weather.night:
            shade = shade * headlight(centre[:, 0], centre[:, 1])
        lamp = glow / min(max(_exposure(weather), 0.3), 1.0)  # lamps outshine a dim day
        lit = colours * (shade[:, None] * (1.0 - glow) + lamp)
        sigma = extinction(weather)
        if sigma > 0.0:
            distance = np.sqrt((to_eye ** 2).sum(axis=1, keepdims=True))
            keep = np.exp(-sigma * distance * (1.0 - 0.5 * glow))
            lit = lit * keep + haze_colour(weather) * (1.0 - keep)
        lit = np.floor(np.minimum(lit, 255.0) + 0.5 + TIE)
        seen = np.ascontiguousarray((corners[facing] - self.rig.position).transpose(2, 1, 0))
        return _Soup(seen, lit[facing], glow[facing, 0] >= 1.0)

    def _draw_ground(self, image: np.ndarray, view: View, air: Air) -> None:
        """Fill `image` with sky and ground under the weather."""
        np.copyto(image[:view.horizon], air.sky)
        ground = image[view.horizon:]
        if not len(ground):
            return
        cv2.remap(self._atlas.image, view.maps[0], view.maps[1], cv2.INTER_LINEAR, dst=ground)
        if air.light is not None:
            bright, dark = air.light
            cv2.blendLinear(ground, np.zeros_like(ground), bright, dark, dst=ground)
        if air.keep is not None and air.lose is not None:
            cv2.blendLinear(ground, air.veil, air.keep, air.lose, dst=ground)

    def _expose(self, image: np.ndarray, weather: Weather, random: bytes) -> None:
        """Apply rain streaks, exposure and sensor noise in place; `random` has 8 bytes."""
        height, width = image.shape[:2]
        if weather.rain > 0.0:
            top, left = random[0] % _SLACK, random[1] % _SLACK
            streaks = cv2.convertScaleAbs(self._streaks[top:top + height, left:left + width],
                                          alpha=weather.rain * (0.35 if weather.night else 0.8))
            cv2.add(image, streaks, dst=image)
        jitter = (random[2] + random[3] - 255) / 255.0 * 2.0 * _JITTER
        cv2.convertScaleAbs(image, dst=image, alpha=_exposure(weather) * (1.0 + jitter))
        top, left = random[4] % _SLACK, random[5] % _SLACK
        cv2.add(image, self._noise[top:top + height, left:left + width], dst=image)


def _exposure(weather: Weather) -> float:
    """Return the brightness factor of a whole picture."""
    return weather.light * (1.0 - 0.15 * weather.rain)


def _turn(points: np.ndarray, placed: np.ndarray) -> np.ndarray:
    """Move (n, k, 2 or 3) points by the rows (x, y, cos, sin) of `placed` (n, 4)."""
    x, y = points[..., 0], points[..., 1]
    c, s = placed[:, 2, None], placed[:, 3, None]
    moved = [x * c - y * s + placed[:, 0, None], x * s + y * c + placed[:, 1, None]]
    return np.stack([*moved, *([points[..., 2]] if points.shape[-1] == 3 else [])], axis=-1)


def _draw_soup(image: np.ndarray, view: View, soup: _Soup) -> None:
    """Draw the quads into `image`, far to near."""
    if not len(soup.colours):
        return
    height, width = image.shape[:2]
    right, down, depth = (view.rotation @ soup.corners.reshape(3, -1)).reshape(soup.corners.shape)
    nearest = depth.min(axis=0)
    visible = depth.max(axis=0) > _NEAR_M
    for axis, size, aside in ((0, width, right), (1, height, down)):
        scaled = aside * view.focal  # half-spaces hold behind the camera, too
        visible &= (scaled + view.centre[axis] * depth).max(axis=0) > 0.0
        visible &= ((size - view.centre[axis]) * depth - scaled).max(axis=0) > 0.0
    chosen = np.flatnonzero(visible)
    rays = np.stack([right[:, chosen], down[:, chosen], depth[:, chosen]], axis=-1)  # (4, m, 3)
    pixels = rays[..., :2] * (view.focal / np.maximum(rays[..., 2:], _NEAR_M)) + view.centre
    cut = nearest[chosen] <= _NEAR_M
    large = np.ptp(pixels, axis=0).max(axis=1) > _MIN_SIZE
    drawn = np.flatnonzero(large | cut | soup.shines[chosen])
    fixed = np.ascontiguousarray(_fixed(pixels[:, drawn]).transpose(1, 0, 2))
    colours = soup.colours[chosen[drawn]].tolist()
    for k, (colour, clipped) in enumerate(zip(colours, cut[drawn].tolist())):
        quad = _clip_near(rays[:, drawn[k]], view) if clipped else fixed[k]
        cv2.fillConvexPoly(image, quad, colour, cv2.LINE_AA, SUB)


def _fixed(pixels: np.ndarray) -> np.ndarray:
    """Return pixels as the rasteriser's fixed-point integers."""
    bounded = np.clip(pixels, -_LIMIT, _LIMIT)
    fixed: np.ndarray = np.floor(bounded * (1 << SUB) + (0.5 + TIE)).astype(np.int32)
    return fixed


def _clip_near(rays: np.ndarray, view: View) -> np.ndarray:
    """Return the fixed-point polygon of a quad (4, 3) cut at the near plane."""
    kept = []
    for a, b in zip(rays, np.roll(rays, -1, axis=0)):
        if a[2] >= _NEAR_M:
            kept.append(a)
        if (a[2] >= _NEAR_M) != (b[2] >= _NEAR_M):
            kept.append(a + (b - a) * ((_NEAR_M - a[2]) / (b[2] - a[2])))
    points = np.array(kept)
    return _fixed(points[:, :2] * (view.focal / points[:, 2:]) + view.centre)
