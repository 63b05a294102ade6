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
import ast
import configparser
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree
import zipfile

import pytest

from rspec_planner import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'rspec_planner'

#: import name -> distribution, where they differ
DISTRIBUTIONS = {'cuda': 'cuda-bindings', 'cv2': 'opencv-python-headless', 'yaml': 'PyYAML',
                 'PIL': 'pillow',
                 'mcap_ros2': 'mcap-ros2-support'}
#: from a ROS installation or its wheels; launch files run under ROS only
ROS_MODULES = re.compile(r'rclpy|rcl_interfaces|builtin_interfaces|\w+_msgs|launch|launch_ros'
                         r'|ament_index_python|rosidl_\w+')
#: imported where they are needed, each with its own remedy: runtimes, and baselines of benches
OPTIONAL = {'tensorrt', 'tensorrt_rtx', 'dflash', 'transformers'}

needs_make = pytest.mark.skipif(shutil.which('make') is None, reason='make is not installed')


def top_level_imports(folder):
    """Return the first parts of all imported names below a folder."""
    names = set()
    for path in (ROOT / folder).rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split('.')[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split('.')[0])
    return names


@pytest.fixture(scope='module')
def manifest():
    return ElementTree.parse(ROOT / 'package.xml').getroot()


def test_manifest_agrees_with_the_package(manifest):
    assert manifest.get('format') == '3'
    assert manifest.findtext('name') == 'rspec_planner'
    assert manifest.findtext('version') == __version__
    assert manifest.findtext('license') == 'Apache-2.0'
    assert manifest.findtext('export/build_type') == 'ament_python'
    assert '\n' not in manifest.findtext('description')


def test_manifest_declares_every_ros_package_that_is_imported(manifest):
    declared = [e.text for e in manifest.findall('exec_depend')]
    assert declared == sorted(declared)
    used = {n for n in top_level_imports('rspec_planner') | top_level_imports('launch')
            if ROS_MODULES.fullmatch(n)} - {'builtin_interfaces', 'launch', 'launch_ros'}
    assert used <= set(declared)
    assert 'ros2launch' in declared


def test_requirements_are_pinned_and_complete():
    pinned = {}
    for path in sorted(ROOT.glob('requirements*.txt')):
        for line in path.read_text().splitlines():
            text = line.split('#')[0].strip()
            if text and not text.startswith('-r '):
                match = re.fullmatch(r'([A-Za-z0-9_.-]+)(\[\w+\])?==[\w.]+(; .+)?', text)
                assert match, f'{path.name}: {line}'
                pinned.setdefault(path.name, set()).add(match[1].lower())
    ours = {'rspec_planner'} | {p.stem for p in (ROOT / 'test').rglob('*.py')}

    def missing(folder, files):
        have = set().union(*(pinned[f] for f in files))
        return sorted(n for n in top_level_imports(folder) - sys.stdlib_module_names - ours
                      if not ROS_MODULES.fullmatch(n) and n not in OPTIONAL
                      and DISTRIBUTIONS.get(n, n).lower() not in have)
    run_time = ['requirements.txt', 'requirements-engine.txt', 'requirements-cuda.txt',
                'requirements-data.txt', 'requirements-fleet.txt']
    assert missing('rspec_planner', run_time) == []
    assert missing('test', [*run_time, 'requirements-dev.txt']) == []


def test_executables_go_where_ros_looks():
    config = configparser.ConfigParser()
    config.read(ROOT / 'setup.cfg')
    assert config['develop']['script_dir'] == '$base/lib/rspec_planner'
    assert config['install']['install_scripts'] == '$base/lib/rspec_planner'


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """Build the wheel without leaving a trace in the source tree."""
    made = tmp_path_factory.mktemp('wheel')
    done = subprocess.run(
        [sys.executable, 'setup.py', '-q', 'egg_info', '-e', made, 'build', '-b', made / 'build',
         'bdist_wheel', '-b', made / 'tree', '-d', made], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(made.glob('*.whl'))) as archive:
        yield archive


