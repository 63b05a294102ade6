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
"""A small target and an invented cache whose texts follow from the tapped states."""

from dataclasses import replace

import torch

from rspec_planner.model.config import tiny
from rspec_planner.model.target import Target
from rspec_planner.planner.tokenizer import build_tokenizer
from rspec_planner.train.draft_data import TargetCache
from rspec_planner.train.profiles import smoke_profile
from rspec_planner.world.reasoning import vocabulary

TAIL, COLUMNS = 16, 32


def toy_target(seed=0, layers=3):
    """Return a target of width 64 and the tokenizer of the embedded world."""
    tokenizer = build_tokenizer(vocabulary())
    profile = smoke_profile(tiny(tokenizer.token_ids, tokenizer.vocab_size))
    profile = replace(profile, text=replace(profile.text, num_layers=layers))
    torch.manual_seed(seed)
    return Target(profile).eval().requires_grad_(False)


def toy_texts(target, clips, generator):
    """Return clips texts: one of four sentences, each with a free number of repeats."""
    tokens = target.cfg.tokens
    end = [tokens.cot_end, tokens.traj_future_start]
    kinds = torch.randint(0, 4, (clips,), generator=generator).tolist()
    repeats = torch.randint(0, 3, (clips,), generator=generator).tolist()
    texts = [[40 + 10 * k, *[41 + 10 * k] * r, 42 + 10 * k, 43 + 10 * k, 44, *end]
             for k, r in zip(kinds, repeats)]
    return texts, kinds, repeats


def toy_cache(target, clips=24, seed=0, splits=('train', 'val')):
    """
    Return a cache of invented prompts, states and texts.

    Every state carries the kind of the sentence and its repeats, so a draft can learn all.
    """
    text = target.cfg.text
    generator = torch.Generator().manual_seed(seed)
    texts, kinds, repeats = toy_texts(target, clips, generator)
    longest = max(len(t) for t in texts)
    ids = torch.full((clips, longest), -1)
    for row, said in enumerate(texts):
        ids[row, :len(said)] = torch.tensor(said)
    lengths = (ids >= 0).sum(1)
    known = torch.tensor([COLUMNS - 5, COLUMNS - 2])
    layouts = torch.randint(0, 2, (clips,), generator=generator)
    directions = torch.randn((7, text.hidden_size), generator=torch.Generator().manual_seed(9))
    sense = directions[kinds] + directions[4:][repeats]

    def states(layers, rows):
        noise = torch.randn((layers, clips, rows, text.hidden_size), generator=generator)
        return (0.1 * noise + sense[None, :, None]).bfloat16()

    prompt_ids = torch.randint(20, 40, (clips, COLUMNS), generator=generator).int()
    prompt_ids[:, 8:14] = target.cfg.tokens.image_pad
    positions = torch.zeros((2, 3, COLUMNS), dtype=torch.int64)
    for i, length in enumerate(known.tolist()):
        prompt_ids[layouts == i, :COLUMNS - length] = target.cfg.tokens.pad
        row = torch.arange(length)
        image = (row >= 4) & (row < 10)
        flat = torch.where(row < 4, row, torch.where(image, 4, row - 3))
        grid = torch.where(image, row - 4, 0)
        positions[i, :, COLUMNS - length:] = torch.stack(
            (flat, flat + grid // 3, flat + grid % 3))
    return TargetCache(
        profile=target.cfg, digest='toy', names=tuple(f'clip/{i}' for i in range(clips)),
        splits=tuple(splits[i % len(splits)] for i in range(clips)),
        families=('toy',) * clips, ids=ids, lengths=lengths, prompt_lengths=known[layouts],
        layouts=layouts, prompt_ids=prompt_ids,
        tail_taps=states(text.num_layers, TAIL + longest), layout_lengths=known,
        positions=positions, rope_delta=torch.full((2,), -3), history=torch.tensor([[20, 24]] * 2),
        full_taps=states(text.num_layers - 1, COLUMNS))
