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
The fp8 kernels against plain float64 arithmetic, and the products over fp8 weights.

As in `test_kernels`: references everywhere, Triton on a GPU or through its interpreter. The
interpreter's conversion to e4m3 loses the carry of a mantissa that rounds up to the next power
of two, so PyTorch converts here.
"""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ['TRITON_INTERPRET'] = '1'
pytest.importorskip('triton', reason='Triton is not installed: requirements-cuda.txt')

import numpy as np  # noqa: E402
from triton.language import float8e4nv, float16, float32  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from rspec_planner.engine.cuda_fp8 import (  # noqa: E402
    Fp8Linear,
    REFERENCE8,
    ROWS,
    triton_fp8_kernels,
    WideProducts,
)
from rspec_planner.engine.cuda_rows import quantise  # noqa: E402
from rspec_planner.engine.kernels.fp8_linear import plan8, product8  # noqa: E402
from rspec_planner.engine.kernels.linear import Plan  # noqa: E402
from rspec_planner.engine.kernels.select import REFERENCE, triton_kernels  # noqa: E402
from rspec_planner.errors import ConfigurationError  # noqa: E402

E4M3 = torch.float8_e4m3fn
DEVICE = 'cuda' if CUDA else 'cpu'
HALF = torch.bfloat16 if CUDA else torch.float16
TRITON8 = triton_fp8_kernels()
PARTS = pytest.mark.parametrize('parts', [REFERENCE8, TRITON8], ids=['reference', 'triton'])
DTYPES = pytest.mark.parametrize('dtype', [torch.float32, HALF], ids=['fp32', 'half'])
_TYPES = {float8e4nv: torch.float8_e4m3fn, float16: torch.float16, float32: torch.float32}
_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
_CONVERT = interpreter._convert_float


def convert(data, given, wanted, rounding):
    if float8e4nv not in (given, wanted):
        return _CONVERT(data, given, wanted, rounding)
    made = torch.from_numpy(np.ascontiguousarray(data)).view(_TYPES[given]).to(_TYPES[wanted])
    return made.view(_BITS[wanted.primitive_bitwidth]).numpy()


@pytest.fixture(autouse=True)
def exact_conversion(monkeypatch):
    monkeypatch.setattr(interpreter, '_convert_float', convert)


def drawn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def small(*shape, seed=0):
    return drawn(*shape, seed=seed).to(E4M3)


def factors(count, seed=0):
    return drawn(count, seed=seed).abs() + 0.1


def error(found, expected):
    found, expected = found.double().cpu(), expected.double().cpu()
    assert bool(found.isfinite().all())
    return float((found - expected).norm() / expected.norm())


def empty(rows, columns):
    """Return an e4m3 buffer and its factors, poisoned."""
    return (torch.full((rows, columns), float('nan'), device=DEVICE).to(E4M3),
            torch.full((rows,), float('nan'), device=DEVICE))


def assert_quantised(out, scale, expected, dtype):
    """
    Every element lies within half a step of e4m3 of what it stands for.

    Steps are a sixteenth of a number at most, and 2^-10 of the row's factor near zero.
    """
    peak = expected.abs().amax(-1)
    assert error(scale, peak / 448) < (1e-5 if dtype == torch.float32 else 5e-3)
    given = out.double() * scale.double()[:, None]
    slack = 1e-5 if dtype == torch.float32 else 8e-3
    bound = expected.abs() / 16 + scale.double()[:, None] * 2.0 ** -10 + slack * peak[:, None]
    assert bool(((given - expected).abs() <= bound).all())
    assert out.float().abs().amax(-1).tolist() == [448.0] * len(out)


@PARTS
@DTYPES
@pytest.mark.parametrize('columns', [96, 128])
def test_norm8_norms_and_quantises(parts, dtype, columns):
    x, weight = drawn(5, columns, dtype=dtype), drawn(columns, dtype=dtype, seed=1)
    out, scale = empty(5, columns)
    parts.norm8(x, out, scale, weight=weight, eps=1e-6)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_quantised(out, scale, expected, dtype)
    parts.norm8(x, out, scale)
    assert_quantised(out, scale, x.double(), dtype)


@PARTS
@DTYPES
def test_norm8_adds_and_keeps_the_sum(parts, dtype):
    x, delta = drawn(3, 72, dtype=dtype), drawn(3, 72, dtype=dtype, seed=1)
    weight, bias, shift = (drawn(72, dtype=dtype, seed=seed) for seed in (2, 3, 4))
    total = x.double() + delta.double() + shift.double()
    out, scale = empty(3, 72)
    parts.norm8(x, out, scale, weight=weight, eps=1e-6, bias=bias, delta=delta, shift=shift)
    assert error(x, total) < (1e-6 if dtype == torch.float32 else 5e-3)
    middle = x.double() - x.double().mean(-1, keepdim=True)
    expected = middle / (middle.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_quantised(out, scale, expected * weight.double() + bias.double(), dtype)


@PARTS
@DTYPES
def test_gate8_and_gelu8(parts, dtype):
    joined, out, scale = drawn(4, 120, dtype=dtype), *empty(4, 60)
    parts.gate8(joined, out, scale)
    gate, up = joined.double().chunk(2, -1)
    assert_quantised(out, scale, gate * torch.sigmoid(gate) * up, dtype)
    x, shift, out, scale = drawn(4, 60, dtype=dtype), drawn(60, dtype=dtype), *empty(4, 60)
    parts.gelu8(x, shift, out, scale)
    wide = x.double() + shift.double()
    assert_quantised(out, scale, torch.nn.functional.gelu(wide, approximate='tanh'), dtype)


@PARTS
def test_a_row_of_zeros_stays_zero(parts):
    out, scale = empty(2, 64)
    parts.norm8(torch.zeros((2, 64), device=DEVICE), out, scale,
                weight=torch.ones(64, device=DEVICE), eps=1e-6)
    assert bool((out.float() == 0).all()) and bool(scale.isfinite().all())


@PARTS
@DTYPES
def test_turn_adds_the_bias_and_turns_queries_and_keys(parts, dtype):
    heads, half, patches = 3, 9, 4
    qkv, shift = drawn(8, 3 * heads * 2 * half, dtype=dtype), drawn(3 * heads * 2 * half,
                                                                   dtype=dtype)
    angles = drawn(patches, half).repeat(1, 2)
    given = (qkv.double() + shift.double()).view(2, patches, 3, heads, 2 * half)
    cos, sin = angles.double().cos()[:, None, None, :half], angles.double().sin()[
        :, None, None, :half]
    low, high = given[:, :, :2].chunk(2, -1)
    expected = given.clone()
    expected[:, :, :2] = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    parts.turn(qkv, shift, (angles.cos(), angles.sin()), heads)
    assert error(qkv, expected.flatten(2).flatten(0, 1)) < (
        1e-5 if dtype == torch.float32 else 1e-2)


@PARTS
def test_rescale(parts):
    product, rows, columns = drawn(3, 50), factors(3), factors(50)
    expected = product.double() * rows.double()[:, None] * columns.double()
    parts.rescale(product, rows, columns)
    assert error(product, expected) < 1e-6


@PARTS
@pytest.mark.parametrize(('rows', 'columns', 'depth', 'option'), [
    (1, 64, 128, ''), (16, 96, 256, 'residual'), (5, 48, 96, 'gated'), (33, 80, 272, ''),
    (64, 64, 192, 'gated residual')])
def test_product8(parts, rows, columns, depth, option):
    gated = 'gated' in option
    x, weight = small(rows, depth), small(columns * (1 + gated), depth, seed=1)
    of_rows, of_columns = factors(rows), factors(len(weight), seed=1) * depth ** -0.5
    residual = drawn(rows, columns, seed=3) if 'residual' in option else None
    out = torch.full((rows, columns), float('nan'), device=DEVICE)
    parts.product8(x, of_rows, weight, of_columns, out, residual=residual, gated=gated)
    expected = x.double() @ weight.double().t() * of_rows.double()[:, None] * of_columns.double()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = gate * torch.sigmoid(gate) * up
    if residual is not None:
        expected = expected + residual.double()
    assert error(out, expected) < (1e-3 if CUDA else 1e-6)


@pytest.mark.parametrize('split', [1, 2, 3])
def test_parts_of_a_split_product_add_up(split):
    x, weight = small(16, 528), small(64, 528, seed=1)
    of_rows, of_columns = factors(16), factors(64, seed=1)
    expected = x.double() @ weight.double().t() * of_rows.double()[:, None] * of_columns.double()
    for _ in range(2):  # the counters are back at zero
        out = torch.full((16, 64), float('nan'), device=DEVICE)
        product8(x, of_rows, weight, of_columns, out, plan=Plan(64, 64, split))
        assert error(out, expected) < (1e-3 if CUDA else 1e-6)


@PARTS
@DTYPES
@pytest.mark.parametrize('rows', [1, 7])
@pytest.mark.parametrize('option', ['norm', 'residual', 'norm gated'])
def test_a_row_does_not_depend_on_its_neighbours(parts, dtype, rows, option):
    """A token decodes to the same bits alone and inside a block."""
    linear = linear_of(parts, dtype)
    gated = 'gated' in option
    x, norm = drawn(16, 256, dtype=dtype), drawn(256, dtype=dtype)
    weight, scale = quantise(drawn(64 * (1 + gated), 256))
    residual = drawn(16, 64, dtype=dtype) if 'residual' in option else None
    outs = [torch.full((n, 64), float('nan'), dtype=dtype, device=DEVICE) for n in (16, rows)]
    for out in outs:
        linear(x[:len(out)], weight, out, norm=norm if 'norm' in option else None, eps=1e-6,
               residual=None if residual is None else residual[:len(out)], gated=gated,
               scale=scale, width=16)
    assert torch.equal(outs[0][:rows], outs[1])


def linear_of(parts, dtype, rows='e4m3'):
    plain = REFERENCE if parts is REFERENCE8 else triton_kernels()
    return Fp8Linear(plain, parts, WideProducts(parts, torch.device(DEVICE), dtype),
                     (rows, rows))


@PARTS
@DTYPES
@pytest.mark.parametrize('rows', ROWS)
@pytest.mark.parametrize('count', [3, 130])
@pytest.mark.parametrize('option', ['norm gated', 'residual'])
def test_linear_over_fp8_weights_is_near_that_over_the_weights(parts, dtype, rows, count, option):
    gated = 'gated' in option
    x, weight = drawn(count, 128, dtype=dtype), drawn(32 * (1 + gated), 128, seed=1) / 12
    norm = drawn(128, dtype=dtype, seed=2) if 'norm' in option else None
    residual = drawn(count, 32, dtype=dtype, seed=3) if 'residual' in option else None
    out, expected = (torch.full((count, 32), float('nan'), dtype=dtype, device=DEVICE)
                     for _ in range(2))
    matrix, scale = quantise(weight)
    options = {'norm': norm, 'eps': 1e-6, 'residual': residual, 'gated': gated}
    linear_of(parts, dtype, rows)(x, matrix, out, scale=scale, **options)
    REFERENCE.linear(x, weight, expected, **options)
    apart = error(out, expected)
    assert 1e-3 < apart < 0.08  # three bits of mantissa: two digits, and not more than that


def test_few_and_many_rows_are_quantised_apart():
    wide = WideProducts(REFERENCE8, torch.device(DEVICE), torch.float32)
    matrix, scale = quantise(drawn(32, 64))
    norm, back = torch.ones(64, device=DEVICE), matrix.float() * scale[:, None]
    for rows, few, many in ((('plain', 'e4m3'), True, False), (('e4m3', 'plain'), False, True),
                            (('normed', 'plain'), False, True)):
        linear = Fp8Linear(REFERENCE, REFERENCE8, wide, rows)
        for count, kept in ((3, few), (40, many)):
            x, out = drawn(count, 64), torch.empty((count, 32), device=DEVICE)
            linear(x, matrix, out, norm=norm, eps=1e-6, scale=scale)
            expected = rms(x.double(), norm.double(), 1e-6) @ back.double().t()
            assert (error(out, expected) < 1e-5) == kept
    x, out = drawn(3, 64), torch.empty((3, 32), device=DEVICE)
    Fp8Linear(REFERENCE, REFERENCE8, wide, ('normed', 'plain'))(x, matrix, out, scale=scale)
    assert error(out, x.double() @ back.double().t()) < 1e-5


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_a_weight_in_bf16_goes_past_the_quantiser():
    x, weight, out = drawn(3, 64), drawn(32, 64), drawn(3, 32)
    linear_of(REFERENCE8, torch.float32)(x, weight, out, width=16)
    assert error(out, x.double() @ weight.double().t()) < 1e-6


def test_what_a_cpu_cannot_scale_is_dequantised_and_says_so():
    wide = WideProducts(REFERENCE8, torch.device('cpu'), torch.float32)
    assert wide.report()['wide_products'] == 'dequantised'
    assert 'cpu in float32' in wide.report()['refused']['row-wise']
    with pytest.raises(ConfigurationError, match="'half'.*row-wise, tensor-wise, dequantised"):
        WideProducts(REFERENCE8, torch.device('cpu'), torch.float32, 'half')
    with pytest.raises(ConfigurationError, match="fp8 rows 'int8': use one of e4m3, normed"):
        linear_of(REFERENCE8, torch.float32, 'int8')


@pytest.mark.parametrize('mode', ['row-wise', 'tensor-wise', 'dequantised'])
def test_every_wide_product_says_the_same(mode):
    """PyTorch's scaled product also runs on CPUs, in bf16."""
    x, weight, of_rows, of_columns = small(48, 64), small(32, 64), factors(48), factors(32)
    parts = TRITON8 if CUDA else REFERENCE8
    wide = WideProducts(parts, torch.device(DEVICE), torch.bfloat16, mode)
    expected = x.double() @ weight.double().t() * of_rows.double()[:, None] * of_columns.double()
    assert error(wide(x, of_rows, weight, of_columns), expected) < 0.01
    assert not wide.odd
    odd = wide(small(5, 24), factors(5), small(9, 24), factors(9))
    assert odd.shape == (5, 9)
    assert (wide.odd == {(9, 24)}) == (mode != 'dequantised')


