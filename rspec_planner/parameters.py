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
Parameters of the node: YAML values, checked against one JSON schema, read into frozen dataclasses.

The schema is the only place that knows names, types, units and bounds; the YAML is the only place
that holds values. Nothing here imports rclpy (parameter_handler.py does), so that the command
line can check a parameter file without ROS.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
import difflib
import functools
import json
import math
from pathlib import Path
import reprlib
from typing import Any, get_type_hints

import jsonschema

from rspec_planner.errors import ConfigurationError
from rspec_planner.parameter_groups import (
    CameraParameters,
    DeadlineParameters,
    DebugParameters,
    EngineParameters,
    GuardParameters,
    ModelParameters,
    OutputParameters,
    PlanningParameters,
    raise_problems,
    SpeculationParameters,
    SyncParameters,
    VehicleParameters,
)
from rspec_planner.transport import config_path
from rspec_planner.yaml_file import read_yaml

__all__ = ['CameraParameters', 'VehicleParameters', 'raise_problems']  # defined elsewhere

NODE_NAME = 'rspec_planner'
PARAMETER_FILE = 'rspec_planner.param.yaml'
SCHEMA_FILE = 'rspec_planner.schema.json'

#: names (or prefixes) that rclpy itself declares and that a file may hold beside ours
_ROS_PARAMETERS = ('use_sim_time', 'start_type_description_service', 'qos_overrides')


@dataclass(frozen=True)
class ParameterField:
    """One parameter as the schema describes it."""

    name: str  # dotted, e.g. 'planning.rate_hz'
    schema: Mapping[str, Any]
    unit: str
    description: str
    runtime: bool  # may be set while the node runs; everything else is read-only

    @property
    def type_name(self) -> str:
        """Return the YAML type, for example 'number' or 'array of string'."""
        kind = str(self.schema['type'])
        return f"array of {self.schema['items']['type']}" if kind == 'array' else kind

    @property
    def limits(self) -> str:
        """Return the allowed values as one phrase, '' when anything of the type goes."""
        rules = self.schema.get('items', self.schema)
        if 'enum' in rules:
            return ', '.join(f'`{value}`' for value in rules['enum'])
        if 'minimum' in rules:
            return f"{rules['minimum']} to {rules['maximum']}"
        return ''

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value as one clause, or None."""
        if isinstance(value, tuple):
            value = list(value)
        if self.type_name == 'number' and type(value) is int:
            brief = _brief(value)
            return f"'{self.name}' is the integer {brief}; write {brief}.0"
        if isinstance(value, float) and math.isnan(value):  # passes every bound of JSON Schema
            return f"'{self.name}' is nan; give a number ({self.limits})"
        errors = sorted(jsonschema.Draft7Validator(self.schema).iter_errors(value),
                        key=lambda error: list(error.absolute_path))
        if not errors:
            return None
        error = errors[0]
        place = ''.join(f'[{step}]' for step in error.absolute_path)
        limits = f' ({self.limits.replace("`", chr(39))})' if self.limits else ''
        if error.validator == 'pattern':
            limits = f' ({self.description.rstrip(".")})'
        return (f"'{self.name}{place}' is {_brief(error.instance)}; give "
                f'{_article(self.type_name)}{limits}')


def _brief(value: Any) -> str:
    """Return a value for a message, which somebody may have made as long as they like."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    text = short.repr(value)
    return text if len(text) <= 100 else f'{text[:97]}...'


def _article(type_name: str) -> str:
    return f"{'an' if type_name[0] in 'aeiou' else 'a'} {type_name}"


@functools.cache
def load_schema() -> dict[str, Any]:
    """Return the shipped JSON schema (draft-07) of the whole parameter file."""
    path = config_path(SCHEMA_FILE)
    schema: dict[str, Any] = json.loads(path.read_text(encoding='utf-8'))
    jsonschema.Draft7Validator.check_schema(schema)
    return schema


def _walk(schema: Mapping[str, Any], prefix: str = '') -> Iterator[ParameterField]:
    for key, entry in schema['properties'].items():
        name = f'{prefix}{key}'
        if entry['type'] == 'object':
            yield from _walk(entry, f'{name}.')
        else:
            yield ParameterField(name, entry, entry['unit'], entry['description'],
                                 bool(entry.get('runtime', False)))


@functools.cache
def schema_fields() -> Mapping[str, ParameterField]:
    """Return every parameter by dotted name, in the order of the schema."""
    body = load_schema()['definitions'][NODE_NAME]
    return {field.name: field for field in _walk(body)}


def is_ros_parameter(name: str) -> bool:
    """Return whether rclpy declares this parameter itself."""
    return name.split('.')[0] in _ROS_PARAMETERS


def unknown_parameter(name: str, source: str) -> str:
    """Return the line for a key that nothing declares: key, file and nearest valid key."""
    name = name if name.isprintable() and len(name) <= 80 else _brief(name)
    leaves = {field.rsplit('.', 1)[-1]: field for field in schema_fields()}
    near = difflib.get_close_matches(name, schema_fields(), n=1, cutoff=0.6)
    # A right key in the wrong group is far away as a whole string; compare the last part too.
    near = near or [leaves[leaf] for leaf in difflib.get_close_matches(
        name.rsplit('.', 1)[-1], leaves, n=1, cutoff=0.6)]
    remedy = f"did you mean '{near[0]}'?" if near else \
        f'remove it; valid keys are in {SCHEMA_FILE}'
    return f"unknown parameter '{name}' in {source}; {remedy}"


