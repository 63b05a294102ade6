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
The chain draft (EAGLE-3) of the device-resident frame, see `cuda_draft_rows` for what it keeps.

Slot t holds the token at t + 1 and the fused feature of row t. An iteration lays out the slots
before the anchor, runs slot p - 1 and then one slot a proposal, each fed with the output of the
one before. Every position is a number on the device.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from rspec_planner.engine.cuda_decoder import DeviceTaps
from rspec_planner.engine.cuda_draft_rows import check_draft, DraftHead, DraftTurns, TapRows
from rspec_planner.engine.cuda_frame import FrameBuffers
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.select import Kernels
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.layer import RmsNorm


class _Cell:
    """The weights of the one layer, each matrix (out, in)."""

    def __init__(self, draft: Eagle3) -> None:
        attn, mlp = draft.self_attn, draft.mlp
        queries = attn.q_proj.weight.shape[0]
        with torch.no_grad():
            self.qkv = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])
            self.gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.kv = self.qkv[queries:]
        self.out, self.down = attn.o_proj.weight.detach(), mlp.down_proj.weight.detach()
        q_norm, k_norm = cast('RmsNorm', attn.q_norm), cast('RmsNorm', attn.k_norm)
        self.norms = q_norm.weight.detach(), k_norm.weight.detach()
        self.embed_norm, self.feature_norm, self.post_norm = (
            weight.detach() for weight in (draft.embed_norm.weight, draft.feature_norm.weight,
                                           draft.post_attention_layernorm.weight))


class ChainDraft:
    """Proposes `proposals` (B - 1,) behind the frame's anchor."""

    def __init__(self, draft: Eagle3, kernels: Kernels, frame: FrameBuffers, taps: DeviceTaps
                 ) -> None:
        check_draft(draft)
        cfg = draft.cfg
        self._cfg, self._kernels, self._frame, self._taps = cfg, kernels, frame, taps
        dtype, device, size = draft.fc.weight.dtype, frame.device, cfg.hidden_size
        self._cell, self._fc = _Cell(draft), draft.fc.weight.detach()
        self._embedding, self._head = draft.shared.embedding, DraftHead(draft, kernels)
        self._turns = DraftTurns(cfg, frame)
        self.proposals = torch.zeros(cfg.block - 1, dtype=torch.int64, device=device)
        count = cfg.window or cfg.block  # slots that an iteration lays out
        self._tapped = TapRows(draft, frame, taps, count)

        def buffer(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self._features, self._pairs = buffer(count, size), buffer(count, 2 * size)
        self._kv = buffer(1, count, 2 * cfg.num_kv_heads, cfg.head_dim)
        self._embedded = buffer(count, size)
        kept = (1, cfg.num_kv_heads, (cfg.window or frame.capacity) + cfg.block, cfg.head_dim)
        self._held = buffer(*kept), buffer(*kept)
        self._x, self._middle, self._pair = buffer(1, size), buffer(1, size), buffer(1, 2 * size)
        heads = cfg.num_heads + 2 * cfg.num_kv_heads
        self._qkv = buffer(1, 1, heads, cfg.head_dim)
        self._q = buffer(1, 1, cfg.num_heads, cfg.head_dim)
        self._mixed = buffer(1, cfg.num_heads * cfg.head_dim)
        self._gated = buffer(1, cfg.intermediate_size)
        self._ids = torch.zeros(count, dtype=torch.int64, device=device)
        # rotary rows: of the first slot laid out, then of every slot that runs
        self._shift = torch.tensor([-count, *range(-1, cfg.block - 2)], device=device)
        self._angles = torch.zeros_like(self._shift)
        self._slots = self._shift + count if cfg.window else self._angles

    @property
    def kept(self) -> list[Tensor]:
        """Return the buffers of keys and values."""
        return list(self._held)

    def open(self) -> None:
        """Enqueue what a new frame needs: rotary rows, and the prompt's keys and values."""
        self._turns.open()
        if self._cfg.window:
            return
        rows, frame = self._frame.prompt_rows, self._frame
        features = torch.mm(self._taps.rows[:rows].flatten(1), self._fc.t())
        pairs = features.new_empty((rows, 2 * features.shape[1]))
        self._pair_up(self._embedding.index_select(0, frame.tokens[1:rows + 1]), features, pairs)
        projected = torch.mm(pairs, self._cell.kv.t()).view(1, rows, -1, self._cfg.head_dim)
        self._write(projected, frame.at(Slot.ZERO), frame.at(Slot.ZERO))

    def __call__(self) -> None:
        """Enqueue one chain of proposals."""
        frame, kernels = self._frame, self._kernels
        torch.add(self._shift, frame.at(Slot.P), out=self._angles)
        kernels.linear(self._tapped(), self._fc, self._features)
        torch.index_select(frame.tokens, 0, self._tapped.index + 1, out=self._ids)
        torch.index_select(self._embedding, 0, self._ids, out=self._embedded)
        self._pair_up(self._embedded, self._features, self._pairs)
        kernels.linear(self._pairs, self._cell.kv, self._kv.view(len(self._pairs), -1))
        self._write(self._kv, self._slots[:1], self._angles[:1])
        feature, pair = self._features[-1:], self._pairs[-1:]
        for step in range(self._cfg.block - 1):
            if step:
                torch.index_select(self._embedding, 0, self.proposals[step - 1:step],
                                   out=self._embedded[:1])
                feature, pair = self._x, self._pair
                self._pair_up(self._embedded[:1], feature, pair)
            self._run(feature, pair, step)
            self._head(self._x, self.proposals[step:step + 1])

    def _pair_up(self, embedded: Tensor, features: Tensor, out: Tensor) -> None:
        """Fill out (rows, 2 H) with the two normed halves of slots."""
        size, eps = embedded.shape[1], self._cfg.rms_norm_eps
        self._kernels.norm(embedded, self._cell.embed_norm, out[:, :size], eps)
        self._kernels.norm(features, self._cell.feature_norm, out[:, size:], eps)

    def _write(self, projected: Tensor, slot: Tensor, angle: Tensor) -> None:
        """Keep keys and values of slots (1, rows, 2 kv_heads, d)."""
        self._kernels.rotate(projected, self._cell.norms, self._turns.tables, slot, angle, None,
                             *self._held, self._cfg.rms_norm_eps)

    def _run(self, feature: Tensor, pair: Tensor, step: int) -> None:
        """Fill `_x` (1, H) with the output of one slot."""
        kernels, cell, eps = self._kernels, self._cell, self._cfg.rms_norm_eps
        slot, angle = (x[step + 1:step + 2] for x in (self._slots, self._angles))
        kernels.linear(pair, cell.qkv, self._qkv.view(1, -1))
        kernels.rotate(self._qkv, cell.norms, self._turns.tables, slot, angle, self._q,
                       *self._held, eps)
        kernels.attend(self._q, self._mixed, start=slot,
                       cache=(self._held[0][0], self._held[1][0]))
        kernels.linear(self._mixed, cell.out, self._middle, residual=feature)
        kernels.linear(self._middle, cell.gate_up, self._gated, norm=cell.post_norm, eps=eps,
                       gated=True)
        kernels.linear(self._gated, cell.down, self._x, residual=self._middle)
