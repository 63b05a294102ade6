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
"""Accepted length and speed-up from runs whose iterations are known."""

from types import SimpleNamespace

import pytest

from rspec_planner.decode.stats import DecodeStats
from rspec_planner.evaluate.length import (
    acceptance_by_offset,
    breakdown,
    counts,
    length_report,
    speedups,
    stop_was_drafted,
)
from rspec_planner.evaluate.reasoning_runs import EAGER, floor_name, PLAIN, Run
from rspec_planner.evaluate.survey import Taken
from rspec_planner.evaluate.tree_runs import Variant
from rspec_planner.model.draft import dflash_config, eagle3_config
from rspec_planner.train.profiles import new_target


def run(committed, closing=1, ms=10.0, draft_ms=0.0, verify_ms=8.0):
    """Return a run of 1 + sum(committed) tokens."""
    stats = DecodeStats(len(committed), tuple(committed), draft_ms, verify_ms,
                        closing_forwards=closing)
    return Run(tuple(range(1 + sum(committed))), stats, 0, ms)


def test_counts_leave_out_the_token_of_the_prefill():
    committed, iterations = counts([run([4, 1]), run([7])])
    assert committed.tolist() == [5, 7] and iterations.tolist() == [2, 1]


def test_a_stop_that_needs_no_closing_was_a_proposal():
    assert stop_was_drafted(run([4, 2], closing=0))
    assert not stop_was_drafted(run([4, 2], closing=1))
    assert not stop_was_drafted(run([], closing=0))  # all of it came with the prefill


def test_acceptance_by_offset_counts_what_could_be_right():
    # block of 4; first iteration 2 right and a bonus, then 1 right and the stop as a bonus
    found = acceptance_by_offset([run([3, 2])], 4)
    assert found == {'rate': [1.0, 0.5, 0.0], 'tried': [2, 2, 1]}
    # the same counts with the stop proposed: one more proposal was right
    assert acceptance_by_offset([run([3, 2], closing=0)], 4)['rate'] == [1.0, 1.0, 0.0]


def test_speedups_follow_the_formula_of_the_kind():
    found = speedups(6.0, 'dflash', draft_ms=1.0, verify_ms=3.0, step_ms=2.0)
    assert found == {'c': 0.5, 'theoretical_speedup': 4.0, 'speedup_measured_verify': 3.0}
    assert speedups(6.0, 'eagle3', 1.0, 3.0, 2.0)['theoretical_speedup'] == 3.0
    assert speedups(6.0, 'dflash', 1.0, 3.0, 0.0)['theoretical_speedup'] == 0.0


def test_the_parts_of_a_step_add_up():
    found = breakdown([run([2], ms=10.0, draft_ms=1.0), run([2], ms=20.0, draft_ms=3.0)])
    assert found == {'draft': 2.0, 'verify': 8.0, 'closing': 5.0}


def taken(split, **runs):
    named = {PLAIN: run([1] * 6, ms=30.0, verify_ms=24.0),
             EAGER: run([1] * 6, ms=60.0, verify_ms=54.0),
             floor_name(4): run([2, 2, 2], ms=15.0), floor_name(6): run([3, 2, 1], ms=15.0)}
    return Taken(split, SimpleNamespace(), 9, {**named, **runs})


def test_a_report_has_the_floor_first_and_pairs_what_differs_in_one_thing():
    profile = new_target(smoke=True)[0].cfg
    flat = dflash_config(profile, block=4, name='a')
    drafts = {'flat': flat, 'mirror': dflash_config(profile, block=4, rotary='mirror', name='b'),
              'flat-aarl': dflash_config(profile, block=4, name='a-aarl'),
              'chain': eagle3_config(profile, block=4)}
    clips = [taken('val', **{'flat': run([3, 3], ms=10.0, draft_ms=2.0),
                             'mirror': run([3, 2, 1]), 'flat-aarl': run([3, 3]),
                             'chain': run([2, 4], draft_ms=16.0)}) for _ in range(3)]
    report = length_report(clips, drafts, extra_ms={'flat': 5.0})['splits']['val']
    assert list(report['drafts']) == [floor_name(4), 'flat', 'mirror', 'flat-aarl', 'chain']
    row = report['drafts']['flat']
    assert row['accepted_length'] == {'mean': 3.0, 'ci95': [3.0, 3.0]}
    assert row['above_floor']['mean'] == 1.0
    assert row['wall_clock_ratio_same_kernel'] == 3.0
    assert row['wall_clock_ratio_eager'] == 6.0
    assert row['wall_clock']['prefill_extra_ms'] == 5.0
    assert row['wall_clock']['same_kernel_with_prefill']['mean'] == 2.0  # 30 ms over 10 + 5
    chain = report['drafts']['chain']['wall_clock']
    assert chain['same_kernel_with_prefill'] == chain['same_kernel']
    assert row['c'] == pytest.approx(1.0 / 4.0)  # a draft call of 1 ms, greedy steps of 4 ms
    assert row['theoretical_speedup'] == pytest.approx(3.0 / 1.25)
    assert row['iterations_histogram'] == [0, 0, 3]
    assert set(report['comparisons']) == {'flat - mirror', 'flat-aarl - flat'}
    assert report['comparisons']['flat - mirror']['mean'] == 1.0


def test_a_draft_is_compared_with_the_floor_of_its_own_block():
    profile = new_target(smoke=True)[0].cfg
    drafts = {'narrow': dflash_config(profile, block=4), 'wide': dflash_config(profile, block=6),
              'alone': dflash_config(profile, block=5)}
    clips = [taken('val', narrow=run([3, 3]), wide=run([6]), alone=run([6]),
                   **{'wide+tree8': run([6]), floor_name(6): run([4, 2])}) for _ in range(2)]
    trees = [Variant('wide', 'tree', nodes=8, block=6)]
    rows = length_report(clips, drafts, trees)['splits']['val']['drafts']
    assert list(rows) == [floor_name(4), floor_name(6), *drafts, 'wide+tree8']
    assert [rows[name]['block'] for name in rows] == [4, 6, 4, 6, 5, 6]
    assert rows['narrow']['above_floor']['mean'] == 1.0  # 3 over the floor's 2
    assert rows['wide']['above_floor']['mean'] == 3.0  # 6 over the floor's 3
    assert rows['wide+tree8']['above_floor']['mean'] == 3.0
    assert rows['alone']['above_floor'] is None
