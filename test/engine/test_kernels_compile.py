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
"""The kernels compile for the GPU they are meant for, which needs no GPU."""

import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

pytest.importorskip('triton', reason='Triton is not installed: requirements-cuda.txt')

#: bytes of shared memory that a block of an H100 or H200 may use
LARGEST = 232_448


def printed(modes, program='compile_kernels.py'):
    """Return what a program beside this file prints; it must not run interpreted."""
    script = Path(__file__).with_name(program)
    environment = {name: value for name, value in os.environ.items()
                   if name != 'TRITON_INTERPRET'}
    done = subprocess.run([sys.executable, script, *modes.split()], capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(('mode', 'kernels', 'count'), [
    ('widths', {'_norm', '_product', '_gather', '_rotate', '_chunk', '_join'}, 9),
    ('widths fused', {'_norm', '_product', '_mix', '_close'}, 5)])
def test_every_width_of_a_verify_runs_the_same_machine_code(mode, kernels, count):
    """A row's bits then cannot depend on how many rows run beside it."""
    launches = {}
    for line in printed(mode).splitlines():
        block, width, launch = line.split(' ', 2)
        launches.setdefault(block, {}).setdefault(width, []).append(launch)
    for block in ('16', '24'):
        one, seven, whole = (launches[block][width] for width in ('1', '7', block))
        assert {line.split()[0] for line in whole} == kernels | {'_head', '_best'}
        assert len(whole) == 1 + 2 * count + 2
        assert one == seven == whole


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['fused', 'fused pdl'])
def test_launches_that_do_the_work_of_two_compile_for_sm_90_without_spilling(mode):
    found = re.findall(r'(\w+) grid .* shared (\d+) stack (\d+)', printed(mode))
    assert [name for name, _, _ in found] == 2 * ['_mix', '_mix', '_mix', '_join', *4 * ['_close']]
    for name, shared, stack in found:
        assert int(shared) <= LARGEST, name
        assert int(stack) == 0, f'{name} spills'


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['plain', 'pdl'])
def test_every_launch_compiles_for_sm_90_without_spilling(mode):
    found = re.findall(r'(\w+) grid .* shared (\d+) stack (\d+)', printed(mode))
    assert {'_product', '_rotate', '_chunk', '_join', '_head', '_best', '_norm', '_gate',
            '_gather', '_add_norm', '_add_rows', '_turn', '_begin', '_accept', '_replay'} == {
                name for name, _, _ in found}
    for name, shared, stack in found:
        assert int(shared) <= LARGEST, name
        assert int(stack) == 0, f'{name} spills'
