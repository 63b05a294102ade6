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
"""Hidden states of chosen target layers, kept beside the KV cache: what a draft reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TapBuffer:
    """
    The residual stream behind chosen layers in fixed buffers, one row per cache position.

    rows: (n_f, B, capacity, hidden); row t holds the outputs of the tapped layers at position
    t, DeepStack included. Like the KV cache it needs no clearing: a draft reads rows of the
    valid cache only, and rejected rows are overwritten before they become valid.
    """

    def __init__(self, layers: tuple[int, ...], batch: int, capacity: int, hidden: int,
                 dtype: torch.dtype = torch.float32,
                 device: torch.device | str = 'cpu') -> None:
        self.layers = layers
        self.rows = torch.zeros((len(layers), batch, capacity, hidden), dtype=dtype,
                                device=device)

    def write(self, parts: Sequence[Tensor], start: int | Tensor, count: int) -> None:
        """
        Store what one forward of `count` rows gave.

        parts: n_f tensors (B, S, hidden) in the order of `layers`. start: the row of the first
        position, or the positions (count,) int64 on the device. A part with fewer rows, a last
        layer that ran for the last rows only, ends at the same position.
        """
        for rows, part in zip(self.rows, parts):
            skipped = count - part.shape[1]
            if isinstance(start, Tensor):
                rows.index_copy_(1, start[skipped:], part.to(rows.dtype))
            else:
                rows[:, start + skipped:start + count] = part

    def gather(self, start: int, path: Sequence[int]) -> None:
        """Move rows start + path[i] to start + i, like `KVCache.gather`."""
        if list(path) == list(range(len(path))):
            return
        source = torch.tensor(path, device=self.rows.device) + start
        self.rows[:, :, start:start + len(path)] = self.rows.index_select(2, source)
