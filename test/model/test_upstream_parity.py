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
A folder written from transformers' own modules, loaded here, computes what they compute.

Keys, shapes and arithmetic of the backbone and of the expert's layers come from transformers;
only the expert's input projection, which is no part of it, is written out in the rig.
"""

import pytest
import torch
from transformers import DynamicCache
from upstream_rig import (
    make_upstream,
    pad_images,
    save_folder,
    upstream_profile,
    written_config,
)

from rspec_planner.model.checkpoint import load_target
from rspec_planner.model.image import patchify
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.text import KVCache, place_visual
from rspec_planner.planner.prompt import segment_positions

TOLERANCE = 1e-4
IMAGES, WORDS = 3, 7


@pytest.fixture(scope='module', params=['alpamayo_r1', 'alpamayo1_5'])
def pair(request, tmp_path_factory):
    """Return the released modules and our target, loaded from the folder that they wrote."""
    profile = upstream_profile()
    config = written_config(profile, request.param)
    theirs = make_upstream(profile, config)
    state = theirs.state() | (theirs.buffers() if request.param == 'alpamayo_r1' else {})
    folder = save_folder(tmp_path_factory.mktemp('upstream'), state, config)
    return theirs, load_target(folder, dtype=torch.float32)


def prompt(profile):
    """Return ids (1, S), positions (3, S), rope_delta and images of a short prompt."""
    torch.manual_seed(3)
    tokens, cols = profile.tokens, profile.patch_grid[1] // 2
    rows = profile.patch_grid[0] // 2
    words = torch.randint(0, 30, (IMAGES + 1, WORDS))
    ids, layout = [*words[0].tolist()], [WORDS + 1]
    for index in range(IMAGES):
        ids += [tokens.vision_start, *[tokens.image_pad] * (rows * cols), tokens.vision_end,
                *words[index + 1].tolist()]
        layout += [(rows, cols), 1 + WORDS + 1]
    positions, delta = segment_positions([*layout[:-1], 1 + WORDS])
    return (torch.tensor([ids]), torch.from_numpy(positions), delta,
            pad_images(IMAGES, profile))


def their_inputs(profile, images):
    patches = patchify(images)
    grid = torch.tensor([[1, *profile.patch_grid]] * len(images))
    return patches.flatten(0, 1), grid


@torch.inference_mode()
def our_prefill(ours, capacity=200):
    """Return the logits of the prompt, the cache and the prompt's length."""
    ids, positions, _, images = prompt(ours.cfg)
    features, deepstack = ours.vision(patchify(images), ours.cfg.patch_grid)
    visual = ids == ours.cfg.tokens.image_pad
    cache = KVCache(ours.cfg.text, 1, capacity)
    tables = mrope_cos_sin(positions, ours.cfg.text.head_dim, ours.cfg.text.rope_theta,
                           ours.cfg.text.mrope_section)
    hidden = place_visual(ours.text.embed(ids), visual, features)
    out = ours.text(hidden, *tables, cache, 0, visual, deepstack)
    return ours.text.logits(out), cache, ids.shape[1]


@torch.no_grad()
def their_prefill(theirs):
    ids, positions, _, images = prompt(theirs.profile)
    patches, grid = their_inputs(theirs.profile, images)
    cache = DynamicCache()
    out = theirs.vlm(input_ids=ids, pixel_values=patches, image_grid_thw=grid,
                     position_ids=positions[:, None], past_key_values=cache, use_cache=True)
    return out.logits, cache


def close(ours, theirs):
    assert float(theirs.std()) > 0.05  # nothing is compared with zeros
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_every_weight_is_the_file_s(pair):
    theirs, ours = pair
    state = theirs.state()
    assert ours.num_parameters() == sum(w.numel() for w in state.values())
    assert torch.equal(ours.text.lm_head.weight, state['vlm.lm_head.weight'])
    assert torch.equal(ours.expert.layers[3].self_attn.v_proj.weight,
                       state['expert.layers.3.self_attn.v_proj.weight'])


@torch.inference_mode()
def test_vision_and_deepstack(pair):
    theirs, ours = pair
    images = prompt(ours.cfg)[3]
    features, deepstack = ours.vision(patchify(images), ours.cfg.patch_grid)
    out = theirs.vlm.model.visual(*their_inputs(ours.cfg, images))
    close(features.flatten(0, 1), out.pooler_output)
    assert len(deepstack) == len(out.deepstack_features) == 3
    for ours_part, their_part in zip(deepstack, out.deepstack_features):
        close(ours_part.flatten(0, 1), their_part)


def test_logits_and_cache_of_a_prompt_with_images(pair):
    theirs, ours = pair
    logits, cache, length = our_prefill(ours)
    want, kept = their_prefill(theirs)
    close(logits, want)
    for index, layer in enumerate(kept.layers):
        close(cache.keys[index, :, :, :length], layer.keys)
        close(cache.values[index, :, :, :length], layer.values)


def test_greedy_text(pair):
    theirs, ours = pair
    tokens, count = ours.cfg.tokens, 12
    ids, _, delta, images = prompt(ours.cfg)
    patches, grid = their_inputs(ours.cfg, images)
    forbidden = list(range(tokens.forbidden_start, tokens.forbidden_end))
    said = theirs.vlm.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=patches,
        image_grid_thw=grid, mm_token_type_ids=(ids == tokens.image_pad).long(),
        do_sample=False, max_new_tokens=count, suppress_tokens=forbidden, pad_token_id=tokens.pad
    )[0, ids.shape[1]:].tolist()
    logits, cache, length = our_prefill(ours)
    found = []
    with torch.inference_mode():
        row = logits[0, -1]
        for _ in range(count):
            row[tokens.forbidden_start:tokens.forbidden_end] = float('-inf')
            found.append(int(row.argmax()))
            tables = mrope_cos_sin(torch.full((3, 1), length + delta), ours.cfg.text.head_dim,
                                   ours.cfg.text.rope_theta, ours.cfg.text.mrope_section)
            hidden = ours.text(ours.text.embed(torch.tensor([[found[-1]]])), *tables, cache,
                               length)
            row, length = ours.text.logits(hidden)[0, 0], length + 1
    assert len(set(said)) > 3
    assert found == said


def test_velocity_behind_the_cache(pair):
    theirs, ours = pair
    _, _, delta, _ = prompt(ours.cfg)
    _, cache, length = our_prefill(ours)
    _, kept = their_prefill(theirs)
    torch.manual_seed(5)
    noisy = torch.randn(1, 64, 2)
    text = ours.cfg.text
    tables = mrope_cos_sin((torch.arange(64) + length + delta).expand(3, -1), text.head_dim,
                           text.rope_theta, text.mrope_section)
    context = ours.expert.prepare(cache.keys[:, :, :, :length], cache.values[:, :, :, :length])
    for time in (0.0, 0.3, 0.9):
        t = torch.tensor([time])
        with torch.inference_mode():
            got = ours.expert.velocity(noisy, t, context, *tables)
        close(got, theirs.velocity(noisy, t, kept, delta))
