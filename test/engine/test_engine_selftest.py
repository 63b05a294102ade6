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
"""The selftest on a CPU: engines are played by ONNX Runtime, the GPU by a stand-in."""

from types import SimpleNamespace

from export_rig import camera_target, exported, source_of
import pytest
import torch

from rspec_planner.engine.onnx_executor import OnnxExecutor
from rspec_planner.evaluate import engine_selftest
from rspec_planner.evaluate.engine_check import Amount
from rspec_planner.evaluate.engine_selftest import captured, CHECKS, Device, selftest

GPU = SimpleNamespace(name='a stand-in', sm='86', device=torch.device('cpu'))


def device(capture=lambda call: call):
    """Return a device whose captures repeat the call itself."""
    def clock(call):
        call()
        return 2.0
    return Device('stream', capture, clock, lambda: None)


class Doubler:
    """A stage that writes twice its input, and an input in place."""

    def __init__(self):
        self.inputs = {'x': torch.ones(3), 'state': torch.zeros(2)}
        self.outputs = {'y': torch.zeros(3), 'count': torch.zeros(1, dtype=torch.int64),
                        'state_out': self.inputs['state']}
        self.streams = []

    def enqueue(self, stream=None):
        self.streams.append(stream)
        torch.mul(self.inputs['x'], 2, out=self.outputs['y'])
        self.outputs['count'].fill_(7)
        self.inputs['state'].fill_(5)


def test_a_stage_that_repeats_itself_passes():
    stage = Doubler()
    found = captured(stage, device(), 10)
    assert found == {'captured': True, 'replayed': True, 'ms_p50': 2.0, 'ms_p99': 2.0}
    assert len(stage.streams) == 12  # a plain call, a first replay, ten timed ones
    assert set(stage.streams) == {'stream'}
    assert stage.outputs['y'].tolist() == [2.0, 2.0, 2.0]


def test_an_empty_graph_is_found_out():
    found = captured(Doubler(), device(capture=lambda call: lambda: None), 3)
    assert (found['captured'], found['replayed']) == (False, False)


def test_a_stage_that_drifts_is_found_out():
    class Drifting(Doubler):
        def enqueue(self, stream=None):
            super().enqueue(stream)
            self.outputs['y'].add_(len(self.streams) > 5)
    found = captured(Drifting(), device(), 10)
    assert (found['captured'], found['replayed']) == (True, False)


class Engines:
    """What `load_set` returns, with ONNX Runtime in the place of TensorRT."""

    def __init__(self, stages, folder, spoil=None, second='warm'):
        self.stages, self._folder, self._spoil = stages, folder, spoil
        self.second = second  # what a start after the first one says of its kernels
        self.executors, self.prepared = {}, []

    def make(self, stage, bound):
        executor = OnnxExecutor(stage, self._folder, bound)
        if stage.name == self._spoil:
            run = executor.enqueue

            def spoiled(stream=None):
                run(stream)
                executor.outputs['velocity'].mul_(1.5)
            executor.enqueue = spoiled
        self.executors[stage.name] = executor
        return executor

    def prepare(self, stream):
        self.prepared.append(stream)

    def describe(self):
        return {'backend': 'tensorrt_rtx', 'tensorrt_version': '1.7.1.116',
                'engine_kernels': 'cold' if not self.prepared else self.second}


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp('set')
    source = source_of(camera_target())
    return folder, source, exported(source, folder)


@pytest.mark.parametrize('spoil, second, failed', [
    (None, 'warm', set()), (None, 'none', set()), (None, 'cold', {'restart'}),
    ('flow_step', 'warm', {'parity'})])
def test_every_stage_is_compared_captured_and_timed(small, monkeypatch, spoil, second, failed):
    folder, source, stages = small
    engines = Engines(stages, folder, spoil, second)
    monkeypatch.setattr(engine_selftest, 'load_set', lambda *given: engines)
    monkeypatch.setattr(engine_selftest, 'open_tokenizer', lambda *given: None)
    shown = []
    report = selftest('library', GPU, folder, source, folder, Amount(2, 0, 0), device(), 3,
                      lambda label, done, total: shown.append((label, done, total)))
    assert engines.prepared == ['stream']
    assert report['ok'] is (not failed)
    assert list(report['checks']) == list(CHECKS)
    assert {name for name, held in report['checks'].items() if not held} == failed
    assert (report['first_start']['kernels'], report['second_start']['kernels']) == (
        'cold', second)
    for row in report['engines']:
        assert row['captured'] and row['replayed'], row
        assert row['checked'] is (row['stage'] != spoil), row
        assert (row['flavour'], row['sm']) == ('tensorrt_rtx', ['86'])
    assert [row['stage'] for row in report['engines']] == [s.name for s in stages.stages]
    assert (report['backend'], report['gpu'], report['replays']) == (
        'tensorrt_rtx', 'a stand-in', 3)
    assert [one for one in shown if one[0] == 'parity'] == [('parity', 1, 2), ('parity', 2, 2)]
    assert shown[-1] == ('capture', 5, 5)
