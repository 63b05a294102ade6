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
"""
The launch files are run against stand-ins of `launch` and `launch_ros`.

No wheels of those packages exist; the stand-ins record what a file asks for. With a ROS
installation the same files are also loaded by the real packages.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
import sys
import types

import pytest
import yaml

from rspec_planner.command_line import camera_topic, default_remaps, ros_arguments
from rspec_planner.parameters import is_ros_parameter, schema_fields
from rspec_planner.planner.camera_roles import ROLES
from rspec_planner.planner.timing import STAGES
from rspec_planner.transport import config_path

SPECULATION = ('iterations', 'mean_accepted_length', 'tokens_per_second', 'reused_tokens',
               'draft_ms', 'verify_ms')
FOLDER = Path(__file__).resolve().parents[1] / 'launch'
FILES = sorted(FOLDER.glob('*.launch.py'))


class Action:
    """Whatever a launch file creates: its class, positional and keyword arguments."""

    def __init__(self, kind, args, options):
        self.kind, self.args, self.options = kind, args, options

    def items(self):
        return self.args

    def perform(self, context):
        return context[self.args[0]]


def stand_ins():
    modules = {
        'launch': ['LaunchDescription'],
        'launch.actions': ['DeclareLaunchArgument', 'SetEnvironmentVariable', 'EmitEvent',
                           'ExecuteProcess', 'IncludeLaunchDescription', 'OpaqueFunction',
                           'RegisterEventHandler'],
        'launch.conditions': ['IfCondition', 'LaunchConfigurationNotEquals'],
        'launch.event_handlers': ['OnProcessExit'],
        'launch.events': ['Shutdown'],
        'launch.launch_description_sources': ['PythonLaunchDescriptionSource'],
        'launch.substitutions': ['LaunchConfiguration'],
        'launch_ros': [],
        'launch_ros.actions': ['Node'],
        'launch_ros.parameter_descriptions': ['ParameterValue'],
    }
    made = {}
    for name, kinds in modules.items():
        made[name] = types.ModuleType(name)
        for kind in kinds:
            setattr(made[name], kind,
                    lambda *args, _kind=kind, **options: Action(_kind, args, options))
    return made


def load(path):
    """Return the actions of a launch file that is run against the stand-ins."""
    spec = importlib.util.spec_from_file_location(path.stem.replace('.', '_'), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.generate_launch_description().args[0]


def expanded(actions, values):
    """Return the actions with those that functions add for the values of the arguments."""
    made = []
    for action in actions:
        made += action.options['function'](values) if action.kind == 'OpaqueFunction' else [action]
    return made


def defaults_of(actions):
    return {name: options['default_value'] for name, options in arguments_of(actions).items()
            if 'default_value' in options}


class Asked(dict):
    """Values of arguments that remembers which ones were asked for."""

    def __missing__(self, name):
        self[name] = ''
        return ''


@pytest.fixture
def described(monkeypatch):
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    return load


def arguments_of(actions):
    return {action.args[0]: action.options for action in actions
            if action.kind == 'DeclareLaunchArgument'}


def used_configurations(thing, found):
    """Collect the names of all LaunchConfigurations below an action."""
    if isinstance(thing, Action):
        if thing.kind == 'OpaqueFunction':
            asked = Asked()
            used_configurations(thing.options['function'](asked), found)
            found.update(asked)
            return found
        if thing.kind in ('LaunchConfiguration', 'LaunchConfigurationNotEquals'):
            found.add(thing.args[0])
        for part in (*thing.args, *thing.options.values()):
            used_configurations(part, found)
    elif isinstance(thing, dict):
        for part in thing.items():
            used_configurations(part, found)
    elif isinstance(thing, (list, tuple)) or type(thing).__name__ == 'dict_items':
        for part in thing:
            used_configurations(part, found)
    return found


def test_there_are_three_launch_files():
    assert [path.name for path in FILES] == ['demo.launch.py', 'planner.launch.py',
                                             'replay.launch.py']


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.name)
def test_every_argument_is_described_and_every_used_one_declared(described, path):
    actions = described(path)
    declared = arguments_of(actions)
    for name, options in declared.items():
        assert options['description'].endswith('.'), name
    assert used_configurations(actions, set()) == set(declared)


def planner_of(actions, **given):
    values = defaults_of(actions) | given
    return next(action for action in expanded(actions, values) if action.kind == 'Node'
                and action.options['package'] == 'rspec_planner')


def test_each_parameter_passed_is_declared_by_the_node(described):
    passed = [part for part in planner_of(described(FOLDER / 'planner.launch.py'))
              .options['parameters'] if isinstance(part, dict)]
    names = {name for part in passed for name in part}
    assert names == {'use_sim_time', 'autostart'}
    for name in names:
        assert name in schema_fields() or is_ros_parameter(name)


def test_remaps_are_those_of_the_node_without_launch(described):
    remaps = dict(planner_of(described(FOLDER / 'planner.launch.py')).options['remappings'])
    assert remaps.pop('~/input/odometry') == default_remaps()['~/input/odometry']
    # cameras are left to the node, which knows their roles; what is not an input of the vehicle
    # keeps its own name, so that it follows the namespace
    assert remaps == {
        name: name for name in ('~/input/navigation_text', '~/output/path', '~/output/trajectory',
                                '~/output/trajectories', '~/output/reasoning',
                                '~/output/stop_trajectory')}


@pytest.mark.parametrize('count', [1, 5, 6, 7])
def test_as_many_cameras_can_be_mapped_as_there_are_roles(described, count):
    actions = described(FOLDER / 'planner.launch.py')
    given = {f'input_{kind}{place}': f'/my/{kind}{place}'
             for kind in ('image', 'camera_info') for place in range(count)}
    assert set(given) <= set(arguments_of(actions))
    remaps = dict(planner_of(actions, **given).options['remappings'])
    assert {name.removeprefix('~/').replace('/', '_'): topic for name, topic in remaps.items()
            if topic.startswith('/my/')} == given
    assert len([name for name in remaps if '/image' in name]) == count
    # the node's own defaults come behind, so that a mapping wins and the others go by role
    ids = list(range(count))
    full = ros_arguments(['--ros-args', '-p', f'cameras.ids:={ids}', '-r',
                          f'~/input/image{count - 1}:=/my/last'])
    last = [part for part in full if part.startswith(f'~/input/image{count - 1}:=')]
    assert last[0].endswith('/my/last') and len(last) == 2
    assert f'~/input/image0:={camera_topic(ROLES[0].name)}' in full


def test_included_files_get_arguments_that_they_declare(described):
    known = set(arguments_of(described(FOLDER / 'planner.launch.py')))
    for name in ('demo.launch.py', 'replay.launch.py'):
        (include,) = [action for action in described(FOLDER / name)
                      if action.kind == 'IncludeLaunchDescription']
        assert {key for key, _ in include.options['launch_arguments']} <= known


def test_the_camera_transport_is_set_before_the_node(described):
    kinds = [action.kind for action in described(FOLDER / 'planner.launch.py')]
    assert kinds.index('SetEnvironmentVariable') < kinds.index('Node')


def test_processes_are_modules_of_this_package(described):
    for path in FILES:
        for action in described(path):
            if action.kind == 'ExecuteProcess':
                module = action.options['cmd'][2]
                assert importlib.util.find_spec(module) is not None, module


def test_launch_packages_are_imported_only_in_launch_files():
    package = FOLDER.parent / 'rspec_planner'
    for path in package.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                [node.module or ''] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split('.')[0] in ('launch', 'launch_ros') for name in names), path


#: what the node publishes and hears, of all that a layout may show
TOPICS = {*default_remaps().values(), '/diagnostics',
          *(f'/planning/rspec_planner/{name}' for name in (
              'output/path', 'output/trajectory', 'output/reasoning', 'debug/marker',
              'debug/candidates', 'debug/image_overlay/compressed', 'debug/processing_time_ms',
              'debug/pipeline_latency_ms', 'debug/cyclic_time_ms',
              *(f'debug/{stage}/processing_time_ms' for stage in STAGES),
              *(f'debug/speculation/{name}' for name in SPECULATION)))}


def displays(name):
    content = yaml.safe_load(config_path(name).read_text(encoding='utf-8'))
    return content['Visualization Manager']['Displays']


@pytest.mark.parametrize('name, plugins', [
    ('rspec_planner.rviz', {'rviz_default_plugins'}),
    ('rspec_planner_autoware.rviz', {'rviz_default_plugins', 'rviz_plugins',
                                     'autoware_string_stamped_rviz_plugin'})])
def test_rviz_layouts_listen_to_topics_of_the_node_with_their_qos(name, plugins):
    shown = displays(name)
    assert {display['Class'].split('/')[0] for display in shown} == plugins
    topics = {display['Name']: display['Topic'] for display in shown if 'Topic' in display}
    assert len(topics) >= 6
    for topic in topics.values():
        assert topic['Value'] in TOPICS
        assert {'Depth', 'Durability Policy', 'History Policy', 'Reliability Policy'} < set(topic)
        # a reliable reader hears nothing from a best-effort camera, overlay or odometry
        reliable = topic['Value'].startswith('/planning') and 'image' not in topic['Value']
        assert topic['Reliability Policy'] == ('Reliable' if reliable else 'Best Effort')


def test_rviz_shows_every_namespace_of_the_markers():
    pytest.importorskip('rclpy', reason='rclpy is not installed (requirements-ros.txt)')
    from node_rig import plan_at, turned

    from rspec_planner.markers import plan_markers
    from rspec_planner.parameters import VehicleParameters
    made = plan_markers(plan_at(turned(0.0)), 'odometry', 0.1, VehicleParameters(4.8, 1.9, 1.0))
    for name in ('rspec_planner.rviz', 'rspec_planner_autoware.rviz'):
        (shown,) = [display for display in displays(name)
                    if display['Class'] == 'rviz_default_plugins/MarkerArray']
        assert set(shown['Namespaces']) == {marker.ns for marker in made.markers}


def panels(layout):
    return [layout] if isinstance(layout, str) else \
        panels(layout['first']) + panels(layout['second'])


def topics_in(thing):
    if isinstance(thing, dict):
        return {topic for pair in thing.items() for part in pair for topic in topics_in(part)}
    if isinstance(thing, list):
        return {topic for part in thing for topic in topics_in(part)}
    return {thing.removesuffix('.data')} if isinstance(thing, str) and thing[:1] == '/' else set()


def test_foxglove_layout_shows_every_panel_once_and_known_topics_only():
    text = config_path('rspec_planner.foxglove.json').read_text(encoding='utf-8')
    content = json.loads(text)
    assert sorted(panels(content['layout'])) == sorted(content['configById'])
    assert {panel.split('!')[0] for panel in content['configById']} == {
        '3D', 'Image', 'RawMessages', 'Plot', 'DiagnosticSummary', 'DiagnosticStatusPanel'}
    assert topics_in(content['configById']) <= TOPICS
    assert TOPICS - topics_in(content['configById']) <= {
        *default_remaps().values(), '/planning/rspec_planner/output/trajectory',
        *(f'/planning/rspec_planner/debug/speculation/{name}'
          for name in ('tokens_per_second', 'draft_ms', 'verify_ms'))}


def test_the_topics_of_the_layouts_are_published():
    pytest.importorskip('rclpy', reason='rclpy is not installed (requirements-ros.txt)')
    from rspec_planner import outputs, overlay_publisher
    text = ''.join(Path(module.__file__).read_text(encoding='utf-8')
                   for module in (outputs, overlay_publisher))
    for topic in TOPICS - {*default_remaps().values(), '/diagnostics'}:
        name = topic.removeprefix('/planning/rspec_planner/')
        assert f"'~/{name}'" in text or name.rsplit('/', 1)[-1] in text, topic


def test_the_docs_name_every_argument_and_its_default(described):
    rows = [[cell.strip() for cell in line.strip('|\n').split('|')]
            for line in (FOLDER.parent / 'docs' / 'integration.md').read_text().splitlines()
            if line.startswith('| `')]
    for path in FILES:
        (start,) = [i for i, row in enumerate(rows) if row[0] == f'`{path.name}`'] or [None]
        for name, options in arguments_of(described(path)).items():
            numbered = f'`{name[:-1]}0` ...'
            row = next((row for row in rows[start:]
                        if f'`{name}`' in row[0] or numbered in row[0]), None)
            assert row is not None, f'{path.name}: {name}'
            default = options.get('default_value', '')
            assert not default.isalnum() or f'`{default}`' in row[1], f'{path.name}: {name}'


@pytest.mark.skipif(importlib.util.find_spec('launch_ros') is None,
                    reason='launch_ros is missing: it comes with a ROS installation only')
@pytest.mark.parametrize('path', FILES, ids=lambda path: path.name)
def test_real_launch_loads_the_file(path):
    from launch import LaunchContext
    from launch.launch_description_sources import PythonLaunchDescriptionSource
    source = PythonLaunchDescriptionSource(str(path))
    assert source.get_launch_description(LaunchContext()).entities