def test_a_product_that_fails_is_refused_with_its_reason(monkeypatch):
    """The next one is tried, and the report names both."""
    def broken(self, mode, *operands):
        if mode == 'row-wise':
            raise RuntimeError('not on this GPU\nand more')
        return 1.5 * plain(self, mode, *operands)
    plain = WideProducts._product
    monkeypatch.setattr(WideProducts, '_product', broken)
    wide = WideProducts(REFERENCE8, torch.device('cpu'), torch.float32, 'dequantised')
    wide._dtype = torch.bfloat16
    assert wide._try('row-wise', torch.device(DEVICE)) == 'not on this GPU'
    assert wide._try('tensor-wise', torch.device(DEVICE)).startswith('relative error 0.5')
    monkeypatch.setattr(WideProducts, '_product', plain)
    assert wide._try('row-wise', torch.device(DEVICE)) == ''


def test_default_plans_give_the_left_operand_its_rows():
    for key in ((6144, 4096, 16, False), (4096, 12288, 16, False), (12288, 4096, 16, True),
                (2048, 8256, 64, False)):
        plan = plan8(*key)
        assert plan.bn == 64
        assert key[1] % plan.bk == 0
        assert -(-key[0] // plan.bn) * plan.split >= 132 or key[3] or plan.split == 4
