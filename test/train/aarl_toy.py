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
"""A target, texts and drafts small enough for post-training tests, without images."""

from __future__ import annotations

from dataclasses import replace

import torch

from rspec_planner.model.config import (
    ActionSpaceConfig,
    ExpertConfig,
    ProfileConfig,
    TextConfig,
    TokenIds,
    VisionConfig,
)
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config, eagle3_config
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache
from rspec_planner.train.draft_data import TargetCache

VOCAB, END, STOP, IM_END = 30, 5, 6, 2
FORBIDDEN = (24, 30)
PROMPTS = (13, 15)  # two layouts
COLUMNS, TAIL, LONGEST, WAYPOINTS = 16, 10, 9, 8
DIGEST = 'toy'


def toy_profile() -> ProfileConfig:
    tokens = TokenIds(pad=0, image_pad=3, vision_start=4, vision_end=7, im_start=1, im_end=IM_END,
                      cot_start=8, cot_end=END, traj_history_start=9, traj_history=10,
                      traj_history_end=11, traj_future_start=STOP, traj_token_start=24,
                      forbidden_start=FORBIDDEN[0], forbidden_end=FORBIDDEN[1])
    text = TextConfig(vocab_size=VOCAB, hidden_size=32, num_layers=4, num_heads=4,
                      num_kv_heads=2, head_dim=12, intermediate_size=48, mrope_section=(2, 2, 2),
                      rope_theta=5000.0)
    vision = VisionConfig(hidden_size=16, depth=1, num_heads=2, intermediate_size=16,
                          deepstack_layers=(), out_hidden_size=32, num_position_embeddings=16)
    expert = ExpertConfig(hidden_size=24, num_heads=4, intermediate_size=32,
                          in_proj_hidden_size=16, max_freq=1.0)
    return ProfileConfig(name='toy', vision=vision, text=text, expert=expert, tokens=tokens,
                         action_space=ActionSpaceConfig(n_waypoints=WAYPOINTS))


def toy_target(seed: int = 0) -> Target:
    """Return random weights large enough that every word matters."""
    torch.manual_seed(seed)
    target = Target(toy_profile())
    for name, weight in target.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.0 if 'embed' in name else
                                  weight[0].numel() ** -0.5)
    return target.eval()


def toy_ids(clips: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts (clips, LONGEST) of words that follow each other in a pattern, and lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, LONGEST + 1, (clips,), generator=generator)
    ids = torch.full((clips, LONGEST), -1)
    for row, length in enumerate(lengths.tolist()):
        word = int(torch.randint(12, 24, (1,), generator=generator))
        for i in range(length - 2):
            ids[row, i] = word
            word = 12 + (word * 5 + i) % 12
        ids[row, length - 2], ids[row, length - 1] = END, STOP
    return ids, lengths


def toy_positions(length: int) -> tuple[torch.Tensor, int]:
    """Return three-axis positions (3, length) with a 2 x 2 image from row 3, and the delta."""
    line = torch.arange(length)
    line = torch.where(line >= 7, line - 2, line).expand(3, -1).clone()
    line[0, 3:7], line[1, 3:7], line[2, 3:7] = 3, torch.tensor([3, 3, 4, 4]), \
        torch.tensor([3, 4, 3, 4])
    return line, -2


@torch.no_grad()
def toy_cache(target: Target, clips: int = 12, seed: int = 1,
              splits: tuple[str, ...] = ()) -> TargetCache:
    """Return what the target holds behind random prompts and the texts of `toy_ids`."""
    cfg = target.cfg
    generator = torch.Generator().manual_seed(seed + 100)
    ids, lengths = toy_ids(clips, seed)
    layouts = torch.arange(clips) % 2
    prompt_ids = torch.zeros((clips, COLUMNS), dtype=torch.int32)
    taps = torch.zeros((cfg.text.num_layers, clips, TAIL + LONGEST, cfg.text.hidden_size))
    prefix = torch.zeros((clips, cfg.text.num_layers, 2, cfg.text.num_kv_heads, COLUMNS,
                          cfg.text.head_dim))
    positions = torch.zeros((2, 3, COLUMNS), dtype=torch.int64)
    delta = torch.zeros(2, dtype=torch.int64)
    for i, length in enumerate(PROMPTS):
        positions[i, :, COLUMNS - length:], delta[i] = toy_positions(length)
    for row in range(clips):
        length = PROMPTS[layouts[row]]
        prompt = torch.randint(12, 24, (length,), generator=generator)
        prompt_ids[row, COLUMNS - length:] = prompt
        said = ids[row, :lengths[row]]
        _, kv, tapped = whole_pass(target, torch.cat((prompt, said)), length)
        prefix[row, :, 0, :, :length] = kv.keys[:, 0, :, :length]
        prefix[row, :, 1, :, :length] = kv.values[:, 0, :, :length]
        for layer, part in enumerate(tapped):
            taps[layer, row, :TAIL + len(said)] = part[0, length - TAIL:]
    names = tuple(f'toy/{i}' for i in range(clips))
    return TargetCache(
        profile=cfg, digest=DIGEST, names=names, splits=splits or ('train',) * clips,
        families=('toy',) * clips, ids=ids, lengths=lengths,
        prompt_lengths=torch.tensor(PROMPTS)[layouts], layouts=layouts, prompt_ids=prompt_ids,
        tail_taps=taps.bfloat16(), layout_lengths=torch.tensor(PROMPTS), positions=positions,
        rope_delta=delta, history=torch.zeros((2, 2), dtype=torch.int64), prefix=prefix)


def whole_pass(target: Target, ids: torch.Tensor, prompt: int):
    """Return hidden states, cache and taps of one prompt and text computed from the start."""
    text = target.text
    place, delta = toy_positions(prompt)
    more = torch.arange(prompt, len(ids)) + delta
    positions = torch.cat((place, more.expand(3, -1)), dim=1)
    cos, sin = mrope_cos_sin(positions, target.cfg.text.head_dim, target.cfg.text.rope_theta,
                             target.cfg.text.mrope_section)
    cache = KVCache(target.cfg.text, 1, len(ids))
    hidden, taps = text(text.embed(ids)[None], cos, sin, cache=cache,
                        taps=tuple(range(target.cfg.text.num_layers)))
    return hidden, cache, taps


def toy_draft(target: Target, kind: str, seed: int = 3):
    """Return a bound draft with random weights and a window of six rows."""
    if kind == 'dflash':
        cfg = dflash_config(target.cfg, block=6, window=6, num_layers=1)
        draft = Dflash(replace(cfg, name='toy-dflash')).initialise(target.text, seed)
    else:
        cfg = eagle3_config(target.cfg, block=5, window=6)
        draft = Eagle3(replace(cfg, name='toy-eagle3')).initialise(target.text, seed)
    return draft.bind(target.text, target.cfg.tokens)
