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
import subprocess
import sys
import time

import click
from drives import RIG, StraightDrive
import numpy as np
import pytest

from rspec_planner import __version__
from rspec_planner.cli import cli, main, parse_phases, split_list
from rspec_planner.errors import EngineError
from rspec_planner.world.record import record_world, RecordOptions


@pytest.fixture
def run(capsys):
    """Run `rspec` in this process; return exit code, stdout and stderr."""
    def call(*arguments):
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return code, out, err
    return call


@pytest.fixture
def refused(run):
    """Run `rspec`; expect exit code 2 and one line on stderr, and return the line."""
    def call(*arguments):
        code, out, err = run(*arguments)
        assert code == 2, (out, err)
        assert out == ''
        assert err.startswith('error: ')
        assert err.count('\n') == 1
        return err
    return call


def commands(group=cli, path=()):
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def test_help_needs_neither_torch_nor_ros_and_is_quick():
    code = ('import sys; from rspec_planner.cli import main; main(["--help"]); '
            'sys.exit(any(m in sys.modules for m in ("torch", "rclpy", "numpy", "cv2")))')
    start = time.monotonic()
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0
    assert 'record-world' in done.stdout
    assert time.monotonic() - start < 10.0  # a quarter of a second on an idle machine


@pytest.mark.parametrize('path', [(), *commands()], ids=' '.join)
def test_every_command_has_help(run, path):
    code, out, err = run(*path, '--help')
    assert (code, err) == (0, '')
    assert 'Usage: rspec' in out
    assert len(out.split('\n\n')[1].strip()) > 10


@pytest.mark.parametrize('path', [p for p in commands()], ids=' '.join)
def test_every_subcommand_takes_json(path):
    command = cli
    for word in path:
        command = command.commands[word]
    if not isinstance(command, click.Group):
        assert '--json' in [o for p in command.params for o in p.opts]


def test_version_in_both_forms(run):
    code, out, _ = run('version', '--json')
    assert code == 0
    assert json.loads(out.splitlines()[-1])['version'] == __version__
    code, out, _ = run('version')
    assert (code, out.splitlines()[0]) == (0, f'version: {__version__}')


