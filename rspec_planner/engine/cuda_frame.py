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
The buffers of one frame on the device, and what the host puts in and takes out.

The host writes the prompt and reads the result; between the two it asks for nothing. All
addresses stay the same for the life of the object, so that graphs can be captured over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import TokenIds

#: iterations whose counts are kept at least
MAX_ITERATIONS = 64


@dataclass(frozen=True)
class FrameResult:
    """What one frame decoded to, read back once."""

    generated: tuple[int, ...]
    committed: tuple[int, ...]  # tokens of each iteration
    reused: int  # tokens that the prefill committed beyond the first
    closing_forwards: int
    context: int  # rows of the expert's context
    stopped: bool
    actions: Tensor  # (Z, 64, 2) fp32 on the host


class FrameBuffers:
    """Numbers, tokens and counts of the frame that is being planned."""

    def __init__(self, capacity: int, prompt_rows: int, guess_room: int, tokens: TokenIds,
                 samples: int, waypoints: int, device: torch.device,
                 iterations: int = 0) -> None:
        """
        Make the buffers, all zero.

        capacity: rows of the KV cache; prompt_rows: rows that a prefill runs; guess_room: how
        many guessed tokens it verifies. iterations: the most whose counts are kept, if more
        than MAX_ITERATIONS.
        """
        def whole(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.int64, device=device)

        self.capacity, self.prompt_rows, self.device = capacity, prompt_rows, device
        self.guess_room = guess_room
        self.numbers = whole(Slot.SIZE)
        self.tokens = whole(capacity)
        self.positions = whole(3, prompt_rows)
        self.visual_rows: Tensor | None = None
        self.counts = whole(max(iterations, MAX_ITERATIONS))
        stops = [*tokens.stop_ids]
        self.stops = torch.tensor(stops, device=device)
        self.noise = torch.zeros((samples, waypoints, 2), device=device)
        self.actions = torch.zeros((samples, waypoints, 2), device=device)
        self._end_id = tokens.traj_future_start
        self._image_pad = tokens.image_pad
        pinned = device.type == 'cuda'
        self._host = [torch.zeros(Slot.SIZE + capacity + 3 * prompt_rows, dtype=torch.int64,
                                  pin_memory=pinned),
                      torch.zeros(Slot.SIZE + capacity + len(self.counts), dtype=torch.int64,
                                  pin_memory=pinned),
                      torch.zeros(self.actions.shape, pin_memory=pinned)]
        self._length = 0

    def at(self, slot: int) -> Tensor:
        """Return the one-element view of a number."""
        return self.numbers[slot:slot + 1]

    def write(self, prompt: Tensor, positions: Tensor, rope_delta: int, limit: int,
              guess: Sequence[int] = (), end_id: int | None = None) -> None:
        """
        Begin a frame: prompt (S,) int64 and positions (3, S) int64 on the host.

        limit: the most tokens that may be generated; guess: tokens that may follow the prompt,
        verified in the prefill. end_id: the token that ends a context, by default the
        profile's. Raises ConfigurationError where the buffers are too small.
        """
        length, rows = len(prompt), len(prompt) + len(guess)
        if (len(guess) > self.guess_room or length + self.guess_room > self.prompt_rows
                or length + limit + 2 > self.capacity):
            raise ConfigurationError(
                f'a prompt of {length} tokens with {len(guess)} guessed and {limit} to come '
                f'exceeds {self.prompt_rows} prompt rows, {self.guess_room} of them guessed, or '
                f'{self.capacity} cache rows: build the frame with more')
        host = self._host[0]
        numbers, tokens, places = torch.split(
            host, [Slot.SIZE, self.capacity, 3 * self.prompt_rows])
        numbers.zero_()
        for slot, value in ((Slot.P, length - 1), (Slot.CACHED, length - 1),
                            (Slot.LIMIT, limit), (Slot.ROPE_DELTA, rope_delta),
                            (Slot.ACTIVE, 1), (Slot.GUESS, len(guess)), (Slot.END_ID,
                            self._end_id if end_id is None else end_id)):
            numbers[slot] = value
        tokens.fill_(self._end_id)
        tokens[:length] = prompt
        if guess:
            tokens[length:rows] = torch.tensor(guess)
        places = places.view(3, -1)
        places.copy_(torch.arange(self.prompt_rows) + rope_delta)
        places[:, :length] = positions
        self._length = length
        for buffer, part in ((self.numbers, numbers), (self.tokens, tokens),
                             (self.positions, places)):
            buffer.copy_(part, non_blocking=True)
        self.place_images(prompt)

    def place_images(self, prompt: Tensor) -> None:
        """Keep the rows that hold images; they are the same in every frame of a camera rig."""
        rows = (prompt == self._image_pad).nonzero()[:, 0]
        if self.visual_rows is None:
            self.visual_rows = rows.to(self.device)
            self._layout = rows
        elif not torch.equal(rows, self._layout):
            raise ConfigurationError(f'{len(rows)} image rows lie elsewhere than in the first '
                                     'frame: the layout of images is fixed')

    def fetch(self) -> None:
        """Enqueue the copies of the result to the host."""
        host = self._host[1]
        parts = torch.split(host, [Slot.SIZE, self.capacity, len(self.counts)])
        for part, source in zip(parts, (self.numbers, self.tokens, self.counts)):
            part.copy_(source, non_blocking=True)
        self._host[2].copy_(self.actions, non_blocking=True)

    def result(self) -> FrameResult:
        """Return the fetched result; the caller has waited for the device."""
        numbers, tokens, counts = torch.split(
            self._host[1], [Slot.SIZE, self.capacity, len(self.counts)])
        said = int(numbers[Slot.GENERATED])
        committed = tuple(counts[:int(numbers[Slot.ITERATION])].tolist())
        return FrameResult(tuple(tokens[self._length:self._length + said].tolist()), committed,
                           said - 1 - sum(committed), int(numbers[Slot.CLOSING]),
                           int(numbers[Slot.CONTEXT]), bool(numbers[Slot.STOPPED]),
                           self._host[2].clone())
