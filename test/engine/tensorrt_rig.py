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
"""A one-layer decoder as ONNX, an engine set around it, and a stand-in for the library."""

import contextlib
import dataclasses
import types

import torch

from rspec_planner.engine import tensorrt_library
from rspec_planner.engine.engine_manifest import (
    engine_path,
    EngineManifest,
    sha256_of,
    write_manifest,
)
from rspec_planner.engine.stages import (
    file_sha256,
    Port,
    StageFile,
    StageSet,
    StageShapes,
    Weight,
    write_stages,
)

ROWS, CAPACITY, HIDDEN, HEADS, KV_HEADS, DIM = 8, 64, 64, 4, 2, 16
CHECKPOINTS = {'target': 'a' * 64, 'draft': 'b' * 64}
CACHE = (1, KV_HEADS, CAPACITY, DIM)

INPUTS = (
    Port('x', 'float16', (1, ROWS, HIDDEN)), Port('cos', 'float16', (1, ROWS, DIM // 2)),
    Port('sin', 'float16', (1, ROWS, DIM // 2)), Port('start', 'int64', (1,)),
    Port('mask', 'float16', (1, 1, ROWS, CAPACITY)),
    Port('k0', 'float16', CACHE), Port('v0', 'float16', CACHE),
    Port('wq', 'float16', (HIDDEN, HEADS * DIM), Weight('target', 'layers.0.q')),
    Port('wk', 'float16', (HIDDEN, KV_HEADS * DIM), Weight('target', 'layers.0.k')),
    Port('wv', 'float16', (HIDDEN, KV_HEADS * DIM), Weight('target', 'layers.0.v')),
    Port('wo', 'float16', (HEADS * DIM, HIDDEN), Weight('target', 'layers.0.o')))
OUTPUTS = (Port('y', 'float16', (1, ROWS, HIDDEN)),
           Port('k0_out', 'float16', CACHE, alias='k0'),
           Port('v0_out', 'float16', CACHE, alias='v0'))


def decoder_model(last=(('MatMul', ('mixed', 'wo'), {}),), attention=None, extra_inputs=(),
                  dtype='FLOAT16', trace=''):
    """
    Return an ONNX model of INPUTS and OUTPUTS.

    last: the nodes after attention, the last one gives y. attention: more attributes of it.
    trace: a Python stack that the nodes are said to come from.
    """
    from onnx import helper, TensorProto
    kinds = {'float16': getattr(TensorProto, dtype), 'int64': TensorProto.INT64}

    def info(port):
        return helper.make_tensor_value_info(port.name, kinds[port.dtype], port.shape)

    nodes = []

    def add(operator, inputs, output, **attributes):
        node = helper.make_node(operator, inputs, [output], name=f'node_{output}', **attributes)
        if trace:
            node.metadata_props.add(key='pkg.torch.onnx.stack_trace', value=trace)
        nodes.append(node)

    for name in 'qkv':
        add('MatMul', ['x', f'w{name}'], f'{name}_flat')
        add('Reshape', [f'{name}_flat', f'{name}_shape'], f'{name}_heads')
        add('Transpose', [f'{name}_heads'], f'{name}', perm=[0, 2, 1, 3])
    for name in 'qk':
        add('RotaryEmbedding', [name, 'cos', 'sin'], f'{name}_turned', interleaved=0)
    add('TensorScatter', ['k0', 'k_turned', 'start'], 'k0_out', axis=-2, mode='linear')
    add('TensorScatter', ['v0', 'v', 'start'], 'v0_out', axis=-2, mode='linear')
    add('Attention', ['q_turned', 'k0_out', 'v0_out', 'mask'], 'seen', **(attention or {}))
    add('Transpose', ['seen'], 'seen_rows', perm=[0, 2, 1, 3])
    add('Reshape', ['seen_rows', 'mixed_shape'], 'mixed')
    for index, (operator, inputs, attributes) in enumerate(last):
        add(operator, list(inputs), 'y' if index == len(last) - 1 else f'step_{index}',
            **attributes)
    sizes = {'q_shape': [1, ROWS, HEADS, DIM], 'k_shape': [1, ROWS, KV_HEADS, DIM],
             'v_shape': [1, ROWS, KV_HEADS, DIM], 'mixed_shape': [1, ROWS, HEADS * DIM]}
    constants = [helper.make_tensor(name, TensorProto.INT64, [len(shape)], shape)
                 for name, shape in sizes.items()]
    graph = helper.make_graph(nodes, 'decoder', [*map(info, INPUTS), *extra_inputs],
                              [*map(info, OUTPUTS)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid('', 24)], ir_version=10)


def write_set(folder, model=None, names=('verify',), inputs=INPUTS, outputs=OUTPUTS,
              checkpoints=None):
    """Write an export of the model under each stage name; return its StageSet."""
    import onnx
    graphs = folder / 'onnx'
    graphs.mkdir(parents=True, exist_ok=True)
    files = []
    for name in names:
        path = graphs / f'{name}.onnx'
        onnx.save(model or decoder_model(), str(path))
        files.append(StageFile(name, path.name, file_sha256(path), path.stat().st_size, 24,
                               inputs, outputs))
    stages = stage_set(files, checkpoints or CHECKPOINTS)
    write_stages(stages, graphs)
    return stages


def stage_set(files, checkpoints=None):
    fields = {field.name: 1 for field in dataclasses.fields(StageShapes)}
    shapes = StageShapes(**{**fields, 'taps': ()})
    return StageSet('hand', {}, None, 'fp16', shapes, checkpoints or CHECKPOINTS, {},
                    tuple(files))


def rtx_plan(size=400, fill=b'x'):
    """Return bytes that have the form of a plan of TensorRT-RTX."""
    body = b'vtrt' + bytes(12) + size.to_bytes(8, 'little')
    return body + fill * (size - len(body))


def manifest_of(plan, stage='verify', **changes):
    """Return the manifest of a made-up engine for GPUs of compute capability 8.6 and 8.9."""
    values = {'stage': stage, 'profile': 'hand', 'precision': 'fp16', 'flavour': 'tensorrt_rtx',
              'version': '1.7.1.116', 'targets': ('86', '89'), 'host': 'linux-x86_64',
              'file': f'{stage}.tensorrt_rtx.engine', 'bytes': len(plan),
              'sha256': sha256_of(plan), 'onnx_sha256': 'c' * 64, 'checkpoints': CHECKPOINTS,
              'inputs': INPUTS, 'outputs': OUTPUTS, 'numerics': {}, 'build': {'seconds': 1.0},
              'revision': '', 'created': '2026-01-01T00:00:00+00:00'}
    return EngineManifest(**{**values, **changes})


def write_engine(folder, stage='verify', plan=None, **changes):
    """Write a made-up engine and its manifest."""
    plan = plan or rtx_plan(fill=stage[:1].encode())
    manifest = manifest_of(plan, stage, **changes)
    engine_path(folder, stage, manifest.flavour).write_bytes(plan)
    write_manifest(manifest, folder)
    return manifest


class FakeLibrary:
    """
    A module with the calls of TensorRT that load and run an engine; `calls` records them.

    An execution context refuses to run before every tensor has an address and memory is set,
    as the real one does.
    """

    def __init__(self, version='1.7.1.116'):
        self.calls = []
        self.validity, self.reads, self.capturable, self.runs = 'VALID', True, True, True
        self.bits, self.header = 0, 64
        self.aliases = {port.name: port.alias for port in OUTPUTS}
        self.ports = {port.name: port for port in INPUTS + OUTPUTS}
        self.cache_is_valid, self.scratch = True, 1000
        self.__version__ = version
        self.ILogger = type('ILogger', (), {'WARNING': 2})
        self.ExecutionContextAllocationStrategy = types.SimpleNamespace(USER_MANAGED='user')
        self.DynamicShapesKernelSpecializationStrategy = types.SimpleNamespace(EAGER='eager')
        self.CudaGraphStrategy = types.SimpleNamespace(DISABLED='disabled')
        self.EngineInvalidityDiagnostics = types.SimpleNamespace(
            __members__={'VERSION_MISMATCH': 1, 'UNSUPPORTED_CC': 2})

    def Runtime(self, log):
        return types.SimpleNamespace(
            engine_header_size=self.header,
            get_engine_validity=lambda head: (types.SimpleNamespace(name=self.validity),
                                              self.bits),
            deserialize_cuda_engine=self._deserialize)

    def _deserialize(self, plan):
        self.calls.append(('deserialize', bytes(plan)))
        return FakeEngine(self) if self.reads else None


class FakeEngine:
    def __init__(self, library):
        self.library = library
        self.num_io_tensors = len(library.ports)
        self.device_memory_size_v2 = library.scratch

    def get_tensor_name(self, index):
        return list(self.library.ports)[index]

    def get_tensor_dtype(self, name):
        spelled = {'float16': 'HALF', 'int64': 'INT64', 'float32': 'FLOAT'}
        return types.SimpleNamespace(name=spelled[self.library.ports[name].dtype])

    def get_tensor_shape(self, name):
        return self.library.ports[name].shape

    def get_aliased_input_tensor(self, name):
        return self.library.aliases.get(name) or None

    def create_runtime_config(self):
        return FakeConfig(self.library)

    def create_execution_context(self, config):
        self.library.calls.append(('context', config.strategy, config.specialization,
                                   config.graphs, config.cache is not None))
        return FakeContext(self.library)


class FakeConfig:
    strategy = specialization = graphs = cache = None

    def __init__(self, library):
        object.__setattr__(self, 'library', library)

    def set_execution_context_allocation_strategy(self, strategy):
        self.strategy = strategy

    def __setattr__(self, name, value):
        known = {'dynamic_shapes_kernel_specialization_strategy': 'specialization',
                 'cuda_graph_strategy': 'graphs'}
        object.__setattr__(self, known.get(name, name), value)

    def create_runtime_cache(self):
        return types.SimpleNamespace(deserialize=lambda blob: self.library.cache_is_valid,
                                     serialize=lambda: b'kernels')

    def set_runtime_cache(self, cache):
        self.cache = cache


class FakeContext:
    def __init__(self, library):
        self.library, self.addresses, self.memory = library, {}, None

    def set_device_memory(self, address, size):
        self.memory = (address, size)

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return name in self.library.ports

    def execute_async_v3(self, stream):
        ready = self.memory and set(self.addresses) == set(self.library.ports)
        self.library.calls.append(('enqueue', stream))
        return bool(ready and self.library.runs)

    def is_stream_capturable(self, stream):
        return self.library.capturable


class FakeStream:
    def __init__(self, library):
        self.library, self.cuda_stream = library, 4711

    def synchronize(self):
        self.library.calls.append(('synchronize', self.cuda_stream))


def install(monkeypatch, fake, flavour='tensorrt_rtx'):
    """Let our code find the stand-in, and the CPU where it wants a CUDA device."""
    monkeypatch.setattr(tensorrt_library.importlib, 'import_module', lambda name: fake)
    monkeypatch.setattr(torch.cuda, 'device', lambda device: contextlib.nullcontext())
    return tensorrt_library.load_library.__wrapped__(flavour)
