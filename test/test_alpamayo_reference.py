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
Numbers that are published or were computed with the released code, at the profile's constants.

Vectors of the history, the speed estimate and the integration are in `test_history` and
`test_unicycle`; here are the rounding that upstream's bf16 modules imply, and what a vehicle does
at standstill.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from upstream_rig import make_upstream, save_folder, upstream_profile, written_config

from rspec_planner.model.action import ActionInProj, FourierEncoder
from rspec_planner.model.config import alpamayo_1_5, alpamayo_r1
from rspec_planner.model.flow import euler_sample
from rspec_planner.model.unicycle import UnicycleActionSpace
from rspec_planner.model.upstream_checkpoint import load_upstream

EXACT = [1, 1.668, 2.783, 4.642, 7.743, 12.915, 21.544, 35.938, 59.948, 100]
ROUNDED = [1, 1.671875, 2.78125, 4.65625, 7.75, 12.9375, 21.5, 36, 60, 100]


def test_frequencies_of_the_profile():
    expert = alpamayo_r1().expert
    encoder = FourierEncoder(expert.num_fourier_feats, expert.max_freq)
    torch.testing.assert_close(encoder.freqs[0], torch.tensor(EXACT), rtol=0, atol=5e-4)
    assert encoder.freqs[0].bfloat16().float().tolist() == ROUNDED


def test_rounded_frequencies_move_the_phase_by_eight_degrees():
    exact = FourierEncoder(20, 100.0)
    rounded = FourierEncoder(20, 100.0)
    rounded.freqs = exact.freqs.bfloat16().float()
    one = torch.ones(1)
    sines = [torch.asin(e(one)[0, :10].clamp(-1.414, 1.414) / math.sqrt(2)) for e in
             (exact, rounded)]
    shift = (rounded.freqs[0, 5] - exact.freqs[0, 5]) * 360
    assert 7.5 < float(shift) < 8.5
    assert float((sines[0] - sines[1])[5].abs()) > math.radians(7)


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """Return folders of R1, which stores the frequencies, and of 1.5, which does not."""
    made = {}
    for kind in ('alpamayo_r1', 'alpamayo1_5'):
        config = written_config(upstream_profile(), kind)
        theirs = make_upstream(upstream_profile(), config)
        state = theirs.state() | (theirs.buffers() if kind == 'alpamayo_r1' else {})
        made[kind] = save_folder(tmp_path_factory.mktemp(kind), state, config)
    return made


@pytest.mark.parametrize('kind', ['alpamayo_r1', 'alpamayo1_5'])
def test_a_released_folder_gets_the_frequencies_it_was_trained_with(folders, kind):
    target = load_upstream(folders[kind], dtype=torch.float32)
    for module in target.modules():
        if isinstance(module, FourierEncoder):
            assert module.freqs[0].tolist() == ROUNDED


def test_rounded_constants_only_on_request(folders):
    exact = load_upstream(folders['alpamayo_r1'], dtype=torch.float32).cfg.action_space
    assert exact == alpamayo_r1().action_space == alpamayo_1_5().action_space
    space = load_upstream(folders['alpamayo_r1'], dtype=torch.float32,
                          bf16_constants=True).cfg.action_space
    assert space.accel_mean == pytest.approx(0.0290527, abs=5e-8)
    assert space.accel_std == 0.6796875
    assert space.curvature_mean == pytest.approx(0.00026894, abs=5e-9)
    assert space.curvature_std == pytest.approx(0.0261230, abs=5e-8)
    assert space.n_waypoints == 64 and space.v_lambda == exact.v_lambda


@torch.no_grad()
def test_the_projection_in_bf16_is_near_upstreams_under_autocast():
    """Upstream keeps x and t in fp32 and casts inside; half-precision features would be lost."""
    torch.manual_seed(0)
    project = ActionInProj(alpamayo_r1().expert)
    noisy, t = torch.randn(2, 64, 2), torch.tensor([0.1, 1.0])
    exact = project(noisy, t)
    half = ActionInProj(alpamayo_r1().expert).to(torch.bfloat16)
    half.load_state_dict(project.state_dict())
    trunk, norm = half.encoder.trunk, half.norm
    features = [encode(noisy[..., i]) for i, encode in enumerate(half.sinus)]
    time = half.timestep_fourier_encoder(t)[:, None].expand(-1, 64, -1)
    with torch.autocast('cpu', torch.bfloat16):
        x = torch.cat((*features, time), -1)
        for layer in trunk:
            x = layer(x) if isinstance(layer, (nn.Linear, nn.SiLU)) else functional.rms_norm(
                x, layer.weight.shape, layer.weight, 1e-5)
        upstream = functional.layer_norm(x.float(), norm.weight.shape, norm.weight.float(),
                                         norm.bias.float(), 1e-5)
    ours = half(noisy, t).float()
    scale = float(exact.norm())
    assert float((ours - upstream).norm()) < 0.01 * scale
    assert float((upstream - exact).norm()) < 0.01 * scale
    coarse = half(noisy.bfloat16(), t)
    assert float((coarse.float() - exact).norm()) > 0.03 * scale  # the trap


def test_ten_steps_of_a_tenth_from_noise():
    """x <- x + 0.1 v(x, i / 10) with v = x + t, by hand, on the shape of one sample."""
    noise = torch.randn(1, 64, 2, generator=torch.Generator().manual_seed(0))
    want = noise.double()
    for step in range(10):
        want = want + 0.1 * (want + step / 10)
    got = euler_sample(lambda x, t: x + t[:, None, None], noise, alpamayo_r1().flow.num_steps)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


#: speed at t0 (m/s) and the last x (m) that a steady -1 sigma acceleration gives without a floor
REVERSING = [(0.0, -13.2827), (1.0, None), (0.05, None)]


@pytest.mark.parametrize('profile', [alpamayo_r1(), alpamayo_1_5()], ids=lambda p: p.name)
@pytest.mark.parametrize('speed, reversed_x', REVERSING)
def test_a_standing_vehicle_holds_its_pose(profile, speed, reversed_x):
    space = UnicycleActionSpace(profile.action_space)
    actions = torch.tensor([-1.0, 0.5]).expand(1, 64, 2)
    v0 = torch.tensor([speed])
    free_xy, _, free_speed = space.integrate(actions, v0)
    assert float(free_speed.min()) < -3.0
    if reversed_x is not None:
        assert float(free_xy[0, -1, 0]) == pytest.approx(reversed_x, abs=3e-4)
    xy, yaw, speeds = space.integrate(actions, v0, floor_at_zero=True)
    assert float(speeds.min()) == 0.0
    stop = int((speeds[0] == 0).nonzero()[0])
    assert stop * 0.1 <= speed / 0.65 + 0.1  # a = -0.652 m/s^2
    assert torch.equal(xy[0, stop:], xy[0, stop].expand(64 - stop, 2))
    assert torch.equal(yaw[0, stop:], yaw[0, stop].expand(64 - stop))
    assert float(torch.diff(xy[0, :, 0]).min()) >= 0.0
    # v^2 / (2 |a|) of a constant deceleration, to within one step
    assert abs(float(xy[0, -1, 0]) - speed ** 2 / (2 * 0.652)) <= 0.1 * speed + 1e-6
