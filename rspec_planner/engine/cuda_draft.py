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
The block draft of the device-resident frame.

A draft with a window reads so few rows that it lays them out anew in every iteration, which
costs one read of weights that the block needs anyway and leaves nothing to keep in step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rspec_planner.engine.cuda_decoder import DeviceTaps
from rspec_planner.engine.cuda_frame import FrameBuffers
from rspec_planner.engine.cuda_rows import half_tables, LayerWeights, Rows, RowShape
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.select import Kernels
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import Draft


def check_draft(draft: Draft) -> Dflash:
    """Return a draft that runs on the device; ConfigurationError for any other."""
    cfg = draft.cfg
    if not isinstance(draft, Dflash) or not cfg.window or cfg.correction_rank:
        raise ConfigurationError(f'draft {cfg.label}: the device-resident loop runs dflash '
                                 'drafts with a window and without a correction; give one, or '
                                 'none')
    return draft


class BlockDraft:
    """Proposes `proposals` (B - 1,) behind the frame's anchor."""

    def __init__(self, draft: Draft, kernels: Kernels, frame: FrameBuffers, taps: DeviceTaps
                 ) -> None:
        draft = check_draft(draft)
        cfg, shared = draft.cfg, draft.shared
        self._cfg, self._kernels, self._frame, self._taps = cfg, kernels, frame, taps
        dtype, device = draft.fc.weight.dtype, frame.device
        draft.pack()
        self._layers = [LayerWeights.of(layer) for layer in draft.layers]
        columns = cfg.num_heads * cfg.head_dim
        self._context_kv = torch.cat([layer.qkv[columns:] for layer in self._layers])
        self._fc, self._norm = draft.fc.weight.detach(), draft.norm.weight.detach()
        self._context_norm = draft.context_norm.weight.detach()
        self._embedding, self._ids = shared.embedding, draft.draft_ids
        reduced = self._ids is not None
        self._head = shared.rows[0] if reduced else shared.head
        self._forbidden = (0, 0) if reduced else shared.forbidden
        tables = half_tables(frame.capacity + cfg.block, cfg.head_dim, cfg.rope_theta, device)
        self._rows = Rows(RowShape.of(cfg.text, cfg.block), kernels, tables, dtype)
        self._tables = tables
        self.proposals = torch.zeros(cfg.block - 1, dtype=torch.int64, device=device)

        def buffer(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self._joined = buffer(cfg.window, len(cfg.taps), cfg.hidden_size)
        self._features = buffer(cfg.window, cfg.hidden_size)
        self._context = buffer(1, cfg.window, cfg.num_layers, 2 * cfg.num_kv_heads, cfg.head_dim)
        self._held = [(buffer(1, cfg.num_kv_heads, cfg.window + cfg.block, cfg.head_dim),
                       buffer(1, cfg.num_kv_heads, cfg.window + cfg.block, cfg.head_dim))
                      for _ in self._layers]
        entry = draft.mask_embedding.detach().to(dtype).expand(cfg.block, -1)
        self._entry = entry.contiguous()
        self._anchor = torch.zeros(1, dtype=torch.int64, device=device)
        # rotary of the first context row and of the anchor, then the context's rows
        mirror = cfg.rotary == 'mirror'  # text rows: the index shifted by the prompt's delta
        self._base = Slot.CONTEXT_ANGLE if mirror else Slot.CONTEXT
        self._shift = torch.tensor([-cfg.window - 1, -1], device=device)
        self._angles = torch.zeros(2, dtype=torch.int64, device=device)
        self._back = torch.arange(-cfg.window, 0, device=device)
        self._index = torch.zeros(cfg.window, dtype=torch.int64, device=device)
        self._window = torch.tensor([cfg.window], device=device)

    def __call__(self) -> None:
        """Enqueue one proposal of a whole block."""
        frame, cfg = self._frame, self._cfg
        torch.add(self._shift, frame.at(self._base), out=self._angles)
        torch.add(self._back, frame.at(Slot.P), out=self._index)
        torch.index_select(self._taps.rows, 0, self._index, out=self._joined)
        self._lay_context()
        torch.index_select(frame.tokens, 0, frame.at(Slot.P), out=self._anchor)
        torch.index_select(self._embedding, 0, self._anchor, out=self._entry[:1])
        x, zero = self._entry, frame.at(Slot.ZERO)
        for weights, held in zip(self._layers, self._held):
            self._rows.layer(weights, x, self._rows.hidden, self._window, self._angles[1:], held,
                             {'start': zero, 'own': held, 'causal': False, 'own_low': zero})
            x = self._rows.hidden
        self._kernels.choose(x[1:], self._head, self.proposals, norm=self._norm,
                             eps=cfg.rms_norm_eps, forbidden=self._forbidden, ids=self._ids)

    def _lay_context(self) -> None:
        """Fuse the tapped states of the window and write its keys and values."""
        cfg, kernels, zero = self._cfg, self._kernels, self._frame.at(Slot.ZERO)
        kernels.linear(self._joined.flatten(1), self._fc, self._features)
        kernels.linear(self._features, self._context_kv, self._context.view(cfg.window, -1),
                       norm=self._context_norm, eps=cfg.rms_norm_eps)
        for index, (weights, held) in enumerate(zip(self._layers, self._held)):
            kernels.rotate(self._context[:, :, index], weights.norms, self._tables, zero,
                           self._angles[:1], None, *held, cfg.rms_norm_eps)
