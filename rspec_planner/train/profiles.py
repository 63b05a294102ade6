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
"""The target that a run starts from: fresh weights in the embedded or the smoke size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rspec_planner.model.checkpoint import load_target
from rspec_planner.model.config import (
    CameraConfig,
    ExpertConfig,
    ProfileConfig,
    tiny,
    VisionConfig,
)
from rspec_planner.model.target import Target
from rspec_planner.planner.tokenizer import build_tokenizer, load_tokenizer, Tokenizer
from rspec_planner.world.reasoning import vocabulary


def smoke_profile(profile: ProfileConfig) -> ProfileConfig:
    """Return the profile at widths and image sizes that a test can train in seconds."""
    text = replace(profile.text, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
                   head_dim=32, intermediate_size=128)
    vision = VisionConfig(hidden_size=32, depth=2, num_heads=2, intermediate_size=64,
                          deepstack_layers=(0,), out_hidden_size=64, num_position_embeddings=16)
    expert = ExpertConfig(hidden_size=48, num_heads=4, intermediate_size=96,
                          in_proj_hidden_size=32)
    return replace(profile, name='smoke', text=text, vision=vision, expert=expert,
                   cameras=CameraConfig(height=96, width=192))


def new_target(*, smoke: bool = False, seed: int = 0) -> tuple[Target, Tokenizer]:
    """Return a target with random weights and the tokenizer of the embedded world."""
    tokenizer = build_tokenizer(vocabulary())
    profile = tiny(tokenizer.token_ids, tokenizer.vocab_size)
    torch.manual_seed(seed)
    return Target(smoke_profile(profile) if smoke else profile).train(), tokenizer


def start_from(checkpoint: Path) -> tuple[Target, Tokenizer]:
    """
    Return the target of a checkpoint folder, to be trained on, and its tokenizer.

    Its caution was chosen for the old weights and is gone: `rspec eval caution` chooses anew.
    """
    target = load_target(checkpoint).train()
    target.cfg = replace(target.cfg, caution=None)
    return target, load_tokenizer(checkpoint)


def with_noise_scale(target: Target, scale: float) -> Target:
    """Return the target, its flow told to sample from noise of this scale."""
    target.cfg = replace(target.cfg, flow=replace(target.cfg.flow, noise_scale=scale))
    return target
