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
"""The block draft (DFlash) of the device-resident frame; what it keeps: `cuda_draft_rows`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rspec_planner.engine.cuda_decoder import DeviceTaps
from rspec_planner.engine.cuda_draft_rows import check_draft, DraftHead, DraftTurns, TapRows
from rspec_planner.engine.cuda_frame import FrameBuffers
from rspec_planner.engine.cuda_rows import LayerWeights, Rows, RowShape
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.select import Kernels
from rspec_planner.model.dflash import Dflash


class BlockDraft:
    """Proposes `proposals` (B - 1,) behind the frame's anchor."""

    def __init__(self, draft: Dflash, kernels: Kernels, frame: FrameBuffers, taps: DeviceTaps
                 ) -> None:
        check_draft(draft)
        cfg = draft.cfg
        self._cfg, self._kernels, self._frame, self._taps = cfg, kernels, frame, taps
        dtype, device = draft.fc.weight.dtype, frame.device
        draft.pack()
        self._layers = [LayerWeights.of(layer) for layer in draft.layers]
        columns = cfg.num_heads * cfg.head_dim
        self._context_kv = torch.cat([layer.qkv[columns:] for layer in self._layers])
        self._fc, self._context_norm = (
            weight.detach() for weight in (draft.fc.weight, draft.context_norm.weight))
        self._embedding, self._head = draft.shared.embedding, DraftHead(draft, kernels)
        self._turns = DraftTurns(cfg, frame)
        self._rows = Rows(RowShape.of(cfg.text, cfg.block), kernels, self._turns.tables, dtype)
        self.proposals = torch.zeros(cfg.block - 1, dtype=torch.int64, device=device)
        count = cfg.window or cfg.block  # context rows that an iteration lays out
        self._tapped = TapRows(draft, frame, taps, count)

        def buffer(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self._features = buffer(count, cfg.hidden_size)
        self._context = buffer(1, count, cfg.num_layers, 2 * cfg.num_kv_heads, cfg.head_dim)
        kept = (1, cfg.num_kv_heads, (cfg.window or frame.capacity) + cfg.block, cfg.head_dim)
        self._held = [(buffer(*kept), buffer(*kept)) for _ in self._layers]
        entry = draft.mask_embedding.detach().to(dtype).expand(cfg.block, -1)
        self._entry = entry.contiguous()
        self._anchor = torch.zeros(1, dtype=torch.int64, device=device)
        # the first context row laid out, the anchor, and the end of the block
        self._shift = torch.tensor([-count, 0, cfg.block], device=device)
        self._places = torch.zeros_like(self._shift)
        self._slots = (frame.at(Slot.ZERO), torch.tensor([cfg.window], device=device)) \
            if cfg.window else (self._places[:1], self._places[1:2])

    @property
    def kept(self) -> list[Tensor]:
        """Return the buffers of keys and values."""
        return [buffer for held in self._held for buffer in held]

    def open(self) -> None:
        """Enqueue what a new frame needs: rotary rows, and the prompt's keys and values."""
        self._turns.open()
        if self._cfg.window:
            return
        cfg, rows, zero = self._cfg, self._frame.prompt_rows, self._frame.at(Slot.ZERO)
        features = torch.mm(self._taps.rows[:rows].flatten(1), self._fc.t())
        normed = torch.empty_like(features)
        self._kernels.norm(features, self._context_norm, normed, cfg.rms_norm_eps)
        context = torch.mm(normed, self._context_kv.t()).view(
            1, rows, cfg.num_layers, 2 * cfg.num_kv_heads, cfg.head_dim)
        self._turn(context, zero, zero)

    def __call__(self) -> None:
        """Enqueue one proposal of a whole block."""
        frame = self._frame
        torch.add(self._shift, frame.at(Slot.P), out=self._places)
        self._lay_context()
        torch.index_select(frame.tokens, 0, frame.at(Slot.P), out=self._anchor)
        torch.index_select(self._embedding, 0, self._anchor, out=self._entry[:1])
        x = self._entry
        for weights, held in zip(self._layers, self._held):
            self._rows.layer(weights, x, self._rows.hidden, self._slots[1], self._places[1:2],
                             held, self._view(held))
            x = self._rows.hidden
        self._head(x[1:], self.proposals)

    def _view(self, held: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Return what the block sees, arguments of `reference.attend`."""
        if self._cfg.window:
            zero = self._frame.at(Slot.ZERO)
            return {'start': zero, 'own': held, 'causal': False, 'own_low': zero}
        return {'start': self._places[2:], 'cache': (held[0][0], held[1][0]), 'causal': False}

    def _lay_context(self) -> None:
        """Fuse the tapped states of the rows before the anchor and write keys and values."""
        cfg, kernels = self._cfg, self._kernels
        kernels.linear(self._tapped(), self._fc, self._features)
        kernels.linear(self._features, self._context_kv,
                       self._context.view(len(self._features), -1), norm=self._context_norm,
                       eps=cfg.rms_norm_eps)
        self._turn(self._context, self._slots[0], self._places[:1])

    def _turn(self, context: Tensor, slot: Tensor, angle: Tensor) -> None:
        """Write keys and values of rows context (1, rows, N_d, 2 kv_heads, d) at a slot."""
        for index, (weights, held) in enumerate(zip(self._layers, self._held)):
            self._kernels.rotate(context[:, :, index], weights.norms, self._turns.tables, slot,
                                 angle, None, *held, self._cfg.rms_norm_eps)
