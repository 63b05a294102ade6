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
"""How the launches of a frame are run: by a graph's own loop, by the host, or one by one."""

from pathlib import Path
import sys

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from draft_reference import small_draft
from test_cuda_loop import BUDGET, PROFILE, Prompted, run, target_of

from rspec_planner.engine.cuda_graph import FrameRunner
from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_random import random_chain, random_draft, random_target
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.errors import ConfigurationError, EngineError


def begun(device, prompted):
    device.begin(prompted.ids, prompted.positions, prompted.rope_delta, BUDGET)
    device.prefill.features.copy_(prompted.features.flatten(0, 1))
    device.prefill.deepstack.copy_(prompted.deepstack.flatten(1, 2))
    device.frame.noise.copy_(prompted.noise)


def framed(target, draft=None, **options):
    return DeviceFrame(target, prompt_rows=64, budget=BUDGET, draft=draft, samples=2,
                       flow_steps=2, **options)


def test_an_eager_runner_runs_its_parts():
    prompted, device = Prompted(3), framed(target_of(3))
    expected = run(device, prompted, BUDGET)
    calls = []
    runner = FrameRunner(device, 'eager', encode=lambda: calls.append(1))
    begun(device, prompted)
    runner.run()
    whole = device.frame.result()
    assert (whole.generated, calls) == (expected.generated, [1])
    begun(device, prompted)
    assert runner.prefill() > 0
    saved = device.frame.numbers.clone()
    for _ in range(2):  # a prefilled frame can be decoded again and again
        device.frame.numbers.copy_(saved)
        assert runner.decode() > 0
        assert device.frame.result().generated == expected.generated


def test_a_twin_without_a_draft_shares_the_buffers():
    target, prompted = target_of(4), Prompted(4)
    device = framed(target, small_draft(target, 'dflash', 4, block=5, window=3))
    expected = run(device, prompted, BUDGET)
    twin = device.plain(target)
    begun(device, prompted)
    twin.run()
    assert twin.frame is device.frame
    assert twin.frame.result().generated == expected.generated
    assert set(twin.frame.result().committed) == {1}
    assert run(device, prompted, BUDGET).committed == expected.committed


def test_an_unknown_loop_is_refused():
    with pytest.raises(ConfigurationError, match="loop 'fast': use one of while, sync"):
        FrameRunner(framed(target_of(0)), 'fast')


def test_the_while_loop_names_what_it_needs(monkeypatch):
    from rspec_planner.engine import cuda_while
    monkeypatch.setitem(sys.modules, 'cuda.bindings', None)
    with pytest.raises(EngineError, match='requirements-cuda.txt'):
        cuda_while.condition_kernel((9, 0))


def test_a_random_target_and_its_draft_are_drawn_in_their_dtype():
    target = random_target(PROFILE, torch.device('cpu'), torch.bfloat16)
    draft = random_draft(target, block=4, window=3, vocabulary=16)
    assert {w.dtype for w in target.parameters()} == {torch.bfloat16}
    assert {w.dtype for w in draft.parameters()} == {torch.bfloat16}
    encoders = target.expert.action_in_proj
    assert encoders.timestep_fourier_encoder.freqs.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    result = run(framed(target, draft), Prompted(1), BUDGET)
    assert len(result.generated) == BUDGET or result.stopped


@pytest.mark.gpu
@pytest.mark.parametrize(('kind', 'pdl'), [
    ('none', False), ('none', True), ('dflash', False), ('dflash', True), ('whole', False),
    ('mirror', False), ('eagle3', False), ('eagle3 whole', False)])
@pytest.mark.parametrize('mode', ['while', 'sync', 'pipelined'])
def test_graphs_say_what_single_launches_say(mode, kind, pdl):
    target = random_target(PROFILE, torch.device('cuda'), torch.bfloat16)
    shape = {'block': 6, 'window': 3 if kind in ('dflash', 'eagle3') else 0, 'vocabulary': 16}
    draft = None
    if kind.startswith('eagle3'):
        draft = random_chain(target, **shape)
    elif kind != 'none':
        rotary = 'mirror' if kind == 'mirror' else 'flat'
        draft = random_draft(target, rotary=rotary, **shape)
    device = framed(target, draft)
    begun(device, Prompted(0))
    device.run()
    torch.cuda.synchronize()
    begun(device, Prompted(0))
    runner = FrameRunner(device, mode, pdl=pdl)
    for seed in range(5):
        begun(device, Prompted(seed))
        device.run()
        torch.cuda.synchronize()
        expected = device.frame.result()
        begun(device, Prompted(seed))
        before = torch.cuda.memory_stats()['allocation.all.allocated']
        runner.run()
        assert torch.cuda.memory_stats()['allocation.all.allocated'] == before
        result = device.frame.result()
        assert result.generated == expected.generated
        assert result.committed == expected.committed
        assert torch.equal(result.actions, expected.actions)
        if mode == 'while':
            assert runner.host_syncs == 1
    assert int(device.frame.numbers[Slot.ACTIVE]) == 0
