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
Which tokens of a verified block are committed. The reference that device kernels must equal.

Row i of the verify holds the target's own choice after block[0 .. i]. Proposals are kept while
they equal that choice; one token of the target itself, the bonus, follows. Committing ends at
the first stop token, so nothing behind it is ever counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one iteration."""

    committed: tuple[int, ...]  # 1 .. B tokens, bonus last unless a stop or the limit came first
    stopped: bool  # the last committed token is a stop token
    matched: int  # how many of them were proposals: their K/V rows were written by the verify


def accept(block: Sequence[int], best: Sequence[int], stop_ids: Collection[int],
           limit: int) -> Acceptance:
    """
    Compare a block with the target's choices.

    block: B ids, the anchor first, then B - 1 proposals; best: the B choices of the verify;
    limit: the most tokens that may still be committed, at least 1. With B = 1 this is greedy
    decoding: the one choice is the bonus.
    """
    committed: list[int] = []
    matched = 0
    for row, choice in enumerate(best):
        # A proposal that passed equals the choice, so the choice is what gets committed.
        committed.append(choice)
        passed = row + 1 < len(block) and block[row + 1] == choice
        matched += passed
        if not passed or choice in stop_ids or len(committed) == limit:
            break
    return Acceptance(tuple(committed), committed[-1] in stop_ids, matched)


def apply_follow(block: Sequence[int], follow: Mapping[int, int]) -> list[int]:
    """
    Return the block (B ids, anchor first) with the proposal rule applied.

    Behind each key of `follow` its value is proposed, whatever the draft said. It is a proposal
    like any other: the target still decides. {<|cot_end|>: <|traj_future_start|>} lets the
    verify that reads the end of the reasoning also write the row that the expert needs.
    """
    ruled = list(block)
    for index in range(1, len(ruled)):
        ruled[index] = follow.get(ruled[index - 1], ruled[index])
    return ruled
