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
Target caches that were written in parts: a long run over recordings loses one part at most.

A folder holds either one cache or the folders part-00000, part-00001, ... of one target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rspec_planner.errors import EngineError
from rspec_planner.train.draft_data import CLIP_DIMENSION, META_FILE, TargetCache

PART = 'part-{:05d}'
#: dimension along which a tensor of one clip grows with the longest text of its part, and filler
_GROWS: dict[str, tuple[int, int]] = {'ids': (1, -1), 'tail_taps': (2, 0)}


def part_folders(folder: str | Path) -> list[Path]:
    """Return the parts that are complete, in order."""
    return [path for path in sorted(Path(folder).glob('part-*')) if (path / META_FILE).is_file()]


def load_cache(folder: str | Path, device: torch.device | str = 'cpu',
               without: Sequence[str] = ()) -> TargetCache:
    """
    Read a cache, in one piece or in parts; EngineError names what is missing or differs.

    without: optional tensors that are not needed, such as 'prefix', most of a cache's bytes.
    """
    parts = part_folders(folder)
    if not parts:
        return TargetCache.load(folder, device, without)
    return join_caches([TargetCache.load(part, device, without) for part in parts], folder)


def join_caches(parts: Sequence[TargetCache], origin: str | Path = '') -> TargetCache:
    """Return one cache of all clips; EngineError when targets or contents differ."""
    first = parts[0]
    for part in parts[1:]:
        for name in ('profile', 'digest', 'layers'):
            if getattr(part, name) != getattr(first, name):
                raise EngineError(f'{origin}: the parts differ in {name}; they were made by two '
                                  'runs: keep one of them')
        if sorted(part.tensors()) != sorted(first.tensors()):
            raise EngineError(f'{origin}: the parts hold different tensors '
                              f'({", ".join(sorted(part.tensors()))} and '
                              f'{", ".join(sorted(first.tensors()))}); build the cache again')
    joined = {name: torch.cat([_padded(part, name, parts) for part in parts], dim)
              for name, dim in CLIP_DIMENSION.items() if name in first.tensors()}
    shifts = [sum(len(part.layout_lengths) for part in parts[:i]) for i in range(len(parts))]
    joined['layouts'] = torch.cat([part.layouts + shift
                                   for part, shift in zip(parts, shifts)])
    for name in ('layout_lengths', 'positions', 'rope_delta', 'history'):
        joined[name] = torch.cat([getattr(part, name) for part in parts])
    labels = {name: tuple(value for part in parts for value in getattr(part, name))
              for name in ('names', 'splits', 'families')}
    return replace(first, **joined, **labels)  # type: ignore[arg-type]


def _padded(part: TargetCache, name: str, parts: Sequence[TargetCache]) -> Tensor:
    """Return a tensor of a part, filled up to the longest text of all parts."""
    value: Tensor = getattr(part, name)
    if name not in _GROWS:
        return value
    dim, filler = _GROWS[name]
    width = max(getattr(other, name).shape[dim] for other in parts)
    shape = list(value.shape)
    shape[dim] = width - shape[dim]
    return torch.cat((value, value.new_full(shape, filler)), dim)
