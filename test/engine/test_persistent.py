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
The persistent kernel's own source, run on the CPU block by block, against float64 arithmetic.

persistent_host.h stands for the GPU: fibers for threads, copies that land late, an order that is
drawn from a seed. Compiling for sm_90a needs NVRTC and no GPU.
"""

import ctypes
from dataclasses import dataclass
import functools
from pathlib import Path
import shutil
import subprocess
import tempfile

import pytest
import torch

from rspec_planner.engine.cuda_persistent import Context, PersistentLayers
from rspec_planner.engine.cuda_rows import half_tables, LayerWeights, Rows, RowShape
from rspec_planner.engine.kernels import persistent
from rspec_planner.engine.kernels.persistent import packed, PersistentPlan
from rspec_planner.engine.kernels.select import REFERENCE
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.config import alpamayo_r1

HERE = Path(__file__).resolve().parent
EPS, CAPACITY, CPU, D = 1e-6, 320, torch.device('cpu'), 128
FLOW = PersistentPlan.of(64, 256, 4, 2, 192, False, 8)
VERIFY = PersistentPlan.of(16, 128, 8, 2, 192, True, 9)


@functools.cache
def emulated(plan):
    """Return the kernel of a plan as a launch on the CPU, which takes a seed."""
    if shutil.which('g++') is None:
        pytest.skip('g++ is not installed: it compiles the kernel for the CPU')
    folder = Path(tempfile.mkdtemp(prefix='persistent-'))
    macros = [f'-D{name}={value}' for name, value in plan.macros().items()]
    kernel = Path(persistent.__file__).parent
    subprocess.run(['g++', '-O2', '-std=c++17', '-shared', '-fPIC', '-U_FORTIFY_SOURCE',
                    f'-I{kernel}', *macros, '-include', HERE / 'persistent_host.h', '-x', 'c++',
                    '/dev/null', '-o', folder / 'kernel.so'], check=True)
    library = ctypes.CDLL(str(folder / 'kernel.so'))
    shutil.rmtree(folder)

    def launch(args, seed=0):
        result = library.launch(ctypes.byref(args), seed)
        assert result == 0, {1: 'deadlock', 2: 'a copy that nobody waited for'}[result]
    return launch


def drawn(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)


def weights_of(plan, seed):
    """Return one layer's random weights."""
    heads = plan.heads + 2 * plan.kv_heads

    def matrix(columns, depth, index):
        return drawn(columns, depth, seed=10 * seed + index, scale=depth ** -0.5)

    norms = [1 + 0.2 * drawn(size, seed=10 * seed + 5 + index) for index, size in enumerate(
        (plan.hidden, plan.hidden, D, D))]
    return LayerWeights(norms[0], matrix(heads * D, plan.hidden, 0), (norms[2], norms[3]),
                        matrix(plan.hidden, plan.heads * D, 1), norms[1],
                        matrix(2 * plan.intermediate, plan.hidden, 2),
                        matrix(plan.hidden, plan.intermediate, 3))


def widened(weights):
    """Return the weights in float64."""
    def wide(value):
        return tuple(x.double() for x in value) if isinstance(value, tuple) else value.double()
    return LayerWeights(**{name: wide(getattr(weights, name)) for name in (
        'input_norm', 'qkv', 'norms', 'out', 'post_norm', 'gate_up', 'down')})


@dataclass
class Rig:
    """Layers, a cache with rows in front, and the same in float64."""

    plan: PersistentPlan
    layers: list
    caches: list
    own: tuple | None
    start: torch.Tensor
    angle: torch.Tensor
    tables: tuple

    @staticmethod
    def of(plan, context, count=2):
        caches = [(drawn(plan.kv_heads, CAPACITY, D, seed=50 + 2 * index),
                   drawn(plan.kv_heads, CAPACITY, D, seed=51 + 2 * index))
                  for index in range(count)]
        for keys, values in caches:  # what no row sees must not matter
            keys[:, context:], values[:, context:] = float('nan'), float('nan')
        own = None if plan.causal else tuple(
            torch.full((plan.kv_heads, plan.rows, D), float('nan'), dtype=torch.bfloat16)
            for _ in range(2))
        return Rig(plan, [weights_of(plan, seed) for seed in range(count)], caches, own,
                   torch.tensor([context]), torch.tensor([context - 7]),
                   half_tables(CAPACITY + 64, D, 1e4, CPU))

    def expected(self, x, taps):
        """Return what float64 makes of rows x; the cache stays as it was."""
        plan, rows = self.plan, len(x)
        shape = RowShape(1, rows, plan.heads, plan.kv_heads, D, plan.intermediate, plan.hidden,
                         EPS)
        run = Rows(shape, REFERENCE, tuple(table.double() for table in self.tables),
                   torch.float64)
        own = None if self.own is None else tuple(
            torch.zeros(1, *part.shape, dtype=torch.float64) for part in self.own)
        hidden, zero = x.double(), torch.tensor([0])
        for index, layer in enumerate(self.layers):
            cache = tuple(part.double().nan_to_num() for part in self.caches[index])
            held = tuple(part[None] for part in cache) if own is None else own
            view = {'start': self.start, 'cache': cache}
            if own is not None:
                view.update(own=own, causal=False, own_low=zero)
            run.layer(widened(layer), hidden, run.hidden, self.start if own is None else zero,
                      self.angle, held, view)
            hidden = run.hidden
            if index in taps:
                taps[index].copy_(hidden)
        return hidden

    def runner(self, rows, taps=None):
        context = Context(self.caches, self.tables, self.start, self.angle, self.own)
        launch = emulated(self.plan)
        made = PersistentLayers(self.plan, self.layers, context, rows, EPS,
                                lambda args: launch(args, SEED[0]), taps)
        made._held['seen'].fill_(float('nan'))
        made._held['parts'].fill_(float('nan'))
        return made


