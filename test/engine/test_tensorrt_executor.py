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
"""Loading and running an engine against a stand-in that records the calls of the library."""

import dataclasses

import pytest
from tensorrt_rig import (
    CHECKPOINTS,
    FakeLibrary,
    FakeStream,
    INPUTS,
    install,
    manifest_of,
    OUTPUTS,
    rtx_plan,
    stage_set,
    write_engine,
    write_set,
)
import torch

from rspec_planner.engine.engine_manifest import told_numerics
from rspec_planner.engine.executor import Executor
from rspec_planner.engine.stages import read_stages, StageFile
from rspec_planner.engine.tensorrt_executor import bind, load_set, TensorRTExecutor
from rspec_planner.engine.tensorrt_library import host_name
from rspec_planner.engine.tensorrt_runtime import find_gpu, Gpu, load_engine
from rspec_planner.errors import EngineError

GPU = Gpu(torch.device('cpu'), 'NVIDIA RTX 4000 (laptop)', '89')
STAGES = stage_set([StageFile('verify', 'verify.onnx', 'c' * 64, 1, 24, INPUTS, OUTPUTS)])


class Rig:
    """An engine folder and the stand-in that reads it."""

    def __init__(self, folder, monkeypatch, flavour='tensorrt_rtx', **changes):
        self.folder, self.flavour = folder, flavour
        self.fake = FakeLibrary()
        self.library = install(monkeypatch, self.fake, flavour)
        values = {'host': host_name(), 'flavour': flavour,
                  'file': f'verify.{flavour}.engine', **changes}
        self.manifest = write_engine(folder, **values)

    def load(self, gpu=GPU, checkpoints=CHECKPOINTS):
        return load_engine(self.library, gpu, self.folder, STAGES, 'verify', checkpoints)

    def called(self, name):
        return [call for call in self.fake.calls if call[0] == name]


@pytest.fixture
def rig(tmp_path, monkeypatch):
    return Rig(tmp_path, monkeypatch)


def buffers():
    """Return a tensor for every port but those that are updated in place."""
    return {port.name: torch.zeros(port.shape, dtype=getattr(torch, port.dtype))
            for port in INPUTS + OUTPUTS if not port.alias}


def scratch(size=1000):
    """Return working memory at an address that TensorRT takes."""
    whole = torch.zeros(size + 256, dtype=torch.uint8)
    offset = -whole.data_ptr() % 256
    return whole[offset:offset + size]


def test_an_engine_is_verified_read_and_given_its_context(rig):
    loaded = rig.load()
    assert rig.called('deserialize') == [('deserialize', rtx_plan(fill=b'v'))]
    # memory from us, no kernel that changes later, no graphs of its own, compiled kernels kept
    assert rig.called('context') == [('context', 'user', 'eager', 'disabled', True)]
    assert (loaded.scratch_bytes, loaded.cache_state) == (1000, 'cold')
    assert loaded.manifest == rig.manifest


def test_full_tensorrt_is_asked_for_nothing_that_only_the_other_has(tmp_path, monkeypatch):
    rig = Rig(tmp_path, monkeypatch, 'tensorrt')
    for name in ('DynamicShapesKernelSpecializationStrategy', 'CudaGraphStrategy',
                 'EngineInvalidityDiagnostics'):
        delattr(rig.fake, name)
    rig.fake.validity = 'INVALID'  # the method does not exist there
    loaded = rig.load()
    assert rig.called('context') == [('context', 'user', None, None, False)]
    assert loaded.cache_state == 'none'
    stream = FakeStream(rig.fake)
    rig.fake.capturable = False  # neither does this one
    bind(loaded, buffers(), scratch()).prepare(stream)
    assert not (tmp_path / 'runtime_cache').exists()


@pytest.mark.parametrize('gpu, checkpoints, says', [
    (dataclasses.replace(GPU, sm='90'), CHECKPOINTS, 'this GPU has 90'),
    (GPU, {'target': 'f' * 64}, 'belongs to target weights'),
])
def test_what_does_not_fit_is_never_deserialised(rig, gpu, checkpoints, says):
    with pytest.raises(EngineError, match=says):
        rig.load(gpu, checkpoints)
    assert rig.called('deserialize') == []


def test_an_engine_of_an_older_export_is_refused(tmp_path, monkeypatch):
    rig = Rig(tmp_path, monkeypatch, onnx_sha256='9' * 64)
    with pytest.raises(EngineError, match='built from an older export: rspec engine build'):
        rig.load()
    assert rig.called('deserialize') == []


