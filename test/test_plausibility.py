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
"""Inputs that cannot be true, each by its name; those of the embedded world can."""

from dataclasses import replace

import numpy as np
import pytest
from test_cycle import Bench, observation_at, T0

from rspec_planner.cycle import Outcome
from rspec_planner.planner.plausibility import implausible, REASONS
from rspec_planner.world.clip import ClipSpec
from rspec_planner.world.generate import clip_observation, generate_pair
from rspec_planner.world.renderer import Renderer
from rspec_planner.world.rig import Rig


@pytest.fixture(scope='module')
def scenes():
    """Return observations of both twins of some families, night and fog among them."""
    renderer = Renderer(Rig(width=320, height=192))
    specs = [ClipSpec('val', family, index, True) for family in ('red_light', 'cut_in', 'curve')
             for index in range(3)]
    return [clip_observation(clip) for spec in specs for clip in generate_pair(spec, renderer)]


def test_the_embedded_world_is_plausible(scenes):
    assert [implausible(scene) for scene in scenes] == [None] * len(scenes)


def with_camera(observation, index, frames):
    images = observation.images.copy()
    images[index] = frames
    return replace(observation, images=images)


def test_pictures_that_cannot_be_true(scenes):
    scene = scenes[2]
    assert scene.speed_mps > 1.0
    random = np.random.default_rng(0)
    shape = scene.images[2].shape
    for noise in (random.integers(0, 256, shape, dtype=np.uint8),
                  np.clip(random.normal(128, 30, shape), 0, 255).astype(np.uint8)):
        reason, detail = implausible(with_camera(scene, 2, noise))
        assert reason == 'camera_noise' and 'cross_right' in detail
    dark = random.integers(0, 5, shape, dtype=np.uint8)
    assert implausible(with_camera(scene, 3, dark))[0] == 'camera_black'
    assert implausible(with_camera(scene, 3, np.zeros(shape, np.uint8)))[0] == 'camera_black'
    still = with_camera(scene, 0, scene.images[0][:1])
    assert implausible(still)[0] == 'camera_frozen'
    assert implausible(still, check_content=False) is None
    poses = np.tile(np.eye(4), (16, 1, 1))
    assert implausible(replace(still, ego_poses=poses, speed_mps=0.0)) is None


def moved(observation, row, metres):
    poses = observation.ego_poses.copy()
    poses[:row, 0, 3] -= metres
    return replace(observation, ego_poses=poses)


def test_odometry_that_cannot_be_true():
    scene = observation_at(T0)
    assert implausible(scene) is None
    reason, detail = implausible(moved(scene, 5, 30.0))
    assert reason == 'odometry_jump' and '30.5 m within 0.1 s, 1.1 s before t0' in detail
    still = replace(scene, ego_poses=np.tile(np.eye(4), (16, 1, 1)))
    reason, detail = implausible(still)
    assert reason == 'odometry_contradicts_speed' and 'the twist says 5.0 m/s' in detail
    assert implausible(replace(still, speed_mps=2.0)) is None


def test_a_cycle_names_it_and_plans_nothing():
    bench = Bench()
    bench.chosen = moved(observation_at(T0), 5, 30.0)
    result = bench.run()
    assert (result.outcome, result.reason) == (Outcome.SKIPPED, 'odometry_jump')
    bench.chosen = with_camera(observation_at(T0), 1, 0)
    assert bench.run().reason == 'camera_black'
    bench.config = replace(bench.config, cameras=replace(bench.config.cameras,
                                                         content_check='ignore'))
    assert bench.run().outcome is Outcome.PUBLISHED
    assert len(set(REASONS)) == 5 and len(bench.planner.observations) == 1
