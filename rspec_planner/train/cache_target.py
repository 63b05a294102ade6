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
`rspec train cache-target`: run a target once over recordings and keep what drafts learn from.

The cache holds the target's greedy text and the states of a few layers around it, megabytes per
clip instead of a 22 GB model; with `prefix` also the keys and values of the prompts, from which
post-training plans. It is written in parts; a run that is repeated continues behind the last
complete part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
import json
from pathlib import Path
import sys
import time
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from rspec_planner.errors import ConfigurationError, EngineError, InputError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.draft import dflash_taps, eagle3_taps
from rspec_planner.model.target import Target
from rspec_planner.planner.tokenizer import TextTokenizer
from rspec_planner.train.cache_parts import PART, part_folders
from rspec_planner.train.draft_data import CacheOptions, META_FILE
from rspec_planner.train.draft_target import CacheWriter, padded_columns, prompt_columns
from rspec_planner.train.random_target import memory_gib, open_any_target
from rspec_planner.train.target_clips import (
    bag_clips,
    BagSource,
    clip_of,
    new_clips,
    random_clips,
    random_prompt,
    split_of,
    TargetClip,
)

#: text of random weights, which never stop by themselves
RANDOM_TOKENS = 18


def draft_layers(profile: ProfileConfig) -> tuple[int, ...]:
    """Return the layers that drafts of both kinds tap, and the last, which decides the text."""
    count = profile.text.num_layers
    return tuple(sorted({*dflash_taps(count), *eagle3_taps(count), count - 1}))


class PartWriter:
    """Collects clips of one target and writes a part whenever `size` of them are complete."""

    def __init__(self, target: Target, columns: int, out: Path, digest: str, size: int,
                 options: CacheOptions) -> None:
        """Continue behind the parts in `out`; EngineError when another target made them."""
        self.target, self.columns, self.out, self.options = target, columns, out, options
        self.digest, self.size = digest, size
        self.known: set[str] = set()
        self.number = 0
        for folder in part_folders(out):
            meta = json.loads((folder / META_FILE).read_text(encoding='utf-8'))
            if (meta['digest'], tuple(meta['layers'])) != (digest, options.layers):
                raise EngineError(f'{folder} was made by target {meta["digest"][:12]} with layers '
                                  f'{meta["layers"]}; choose another --out')
            self.known |= set(meta['names'])
            self.number += 1
        self.clips = len(self.known)
        self._new()

    def _new(self) -> None:
        self._writer = CacheWriter(self.target, self.columns, self.size, self.options)
        self._held: list[TargetClip] = []
        self._waiting: dict[int, list[int]] = {}

    def add(self, clip: TargetClip) -> None:
        """Take a clip; its turn comes when a batch of prompts of its length is full."""
        if clip.prompt.length > self.columns:
            raise InputError(f'clip {clip.name}: prompt of {clip.prompt.length} tokens, room for '
                             f'{self.columns}; raise --route-room')
        group = self._waiting.setdefault(clip.prompt.length, [])
        group.append(len(self._held))
        self._held.append(clip)
        if len(group) == self.options.batch:
            self._run(self._waiting.pop(clip.prompt.length))
        if len(self._held) == self.size:
            self.flush()

    def _run(self, rows: Sequence[int]) -> None:
        clips = [self._held[row] for row in rows]
        images = torch.stack([torch.from_numpy(clip.images) for clip in clips])
        self._writer.write(rows, [clip.prompt for clip in clips], images.to(self.target.device))

    def flush(self) -> None:
        """Write what is held as a part."""
        if not self._held:
            return
        for rows in self._waiting.values():
            self._run(rows)
        part = self._writer.finish([clip.name for clip in self._held],
                                   [clip.split for clip in self._held],
                                   [clip.family for clip in self._held], self.digest)
        part.save(self.out / PART.format(self.number))
        self.number += 1
        self.clips += len(self._held)
        self._new()