def value_problems(values: Mapping[str, Any], source: str) -> list[str]:
    """Return one clause for each unknown key and each value outside its type or bounds."""
    problems = []
    for name, value in values.items():
        field = schema_fields().get(name)
        if field is None:
            if not is_ros_parameter(name):
                problems.append(unknown_parameter(name, source))
            continue
        problem = field.problem(value)
        if problem:
            problems.append(f'{problem} (in {source})')
    return problems


def missing_problems(names: Iterable[str], source: str) -> list[str]:
    """Return one clause for each schema key that `names` lacks."""
    present = set(names)
    return [f"parameter '{name}' is missing in {source}; copy it from {PARAMETER_FILE}"
            for name in schema_fields() if name not in present]


def _flatten(tree: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f'{prefix}{key}.')
        else:
            yield f'{prefix}{key}', value


def _sections(tree: Mapping[str, Any], path: str = '') -> Iterator[tuple[str, Any]]:
    """Yield (node name pattern, parameters); namespaces may be nested or joined by slashes."""
    for key, value in tree.items():
        if key == 'ros__parameters':
            yield path, value or {}
        elif isinstance(value, Mapping):
            yield from _sections(value, f'{path}/{key}'.replace('//', '/'))


def read_parameter_file(path: str | Path, *, node_name: str = NODE_NAME) -> dict[str, Any]:
    """
    Return the values that a ROS parameter file holds for this node, by dotted name.

    Nothing is checked but the file's form; sections of other nodes are left out. Raises
    ConfigurationError for a file that is missing, no YAML, or without `ros__parameters`.
    """
    tree = read_yaml(path, 'parameter file')
    sections = list(_sections(tree)) if isinstance(tree, Mapping) else []
    if not sections:
        raise ConfigurationError(f"parameter file '{path}' has no '/**: ros__parameters:' "
                                 f'section; start from {PARAMETER_FILE}')
    values: dict[str, Any] = {}
    for pattern, body in sections:
        if not isinstance(body, Mapping):
            raise ConfigurationError(f"parameter file '{path}': 'ros__parameters' is "
                                     f'{_brief(body)}; give a mapping of names, as in '
                                     f'{PARAMETER_FILE}')
        if pattern.rsplit('/', 1)[-1] in ('**', '*', node_name):
            values.update(_flatten(body))
    return values


def load_yaml_parameters(path: str | Path, *, partial: bool = False,
                         node_name: str = NODE_NAME) -> dict[str, Any]:
    """
    Return the checked values of a parameter file, by dotted name.

    With `partial` keys may be missing (a file that overrides a few values of another one).
    Raises ConfigurationError with every problem on one line.
    """
    values = read_parameter_file(path, node_name=node_name)
    problems = value_problems(values, str(path))
    if not partial:
        problems += missing_problems(values, str(path))
    raise_problems(problems)
    return values


def parameter_files(arguments: Sequence[str]) -> list[Path]:
    """Return the files named by `--params-file` on a ROS command line, in order."""
    return [Path(arguments[i + 1]) for i, argument in enumerate(arguments[:-1])
            if argument == '--params-file']


def parameter_table() -> str:
    """Return the README table of all parameters in Markdown, with the shipped values."""
    shipped = read_parameter_file(config_path(PARAMETER_FILE))
    lines = ['| Parameter | Type | Shipped | Unit | Allowed | Runtime | Meaning |',
             '|---|---|---|---|---|---|---|']
    for field in schema_fields().values():
        value = json.dumps(shipped.get(field.name)).replace('"', '')
        lines.append(f"| `{field.name}` | {field.type_name} | `{value}` | {field.unit} "
                     f"| {field.limits or '-'} | {'yes' if field.runtime else 'no'} "
                     f'| {field.description} |')
    return '\n'.join(lines) + '\n'


@dataclass(frozen=True)
class NodeParameters:
    """Everything that the YAML decides; swapped as a whole between two cycles."""

    autostart: bool
    model: ModelParameters
    engine: EngineParameters
    cameras: CameraParameters
    sync: SyncParameters
    planning: PlanningParameters
    speculation: SpeculationParameters
    deadline: DeadlineParameters
    guard: GuardParameters
    output: OutputParameters
    vehicle: VehicleParameters
    debug: DebugParameters

    def __post_init__(self) -> None:
        if self.engine.backend != 'torch' and self.model.device == 'cpu':
            raise ConfigurationError(f"'model.device' is cpu and 'engine.backend' is "
                                     f"{self.engine.backend}, which needs 'cuda'; change one")
        if self.sync.anchor_camera not in self.cameras.ids:
            raise ConfigurationError(
                f"'sync.anchor_camera' {self.sync.anchor_camera} is not one of 'cameras.ids' "
                f'{list(self.cameras.ids)}; choose one of them')

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> NodeParameters:
        """Build from dotted names; raises ConfigurationError with all cross-field problems."""
        problems: list[str] = []
        built = _build(NodeParameters, values, '', problems)
        raise_problems(problems)
        result: NodeParameters = built
        return result


def _build(cls: Any, values: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    """Fill a dataclass from dotted names, collecting what the groups complain about."""
    hints = get_type_hints(cls)
    content: dict[str, Any] = {}
    for field in fields(cls):
        name = f'{prefix}{field.name}'
        if is_dataclass(hints[field.name]):
            content[field.name] = _build(hints[field.name], values, f'{name}.', problems)
        else:
            value = values[name]
            content[field.name] = tuple(value) if isinstance(value, (list, tuple)) else value
    if any(value is None for value in content.values()):
        return None
    try:
        return cls(**content)
    except ConfigurationError as error:
        problems.append(str(error))
        return None
