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
"""What is missing from a stream, and why."""

from __future__ import annotations

import pytest

from rspec_planner.inputs import InputWatch
from rspec_planner.losses import TopicLosses


def test_a_complete_stream_lost_nothing():
    losses = TopicLosses()
    for sequence in range(5, 50):
        losses.took(sequence)
    assert (losses.lost, losses.missing, losses.overflowed, losses.at_s) == (0, 0, 0, None)


def test_gaps_without_a_word_of_the_middleware_fell_out_of_the_queue():
    losses = TopicLosses()
    for sequence in (5, 6, 9, 10, 15):
        losses.took(sequence)
    assert (losses.missing, losses.overflowed) == (6, 6) and losses.at_s is not None
    losses.told(4)
    assert (losses.lost, losses.overflowed) == (4, 2)
    losses.told(6)
    assert (losses.lost, losses.overflowed) == (6, 0)


@pytest.mark.parametrize('sequences', [
    (7, 8, 1, 2, 3), (7, 8, 90_000, 90_001), (None, None), (3, 3)])
def test_another_publisher_is_no_gap(sequences):
    losses = TopicLosses()
    for sequence in sequences:
        losses.took(sequence)
    assert losses.missing == 0


def test_both_transports_of_a_camera_add_up():
    watch = InputWatch()
    watch.add('image0', "camera 'a'", '/a')
    watch.add('odometry', 'odometry', '/odom')
    watch.took('image0', '/a', 1)
    watch.took('image0', '/a/compressed', 8)
    watch.took('image0', '/a', 3)
    watch.lost('image0', '/a/compressed', 2)
    camera, odometry = watch.states()
    assert (camera.lost, camera.overflowed) == (2, 1) and camera.loss_age_s < 5.0
    assert (odometry.lost, odometry.overflowed, odometry.loss_age_s) == (0, 0, None)
    watch.clear()  # a clock jump undoes no loss
    assert watch.states()[0].lost == 2
