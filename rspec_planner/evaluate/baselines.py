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
"""Predictors that every learned number must be compared with."""

from __future__ import annotations

import numpy as np

from rspec_planner.evaluate.metrics import DT

#: name in tables: what it sees
BASELINES = {
    'constant_velocity': 'keeps speed and heading of t0',
    'black': 'the same target, all cameras black',
    'history_only': 'the same target without visual features',
}


def constant_velocity(speed: np.ndarray, waypoints: int = 64) -> np.ndarray:
    """Return the straight paths (N, waypoints, 2) of speeds (N,) m/s at t0."""
    time = DT * np.arange(1, waypoints + 1)
    path = np.zeros((len(speed), waypoints, 2))
    path[..., 0] = np.asarray(speed)[:, None] * time
    return path
