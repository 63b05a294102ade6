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
import math

from model_reference import small_target
import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.model.action import ActionInProj, FourierEncoder
from rspec_planner.model.config import alpamayo_r1
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache


@pytest.fixture(scope='module', params=['separate', 'packed'])
def target(request) -> Target:
    built = small_target()
    return built.pack() if request.param == 'packed' else built


def context(target: Target, rows: int = 17, batch: int = 2) -> tuple[Tensor, Tensor]:
    cfg, generator = target.cfg.text, torch.Generator().manual_seed(4)
    shape = (cfg.num_layers, batch, cfg.num_kv_heads, rows, cfg.head_dim)
    return (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def tables(target: Target, offset: int) -> tuple[Tensor, Tensor]:
    cfg = target.cfg.text
    positions = offset + torch.arange(64)
    return mrope_cos_sin(positions.expand(3, -1), cfg.head_dim, cfg.rope_theta,
                         cfg.mrope_section)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_input(w: dict[str, Tensor], noisy: Tensor, t: Tensor) -> Tensor:
    """Write the input projection out as formulas, (B, 64, hidden)."""
    frequency = 10 ** (2 * torch.arange(10, dtype=torch.float64) / 9)

    def fourier(s: Tensor) -> Tensor:
        phase = 2 * math.pi * s[..., None] * frequency
        return math.sqrt(2) * torch.cat((phase.sin(), phase.cos()), -1)

    time = t.double()[:, None].expand(-1, noisy.shape[1])
    x = torch.cat([fourier(s) for s in (*noisy.double().unbind(-1), time)], -1)
    for index in (0, 3, 6):
        name = f'action_in_proj.encoder.trunk.{index}'
        x = x @ w[f'{name}.weight'].T + w[f'{name}.bias']
        if index < 6:
            x = rms(x * x.sigmoid(), w[f'action_in_proj.encoder.trunk.{index + 2}.weight'], 1e-5)
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return x * w['action_in_proj.norm.weight'] + w['action_in_proj.norm.bias']


def plain_expert(target: Target, noisy: Tensor, t: Tensor, keys: Tensor, values: Tensor,
                 offset: int) -> Tensor:
    """Write the expert out as formulas over its state dict, in fp64, one head at a time."""
    w = {k: v.double() for k, v in target.expert.state_dict().items()}
    text, heads = target.cfg.text, target.cfg.expert.num_heads
    dim, group = text.head_dim, heads // text.num_kv_heads
    x = plain_input(w, noisy, t)
    angle = (offset + torch.arange(64, dtype=torch.float64))[:, None] \
        * text.rope_theta ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim)

    def turn(y: Tensor) -> Tensor:
        a, b = y[..., :dim // 2], y[..., dim // 2:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()),
                         -1)

    for layer in range(text.num_layers):
        p = f'layers.{layer}.'
        normed = rms(x, w[p + 'input_layernorm.weight'])
        mixed = []
        for head in range(heads):
            kv = head // group
            rows, kv_rows = slice(head * dim, head * dim + dim), slice(kv * dim, kv * dim + dim)
            q = turn(rms(normed @ w[p + 'self_attn.q_proj.weight'][rows].T,
                         w[p + 'self_attn.q_norm.weight']))
            k = turn(rms(normed @ w[p + 'self_attn.k_proj.weight'][kv_rows].T,
                         w[p + 'self_attn.k_norm.weight']))
            v = normed @ w[p + 'self_attn.v_proj.weight'][kv_rows].T
            k = torch.cat((keys[layer, :, kv].double(), k), 1)
            v = torch.cat((values[layer, :, kv].double(), v), 1)
            mixed.append(((q @ k.mT) / math.sqrt(dim)).softmax(-1) @ v)
        x = x + torch.cat(mixed, -1) @ w[p + 'self_attn.o_proj.weight'].T
        normed = rms(x, w[p + 'post_attention_layernorm.weight'])
        gate = normed @ w[p + 'mlp.gate_proj.weight'].T
        x = x + (gate * gate.sigmoid() * (normed @ w[p + 'mlp.up_proj.weight'].T)) \
            @ w[p + 'mlp.down_proj.weight'].T
    return rms(x, w['norm.weight']) @ w['action_out_proj.weight'].T + w['action_out_proj.bias']


