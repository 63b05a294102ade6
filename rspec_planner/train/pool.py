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
The replay pool: rendered clips in device memory, sampled in pairs.

Rows are written in job order, and only the gap-free beginning may be sampled, so the order of
the data depends on the seed and not on which worker was faster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rspec_planner.errors import ConfigurationError
from rspec_planner.train.examples import ClipRow, ExampleEncoder
from rspec_planner.train.farm import RenderedPair, RenderFarm
from rspec_planner.world.clip import Clip


@dataclass(frozen=True)
class Batch:
    """Clips on the device, twins neighbouring; S is fixed, see `ExampleEncoder.capacity`."""

    images: Tensor  # (B, 16, H, W, 3) uint8
    token_ids: Tensor  # (B, S) int64, prompt and reasoning, padded
    prompt_lengths: Tensor  # (B,) int64
    lengths: Tensor  # (B,) int64, prompt + reasoning + the two closing tokens
    token_weights: Tensor  # (B, R) fp32, of the reasoning tokens, 0 where there is none
    actions: Tensor  # (B, 64, 2) fp32, normalised
    words: Tensor  # (B, W) int64, deliberative ids in order, -1 where there is none
    objects: Tensor  # (B, 16, T) uint8
    history: Tensor  # (B, 16, 4) fp32
    future: Tensor  # (B, 64, 4) fp32


class ClipPool:
    """
    `capacity` pairs of clips; the first `pinned` pairs stay, later ones replace the oldest.

    The images of one clip cost 3.5 MB at 384x192.
    """

    def __init__(self, capacity: int, pinned: int, encoder: ExampleEncoder,
                 image_shape: tuple[int, int, int, int, int], device: torch.device):
        if capacity < 1:
            raise ConfigurationError('pool_clips: the pool needs room for a pair; raise it')
        self.capacity, self.device, self.encoder = capacity, device, encoder
        self.pinned = pinned if pinned < capacity else 0
        views = (image_shape[0] * image_shape[1], *image_shape[2:])
        self.images = torch.empty((capacity, 2, *views), dtype=torch.uint8, device=device)
        self._rows: dict[str, Tensor] = {}
        self.clips: dict[int, tuple[Clip, ...]] = {}  # of each pool row, without pixels
        self._arrived: set[int] = set()
        self.pairs_seen = 0  # gap-free beginning of the job list
        self.clips_rendered = 0

    @property
    def size(self) -> int:
        """Return how many pairs may be sampled."""
        return min(self.pairs_seen, self.capacity)

    def place(self, ordinal: int) -> int:
        """Return the row of the pair with this job number."""
        if ordinal < self.capacity:
            return ordinal
        span = self.capacity - self.pinned
        return self.pinned + (ordinal - self.capacity) % span

    def add(self, pair: RenderedPair, pixels: np.ndarray) -> None:
        """Copy one rendered pair into the pool; `pixels` is (2, 4, 4, H, W, 3) uint8."""
        row = self.place(pair.ordinal)
        encoded = [self.encoder.encode(clip, objects)
                   for clip, objects in zip(pair.clips, pair.objects)]
        self.clips_rendered += len(encoded)
        source = torch.from_numpy(pixels).flatten(1, 2)
        self.images[row].copy_(source, non_blocking=True)
        if len(encoded) == 1:  # a clip without its twin stands in for it
            self.images[row, 1].copy_(self.images[row, 0])
            encoded = encoded * 2
        self._write(row, encoded)
        self.clips[row] = pair.clips
        self._arrived.add(pair.ordinal)
        while self.pairs_seen in self._arrived:
            self._arrived.remove(self.pairs_seen)
            self.pairs_seen += 1

    def _write(self, row: int, encoded: list[ClipRow]) -> None:
        for name in ClipRow.tensor_fields():
            values = torch.from_numpy(np.stack([getattr(e, name) for e in encoded]))
            if name not in self._rows:
                self._rows[name] = torch.zeros((self.capacity, *values.shape),
                                               dtype=values.dtype, device=self.device)
            self._rows[name][row].copy_(values, non_blocking=True)

    def batch(self, pairs: np.ndarray) -> Batch:
        """Return the clips of these pool rows, twins neighbouring."""
        index = torch.from_numpy(np.asarray(pairs, np.int64)).to(self.device, non_blocking=True)
        rows = {name: value[index].flatten(0, 1) for name, value in self._rows.items()}
        images = self.images.index_select(0, index).flatten(0, 1)
        return Batch(images=images, token_ids=rows['token_ids'].long(),
                     prompt_lengths=rows['prompt_length'], lengths=rows['length'],
                     token_weights=rows['token_weights'], actions=rows['actions'],
                     words=rows['words'], objects=rows['objects'], history=rows['history'],
                     future=rows['future'])

    def sample(self, pairs: int, rng: np.random.Generator) -> np.ndarray:
        """Return distinct pool rows, uniformly; fewer when the pool holds fewer."""
        return rng.choice(self.size, min(pairs, self.size), replace=False)


class PoolFeeder:
    """
    Move finished pairs from a render farm into pools without making the device wait.

    Jobs with negative numbers -1, -2, ... belong to the held-out pool.
    """

    def __init__(self, farm: RenderFarm, pool: ClipPool, held_out: ClipPool):
        self.farm, self.pool, self.held_out = farm, pool, held_out
        self.cuda = pool.device.type == 'cuda'
        self._in_flight: deque[tuple[Any, int]] = deque()
        if self.cuda:
            _pin(farm.pixels)

    def feed(self, limit: int = 16, timeout_s: float = 0.0) -> int:
        """Copy up to `limit` pairs; return how many. Slots are released when copied."""
        while self._in_flight and self._in_flight[0][0].query():
            self.farm.release(self._in_flight.popleft()[1])
        pairs = self.farm.poll(limit, timeout_s)
        for pair in pairs:
            pixels = self.farm.pixels[pair.slot]
            if pair.ordinal < 0:
                self.held_out.add(replace(pair, ordinal=-1 - pair.ordinal), pixels)
            else:
                self.pool.add(pair, pixels)
            if self.cuda:
                event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                self._in_flight.append((event, pair.slot))
            else:
                self.farm.release(pair.slot)
        return len(pairs)


def _pin(pixels: np.ndarray) -> None:
    """Page-lock the shared memory, so that copies to the device run beside the training."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = runtime.cudaHostRegister(pixels.ctypes.data, pixels.nbytes, 0)
    if int(result) != 0:
        print(f'shared memory could not be page-locked (cuda error {int(result)}); '
              'copies to the device are synchronous', file=sys.stderr, flush=True)
