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
"""Weights of eight bits: exact in bf16, rounded once, and read as codes and scales by a graph."""

from export_rig import camera_target, errors_of, exported, source_of
from hypothesis import given, settings, strategies
import pytest
import torch

from rspec_planner.engine.stage_narrow import (
    is_narrow,
    LARGEST,
    narrow_inputs,
    narrowed,
    round_weights,
    rounded,
)
from rspec_planner.engine.tensorrt_build import build_engine
from rspec_planner.engine.tensorrt_library import load_library
from rspec_planner.errors import EngineError

NARROW = ('fp8', 'int8')
#: largest error of a rounded number: half a step of e4m3 relative to it, half an int8 code of
#: a row whose largest code may be as small as 64
ERRORS = {'fp8': 2.0 ** -4, 'int8': 0.5 / 63.5}


def weights(seed, spread):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn((5, 64), generator=generator) * spread).to(torch.bfloat16)


@pytest.mark.parametrize('precision', NARROW)
@settings(max_examples=60, deadline=None)
@given(seed=strategies.integers(0, 10**6), exponent=strategies.integers(-60, 60))
def test_a_rounded_weight_is_exact_in_bf16_and_rounding_twice_changes_nothing(
        precision, seed, exponent):
    weight = weights(seed, 2.0 ** exponent)
    codes, scale = narrowed(weight, precision)
    once = rounded(weight, precision)
    exact = codes.double() * scale.double()[:, None]
    assert torch.equal(once.double(), exact)
    assert torch.equal(rounded(once, precision), once)
    assert torch.equal(torch.frexp(scale.float()).mantissa, torch.full((5,), 0.5))
    assert float(codes.float().abs().max()) <= LARGEST[precision]


@pytest.mark.parametrize('precision', NARROW)
def test_the_error_of_rounding_is_half_a_step(precision):
    weight = weights(0, 0.02).double()
    found = rounded(weight.to(torch.bfloat16), precision).double()
    largest = weight.abs().amax(dim=1, keepdim=True)
    if precision == 'int8':
        bound = ERRORS[precision] * largest
    else:  # below its normal numbers e4m3 has steps of 2**-9 of its scale
        bound = ERRORS[precision] * weight.abs() + largest / 224 * 2.0 ** -10
    assert bool(((found - weight).abs() <= bound).all())
    assert not torch.equal(found, weight)


def test_powers_of_two_rows_of_zeros_and_the_largest_code():
    weight = torch.tensor([[448.0, -1.0], [0.0, 0.0], [896.0, 2.0], [449.0, 0.0]])
    codes, scale = narrowed(weight, 'fp8')
    assert scale.tolist() == [1.0, 1.0, 2.0, 2.0]
    assert codes.float().tolist() == [[448.0, -1.0], [0.0, 0.0], [448.0, 1.0], [224.0, 0.0]]
    assert narrowed(torch.tensor([[127.0, -63.0]]), 'int8')[0].tolist() == [[127, -63]]


def test_projections_are_narrow_and_nothing_else_is():
    target = camera_target(dtype=torch.bfloat16)
    names = [name for name, _ in target.named_parameters()]
    narrow = {name for name in names if is_narrow(name, 'fp8')}
    layers = 2 * target.cfg.text.num_layers  # of the decoder and of the expert
    assert len(narrow) == 7 * layers
    assert not any('vision' in name or 'norm' in name or 'embed' in name or 'lm_head' in name
                   for name in narrow)
    assert not any(is_narrow(name, 'bf16') for name in names)
    before = {name: weight.clone() for name, weight in target.named_parameters()}
    round_weights(target, 'fp8')
    changed = {name for name, weight in target.named_parameters()
               if not torch.equal(weight, before[name])}
    assert changed == narrow
    bound = narrow_inputs(target.state_dict(), 'fp8')
    assert set(bound) == set(before) | {f'{name}.scale' for name in narrow}
    assert narrow_inputs(before, 'bf16') == before


@pytest.fixture(scope='module', params=NARROW)
def small(request, tmp_path_factory):
    folder, precision = tmp_path_factory.mktemp(request.param), request.param
    source = source_of(camera_target(dtype=torch.bfloat16), 'dflash', block=4, window=2)
    round_weights(source.target, precision)
    round_weights(source.draft, precision)
    stages = exported(source, folder, precision, names=('vision', 'draft', 'verify'))
    return source, stages, folder


def test_a_graph_computes_what_pytorch_computes_with_rounded_weights(small):
    source, stages, folder = small
    errors = errors_of(source, stages, folder)
    for stage in stages.stages:
        assert 0.0 < errors[stage.name] < 0.1, errors
    ports = {port.name: port for port in stages.stage('verify').inputs}
    name = 'text.layers.0.self_attn.q_proj.weight'
    assert ports[f'{name}.scale'].shape == ports[name].shape[:1]
    assert ports[f'{name}.scale'].weight.part == 'scale'
    layers = source.target.cfg.text.num_layers
    assert stages.stage('verify').operators['DequantizeLinear'] == 7 * layers
    assert 'DequantizeLinear' not in stages.stage('vision').operators


def test_weights_that_were_not_rounded_are_another_network(small):
    source, stages, folder = small
    if stages.precision == 'int8':
        pytest.skip('int8 rounds these weights by less than bf16 rounds the activations')
    plain = source_of(camera_target(dtype=torch.bfloat16), 'dflash', block=4, window=2)
    errors, wider = (errors_of(one, stages, folder, range(2)) for one in (source, plain))
    assert wider['verify'] > 2.0 * errors['verify']
    assert wider['vision'] == errors['vision']  # holds no projection


def test_engines_are_built_for_the_gpus_that_serve_the_format(small):
    pytest.importorskip('tensorrt_rtx', reason='tensorrt_rtx is not installed '
                        '(pip install -r requirements-engine.txt)')
    _, stages, folder = small
    path, library = folder / stages.stage('verify').file, load_library('tensorrt_rtx')
    built = build_engine(library, path, ('89', '120'))
    found = {port.name: port.dtype for port in built.ports}
    assert found == {port.name: port.dtype for port in (*stages.stage('verify').inputs,
                                                        *stages.stage('verify').outputs)}
    if stages.precision == 'int8':
        assert len(build_engine(library, path, ('86',)).plan) > 0
    else:
        with pytest.raises(EngineError, match='builds no engine for compute capability 86'):
            build_engine(library, path, ('86',))
