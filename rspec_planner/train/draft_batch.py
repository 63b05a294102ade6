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
What one draft reads of a cache, gathered on the device without asking the host.

Anchors are all generated tokens but the last: anchor j is generated token j, at column C + j
of C context columns. The shapes are the same for every batch, so that a training step can be
captured as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.draft import DraftConfig, DraftRotary
from rspec_planner.train.draft_data import TargetCache

CONTEXTS = ('all', 'text')


@dataclass(frozen=True)
class DraftBatch:
    """
    Bt clips for one draft; A anchors, B block, C context columns, M = C + A - 1 used columns.

    The last anchor sees the columns before it, so its own column is not among the M.
    """

    anchors: Tensor  # (Bt, A) int64 ids; where a text is over: any id
    labels: Tensor  # (Bt, A, B - 1) int64 target ids at offsets 1 .. B - 1, -1 behind the end
    taps: tuple[Tensor, ...]  # parts (n_f, Bt, S, H) that follow each other, M columns in all
    tokens: Tensor  # (Bt, M + 1) int64, the id in each column
    visible: Tensor  # (Bt, M) bool, columns that a draft may read at all
    cos: Tensor  # (Bt, M + B, d) fp32
    sin: Tensor
    teacher: Tensor | None = None  # (Bt, R, H) last-layer states that decide token 0 .. R - 1

    @property
    def context(self) -> int:
        """Return C, the column of anchor 0."""
        return self.visible.shape[1] + 1 - self.anchors.shape[1]


class DraftRows:
    """The clips `rows` of a cache in the form that drafts of one configuration read."""

    def __init__(self, cache: TargetCache, cfg: DraftConfig, rows: Tensor, *,
                 context: str = 'all', teacher: bool = False):
        """
        Check that the cache holds what the draft reads.

        context: 'all', or 'text' to hide image columns from a draft without a window;
        teacher: keep the states that give the target's own probabilities.
        """
        self.cache, self.cfg, self.rows, self.teacher = cache, cfg, rows, teacher
        self.text_only = context == 'text' and not cfg.window
        if cfg.window > cache.tail:
            raise ConfigurationError(f'window {cfg.window}: the cache keeps {cache.tail} prompt '
                                     'rows; build it with a longer tail')
        if not cfg.window and (cache.full_taps is None or cfg.taps[-1] == cache.last_layer):
            raise ConfigurationError(
                f'draft {cfg.label} reads the whole prompt at layers {cfg.taps}: build the cache '
                'with full=True and tap layers below the last, which runs for few rows only')
        self.columns = cfg.window or cache.positions.shape[-1]
        longest = int(cache.lengths[rows].max())
        self.anchors = max(longest - 1, 1)
        self.used = self.columns + self.anchors - 1
        self.cos, self.sin = self._tables()

    def __len__(self) -> int:
        """Return the number of clips."""
        return len(self.rows)

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin (layouts, M + B, d) of the columns of every layout."""
        cache, count = self.cache, self.used + self.cfg.block
        first = cache.layout_lengths - self.columns
        index = first[:, None] + torch.arange(count, device=cache.device)
        known = cache.positions[:, :, cache.positions.shape[-1] - self.columns:]
        after = index[:, None, self.columns:] + cache.rope_delta[:, None, None]
        positions = torch.cat((known, after.expand(-1, 3, -1)), dim=2)
        return DraftRotary.tables(self.cfg, index.clamp(min=0), positions)

    def batch(self, index: Tensor) -> DraftBatch:
        """Return the clips `index` (Bt,) int64, rows of the cache, on the device."""
        cache, count, block = self.cache, self.anchors, self.cfg.block
        ids = functional.pad(cache.ids[index], (0, count + block), value=-1)
        labels = ids.unfold(1, block, 1)[:, :count, 1:]
        layouts = cache.layouts[index]
        prompt = cache.prompt_ids[index][:, cache.prompt_ids.shape[1] - self.columns:].long()
        column = torch.arange(self.used, device=index.device) - self.columns
        visible = column >= -cache.prompt_lengths[index, None]
        if self.text_only:
            image = prompt == cache.profile.tokens.image_pad
            visible = visible & ~functional.pad(image, (0, count - 1))
        teacher = None
        if self.teacher:
            row = cache.tap_row(cache.last_layer)
            last = cache.tail_taps[row].index_select(0, index)
            teacher = last[:, cache.tail - 1:cache.tail + count]
        return DraftBatch(anchors=ids[:, :count].clamp(min=0), labels=labels,
                          taps=self._taps(index),
                          tokens=torch.cat((prompt, ids[:, :count].clamp(min=0)), dim=1),
                          visible=visible, cos=self.cos[layouts], sin=self.sin[layouts],
                          teacher=teacher)

    def _taps(self, index: Tensor) -> tuple[Tensor, ...]:
        cache, layers = self.cache, [self.cache.tap_row(layer) for layer in self.cfg.taps]
        start = cache.tail - self.cfg.window if self.cfg.window else cache.tail
        end = cache.tail + self.anchors - 1
        tail = torch.stack([cache.tail_taps[i, :, start:end].index_select(0, index)
                            for i in layers])
        if self.cfg.window or cache.full_taps is None:
            return (tail,)
        whole = torch.stack([cache.full_taps[i].index_select(0, index) for i in layers])
        return (whole, tail)
