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
Prefills that carry every row through the last layer, because a draft of the whole context taps it.

At the R1 shapes no draft taps the last layer; at the tiny profile all do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rspec_planner.engine.cuda_decoder import Prefill
from rspec_planner.engine.cuda_fp8_prefill import Fp8Prefill
from rspec_planner.engine.kernels.frame import Slot


class WholePrefill(Prefill):
    """A prefill whose last layer runs for all rows."""

    def _conclude(self, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> None:
        last, frame = len(self.layers) - 1, self.frame
        q = self._project(self.layers[last], hidden, tables, last)
        hidden = self._finish(self.layers[last], hidden, self._mix(q, last))
        self.taps.rows[:len(hidden), self.taps.layers.index(last)] = hidden
        rows = torch.arange(len(self.best), device=self.device) + frame.at(Slot.P)
        self.choose(hidden.index_select(0, rows), self.best)
        self.kernels.accept(frame.numbers, frame.tokens, frame.tokens.index_select(0, rows),
                            self.best, frame.stops, proposed=frame.at(Slot.GUESS))


class WholeFp8Prefill(WholePrefill, Fp8Prefill):
    """The same over e4m3 weights."""
