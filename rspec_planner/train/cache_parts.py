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

from safetensors.torch import load_file
import torch
from torch import Tensor

from rspec_planner.errors import EngineError
from rspec_planner.train.draft_data import CLIP_DIMENSION, META_FILE, TargetCache

PART = 'part-{:05d}'
PREFIX_FILE = 'prefix.safetensors'
#: keys and values of prompts that are kept on the device; 18 clips of Alpamayo R1
MAPPED_BYTES = 8 * 2 ** 30
#: dimension along which a tensor of one clip grows with the longest text of its part, and filler
_GROWS: dict[str, tuple[int, int]] = {'ids': (1, -1), 'tail_taps': (2, 0)}


def part_folders(folder: str | Path) -> list[Path]:
    """Return the parts that are complete, in order."""
    return [path for path in sorted(Path(folder).glob('part-*')) if (path / META_FILE).is_file()]


class MappedRows:
    """Rows of tensors that stay in mapped files, brought to a device when they are asked for."""

    def __init__(self, parts: Sequence[Tensor], device: torch.device | str) -> None:
        self._parts, self._device = parts, device
        self._ends = torch.tensor([len(part) for part in parts]).cumsum(0)

    def __getitem__(self, index: Tensor) -> Tensor:
        """Return rows (n, ...) on the device, for (n,) int64."""
        numbers = index.cpu()
        places = torch.searchsorted(self._ends, numbers, right=True)
        rows = [self._parts[part][number - int(self._ends[part]) + len(self._parts[part])]
                for part, number in zip(places.tolist(), numbers.tolist())]
        return torch.stack(rows).to(self._device)


def load_cache(folder: str | Path, device: torch.device | str = 'cpu',
               without: Sequence[str] = ()) -> TargetCache:
    """
    Read a cache, in one piece or in parts; EngineError names what is missing or differs.

    without: optional tensors that are not needed, such as 'prefix', most of a cache's bytes.
    Prompts of more than `MAPPED_BYTES` stay in their files and are read clip by clip.
    """
    parts = part_folders(folder) or [Path(folder)]
    mapped = 'prefix' not in without and sum(map(_prefix_bytes, parts)) > MAPPED_BYTES
    left = (*without, 'prefix') if mapped else without
    held = [TargetCache.load(part, device, left) for part in parts]
    cache = join_caches(held, folder) if len(held) > 1 else held[0]
    if not mapped:
        return cache
    return replace(cache, prefix=MappedRows(
        [load_file(part / PREFIX_FILE)['prefix'] for part in parts], device))


def _prefix_bytes(part: Path) -> int:
    path = part / PREFIX_FILE
    return path.stat().st_size if path.is_file() else 0


def join_caches(parts: Sequence[TargetCache], origin: str | Path = '') -> TargetCache:
    """Return one cache of all clips; EngineError when targets or contents differ."""
    first = parts[0]
    for part in parts[1:]:
        for name in ('profile', 'digest', 'layers'):
            if getattr(part, name) != getattr(first, name):
                raise EngineError(f'{origin}: the parts differ in {name}; they were made by two '
                                  'runs: keep one of them')
        if part.prompt_ids.shape[1] != first.prompt_ids.shape[1]:
            raise EngineError(f'{origin}: the parts have {first.prompt_ids.shape[1]} and '
                              f'{part.prompt_ids.shape[1]} prompt columns; build the cache again '
                              'with one --route-room')
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
