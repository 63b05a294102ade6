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
The last gate before anything is published: what a plan must keep, what is done when it does not.

Knows the parameters, not ROS. It judges every plan again, whoever made it, so that a defect of an
engine is caught where it would leave the process.
"""

from __future__ import annotations

from collections.abc import Callable

from rspec_planner.parameter_groups import GuardParameters
from rspec_planner.planner.fallback import stop_plan
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plan import Plan
from rspec_planner.planner.trajectory import check_plan, TrajectoryLimits

FALLBACKS = ('last_valid', 'stop')


def guard_limits(parameters: GuardParameters) -> TrajectoryLimits:
    """Return the trajectory limits that the parameters ask for."""
    return TrajectoryLimits(
        start_m=parameters.max_start_error_m, speed_mps=parameters.max_speed_error_mps,
        step_m=parameters.max_step_m, allow_reverse=parameters.allow_reverse,
        acceleration_mps2=(-parameters.max_deceleration_mps2, parameters.max_acceleration_mps2),
        curvature_1pm=(-parameters.max_curvature_1pm, parameters.max_curvature_1pm),
        lateral_mps2=parameters.max_lateral_acceleration_mps2)


class Guard:
    """
    Publish what stands in for a plan that is not there.

    `repeat` publishes an old plan under its old stamp, `stop` a controlled stop on its own topic.
    """

    def __init__(self, repeat: Callable[[Plan], None], stop: Callable[[Plan], None]) -> None:
        self._repeat, self._stop = repeat, stop

    def fall_back(self, parameters: GuardParameters, observation: Observation,
                  previous: Plan | None, now_ns: int, reason: str) -> str:
        """Do what `guard.fallback` says and return its name, '' when nothing was published."""
        if parameters.fallback == 'last_valid' and previous is not None:
            if (now_ns - previous.t0_ns) / 1e6 <= parameters.last_valid_max_age_ms:
                self._repeat(previous)
                return 'last_valid'
        if parameters.fallback == 'stop':
            limits = guard_limits(parameters)
            made = stop_plan(observation, previous, parameters.stop_deceleration_mps2, reason,
                             limits)
            if check_plan(made, observation.t0_ns, limits).accepted:
                self._stop(made)
                return 'stop'
        return ''
