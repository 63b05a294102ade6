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
"""How many processors a live planner takes, and what it says about itself."""

from __future__ import annotations

import json

import pytest

from rspec_planner.loading import (
    engine_values,
    load_planner,
    manifest_sha256,
    memory_values,
    processor_threads,
    warm_up,
)
from rspec_planner.parameters import load_yaml_parameters, NodeParameters
from rspec_planner.transport import config_path


@pytest.mark.parametrize(('wanted', 'processors', 'threads'), [
    (0, 2, 1), (0, 1, 1), (0, 8, 7), (4, 8, 4), (16, 8, 8)])
def test_a_live_planner_leaves_a_processor_to_the_others(wanted, processors, threads):
    assert processor_threads(wanted, processors) == threads


def test_the_shipped_parameters_load_the_shipped_weights_warm():
    values = load_yaml_parameters(config_path('rspec_planner.param.yaml'))
    parameters = NodeParameters.from_values(values)
    planner = load_planner(parameters)
    assert planner.profile.name == 'tiny'
    assert warm_up(planner) > 0.0
    assert len(manifest_sha256('tiny')) == 64
    assert json.dumps(planner.profile.to_dict())
    facts = engine_values(planner, parameters, {'warm_up_ms': 1.0})
    assert (facts['profile'], facts['precision'], facts['gpu']) == ('tiny', 'float32', 'none')
    assert facts['manifest_sha256'] == manifest_sha256('tiny') and facts['warm_up_ms'] == 1.0


def test_memory_is_that_of_this_process_now():
    before = memory_values('cpu')['memory_mib']
    held = bytearray(b'x' * 200 * 2**20)
    after = memory_values('cpu')
    assert 150 < after['memory_mib'] - before < 260 and len(held)
    assert after['gpu_memory_mib'] == after['peak_gpu_memory_mib'] == 0.0
