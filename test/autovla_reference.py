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
"""A small AutoVLA with uneven shapes, and transformers' Qwen2.5-VL with the same weights."""

from __future__ import annotations

import random

import torch
from torch import nn, Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rspec_planner.model.autovla import AutoVla
from rspec_planner.model.autovla_config import (
    AutoVlaConfig,
    AutoVlaTokens,
    VideoConfig,
    WindowVisionConfig,
)
from rspec_planner.model.config import TextConfig

PAD, IM_START, IM_END, VISION_START, VISION_END, VIDEO_PAD = range(6)
FIRST_WORD, ACTION_START, ACTIONS = 6, 60, 32
VOCAB = ACTION_START + ACTIONS
TOKENS = AutoVlaTokens(PAD, IM_START, IM_END, VISION_START, VISION_END, VIDEO_PAD, ACTION_START,
                       ACTIONS)


def small_config(**over) -> AutoVlaConfig:
    """Uneven widths, windows that the frame's edge cuts, two cameras, two pairs each."""
    text = TextConfig(vocab_size=VOCAB, hidden_size=96, num_layers=4, num_heads=6,
                      num_kv_heads=2, head_dim=16, intermediate_size=112,
                      mrope_section=(1, 3, 4), rope_theta=5000.0, mrope_interleaved=False,
                      qk_norm=False, qkv_bias=True, tied_head=True)
    vision = WindowVisionConfig(hidden_size=48, depth=4, num_heads=4, intermediate_size=88,
                                out_hidden_size=96, full_attention_layers=(1, 3), window_size=56)
    values = {'vision': vision, 'text': text, 'tokens': TOKENS,
              'video': VideoConfig(('front', 'left'), height=84, width=140),
              'horizon_actions': 4, 'max_answer_tokens': 40}
    return AutoVlaConfig('small', **{**values, **over})


def small_autovla(seed: int = 0, **over) -> AutoVla:
    """Return the small profile with weights large enough that every path shows."""
    torch.manual_seed(seed)
    target = AutoVla(small_config(**over))
    for name, weight in target.named_parameters():
        if 'norm' in name or 'ln_q' in name:
            nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith('bias'):
            nn.init.normal_(weight, std=0.2)
        elif 'embed_tokens' in name:
            nn.init.normal_(weight, std=0.3)
        else:
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    return target.eval()


def reference_model(target: AutoVla) -> Qwen2_5_VLForConditionalGeneration:
    """Return transformers' Qwen2.5-VL with the target's weights, fp32."""
    text, vision, tokens = target.cfg.text, target.cfg.vision, target.cfg.tokens
    config = Qwen2_5_VLConfig(
        text_config={
            'vocab_size': text.vocab_size, 'hidden_size': text.hidden_size,
            'intermediate_size': text.intermediate_size, 'num_hidden_layers': text.num_layers,
            'num_attention_heads': text.num_heads, 'num_key_value_heads': text.num_kv_heads,
            'rms_norm_eps': text.rms_norm_eps,
            'rope_parameters': {'rope_type': 'default', 'rope_theta': text.rope_theta,
                                'mrope_section': list(text.mrope_section)},
            'bos_token_id': None, 'eos_token_id': list(tokens.stop_ids),
            'pad_token_id': tokens.pad},
        vision_config={
            'depth': vision.depth, 'hidden_size': vision.hidden_size,
            'intermediate_size': vision.intermediate_size, 'num_heads': vision.num_heads,
            'patch_size': vision.patch_size, 'out_hidden_size': vision.out_hidden_size,
            'window_size': vision.window_size, 'tokens_per_second': vision.tokens_per_second,
            'fullatt_block_indexes': list(vision.full_attention_layers)},
        image_token_id=VOCAB - 1, video_token_id=tokens.video_pad,
        vision_start_token_id=tokens.vision_start, vision_end_token_id=tokens.vision_end,
        tie_word_embeddings=True)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    renamed = {}
    for name, weight in target.state_dict().items():
        if name.startswith('vision.'):
            renamed['model.visual.' + name.removeprefix('vision.')] = weight
        elif name.startswith('text.lm_head.'):
            renamed[name.removeprefix('text.')] = weight
        else:
            renamed['model.language_model.' + name.removeprefix('text.')] = weight
    model.load_state_dict(renamed, strict=True)
    return model


def random_frames(cfg: AutoVlaConfig, seed: int = 0) -> Tensor:
    """Return frame pairs (N, 2, H, W, 3) uint8 of every slot of every video, prompt order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (cfg.num_images, cfg.vision.temporal_patch_size,
                                  cfg.video.height, cfg.video.width, 3), dtype=torch.uint8,
                         generator=generator)


def video_prompt(cfg: AutoVlaConfig, seed: int = 0) -> list[int]:
    """Return ids: words, each video between its marks with words before it, words."""
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(FIRST_WORD, ACTION_START) for _ in range(count)]

    ids = [IM_START, *words(rng.randint(1, 5))]
    for _ in cfg.video.names:
        ids += [*words(rng.randint(0, 3)), VISION_START,
                *[VIDEO_PAD] * (cfg.slots * cfg.tokens_per_image), VISION_END]
    return [*ids, *words(rng.randint(2, 6))]


def reference_inputs(target: AutoVla, ids: list[int], patches: Tensor) -> dict:
    """Return the arguments that give transformers' model the same prompt and videos."""
    cfg = target.cfg
    thw = torch.tensor([[cfg.slots, *cfg.patch_grid]] * len(cfg.video.names))
    tensor = torch.tensor([ids])
    seconds = cfg.video.interval_s * cfg.vision.temporal_patch_size
    return {'input_ids': tensor, 'pixel_values_videos': patches.flatten(0, 1),
            'video_grid_thw': thw, 'mm_token_type_ids': 2 * (tensor == VIDEO_PAD).int(),
            'second_per_grid_ts': torch.full((len(thw),), seconds)}
