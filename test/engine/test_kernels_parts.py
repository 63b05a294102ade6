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
Products that leave their parts to the kernel behind them, against float64.

References everywhere; Triton on a GPU, and without one through Triton's interpreter.
"""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ['TRITON_INTERPRET'] = '1'
pytest.importorskip('triton', reason='Triton is not installed: requirements-cuda.txt')

from rspec_planner.engine.kernels.linear import Plan, product  # noqa: E402
from rspec_planner.engine.kernels.select import REFERENCE, triton_kernels  # noqa: E402

TRITON = triton_kernels()
DEVICE = 'cuda' if CUDA else 'cpu'
KERNELS = pytest.mark.parametrize('kernels', [REFERENCE, TRITON], ids=['reference', 'triton'])


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def poisoned(*shape):
    return torch.full(shape, float('nan'), device=DEVICE)


def normed(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize('split', [1, 2, 3, 8])
@pytest.mark.parametrize('rows', [1, 7, 16])
def test_parts_add_up_to_the_product_and_nothing_else_is_written(split, rows):
    x, weight = drawn(rows, 520), drawn(40, 520, seed=1)
    parts = poisoned(9, rows, 40)
    assert product(x, weight, parts, width=16, plan=Plan(16, 64, split)) == split
    torch.testing.assert_close(parts[:split].double().sum(0), x.double() @ weight.double().t(),
                               rtol=1e-4, atol=1e-4)
    assert bool(parts[split:].isnan().all())


def test_a_row_of_parts_does_not_depend_on_its_neighbours():
    x, weight = drawn(16, 256), drawn(96, 256, seed=1)
    found = []
    for rows in (1, 7, 16):
        parts = poisoned(2, rows, 96)
        product(x[:rows], weight, parts, width=16, plan=Plan(32, 64, 2))
        found.append(parts)
    assert torch.equal(found[0][:, 0], found[2][:, 0])
    assert torch.equal(found[1], found[2][:, :7])


@KERNELS
@pytest.mark.parametrize('count', [1, 4])
@pytest.mark.parametrize('with_norm', [True, False])
def test_gather_adds_parts_and_residual_and_norms_the_sum(kernels, count, with_norm):
    parts, wide, weight = drawn(count, 6, 24), drawn(6, 3, 24, seed=1), drawn(24, seed=2)
    out, totals = poisoned(6, 24), poisoned(6, 2, 24)
    residual, total = wide[:, 1], totals[:, 1]  # rows of a larger buffer, as taps are
    expected = parts.double().sum(0) + residual.double()
    kernels.gather(parts, residual, total, weight if with_norm else None, out, 1e-6)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-6)
    assert bool(totals[:, 0].isnan().all())
    if with_norm:
        torch.testing.assert_close(out.double(), normed(expected, weight.double()), rtol=1e-5,
                                   atol=1e-5)
    else:
        assert bool(out.isnan().all())


@KERNELS
def test_gather_in_the_place_of_its_residual(kernels):
    parts, x, weight = drawn(3, 5, 16), drawn(5, 16, seed=1), drawn(16, seed=2)
    expected, out = parts.double().sum(0) + x.double(), poisoned(5, 16)
    kernels.gather(parts, x, x, weight, out, 1e-6)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)


@KERNELS
def test_rotate_adds_parts_up(kernels):
    samples, rows, heads, kv, dim = 2, 4, 4, 2, 16
    whole = drawn(samples, rows, heads + 2 * kv, dim)
    split = torch.stack((drawn(*whole.shape, seed=5), drawn(*whole.shape, seed=6), whole))
    split[2] -= split[0] + split[1]
    norms = drawn(dim, seed=1), drawn(dim, seed=2)
    angles = drawn(20, dim // 2, seed=3)
    at = torch.tensor([3], device=DEVICE)
    found = []
    for qkv in (whole, split):
        q, keys, values = (poisoned(*size) for size in (
            (samples, rows, heads, dim), *((samples, kv, 8, dim),) * 2))
        kernels.rotate(qkv, norms, (angles.cos(), angles.sin()), at, at, q, keys, values, 1e-6)
        found.append((q, keys[:, :, 3:7], values[:, :, 3:7]))
    for one, other in zip(*found):
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_split_product_takes_the_tile_of_its_width():
    """Sixteen rows beside a width of 64 run in the tile of 64, whatever the plans say."""
    x, weight, parts = drawn(16, 64), drawn(32, 64, seed=1), poisoned(8, 16, 32)
    count = TRITON.product(x, weight, parts, width=64)
    torch.testing.assert_close(parts[:count].double().sum(0), x.double() @ weight.double().t(),
                               rtol=1e-4, atol=1e-4)