def test_the_library_judges_the_header_first(rig):
    rig.fake.validity, rig.fake.bits = 'INVALID', 3
    with pytest.raises(EngineError, match='invalid here .VERSION_MISMATCH, UNSUPPORTED_CC'):
        rig.load()
    assert rig.called('deserialize') == []


def test_a_plan_that_is_not_read_is_told_with_the_reason(rig):
    rig.fake.reads = False
    with pytest.raises(EngineError, match='does not read it'):
        rig.load()


@pytest.mark.parametrize('name, change, says', [
    ('x', {'shape': (1, 9, 64)}, r'has x float16\[1, 9, 64\], needed is x float16\[1, 8, 64\]'),
    ('start', {'dtype': 'float32'}, r'has start float32\[1\], needed is start int64'),
])
def test_an_engine_unlike_its_manifest_is_refused(rig, name, change, says):
    rig.fake.ports[name] = dataclasses.replace(rig.fake.ports[name], **change)
    with pytest.raises(EngineError, match=says):
        rig.load()


def test_an_engine_that_would_copy_the_cache_is_refused(rig):
    rig.fake.aliases['k0_out'] = ''
    with pytest.raises(EngineError, match='k0_out shares the buffer of no input, expected is k0'):
        rig.load()


def test_tensors_are_bound_by_address_and_caches_in_place(rig):
    loaded, tensors, memory = rig.load(), buffers(), scratch()
    executor = bind(loaded, tensors, memory)
    addresses = loaded.context.addresses
    assert addresses == {**{name: tensor.data_ptr() for name, tensor in tensors.items()},
                         'k0_out': tensors['k0'].data_ptr(), 'v0_out': tensors['v0'].data_ptr()}
    assert loaded.context.memory == (memory.data_ptr(), 1000)
    # what the caller fills and reads: no weights
    assert list(executor.inputs) == ['x', 'cos', 'sin', 'start', 'mask', 'k0', 'v0']
    assert list(executor.outputs) == ['y', 'k0_out', 'v0_out']
    assert executor.inputs['x'] is tensors['x']
    assert executor.outputs['y'] is tensors['y']
    assert executor.outputs['k0_out'] is executor.inputs['k0'] is tensors['k0']


def test_what_is_not_given_is_made(rig):
    weights = {name: tensor for name, tensor in buffers().items() if name.startswith('w')}
    executor = bind(rig.load(), weights, scratch())
    for port in INPUTS + OUTPUTS:
        if port.weight is None:
            made = {**executor.inputs, **executor.outputs}[port.name]
            assert (tuple(made.shape), made.dtype) == (port.shape, getattr(torch, port.dtype))
            assert not made.any()


def test_it_is_an_executor(rig):
    executor: Executor = bind(rig.load(), buffers(), scratch())
    assert isinstance(executor, TensorRTExecutor)
    assert executor.inputs['x'] is executor.inputs['x']


def test_a_call_is_one_enqueue_on_the_given_stream_and_nothing_else(rig):
    executor, stream = bind(rig.load(), buffers(), scratch()), FakeStream(rig.fake)
    rig.fake.calls.clear()
    executor.enqueue(stream)
    executor.enqueue(stream)
    assert rig.fake.calls == [('enqueue', 4711)] * 2


def test_without_a_stream_the_current_one_is_taken(rig, monkeypatch):
    executor = bind(rig.load(), buffers(), scratch())
    asked = []

    def current(device):  # inside torch.cuda.graph this is the stream of the capture
        asked.append(device)
        return FakeStream(rig.fake)
    monkeypatch.setattr(torch.cuda, 'current_stream', current)
    executor.enqueue()
    assert asked == [GPU.device]
    assert rig.called('enqueue') == [('enqueue', 4711)]


def test_a_refused_call_is_an_error(rig):
    executor = bind(rig.load(), buffers(), scratch())
    rig.fake.runs = False
    with pytest.raises(EngineError, match='engine verify was not enqueued'):
        executor.enqueue(FakeStream(rig.fake))


def test_preparing_runs_once_waits_and_keeps_the_kernels(rig):
    stream = FakeStream(rig.fake)
    bind(rig.load(), buffers(), scratch()).prepare(stream)
    assert rig.fake.calls[-2:] == [('enqueue', 4711), ('synchronize', 4711)]
    kept = list((rig.folder / 'runtime_cache').iterdir())
    assert [path.read_bytes() for path in kept] == [b'kernels']
    name = kept[0].name
    assert rig.manifest.sha256[:16] in name
    assert 'NVIDIA-RTX-4000-laptop' in name
    assert rig.load().cache_state == 'warm'
    rig.fake.cache_is_valid = False  # another driver
    assert rig.load().cache_state == 'cold'


