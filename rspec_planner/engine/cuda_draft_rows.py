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
What the drafts of the device-resident frame share: rotary rows, head, and a prompt's taps.

A draft with a window reads so few rows that it lays them out anew in every iteration, which
costs one read of weights that the block needs anyway and leaves nothing to keep in step. A draft
that sees the whole context keeps keys and values of every position: those of the prompt are made
behind the prefill, and each iteration lays out the last B rows before the anchor, which hold
everything that the iteration before committed. What a rejected block left behind the anchor is
overwritten before anything sees it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rspec_planner.engine.cuda_decoder import DeviceTaps
from rspec_planner.engine.cuda_frame import FrameBuffers
from rspec_planner.engine.cuda_rows import half_tables
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.select import Kernels
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.draft import Draft, DraftConfig
from rspec_planner.model.layer import NO_QK_NORM
from rspec_planner.model.rope import axis_of_angle, inverse_frequencies


def check_draft(draft: Draft) -> None:
    """Raise ConfigurationError for a draft that does not run on the device."""
    if draft.cfg.correction_rank:
        raise ConfigurationError(f'draft {draft.cfg.label}: the device-resident loop runs drafts '
                                 'without a correction; give another, or choose the loop host '
                                 '(engine.loop)')
    if not draft.cfg.qk_norm:
        raise ConfigurationError(f'draft {draft.cfg.label}: {NO_QK_NORM}')


class DraftTurns:
    """Cos and sin (rows, d / 2) fp32 of every position; a mirror's change with the prompt."""

    def __init__(self, cfg: DraftConfig, frame: FrameBuffers) -> None:
        rows, device = frame.capacity + cfg.block, frame.device
        self._frame, self._mirror = frame, cfg.rotary == 'mirror'
        self.tables = half_tables(rows, cfg.head_dim, cfg.rope_theta, device)
        self._axis = axis_of_angle(cfg.head_dim // 2, cfg.mrope_section, device)
        self._frequencies = inverse_frequencies(cfg.head_dim, cfg.rope_theta, device)
        self._behind = torch.arange(frame.prompt_rows, rows, device=device).expand(3, -1)

    def open(self) -> None:
        """Enqueue what changes with the frame."""
        if not self._mirror:
            return
        frame = self._frame
        behind = self._behind + frame.at(Slot.ROPE_DELTA)
        positions = torch.cat((frame.positions, behind), dim=1).float()
        angles = positions.index_select(0, self._axis).t() * self._frequencies
        torch.cos(angles, out=self.tables[0])
        torch.sin(angles, out=self.tables[1])


class DraftHead:
    """Chooses the most likely id of draft states."""

    def __init__(self, draft: Draft, kernels: Kernels) -> None:
        shared, self._ids = draft.shared, draft.draft_ids
        reduced = self._ids is not None
        self._kernels, self._eps = kernels, draft.cfg.rms_norm_eps
        self._norm = draft.norm.weight.detach()
        self._head = shared.rows[0] if reduced else shared.head
        self._forbidden = (0, 0) if reduced else shared.forbidden

    def __call__(self, x: Tensor, best: Tensor) -> None:
        """Fill best (M,) int64 with target ids behind states x (M, H)."""
        self._kernels.choose(x, self._head, best, norm=self._norm, eps=self._eps,
                             forbidden=self._forbidden, ids=self._ids)


class TapRows:
    """The tapped states of the last `count` rows before the anchor."""

    def __init__(self, draft: Draft, frame: FrameBuffers, taps: DeviceTaps, count: int) -> None:
        self._frame, self._taps = frame, taps
        self._back = torch.arange(-count, 0, device=frame.device)
        self.index = torch.zeros_like(self._back)
        self._joined = torch.zeros((count, *taps.rows.shape[1:]), dtype=draft.fc.weight.dtype,
                                   device=frame.device)

    def __call__(self) -> Tensor:
        """Return (count, n_f * H); `index` then holds their positions."""
        torch.add(self._back, self._frame.at(Slot.P), out=self.index)
        torch.index_select(self._taps.rows, 0, self.index, out=self._joined)
        return self._joined.flatten(1)
