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
"""The bench of fused launches, as a CPU runs it: correctness only."""

from collections import Counter
import sys

import torch

from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_random import random_draft, random_target
from rspec_planner.engine.kernels import reference
from rspec_planner.engine.kernels.select import FUSIBLE, REFERENCE
from rspec_planner.evaluate import bench_fused
from rspec_planner.evaluate.bench_decode import profile_config
from rspec_planner.evaluate.bench_fused import _child, _unsound, Bench, part_check, table, VARIANTS
from rspec_planner.evaluate.bench_workload import bench_prompt


def test_a_bench_of_references_finds_equal_bits(monkeypatch):
    few = {name: VARIANTS[name] for name in ('today', 'gather4', 'all')}
    monkeypatch.setattr(bench_fused, 'VARIANTS', few)
    bench = Bench('tiny', 'cpu')
    checked = part_check(bench)
    assert all(checked[name]['bits_equal'] for name in ('today', 'all'))
    assert {found['runs_that_differ'] for found in checked.values()} == {0}
    assert {found['apart_from_today'] for found in checked.values()} == {0.0}
    timed = bench_fused.part_times(bench, ['gather4'])
    assert {part: set(found) for part, found in timed['ms'].items()} == {
        part: {'today', 'all'} for part in ('verify16', 'one_token', 'flow10')}
    lines = list(table({'check': checked, 'times': timed}))
    assert len(lines) == 4 and '"bits_equal": true' in lines[-1]


def test_wrong_bits_are_found(monkeypatch):
    """A bench that could not tell would prove nothing."""
    def off(*arguments, **keywords):
        REFERENCE.gather(*arguments, **keywords)
        arguments[2].add_(1e-3)

    class Wrong:
        like, launches = 'today', ()

        def kernels(self, plain):
            return bench_fused.replace(plain, gather=off)

        in_use = VARIANTS['today'].in_use

    monkeypatch.setattr(bench_fused, 'VARIANTS', {'today': VARIANTS['today'], 'off': Wrong()})
    checked = part_check(Bench('tiny', 'cpu'))
    assert not checked['off']['bits_equal'] and checked['off']['apart_from_today'] > 0


def test_a_frame_with_fused_launches_says_and_drives_the_same(monkeypatch):
    called = Counter()

    def counted(name):
        kernel = getattr(reference, name)

        def run(*arguments, **keywords):
            called[name] += 1
            kernel(*arguments, **keywords)
        return run

    for name in ('mix', 'close'):
        monkeypatch.setattr(reference, name, counted(name))
    target = random_target(profile_config('tiny'), torch.device('cpu'), torch.float32)
    draft = random_draft(target, block=8, vocabulary=0)
    prompt = bench_prompt(target.cfg, 0)
    told = []
    for fused in ((), FUSIBLE):
        frame = DeviceFrame(target, prompt_rows=len(prompt.ids), budget=8, draft=draft,
                            fused=fused)
        frame.begin(prompt.ids, prompt.positions, prompt.rope_delta, 8)
        frame.frame.noise.copy_(torch.linspace(-1, 1, frame.frame.noise.numel()).view_as(
            frame.frame.noise))
        frame.run()
        told.append(frame.frame.result())
        if not fused:
            assert not called
    assert told[0].generated == told[1].generated
    assert torch.equal(told[0].actions, told[1].actions)
    layers = 2 * called['mix']  # of draft, verify and flow; each sums behind two products
    assert layers == called['close'] > 0


def test_what_a_lost_process_reached_is_kept():
    script = ("import json, time; print('# today: ' + json.dumps({'runs_that_differ': 0}), "
              "flush=True); time.sleep(60)")
    found = _child([sys.executable, '-c', script], 3)
    assert found['today'] == {'runs_that_differ': 0} and 'not done' in found['error']
    assert 'today' not in _unsound(found) and 'all' in _unsound(found)
    assert set(FUSIBLE) == set(VARIANTS['all'].launches)
