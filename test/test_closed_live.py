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
"""A drive through a live node is the drive that the closed loop computes offline."""

import numpy as np
import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed')

from node_rig import turned

from rspec_planner.evaluate.closed_loop import ClosedOptions
from rspec_planner.live.closed_live import arrays_of, compare_live
from rspec_planner.planner.fallback import stop_plan
from rspec_planner.planner.trajectory import DEFAULT_LIMITS
from rspec_planner.ros_conversions import plan_trajectory


def test_a_trajectory_on_the_wire_is_the_plan_that_was_made():
    from dataclasses import replace

    from test_guard import driving
    seen = replace(driving(8.0, 0.06), ego_pose_at_t0=turned(2.9, 40.0, -7.0, 0.0))
    plan = stop_plan(seen, None, 1.5, 'a plan along an arc', DEFAULT_LIMITS)
    poses, speeds, accelerations, curvatures = arrays_of(
        plan_trajectory(plan, 'odometry'), (40.0, -7.0, 2.9))
    assert np.abs(poses - plan.poses).max() < 1e-9
    assert np.abs(speeds - plan.speeds).max() == np.abs(accelerations
                                                        - plan.accelerations).max() == 0.0
    moving = plan.speeds > 0.01
    assert np.abs(curvatures - plan.curvatures)[moving].max() < 1e-9


@pytest.mark.ros
def test_live_and_offline_are_the_same_drive():
    report = compare_live(ClosedOptions(splits=('val',), runs=1, iso_hz=0.3), 1)
    assert report['runs'] == 1 and report['plans'] == 2
    assert report['identical'], report
