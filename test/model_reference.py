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
"""A small profile with uneven shapes, and the reference model with the same random weights."""

from __future__ import annotations

import torch
from torch import nn, Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rspec_planner.model.config import (
    CameraConfig,
    ExpertConfig,
    ProfileConfig,
    TextConfig,
    TokenIds,
    VisionConfig,
)
from rspec_planner.model.target import Target

IMAGE_PAD, VISION_START, VISION_END = 3, 4, 5
VOCAB = 97


def small_profile() -> ProfileConfig:
    """Every width differs, three DeepStack taps, expert width not heads times head_dim."""
    tokens = TokenIds(pad=0, image_pad=IMAGE_PAD, vision_start=VISION_START,
                      vision_end=VISION_END, im_start=6, im_end=7, cot_start=8, cot_end=9,
                      traj_history_start=10, traj_history=11, traj_history_end=12,
                      traj_future_start=13, traj_token_start=14, forbidden_start=14,
                      forbidden_end=20)
    text = TextConfig(vocab_size=VOCAB, hidden_size=64, num_layers=4, num_heads=6,
                      num_kv_heads=2, head_dim=24, intermediate_size=112,
                      mrope_section=(5, 4, 3), rope_theta=5000.0)
    vision = VisionConfig(hidden_size=48, depth=5, num_heads=4, intermediate_size=88,
                          deepstack_layers=(0, 2, 3), out_hidden_size=64,
                          num_position_embeddings=49)
    expert = ExpertConfig(hidden_size=40, num_heads=4, intermediate_size=72,
                          in_proj_hidden_size=32)
    cameras = CameraConfig(height=64, width=96)
    return ProfileConfig(name='small', vision=vision, text=text, expert=expert, tokens=tokens,
                         cameras=cameras)


def small_target(seed: int = 0) -> Target:
    """Return the small profile with weights large enough that every path shows."""
    torch.manual_seed(seed)
    target = Target(small_profile())
    for name, weight in target.named_parameters():
        if 'norm' in name and name.endswith('weight'):
            nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith('bias'):
            nn.init.normal_(weight, std=0.2)
        elif 'embed' in name and 'proj' not in name:
            nn.init.normal_(weight, std=1.0)
        else:
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    return target.eval()


def reference_model(target: Target) -> Qwen3VLForConditionalGeneration:
    """Return transformers' Qwen3-VL with the target's vision and text weights, fp32."""
    text, vision = target.cfg.text, target.cfg.vision
    config = Qwen3VLConfig(
        text_config={
            'vocab_size': text.vocab_size, 'hidden_size': text.hidden_size,
            'intermediate_size': text.intermediate_size, 'num_hidden_layers': text.num_layers,
            'num_attention_heads': text.num_heads, 'num_key_value_heads': text.num_kv_heads,
            'head_dim': text.head_dim, 'rms_norm_eps': text.rms_norm_eps,
            'rope_parameters': {'rope_type': 'default', 'rope_theta': text.rope_theta,
                                'mrope_section': list(text.mrope_section),
                                'mrope_interleaved': True},
            'attention_bias': False, 'tie_word_embeddings': False},
        vision_config={
            'depth': vision.depth, 'hidden_size': vision.hidden_size,
            'intermediate_size': vision.intermediate_size, 'num_heads': vision.num_heads,
            'patch_size': vision.patch_size, 'out_hidden_size': vision.out_hidden_size,
            'num_position_embeddings': vision.num_position_embeddings,
            'deepstack_visual_indexes': list(vision.deepstack_layers)},
        image_token_id=IMAGE_PAD, vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END, tie_word_embeddings=False)
    model = Qwen3VLForConditionalGeneration(config).eval()
    renamed = {}
    for name, weight in target.state_dict().items():
        if name.startswith('vision.'):
            renamed['model.visual.' + name.removeprefix('vision.')] = weight
        elif name.startswith('text.lm_head.'):
            renamed[name.removeprefix('text.')] = weight
        elif name.startswith('text.'):
            renamed['model.language_model.' + name.removeprefix('text.')] = weight
    model.load_state_dict(renamed, strict=True)
    return model


def mixed_prompt(generator: torch.Generator, images: int = 3, batch: int = 1) -> Tensor:
    """Return (batch, S) ids: text, images of 2 x 3 tokens with their frames, text."""
    def words(count: int) -> Tensor:
        return torch.randint(20, VOCAB, (batch, count), generator=generator)

    parts = [words(4)]
    for _ in range(images):
        frame = [VISION_START, *[IMAGE_PAD] * 6, VISION_END]
        parts += [torch.tensor([frame]).expand(batch, -1), words(2)]
    return torch.cat((*parts, words(7)), dim=1)


def three_axis_positions(ids: Tensor, rows: int = 2, cols: int = 3) -> tuple[Tensor, int]:
    """Return positions (3, S) and rope_delta of one prompt, counted token by token."""
    positions, following, inside = [], 0, 0
    for token in ids.tolist():
        if token == IMAGE_PAD:
            start = following - (max(rows, cols) if inside else 0)
            positions.append((start, start + inside // cols, start + inside % cols))
            if not inside:
                following += max(rows, cols)
            inside = (inside + 1) % (rows * cols)
        else:
            positions.append((following,) * 3)
            following += 1
    return torch.tensor(positions).T, following - len(positions)
