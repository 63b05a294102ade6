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
"""The tap buffer: rows at their positions, and the gather of an accepted path."""

import pytest
import torch

from rspec_planner.model.taps import TapBuffer


def parts(*rows):
    return [torch.randn(2, count, 5) for count in rows]


@pytest.mark.parametrize('on_device', [False, True])
def test_rows_lie_at_their_positions(on_device):
    taps = TapBuffer((0, 2), 2, 12, 5)
    given = parts(3, 3)
    taps.write(given, torch.arange(4, 7) if on_device else 4, 3)
    assert torch.equal(taps.rows[:, :, 4:7], torch.stack(given))
    assert not taps.rows[:, :, :4].any() and not taps.rows[:, :, 7:].any()


@pytest.mark.parametrize('on_device', [False, True])
def test_a_shorter_part_ends_at_the_same_position(on_device):
    taps = TapBuffer((1, 3), 2, 12, 5)
    given = parts(6, 2)
    taps.write(given, torch.arange(1, 7) if on_device else 1, 6)
    assert torch.equal(taps.rows[0, :, 1:7], given[0])
    assert torch.equal(taps.rows[1, :, 5:7], given[1])
    assert not taps.rows[1, :, :5].any()


def test_a_lone_shorter_part_ends_where_the_forward_does():
    taps = TapBuffer((3,), 2, 12, 5)
    given = parts(2)
    taps.write(given, 1, 6)
    assert torch.equal(taps.rows[0, :, 5:7], given[0])
    assert not taps.rows[0, :, :5].any()


def test_writing_keeps_the_buffer_and_its_dtype():
    taps = TapBuffer((1,), 2, 8, 5, torch.bfloat16)
    address = taps.rows.data_ptr()
    given = parts(2)
    taps.write(given, 0, 2)
    taps.write(given, torch.arange(2, 4), 2)
    assert taps.rows.data_ptr() == address
    assert torch.equal(taps.rows[0, :, :2], given[0].bfloat16())
    assert torch.equal(taps.rows[0, :, :2], taps.rows[0, :, 2:4])


def test_gather_makes_a_path_contiguous():
    taps = TapBuffer((0, 1), 1, 10, 1)
    taps.rows.copy_(torch.arange(10.0)[None, None, :, None].expand(2, 1, 10, 1))
    taps.gather(3, [0, 2, 5])
    assert taps.rows[0, 0, :, 0].tolist() == [0, 1, 2, 3, 5, 8, 6, 7, 8, 9]
    assert torch.equal(taps.rows[0], taps.rows[1])
    taps.gather(3, [0, 1])
    assert taps.rows[0, 0, :, 0].tolist() == [0, 1, 2, 3, 5, 8, 6, 7, 8, 9]
