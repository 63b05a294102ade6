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
"""Kept features: the memory of two observations, taken once, and nothing mistaken for another."""

import numpy as np
import pytest
import torch

from rspec_planner.planner.vision_cache import FrameFeatures, VisionCache

STEP_NS = 100_000_000
FRAMES, CAMERAS = 4, ('left', 'right')
IMAGES = len(CAMERAS) * FRAMES


def image(stamp):
    return np.full((2, 2, 3), stamp // STEP_NS % 256, np.uint8)


def features(stamp):
    return FrameFeatures(torch.full((3, 4), float(stamp)), torch.full((2, 3, 4), float(stamp)))


def observe(cache, t0_ns, stamps):
    """Do what the planner does with the images of one observation; return the new stamps."""
    known = [(camera, stamp) for camera in CAMERAS for stamp in stamps
             if cache.knows(camera, stamp)]
    new = [(camera, stamp) for camera in CAMERAS for stamp in stamps
           if not cache.knows(camera, stamp)]
    for camera, stamp in new:
        cache.put(camera, stamp, image(stamp), features(stamp))
    for camera, stamp in known:
        found = cache.get(camera, stamp, image(stamp))
        assert torch.equal(found.features, features(stamp).features)
        assert torch.equal(found.deepstack, features(stamp).deepstack)
    cache.prune(t0_ns)
    return {stamp for _, stamp in new}


def window(t0_ns, gap=1):
    return [t0_ns - gap * STEP_NS * back for back in range(FRAMES)]


@pytest.mark.parametrize('gap', [1, 2])
def test_what_the_next_observation_shares_is_kept_however_long_a_drive(gap):
    cache = VisionCache(2 * IMAGES)
    made = observe(cache, 0, window(0, gap))
    held = {each.features.data_ptr() for each in cache._spare} | {
        entry.features.data_ptr() for _, entry in cache._entries.values()}
    assert len(made) == FRAMES and len(held) == 2 * IMAGES
    for index in range(1, 40):
        t0_ns = index * gap * STEP_NS
        assert observe(cache, t0_ns, window(t0_ns, gap)) == {t0_ns}
        assert len(cache) <= 2 * IMAGES
        assert {entry.features.data_ptr() for _, entry in cache._entries.values()} <= held


def test_images_of_a_faster_camera_find_room_too():
    """All images new in every observation, ten in a second: no more memory than before."""
    cache = VisionCache(2 * IMAGES)
    for index in range(12):
        t0_ns = index * STEP_NS + index * 7
        assert len(observe(cache, t0_ns, window(t0_ns))) == FRAMES
        assert len(cache) <= 2 * IMAGES
        assert observe(cache, t0_ns, window(t0_ns)) == set()


def test_other_pixels_of_the_same_stamp_take_its_place():
    cache = VisionCache(2)
    cache.put('left', 5, image(0), features(1))
    assert cache.get('left', 5, image(STEP_NS)) is None
    cache.put('left', 5, image(STEP_NS), features(2))
    assert len(cache) == 1 and cache.get('left', 5, image(0)) is None
    assert float(cache.get('left', 5, image(STEP_NS)).features[0, 0]) == 2.0


def test_the_image_that_was_not_used_for_longest_makes_way():
    cache = VisionCache(2)
    for stamp in (1, 2):
        cache.put('left', stamp, image(stamp), features(stamp))
    assert cache.get('left', 1, image(1)) is not None
    cache.put('left', 3, image(3), features(3))
    assert [cache.knows('left', stamp) for stamp in (1, 2, 3)] == [True, False, True]
    cache.clear()
    assert len(cache) == 0
