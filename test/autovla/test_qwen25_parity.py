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
"""The tower, the positions and the decoder of Qwen2.5-VL against transformers, fp32."""

import json

from autovla_reference import (
    FIRST_WORD,
    random_frames,
    reference_inputs,
    reference_model,
    small_autovla,
    small_config,
    VIDEO_PAD,
    video_prompt,
    VOCAB,
)
import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from rspec_planner.engine.cuda_rows import LayerWeights
from rspec_planner.engine.stage_layers import project
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.autovla import AutoVla
from rspec_planner.model.autovla_config import autovla, AutoVlaConfig, VideoConfig
from rspec_planner.model.layer import RmsNorm
from rspec_planner.model.rope import axis_of_angle, mrope_cos_sin
from rspec_planner.model.text import KVCache, place_visual
from rspec_planner.model.window_vision import patchify_pairs, same_window
from rspec_planner.planner.autovla_prompt import video_positions

ATOL = 1e-4


def runs_of(ids):
    """Lengths of the text before, between and behind the videos."""
    text = ''.join('v' if token == VIDEO_PAD else 't' for token in ids).replace('v', ' ')
    return [len(run) for run in text.split()]


def tables(target, positions):
    text = target.cfg.text
    return mrope_cos_sin(torch.as_tensor(positions), text.head_dim, text.rope_theta,
                         text.mrope_section, text.mrope_interleaved)


@torch.no_grad()
def prefill(target, ids, seed=0, cache=None):
    """Hidden states of a prompt with random videos, its patches and rope_delta."""
    patches = patchify_pairs(random_frames(target.cfg, seed))
    features = target.vision(patches, target.cfg.patch_grid)
    tensor = torch.tensor([ids])
    positions, delta = video_positions(target.cfg, runs_of(ids))
    hidden = place_visual(target.text.embed(tensor), tensor == VIDEO_PAD, features)
    return target.text(hidden, *tables(target, positions), cache), patches, delta


# ----------------------------------------------------------------------------------- vision

@torch.no_grad()
@pytest.mark.parametrize(('height', 'width'), [(84, 140), (112, 112), (28, 252), (140, 56)])
def test_features_equal_the_reference_tower(height, width):
    """Windows of 4 x 4 patches; frames whose edges cut windows in each direction."""
    video = VideoConfig(('front',), height=height, width=width)
    target = small_autovla(video=video)
    patches = patchify_pairs(random_frames(target.cfg))
    want = reference_model(target).model.visual(
        patches.flatten(0, 1), grid_thw=torch.tensor([[target.cfg.slots, *target.cfg.patch_grid]]))
    got = target.vision(patches, target.cfg.patch_grid)
    torch.testing.assert_close(got.flatten(0, 1), want.pooler_output, rtol=0, atol=ATOL)
    assert float(got.std()) > 0.05


@torch.no_grad()
def test_windows_matter_and_full_blocks_see_the_whole_frame():
    target = small_autovla()
    cfg = target.cfg
    patches = patchify_pairs(random_frames(cfg))
    changed = patches.clone()
    changed[:, 0] += 1.0  # the upper left patch
    before = target.vision(patches, cfg.patch_grid)
    assert ((target.vision(changed, cfg.patch_grid) - before).abs().amax(-1) > 1e-5).all()
    local = small_autovla(vision=type(cfg.vision)(**{**vars(cfg.vision),
                                                     'full_attention_layers': ()}))
    local.load_state_dict(target.state_dict())
    before = local.vision(patches, cfg.patch_grid)
    moved = (local.vision(changed, cfg.patch_grid) - before).abs().amax(-1) > 1e-5
    seen = moved[0].view(3, 5)
    assert seen[:2, :2].all() and int(seen.sum()) == 4  # one window of 2 x 2 tokens


def test_windows_partition_the_frame():
    seen = same_window(6, 10, 2, 4)
    sizes = sorted({int(count) for count in seen.sum(1)})
    assert sizes == [4, 8, 16]  # corner 2 x 2, edges 2 x 4 and 4 x 2, whole 4 x 4
    assert torch.equal(seen, seen.T) and seen.diagonal().all()


