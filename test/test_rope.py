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
import torch

from rspec_planner.model.rope import (
    apply_rotary,
    axis_of_angle,
    flat_cos_sin,
    merge_order,
    mrope_cos_sin,
    rotate,
    vision_cos_sin,
)


def test_axes_take_turns_until_their_section_ends():
    axis = axis_of_angle(64, (24, 20, 20)).tolist()
    assert axis[:60] == [0, 1, 2] * 20
    assert axis[60:] == [0, 0, 0, 0]


def test_uneven_sections_end_at_three_times_their_size():
    axis = axis_of_angle(16, (6, 5, 5)).tolist()
    assert axis == [0, 1, 2] * 5 + [0]
    axis = axis_of_angle(16, (10, 4, 2)).tolist()
    assert [i for i, a in enumerate(axis) if a == 1] == [1, 4, 7, 10]
    assert [i for i, a in enumerate(axis) if a == 2] == [2, 5]


def test_equal_axes_reduce_to_flat_rotary():
    positions = torch.arange(50)
    wide = mrope_cos_sin(positions.expand(3, -1), 64, 1e4, (12, 10, 10))
    flat = flat_cos_sin(positions, 64, 1e4)
    for a, b in zip(wide, flat):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_each_axis_moves_only_its_own_angles():
    base = torch.full((3, 1), 7)
    for axis in range(3):
        moved = base.clone()
        moved[axis] += 5
        changed = mrope_cos_sin(base, 128, 5e6, (24, 20, 20))[0] != \
            mrope_cos_sin(moved, 128, 5e6, (24, 20, 20))[0]
        own = axis_of_angle(64, (24, 20, 20)) == axis
        assert not changed[0, :64][~own].any()
        assert changed[0, :64][own][:10].all()  # the slowest angles may round to the same


def test_batched_positions_give_batched_tables():
    positions = torch.randint(0, 300, (4, 3, 11))
    cos, sin = mrope_cos_sin(positions, 32, 1e4, (6, 5, 5))
    assert cos.shape == sin.shape == (4, 11, 32)
    for row in range(4):
        one, _ = mrope_cos_sin(positions[row], 32, 1e4, (6, 5, 5))
        torch.testing.assert_close(cos[row], one, rtol=0, atol=0)


def test_rotary_is_a_rotation_of_pairs_half_a_head_apart():
    x = torch.randn(2, 3, 5, 8)
    positions = torch.arange(5)
    cos, sin = flat_cos_sin(positions, 8, 100.0)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angle = positions[:, None] / 100.0 ** (torch.arange(4) / 4)
    want = pairs * torch.polar(torch.ones_like(angle), angle)
    got = rotate(x, cos, sin)
    torch.testing.assert_close(got, torch.cat((want.real, want.imag), -1))


def test_scores_depend_on_the_distance_only():
    q, k = torch.randn(1, 1, 1, 64).double(), torch.randn(1, 1, 1, 64).double()

    def score(i: int, j: int) -> float:
        qi, _ = apply_rotary(q, k, *flat_cos_sin(torch.tensor([i]), 64, 1e4))
        _, kj = apply_rotary(q, k, *flat_cos_sin(torch.tensor([j]), 64, 1e4))
        return float((qi * kj).sum())

    assert abs(score(3, 1) - score(103, 101)) < 1e-3
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_half_precision_is_turned_in_fp32_and_cast_back():
    x = torch.randn(1, 2, 6, 32)
    cos, sin = flat_cos_sin(torch.arange(400, 406), 32, 1e4)
    half = x.to(torch.bfloat16)
    got = rotate(half, cos, sin)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, rotate(half.float(), cos, sin).to(torch.bfloat16))


def test_batched_tables_turn_each_row_of_the_batch_by_its_own_angle():
    x = torch.randn(2, 3, 4, 16)
    positions = torch.tensor([[0, 1, 2, 3], [9, 8, 7, 6]])
    cos, sin = flat_cos_sin(positions, 16, 1e4)
    got = rotate(x, cos, sin)
    for row in range(2):
        torch.testing.assert_close(got[row], rotate(x[row:row + 1], cos[row], sin[row])[0])


def test_merge_groups_are_contiguous_and_cover_the_grid():
    row, col = merge_order(4, 6, 2)
    assert list(zip(row.tolist(), col.tolist()))[:8] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert sorted((row * 6 + col).tolist()) == list(range(24))


def test_vision_tables_turn_by_row_then_column():
    cos, sin = vision_cos_sin(4, 6, 72, 2)
    row, col = merge_order(4, 6, 2)
    frequency = 10_000.0 ** (-2 * torch.arange(18) / 36)
    angle = torch.cat((row[:, None] * frequency, col[:, None] * frequency), -1)
    torch.testing.assert_close(cos, torch.cat((angle, angle), -1).cos())
    torch.testing.assert_close(sin, torch.cat((angle, angle), -1).sin())
