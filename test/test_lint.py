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
"""Rules that no linter knows: licence headers, import direction, sizes, commands in the docs."""

import ast
from pathlib import Path
import re
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'rspec_planner'
MODULES = sorted(PACKAGE.rglob('*.py'))
SOURCES = sorted([*MODULES, *(ROOT / 'test').rglob('*.py'), *(ROOT / 'launch').glob('*.py'),
                  ROOT / 'setup.py'])

LICENCE_LINES = 13

#: the rooms that a room may import from, besides itself and errors.py
ALLOWED = {
    'model': set(),
    'engine': {'model'},
    'decode': {'model', 'engine'},
    'planner': {'model', 'engine', 'decode'},
    'node': {'model', 'engine', 'decode', 'planner'},
    'world': {'model', 'planner'},
    'train': {'model', 'engine', 'decode', 'planner', 'world', 'evaluate'},
    'evaluate': {'model', 'engine', 'decode', 'planner', 'world'},
    'live': {'model', 'decode', 'planner', 'node', 'world', 'evaluate'},
    'top': {'model', 'engine', 'decode', 'planner', 'node', 'world', 'train', 'evaluate', 'live'},
}
#: files beside the rooms that stand on top; every other one belongs to the node
TOP = {'cli', 'cli_checkpoint', 'cli_engine', 'cli_evaluate', 'cli_profiles',
       'cli_report', 'cli_research', 'cli_trust',
       'doctor', 'doctor_autovla', 'doctor_checkpoint', 'fleet', 'offline', 'offline_bag',
       'offline_observations'}
ROS = re.compile(r'rclpy|rcl_interfaces|\w+_msgs|builtin_interfaces|tf2_ros|ament_index_python')


def imported(path):
    """Yield the dotted names that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f'{path}: relative import'
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def room_of(dotted):
    """Return the room of a module such as 'rspec_planner.world.bag.BagReader'."""
    part = dotted.split('.')[1] if '.' in dotted else ''
    if part in ('errors', '__version__', '__init__', ''):
        return None
    if (PACKAGE / part).is_dir():
        return part
    return 'top' if part in TOP else 'node'


def module_name(path):
    return '.'.join(('rspec_planner', *path.relative_to(PACKAGE).with_suffix('').parts))


def test_every_source_file_is_seen():
    assert {'cli.py', 'errors.py', 'conftest.py', 'setup.py'} <= {p.name for p in SOURCES}


@pytest.mark.parametrize('path', SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sources_carry_the_licence(path):
    head = path.read_text(encoding='utf-8').splitlines()[:12]
    assert head[0].startswith('# Copyright 2')
    assert '# Licensed under the Apache License, Version 2.0 (the "License");' in head


def test_imports_point_one_way():
    wrong = []
    for path in MODULES:
        room = room_of(module_name(path))
        for name in imported(path):
            other = room_of(name) if name.startswith('rspec_planner.') else None
            if room and other not in (None, room) and other not in ALLOWED[room]:
                wrong.append(f'{path.relative_to(ROOT)} ({room}) imports {name} ({other})')
    assert not wrong, '\n'.join(wrong)


def test_only_the_node_and_live_rooms_know_ros():
    wrong = [f'{path.relative_to(ROOT)} imports {name}' for path in MODULES
             if room_of(module_name(path)) not in ('node', 'live')
             for name in imported(path) if ROS.fullmatch(name.split('.')[0])]
    assert not wrong, '\n'.join(wrong)


def test_model_imports_nothing_of_ours_but_errors():
    names = {name for path in (PACKAGE / 'model').glob('*.py') for name in imported(path)
             if name.startswith('rspec_planner.')}
    assert names
    assert {room_of(name) for name in names} <= {None, 'model'}


def function_lines(node):
    """Return the length of a function without its docstring."""
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    spoken = first.end_lineno - first.lineno + 1 if documented else 0
    return node.end_lineno - node.lineno + 1 - spoken


def test_files_and_functions_stay_small():
    wrong = []
    for path in MODULES:
        text = path.read_text(encoding='utf-8')
        lines = len(text.splitlines()) - LICENCE_LINES
        if lines > 400:
            wrong.append(f'{path.relative_to(ROOT)}: {lines} lines')
        wrong += [f'{path.relative_to(ROOT)}:{node.lineno} {node.name}: {function_lines(node)}'
                  for node in ast.walk(ast.parse(text))
                  if isinstance(node, ast.FunctionDef) and function_lines(node) > 45]
    assert not wrong, '\n'.join(wrong)


def test_no_catch_all_modules():
    assert not {p.stem for p in MODULES} & {'utils', 'helpers', 'common', 'misc', 'util'}


def test_ruff_is_content():
    done = subprocess.run([sys.executable, '-m', 'ruff', 'check', '--no-cache', '.'], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_docs_name_commands_that_exist():
    from rspec_planner.cli import cli
    documents = [ROOT / 'README.md', *(ROOT / 'docs').glob('*.md')]
    called = set()
    for path in documents:
        for line in re.findall(r'(?:^|`)\s*(?:\.venv/bin/)?rspec ((?:[a-z][a-z0-9-]+ ?)+)',
                               path.read_text(encoding='utf-8'), re.MULTILINE):
            words = line.split()
            command = cli
            for word in words:
                found = getattr(command, 'commands', {}).get(word)
                assert found or command is not cli, f'{path.name}: rspec {line}'
                assert found or not hasattr(command, 'commands'), f'{path.name}: rspec {line}'
                if found is None:
                    break
                command = found
            called.add(words[0])
    assert {'demo', 'plan', 'record-world', 'replay', 'doctor', 'monitor'} <= called


def test_docs_name_files_and_make_targets_that_exist():
    targets = set(re.findall(r'^([a-z]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
    for path in (ROOT / 'README.md', *(ROOT / 'docs').glob('*.md')):
        text = path.read_text(encoding='utf-8')
        for target in re.findall(r'`make ([a-z]+)', text):
            assert target in targets, f'{path.name}: make {target}'
        for link in re.findall(r'\]\(([^)#]+)(?:#[^)]*)?\)', text):
            if '://' not in link:
                assert (path.parent / link).exists(), f'{path.name} links to {link}'


def test_readme_shows_the_parameters_of_the_schema():
    from rspec_planner.parameters import parameter_table
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    shown = text.split('<!-- parameters: begin')[1].split('-->\n', 1)[1]
    assert shown.split('<!-- parameters: end')[0] == parameter_table()
