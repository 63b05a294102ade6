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

At the R1 shapes no draft taps the last layer; at the tiny profile all do. What is said comes from
the narrow rows all the same, so that it rounds as without a draft.
"""

from __future__ import annotations

from torch import Tensor

from rspec_planner.engine.cuda_decoder import Prefill
from rspec_planner.engine.cuda_fp8_prefill import Fp8Prefill


class WholePrefill(Prefill):
    """A prefill whose last layer runs for all rows."""

    def _conclude(self, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> None:
        last = len(self.layers) - 1
        q = self._project(self.layers[last], hidden, tables, last)
        column = self.taps.rows[:len(hidden), self.taps.layers.index(last)]
        column.copy_(self._finish(self.layers[last], hidden.clone(), self._mix(q, last)))
        self._end_with(hidden, q)


class WholeFp8Prefill(WholePrefill, Fp8Prefill):
    """The same over e4m3 weights."""