@torch.no_grad()
def test_velocity_equals_the_written_out_formula(target):
    keys, values = context(target)
    noisy, t = torch.randn(2, 64, 2), torch.tensor([0.1, 0.7])
    got = target.expert(noisy, t, keys, values, *tables(target, 23))
    want = plain_expert(target, noisy, t, keys, values, 23)
    assert got.shape == (2, 64, 2) and got.dtype == torch.float32
    assert float(want.std()) > 0.1
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_prepared_context_gives_the_same_velocity_step_after_step(target):
    keys, values = context(target)
    tab = tables(target, 23)
    prepared = target.expert.prepare(keys, values)
    for step in range(3):
        noisy, t = torch.randn(2, 64, 2), torch.full((2,), step / 10)
        torch.testing.assert_close(target.expert.velocity(noisy, t, prepared, *tab),
                                   target.expert(noisy, t, keys, values, *tab),
                                   rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize('poison', [1e4, -1e4])
def test_masked_context_rows_never_matter(target, poison):
    keys, values = context(target)
    visible = torch.arange(17) < torch.tensor([[12], [15]])
    dirty = [x.masked_fill(~visible[None, :, None, :, None], poison) for x in (keys, values)]
    noisy, t, tab = torch.randn(2, 64, 2), torch.tensor([0.2, 0.4]), tables(target, 5)
    masked = target.expert(noisy, t, *dirty, *tab, visible)
    for row, length in enumerate((12, 15)):
        one = slice(row, row + 1)
        want = target.expert(noisy[one], t[one], keys[:, one, :, :length],
                             values[:, one, :, :length], *tab)
        torch.testing.assert_close(masked[one], want, rtol=0, atol=1e-5)
    again = target.expert.velocity(noisy, t, target.expert.prepare(*dirty, visible), *tab)
    torch.testing.assert_close(again, masked, rtol=0, atol=1e-5)


@torch.no_grad()
def test_waypoints_see_each_other_in_both_directions(target):
    keys, values = context(target, batch=1)
    noisy, t, tab = torch.randn(1, 64, 2), torch.tensor([0.5]), tables(target, 9)
    base = target.expert(noisy, t, keys, values, *tab)
    late = noisy.clone()
    late[:, 63] += 1.0
    assert ((target.expert(late, t, keys, values, *tab) - base).abs().amax(-1) > 1e-7).all()


@torch.no_grad()
def test_each_layer_reads_the_cache_of_its_own_index(target):
    keys, values = context(target, batch=1)
    noisy, t, tab = torch.randn(1, 64, 2), torch.tensor([0.5]), tables(target, 9)
    base = target.expert(noisy, t, keys, values, *tab)
    swapped = target.expert(noisy, t, keys.flip(0), values.flip(0), *tab)
    assert float((base - swapped).abs().max()) > 1e-3


@torch.no_grad()
def test_samples_share_one_context(target):
    keys, values = context(target, batch=1)
    noisy, t, tab = torch.randn(3, 64, 2), torch.full((3,), 0.3), tables(target, 9)
    shared = [x.expand(-1, 3, -1, -1, -1) for x in (keys, values)]
    together = target.expert.velocity(noisy, t, target.expert.prepare(*shared), *tab)
    for row in range(3):
        alone = target.expert(noisy[row:row + 1], t[:1], keys, values, *tab)
        torch.testing.assert_close(together[row:row + 1], alone, rtol=0, atol=1e-5)


def test_training_reaches_every_weight_but_not_a_detached_context():
    target = small_target().train()
    keys, values = (x.requires_grad_() for x in context(target))
    cos, sin = tables(target, 3)
    out = target.expert(torch.randn(2, 64, 2), torch.rand(2), keys.detach(), values.detach(),
                        cos[None].expand(2, -1, -1), sin[None].expand(2, -1, -1))
    functional.mse_loss(out, torch.randn_like(out)).backward()
    assert keys.grad is None
    assert all(weight.grad is not None for weight in target.expert.parameters())


def test_fourier_features_have_unit_mean_square_and_log_spaced_frequencies():
    encode = FourierEncoder(20, 100.0)
    want = [1, 1.668, 2.783, 4.642, 7.743, 12.915, 21.544, 35.938, 59.948, 100]
    torch.testing.assert_close(encode.freqs, torch.tensor([want]), rtol=2e-4, atol=0)
    out = encode(torch.linspace(0, 1, 1001))
    assert out.shape == (1001, 20)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(1001))


def test_features_stay_precise_when_the_weights_are_half():
    project = ActionInProj(small_target().cfg.expert).to(torch.bfloat16)
    out = project(torch.randn(1, 64, 2), torch.tensor([0.93]))
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    exact = FourierEncoder(20, 100.0).freqs
    assert torch.equal(project.timestep_fourier_encoder.freqs, exact)
    assert torch.equal(project.sinus[1].freqs, exact)


def test_released_shapes_of_the_projection():
    with torch.device('meta'):
        project = ActionInProj(alpamayo_r1().expert)
    shapes = {name: tuple(w.shape) for name, w in project.named_parameters()}
    assert shapes['encoder.trunk.0.weight'] == (512, 60)
    assert shapes['encoder.trunk.2.weight'] == shapes['encoder.trunk.5.weight'] == (512,)
    assert shapes['encoder.trunk.6.weight'] == (2048, 512)
    assert sum(w.numel() for w in project.parameters()) == 1_349_632
    assert isinstance(project.norm, nn.LayerNorm)


@torch.no_grad()
def test_a_cache_with_spare_capacity_serves_as_context(target):
    cfg = target.cfg.text
    cache = KVCache(cfg, 1, 40)
    cos, sin = mrope_cos_sin(torch.arange(20).expand(3, -1), cfg.head_dim, cfg.rope_theta,
                             cfg.mrope_section)
    target.text(torch.randn(1, 20, cfg.hidden_size), cos, sin, cache)
    noisy, t, tab = torch.randn(1, 64, 2), torch.tensor([0.5]), tables(target, 20)
    cut = target.expert(noisy, t, cache.keys[:, :, :, :20], cache.values[:, :, :, :20], *tab)
    whole = target.expert(noisy, t, cache.keys, cache.values, *tab,
                          (torch.arange(40) < 20)[None])
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-5)
