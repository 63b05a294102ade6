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
The kernels of the device-resident frame against plain float64 arithmetic.

The references run everywhere. The Triton kernels run on a GPU, and without one through
Triton's interpreter, which has no bfloat16 products: fp32 and fp16 there, bf16 on a GPU.
"""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ['TRITON_INTERPRET'] = '1'
pytest.importorskip('triton', reason='Triton is not installed: requirements-cuda.txt')

from rspec_planner.engine.kernels.linear import linear as triton_linear  # noqa: E402
from rspec_planner.engine.kernels.linear import Plan  # noqa: E402
from rspec_planner.engine.kernels.select import REFERENCE, triton_kernels  # noqa: E402

TRITON = triton_kernels()
DEVICE = 'cuda' if CUDA else 'cpu'
HALF = torch.bfloat16 if CUDA else torch.float16
KERNELS = pytest.mark.parametrize('kernels', [REFERENCE, TRITON], ids=['reference', 'triton'])
DTYPES = pytest.mark.parametrize('dtype', [torch.float32, HALF], ids=['fp32', 'half'])


def drawn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def whole(*values):
    return torch.tensor(values, device=DEVICE)


def error(found, expected):
    """Return the relative error; poisoned or missing elements make it large."""
    found, expected = found.double().cpu(), expected.double().cpu()
    assert bool(found.isfinite().all())
    return float((found - expected).norm() / expected.norm())


def bound(dtype):
    return 1e-5 if dtype == torch.float32 else 1e-2


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, float('nan'), dtype=dtype, device=DEVICE)


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@KERNELS
@DTYPES
@pytest.mark.parametrize(('rows', 'columns', 'depth', 'option'), [
    (1, 64, 128, ''), (16, 96, 256, 'norm'), (24, 80, 200, 'residual'), (5, 48, 96, 'gated'),
    (16, 64, 128, 'norm residual'), (64, 32, 264, 'norm gated'),
    (130, 16, 64, 'norm gated'), (130, 16, 64, 'residual')])
def test_linear(kernels, dtype, rows, columns, depth, option):
    gated, eps = 'gated' in option, 1e-6
    x = drawn(rows, depth, dtype=dtype)
    weight = drawn(columns * (1 + gated), depth, dtype=dtype, seed=1) * depth ** -0.5
    norm = drawn(depth, dtype=dtype, seed=2) if 'norm' in option else None
    residual = drawn(rows, columns, dtype=dtype, seed=3) if 'residual' in option else None
    out = poisoned(rows, columns, dtype=dtype)
    kernels.linear(x, weight, out, norm=norm, eps=eps, residual=residual, gated=gated)
    wide = x.double() if norm is None else rms(x.double(), norm.double(), eps)
    expected = wide @ weight.double().t()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = gate * torch.sigmoid(gate) * up
    if residual is not None:
        expected = expected + residual.double()
    assert error(out, expected) < bound(dtype)


@pytest.mark.parametrize('split', [1, 2, 3, 8])
def test_parts_of_a_split_product_add_up(split):
    x, weight = drawn(16, 520), drawn(40, 520, seed=1)
    norm, residual = drawn(520, seed=2), drawn(16, 40, seed=3)
    expected = rms(x.double(), norm.double(), 1e-6) @ weight.double().t() + residual.double()
    for _ in range(2):  # the counters are back at zero
        out = poisoned(16, 40)
        triton_linear(x, weight, out, norm=norm, eps=1e-6, residual=residual,
                      plan=Plan(16, 64, split))
        assert error(out, expected) < 1e-5


@KERNELS
def test_rows_may_be_strided_and_weights_scaled(kernels):
    wide, x = drawn(4, 3, 32), drawn(4, 32)
    weight, scale = drawn(48, 32, seed=1), drawn(48, seed=2).abs()
    wide[:, 1] = x
    out = poisoned(4, 3, 48)
    kernels.linear(wide[:, 1], weight, out[:, 2], scale=scale, residual=wide[:, 0, :1].expand(
        -1, 48).contiguous())
    expected = (x.double() @ weight.double().t()) * scale.double() + wide[:, 0, :1].double()
    assert error(out[:, 2], expected) < 1e-5
    assert bool(out[:, :2].isnan().all())


@KERNELS
@DTYPES
@pytest.mark.parametrize('rows', [1, 7, 24])
def test_a_row_does_not_depend_on_its_neighbours(kernels, dtype, rows):
    """A token decodes to the same bits alone and inside a block."""
    if kernels is REFERENCE:
        pytest.skip('library products of other shapes may round differently')
    x, weight, norm = drawn(24, 256, dtype=dtype), drawn(96, 256, dtype=dtype), drawn(256)
    outs = [poisoned(n, 96, dtype=dtype) for n in (24, rows)]
    for out in outs:
        kernels.linear(x[:len(out)], weight, out, norm=norm, eps=1e-6, width=24)
    assert torch.equal(outs[0][:rows], outs[1])


def test_a_plan_too_large_for_the_gpu_is_cut_until_it_fits():
    from rspec_planner.engine.kernels.linear import fitted, shared_bytes
    small, large = Plan(32, 128, 2, 6), Plan(64, 64, 1, 4)
    assert fitted(small, 16, False, 2, 232_448) == small
    assert shared_bytes(large, 512, False) == 294_912  # refused by an H200
    assert fitted(large, 512, False, 2, 232_448) == Plan(64, 64, 1, 3)
    assert fitted(large, 512, False, 2, 101_376) == Plan(64, 32, 1, 2)


def turned(x, cos, sin):
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


@KERNELS
@DTYPES
@pytest.mark.parametrize(('heads', 'kv', 'samples'), [(8, 2, 1), (6, 2, 2), (3, 3, 1), (0, 2, 1)])
def test_rotate(kernels, dtype, heads, kv, samples):
    rows, dim, slot, angle = 5, 16, 3, -2
    qkv = drawn(samples, rows, heads + 2 * kv, dim, dtype=dtype)
    norms = drawn(dim, dtype=dtype, seed=1), drawn(dim, dtype=dtype, seed=2)
    angles = drawn(20, dim // 2, seed=3)
    tables = angles.cos(), angles.sin()
    keys, values = (poisoned(samples, kv, 12, dim, dtype=dtype) for _ in range(2))
    q = poisoned(samples, rows, heads, dim, dtype=dtype) if heads else None
    kernels.rotate(qkv, norms, tables, whole(slot), whole(angle), q, keys, values, 1e-6)
    at = (torch.arange(rows, device=DEVICE) + angle).clamp(min=0)
    cos, sin = (table.double()[at][:, None] for table in tables)
    if q is not None:
        made = turned(rms(qkv[:, :, :heads].double(), norms[0].double(), 1e-6), cos, sin)
        assert error(q, made) < bound(dtype)
    made = turned(rms(qkv[:, :, heads:heads + kv].double(), norms[1].double(), 1e-6), cos, sin)
    assert error(keys[:, :, slot:slot + rows].transpose(1, 2), made) < bound(dtype)
    assert torch.equal(values[:, :, slot:slot + rows].transpose(1, 2), qkv[:, :, heads + kv:])
    for buffer in (keys, values):
        assert bool(buffer[:, :, :slot].isnan().all())
        assert bool(buffer[:, :, slot + rows:].isnan().all())


def attended(q, k, v, seen):
    """q (W, H, d), k and v (kv, n, d), seen (W, n)."""
    group = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum('whd,hnd->whn', q.double(), k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen[:, None], float('-inf'))
    return torch.einsum('whn,hnd->whd', scores.softmax(-1), v).flatten(1)


@KERNELS
@DTYPES
@pytest.mark.parametrize(('rows', 'start', 'heads'), [
    (1, 0, 4), (1, 127, 4), (16, 100, 4), (5, 128, 6), (24, 120, 4), (64, 30, 2)])
def test_causal_attention_reads_its_length_from_the_device(kernels, dtype, rows, start, heads):
    kv, dim, capacity = 2, 32, 160
    q = drawn(1, rows, heads, dim, dtype=dtype)
    k, v = drawn(kv, capacity, dim, dtype=dtype, seed=1), drawn(kv, capacity, dim, dtype=dtype)
    k[:, start + rows:] = v[:, start + rows:] = 1e4  # stale rows are never seen
    out = poisoned(rows, heads * dim, dtype=dtype)
    kernels.attend(q, out, start=whole(start), cache=(k, v))
    index = torch.arange(capacity, device=DEVICE)
    seen = index <= start + torch.arange(rows, device=DEVICE)[:, None]
    assert error(out, attended(q[0], k, v, seen)) < bound(dtype)


@DTYPES
@pytest.mark.parametrize('start', [60, 64, 120, 128, 250])
def test_a_query_alone_equals_the_same_query_in_a_block(dtype, start):
    kv, dim, rows = 2, 32, 24
    q, k, v = (drawn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate((
        (1, rows, 8, dim), (kv, 300, dim), (kv, 300, dim))))
    block = poisoned(rows, 8 * dim, dtype=dtype)
    TRITON.attend(q, block, start=whole(start), cache=(k, v))
    # the interpreter's library products round by a row's place in the tile
    for row in range(rows) if CUDA else (0, 16):
        alone = poisoned(1, 8 * dim, dtype=dtype)
        TRITON.attend(q[:, row:row + 1].contiguous(), alone, start=whole(start + row),
                      cache=(k, v))
        assert torch.equal(alone[0], block[row])


@KERNELS
@DTYPES
@pytest.mark.parametrize(('start', 'own_low'), [(0, None), (130, 3), (200, 0)])
def test_samples_share_a_context_and_see_their_own_rows(kernels, dtype, start, own_low):
    samples, rows, heads, kv, dim, owned = 2, 6, 4, 2, 32, 10
    q = drawn(samples, rows, heads, dim, dtype=dtype)
    k, v = drawn(kv, 210, dim, dtype=dtype, seed=1), drawn(kv, 210, dim, dtype=dtype, seed=2)
    own = tuple(drawn(samples, kv, owned, dim, dtype=dtype, seed=s) for s in (3, 4))
    out = poisoned(samples * rows, heads * dim, dtype=dtype)
    low = whole(0 if own_low is None else own_low)
    kernels.attend(q, out, start=whole(start), cache=(k, v), own=own, causal=False, own_low=low)
    index = torch.arange(210 + owned, device=DEVICE)
    seen = (index < start) | (index >= 210 + low)
    for sample in range(samples):
        both = (torch.cat((k, own[0][sample]), 1), torch.cat((v, own[1][sample]), 1))
        expected = attended(q[sample], *both, seen.expand(rows, -1))
        assert error(out.view(samples, rows, -1)[sample], expected) < bound(dtype)


@KERNELS
def test_own_rows_alone(kernels):
    q, own = drawn(1, 5, 4, 16), (drawn(1, 2, 9, 16), drawn(1, 2, 9, 16, seed=1))
    out = poisoned(5, 64)
    kernels.attend(q, out, start=whole(0), own=own, causal=False, own_low=whole(2))
    seen = (torch.arange(9, device=DEVICE) >= 2).expand(5, -1)
    assert error(out, attended(q[0], own[0][0], own[1][0], seen)) < 1e-5


@KERNELS
@DTYPES
def test_norm_and_gate(kernels, dtype):
    x, weight, joined = drawn(5, 96, dtype=dtype), drawn(96, dtype=dtype), drawn(5, 120,
                                                                                 dtype=dtype)
    out, gated = poisoned(5, 96, dtype=dtype), poisoned(5, 60, dtype=dtype)
    kernels.norm(x, weight, out, 1e-6)
    kernels.gate(joined, gated)
    gate, up = joined.double().chunk(2, -1)
    assert error(out, rms(x.double(), weight.double(), 1e-6)) < bound(dtype)
    assert error(gated, gate * torch.sigmoid(gate) * up) < bound(dtype)


@KERNELS
@pytest.mark.parametrize('forbidden', [(0, 0), (20, 90), (150, 230), (0, 64)])
@pytest.mark.parametrize('rows', [1, 3])
def test_choose_never_takes_a_forbidden_id(kernels, forbidden, rows):
    x, weight, norm = drawn(rows, 48), drawn(230, 48, seed=1), drawn(48, seed=2)
    best = torch.full((rows,), -1, device=DEVICE)
    kernels.choose(x, weight, best, norm=norm, eps=1e-6, forbidden=forbidden)
    logits = rms(x.double(), norm.double(), 1e-6) @ weight.double().t()
    logits[:, forbidden[0]:forbidden[1]] = -torch.inf
    assert torch.equal(best, logits.argmax(-1))


@KERNELS
def test_choose_takes_the_smaller_of_equal_rows_and_maps_ids(kernels):
    x, weight = drawn(2, 16).abs(), drawn(200, 16, seed=1)
    weight[77] = weight[150] = 9.0
    best, ids = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.arange(
        200, device=DEVICE) * 3
    kernels.choose(x, weight, best, norm=torch.ones(16, device=DEVICE), eps=1e-6, ids=ids)
    assert best.tolist() == [231, 231]


def test_plans_are_few_fit_and_survive_a_file(tmp_path):
    from rspec_planner.engine import cuda_tune
    from rspec_planner.engine.kernels.linear import default_plan, PLANS, SHARED, shared_bytes
    from rspec_planner.errors import EngineError
    product = cuda_tune.Product('down', [torch.empty((4096, 12288), device='meta')], 16)
    plans = cuda_tune.candidates(product, 100)
    assert plans[0] == default_plan(*product.key)
    assert all(shared_bytes(plan, 16, False) <= SHARED for plan in plans)
    assert len(set(plans)) == len(plans)
    assert all(plan.split <= 8 and 4096 % plan.bn == 0 for plan in plans)
    assert cuda_tune.candidates(product, 3) == plans[:3]
    path, before = tmp_path / 'plans.json', dict(PLANS)
    try:
        PLANS[product.key] = plans[-1]
        cuda_tune.save_plans(path)
        PLANS.clear()
        cuda_tune.load_plans(path)
        assert PLANS == {**before, product.key: plans[-1]}
        path.write_text('[{"key": 3}]')
        with pytest.raises(EngineError, match='not a file of plans'):
            cuda_tune.load_plans(path)
    finally:
        PLANS.clear()
        PLANS.update(before)
