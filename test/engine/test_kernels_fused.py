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
Launches that do the work of two, against the two they stand for.

Triton on a GPU, bit for bit; without one through Triton's interpreter, whose blocks run one
behind the other and whose sums round otherwise.
"""

from functools import partial
import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ['TRITON_INTERPRET'] = '1'
pytest.importorskip('triton', reason='Triton is not installed: requirements-cuda.txt')

from rspec_planner.engine.kernels import arrive, close, mix  # noqa: E402
from rspec_planner.engine.kernels import rows as row_kernels  # noqa: E402
from rspec_planner.engine.kernels.attention import Cut, CUTS, ROWS  # noqa: E402
from rspec_planner.engine.kernels.linear import Plan, product  # noqa: E402
from rspec_planner.engine.kernels.select import fuse, REFERENCE, triton_kernels  # noqa: E402
from rspec_planner.errors import ConfigurationError  # noqa: E402

PLAIN = triton_kernels()
DEVICE = 'cuda' if CUDA else 'cpu'
EPS, DIM, KV = 1e-6, 32, 2


def drawn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def whole(value):
    return torch.tensor([value], device=DEVICE)


def same(found, expected):
    if CUDA:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    """Every launch counts whole multiples of its blocks, and small chunks make several."""
    arrive._ARRIVALS.clear()
    monkeypatch.setitem(CUTS, 'causal', Cut(64, 32, ROWS, 4, 2))
    monkeypatch.setitem(CUTS, 'all', Cut(64, 32, 8, 4, 2))
    yield
    for (_, _, blocks, _), counts in arrive._ARRIVALS.items():
        assert bool((counts % blocks == 0).all())


def seen(kind, start, rows, capacity, dtype):
    """Return the arguments of an attention, and a copy of what it may write."""
    cache = tuple(drawn(KV, capacity, DIM, seed=s, dtype=dtype) for s in (1, 2))
    own = tuple(drawn(2, KV, rows, DIM, seed=s, dtype=dtype) for s in (3, 4))
    if kind == 'causal':
        return {'start': whole(start), 'cache': cache}
    if kind == 'flow':
        return {'start': whole(start), 'cache': cache, 'own': own, 'causal': False,
                'own_low': whole(0)}
    if kind == 'draft':
        return {'start': whole(start + rows), 'cache': cache, 'causal': False}
    own = tuple(drawn(1, KV, 8 + rows, DIM, seed=s, dtype=dtype) for s in (5, 6))
    return {'start': whole(0), 'own': own, 'causal': False, 'own_low': whole(1)}


def copied(view):
    return {name: tuple(x.clone() for x in value) if isinstance(value, tuple) else value
            for name, value in view.items()}


KINDS = pytest.mark.parametrize(('kind', 'rows', 'start'), [
    ('causal', 1, 0), ('causal', 20, 60), ('flow', 10, 70), ('window', 9, 0)])


@KINDS
def test_the_last_blocks_join_as_a_launch_of_its_own_does(kind, rows, start):
    samples = 2 if kind == 'flow' else 1
    dtype = torch.bfloat16 if CUDA else torch.float32
    view, heads = seen(kind, start, rows, 100, dtype), 4
    q = drawn(samples, rows, heads, DIM, dtype=dtype)
    for _ in range(2):  # counters of a second launch
        out = torch.full((samples * rows, heads * DIM), torch.nan, device=DEVICE, dtype=dtype)
        expected = torch.full_like(out, torch.nan)
        fuse(PLAIN, ['join']).attend(q, out, **view)
        PLAIN.attend(q, expected, **view)
        same(out, expected)
    assert all(bool((counts > 0).any()) for counts in arrive._ARRIVALS.values())


@pytest.mark.parametrize(('kind', 'rows', 'start', 'joined', 'parts'), [
    ('causal', 1, 64, True, 1), ('causal', 5, 62, False, 2), ('causal', 20, 60, True, 1),
    ('flow', 10, 70, True, 2), ('draft', 12, 56, False, 1), ('window', 9, 0, True, 1)])
def test_attention_turns_and_writes_its_own_rows(kind, rows, start, joined, parts):
    samples = 2 if kind == 'flow' else 1
    dtype, heads = torch.bfloat16 if CUDA else torch.float32, 4
    view = seen(kind, start, rows, 100, dtype)
    qkv = drawn(parts, samples, rows, heads + 2 * KV, DIM)
    norms = drawn(DIM, seed=1, dtype=dtype), drawn(DIM, seed=2, dtype=dtype)
    angles = drawn(200, DIM // 2, seed=3)
    tables, angle = (angles.cos(), angles.sin()), whole(start - 2)
    slot = whole({'flow': 0, 'window': 8}.get(kind, start))
    results = []
    for kernels in (fuse(PLAIN, ['turn', 'join'] if joined else ['turn']), PLAIN, REFERENCE):
        mine = copied(view)
        out = torch.full((samples * rows, heads * DIM), torch.nan, device=DEVICE, dtype=dtype)
        keys, values = mine['own'] if 'own' in mine else [x[None] for x in mine['cache']]
        if kernels.mix is not None:
            kernels.mix(qkv, norms, tables, slot, angle, out, EPS, **mine)
        else:
            q = torch.empty((samples, rows, heads, DIM), device=DEVICE, dtype=dtype)
            kernels.rotate(qkv, norms, tables, slot, angle, q, keys, values, EPS)
            kernels.attend(q, out, **mine)
        results.append((out, keys, values))
    for found, expected, reference in zip(*results):
        same(found, expected)
        torch.testing.assert_close(found, reference, **(
            {'rtol': 2e-2, 'atol': 2e-2} if CUDA else {'rtol': 1e-4, 'atol': 1e-5}))


@pytest.mark.parametrize(('split', 'rows', 'with_norm'), [
    (1, 1, True), (2, 7, True), (4, 16, False), (2, 64, True), (1, 16, False)])
def test_the_last_blocks_of_a_product_sum_and_norm(split, rows, with_norm):
    x, weight, norm = drawn(rows, 264), drawn(48, 264, seed=1), drawn(48, seed=2)
    held, plan = drawn(rows, 3, 48, seed=3), Plan(16, 64, split)
    results = []
    for closed in (True, False):
        parts = torch.full((8, rows, 48), torch.nan, device=DEVICE)
        totals, out = held.clone(), torch.full((rows, 48), torch.nan, device=DEVICE)
        total = totals[:, 1]  # in the place of its residual
        chosen = norm if with_norm else None
        if closed:
            close.close(x, weight, parts, total, total, chosen, out, EPS, plan=plan)
        else:
            count = product(x, weight, parts, plan=plan)
            row_kernels.gather(parts[:count], total, total, chosen, out, EPS, warps=4)
        assert torch.equal(totals[:, ::2], held[:, ::2])
        results.append((total, out if with_norm else total))
    for found, expected in zip(*results):
        same(found, expected)


@pytest.mark.skipif(CUDA, reason='a GPU divides joins and sums in every test of this file')
@pytest.mark.parametrize(('kind', 'rows'), [('causal', 5), ('flow', 10)])
def test_every_row_is_in_the_share_of_one_block(monkeypatch, kind, rows):
    """Blocks run one behind the other here, so the first run leaves the parts for the second."""
    samples = 2 if kind == 'flow' else 1
    view, heads = seen(kind, 60, rows, 100, torch.float32), 4
    q = drawn(samples, rows, heads, DIM)
    x, weight, norm, residual = drawn(rows, 96), drawn(64, 96), drawn(64), drawn(rows, 64)
    mixed, totals, normed, room = [], [], [], torch.zeros(8, rows, 64)
    for count in (1, 132, 132):
        if count > 1:
            for module in (arrive, close):
                monkeypatch.setattr(module, 'multiprocessors', lambda device: 132)
            for module in (mix, close):
                monkeypatch.setattr(module, 'wait', lambda *_: None)
        mixed.append(torch.full((samples * rows, heads * DIM), torch.nan))
        mix.attend(q, mixed[-1], **view)
        totals.append(torch.full_like(residual, torch.nan))
        normed.append(totals[-1].clone())
        close.close(x, weight, room, residual, totals[-1], norm, normed[-1], EPS,
                    plan=Plan(16, 32, 2))
    for made in (mixed, totals, normed):
        assert torch.equal(made[0], made[2])


def test_blocks_that_wait_leave_room_for_those_to_come():
    device = torch.device('meta')
    for groups, most in ((8, 8), (16, 8), (96, 8), (500, 8), (2, 3)):
        count = arrive.joiners(device, groups, most)
        assert count == 1 or groups * (count - 1) < 132
        assert count <= most and 64 % count == 0
    assert [arrive.joiners(device, groups, 8) for groups in (8, 16, 96, 500)] == [8, 8, 2, 1]
    assert arrive.joiners(torch.device('cpu'), 1, 8) == 1


def test_references_are_fused_by_calling_both():
    kernels = fuse(REFERENCE, ['join', 'turn', 'sums'])
    assert kernels.attend is REFERENCE.attend
    assert isinstance(kernels.mix, partial) and kernels.close is not None
    assert fuse(REFERENCE, []) is REFERENCE
    with pytest.raises(ConfigurationError, match="launch 'turns': use some of join, turn, sums"):
        fuse(REFERENCE, ['turns'])
