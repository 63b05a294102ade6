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
"""Memory and least times against what the shapes of R1 say, counted another way."""

from dataclasses import replace
import math

import pytest
import torch

from rspec_planner.evaluate.roofline import (
    expected_ms,
    layer_weights,
    least_ms,
    measure_rates,
    memory_need,
    prompt_rows,
    Rates,
    STAGES,
)
from rspec_planner.model.config import alpamayo_r1
from rspec_planner.model.upstream_keys import key_table

R1 = alpamayo_r1()
PARAMETERS = 11_078_526_194
#: one H200: a large copy, a large bf16 product
H200 = Rates(4.2e12, 790e12)


def test_the_layers_are_those_of_the_key_table():
    matrices = sum(math.prod(shape) for name, (_, shape) in key_table(R1, 'flat').items()
                   if '.layers.' in name and len(shape) == 2)
    assert layer_weights(R1) == matrices


def test_memory_of_one_sample_stays_below_26_gb():
    need = memory_need(R1, PARAMETERS, 2)
    assert need.weights == 2 * PARAMETERS
    rows = prompt_rows(R1) + R1.max_reasoning_tokens + 64
    assert need.cache == 147_456 * rows  # bytes a token, both K and V of 36 layers
    assert 3_006 <= prompt_rows(R1) < 3_100
    assert 22.6e9 < need.total < 26e9
    six = memory_need(R1, PARAMETERS, 2, samples=6)
    assert six.cache == 7 * need.cache and six.weights == need.weights


def test_least_times_of_r1_on_an_h200():
    found = least_ms(R1, 2, H200)
    assert set(found) == set(STAGES)
    # 15.2 GB of decoder weights a token, 4.56 GB of expert weights a step and its context
    assert found['decode'] / 18 == pytest.approx(15.17e9 / 4.2e12 * 1e3, rel=0.01)
    assert found['action'] == pytest.approx(10 * (4.56e9 + 0.45e9) / 4.2e12 * 1e3, rel=0.02)
    # 2 x 6.95 G weights a row, 3,006 rows and attention
    assert 53 < found['prefill'] < 60
    assert least_ms(R1, 2, H200, iterations=9)['decode'] == pytest.approx(found['decode'] / 2)
    assert least_ms(R1, 2, H200, new_images=16)['encode'] == pytest.approx(4 * found['encode'])


def test_expected_times_are_near_the_measured_ones():
    """Compare with docs/performance.md: encode 7.2, prefill 64.2, one token 4.64, flow 25.8."""
    found = expected_ms(least_ms(R1, 2, H200, iterations=1), 'cuda')
    for stage, measured in (('encode', 7.2), ('prefill', 64.2), ('decode', 4.64),
                            ('action', 25.8)):
        assert found[stage] == pytest.approx(measured, rel=0.15), stage


def test_a_flow_step_of_a_slow_processor_is_bound_by_its_products():
    slow = Rates(1e12, 1e12)
    more = replace(R1, action_space=replace(R1.action_space, n_waypoints=128))
    assert least_ms(more, 2, slow)['action'] == pytest.approx(
        2 * least_ms(R1, 2, slow)['action'])


def test_rates_are_measured():
    rates = measure_rates(torch.device('cpu'), torch.float32)
    assert 1e8 < rates.bytes_per_s < 1e13 and 1e8 < rates.flops < 1e15
