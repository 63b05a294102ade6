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
import torch

from rspec_planner.model.flow import (
    euler_sample,
    flow_matching_loss,
    interpolate,
    sample_time,
)


def test_a_constant_field_is_integrated_exactly():
    noise = torch.randn(3, 64, 2)
    data = torch.randn(3, 64, 2)
    for steps in (1, 5, 10):
        got = euler_sample(lambda x, t: data - noise, noise, steps)
        torch.testing.assert_close(got, data)


def test_steps_are_equal_and_times_start_at_noise():
    seen = []

    def field(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        return torch.zeros_like(x)

    euler_sample(field, torch.zeros(2, 64, 2), 10)
    torch.testing.assert_close(torch.stack(seen), (torch.arange(10) / 10)[:, None].expand(-1, 2))


def test_the_field_of_a_single_target_ends_on_it():
    """For one data point the marginal velocity is (data - x) / (1 - t); Euler ends on it."""
    data = torch.randn(2, 64, 2)
    got = euler_sample(lambda x, t: (data - x) / (1 - t[:, None, None]),
                       torch.randn(2, 64, 2), 10)
    torch.testing.assert_close(got, data, rtol=0, atol=1e-5)


def test_a_linear_field_follows_the_closed_form_of_euler():
    x = torch.ones(1, 1, 1)
    got = euler_sample(lambda x, t: -x, x, 10)
    torch.testing.assert_close(got, torch.full((1, 1, 1), 0.9 ** 10))


def test_the_gaussian_field_moves_noise_to_the_data_distribution():
    """Data N(m, s^2): the exact marginal velocity carries N(0, 1) to N(m, s^2)."""
    mean, std = 1.5, 0.3

    def field(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        t = t[:, None]
        var = (t * std) ** 2 + (1 - t) ** 2
        return mean + (t * std ** 2 - (1 - t)) / var * (x - t * mean)

    generator = torch.Generator().manual_seed(1)
    got = euler_sample(field, torch.randn(20_000, 1, generator=generator), 200)
    assert abs(float(got.mean()) - mean) < 0.01
    assert abs(float(got.std()) - std) < 0.01


def test_training_times_follow_their_beta_law():
    generator = torch.Generator().manual_seed(0)
    t = sample_time(200_000, generator)
    assert 0 <= float(t.min()) and float(t.max()) <= 0.999
    beta = 1 - t / 0.999
    assert abs(float(beta.mean()) - 0.6) < 3e-3  # Beta(1.5, 1): mean 3/5, variance 12/175
    assert abs(float(beta.var()) - 12 / 175) < 1e-3
    again = sample_time(200_000, torch.Generator().manual_seed(0))
    assert torch.equal(t, again)


def test_the_loss_is_zero_at_the_true_velocity_and_counts_errors():
    data, noise = torch.randn(4, 64, 2), torch.randn(4, 64, 2)
    t = sample_time(4)
    assert float(flow_matching_loss(lambda x, s: data - noise, data, noise, t)) == 0.0
    off = flow_matching_loss(lambda x, s: data - noise + 2.0, data, noise, t)
    torch.testing.assert_close(off, torch.tensor(4.0))
    half = torch.tensor([1.0, 0.0])
    weighted = flow_matching_loss(lambda x, s: data - noise + 2.0, data, noise, t, half)
    torch.testing.assert_close(weighted, torch.tensor(2.0))


def test_the_path_runs_from_noise_to_data():
    data, noise = torch.randn(2, 64, 2), torch.randn(2, 64, 2)
    torch.testing.assert_close(interpolate(data, noise, torch.zeros(2)), noise)
    torch.testing.assert_close(interpolate(data, noise, torch.ones(2)), data)
    mixed = interpolate(data, noise, torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(mixed, torch.stack((noise[0], data[1])))
