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
import math

import torch
from torch import Tensor

from rspec_planner.decode.accept import Acceptance
from rspec_planner.decode.stats import DecodeStats

__all__ = ['DecodeState', 'DecodeStats']


class DecodeState:
    """
    Committed text of one frame in buffers that keep their addresses.

    tokens[0 .. p] is committed and tokens[p] is the anchor: decided, but usually not yet in the
    target's KV cache, whose rows 0 .. cached - 1 are valid. Inside the loop cached = p; only
    when the last committed token was itself a verified proposal is cached = p + 1. Rows behind
    are stale and need no clearing, because the next verify overwrites them before a query can
    see them.
    """

    def __init__(self, capacity: int, device: torch.device | str = 'cpu') -> None:
        self.tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.length = 0  # prompt length; the first generated token sits at this index
        self.p = 0  # index of the anchor
        self.anchor = 0
        self.done = False  # a stop token was committed
        self.cached = 0  # valid rows of the KV cache and of the taps
        self.log_probability = math.nan  # of what was committed, where its logits are known
        self.since = 0  # first row whose token and taps the draft has not seen in this frame

    def open(self, prompt: Tensor) -> None:
        """Begin a frame: prompt (S,) int64, its last token being the anchor of the prefill."""
        self.length = prompt.shape[0]
        self.tokens[:self.length] = prompt
        self.p = self.length - 1
        self.anchor = int(prompt[-1])
        self.done = False
        self.cached = self.p
        self.since = 0
        self.log_probability = math.nan

    def start(self, prompt: Tensor, first: int, stop_ids: Sequence[int]) -> None:
        """Begin a frame: prompt (S,) int64 and the token that the prefill decided."""
        self.open(prompt)
        self.commit(Acceptance((first,), first in stop_ids, 0))

    def commit(self, taken: Acceptance) -> None:
        """Append what a forward over [anchor, proposals] led to; its last token is the anchor."""
        self.cached = self.p + 1 + taken.matched
        self.append(taken.committed, taken.stopped)

    def append(self, tokens: Sequence[int], stopped: bool) -> None:
        """Append tokens whose rows no forward has written."""
        end = self.p + 1 + len(tokens)
        self.tokens[self.p + 1:end] = torch.tensor(tokens, device=self.tokens.device)
        self.p = end - 1
        self.anchor = tokens[-1]
        self.done = stopped

    @property
    def closed(self) -> bool:
        """Return whether the stop token's own row is in the cache."""
        return self.done and self.cached > self.p

    @property
    def num_generated(self) -> int:
        """Return how many tokens were committed after the prompt."""
        return self.p + 1 - self.length

    @property
    def generated(self) -> tuple[int, ...]:
        """Return the committed tokens after the prompt."""
        return tuple(self.tokens[self.length:self.p + 1].tolist())
