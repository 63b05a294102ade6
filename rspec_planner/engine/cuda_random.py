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
Targets and drafts of any profile with random weights, made where they run.

For latency alone: the numbers of operations and bytes are those of the real model, what it says
is not. Whoever reports a time made with them says so in the same sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config, Draft, eagle3_config
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.target import Target


@contextmanager
def made_in(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Make the tensors of this block in a dtype on a device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def random_target(profile: ProfileConfig, device: torch.device, dtype: torch.dtype,
                  seed: int = 0) -> Target:
    """Return a packed target; its weights are drawn on the device in `dtype`."""
    torch.manual_seed(seed)
    with made_in(dtype, device):
        target = Target(profile)
    target.expert.reset_frequencies(device)
    # tokens must differ by more than the prompt's first words do, or texts run into a loop
    torch.nn.init.normal_(target.text.embed_tokens.weight, std=1.0)
    return target.eval().requires_grad_(False).pack()


def random_draft(target: Target, *, layers: int = 2, block: int = 16, window: int = 8,
                 vocabulary: int = 4096, seed: int = 1, rotary: str = 'flat') -> Dflash:
    """Return a bound draft of a random target; vocabulary: rows of its head, 0 for all."""
    torch.manual_seed(seed)
    cfg = dflash_config(target.cfg, num_layers=layers, block=block, window=window, rotary=rotary,
                        draft_vocab=min(vocabulary, target.cfg.tokens.forbidden_start))
    with made_in(target.dtype, target.device):
        draft = Dflash(cfg)
        torch.nn.init.normal_(draft.mask_embedding, std=1.0)
    _lend(draft, target)
    return draft


def random_chain(target: Target, *, block: int = 8, window: int = 8, vocabulary: int = 4096,
                 seed: int = 1) -> Eagle3:
    """Return a bound EAGLE-3 draft of a random target, see `random_draft`."""
    torch.manual_seed(seed)
    cfg = eagle3_config(target.cfg, block=block, window=window,
                        draft_vocab=min(vocabulary, target.cfg.tokens.forbidden_start))
    with made_in(target.dtype, target.device):
        draft = Eagle3(cfg)
    _lend(draft, target)
    return draft


def _lend(draft: Draft, target: Target) -> None:
    """Bind a draft for inference; a reduced head has the first ids of the vocabulary."""
    draft.bind(target.text, target.cfg.tokens)
    if draft.cfg.draft_vocab:
        draft.set_vocabulary(torch.arange(draft.cfg.draft_vocab))
    draft.eval().requires_grad_(False)
