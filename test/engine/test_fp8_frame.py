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
Whole frames over fp8 weights: exact against one token a forward, and near the bf16 ones.

References on a CPU; the tests marked gpu run the Triton kernels, the library's scaled products
and graphs.
"""

from dataclasses import replace
import gc
from pathlib import Path
import sys

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from draft_reference import small_draft
from test_cuda_loop import BUDGET, PROFILE, Prompted, run, target_of

from rspec_planner.engine.cuda_decoder import Prefill
from rspec_planner.engine.cuda_fp8 import layer_bytes, quantise_target, REFERENCE8
from rspec_planner.engine.cuda_fp8_prefill import Fp8Prefill
from rspec_planner.engine.cuda_graph import FrameRunner
from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_random import random_draft, random_target
from rspec_planner.engine.cuda_rows import LayerWeights, MATRICES
from rspec_planner.engine.kernels import reference
from rspec_planner.engine.kernels.fp8_reference import E4M3
from rspec_planner.engine.kernels.select import REFERENCE
from rspec_planner.errors import EngineError


def attend(q, out, *, cache=None, own=None, **options):
    """
    Attend in fp64, whose rounding no width moves by a bit of fp32.

    The reference's own sums depend on the width in their last bit, as the kernels' do not, and
    one bit decides which e4m3 number a value becomes.
    """
    wide = [None if pair is None else tuple(x.double() for x in pair) for pair in (cache, own)]
    reference.attend(q.double(), out, cache=wide[0], own=wide[1], **options)


STEADY = replace(REFERENCE, attend=attend)


def framed(target, draft=None, weights=None, kernels=STEADY, **options):
    return DeviceFrame(target, prompt_rows=64, budget=BUDGET, draft=draft, samples=2,
                       flow_steps=2, fp8=weights, kernels=kernels, **options)


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('kind', ['flat', 'mirror'])
@pytest.mark.parametrize('rows', ['e4m3', 'normed'])
def test_a_draft_changes_no_token_and_no_action(seed, kind, rows):
    target = target_of(seed)
    draft = small_draft(target, 'dflash', seed, block=5, window=3, rotary=kind)
    weights = quantise_target(target, rows=rows)
    plain, drafted = framed(target, None, weights), framed(target, draft, weights)
    twin = drafted.plain(target)
    for frame in range(2):
        prompted = Prompted(10 * seed + frame, 40 - frame)
        expected = run(plain, prompted, BUDGET)
        for each in (drafted, twin):
            result = run(each, prompted, BUDGET)
            assert result.generated == expected.generated
            assert rows != 'e4m3' or torch.equal(result.actions, expected.actions)


def test_accepted_proposals_change_nothing_either():
    """Random drafts are rarely right, so the target's own text is proposed."""
    target, prompted = target_of(1), Prompted(1)
    draft = small_draft(target, 'dflash', 1, block=5, window=3)
    device = framed(target, draft, quantise_target(target))
    plain = run(device.plain(target), prompted, BUDGET)
    device.replay(torch.tensor(plain.generated), torch.tensor([3]))
    device._wrong = next(i for i in range(40) if i not in plain.generated)
    result = run(device, prompted, len(plain.generated), end_id=plain.generated[-1])
    assert result.generated == plain.generated
    assert max(result.committed) == 4


@pytest.mark.parametrize('seed', range(3))
def test_a_guess_in_the_prefill_changes_nothing(seed):
    target, prompted = target_of(seed), Prompted(seed)
    device = framed(target, None, quantise_target(target), guess_room=12)
    said = run(device, prompted, BUDGET).generated
    for guess in (said[:12], (*said[:3], said[3] + 1), (1, 2)):
        assert run(device, prompted, BUDGET, guess).generated == said


def faked(x):
    """Return x as its e4m3 rows stand for it."""
    small, scale = torch.empty(x.shape, dtype=E4M3), torch.empty(len(x))
    REFERENCE8.norm8(x, small, scale)
    return small.float() * scale[:, None]


class Faked(Prefill):
    """The plain prefill over dequantised weights, its rows rounded in front of each product."""

    def _mix(self, q, index):
        return faked(super()._mix(q, index))


def faking(kernel):
    def run_it(*arguments, **options):
        kernel(*arguments, **options)
        out = arguments[2] if kernel is reference.norm else arguments[1]
        out.copy_(faked(out))
    return run_it


