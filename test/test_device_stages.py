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
The planner on the device-resident frame says and drives what the host's loop does.

Here the launches run one by one through the reference kernels; `test_planner_gpu.py`
compares the same planner on a GPU.
"""

from functools import partial
from pathlib import Path
import sys

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from planned_drive import assert_same, drive_frames, plain_plans

from rspec_planner.engine.cuda_graph import MODES
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.planner.drafts import DEFAULT_DRAFT, embedded_drafts
from rspec_planner.planner.pipeline import Planner

FRAMES = 4
#: products of other widths round differently, fp32
assert_same = partial(assert_same, tolerance=2e-3)


@pytest.fixture(scope='module')
def frames():
    return drive_frames(FRAMES)


@pytest.fixture(scope='module')
def expected(frames):
    return plain_plans(frames)


@pytest.mark.parametrize('loop', MODES)
def test_every_loop_plans_what_greedy_decoding_plans(frames, expected, loop):
    planner = Planner.load('tiny', num_samples=3, draft='default', reuse=True, loop=loop)
    told = dict(planner.executors)
    assert told.pop('caution').startswith('none: ')  # the shipped checkpoint has thresholds
    assert told == {'backend': 'torch', 'loop': loop}
    for index, (frame, wanted) in enumerate(zip(frames, expected)):
        plan = planner.plan(frame)
        assert_same(plan, wanted)
        stats = plan.reasoning.stats
        assert sum(stats.committed) == len(plan.reasoning.token_ids) - 1
        assert stats.reused == 0 and stats.block == 24
        times = plan.times
        assert min(times.encode_ms, times.prefill_ms, times.decode_ms, times.action_ms) > 0
        rounds = stats.iterations + stats.closing_forwards
        syncs = {'while': 1, 'sync': rounds + 2, 'eager': rounds + 2, 'pipelined': rounds + 2}
        assert planner._stages.host_syncs == syncs[loop], index


@pytest.mark.parametrize('draft', [None, *embedded_drafts()])
def test_every_draft_gives_the_same_plan_and_the_proposals_of_the_host_loop(frames, expected,
                                                                            draft):
    host = Planner.load('tiny', num_samples=3, draft=draft)
    device = Planner.load('tiny', num_samples=3, draft=draft, loop='sync')
    for frame, wanted in zip(frames[:2], expected):
        plan = device.plan(frame)
        assert_same(plan, wanted)
        stats = host.plan(frame).reasoning.stats
        assert plan.reasoning.stats.committed == stats.committed
        assert plan.reasoning.stats.closing_forwards == stats.closing_forwards


def test_a_text_is_verified_where_the_caller_wants_it(frames, expected):
    inside = Planner.load('tiny', num_samples=3, draft=DEFAULT_DRAFT, reuse=True, loop='sync',
                          guess_in='prefill')
    host = Planner.load('tiny', num_samples=3, draft=DEFAULT_DRAFT, reuse=True)
    narrow = Planner.load('tiny', num_samples=3, draft=DEFAULT_DRAFT, reuse=True, loop='sync')
    for index, (frame, wanted) in enumerate(zip(frames, expected)):
        plan, guessed = inside.plan(frame), narrow.plan(frame)
        assert_same(plan, wanted)
        assert_same(guessed, wanted)
        stats = host.plan(frame).reasoning.stats
        assert plan.reasoning.stats.reused == stats.reused
        assert guessed.reasoning.stats.reused == 0
        if index and wanted.reasoning.token_ids == expected[index - 1].reasoning.token_ids:
            needed = -(-(len(wanted.reasoning.token_ids) - 1) // 24)
            assert guessed.reasoning.stats.iterations == needed


def test_a_new_drive_starts_without_the_old_one(frames, expected):
    planner = Planner.load('tiny', num_samples=3, draft='default', reuse=True, loop='sync')
    first = planner.plan(frames[0])
    planner.plan(frames[-1])
    planner.reset()
    again = planner.plan(frames[0])
    assert np.array_equal(first.candidates, again.candidates)
    assert first.reasoning.token_ids == again.reasoning.token_ids


def test_features_of_forgotten_frames_are_used_again(frames):
    planner = Planner.load('tiny', loop='sync')
    planner.plan(frames[0])
    kept = {entry.features.data_ptr() for _, entry in planner._cache._entries.values()}
    planner.reset()
    planner.plan(frames[1])
    assert {entry.features.data_ptr() for _, entry in planner._cache._entries.values()} == kept


def test_what_makes_no_sense_is_refused(frames):
    with pytest.raises(ConfigurationError, match="loop 'fast': use one of while.*or host"):
        Planner.load('tiny', loop='fast')
    with pytest.raises(ConfigurationError, match="guess_in 'draft': use one of prefill, verify"):
        Planner.load('tiny', loop='sync', guess_in='draft')
    planner = Planner.load('tiny', loop='sync')
    planner._flow_steps += 1
    with pytest.raises(EngineError, match='flow steps'):
        planner.plan(frames[0])
