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
import sys
import types

import pytest
from tensorrt_rig import FakeLibrary, install

from rspec_planner.engine import tensorrt_build, tensorrt_memory
from rspec_planner.engine.tensorrt_library import (
    check_targets,
    find_flavour,
    FLAVOURS,
    is_installed,
    load_library,
)
from rspec_planner.engine.tensorrt_memory import available_bytes, check_memory, peak_memory
from rspec_planner.errors import ConfigurationError, EngineError

RTX, FULL = FLAVOURS['tensorrt_rtx'], FLAVOURS['tensorrt']


@pytest.mark.parametrize('sms, precision, targets', [
    (['86', '8.9', '120'], 'fp16', ('86', '89', '120')),
    ([' 12.0', '86', '86', ''], 'bf16', ('86', '120')),
    (['89'], 'fp8', ('89',)),
    (['75'], 'fp16', ('75',)),
])
def test_targets_of_rtx(sms, precision, targets):
    assert check_targets(RTX, sms, precision) == targets


@pytest.mark.parametrize('flavour, sms, precision, present, says', [
    (RTX, ['90'], 'fp16', '', 'does not serve compute capability 9.0, only 7.5.*--flavour'),
    (RTX, ['11.0'], 'fp16', '', 'does not serve compute capability 11.0'),
    (RTX, ['86', '89'], 'fp8', '', '8.6 has no fp8, which needs 8.9.*leave --sm 86 out'),
    (RTX, ['75'], 'bf16', '', '7.5 has no bf16'),
    (RTX, [''], 'fp16', '', 'needs --sm'),
    (RTX, ['ampere'], 'fp16', '', "'ampere' is no compute capability; write"),
    (RTX, ['86'], 'int3', '', "precision 'int3' is not known; use fp16, bf16, fp8"),
    (FULL, ['86'], 'fp16', '', 'finds none: run this on that machine'),
    (FULL, [], 'fp16', '', 'finds none'),
    (FULL, ['86'], 'fp16', '90', 'GPU at hand, compute capability 9.0, not for 8.6'),
])
def test_targets_that_are_refused(flavour, sms, precision, present, says):
    with pytest.raises(ConfigurationError, match=says):
        check_targets(flavour, sms, precision, present)


def test_full_tensorrt_builds_for_the_gpu_at_hand():
    assert check_targets(FULL, [], 'bf16', '90') == ('90',)
    assert check_targets(FULL, ['9.0'], 'fp8', '90') == ('90',)


def test_a_flavour_that_nobody_knows():
    with pytest.raises(ConfigurationError, match='tensorrt or tensorrt_rtx'):
        find_flavour('onnx')


@pytest.mark.parametrize('flavour, remedy', [('tensorrt', 'JetPack'),
                                             ('tensorrt_rtx', 'requirements-engine.txt')])
def test_a_missing_module_names_how_to_get_it(monkeypatch, flavour, remedy):
    def missing(name):
        raise ModuleNotFoundError(f'No module named {name!r}', name=name)
    monkeypatch.setattr('rspec_planner.engine.tensorrt_library.importlib.import_module', missing)
    with pytest.raises(EngineError, match=f"'{flavour}' is missing: .*{remedy}"):
        load_library.__wrapped__(flavour)


def test_a_module_whose_libraries_do_not_load_is_told(monkeypatch):
    def broken(name):
        raise OSError('libnvinfer.so.10: cannot open\nshared object file')
    monkeypatch.setattr('rspec_planner.engine.tensorrt_library.importlib.import_module', broken)
    with pytest.raises(EngineError, match='does not load .libnvinfer.so.10: cannot open shared'):
        load_library.__wrapped__('tensorrt')


def test_finding_a_flavour_does_not_import_it(monkeypatch):
    monkeypatch.delitem(sys.modules, 'tensorrt', raising=False)
    assert is_installed('tensorrt') in (True, False)
    assert 'tensorrt' not in sys.modules


def test_messages_are_kept_as_single_lines(monkeypatch):
    library = install(monkeypatch, FakeLibrary('9.9'))
    assert library.version == '9.9'
    severity = type('Severity', (int,), {})
    for level, name, text in ((1, 'ERROR', 'two\n  lines'), (2, 'WARNING', 'careful'),
                              (1, 'ERROR', 'two lines'), (3, 'INFO', 'chatter')):
        kind = severity(level)
        kind.name = name
        library.log.log(kind, text)
    assert library.log.messages == [('ERROR', 'two lines'), ('WARNING', 'careful'),
                                    ('ERROR', 'two lines')]
    assert library.log.errors() == 'two lines'
    library.log.messages.clear()
    assert library.log.errors() == 'no reason given'


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    import psutil
    monkeypatch.setattr(psutil, 'virtual_memory', lambda: types.SimpleNamespace(available=1000))
    assert available_bytes(tmp_path / 'none') == 1000
    (tmp_path / 'memory.max').write_text('900\n')
    (tmp_path / 'memory.current').write_text('500\n')
    (tmp_path / 'memory.stat').write_text('anon 1\ninactive_file 50\n')
    assert available_bytes(tmp_path) == 450
    (tmp_path / 'memory.max').write_text('max\n')
    assert available_bytes(tmp_path) == 1000


def test_memory_is_asked_for_by_the_constants(monkeypatch):
    monkeypatch.setattr(tensorrt_memory, 'available_bytes', lambda: 8 * 2**30)
    check_memory('vision', 2 * 2**30)
    with pytest.raises(EngineError, match='building vision needs about 10035 MiB of memory .4096 '
                       'MiB of constants. and 7424 MiB are free'):
        check_memory('vision', 4 * 2**30)


def test_the_peak_belongs_to_the_block():
    with peak_memory() as first:
        held = bytearray(b'x' * 300 * 2**20)
    del held
    with peak_memory() as second:
        pass
    if not (first and second):
        pytest.skip('this kernel does not let a process reset its peak memory')
    assert first[0] - second[0] > 250 * 2**20


class FakeConfig:
    """A builder configuration of full TensorRT: what it does not have is not there."""

    def __init__(self):
        self.calls = []

    def create_timing_cache(self, blob):
        self.calls.append(('create', blob))
        return 'cache'

    def set_timing_cache(self, cache, ignore_mismatch):
        self.calls.append(('set', cache, ignore_mismatch))


@pytest.mark.parametrize('known', [b'', b'times'])
def test_full_tensorrt_reads_its_timing_cache_and_has_no_targets(tmp_path, known):
    path = tmp_path / 'timing.cache'
    if known:
        path.write_bytes(known)
    config = FakeConfig()
    network = types.SimpleNamespace(
        library=types.SimpleNamespace(flavour=FULL, module=None),
        builder=types.SimpleNamespace(create_builder_config=lambda: config))
    made, flags = tensorrt_build._configure(network, ('90',), path, 'monitor')
    assert made is config
    assert flags == ()
    assert config.calls == [('create', known), ('set', 'cache', False)]
    assert (config.progress_monitor, config.max_aux_streams) == ('monitor', 0)
    assert set(vars(config)) == {'calls', 'progress_monitor', 'max_aux_streams'}
