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
"""Executors: fixed buffers, and the stages against direct calls of the networks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rspec_planner.engine.torch_executor import (
    feature_buffers,
    flow_step_executor,
    prefill_executor,
    TorchExecutor,
    verify_executor,
    vision_executor,
)
from rspec_planner.model.config import CameraConfig, tiny
from rspec_planner.model.image import patchify
from rspec_planner.model.rope import flat_cos_sin, mrope_cos_sin
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache, place_visual
from rspec_planner.planner.prompt import build_prompt
from rspec_planner.planner.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(['left'])
PROFILE = replace(tiny(TOKENIZER.token_ids, TOKENIZER.vocab_size),
                  cameras=CameraConfig(height=64, width=128))
CAPACITY = 448


@pytest.fixture(scope='module')
def target():
    torch.manual_seed(0)
    return Target(PROFILE).eval().requires_grad_(False)


@pytest.fixture
def cache():
    return KVCache(PROFILE.text, 1, CAPACITY)


def prompt_and_features(target):
    prompt = build_prompt(PROFILE, TOKENIZER, np.tile(np.eye(4), (16, 1, 1)))
    features = feature_buffers(target, 16)
    generator = torch.Generator().manual_seed(1)
    for value in features.values():
        value.normal_(generator=generator)
    return prompt, features


def filled_prefill(target, cache):
    prompt, features = prompt_and_features(target)
    prefill = prefill_executor(target, cache, CAPACITY)
    prefill.inputs['ids'][:prompt.length] = torch.from_numpy(prompt.token_ids)
    prefill.inputs['positions'][:, :prompt.length] = torch.from_numpy(prompt.positions)
    prefill.inputs['length'].fill_(prompt.length)
    for name, value in features.items():
        prefill.inputs[name].copy_(value)
    return prefill, prompt, features


def test_buffers_keep_their_addresses(target, cache):
    for executor in (vision_executor(target, 2), filled_prefill(target, cache)[0],
                     verify_executor(target, cache, 1), flow_step_executor(target, cache, 1)):
        before = [t.data_ptr() for t in (*executor.inputs.values(), *executor.outputs.values())]
        executor.enqueue()
        executor.enqueue()
        after = [t.data_ptr() for t in (*executor.inputs.values(), *executor.outputs.values())]
        assert before == after


def test_body_errors_reach_the_caller():
    def body(inputs, outputs):
        raise RuntimeError('no kernel')
    with pytest.raises(RuntimeError, match='no kernel'):
        TorchExecutor(body, {}, {}).enqueue()


def test_no_gradients_are_recorded(target, cache):
    verify = verify_executor(target, cache, 1)
    verify.enqueue()
    assert not cache.keys.requires_grad
    assert cache.keys.grad_fn is None


def test_vision_equals_the_tower(target):
    images = torch.randint(0, 256, (3, 64, 128, 3), dtype=torch.uint8)
    vision = vision_executor(target, 3)
    vision.inputs['images'].copy_(images)
    vision.enqueue()
    with torch.inference_mode():
        features, deepstack = target.vision(patchify(images, temporal=1), PROFILE.patch_grid)
    assert torch.equal(vision.outputs['features'], features)
    assert torch.equal(vision.outputs['deepstack'], torch.stack(deepstack))


def test_an_image_does_not_see_its_neighbours(target):
    images = torch.randint(0, 256, (4, 64, 128, 3), dtype=torch.uint8)
    vision = vision_executor(target, 4)
    vision.inputs['images'].copy_(images)
    vision.enqueue()
    alone = vision.outputs['features'][2].clone()
    vision.inputs['images'].copy_(images.flip(0))
    vision.enqueue()
    assert torch.equal(vision.outputs['features'][1], alone)


def test_prefill_equals_the_decoder(target, cache):
    prefill, prompt, features = filled_prefill(target, cache)
    prefill.enqueue()
    text = PROFILE.text
    ids = torch.from_numpy(prompt.token_ids)[None]
    visual = ids == PROFILE.tokens.image_pad
    with torch.inference_mode():
        cos, sin = mrope_cos_sin(torch.from_numpy(prompt.positions), text.head_dim,
                                 text.rope_theta, text.mrope_section)
        hidden = place_visual(target.text.embed(ids), visual, features['features'])
        hidden, keys, values = target.text(
            hidden, cos, sin, visual_mask=visual, deepstack=list(features['deepstack']),
            return_kv=True)
        logits = target.text.logits(hidden[0, -1])
        logits[PROFILE.tokens.forbidden_start:PROFILE.tokens.forbidden_end] = -torch.inf
    assert int(prefill.outputs['best']) == int(logits.argmax())
    assert torch.allclose(cache.keys[:, :, :, :prompt.length], keys, atol=1e-5)
    assert torch.allclose(cache.values[:, :, :, :prompt.length], values, atol=1e-5)


def test_prefill_ignores_what_lies_behind_its_length(target, cache):
    prefill, prompt, _ = filled_prefill(target, cache)
    prefill.enqueue()
    before = cache.keys[:, :, :, :prompt.length].clone()
    prefill.inputs['ids'][prompt.length:] = PROFILE.tokens.image_pad
    prefill.inputs['positions'][:, prompt.length:] = 7
    prefill.enqueue()
    assert torch.equal(before, cache.keys[:, :, :, :prompt.length])


def test_verify_rows_equal_single_steps(target, cache):
    prefill, prompt, _ = filled_prefill(target, cache)
    prefill.enqueue()
    ids = torch.randint(0, PROFILE.tokens.forbidden_start, (6,))
    wide = verify_executor(target, cache, 6)
    wide.inputs['ids'].copy_(ids)
    wide.inputs['start'].fill_(prompt.length)
    wide.inputs['rope_delta'].fill_(prompt.rope_delta)
    wide.enqueue()
    end = prompt.length + 6
    expected = cache.keys[:, :, :, :end].clone()
    single = verify_executor(target, cache, 1)
    single.inputs['rope_delta'].fill_(prompt.rope_delta)
    for k in range(6):
        single.inputs['ids'][0] = ids[k]
        single.inputs['start'].fill_(prompt.length + k)
        single.enqueue()
        assert single.outputs['best'][0] == wide.outputs['best'][k]
    assert torch.allclose(cache.keys[:, :, :, :end], expected, atol=1e-5)


def test_logits_are_those_of_the_head_where_allowed(target, cache):
    """Ids on both sides of the forbidden range are compared, each with its own row."""
    tokens = replace(PROFILE.tokens, forbidden_start=400, forbidden_end=440)
    gapped = Target(replace(PROFILE, tokens=tokens)).eval().requires_grad_(False)
    gapped.load_state_dict(target.state_dict())
    gapped.text.embed_tokens.weight.normal_()
    verify = verify_executor(gapped, cache, 40)
    verify.inputs['ids'].copy_(torch.arange(40) * 7 % 300)
    verify.enqueue()
    with torch.inference_mode():
        cos, sin = flat_cos_sin(torch.arange(40), PROFILE.text.head_dim, PROFILE.text.rope_theta)
        hidden = gapped.text(gapped.text.embed(verify.inputs['ids'][None]), cos, sin)
        want = gapped.text.logits(hidden[0])
    want = want.index_fill(1, torch.arange(400, 440), -torch.inf)
    torch.testing.assert_close(verify.outputs['logits'], want, rtol=0, atol=1e-5)
    assert torch.equal(verify.outputs['best'], want.argmax(-1))
    assert (verify.outputs['best'] < 400).any() and (verify.outputs['best'] >= 440).any()


def test_verify_taps_are_those_of_the_layers(target, cache):
    taps = TapBuffer((0, 2), 1, CAPACITY, PROFILE.text.hidden_size)
    ids = torch.arange(12)
    with torch.inference_mode():
        cos, sin = flat_cos_sin(torch.arange(12), PROFILE.text.head_dim, PROFILE.text.rope_theta)
        _, want = target.text(target.text.embed(ids[None]), cos, sin, taps=(0, 2))
    for start, width in ((0, 5), (5, 7)):
        verify = verify_executor(target, cache, width, taps)
        verify.inputs['ids'].copy_(ids[start:start + width])
        verify.inputs['start'].fill_(start)
        verify.enqueue()
    torch.testing.assert_close(taps.rows[:, :, :12], torch.stack(want), rtol=0, atol=1e-5)


def test_forbidden_ids_never_win(target, cache):
    verify = verify_executor(target, cache, 1)
    start = PROFILE.tokens.forbidden_start
    weight = target.text.lm_head.weight
    kept = weight[start:].clone()
    try:
        weight[start:] *= 1e4
        winners = set()
        for token in range(40):
            verify.inputs['ids'].fill_(token)
            verify.enqueue()
            winners.add(int(verify.outputs['best']))
    finally:
        weight[start:] = kept
    assert max(winners) < start


@pytest.mark.parametrize('samples', [1, 3])
def test_flow_step_equals_the_expert(target, cache, samples):
    prefill, prompt, _ = filled_prefill(target, cache)
    prefill.enqueue()
    step = flow_step_executor(target, cache, samples)
    step.inputs['length'].fill_(prompt.length)
    step.inputs['rope_delta'].fill_(prompt.rope_delta)
    keys = cache.keys[:, :, :, :prompt.length].clone().expand(-1, samples, -1, -1, -1)
    values = cache.values[:, :, :, :prompt.length].clone().expand(-1, samples, -1, -1, -1)
    positions = torch.arange(64) + prompt.length + prompt.rope_delta
    cos, sin = flat_cos_sin(positions, PROFILE.text.head_dim, PROFILE.text.rope_theta)
    for t in (0.0, 0.1, 0.9):
        noisy = torch.randn(samples, 64, 2)
        step.inputs['noisy'].copy_(noisy)
        step.inputs['t'].fill_(t)
        step.enqueue()
        with torch.inference_mode():
            expected = target.expert(noisy, torch.full((samples,), t), keys, values, cos, sin)
        assert torch.allclose(step.outputs['velocity'], expected, atol=1e-5)


def test_flow_leaves_the_text_rows_alone(target, cache):
    prefill, prompt, _ = filled_prefill(target, cache)
    prefill.enqueue()
    before = cache.keys[:, :, :, :prompt.length].clone()
    step = flow_step_executor(target, cache, 1)
    step.inputs['length'].fill_(prompt.length)
    step.inputs['rope_delta'].fill_(prompt.rope_delta)
    step.enqueue()
    assert torch.equal(before, cache.keys[:, :, :, :prompt.length])


def test_new_frame_lays_out_its_own_context(target, cache):
    prefill, prompt, _ = filled_prefill(target, cache)
    step = flow_step_executor(target, cache, 2)
    step.inputs['rope_delta'].fill_(prompt.rope_delta)
    velocities = []
    for length in (prompt.length, prompt.length - 40):
        prefill.enqueue()
        step.inputs['length'].fill_(length)
        step.enqueue()
        velocities.append(step.outputs['velocity'].clone())
    assert not torch.allclose(*velocities)
