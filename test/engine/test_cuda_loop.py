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
The device-resident frame against the host's loop, on random tiny models.

The same launches run here through the reference kernels, and on a GPU through the real ones.
"""

from dataclasses import replace
from pathlib import Path
import sys

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from draft_reference import randomise, small_draft, small_profile

from rspec_planner.decode.loop import close, decode
from rspec_planner.decode.reuse import place_guess, start_from_guess
from rspec_planner.decode.state import DecodeState
from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.draft_executor import draft_executor
from rspec_planner.engine.torch_executor import (
    flow_step_executor,
    prefill_executor,
    verify_executor,
)
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import CameraConfig
from rspec_planner.model.flow import euler_sample
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache

CAPACITY, BUDGET, IMAGE_TOKENS = 128, 18, 8
SMALL = small_profile()
# slow waves: random weights behind fast ones would blow up the last bits of every step
PROFILE = replace(SMALL, expert=replace(SMALL.expert, max_freq=2.0), cameras=CameraConfig(
    names=('front',), ids=(0,), frames=2, height=64, width=64, anchor='front'))


def target_of(seed):
    target = Target(PROFILE)
    randomise(target, seed)
    return target.eval().requires_grad_(False).pack()


class Prompted:
    """A random prompt with two images, their features, and room behind it."""

    def __init__(self, seed, length=40):
        generator = torch.Generator().manual_seed(seed)
        tokens = PROFILE.tokens
        self.ids = torch.randint(24, 40, (length,), generator=generator)
        self.ids[5:5 + IMAGE_TOKENS] = tokens.image_pad
        self.positions = torch.arange(length).expand(3, -1).clone()
        self.positions[1:, 5:9] += torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
        self.rope_delta = -3
        shape = (2, 4, PROFILE.text.hidden_size)
        self.features = torch.randn(shape, generator=generator)
        self.deepstack = torch.randn((1, *shape), generator=generator)
        self.noise = torch.randn((2, 64, 2), generator=generator)


def host_frame(target, prompted, draft, budget, guess=(), room=0, width=1):
    """Return what decode/loop.py makes of a frame."""
    cache = KVCache(PROFILE.text, 1, CAPACITY + 64)
    taps = TapBuffer(draft.cfg.taps, 1, cache.capacity, 32) if draft else None
    prefill = prefill_executor(target, cache, CAPACITY, taps, room,
                               draft.cfg.window if draft else 1)
    length = len(prompted.ids)
    prefill.inputs['ids'][:length] = prompted.ids
    prefill.inputs['positions'][:, :length] = prompted.positions
    prefill.inputs['features'].copy_(prompted.features)
    prefill.inputs['deepstack'].copy_(prompted.deepstack)
    guess = place_guess(prefill, length, prompted.rope_delta, guess)
    prefill.enqueue()
    state = DecodeState(CAPACITY)
    tokens, routine = PROFILE.tokens, None
    if draft:
        width = draft.cfg.block
        routine = draft_executor(draft, target, state.tokens, taps, prefill.inputs['positions'])
        routine.inputs['rope_delta'].fill_(prompted.rope_delta)
    verify = verify_executor(target, cache, width, taps)
    verify.inputs['rope_delta'].fill_(prompted.rope_delta)
    start_from_guess(prefill, state, prompted.ids, guess, tokens.stop_ids, budget)
    stats = decode(verify, state, tokens.stop_ids, budget, routine,
                   follow={tokens.cot_end: tokens.traj_future_start})
    generated = state.generated
    context, forwards = close(verify, state, tokens.traj_future_start)
    step = flow_step_executor(target, cache, 2)
    step.inputs['length'].fill_(context)
    step.inputs['rope_delta'].fill_(prompted.rope_delta)

    def velocity(noisy, t):
        step.inputs['noisy'].copy_(noisy)
        step.inputs['t'].copy_(t[:1])
        step.enqueue()
        return step.outputs['velocity']

    with torch.inference_mode():
        actions = euler_sample(velocity, prompted.noise, 4)
    return generated, stats, forwards, context, actions


def device_frame(target, draft, room=0, width=None, budget=BUDGET):
    return DeviceFrame(target, prompt_rows=64, budget=budget, draft=draft, guess_room=room,
                       samples=2, flow_steps=4, width=width)


def run(device, prompted, budget, guess=(), **options):
    device.begin(prompted.ids, prompted.positions, prompted.rope_delta, budget, guess, **options)
    device.prefill.features.copy_(prompted.features.flatten(0, 1))
    device.prefill.deepstack.copy_(prompted.deepstack.flatten(1, 2))
    device.frame.noise.copy_(prompted.noise)
    device.run()
    return device.frame.result()


def assert_same(result, expected):
    generated, stats, forwards, context, actions = expected
    assert result.generated == generated
    assert result.committed == stats.committed
    assert (result.reused, result.closing_forwards, result.context) == (
        stats.reused, forwards, context)
    torch.testing.assert_close(result.actions, actions, rtol=1e-3, atol=1e-4)


#: kind, window and rotary of the drafts that the loop runs
DRAFTS = [('dflash', 3, 'flat'), ('dflash', 1, 'mirror'), ('dflash', 34, 'mirror'),
          ('dflash', 0, 'flat'), ('dflash', 0, 'mirror'), ('eagle3', 3, 'flat'),
          ('eagle3', 1, 'flat'), ('eagle3', 0, 'flat'), ('eagle3', 0, 'mirror'),
          ('eagle3', 34, 'mirror')]


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('kind', [None, *DRAFTS])
def test_the_frame_equals_the_host_loop(seed, kind):
    target = target_of(seed)
    draft = None if kind is None else small_draft(
        target, kind[0], seed, block=5, window=kind[1], rotary=kind[2], reduced=seed % 2 == 1)
    device = device_frame(target, draft)
    for frame in range(2):  # the second frame finds the leftovers of the first
        prompted, budget = Prompted(10 * seed + frame, 40 - frame), BUDGET - 5 * frame
        assert_same(run(device, prompted, budget),
                    host_frame(target, prompted, draft, budget))


def test_texts_end_by_stop_and_by_budget():
    """The seeds above cover both ends, else the comparison would prove little."""
    ends = {run(device_frame(target_of(seed), None), Prompted(10 * seed), BUDGET).stopped
            for seed in range(8)}
    assert ends == {True, False}


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('drafted', [False, True])
def test_a_guess_is_verified_in_the_prefill(seed, drafted):
    target, prompted = target_of(seed), Prompted(seed)
    draft = small_draft(target, 'dflash', seed, block=4, window=3) if drafted else None
    device = device_frame(target, draft, room=12)
    said = run(device, prompted, BUDGET).generated
    for guess in (said[:12], (*said[:3], said[3] + 1), (), (1, 2)):
        expected = host_frame(target, prompted, draft, BUDGET, guess, room=12)
        result = run(device, prompted, BUDGET, guess)
        assert_same(result, expected)
        assert result.generated == said


@pytest.mark.parametrize('seed', range(3))
def test_a_wide_verify_without_a_draft_says_the_same(seed):
    target, prompted = target_of(seed), Prompted(seed)
    one, wide = (run(device_frame(target, None, width=width), prompted, BUDGET)
                 for width in (1, 6))
    assert wide.generated == one.generated
    assert set(wide.committed) == {1}


@pytest.mark.parametrize('kind', [None, *DRAFTS])
def test_leftovers_change_nothing(kind):
    target, prompted = target_of(2), Prompted(2)
    draft = None if kind is None else small_draft(target, kind[0], 2, block=5, window=kind[1],
                                                  rotary=kind[2])
    device = device_frame(target, draft)
    expected = run(device, prompted, BUDGET)
    for buffer in device.stale():
        buffer.fill_(1e4)
    poisoned = run(device, prompted, BUDGET)
    assert poisoned.generated == expected.generated
    assert poisoned.committed == expected.committed
    assert torch.equal(poisoned.actions, expected.actions)


@pytest.mark.parametrize('matches', [0, 2, 4])
def test_a_replay_commits_as_many_as_it_is_told(matches):
    target, prompted = target_of(1), Prompted(1)
    plain = run(device_frame(target, None), prompted, BUDGET)
    draft = small_draft(target, 'dflash', 1, block=5, window=3)
    device = device_frame(target, draft)
    script = torch.tensor(plain.generated)
    device.replay(script, torch.tensor([matches]))
    device._wrong = next(i for i in range(40) if i not in plain.generated)
    result = run(device, prompted, len(script), end_id=plain.generated[-1])
    assert result.generated == plain.generated
    assert set(result.committed[:-1]) <= {matches + 1}


def test_what_does_not_fit_is_refused():
    target, prompted = target_of(0), Prompted(0)
    device = device_frame(target, None, room=30)
    with pytest.raises(ConfigurationError, match='40 tokens with 0 guessed'):
        run(device, prompted, BUDGET)
    device = device_frame(target, small_draft(target, 'dflash', block=4, window=50))
    with pytest.raises(ConfigurationError, match='window of 50'):
        run(device, prompted, BUDGET)
    with pytest.raises(ConfigurationError, match='without a correction'):
        device_frame(target, small_draft(target, 'dflash', window=0, correction_rank=2))
    for options in ({}, {'width': 4, 'guess_room': 2}):
        with pytest.raises(ConfigurationError, match='only in blocks.*a width above 1'):
            DeviceFrame(target, prompt_rows=64, budget=4, narrow_guess=True, **options)


def test_images_elsewhere_are_refused():
    device, prompted = device_frame(target_of(0), None), Prompted(0)
    run(device, prompted, 3)
    prompted.ids = prompted.ids.roll(1)
    with pytest.raises(ConfigurationError, match='layout of images'):
        run(device, prompted, 3)


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('kind', [('dflash', 3, 'flat'), ('dflash', 0, 'mirror'),
                                  ('eagle3', 0, 'flat'), None])
def test_a_guess_is_verified_by_narrow_forwards(seed, kind):
    target, prompted = target_of(seed), Prompted(seed)
    draft = None if kind is None else small_draft(target, kind[0], seed, block=6, window=kind[1],
                                                  rotary=kind[2])
    device = DeviceFrame(target, prompt_rows=64, budget=BUDGET, draft=draft, samples=2,
                         flow_steps=4, narrow_guess=True, width=6)
    plain = host_frame(target, prompted, draft, BUDGET)
    if draft is None:  # the last two rows ride in one block
        plain = (*plain[:2], min(plain[2], 1), *plain[3:])
    assert_same(run(device, prompted, BUDGET), plain)
    said = plain[0]
    for guess in (said, (*said[:9], said[9] + 1, *said[10:]), (said[0] + 1, *said[1:]),
                  (*said, 1, 2)):
        result = run(device, prompted, BUDGET, guess)
        assert result.generated == said and result.reused == 0
        torch.testing.assert_close(result.actions, plain[4], rtol=1e-3, atol=1e-4)
        right = next((i for i, (a, b) in enumerate(zip(guess, said)) if a != b), len(said))
        # whole blocks while the guess holds, bonus token included
        full = max(right - 1, 0) // 6
        assert result.committed[:full] == (6,) * full
    assert_same(run(device, prompted, BUDGET), plain)  # the guess is forgotten
