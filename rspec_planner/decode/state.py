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
"""The fixed buffers that the decoding loop works on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rspec_planner.decode.stats import DecodeStats

__all__ = ['DecodeState', 'DecodeStats']


class DecodeState:
    """
    Committed text of one frame in buffers that keep their addresses.

    tokens[0 .. p] is committed and tokens[p] is the anchor: decided, but not yet in the
    target's KV cache, whose rows 0 .. p - 1 are valid. Rows behind are stale and need no
    clearing, because the next verify overwrites them before a query can see them.
    """

    def __init__(self, capacity: int) -> None:
        self.tokens = torch.zeros(capacity, dtype=torch.int64)
        self.length = 0  # prompt length; the first generated token sits at this index
        self.p = 0  # index of the anchor
        self.anchor = 0
        self.done = False  # a stop token was committed

    def start(self, prompt: Tensor, first: int, stop_ids: Sequence[int]) -> None:
        """Begin a frame: prompt (S,) int64 and the token that the prefill decided."""
        self.length = prompt.shape[0]
        self.tokens[:self.length] = prompt
        self.p = self.length - 1
        self.done = False
        self.commit((first,), first in stop_ids)

    def commit(self, tokens: Sequence[int], stopped: bool) -> None:
        """Append committed tokens; the last one becomes the anchor."""
        for token in tokens:
            self.p += 1
            self.tokens[self.p] = token
        self.anchor = tokens[-1]
        self.done = stopped

    @property
    def num_generated(self) -> int:
        """Return how many tokens were committed after the prompt."""
        return self.p + 1 - self.length

    @property
    def generated(self) -> tuple[int, ...]:
        """Return the committed tokens after the prompt."""
        return tuple(self.tokens[self.length:self.p + 1].tolist())
