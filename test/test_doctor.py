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
import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from rspec_planner import doctor
from rspec_planner.doctor import CHECKS, examine, run_check
from rspec_planner.transport import config_path


def test_report_has_the_promised_shape():
    report = examine()
    assert set(report) == {'ok', 'checks'}
    assert [check['name'] for check in report['checks']] == list(CHECKS)
    for check in report['checks']:
        assert set(check) == {'name', 'ok', 'detail', 'fix'}
        assert check['detail']
        assert '\n' not in check['detail'] + check['fix']
        assert bool(check['fix']) == (not check['ok'])
    assert report['ok'] == all(check['ok'] for check in report['checks'])
    json.dumps(report)


@pytest.mark.parametrize('name', ['python', 'torch', 'opencv', 'rosbags', 'parameters', 'gpu',
                                  'tensorrt'])
def test_what_the_tests_need_themselves_is_found(name):
    check = run_check(name)
    assert check.ok, check


def test_missing_ros_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, 'rclpy', None)  # makes its import fail
    monkeypatch.setitem(sys.modules, 'nav_msgs.msg', None)
    rclpy, messages = run_check('rclpy'), run_check('ros_messages')
    assert not rclpy.ok
    assert 'requirements-ros.txt' in rclpy.fix
    assert not messages.ok
    assert messages.detail == 'missing: nav_msgs'


def test_missing_torch_does_not_stop_the_other_checks(monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    report = {check['name']: check for check in examine()['checks']}
    assert not report['torch']['ok']
    assert 'requirements.txt' in report['torch']['fix']
    assert report['parameters']['ok']
    assert report['gpu']['detail'].startswith('ModuleNotFoundError')


@pytest.mark.parametrize('content, says', [
    ('<dds><segment_size>524288</segment_size></dds>', '0 MiB; below 128 MiB the transport loses '
     'images of four cameras, and their rates at the node are low'),
    ('<dds/>', '0 MiB; below 128 MiB the transport loses'),
    ('<dds>', 'no element|mismatched|unclosed'),
    ('<dds><segment_size>big</segment_size></dds>', 'big'),
    (None, 'No such file'),
])
def test_a_small_or_broken_profile_is_refused(monkeypatch, tmp_path, content, says):
    path = tmp_path / 'own.xml'
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv('FASTDDS_DEFAULT_PROFILES_FILE', str(path))
    monkeypatch.delenv('RMW_IMPLEMENTATION', raising=False)
    check = run_check('fastdds_profile')
    assert not check.ok
    assert str(path) in check.detail
    assert 'FASTDDS_DEFAULT_PROFILES_FILE' in check.fix
    import re
    assert re.search(says, check.detail)


def test_a_shell_without_the_profile_loses_the_images_of_other_programs(monkeypatch):
    monkeypatch.delenv('RMW_IMPLEMENTATION', raising=False)
    monkeypatch.delenv('FASTDDS_DEFAULT_PROFILES_FILE', raising=False)
    check = run_check('fastdds_profile')
    assert check.ok and 'set it for camera drivers too, the transport loses' in check.detail
    monkeypatch.setenv('FASTDDS_DEFAULT_PROFILES_FILE', str(config_path('fastdds.xml')))
    assert run_check('fastdds_profile').detail.endswith('segment 128 MiB')


def test_another_middleware_is_told(monkeypatch):
    monkeypatch.setenv('RMW_IMPLEMENTATION', 'rmw_cyclonedds_cpp')
    check = run_check('fastdds_profile')
    assert check.ok
    assert 'rmw_cyclonedds_cpp' in check.detail


def test_small_shared_memory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, 'disk_usage',
                        lambda path: shutil._ntuple_diskusage(2**26, 0, 2**26))
    check = run_check('shared_memory')
    assert not check.ok
    assert '64 MiB free' in check.detail
    assert '--shm-size' in check.fix
    monkeypatch.setattr(doctor, 'SHARED_MEMORY', tmp_path / 'none')
    assert not run_check('shared_memory').ok


def test_damaged_weights_are_named(monkeypatch, tmp_path):
    import hashlib
    files = {'config.json': b'{}', 'model-00001-of-00001.safetensors': b'abc'}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    (tmp_path / 'manifest.json').write_text(json.dumps({'files': hashes}))
    monkeypatch.setattr(doctor, 'RESOURCE', tmp_path)
    assert run_check('weights').ok
    (tmp_path / 'model-00001-of-00001.safetensors').write_bytes(b'abd')
    check = run_check('weights')
    assert not check.ok
    assert 'model-00001-of-00001.safetensors has sha256' in check.detail
    (tmp_path / 'model-00001-of-00001.safetensors').unlink()
    assert 'cannot be read' in run_check('weights').detail
    assert not run_check('tokenizer').ok


def test_one_core_is_too_few(monkeypatch):
    import os
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0}, raising=False)
    check = run_check('cores')
    assert (check.ok, check.detail) == (False, '1 usable')


def test_a_crash_becomes_a_finding(monkeypatch):
    def crash():
        raise RuntimeError('two\nlines')
    monkeypatch.setitem(doctor.CHECKS, 'memory', (crash, ''))
    check = run_check('memory')
    assert (check.ok, check.detail, check.fix) == (False, 'RuntimeError: two lines',
                                                   'report this')


@pytest.mark.parametrize(('sm', 'names', 'says'), [
    ('', ['tensorrt_rtx'], 'tensorrt_rtx 1.7: builds for 7.5, 8.0, 8.6, 8.9, 12.0, 12.1, runs '
     'nowhere here (no GPU)'),
    ('90', ['tensorrt_rtx'], 'does not run on this GPU (9.0)'),
    ('89', ['tensorrt_rtx'], 'runs on this GPU (8.9)'),
    ('110', ['tensorrt', 'tensorrt_rtx'], 'tensorrt 1.7: builds for the GPU at hand, runs on '
     'this GPU (11.0); tensorrt_rtx'),
    ('', [], 'none'),
])
def test_each_tensorrt_is_told_with_what_it_serves(monkeypatch, sm, names, says):
    from rspec_planner.engine import tensorrt_library
    monkeypatch.setattr(tensorrt_library, 'is_installed', lambda name: name in names)
    monkeypatch.setattr(tensorrt_library, 'present_sm', lambda: sm)
    monkeypatch.setattr(tensorrt_library, 'load_library', lambda name: SimpleNamespace(
        flavour=tensorrt_library.FLAVOURS[name], version='1.7'))
    check = run_check('tensorrt')
    assert check.ok
    assert says in check.detail


def test_a_tensorrt_that_does_not_load_is_a_finding(monkeypatch):
    from rspec_planner.engine import tensorrt_library
    from rspec_planner.errors import EngineError

    def broken(name):
        raise EngineError('libnvinfer.so is missing')
    monkeypatch.setattr(tensorrt_library, 'is_installed', lambda name: True)
    monkeypatch.setattr(tensorrt_library, 'load_library', broken)
    check = run_check('tensorrt')
    assert (check.ok, check.detail) == (False, 'libnvinfer.so is missing')
    assert 'uninstall' in check.fix
