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
Counts and times of one decoding run.

Apart from the buffers, because every process that reads plans imports this, and PyTorch would
cost each of them seconds and hundreds of megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
import math


@dataclass(frozen=True)
class DecodeStats:
    """
    How the reasoning tokens came to be committed.

    The first token comes from the prefill logits and belongs to no iteration
    (speculative-decoding protocol, arXiv 2606.31160; autoregressive: one token an iteration).
    """

    iterations: int  # target forwards after the prefill
    committed: tuple[int, ...]  # tokens committed by each iteration, bonus token included
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    reused: int = 0  # tokens that the prefill committed beyond the first, see decode.reuse
    closing_forwards: int = 0  # target forwards that only completed the expert's context
    block: int = 1  # B, the width of a verify; 1 without a draft
    #: of all generated tokens, see decode.confidence; NaN where the loop does not tell
    log_probability: float = field(default=math.nan, compare=False)  # it has rounding

    @property
    def confidence(self) -> float:
        """Return the target's probability of its own words, 0 to 1, or NaN."""
        return math.exp(self.log_probability)

    @property
    def accepted_length(self) -> float:
        """Return L, the mean number of committed tokens per iteration (0 without any)."""
        return sum(self.committed) / self.iterations if self.iterations else 0.0