def test_wheel_holds_code_resources_and_share_folder(wheel):
    names = set(wheel.namelist())
    share = 'rspec_planner-0.1.0.data/data/share'
    for path in PACKAGE.rglob('*.py'):
        assert str(path.relative_to(ROOT)) in names
    resources = [p for p in (PACKAGE / 'resource').rglob('*') if p.is_file()]
    assert {str(p.relative_to(ROOT)) for p in resources} <= names
    assert f'{share}/ament_index/resource_index/packages/rspec_planner' in names
    assert f'{share}/rspec_planner/package.xml' in names
    for folder in ('launch', 'config'):
        kept = [p.name for p in (ROOT / folder).iterdir() if p.is_file()]
        assert kept
        assert {f'{share}/rspec_planner/{folder}/{name}' for name in kept} <= names
    assert not [n for n in names if n.startswith('test/') or n.endswith('.pyc')]


def test_console_scripts_point_to_functions_that_exist(wheel):
    name = next(n for n in wheel.namelist() if n.endswith('entry_points.txt'))
    config = configparser.ConfigParser()
    config.read_string(wheel.read(name).decode())
    scripts = dict(config['console_scripts'])
    assert set(scripts) == {'rspec', 'rspec_planner_node'}
    for target in scripts.values():
        module, function = target.split(':')
        tree = ast.parse((ROOT / (module.replace('.', '/') + '.py')).read_text())
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


def fake_python(path, *, version_ok, venv_ok):
    """Write a program that answers the Makefile's questions like some other Python."""
    path.write_text(f"""#!/bin/sh
case "$*" in
  *--version*) echo Python 3.9.2 ;;
  *version_info\\[:2\\]*) exit {0 if version_ok else 1} ;;
  *ensurepip*) exit {0 if venv_ok else 1} ;;
  *python3.%d-venv*) echo python3.11-venv ;;
  *) echo unexpected: "$*" >&2; exit 9 ;;
esac
""")
    path.chmod(0o755)
    return path


def make(*arguments, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith('MAKE')}
    return subprocess.run(['make', *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True, env={**kept, **environment})


@needs_make
@pytest.mark.parametrize('version_ok, venv_ok, says', [
    (False, True, 'is Python 3.9.2; Python 3.11 to 3.13 is needed: sudo apt-get install'),
    (True, False, 'cannot make virtual environments: sudo apt-get install python3.11-venv'),
])
def test_an_unfit_python_is_one_line_with_the_apt_command(tmp_path, version_ok, venv_ok, says):
    python = fake_python(tmp_path / 'python', version_ok=version_ok, venv_ok=venv_ok)
    done = make('venv', f'PYTHON={python}', f'VENV={tmp_path}/venv')
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if not line.startswith('make')]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: '{python}'")
    assert says in lines[0]
    assert not (tmp_path / 'venv').exists()


@needs_make
def test_a_python_that_does_not_exist_is_named(tmp_path):
    done = make('venv', 'PYTHON=python-of-nowhere', f'VENV={tmp_path}/venv')
    assert done.returncode != 0
    assert "error: 'python-of-nowhere'" in done.stderr
    assert 'apt-get install' in done.stderr


@needs_make
def test_ros_wheels_stay_out_where_ros_is_sourced(tmp_path):
    def steps(**environment):
        done = make('-n', 'venv', f'VENV={tmp_path}/venv', **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout
    assert 'if [ -n "kilted" ]' in steps(ROS_DISTRO='kilted')
    assert 'if [ -n "" ]' in steps(ROS_DISTRO='')
    assert steps().index('torch==') < steps().index('requirements-ros.txt')


@needs_make
def test_help_lists_the_targets():
    done = make('help')
    for target in ('venv', 'demo', 'test', 'lint', 'clean'):
        assert f'make {target}' in done.stdout


def test_ci_runs_make_test():
    script = ROOT / '.ci' / 'run'
    assert os.access(script, os.X_OK)
    assert 'make test' in script.read_text()
