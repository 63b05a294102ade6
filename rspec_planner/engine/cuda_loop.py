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
One frame without the host: prefill, draft and verify until the text is complete, flow.

Everything an iteration decides lies in `FrameBuffers.numbers`, so the same launches serve every
iteration of every frame. This file only says what is launched; `cuda_graph` says how.
`decode/loop.py` is the reference that the committed tokens must equal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import cast

import torch
from torch import Tensor

from rspec_planner.engine.cuda_chain import ChainDraft
from rspec_planner.engine.cuda_decoder import DeviceTaps, Prefill, Verify
from rspec_planner.engine.cuda_draft import BlockDraft
from rspec_planner.engine.cuda_draft_rows import check_draft
from rspec_planner.engine.cuda_flow import Flow
from rspec_planner.engine.cuda_fp8 import Fp8Weights
from rspec_planner.engine.cuda_fp8_prefill import Fp8Prefill
from rspec_planner.engine.cuda_frame import FrameBuffers
from rspec_planner.engine.cuda_guess import GuessedText
from rspec_planner.engine.cuda_whole import WholeFp8Prefill, WholePrefill
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.select import fuse, Kernels, kernels_for
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import Draft
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache

#: rows of the cache come in whole chunks of attention
_CHUNK = 128
#: rows of a verify that costs what one row costs: the smallest tile (`kernels.linear.row_tile`)
NARROW = 16


