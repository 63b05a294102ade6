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
Temporal reuse on the device: the last text is proposed again as long as the target repeats it.

A guess that rides in the prefill costs no iteration, but the prefill's wide products round
otherwise than a narrow verify and may keep another token at a near tie. Proposed to the verifies
it costs one or two of them, and the text is that of decoding one token a forward, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rspec_planner.engine.cuda_frame import FrameBuffers
from rspec_planner.engine.kernels.frame import Slot


class GuessedText:
    """Overwrites proposals with the tokens that follow in a guessed text."""

    def __init__(self, frame: FrameBuffers, room: int, width: int) -> None:
        """Make the buffers for texts of up to `room` tokens and blocks of `width`."""
        device = frame.device
        self._frame = frame
        self._text = torch.zeros(room + 1, dtype=torch.int64, device=device)  # its length last
        self._host = torch.zeros(room + 1, dtype=torch.int64, pin_memory=device.type == 'cuda')
        self._index = torch.arange(room, device=device)
        self._block = torch.arange(width - 1, device=device)

    def write(self, guess: Sequence[int]) -> None:
        """Take the guess of the next frame; what exceeds the room is left out."""
        room = len(self._index)
        kept = tuple(guess[:room])
        self._host.zero_()
        self._host[:len(kept)] = torch.tensor(kept, dtype=torch.int64)
        self._host[room] = len(kept)
        self._text.copy_(self._host, non_blocking=True)

    def __call__(self, proposals: Tensor) -> None:
        """Overwrite proposals (B - 1,) while all that was generated equals the guess."""
        frame, room = self._frame, len(self._index)
        text, length = self._text[:room], self._text[room:]
        said = frame.at(Slot.GENERATED)
        first = frame.at(Slot.P) + 1 - said
        at = (self._index + first).clamp_(max=frame.capacity - 1)
        same = frame.tokens.index_select(0, at) == text
        alive = (same | (self._index >= said)).all()
        following = self._block + said
        known = (following < length) & alive
        proposals.copy_(torch.where(
            known, text.index_select(0, following.clamp_(max=room - 1)), proposals))
