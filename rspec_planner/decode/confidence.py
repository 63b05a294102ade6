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
How sure the target was of its own words.

The product of the probabilities that the target gave the tokens it committed, at temperature 1
and whatever the draft said: the verify's rows hold them, so they cost no forward. It says how
familiar a scene is: what the target has words for it mostly says with 0.98 and more, between
two thoughts or before something that it never saw the product falls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math

import torch
from torch import Tensor


def log_probability(outputs: Mapping[str, Tensor], committed: Sequence[int]) -> float:
    """
    Return the sum of log p of committed tokens (n,), token i decided by row i of the outputs.

    outputs: of a stage that decides tokens; 'logits' (S >= n, V), -inf for impossible tokens. NaN
    without them. A token that was not drawn from its row, such as the last of an exhausted
    budget, must not be among the committed.
    """
    if 'logits' not in outputs:
        return math.nan
    rows = outputs['logits'][:len(committed)].float()
    chosen = torch.tensor(committed, device=rows.device)
    own = rows.gather(-1, chosen[:, None])[:, 0]
    return float((own - rows.logsumexp(-1)).sum())
