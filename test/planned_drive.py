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
"""Neighbouring frames of a drive, what the shipped planner makes of them, and how to compare."""

import numpy as np

from rspec_planner.evaluate.bench import drive_observations
from rspec_planner.planner.pipeline import Planner


def drive_frames(count, seed=3):
    cameras = Planner.load('tiny').profile.cameras
    return list(drive_observations(count, cameras.width, cameras.height, cameras.names, seed=seed))


def plain_plans(frames):
    """Return what decoding one token a forward on the CPU plans."""
    planner = Planner.load('tiny', num_samples=3)
    return [planner.plan(frame) for frame in frames]


def assert_same(plan, wanted, tolerance):
    """Compare words and verdict; paths and speeds to a tolerance in m and m/s."""
    assert plan.reasoning.token_ids == wanted.reasoning.token_ids
    assert plan.reasoning.text == wanted.reasoning.text
    assert plan.verdict.accepted == wanted.verdict.accepted
    for name in ('candidates', 'poses', 'speeds'):
        np.testing.assert_allclose(getattr(plan, name), getattr(wanted, name), rtol=0,
                                   atol=tolerance, err_msg=name)
