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
"""The fp8 target against a plain one whose weights and rows are rounded, module by module."""

from pathlib import Path
import sys

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_cuda_loop import BUDGET, device_frame, host_frame, PROFILE, Prompted, run, target_of

from rspec_planner.engine.cuda_fp8 import quantise_target
from rspec_planner.engine.cuda_fp8_vision import encoder_of, Fp8Tower
from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_random import random_target
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate.fp8_quality import evaluate_fp8, round_target, rounded_rows, VARIANTS

GRID = (4, 4)


def patches(count=3, seed=0):
    cfg = PROFILE.vision
    generator = torch.Generator().manual_seed(seed)
    values = cfg.in_channels * cfg.temporal_patch_size * cfg.patch_size ** 2
    return torch.randn((count, 16, values), generator=generator)


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize('seed', range(3))
def test_the_tower_is_the_plain_one_over_rounded_weights_and_rows(seed):
    given = patches(seed=seed)
    with torch.inference_mode():
        plain = target_of(seed).vision(given, GRID)
        expected = round_target(target_of(seed), vision=True).vision(given, GRID)
        target = target_of(seed)
        weights = quantise_target(target, vision=True)
        found = Fp8Tower(target.vision, GRID, weights)(given)
    pairs = [(found[0], expected[0], plain[0]), *zip(found[1], expected[1], plain[1])]
    assert len(pairs) == 1 + len(PROFILE.vision.deepstack_layers)
    for ours, rounded, unquantised in pairs:
        # a value at the middle of two e4m3 numbers may fall to either side
        assert relative(ours, rounded) < 0.25 * relative(rounded, unquantised) < 0.1


def test_the_tower_gives_its_matrices_up_and_is_not_needed():
    target = target_of(0)
    with pytest.raises(ConfigurationError, match='vision=True'):
        Fp8Tower(target.vision, GRID, quantise_target(target))
    target = target_of(0)
    weights = quantise_target(target, vision=True)
    assert weights.report()['vision']
    assert all(block.attn.qkv.weight.numel() == 0 for block in target.vision.blocks)
    with pytest.raises(EngineError, match='quantised before'):
        quantise_target(target, vision=True)


@pytest.mark.parametrize('vision', [False, True])
def test_an_encoder_runs_the_tower_that_there_is(vision):
    target = target_of(1)
    weights = quantise_target(target, vision=vision)
    frame = DeviceFrame(target, prompt_rows=64, budget=4, fp8=weights)
    encoder = encoder_of(target, frame.prefill, weights)
    assert isinstance(encoder.tower, Fp8Tower) == vision
    encoder.images.random_(256)
    with torch.inference_mode():
        encoder()
    assert bool(frame.prefill.features.isfinite().all())
    assert bool(frame.prefill.features.abs().sum() > 0)


def test_an_encoder_without_fp8_runs_the_plain_tower():
    target = target_of(1)
    frame = DeviceFrame(target, prompt_rows=64, budget=4)
    assert not isinstance(encoder_of(target, frame.prefill, None).tower, Fp8Tower)


@pytest.mark.parametrize('seed', range(4))
def test_a_frame_says_and_drives_what_a_rounded_target_does(seed):
    prompted = Prompted(seed)
    generated, _, _, _, actions = host_frame(round_target(target_of(seed)), prompted, None,
                                             BUDGET)
    target = target_of(seed)
    device = DeviceFrame(target, prompt_rows=64, budget=BUDGET, samples=2, flow_steps=4,
                         fp8=quantise_target(target))
    result = run(device, prompted, BUDGET)
    assert result.generated == generated
    plain = run(device_frame(target_of(seed), None), prompted, BUDGET)
    # roundings that fall to the other side of a middle move an action by far less than fp8 does
    apart = float((result.actions - actions).norm())
    if plain.generated == generated:
        assert apart < 0.3 * float((plain.actions - actions).norm())


def test_rounded_rows_are_those_of_e4m3():
    x = torch.randn(3, 40)
    once = rounded_rows(x)
    assert 0.01 < relative(once, x) < 0.05
    torch.testing.assert_close(rounded_rows(once), once)
    assert torch.equal(rounded_rows(x.view(1, 3, 40))[0], once)


@pytest.mark.slow
def test_the_evaluation_compares_the_same_clips():
    report = evaluate_fp8(clips=2)
    assert set(report['variants']) == set(VARIANTS)
    for found in report['variants'].values():
        assert found['clips'] == 2
        assert 0 <= found['token_agreement'] <= 1
        assert found['trajectory_apart_m']['mean'] > 0
        assert 0 <= found['decision_accuracy']['after'] <= 1
    with pytest.raises(ConfigurationError, match='clips 1'):
        evaluate_fp8(clips=1)


@pytest.mark.gpu
def test_the_tower_on_a_gpu_is_that_of_the_references():
    given, found = patches().cuda().bfloat16(), []
    for wide in ('', 'dequantised'):
        target = random_target(PROFILE, torch.device('cuda'), torch.bfloat16)
        weights = quantise_target(target, vision=True, wide=wide)
        with torch.inference_mode():
            found.append(Fp8Tower(target.vision, GRID, weights)(given)[0].float())
    assert bool(found[0].isfinite().all())
    assert relative(found[0], found[1]) < 0.05