@pytest.mark.parametrize('arguments, says', [
    (['nope'], "No such command 'nope'"),
    (['plan'], "Missing argument 'BAG...'"),
    (['plan', 'x.mcap', '--bogus'], "No such option '--bogus'"),
    (['plan', 'x.mcap'], 'x.mcap does not exist'),
    (['plan', '/'], 'has no metadata.yaml'),
    (['plan', 'x.mcap', '--params', 'y.yaml'], 'y.yaml cannot be read'),
    (['plan', 'x.mcap', '--seed', '-5'], "'model.seed' is -5"),
    (['plan', 'x.mcap', '--records', '.'], 'is a folder'),
    (['replay', 'x.mcap'], 'x.mcap does not exist'),
    (['monitor', '--seconds', '-1'], 'seconds -1'),
    (['monitor', '--namespace', 'bad name'], "'bad name': "),
    (['record-world', 'a.mcap', '--seconds', 'x'], "'x' is not a valid float"),
    (['record-world', 'a.mcap', '--seconds', 'inf'], 'seconds inf is out of range'),
    (['demo', '--pictures', '-1'], 'pictures -1'),
    (['record-world', 'a.mcap', '--encoding', 'bmp'], "encoding 'bmp' is unknown"),
    (['record-world', 'a.mcap', '--drop', '2'], 'drop 2'),
    (['record-world', 'a.mcap', '--seed', '-1'], 'seed -1 is negative'),
    (['record-world', 'a.mcap', '--phase-ms', 'front'], "'front' is not CAMERA=MILLISECONDS"),
    (['record-world', 'a.mcap', '--phase-ms', 'front=3'], "camera 'front'"),
    (['eval', 'driving', '--split', 'moon'], "split 'moon' is unknown"),
    (['bench', 'frame', '--frames', '0'], 'frames 0'),
    (['train', 'target', '--config', 'nope.yaml'], 'nope.yaml'),
    (['train', 'target', '--batch-clips', '3'], 'batch_clips'),
])
def test_bad_arguments_are_one_line(refused, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert says in refused(*arguments)


def test_truncated_and_foreign_bags_are_one_line(refused, tmp_path):
    (tmp_path / 'cut.mcap').write_bytes(b'\x89MCAP0\r\n' + b'\x01' * 40)
    assert 'truncated or damaged' in refused('plan', tmp_path / 'cut.mcap')
    (tmp_path / 'empty.mcap').touch()
    assert 'empty file' in refused('plan', tmp_path / 'empty.mcap')
    (tmp_path / 'note.txt').touch()
    assert 'neither .mcap nor .db3' in refused('plan', tmp_path / 'note.txt')


def test_a_misspelt_parameter_is_named(refused, tmp_path):
    from rspec_planner.transport import config_path
    text = config_path('rspec_planner.param.yaml').read_text()
    path = tmp_path / 'own.yaml'
    path.write_text(text.replace('num_samples', 'num_sample'))

    record_world(tmp_path / 'a.mcap', StraightDrive(), 0.5, RecordOptions(), rig=RIG)
    line = refused('plan', tmp_path / 'a.mcap', '--params', path)
    assert "'planning.num_sample'" in line
    assert "did you mean 'planning.num_samples'" in line
    assert 'own.yaml' in line


def fail_with(monkeypatch, error):
    def examine():
        raise error
    monkeypatch.setattr('rspec_planner.doctor.examine', examine)


@pytest.mark.parametrize('error, code, says', [
    (EngineError('a.safetensors: wrong'), 2, 'a.safetensors: wrong'),
    (ModuleNotFoundError("No module named 'rclpy'", name='rclpy'), 2, 'requirements-ros.txt'),
    (ModuleNotFoundError("No module named 'torch'", name='torch'), 2, 'download.pytorch.org'),
    (PermissionError(13, 'Permission denied', '/a/b'), 2, '/a/b: Permission denied'),
    (ValueError('odd\nvalue'), 1, 'unexpected ValueError: odd value; set RSPEC_TRACEBACK=1'),
    (KeyboardInterrupt(), 130, 'interrupted'),
])
def test_failures_are_one_line_with_a_remedy(run, monkeypatch, error, code, says):
    monkeypatch.delenv('RSPEC_TRACEBACK', raising=False)
    fail_with(monkeypatch, error)
    got, out, err = run('doctor', '--json')
    assert (got, out) == (code, '')
    assert says in err
    assert err.strip().count('\n') == 0  # click itself ends the ^C line


def test_traceback_on_request(monkeypatch):
    fail_with(monkeypatch, ValueError('odd'))
    monkeypatch.setenv('RSPEC_TRACEBACK', '1')
    with pytest.raises(ValueError, match='odd'):
        main(['doctor'])


@pytest.mark.parametrize('ok, code', [(True, 0), (False, 1)])
def test_doctor_reports_and_exits(run, monkeypatch, ok, code):
    check = {'name': 'memory', 'ok': ok, 'detail': np.str_('1 MiB'), 'fix': '' if ok else 'buy'}
    monkeypatch.setattr('rspec_planner.doctor.examine', lambda: {'ok': ok, 'checks': [check]})
    got, out, _ = run('doctor', '--json')
    assert got == code
    assert json.loads(out)['checks'][0]['detail'] == '1 MiB'
    got, out, _ = run('doctor')
    assert got == code
    assert out == ('ok   memory: 1 MiB\n' if ok else 'FAIL memory: 1 MiB\n     -> buy\n')


def test_reports_for_people_show_nested_values(run, monkeypatch):
    report = {'plans': 3, 'skipped': {'history_short': 12}, 'accepted_length': np.float64(1.5),
              'frame_ms': {'p50': 80.12345}, 'records': 'a', 'pictures': [], 'list': ['x', 'y']}
    monkeypatch.setattr('rspec_planner.offline.plan_bag', lambda *a, **k: report)
    code, out, _ = run('plan', 'a.mcap')
    assert code == 0
    assert out.splitlines() == [
        'plans: 3', 'skipped:', '  history_short: 12', 'accepted_length: 1.5', 'frame_ms:',
        '  p50: 80.12', 'records: a', 'pictures: none', 'list:', '  - x', '  - y']


def test_only_the_first_rank_prints(run, monkeypatch):
    monkeypatch.setenv('RANK', '1')
    assert run('version', '--json') == (0, '', '')


def test_lists_and_phases_are_parsed():
    assert split_list(['a,b', ' c ', '']) == ['a', 'b', 'c']
    assert parse_phases(['front_tele=5, cross_left=-2.5']) == {'front_tele': 5.0,
                                                               'cross_left': -2.5}