#: order of the fibers
SEED = [0]


def error(found, expected):
    found, expected = found.double(), expected.double()
    assert bool(found.isfinite().all())
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize('context', [96, 131])
def test_a_flow_step_equals_float64(context):
    rig, x = Rig.of(FLOW, context), drawn(64, FLOW.hidden, seed=9)
    run = rig.runner(64)
    run.hidden.copy_(x)
    run()
    assert error(run.hidden, rig.expected(x, {})) < 1e-2
    first = run.hidden.clone()
    SEED[0] += 1  # another order, the same bits; the counters are back at zero
    run.hidden.copy_(x)
    run()
    assert torch.equal(first, run.hidden)


@pytest.mark.parametrize(('context', 'rows'), [(60, 16), (128, 16), (57, 3)])
def test_a_verify_equals_float64_and_writes_keys_values_and_taps(context, rows):
    rig, x = Rig.of(VERIFY, context), drawn(rows, VERIFY.hidden, seed=9)
    wanted = {0: torch.zeros(rows, VERIFY.hidden, dtype=torch.float64)}
    expected = rig.expected(x, wanted)
    staged = torch.full((rows, 3, VERIFY.hidden), float('nan'), dtype=torch.bfloat16)
    run = rig.runner(rows, {0: staged[:, 1]})
    run.hidden[:rows] = x
    run()
    assert error(run.hidden[:rows], expected) < 1e-2
    assert error(staged[:, 1], wanted[0]) < 1e-2
    assert bool(staged[:, [0, 2]].isnan().all())
    for keys, values in rig.caches:
        assert bool(keys[:, :context + rows].isfinite().all())
        assert bool(values[:, :context + rows].isfinite().all())
        assert bool(keys[:, context + rows:].isnan().all())


def test_a_row_has_the_same_bits_alone_and_in_a_block():
    rows, context, hidden = 5, 61, VERIFY.hidden
    x = drawn(rows, hidden, seed=9)
    together = Rig.of(VERIFY, context).runner(rows)
    together.hidden[:rows] = x
    together()
    rig = Rig.of(VERIFY, context)
    one = rig.runner(1)
    for row in range(rows):
        rig.start.fill_(context + row)
        rig.angle.fill_(context - 7 + row)
        one.hidden[:1] = x[row]
        one()
        assert torch.equal(one.hidden[0], together.hidden[row])


def test_weights_lie_as_matrix_descriptors_read_them():
    weight = torch.arange(128 * 128).view(128, 128).float()
    tiles = packed(weight, 64)
    assert tiles.shape == (2, 2, 64, 64)
    for column, depth in ((0, 0), (3, 9), (70, 127), (127, 64)):
        row, piece = column % 64, depth % 64 // 8
        assert tiles[column // 64, depth // 64, row, (piece ^ row % 8) * 8 + depth % 8] == (
            weight[column, depth])
    gated = packed(weight, 64, gated=True)
    assert gated[0, 0, 0, 0] == weight[0, 0] and gated[0, 0, 8, 0] == weight[64, 0]
    assert gated[0, 0, 16, 0] == weight[8, 0] and gated[1, 0, 8, 0] == weight[96, 0]


def r1_plans():
    cfg = alpamayo_r1()
    text, expert = cfg.text, cfg.expert
    return {'flow': PersistentPlan.of(64, expert.hidden_size, expert.num_heads,
                                      text.num_kv_heads, expert.intermediate_size, False, 132),
            'verify': PersistentPlan.of(16, text.hidden_size, text.num_heads, text.num_kv_heads,
                                        text.intermediate_size, True, 132)}


def test_shapes_that_the_kernel_does_not_take_are_named():
    with pytest.raises(ConfigurationError, match='queries a KV head'):
        PersistentPlan.of(65, 2048, 16, 8, 8256, False, 132)
    with pytest.raises(ConfigurationError, match='has no cut'):
        PersistentPlan.of(16, 4096, 32, 8, 12_288, True, 64)


@pytest.mark.parametrize('name', ['flow', 'verify'])
@pytest.mark.parametrize('trace', [False, True])
def test_it_compiles_for_sm_90a_at_the_r1_shapes(name, trace):
    try:
        code, said = persistent.machine_code(r1_plans()[name], trace)
    except EngineError as failed:
        if 'is missing' not in str(failed):
            raise
        pytest.skip(f'NVRTC is not installed: {failed}')
    assert code.startswith(b'\x7fELF')
    assert 'serialized' not in said  # what ptxas calls matrix products that wait for each other
