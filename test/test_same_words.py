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
Drafts, a reused text and kept features change no word, whatever a tile's rounding is.

The kernels of `rounding` make on a CPU the differences that a GPU makes, large enough to be seen.
"""

from pathlib import Path
import sys

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from planned_drive import drive_frames
from rounding import ROUNDING

from rspec_planner.evaluate.bench import bench_frame
from rspec_planner.planner.checkpoints import open_checkpoint
from rspec_planner.planner.drafts import EMBEDDED
from rspec_planner.planner.pipeline import Planner

WAYS = ('streaming', 'stateless', 'autoregressive', 'cold')
FRAMES = 3


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    monkeypatch.setattr('rspec_planner.engine.cuda_loop.kernels_for', lambda device: ROUNDING)


@pytest.fixture(scope='module')
def frames():
    return drive_frames(FRAMES, seed=0)


def words(frames, **options):
    target, tokenizer = open_checkpoint(EMBEDDED / 'tiny', torch.device('cpu'))
    planner = Planner(target, tokenizer, loop='while', flow_steps=1, max_reasoning_tokens=12,
                      **options)
    return [planner.plan(frame).reasoning.token_ids for frame in frames]


@pytest.mark.parametrize('draft', ['none', 'default', 'dflash-l2-b16-wall-mirror'])
def test_every_way_says_what_one_token_a_forward_says(draft):
    report = bench_frame(frames=FRAMES - 1, warm_up=1, loop='while', draft=draft, tokens=12)
    assert {name: report[name]['token_mismatches'] for name in WAYS} == dict.fromkeys(WAYS, 0)
    assert report['token_mismatches'] == report['nondeterministic_frames'] == 0
    assert report['streaming']['iterations'] < report['autoregressive']['iterations']


def test_these_kernels_show_what_is_verified_inside_the_prefill(frames):
    plain = words(frames)
    assert words(frames, reuse=True) == plain
    assert words(frames, reuse=True, guess_in='prefill') != plain


def test_these_kernels_show_another_tile(frames):
    assert words(frames, widest=24) != words(frames)


@pytest.mark.parametrize('draft', [None, 'default'])
def test_no_row_waits_for_a_guess_outside_the_prefill(draft):
    rows = {options: Planner.load('tiny', loop='while', draft=draft, reuse=reuse,
                                  guess_in=place)._stages.frame.frame.prompt_rows
            for options in ((True, 'verify'), (False, 'verify'), (False, 'prefill'),
                            (True, 'prefill')) for reuse, place in (options,)}
    inside = rows.pop((True, 'prefill'))
    assert len(set(rows.values())) == 1 and inside > rows[True, 'verify']
