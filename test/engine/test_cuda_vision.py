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
"""The tower of the device-resident frame says what the model's tower says."""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ['TRITON_INTERPRET'] = '1'
pytest.importorskip('triton', reason='Triton is not installed: requirements-cuda.txt')

from rspec_planner.engine.cuda_random import random_target  # noqa: E402
from rspec_planner.engine.cuda_vision import Tower  # noqa: E402
from rspec_planner.engine.kernels.select import REFERENCE, triton_kernels  # noqa: E402
from rspec_planner.engine.torch_executor import vision_executor  # noqa: E402
from rspec_planner.evaluate.bench_decode import profile_config  # noqa: E402
from rspec_planner.model.image import patchify  # noqa: E402

DEVICE = torch.device('cuda' if CUDA else 'cpu')


@pytest.fixture(scope='module')
def vision():
    return random_target(profile_config('tiny'), DEVICE, torch.float32).vision


@pytest.mark.parametrize('kernels', [REFERENCE, triton_kernels()], ids=['reference', 'triton'])
def test_tower_equals_the_model(vision, kernels):
    cfg, grid = vision.cfg, (4, 6)
    side = cfg.patch_size
    images = torch.randint(256, (2, grid[0] * side, grid[1] * side, 3), dtype=torch.uint8,
                           generator=torch.Generator().manual_seed(4))
    patches = patchify(images, side, cfg.temporal_patch_size,
                       cfg.spatial_merge_size).to(DEVICE)
    with torch.inference_mode():
        features, deepstack = vision(patches, grid)
        tower = Tower(vision, grid, kernels, DEVICE)
        for _ in range(2):  # nothing is left over from the first call
            found, taps = tower(patches)
            torch.testing.assert_close(found, features, rtol=1e-4, atol=1e-5)
            assert len(taps) == len(deepstack) > 0
            for mine, its in zip(taps, deepstack):
                torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('rows, columns', [(5, 1152), (3, 128), (1, 7)])
@pytest.mark.parametrize('added', [True, False])
def test_add_norm_against_float64(rows, columns, added):
    generator = torch.Generator().manual_seed(rows)
    x, add, weight, bias = (torch.randn(shape, generator=generator).to(DEVICE) for shape in (
        (rows, columns), (rows, columns), (columns,), (columns,)))
    total = x.double() + add.double() * added
    expected = torch.nn.functional.layer_norm(total, (columns,), weight.double(), bias.double(),
                                              1e-6)
    out = torch.full_like(x, float('nan'))
    triton_kernels().add_norm(x, add if added else None, weight, bias, out, 1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.double(), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('columns', [32, 4100])
def test_rows_are_added_where_they_belong(columns):
    generator = torch.Generator().manual_seed(columns)
    x, add = (torch.randn((n, columns), generator=generator).to(DEVICE) for n in (7, 3))
    index, expected = torch.tensor([5, 0, 2], device=DEVICE), x.clone()
    REFERENCE.add_rows(expected, index, add)
    assert torch.equal(expected[index], x[index] + add)
    assert torch.equal(expected[1], x[1])
    triton_kernels().add_rows(x, index, add)
    assert torch.equal(x, expected)


@pytest.mark.parametrize('heads, dim', [(16, 72), (5, 16)])
def test_turn_equals_its_reference(heads, dim):
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn((2, 6, 3, heads, dim), generator=generator).to(DEVICE)
    angles = torch.randn((6, dim // 2), generator=generator).repeat(1, 2).to(DEVICE)
    found, expected = torch.full((2, 2, 2, 6, heads, dim), float('nan'),
                                 device=DEVICE)
    triton_kernels().turn(qkv, (angles.cos(), angles.sin()), *found)
    REFERENCE.turn(qkv, (angles.cos(), angles.sin()), *expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_vision_stage_of_the_planner_may_run_the_fused_tower():
    target = random_target(profile_config('tiny'), DEVICE, torch.float32)
    tower = Tower(target.vision, target.cfg.patch_grid, REFERENCE, DEVICE)
    plain, fused = vision_executor(target, 2), vision_executor(target, 2, tower)
    images = torch.randint(256, plain.inputs['images'].shape, dtype=torch.uint8,
                           generator=torch.Generator().manual_seed(5)).to(DEVICE)
    for stage in (plain, fused):
        stage.inputs['images'].copy_(images)
        stage.enqueue()
    for name in ('features', 'deepstack'):
        torch.testing.assert_close(fused.outputs[name], plain.outputs[name], rtol=1e-4, atol=1e-5)
