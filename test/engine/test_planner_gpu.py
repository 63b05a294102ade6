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
The planner on a GPU against the planner on this machine's CPU, shipped weights, world frames.

No ROS, no jsonschema: what the loader reads is given as plain values.
"""

from functools import partial
from pathlib import Path
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from planned_drive import assert_same, drive_frames, plain_plans

from rspec_planner.loading import engine_values, load_planner, warm_up
from rspec_planner.planner.checkpoints import open_checkpoint, open_draft
from rspec_planner.planner.drafts import DEFAULT_DRAFT, EMBEDDED, embedded_drafts
from rspec_planner.planner.pipeline import Planner

pytestmark = pytest.mark.gpu
FRAMES = 12
#: metres over 6.4 s, fp32 on both sides, sums in another order
assert_same = partial(assert_same, tolerance=0.02)
SHIPPED = Path(__file__).parents[2] / 'config' / 'rspec_planner.param.yaml'


@pytest.fixture(scope='module', autouse=True)
def full_precision():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope='module')
def frames():
    return drive_frames(FRAMES)


@pytest.fixture(scope='module')
def expected(frames):
    return plain_plans(frames)


@pytest.mark.parametrize('loop', ['while', 'sync', 'pipelined', 'eager', 'host'])
def test_every_loop_plans_what_the_cpu_plans(frames, expected, loop):
    planner = Planner.load('tiny', device='cuda', dtype=torch.float32, num_samples=3,
                           draft='default', reuse=True, loop=loop)
    for frame, wanted in zip(frames, expected):
        plan = planner.plan(frame)
        assert_same(plan, wanted)
        if loop == 'while':
            assert planner.host_syncs == 1


@pytest.mark.parametrize('draft', [None, *embedded_drafts()])
def test_every_draft_runs_in_the_while_graph(frames, expected, draft):
    planner = Planner.load('tiny', device='cuda', dtype=torch.float32, num_samples=3,
                           draft=draft, loop='while')
    host = Planner.load('tiny', draft=draft)
    committed, wished = 0, 0
    for frame, wanted in zip(frames, expected):
        plan = planner.plan(frame)
        assert_same(plan, wanted)
        committed += plan.reasoning.stats.iterations
        wished += host.plan(frame).reasoning.stats.iterations
    assert abs(committed - wished) <= 2  # a draft's own near ties may fall otherwise


@pytest.mark.parametrize('guess_in', ['verify', 'prefill'])
@pytest.mark.parametrize('draft', ['dflash-l2-b16-w8-flat', 'dflash-l2-b16-wall-mirror',
                                   'eagle3-b16-w8-flat'])
def test_leftovers_and_repeats_change_no_bit(frames, draft, guess_in):
    planner = Planner.load('tiny', device='cuda', dtype=torch.bfloat16, draft=draft, reuse=True,
                           loop='while', guess_in=guess_in)
    made = []
    for turn in range(2):
        planner.reset()
        if turn:
            for tensor in planner._stages.frame.stale():
                tensor.fill_(float('nan'))
        made.append([planner.plan(frame) for frame in frames])
    for index, (first, again) in enumerate(zip(*made)):
        assert first.reasoning.token_ids == again.reasoning.token_ids, index
        assert np.array_equal(first.candidates, again.candidates), index
        assert np.isfinite(again.candidates).all()


@pytest.mark.parametrize('draft', [None, 'default'])
def test_frames_behind_the_second_allocate_nothing(frames, draft):
    planner = Planner.load('tiny', device='cuda', dtype=torch.bfloat16, draft=draft, reuse=True,
                           loop='while')
    for frame in frames[:2]:
        planner.plan(frame)
    before = torch.cuda.memory_stats()['allocation.all.allocated']
    for frame in frames[2:]:
        planner.plan(frame)
    assert torch.cuda.memory_stats()['allocation.all.allocated'] == before


@pytest.mark.parametrize('name', [None, DEFAULT_DRAFT, 'dflash-l2-b16-wall-mirror'])
def test_a_reused_text_changes_no_bit_in_bf16(frames, name):
    folder = EMBEDDED / 'tiny'
    target, tokenizer = open_checkpoint(folder, torch.device('cuda'), torch.bfloat16)
    draft = open_draft(name, folder, target)
    plain = Planner(target, tokenizer, loop='while', use_vision_cache=False,
                    widest=0 if draft is None else draft.cfg.block)
    streaming = Planner(target, tokenizer, loop='while', draft=draft, reuse=True)
    rounds = 0
    for index, frame in enumerate(frames):
        plan, wanted = streaming.plan(frame), plain.plan(frame)
        assert plan.reasoning.token_ids == wanted.reasoning.token_ids, index
        assert np.array_equal(plan.candidates, wanted.candidates), index
        rounds += wanted.reasoning.stats.iterations - plan.reasoning.stats.iterations
    assert rounds > 0


def shipped_parameters(**changes):
    """Return the shipped values as the loader reads them, without their checks."""
    values = yaml.safe_load(SHIPPED.read_text())['/**']['ros__parameters']
    groups = {name: SimpleNamespace(**group) for name, group in values.items()
              if isinstance(group, dict)}
    for name, value in changes.items():
        group, key = name.split('.')
        setattr(groups[group], key, value)
    return SimpleNamespace(**groups)


def test_the_shipped_parameters_plan_on_the_gpu(frames, expected):
    parameters = shipped_parameters(**{'model.device': 'cuda', 'planning.num_samples': 3,
                                       'planning.caution': False})
    planner = load_planner(parameters)
    assert planner.executors == {'backend': 'torch', 'loop': 'while'}
    assert 0.0 < warm_up(planner) < 1000.0
    facts = engine_values(planner, parameters, {})
    assert facts['gpu'] == torch.cuda.get_device_name() and facts['loop'] == 'while'
    said = [planner.plan(frame).reasoning.token_ids for frame in frames]
    assert said == [plan.reasoning.token_ids for plan in expected]
    assert planner.host_syncs == 1


def test_a_bag_is_planned_on_the_gpu_as_on_the_cpu(tmp_path):
    """`rspec plan BAG --device cuda`, where jsonschema and rosbags are installed."""
    for name in ('jsonschema', 'rosbags'):
        pytest.importorskip(name, reason=f'{name} is not installed, planning a bag needs it')
    from rspec_planner.offline import OfflineOptions, plan_bag
    from rspec_planner.world.drive import Drive
    from rspec_planner.world.record import record_world, RecordOptions
    bag = tmp_path / 'a.mcap'
    record_world(bag, Drive(['lead_brake'], 3), 3.0, RecordOptions())
    made = [plan_bag(bag, OfflineOptions(records=tmp_path / f'{device}.jsonl', device=device))
            for device in ('cpu', 'cuda')]
    assert made[0]['plans'] == made[1]['plans'] > 0
