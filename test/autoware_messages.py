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
Strict stand-ins for Autoware's messages, which no wheel offers.

Made from the definitions in autoware_msgs and autoware_internal_msgs (fields, types, order); an
unknown field, a wrong type or a number that float32 cannot hold is refused as rclpy does.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from builtin_interfaces.msg import Duration, Time
from geometry_msgs.msg import Pose
import numpy as np
from std_msgs.msg import Header, String
from unique_identifier_msgs.msg import UUID


class Strict:
    """A message that knows its fields."""

    FIELDS: dict[str, Any] = {}

    def __init__(self, **values: Any) -> None:
        for name, kind in self.FIELDS.items():
            setattr(self, name, values.pop(name) if name in values
                    else [] if isinstance(kind, list) else kind())
        assert not values, f'{type(self).__name__} has no field {", ".join(values)}'

    def __setattr__(self, name: str, value: Any) -> None:
        kind = self.FIELDS[name]
        items = value if isinstance(kind, list) else [value]
        wanted = kind[0] if isinstance(kind, list) else kind
        for item in items:
            assert isinstance(item, wanted), f'{type(self).__name__}.{name} is {item!r}'
            if wanted is float:
                assert abs(item) < np.finfo(np.float32).max
        object.__setattr__(self, name, value)


def message(name: str, **fields: Any) -> type[Strict]:
    return type(name, (Strict,), {'FIELDS': fields})


TrajectoryPoint = message(
    'TrajectoryPoint', time_from_start=Duration, pose=Pose, longitudinal_velocity_mps=float,
    lateral_velocity_mps=float, acceleration_mps2=float, heading_rate_rps=float,
    front_wheel_angle_rad=float, rear_wheel_angle_rad=float)
Trajectory = message('Trajectory', header=Header, points=[TrajectoryPoint])
CandidateTrajectory = message('CandidateTrajectory', header=Header, generator_id=UUID,
                              points=[TrajectoryPoint])
GeneratorInfo = message('GeneratorInfo', generator_id=UUID, generator_name=String)
CandidateTrajectories = message('CandidateTrajectories',
                                candidate_trajectories=[CandidateTrajectory],
                                generator_info=[GeneratorInfo])
StringStamped = message('StringStamped', stamp=Time, data=str)
Float64Stamped = message('Float64Stamped', stamp=Time, data=float)
PublishedTime = message('PublishedTime', header=Header, published_stamp=Time)

PACKAGES = {
    'autoware_planning_msgs': (Trajectory, TrajectoryPoint),
    'autoware_internal_planning_msgs': (CandidateTrajectories, CandidateTrajectory,
                                        GeneratorInfo),
    'autoware_internal_debug_msgs': (StringStamped, Float64Stamped),
    'autoware_internal_msgs': (PublishedTime,),
}


def install(monkeypatch: Any, *missing: str) -> None:
    """Put the packages where `import` finds them, all but the missing ones."""
    for package, kinds in PACKAGES.items():
        module = types.ModuleType(f'{package}.msg')
        for kind in kinds:
            setattr(module, kind.__name__, kind)
        held = None if package in missing else module
        monkeypatch.setitem(sys.modules, package, held and types.ModuleType(package))
        monkeypatch.setitem(sys.modules, f'{package}.msg', held)