@pytest.mark.parametrize('tapped', [False, True])
def test_the_prefill_is_the_plain_one_over_rounded_weights_and_rows(tapped):
    target, prompted = target_of(3), Prompted(3)
    draft = small_draft(target, 'dflash', 3, block=5, window=3) if tapped else None
    device = framed(target, draft)
    run(device, prompted, BUDGET)
    plain = [device.cache.keys[:, :, :, :40].clone(), device.cache.values[:, :, :, :40].clone()]
    weights = quantise_target(target)
    back = [replace(layer, scales={}, **{name: getattr(layer, name).float()
                                         * layer.scales[name][:, None] for name in MATRICES})
            for layer in weights.text]
    kernels = replace(REFERENCE, norm=faking(reference.norm), gate=faking(reference.gate))
    found = []
    for prefill in (
            Faked(target, kernels, device.frame, device.cache, device.taps, 0, 3, back),
            Fp8Prefill(target, weights.kernels(REFERENCE), device.frame, device.cache,
                       device.taps, 0, 3, weights)):
        device.begin(prompted.ids, prompted.positions, prompted.rope_delta, BUDGET)
        prefill.features.copy_(prompted.features.flatten(0, 1))
        prefill.deepstack.copy_(prompted.deepstack.flatten(1, 2))
        device.taps.rows.zero_()
        prefill()
        columns = range(len(device.taps.layers) - (3 in device.taps.layers))
        found.append([device.cache.keys[:, :, :, :40].clone(),
                      device.cache.values[:, :, :, :40].clone(),
                      *(device.taps.rows[:40, column].clone() for column in columns)])
    assert (len(found[0]) > 2) == tapped
    for ours, expected in zip(found[1], found[0]):
        # a value at the middle of two e4m3 numbers may fall to either side
        assert float((ours - expected).norm() / expected.norm()) < 5e-3
    for ours, unquantised in zip(found[1], plain):
        assert 1e-2 < float((ours - unquantised).norm() / unquantised.norm()) < 0.3


def test_the_matrices_are_given_up():
    target = target_of(0)
    layers = (*target.text.layers, *target.expert.layers)
    before = sum(layer_bytes(LayerWeights.of(layer)) for layer in layers)
    weights = quantise_target(target)
    factors = sum(scale.numel() * 4 for layer in (*weights.text, *weights.expert)
                  for scale in layer.scales.values())
    assert weights.report()['weight_bytes'] == before // 4 + factors
    assert all(weight.dim() < 2 for layer in layers for weight in layer.parameters())
    gc.collect()
    shape = weights.text[0].gate_up.shape
    assert not [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)
                and x.dtype == torch.float32 and x.shape == shape]
    with pytest.raises(EngineError, match='quantised before'):
        quantise_target(target)
    with pytest.raises(EngineError, match='not packed'):
        framed(target)


def test_stale_rows_change_nothing():
    target, prompted = target_of(2), Prompted(2)
    device = framed(target, small_draft(target, 'dflash', 2, block=5, window=3),
                    quantise_target(target))
    expected = run(device, prompted, BUDGET)
    for buffer in (device.cache.keys, device.cache.values, device.taps.rows):
        buffer.fill_(1e4)
    poisoned = run(device, prompted, BUDGET)
    assert poisoned.generated == expected.generated
    assert torch.equal(poisoned.actions, expected.actions)


def begun(device, prompted):
    device.begin(prompted.ids, prompted.positions, prompted.rope_delta, BUDGET)
    device.prefill.features.copy_(prompted.features.flatten(0, 1))
    device.prefill.deepstack.copy_(prompted.deepstack.flatten(1, 2))
    device.frame.noise.copy_(prompted.noise)


@pytest.mark.gpu
@pytest.mark.parametrize('wide', ['', 'tensor-wise', 'dequantised'])
@pytest.mark.parametrize('rows', ['e4m3', 'normed', 'plain'])
@pytest.mark.parametrize('mode', ['while', 'sync'])
def test_graphs_over_fp8_weights_are_exact_and_allocate_nothing(mode, rows, wide):
    target = random_target(PROFILE, torch.device('cuda'), torch.bfloat16)
    draft = random_draft(target, block=6, window=3, vocabulary=16)
    weights = quantise_target(target, rows=rows, wide=wide)
    assert wide or weights.wide.mode == 'row-wise', weights.wide.refused
    device = framed(target, draft, weights, None)
    begun(device, Prompted(0))
    runner = FrameRunner(device, mode)
    begun(device, Prompted(0))
    plain = FrameRunner(device.plain(target), mode)
    for seed in range(6):
        begun(device, Prompted(seed))
        plain.run()
        expected = device.frame.result()
        begun(device, Prompted(seed))
        before = torch.cuda.memory_stats()['allocation.all.allocated']
        runner.run()
        assert torch.cuda.memory_stats()['allocation.all.allocated'] == before
        result = device.frame.result()
        assert result.generated == expected.generated
        assert torch.equal(result.actions, expected.actions)


@pytest.mark.gpu
def test_the_prefill_on_a_gpu_is_that_of_the_references():
    prompted, found = Prompted(0), []
    for name in ('cuda', 'reference'):
        target = random_target(PROFILE, torch.device('cuda'), torch.bfloat16)
        on_gpu = name == 'cuda'
        weights = quantise_target(target, parts=None if on_gpu else REFERENCE8,
                                  wide='' if on_gpu else 'dequantised')
        device = framed(target, None, weights, kernels=None if on_gpu else REFERENCE)
        begun(device, prompted)
        with torch.inference_mode():
            device.prefill()
        found.append(torch.stack((device.cache.keys[:, 0, :, :40].float(),
                                  device.cache.values[:, 0, :, :40].float())))
    assert bool(found[0].isfinite().all())
    # bf16 sums differ in their last bit, which moves some values to another e4m3 number
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.1