class DeviceFrame:
    """All buffers and launches of the frames of one target."""

    def __init__(self, target: Target, *, prompt_rows: int, budget: int,
                 draft: Draft | None = None, guess_room: int = 0, samples: int = 1,
                 flow_steps: int | None = None, kernels: Kernels | None = None,
                 width: int | None = None, fp8: Fp8Weights | None = None,
                 narrow_guess: bool = False, widest: int = 0,
                 fused: Collection[str] = ()) -> None:
        """
        Make the buffers for prompts of up to `prompt_rows` rows, guess included.

        budget: the most generated tokens. draft: None decodes one token a forward, or `width`
        rows of which all but the first are wasted unless a guess fills them. guess_room: guessed
        tokens that a prefill verifies. narrow_guess: a guess is proposed to the verifies instead,
        see `GuessedText`. fp8: what `quantise_target` made of the target, for prefill, verify and
        flow. widest: the widest verify of another frame that must say the same bit for bit.
        fused: launches of a layer to be done by others, see `select.fuse`.
        Raises ConfigurationError for a draft that does not run here.
        """
        if narrow_guess and (guess_room or (draft is None and (width or 1) == 1)):
            raise ConfigurationError('a guess is verified by narrow forwards only in blocks, and '
                                     'then not in the prefill too: give a draft, or a width '
                                     'above 1, and no guess_room')
        cfg, device = target.cfg, target.device
        self.kernels = fuse(kernels or kernels_for(device), fused)
        if fp8 is not None:
            self.kernels = fp8.kernels(self.kernels)
        width = draft.cfg.block if draft is not None else width or 1
        self._widest = max(width, widest, NARROW)
        rows = prompt_rows + budget + 2 * self._widest + 1
        rows += -rows % _CHUNK
        self.frame = FrameBuffers(rows, prompt_rows, guess_room, cfg.tokens, samples,
                                  cfg.action_space.n_waypoints, device, budget)
        self._guessed = GuessedText(self.frame, budget) if narrow_guess else None
        self.cache = KVCache(cfg.text, 1, rows, target.dtype, device)
        layers = draft.cfg.taps if draft is not None else ()
        self.taps = DeviceTaps(layers, rows, cfg.text.hidden_size, target.dtype, device)
        deep = draft is not None and cfg.text.num_layers - 1 in layers
        tail = draft.cfg.window if draft is not None and deep else 1
        parts = target, self.kernels, self.frame, self.cache, self.taps, guess_room, tail
        self.prefill: Prefill
        if fp8 is None:
            self.prefill = (Prefill if tail else WholePrefill)(*parts)
        else:
            self.prefill = (Fp8Prefill if tail else WholeFp8Prefill)(*parts, fp8)
        self._layers = None if fp8 is None else fp8.text
        expert = None if fp8 is None else fp8.expert
        self.flow = Flow(target, self.kernels, self.frame, self.cache,
                         flow_steps or cfg.flow.num_steps, expert)
        self._decode_with(target, draft, width)

    def _decode_with(self, target: Target, draft: Draft | None, width: int) -> None:
        """Wire verify and draft."""
        tokens, self.draft_model = target.cfg.tokens, draft
        self.verify = Verify(target, self.kernels, self.frame, self.cache, self.taps, width,
                             self._layers, self._widest)
        self.draft = None if draft is None else self._device_draft(draft)
        self._blank = torch.full((width - 1,), tokens.pad, device=target.device)
        self._follow = (tokens.cot_end, tokens.traj_future_start)
        self._script: tuple[Tensor, Tensor] | None = None
        self._wrong = tokens.pad

    def _device_draft(self, draft: Draft) -> BlockDraft | ChainDraft:
        parts = self.kernels, self.frame, self.taps
        check_draft(draft)
        if isinstance(draft, Dflash):
            return BlockDraft(draft, *parts)
        return ChainDraft(cast('Eagle3', draft), *parts)

    def plain(self, target: Target, width: int = 1) -> DeviceFrame:
        """
        Return a twin over the same buffers that decodes without a draft.

        It says the same bit for bit, because its products use the tiles of this frame's verify.
        """
        twin = copy(self)
        twin._guessed = None
        twin._decode_with(target, None, width)
        return twin

    def replay(self, script: Tensor, matches: Tensor) -> None:
        """
        Overwrite what the draft proposes from now on, see `reference.replay`.

        script: (n,) int64 and matches: (iterations,) int64 on the device; change them in place.
        The draft still runs. The proposal rule is off: a script says what follows.
        """
        if self.draft is None:
            raise ConfigurationError('a replay needs a draft whose proposals it replaces')
        self._script = script, matches
        self._follow = (-1, -1)

    def begin(self, prompt: Tensor, positions: Tensor, rope_delta: int, limit: int,
              guess: Sequence[int] = (), end_id: int | None = None) -> None:
        """
        Begin a frame, see `FrameBuffers.write`.

        Raises ConfigurationError for a prompt shorter than the draft's window or block.
        """
        cfg = None if self.draft_model is None else self.draft_model.cfg
        back = 0 if cfg is None else cfg.window or cfg.block
        if len(prompt) <= back:
            raise ConfigurationError(f'a prompt of {len(prompt)} tokens is not longer than the '
                                     f"draft's window of {back}: decode it without a draft")
        if self._guessed is not None:
            self._guessed.write(guess)
            guess = ()
        self.frame.write(prompt, positions, rope_delta, limit, guess, end_id)

    def open(self) -> None:
        """Enqueue the prefill, and what the draft makes of the prompt."""
        self.prefill()
        if self.draft is not None:
            self.draft.open()

    def stale(self) -> list[Tensor]:
        """
        Return what holds leftovers of earlier frames, none of which may change a later one.

        Keys, values, taps and the rows that layers work in; not what the host writes.
        """
        held = [self.cache.keys, self.cache.values, self.taps.rows, *self.flow.own,
                self.verify.runner.hidden, self.flow.rows.hidden]
        return held + (self.draft.kept if self.draft is not None else [])

    def iterate(self) -> None:
        """Enqueue one draft, verify and acceptance."""
        frame, verify, proposals = self.frame, self.verify, self._blank
        if self.draft is not None:
            self.draft()
            proposals = self.draft.proposals
            if self._script is not None:
                self.kernels.replay(frame.numbers, *self._script, proposals, self._wrong)
        if self._guessed is not None:
            if self.draft is None:
                proposals.fill_(self._wrong)  # not what the last iteration left
            self._guessed(proposals)
        drafted = self.draft is not None or self._guessed is not None
        self.kernels.begin(frame.numbers, frame.tokens, proposals, verify.ids, self._follow)
        verify()
        self.kernels.accept(frame.numbers, frame.tokens, verify.ids, verify.best, frame.stops,
                            frame.counts,
                            proposed=None if drafted else frame.at(Slot.ZERO))

    def decode(self) -> None:
        """Iterate, reading on the host after each iteration whether another one is needed."""
        while int(self.frame.numbers[Slot.ACTIVE]):
            self.iterate()

    def run(self) -> None:
        """Run one frame launch by launch, and enqueue the copies of its result."""
        with torch.inference_mode():
            self.open()
            self.decode()
            self.flow()
            self.frame.fetch()