def cache_target(out: str | Path, *, target: str = '', profile: str = '',
                 bag: Sequence[Path] = (), physical_ai: Path | None = None,
                 random_clip_count: int = 0, topics: Path | None = None,
                 bag_source: BagSource | None = None,
                 layers: str = '', tail: int = 16, max_tokens: int = 40, prefix: bool = False,
                 actions: bool = False, full: bool = False, batch: int = 4, part_clips: int = 64,
                 limit: int = 0, val_share: float = 0.1, every_s: float = 0.0,
                 route_room: int = 80, device: str = '', seed: int = 0) -> dict[str, Any]:
    """
    Cache what a target says and holds over bags, recorded clips or noise.

    target: a checkpoint folder or embedded name; or profile: random weights of its shapes.
    bag_source: reads `bag`. layers: comma-separated, '' for those that drafts tap by default,
    'all' for all. tail: prompt rows whose states are kept. every_s: spacing of t0 in recorded
    clips, 0 for 5.1 s alone.
    Returns the number of clips and parts, bytes, seconds, layers and memory.
    """
    source = Recordings(tuple(bag), bag_source, topics, physical_ai, every_s, random_clip_count,
                        val_share, seed)
    place = torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    started = time.monotonic()
    opened = open_any_target(target, profile, place, seed=seed, whole=True)
    cfg, tokenizer = opened.target.cfg, opened.tokenizer
    clips = source.clips(cfg, tokenizer)
    options = CacheOptions(
        full=full, prefix=prefix, actions=actions, tail=tail, max_tokens=max_tokens, batch=batch,
        layers=_layers(layers, cfg), seed=seed, end_at=RANDOM_TOKENS if not target else 0)
    loaded_s = time.monotonic() - started
    columns = padded_columns(random_prompt(cfg, np.random.default_rng(0)).length) \
        if tokenizer is None else prompt_columns(cfg, tokenizer, route_room)
    writer = PartWriter(opened.target, columns, Path(out), opened.digest, part_clips, options)
    with tqdm(new_clips(clips, writer.known, limit), unit='clip', disable=None, leave=False,
              file=sys.stderr, desc='caching the target') as bar:
        for clip in bar:
            writer.add(clip)
    writer.flush()
    if not writer.clips:
        raise InputError(f'{physical_ai}: no clip could be read '
                         f'({source.skipped[-1] if source.skipped else "none is complete"})')
    written = sum(path.stat().st_size for path in Path(out).rglob('*') if path.is_file())
    return {'clips': writer.clips, 'parts': writer.number, 'skipped': len(source.skipped),
            'bytes': written, 'bytes_per_clip': written // writer.clips,
            'layers': list(options.layers), 'target': opened.digest, 'synthetic': not target,
            'load_s': round(loaded_s, 1), 'seconds': round(time.monotonic() - started, 1),
            'memory_gib': memory_gib(place), 'cache': str(out)}


@dataclass
class Recordings:
    """Where clips come from: exactly one of bags, a PhysicalAI-AV folder and noise."""

    bags: tuple[Path, ...]
    bag_source: BagSource | None
    topics: Path | None
    physical_ai: Path | None
    every_s: float
    random_clips: int
    val_share: float
    seed: int
    skipped: list[str] = field(default_factory=list)  # why, one line for each recorded clip

    def __post_init__(self) -> None:
        """Raise ConfigurationError unless there is one source."""
        if sum((bool(self.bags), self.physical_ai is not None, self.random_clips > 0)) != 1:
            raise ConfigurationError('cache-target: give one source, --bag, --physical-ai or '
                                     '--random-clips')
        if self.bags and self.bag_source is None:
            raise ConfigurationError('cache-target: nobody reads bags here; give a bag_source')

    def clips(self, cfg: ProfileConfig, tokenizer: TextTokenizer | None) -> Iterator[TargetClip]:
        """Return the clips; ConfigurationError when recordings meet a profile without text."""
        if self.random_clips:
            return random_clips(cfg, self.random_clips, self.val_share, self.seed)
        if tokenizer is None:
            raise ConfigurationError(f'--profile {cfg.name} has no weights and no tokenizer: '
                                     'record with --target FOLDER, or use --random-clips')
        if self.bag_source is not None and self.bags:
            return bag_clips(self.bags, self.bag_source, cfg, tokenizer, self.val_share,
                             self.topics)
        return self._recorded(cfg, tokenizer)

    def _recorded(self, cfg: ProfileConfig, tokenizer: TextTokenizer) -> Iterator[TargetClip]:
        """
        Yield the clips of a PhysicalAI-AV folder; all times of a clip are in one split.

        A clip that cannot be read is told and left out: one of thousands ends no run of hours.
        """
        from rspec_planner.train.physical_ai import default_times, PhysicalAiFolder
        assert self.physical_ai is not None
        folder, times = PhysicalAiFolder(self.physical_ai, cfg.cameras), default_times(
            20.0, self.every_s)
        for ordinal, clip in enumerate(folder.clips):
            try:
                for seen in folder.observations(clip, cfg, times):
                    yield clip_of(cfg, tokenizer, seen, f'{clip}/{seen.t0_ns}',
                                  split_of(ordinal, self.val_share), 'physical-ai')
            except InputError as error:
                self.skipped.append(str(error))
                tqdm.write(f'left out: {error}', file=sys.stderr)


def _layers(text: str, cfg: ProfileConfig) -> tuple[int, ...]:
    """Return the chosen layers in order, () for all."""
    if text == 'all':
        return ()
    try:
        chosen = tuple(sorted({int(part) for part in text.split(',') if part.strip()}))
    except ValueError:
        raise ConfigurationError(f"layers={text!r}: give layer numbers such as '1,17'") from None
    chosen = chosen or draft_layers(cfg)
    if chosen[0] < 0 or chosen[-1] >= cfg.text.num_layers:
        raise ConfigurationError(f'layers={text!r}: the target has layers 0 .. '
                                 f'{cfg.text.num_layers - 1}')
    return chosen