def test_an_engine_that_cannot_be_captured_is_refused(rig):
    rig.fake.capturable = False
    executor = bind(rig.load(), buffers(), scratch())
    with pytest.raises(EngineError, match='cannot be captured in a CUDA graph'):
        executor.prepare(FakeStream(rig.fake))


@pytest.mark.parametrize('change, says', [
    ({'wq': None}, r'needs weight layers.0.q of the target: bind it'),
    ({'extra': torch.zeros(1)}, 'has no tensor extra'),
    ({'x': torch.zeros(1, 8, 64)}, r'x is float32\[1, 8, 64\], needed is float16'),
    ({'start': torch.zeros(2, dtype=torch.int64)}, r'start is int64\[2\], needed is int64\[1\]'),
    ({'wq': torch.zeros(64, 64, dtype=torch.float16).t()}, 'wq must be contiguous'),
    ({'wq': torch.zeros(64, 128, dtype=torch.float16)[:, ::2]}, 'wq must be contiguous'),
    ({'x': torch.zeros(1, 8, 64, dtype=torch.float16, device='meta')}, 'it is on meta'),
])
def test_buffers_that_do_not_fit_are_refused(rig, change, says):
    tensors = {name: tensor for name, tensor in {**buffers(), **change}.items()
               if tensor is not None}
    with pytest.raises(EngineError, match=says):
        bind(rig.load(), tensors, scratch())


@pytest.mark.parametrize('memory', [scratch(999), scratch(1300)[1:], scratch().to('meta')])
def test_working_memory_must_be_large_aligned_and_on_the_gpu(rig, memory):
    with pytest.raises(EngineError, match='works in 1000 bytes on cpu, aligned to 256'):
        bind(rig.load(), buffers(), memory)


def test_bound_tensors_stay_alive(rig):
    import gc
    import weakref
    tensors = buffers()
    watched = weakref.ref(tensors['wq'])
    executor = bind(rig.load(), tensors, scratch())
    del tensors
    gc.collect()
    assert watched() is not None
    del executor
    gc.collect()
    assert watched() is None


def test_without_a_gpu_the_remedy_is_told():
    if torch.cuda.is_available():
        pytest.skip('this machine has a GPU')
    with pytest.raises(EngineError, match='need an NVIDIA GPU .*engine.backend to torch'):
        find_gpu('cuda')


def test_a_set_loads_all_its_engines_over_one_working_memory(tmp_path, monkeypatch):
    write_set(tmp_path, names=('prefill', 'verify'))
    rig = Rig(tmp_path, monkeypatch)
    stages = read_stages(tmp_path / 'onnx')
    for stage in stages.stages:
        write_engine(tmp_path, stage.name, host=host_name(), onnx_sha256=stage.sha256)
    found = load_set(rig.library, GPU, tmp_path, CHECKPOINTS)
    found._scratch = scratch()  # memory of the CPU is not aligned as that of a GPU is
    shared = buffers()
    made = [found.make(stage, shared) for stage in stages.stages]
    assert made[0].inputs['k0'] is made[1].inputs['k0']
    memories = {engine.context.memory for engine in found.engines.values()}
    assert len(memories) == 1
    found.prepare(FakeStream(rig.fake))
    assert len(rig.called('enqueue')) == 2
    assert len(list((tmp_path / 'runtime_cache').iterdir())) == 2
    told = found.describe()
    assert told['backend'] == 'tensorrt_rtx'
    assert told['engine_sm'] == '86,89'
    assert told['verify_sha256'] == found.engines['verify'].manifest.sha256
    assert told['engine_numerics'] == 'not checked: prefill, verify'


@pytest.mark.parametrize('numerics, says', [
    (({'checked': True, 'error': 1e-3}, {'checked': True, 'error': 2e-3}),
     'checked, largest error 2.0e-03'),
    (({'checked': True, 'error': 1e-3}, {}), 'not checked: verify'),
    (({'checked': False, 'error': 1.0}, {}), 'failed: prefill')])
def test_a_diagnostic_tells_what_the_check_found(numerics, says):
    assert told_numerics([manifest_of(rtx_plan(), stage, numerics=found) for stage, found in
                          zip(('prefill', 'verify'), numerics)]) == says


def test_a_set_without_one_engine_is_refused(tmp_path, monkeypatch):
    write_set(tmp_path, names=('prefill', 'verify'))
    rig = Rig(tmp_path, monkeypatch)
    with pytest.raises(EngineError, match='there is no prefill engine for tensorrt_rtx'):
        load_set(rig.library, GPU, tmp_path, CHECKPOINTS)
