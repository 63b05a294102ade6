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
"""Which drafts differ in one thing only, so that their difference means something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rspec_planner.model.draft import DraftConfig

#: end of the name of a draft after action-aware post-training
POST_TRAINED = '-aarl'


def _plain(cfg: DraftConfig) -> DraftConfig:
    return replace(cfg, name='')


def rotary_pairs(drafts: Mapping[str, DraftConfig]) -> list[tuple[str, str]]:
    """Return (flat, mirror) labels of drafts that differ in the rotary and nothing else."""
    return [(flat, mirror) for flat, a in drafts.items() for mirror, b in drafts.items()
            if (a.rotary, b.rotary) == ('flat', 'mirror')
            and _plain(replace(a, rotary='mirror')) == _plain(b)
            and a.name.endswith(POST_TRAINED) == b.name.endswith(POST_TRAINED)]


def training_pairs(drafts: Mapping[str, DraftConfig]) -> list[tuple[str, str]]:
    """Return (post-trained, before) labels of drafts of one shape."""
    return [(after, before) for after, a in drafts.items() for before, b in drafts.items()
            if a.name.endswith(POST_TRAINED) and not b.name.endswith(POST_TRAINED)
            and _plain(a) == _plain(b)]


def described(cfg: DraftConfig) -> str:
    """Return a draft's shape in a few words."""
    parts = [f'{cfg.num_layers} layers' if cfg.kind == 'dflash' else 'one layer',
             f'B {cfg.block}', f'window {cfg.window}' if cfg.window else 'whole prompt',
             'FlatRoPE' if cfg.rotary == 'flat' else '3D mirror']
    if cfg.draft_vocab:
        parts.append(f'head of {cfg.draft_vocab}')
    if cfg.correction_rank:
        parts.append(f'correction of rank {cfg.correction_rank}')
    return ', '.join(parts).replace('1 layers', '1 layer')