def test_patches_equal_the_image_processor():
    cfg = small_config()
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (cfg.video.height, cfg.video.width, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(do_resize=False)
    want = processor(images=[image], return_tensors='pt')['pixel_values']
    frames = torch.from_numpy(image)[None, None].expand(1, 2, -1, -1, -1)
    torch.testing.assert_close(patchify_pairs(frames)[0], want.float(), rtol=0, atol=2e-6)


def test_both_frames_of_a_pair_lie_in_time_order():
    frames = torch.zeros((1, 2, 28, 28, 3), dtype=torch.uint8)
    frames[:, 1] = 255
    values = patchify_pairs(frames).view(4, 3, 2, 14, 14)
    assert (values[:, :, 0] < 0).all() and (values[:, :, 1] > 0).all()
    frames = torch.arange(2 * 28 * 28 * 3).view(1, 2, 28, 28, 3).remainder(251).to(torch.uint8)
    values = patchify_pairs(frames).view(2, 2, 3, 2, 14, 14)  # rows and columns of a token
    single = patchify_pairs(frames[:, 1:].expand(-1, 2, -1, -1, -1)).view_as(values)
    assert torch.equal(values[:, :, :, 1], single[:, :, :, 1])


# -------------------------------------------------------------------------------- positions

@pytest.mark.parametrize('seed', range(8))
def test_positions_equal_the_reference_index(seed):
    target = small_autovla()
    ids = video_prompt(target.cfg, seed)
    inputs = reference_inputs(target, ids, torch.zeros(1, 1, 1))
    want, delta = reference_model(target).model.get_rope_index(
        inputs['input_ids'], inputs['mm_token_type_ids'], None, inputs['video_grid_thw'],
        inputs['second_per_grid_ts'])
    got, mine = video_positions(target.cfg, runs_of(ids))
    assert np.array_equal(got, want[:, 0].numpy())
    assert mine == int(delta)


def test_full_profile_videos_are_two_positions_a_pair():
    cfg = autovla()
    positions, _ = video_positions(cfg, [3, 2, 2, 4])
    assert cfg.merged_grid == (8, 15) and cfg.num_images * cfg.tokens_per_image == 720
    first = positions[:, 3:243].reshape(3, 2, 8, 15)
    assert first[0, 0, 0, 0] == 3 and (first[0, 1] - first[0, 0] == 2).all()
    assert first[1, 0, -1, 0] == 10 and first[2, 0, 0, -1] == 17
    assert (positions[:, 243] == 18).all()  # max(8, 15) behind the video's start


def test_rotary_tables_equal_the_reference():
    target = small_autovla()
    positions, _ = video_positions(target.cfg, runs_of(video_prompt(target.cfg)))
    rotary = reference_model(target).model.language_model.rotary_emb
    want = rotary(torch.zeros(1), torch.as_tensor(positions)[:, None])
    for mine, theirs in zip(tables(target, positions), want):
        torch.testing.assert_close(mine, theirs[0], rtol=0, atol=1e-6)


def test_sections_lie_behind_each_other():
    axis = axis_of_angle(64, (16, 24, 24), interleaved=False)
    assert axis.tolist() == [0] * 16 + [1] * 24 + [2] * 24
    with pytest.raises(ValueError, match='not 32 angles'):
        axis_of_angle(32, (16, 24, 24), interleaved=False)


# ---------------------------------------------------------------------------------- decoder

@pytest.fixture(scope='module', params=['separate', 'packed'])
def target(request):
    built = small_autovla()
    return built.pack() if request.param == 'packed' else built


@torch.no_grad()
@pytest.mark.parametrize('seed', range(3))
def test_logits_with_videos_equal_the_reference(target, seed):
    ids = video_prompt(target.cfg, seed)
    hidden, patches, _ = prefill(target, ids, seed)
    want = reference_model(target)(**reference_inputs(target, ids, patches)).logits
    assert float(want.std()) > 0.3
    torch.testing.assert_close(target.text.logits(hidden), want, rtol=0, atol=ATOL)


@torch.no_grad()
def test_cached_decoding_equals_the_reference(target):
    ids = video_prompt(target.cfg, 4)
    cache, state = KVCache(target.cfg.text, 1, len(ids) + 8), DynamicCache()
    _, patches, delta = prefill(target, ids, cache=cache)
    model = reference_model(target)
    model(**reference_inputs(target, ids, patches), cache=state, use_cache=True)
    words = torch.randint(FIRST_WORD, VOCAB, (1, 6), generator=torch.Generator().manual_seed(2))
    for step in range(6):
        position = torch.tensor([len(ids) + step + delta])
        token = words[:, step:step + 1]
        out = target.text(target.text.embed(token), *tables(target, position.expand(3, -1)),
                          cache, len(ids) + step)
        want = model(input_ids=token, cache=state, use_cache=True,
                     position_ids=position.view(1, 1, 1).expand(3, 1, 1)).logits
        torch.testing.assert_close(target.text.logits(out), want, rtol=0, atol=ATOL)


@torch.no_grad()
def test_biases_reach_the_logits(target):
    ids = video_prompt(target.cfg, 1)
    with_them = prefill(target, ids)[0]
    other = small_autovla()
    for layer in other.text.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.bias.zero_()
    assert float((prefill(other, ids)[0] - with_them).abs().max()) > 1e-2


def test_training_reaches_every_weight():
    target = small_autovla().pack().train()
    cfg = target.cfg
    features = target.vision(patchify_pairs(random_frames(cfg)), cfg.patch_grid)
    ids = torch.tensor([video_prompt(cfg)])
    positions, _ = video_positions(cfg, runs_of(ids[0].tolist()))
    hidden = place_visual(target.text.embed(ids), ids == VIDEO_PAD, features)
    target.text.logits(target.text(hidden, *tables(target, positions))).square().sum().backward()
    assert not [name for name, weight in target.named_parameters() if weight.grad is None]


# ------------------------------------------------------------------------------------ shapes

def test_the_head_is_the_embedding():
    target = small_autovla()
    assert target.text.lm_head.weight is target.text.embed_tokens.weight
    assert target.to(torch.float64).text.lm_head.weight is target.text.embed_tokens.weight
    assert not [m for layer in target.text.layers for m in layer.self_attn.children()
                if isinstance(m, RmsNorm)]


def test_full_shapes_are_those_of_the_released_backbone():
    cfg = autovla()
    with torch.device('meta'):
        target = AutoVla(cfg)
        model = reference_model(target)  # strict: every name and shape
    rows = cfg.text.vocab_size
    assert rows == 153_713
    # Qwen2.5-VL-3B-Instruct: 3,754,622,976 weights, 151,936 rows of them in the tied table
    assert target.num_parameters() == 3_754_622_976 + 2048 * (rows - 151_936)
    assert sum(weight.numel() for weight in model.parameters()) == target.num_parameters()


def test_kernels_and_exports_refuse_a_decoder_without_query_norms():
    layer = small_autovla().pack().text.layers[0]
    with pytest.raises(ConfigurationError, match='run it with the PyTorch executors'):
        LayerWeights.of(layer)
    with pytest.raises(ConfigurationError, match='no QK-norm'):
        project(layer.self_attn, torch.zeros(1, 1, 96), None)


def test_the_videos_have_the_size_that_the_published_pixels_give():
    video, pixels = autovla().video, 28 * 28 * 140  # per frame, of a 1080p camera
    assert smart_resize(1080, 1920, 28, pixels, pixels) == (video.height, video.width)


def test_a_configuration_survives_json():
    cfg = small_config()
    assert AutoVlaConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
    with pytest.raises(ConfigurationError, match='not an AutoVLA configuration'):
        AutoVlaConfig.from_dict({'name': 'x'})


@pytest.mark.parametrize(('over', 'message'), [
    ({'video': VideoConfig(height=85, width=140)}, 'video height 85'),
    ({'video': VideoConfig(frames=3, height=84, width=140)}, '3 video frames'),
    ({'video': VideoConfig(frames=12, height=84, width=140)}, 'longer than its frames')])
def test_impossible_shapes_are_named(over, message):
    with pytest.raises(ConfigurationError, match=message):
        small_config(**over)
