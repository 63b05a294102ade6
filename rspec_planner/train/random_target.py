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
The target that a draft is trained for: a checkpoint, or random weights of a profile's shapes.

Random weights are for latency and memory: a draft that was trained on them proposes nothing. Their
digest says so and no checkpoint has it, so that such a draft is refused by every real target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn, Tensor

from rspec_planner.engine.cuda_random import random_target
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.draft_checkpoint import target_digest
from rspec_planner.model.target import Target
from rspec_planner.planner.checkpoints import open_checkpoint
from rspec_planner.planner.drafts import checkpoint_folder
from rspec_planner.planner.staging import known_profile
from rspec_planner.planner.tokenizer import TextTokenizer
from rspec_planner.train.draft_data import TargetCache
from rspec_planner.train.optimizer import WeightAverage

RANDOM = 'random-weights'
_GIB = 2 ** 30


@dataclass(frozen=True)
class OpenedTarget:
    """A frozen target, its tokenizer where it has one, and the digest of its weights."""

    target: Target
    tokenizer: TextTokenizer | None
    digest: str

    @property
    def synthetic(self) -> bool:
        """Return whether the weights are random."""
        return self.digest.startswith(RANDOM)


def open_any_target(folder: str | Path, profile: str, device: torch.device, *, seed: int = 0,
                    whole: bool) -> OpenedTarget:
    """
    Return the target of a checkpoint folder or embedded name, or one of a profile's shapes.

    whole: also the layers, the tower and the expert of random weights; a draft alone needs only
    the embedding, the head and the last norm. ConfigurationError unless one of both is given.
    """
    if bool(folder) == bool(profile):
        raise ConfigurationError('give either --target, a checkpoint, or --profile for random '
                                 'weights of its shapes')
    if folder:
        path = checkpoint_folder(folder)
        target, tokenizer = open_checkpoint(path, device)
        return OpenedTarget(target, tokenizer, target_digest(path))
    known = known_profile(profile)
    if known is None:
        raise ConfigurationError(f'profile {profile!r} is unknown: use alpamayo-r1, or a slice '
                                 'of it such as alpamayo-r1-slice2')
    dtype = torch.bfloat16 if device.type == 'cuda' else torch.float32
    make = random_target if whole else tables_only
    made = make(known, device, dtype, seed)
    return OpenedTarget(made, None, f'{RANDOM}-{known.name}-{seed}')


def tables_only(profile: ProfileConfig, device: torch.device, dtype: torch.dtype,
                seed: int = 0) -> Target:
    """Return a target of which only embedding, head and last norm exist."""
    with torch.device('meta'):
        target = Target(profile).to(dtype)
    generator = torch.Generator(device).manual_seed(seed)
    text = target.text
    for module, spread in ((text.embed_tokens, 1.0), (text.lm_head,
                                                      text.cfg.hidden_size ** -0.5)):
        weight = torch.empty(module.weight.shape, dtype=dtype, device=device)
        module.weight = nn.Parameter(weight.normal_(std=spread, generator=generator), False)
    text.norm.weight = nn.Parameter(torch.ones(text.cfg.hidden_size, dtype=dtype,
                                               device=device), False)
    return target.eval().requires_grad_(False)


def memory_gib(device: torch.device) -> dict[str, float]:
    """Return what is allocated now and was at most, GiB; zeros without a GPU."""
    if device.type != 'cuda':
        return {'now': 0.0, 'peak': 0.0}
    return {'now': round(torch.cuda.memory_allocated(device) / _GIB, 2),
            'peak': round(torch.cuda.max_memory_allocated(device) / _GIB, 2)}


def memory_table(draft: nn.Module, target: nn.Module, cache: TargetCache,
                 optimizer: torch.optim.Optimizer, average: WeightAverage) -> dict[str, float]:
    """
    Return where the memory of a training goes, GiB.

    'peak' is what the device held at most, 'other' what of it is none of the tensors named here:
    the compact head, activations, the logits of a step and the allocator's pool of the graph.
    """
    device = cache.device
    known = {
        'draft': _gib(draft.parameters()), 'gradients': _gib(draft.parameters()),
        'optimizer': _gib(value for state in optimizer.state.values()
                          for value in state.values() if isinstance(value, Tensor)),
        'average': _gib(average.values), 'target': _gib(
            weight for weight in target.parameters() if not weight.is_meta),
        'cache': _gib(cache.tensors().values())}
    peak = memory_gib(device)['peak']
    return {**known, 'peak': peak, 'other': round(max(peak - sum(known.values()), 0.0), 2)}


def _gib(tensors: Iterable[Tensor]) -> float:
    return round(sum(tensor.nbytes for tensor in tensors) / _GIB, 3)
