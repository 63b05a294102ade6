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
"""The numbers below ~/debug/speculation/, of plans that decoded and of plans that reused."""

from __future__ import annotations

from dataclasses import replace

from node_rig import plan_at
import numpy as np
import pytest

from rspec_planner.decode.stats import DecodeStats
from rspec_planner.outputs import SPECULATION, speculation_numbers
from rspec_planner.planner.plan import StageTimes


def plan_with(stats):
    plan = plan_at(np.eye(4))
    return replace(plan, reasoning=replace(plan.reasoning, stats=stats),
                   times=StageTimes(decode_ms=8.0))


def test_numbers_of_a_speculative_plan():
    numbers = speculation_numbers(plan_with(DecodeStats(2, (10, 6), 1.5, 6.0, reused=2, block=24)))
    assert set(numbers) == set(SPECULATION)
    assert (numbers['iterations'], numbers['mean_accepted_length']) == (2, 8.0)
    assert (numbers['reused_tokens'], numbers['draft_ms'], numbers['verify_ms']) == (2, 1.5, 6.0)
    assert numbers['tokens_per_second'] == pytest.approx(16 / 0.008)


def test_a_plan_without_an_iteration_claims_no_length_and_no_rate():
    numbers = speculation_numbers(plan_with(DecodeStats(0, (), reused=17, block=24)))
    assert (numbers['iterations'], numbers['reused_tokens']) == (0, 17)
    assert 'mean_accepted_length' not in numbers and 'tokens_per_second' not in numbers
