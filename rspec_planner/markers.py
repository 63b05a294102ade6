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
Markers for RViz and Foxglove: candidates, the chosen path, the reasoning and the footprint.

Everything is stamped t0 and dies after two planning periods, so an old plan vanishes.
"""

from __future__ import annotations

import textwrap

from builtin_interfaces.msg import Duration
from geometry_msgs.msg import Point
import numpy as np
from numpy.typing import NDArray
from std_msgs.msg import ColorRGBA
from visualization_msgs.msg import Marker, MarkerArray

from rspec_planner.parameters import VehicleParameters
from rspec_planner.planner.plan import Plan
from rspec_planner.ros_conversions import (
    BASE_FRAME,
    chosen_candidate,
    make_header,
    published_poses,
)

Floats = NDArray[np.float64]

LIFT_M = 0.3  # above the ground, so that map polygons do not flicker through
TEXT_HEIGHT_M = 7.0  # seen from 25 m behind and 11 m up, the plan stays below the text
TEXT_SIZE_M = 0.8
TEXT_COLUMNS = 44  # from 25 m behind, a sentence on one line is wider than the view
FULL_SPEED_MPS = 15.0  # green from here on; red is standing


def speed_colours(speeds: Floats) -> list[ColorRGBA]:
    """Return one colour per speed (n,) in m/s: red stands, yellow is slow, green is fast."""
    share = np.clip(speeds / FULL_SPEED_MPS, 0.0, 1.0)
    red, green = np.minimum(1.0, 2.0 - 2.0 * share), np.minimum(1.0, 2.0 * share)
    return [ColorRGBA(r=float(r), g=float(g), b=0.1, a=0.95) for r, g in zip(red, green)]


def _points(plan: Plan, poses: Floats, frame: str, lift: float = LIFT_M) -> list[Point]:
    _, matrices = published_poses(plan, poses, frame)
    return [Point(x=x, y=y, z=z + lift) for x, y, z in matrices[:, :3, 3].tolist()]


def _marker(plan: Plan, frame: str, lifetime: Duration, namespace: str, kind: int,
            index: int = 0) -> Marker:
    frame_id = BASE_FRAME if frame == BASE_FRAME else plan.odometry_frame
    marker = Marker(header=make_header(plan.t0_ns, frame_id), ns=namespace, id=index, type=kind,
                    action=Marker.ADD, lifetime=lifetime, frame_locked=frame == BASE_FRAME)
    marker.pose.orientation.w = 1.0
    return marker


def _trajectories(plan: Plan, frame: str, lifetime: Duration) -> list[Marker]:
    """Return one line per candidate, grey, and the chosen one coloured by speed."""
    chosen = chosen_candidate(plan)
    markers = []
    for index, poses in enumerate(plan.candidates):
        marker = _marker(plan, frame, lifetime, 'trajectory', Marker.LINE_STRIP, index)
        marker.points = _points(plan, poses, frame)
        marker.scale.x = 0.3 if index == chosen else 0.1
        if index == chosen:
            marker.colors = speed_colours(plan.speeds)
        marker.color = ColorRGBA(r=0.6, g=0.6, b=0.6, a=0.6)
        markers.append(marker)
    return markers


def _waypoints(plan: Plan, frame: str, lifetime: Duration) -> Marker:
    """Return a dot for each full second of the plan."""
    marker = _marker(plan, frame, lifetime, 'waypoints', Marker.SPHERE_LIST)
    marker.points = _points(plan, plan.poses[10::10], frame)
    marker.colors = speed_colours(plan.speeds[10::10])
    marker.scale.x = marker.scale.y = marker.scale.z = 0.5
    return marker


def _reasoning(plan: Plan, frame: str, lifetime: Duration) -> Marker:
    marker = _marker(plan, frame, lifetime, 'reasoning', Marker.TEXT_VIEW_FACING)
    lines = textwrap.wrap(plan.reasoning.text, TEXT_COLUMNS)
    marker.text = '\n'.join(lines)
    # RViz centres a text on its position, so more lines go higher
    lift = TEXT_HEIGHT_M + TEXT_SIZE_M * max(len(lines) - 1, 0) / 2
    marker.pose.position = _points(plan, plan.poses[:1], frame, lift)[0]
    marker.scale.z = TEXT_SIZE_M
    marker.color = ColorRGBA(r=1.0, g=1.0, b=1.0, a=1.0)
    return marker


def _footprint(plan: Plan, frame: str, lifetime: Duration, vehicle: VehicleParameters) -> Marker:
    rear, half = -vehicle.rear_overhang_m, vehicle.width_m / 2
    front = rear + vehicle.length_m
    corners = [(rear, -half), (front, -half), (front, half), (rear, half), (rear, -half)]
    marker = _marker(plan, frame, lifetime, 'ego_footprint', Marker.LINE_STRIP)
    marker.points = _points(plan, np.array([[x, y, 0.0, 0.0] for x, y in corners]), frame)
    marker.scale.x = 0.1
    marker.color = ColorRGBA(r=0.2, g=0.6, b=1.0, a=0.9)
    return marker


def plan_markers(plan: Plan, frame: str, period_s: float,
                 vehicle: VehicleParameters) -> MarkerArray:
    """Return the markers of a plan; `frame` is 'odometry' or 'base_link'."""
    seconds, nanoseconds = divmod(round(2e9 * period_s), 1_000_000_000)
    lifetime = Duration(sec=seconds, nanosec=nanoseconds)
    return MarkerArray(markers=[*_trajectories(plan, frame, lifetime),
                                _waypoints(plan, frame, lifetime),
                                _reasoning(plan, frame, lifetime),
                                _footprint(plan, frame, lifetime, vehicle)])
