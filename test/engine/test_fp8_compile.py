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
"""The fp8 kernels compile for the GPU they are meant for, which needs no GPU."""

import re

import pytest
from test_kernels_compile import LARGEST, printed


def lines(mode):
    return printed(mode, 'compile_fp8.py').splitlines()


def test_every_width_of_a_verify_runs_the_same_machine_code():
    """A row's bits then cannot depend on how many rows run beside it."""
    launches = {}
    for line in lines('widths'):
        block, width, launch = line.split(' ', 2)
        launches.setdefault(block, {}).setdefault(width, []).append(launch)
    for block in ('16', '24'):
        one, seven, whole = (launches[block][width] for width in ('1', '7', block))
        assert {line.split()[0] for line in whole} == {
            '_norm8', '_product8', '_rotate', '_chunk', '_join', '_head', '_best'}
        assert len(whole) == 2 * 11 + 2
        assert one == seven == whole


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['plain', 'pdl'])
def test_every_launch_compiles_for_sm_90_into_fp8_instructions(mode):
    found = lines(mode)
    launches = [re.match(r'(\w+) grid .* shared (\d+) stack (\d+)', line) for line in found]
    launches = [match.groups() for match in launches if match]
    assert {'_norm8', '_gate8', '_gelu8', '_rescale', '_turn', '_product8'} == {
        name for name, _, _ in launches}
    for name, shared, stack in launches:
        assert int(shared) <= LARGEST, name
        assert int(stack) == 0, f'{name} spills'
    instructions = {line.split()[1] for line in found if line.startswith('instruction')}
    assert instructions
    assert all('wgmma' in name and name.endswith('e4m3.e4m3') for name in instructions)
