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
"""How many processors a live planner takes, and what it says about itself."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.loading import (
    chosen_loop,
    engine_values,
    load_planner,
    manifest_sha256,
    memory_values,
    processor_threads,
    warm_up,
    warm_up_observation,
)
from rspec_planner.parameters import (
    load_yaml_parameters,
    NodeParameters,
    PARAMETER_FILE,
    raise_problems,
    value_problems,
)
from rspec_planner.transport import config_path


@pytest.mark.parametrize(('wanted', 'processors', 'threads'), [
    (0, 2, 1), (0, 1, 1), (0, 8, 7), (4, 8, 4), (16, 8, 8)])
def test_a_live_planner_leaves_a_processor_to_the_others(wanted, processors, threads):
    assert processor_threads(wanted, processors) == threads


def test_the_shipped_parameters_load_the_shipped_weights_warm():
    values = load_yaml_parameters(config_path('rspec_planner.param.yaml'))
    parameters = NodeParameters.from_values(values)
    planner = load_planner(parameters)
    assert planner.profile.name == 'tiny'
    assert warm_up(planner) > 0.0
    assert len(manifest_sha256('tiny')) == 64
    assert json.dumps(planner.profile.to_dict())
    facts = engine_values(planner, parameters, {'warm_up_ms': 1.0})
    assert (facts['profile'], facts['precision'], facts['gpu']) == ('tiny', 'float32', 'none')
    assert facts['manifest_sha256'] == manifest_sha256('tiny') and facts['warm_up_ms'] == 1.0


def test_memory_is_that_of_this_process_now():
    before = memory_values('cpu')['memory_mib']
    held = bytearray(b'x' * 200 * 2**20)
    after = memory_values('cpu')
    assert 150 < after['memory_mib'] - before < 260 and len(held)
    assert after['gpu_memory_mib'] == after['peak_gpu_memory_mib'] == 0.0


@pytest.mark.parametrize(('changes', 'says'), [
    ({'engine.backend': 'tensorrt_rtx', 'model.device': 'cuda'}, "'engine.folder' is empty"),
    ({'engine.backend': 'tensorrt', 'engine.folder': 'engines/x'}, "'model.device' is cpu"),
    ({'engine.backend': 'tensorflow'}, 'engine.backend'),
    ({'engine.backend': 'tensorrt', 'engine.folder': 'x', 'engine.loop': 'while',
      'model.device': 'cuda'}, "'engine.loop' is while"),
    ({'engine.loop': 'fast'}, 'engine.loop'),
])
def test_engine_parameters_that_cannot_work_are_refused(changes, says):
    with pytest.raises(ConfigurationError, match=says):
        engine_parameters(**changes)


@pytest.mark.parametrize(('changes', 'loop'), [
    ({}, 'host'), ({'model.device': 'cuda', 'planning.caution': False}, 'while'),
    ({'model.device': 'cuda:1', 'planning.caution': False}, 'while'),
    ({'engine.loop': 'sync'}, 'sync'), ({'model.device': 'cuda', 'engine.loop': 'host'}, 'host'),
    # the shipped checkpoint has thresholds, which the GPU's own loop cannot follow
    ({'model.device': 'cuda'}, 'host'),
    ({'model.device': 'cuda', 'engine.loop': 'while'}, 'while'),
    ({'model.device': 'cuda', 'engine.backend': 'tensorrt', 'engine.folder': 'x'}, 'host')])
def test_a_gpu_repeats_the_decoding_itself_unless_told_otherwise(changes, loop):
    assert chosen_loop(engine_parameters(**changes)) == loop


def test_parameters_choose_the_loop_and_where_a_text_is_verified():
    planner = load_planner(engine_parameters(**{
        'engine.loop': 'sync', 'speculation.reuse_in': 'prefill'}))
    told = dict(planner.executors)
    assert told.pop('caution').startswith('none: ')  # the shipped checkpoint has thresholds
    assert told == {'backend': 'torch', 'loop': 'sync'}
    assert planner._stages.frame.frame.guess_room == 32
    assert warm_up(planner) > 0.0


def engine_parameters(**changes):
    values = {**load_yaml_parameters(config_path('rspec_planner.param.yaml')), **changes}
    raise_problems(value_problems(values, 'test'))
    return NodeParameters.from_values(values)


def test_engines_are_verified_before_weights_are_read(monkeypatch, tmp_path):
    from rspec_planner.engine import tensorrt_library, tensorrt_runtime
    from rspec_planner.planner.pipeline import Planner
    monkeypatch.setattr(tensorrt_library, 'load_library', lambda name: name)
    monkeypatch.setattr(tensorrt_runtime, 'find_gpu', lambda device: device)
    monkeypatch.setattr(Planner, 'load', lambda *args, **kwargs: pytest.fail('read weights'))
    parameters = engine_parameters(**{'engine.backend': 'tensorrt_rtx', 'model.device': 'cuda',
                                      'engine.folder': str(tmp_path)})
    with pytest.raises(EngineError, match='stages.json cannot be read .No such file'):
        load_planner(parameters)


def test_engines_take_the_place_of_torch_and_are_told(monkeypatch):
    import torch

    from rspec_planner import loading
    from rspec_planner.planner import engine_stages
    from rspec_planner.planner.pipeline import Planner, torch_stages
    calls = []
    engines = SimpleNamespace(
        stages=SimpleNamespace(precision='bf16'), make='maker', prepare=calls.append,
        describe=lambda: {'backend': 'tensorrt', 'tensorrt_version': '11.4'})
    monkeypatch.setattr(loading, '_load_engines', lambda parameters: engines)
    monkeypatch.setattr(torch.cuda, 'Stream', lambda device: f'stream of {device}')
    monkeypatch.setattr(engine_stages, 'graph_stages', lambda stages, make: (
        calls.append((stages.precision, make)), torch_stages)[1])
    real = Planner.load
    monkeypatch.setattr(Planner, 'load',
                        lambda *args, **options: real(*args, **{**options, 'device': 'cpu'}))
    planner = load_planner(engine_parameters(**{
        'engine.backend': 'tensorrt', 'model.device': 'cuda:1', 'engine.folder': 'x'}))
    assert calls == [('bf16', 'maker'), 'stream of cuda:1']
    assert planner.precision == 'bfloat16'
    facts = engine_values(planner, engine_parameters(), {})
    assert (facts['backend'], facts['tensorrt_version']) == ('tensorrt', '11.4')


@pytest.mark.parametrize(('name', 'device', 'found'), [
    ('auto', 'cpu', 'float32'), ('bfloat16', 'cpu', 'bfloat16'), ('float16', 'cpu', 'float16'),
    ('fp8', 'cpu', 'float32, fp8 weights')])
def test_the_precision_is_the_parameter_s(name, device, found):
    values = load_yaml_parameters(config_path(PARAMETER_FILE))
    values |= {'model.precision': name, 'engine.loop': 'eager', 'speculation.enabled': False,
               'planning.max_reasoning_tokens': 4}
    planner = load_planner(NodeParameters.from_values(values))
    assert planner.precision == found
    assert np.isfinite(planner.plan(warm_up_observation(planner.profile)).poses).all()


def test_fp8_needs_the_device_resident_frame_and_engines_their_own_precision():
    values = load_yaml_parameters(config_path(PARAMETER_FILE))
    with pytest.raises(ConfigurationError, match='fp8 needs.*engine.loop'):
        load_planner(NodeParameters.from_values(values | {'model.precision': 'fp8',
                                                          'engine.loop': 'host'}))
    for name in ('fp8', 'float16'):
        parameters = NodeParameters.from_values(
            values | {'model.precision': name, 'engine.backend': 'tensorrt',
                      'engine.folder': '/nowhere', 'model.device': 'cuda'})
        with pytest.raises(ConfigurationError, match="model.precision.*leave it at 'auto'"):
            load_planner(parameters)
