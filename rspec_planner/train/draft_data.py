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
What a target said about clips and what its layers held: the data that drafts are trained on.

Columns are aligned at the start of the reasoning, so that every clip has its first generated
token in the same column whatever the length of its prompt. The labels are the target's own
greedy text in fp32, the text that the deployed planner generates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
import json
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
import torch
from torch import Tensor

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.config import ProfileConfig

META_FILE = 'cache.json'
#: tensors with one row per clip, and the dimension of the clip
CLIP_DIMENSION = {'ids': 0, 'lengths': 0, 'prompt_lengths': 0, 'layouts': 0, 'prompt_ids': 0,
                  'tail_taps': 1, 'full_taps': 1, 'prefix': 0, 'actions': 0}


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute fp32 products in fp32 inside, whatever the process allows outside."""
    kept = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = kept


class Rows(Protocol):
    """Something that gives rows by their numbers: a tensor, or files that are mapped."""

    def __getitem__(self, index: Tensor, /) -> Tensor:
        """Return rows (n, ...) on the device of the cache, for (n,) int64."""


@dataclass(frozen=True)
class CacheOptions:
    """What to keep of each clip, and how much text to generate."""

    full: bool = False  # taps of all prompt rows, layers 0 .. N - 2
    prefix: bool = False  # keys and values of the prompt
    prefix_dtype: torch.dtype = torch.bfloat16
    actions: bool = False  # the greedy trajectory under the common noise
    tail: int = 64  # prompt rows before the reasoning whose taps are kept in any case
    max_tokens: int = 40  # a text that is longer than this counts as unfinished
    batch: int = 48
    seed: int = 0  # of the common noise
    route_room: int = 16  # prompt columns for a route block
    layers: tuple[int, ...] = ()  # target layers whose states are kept, () for all
    end_at: int = 0  # end every text after that many tokens: random weights never stop; 0: never


@dataclass(frozen=True)
class TargetCache:
    """
    N clips of one target on one device.

    R generated tokens at most, P prompt columns, T tail columns, H hidden, L kept layers. The
    prompt is right-aligned: column P - 1 is its last row, and column P + i (or T + i of the
    tail) is generated token i. Absolute row = prompt length - P + column.
    """

    profile: ProfileConfig
    digest: str  # of the target's weights
    names: tuple[str, ...]  # clip names, pair/event
    splits: tuple[str, ...]  # of each clip
    families: tuple[str, ...]  # of each clip
    ids: Tensor  # (N, R) int64, generated ids with the stop token, -1 behind them
    lengths: Tensor  # (N,) int64 generated tokens
    prompt_lengths: Tensor  # (N,) int64
    layouts: Tensor  # (N,) int64 row of the layout tables
    prompt_ids: Tensor  # (N, P) int32, pad in front
    tail_taps: Tensor  # (L, N, T + R, H) bf16, zero where there is no row
    layout_lengths: Tensor  # (layouts,) int64 prompt length of each layout
    positions: Tensor  # (layouts, 3, P) int64, zero in front of the prompt
    rope_delta: Tensor  # (layouts,) int64
    history: Tensor  # (layouts, 2) int64 first and last + 1 column of the ego history
    full_taps: Tensor | None = None  # (L - 1, N, P, H) bf16
    prefix: Rows | None = None  # (N, layers, 2, kv_heads, P, d), LEFT-aligned: row = prompt row
    actions: Tensor | None = None  # (N, W, 2) fp32 normalised, one sample from `noise`
    noise: Tensor | None = None  # (W, 2) fp32, the same for every clip
    layers: tuple[int, ...] = ()  # target layer of each row of the taps, () where all are kept

    def __len__(self) -> int:
        """Return the number of clips."""
        return len(self.names)

    @property
    def device(self) -> torch.device:
        """Return where the tensors lie."""
        return self.ids.device

    @property
    def tail(self) -> int:
        """Return T, the prompt columns of `tail_taps`."""
        return self.tail_taps.shape[2] - self.ids.shape[1]

    @property
    def last_layer(self) -> int:
        """Return the number of the target's last layer."""
        return self.profile.text.num_layers - 1

    def tap_row(self, layer: int) -> int:
        """Return the row of a target layer in the taps; ConfigurationError when it is not kept."""
        if not self.layers:
            return layer
        if layer not in self.layers:
            raise ConfigurationError(f'the cache keeps layers {self.layers} and not {layer}: '
                                     'build it with --layers, or choose other taps')
        return self.layers.index(layer)

    @property
    def finished(self) -> Tensor:
        """Return (N,) bool: the text ends with a stop token."""
        last = self.ids.gather(1, (self.lengths - 1)[:, None])[:, 0]
        stops = torch.tensor(self.profile.tokens.stop_ids, device=self.device)
        return torch.isin(last, stops)

    def rows(self, *splits: str) -> Tensor:
        """Return (n,) int64 indices of the clips of these splits, in order."""
        chosen = [i for i, split in enumerate(self.splits) if split in splits]
        if not chosen:
            raise ConfigurationError(f'split {"/".join(splits)}: no clip of it in the cache; '
                                     f'it holds {", ".join(sorted(set(self.splits)))}')
        return torch.tensor(chosen, device=self.device)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that exists by its field name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> TargetCache:
        """Return the cache on a device; tensors already there are shared."""
        moved = {name: value.to(device) for name, value in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def take(self, index: Tensor) -> TargetCache:
        """Return a cache of these clips (n,) int64; layout tables are shared."""
        order = index.tolist()
        picked: dict[str, Any] = {
            name: value.index_select(CLIP_DIMENSION[name], index)
            for name, value in self.tensors().items() if name in CLIP_DIMENSION}
        for name in ('names', 'splits', 'families'):
            labels = getattr(self, name)
            picked[name] = tuple(labels[i] for i in order)
        return replace(self, **picked)

    def save(self, folder: str | Path) -> None:
        """Write one safetensors file per tensor and the labels as JSON."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for name, value in self.tensors().items():
            save_file({name: value.contiguous()}, path / f'{name}.safetensors')
        meta = {'profile': self.profile.to_dict(), 'digest': self.digest,
                'names': self.names, 'splits': self.splits, 'families': self.families,
                'layers': self.layers, 'tensors': sorted(self.tensors())}
        (path / META_FILE).write_text(json.dumps(meta), encoding='utf-8')

    @staticmethod
    def load(folder: str | Path, device: torch.device | str = 'cpu',
             without: Sequence[str] = ()) -> TargetCache:
        """Read `save` output but for some tensors; EngineError names a missing or broken file."""
        path = Path(folder)
        try:
            meta = json.loads((path / META_FILE).read_text(encoding='utf-8'))
            named: dict[str, Any] = {
                name: tuple(meta[name]) for name in ('names', 'splits', 'families')}
            for name in sorted(set(meta['tensors']) - set(without)):
                named[name] = load_file(path / f'{name}.safetensors', device=str(device))[name]
            named['layers'] = tuple(meta.get('layers', ()))  # older caches keep all
            profile = ProfileConfig.from_dict(meta['profile'])
            digest = str(meta['digest'])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise EngineError(f'{path}: not a target cache ({error}); build it again') from None
        return TargetCache(profile=profile, digest=digest, **named)

    def check_target(self, digest: str) -> None:
        """Raise EngineError when the cache was made by another target."""
        if digest != self.digest:
            raise EngineError(f'the cache was made by target {self.digest[:12]}, this is '
                              f'{digest[:12]}; build the cache again')


def draft_vocabulary(cache: TargetCache, rows: Tensor, coverage: float = 0.999
                     ) -> tuple[Tensor, float]:
    """
    Return the ids that the target used in these clips, and the share of all clips' tokens.

    (V_d,) int64 ascending; `cot_end` and `traj_future_start` always belong to them. Raises
    ConfigurationError when the ids cover less than `coverage` of the tokens in the cache.
    """
    tokens = cache.profile.tokens
    used = cache.ids[rows]
    used = used[used >= 0]
    closing = torch.tensor([tokens.cot_end, tokens.traj_future_start], device=cache.device)
    ids = torch.unique(torch.cat((used, closing)))
    said = cache.ids[cache.ids >= 0]
    share = float(torch.isin(said, ids).double().mean())
    if share < coverage:
        raise ConfigurationError(f'{len(ids)} draft ids cover {share:.2%} of the texts, less '
                                 f'than {coverage:.1%}; train on more clips or use the full head')
    return ids, share


def share_of(rows: Tensor, rank: int, world: int) -> Tensor:
    """Return the rows of one process, every world-th one, equally many for each process."""
    return rows[rank:len(rows) // world * world:world]


def clip_names(specs: Sequence[Any]) -> tuple[str, ...]:
    """Return a unique name of each spec."""
    return tuple(f'{spec.pair_id}/{"event" if spec.event else "twin"}' for spec in specs)
