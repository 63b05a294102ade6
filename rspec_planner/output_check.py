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
Check in operation that drafts and reuse change no word: decode a plan again without them.

Runs behind the publication of a plan, on the worker's thread, every so many plans. It costs a
second set of caches and the time of an autoregressive plan, so it is for trials, not for the road.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plan import Plan


class PlannerLike(Protocol):
    """What is checked, and what it is checked against."""

    def plan(self, observation: Observation) -> Plan:
        """Return the plan of an observation."""

    def reset(self) -> None:
        """Drop what is cached from earlier frames."""


@dataclass(frozen=True)
class CheckState:
    """What the checks since activation found."""

    checked: int = 0
    mismatches: int = 0
    detail: str = ''  # the newest mismatch, one line


class OutputCheck:
    """A planner that remembers its last plan, and compares every `every`-th with a reference."""

    def __init__(self, planner: PlannerLike, reference: PlannerLike, every: int) -> None:
        self._planner = planner
        self._reference = reference
        self._every = every
        self._plans = 0
        self._last: tuple[Observation, Plan] | None = None
        self.state = CheckState()

    def plan(self, observation: Observation) -> Plan:
        """Return the plan of an observation, as the planner makes it."""
        self._last = None
        plan = self._planner.plan(observation)
        self._last = observation, plan
        return plan

    def reset(self) -> None:
        """Drop what is cached from earlier frames."""
        self._last = None
        self._planner.reset()
        self._reference.reset()

    def restart(self) -> None:
        """Count afresh."""
        self._plans, self.state = 0, CheckState()

    def run(self) -> None:
        """Check the plan just made if it is its turn; what the reference raises goes through."""
        last, self._last = self._last, None
        if last is None:
            return
        self._plans += 1
        if self._plans % self._every:
            return
        observation, plan = last
        self._reference.reset()
        again = self._reference.plan(observation)
        detail = difference(plan, again)
        self.state = CheckState(self.state.checked + 1,
                                self.state.mismatches + bool(detail), detail or self.state.detail)


def difference(plan: Plan, again: Plan) -> str:
    """Return how the tokens of two plans differ, one line; '' when they are the same."""
    said, alone = plan.reasoning.token_ids, again.reasoning.token_ids
    if said == alone:
        return ''
    same = next((i for i, (a, b) in enumerate(zip(said, alone)) if a != b),
                min(len(said), len(alone)))
    return (f'at t0 {plan.t0_ns} token {same} differs: {said[same:same + 1]} with the draft, '
            f'{alone[same:same + 1]} without; said {plan.reasoning.text!r}, alone '
            f'{again.reasoning.text!r}')
