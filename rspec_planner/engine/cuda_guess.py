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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rspec_planner.engine.cuda_frame import FrameBuffers
from rspec_planner.engine.kernels.frame import Slot


class GuessedText:
    """Overwrites proposals with the tokens that follow in a guessed text."""

    def __init__(self, frame: FrameBuffers, room: int) -> None:
        """Make the buffers for texts of up to `room` tokens."""
        device = frame.device
        self._frame = frame
        self._text = torch.zeros(room + 1, dtype=torch.int64, device=device)  # its length last
        self._host = torch.zeros(room + 1, dtype=torch.int64, pin_memory=device.type == 'cuda')
        self._overwrite: Callable[..., None] = guess
        if device.type == 'cuda':
            from rspec_planner.engine.kernels.guess import guess as kernel
            self._overwrite = kernel

    def write(self, text: Sequence[int]) -> None:
        """Take the guess of the next frame; what exceeds the room is left out."""
        room = len(self._host) - 1
        kept = tuple(text[:room])
        self._host.zero_()
        self._host[:len(kept)] = torch.tensor(kept, dtype=torch.int64)
        self._host[room] = len(kept)
        self._text.copy_(self._host, non_blocking=True)

    def __call__(self, proposals: Tensor) -> None:
        """Overwrite proposals (B - 1,) while all that was generated equals the guess."""
        self._overwrite(self._frame.numbers, self._frame.tokens, self._text, proposals)


def guess(frame: Tensor, tokens: Tensor, text: Tensor, proposals: Tensor) -> None:
    """
    Overwrite proposals (B - 1,) with what follows in a text whose beginning was generated.

    frame: (Slot.SIZE,) int64; tokens: (capacity,) int64, committed up to P. text: (room + 1,)
    int64, its last entry the number of its tokens. A text that was left stays left, and what
    lies behind its end keeps the proposal. The kernel of the same name does this on a GPU.
    """
    room = len(text) - 1
    said, length = frame[Slot.GENERATED:Slot.GENERATED + 1], text[room:]
    index = torch.arange(room, device=text.device)
    at = (index + frame[Slot.P] + 1 - said).clamp(0, len(tokens) - 1)
    alive = ((tokens[at] == text[:room]) | (index >= said)).all()
    following = torch.arange(len(proposals), device=text.device) + said
    taken = (following < length) & alive
    proposals.copy_(torch.where(taken, text[following.clamp(max=room - 1)], proposals))
