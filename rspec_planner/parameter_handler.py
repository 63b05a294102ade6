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
Parameters of a running node: declare from the schema, read into the frozen configuration, update.

No value lives here. rclpy does not complain about a missing value or about an override that
nobody declares, so everything is checked at once and reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import sys
from typing import Any

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.exceptions import ParameterUninitializedException
from rclpy.node import Node
from rclpy.parameter import Parameter

from rspec_planner.errors import ConfigurationError
from rspec_planner.parameters import (
    missing_problems,
    NodeParameters,
    parameter_files,
    ParameterField,
    raise_problems,
    read_parameter_file,
    schema_fields,
    value_problems,
)

_TYPES = {
    'boolean': Parameter.Type.BOOL,
    'integer': Parameter.Type.INTEGER,
    'number': Parameter.Type.DOUBLE,
    'string': Parameter.Type.STRING,
    'array of integer': Parameter.Type.INTEGER_ARRAY,
    'array of string': Parameter.Type.STRING_ARRAY,
}


def describe(field: ParameterField) -> ParameterDescriptor:
    """Return the descriptor of a schema entry; rclpy then refuses values outside its range."""
    descriptor = ParameterDescriptor(description=f'{field.description} Unit: {field.unit}.',
                                     read_only=not field.runtime)
    if field.type_name == 'number':
        descriptor.floating_point_range = [FloatingPointRange(
            from_value=float(field.schema['minimum']), to_value=float(field.schema['maximum']))]
    elif field.type_name == 'integer':
        descriptor.integer_range = [IntegerRange(
            from_value=field.schema['minimum'], to_value=field.schema['maximum'], step=1)]
    else:
        descriptor.additional_constraints = field.limits.replace('`', '')
    return descriptor


class ParameterHandler:
    """
    Own the parameters of one node.

    `on_update` gets the new frozen configuration after a run-time change was accepted; it runs
    on the executor's thread and only swaps a reference.
    """

    def __init__(self, node: Node, on_update: Callable[[NodeParameters], None],
                 arguments: Sequence[str] | None = None) -> None:
        self._node = node
        self._on_update = on_update
        self._files = parameter_files(sys.argv if arguments is None else arguments)
        self._problems = self._declare()
        node.add_on_set_parameters_callback(self._validate)
        node.add_post_set_parameters_callback(self._swap)

    @property
    def autostart(self) -> bool:
        """Return whether to configure and activate at start (also to report bad parameters)."""
        if not self._node.has_parameter('autostart'):
            return True
        return bool(self._current().get('autostart', True))

    def read(self) -> NodeParameters:
        """Return the configuration; raises ConfigurationError that lists every problem."""
        values = self._current()
        declared = [name for name in schema_fields() if self._node.has_parameter(name)]
        refused = set(schema_fields()) - set(declared)
        problems = self._problems + missing_problems({*values, *refused}, 'the given parameters')
        raise_problems(problems)
        return NodeParameters.from_values(values)

    def _overrides(self) -> dict[str, Any]:
        # rclpy has no public view of what was given but not declared, and ignores it silently.
        given: dict[str, Parameter[Any]] = self._node._parameter_overrides
        return {name: parameter.value for name, parameter in given.items()}

    def _declare(self) -> list[str]:
        """Declare what is valid; return the problems of everything else."""
        overrides = self._overrides()
        problems = []
        for name, value in overrides.items():
            value = list(value) if not isinstance(value, (bool, int, float, str)) else value
            problems += value_problems({name: value}, self._source(name, value))
        for field in schema_fields().values():
            value = overrides.get(field.name)
            value = list(value) if field.type_name.startswith('array') and value else value
            if field.name not in overrides or field.problem(value) is None:
                self._node.declare_parameter(field.name, _TYPES[field.type_name],
                                             describe(field))
        return problems

    def _source(self, name: str, value: Any) -> str:
        """Return the parameter file that gives a key this value, or where else it came from."""
        for path in reversed(self._files):
            try:
                held = read_parameter_file(path, node_name=self._node.get_name())
            except ConfigurationError:
                continue
            # repr: 10 and 10.0 differ, and nan is itself
            if name in held and repr(held[name]) == repr(value):
                return str(path)
        return 'the command line or launch file'

    def _current(self) -> dict[str, Any]:
        values = {}
        for name in schema_fields():
            if self._node.has_parameter(name):
                try:
                    values[name] = self._node.get_parameter(name).value
                except ParameterUninitializedException:
                    continue
        return values

    def _validate(self, parameters: list[Parameter[Any]]) -> SetParametersResult:
        """Refuse a run-time change that breaks a bound or a cross-field rule."""
        changed = {p.name: p.value for p in parameters if p.name in schema_fields()}
        problems = value_problems(changed, 'the request')
        if not problems and changed:
            try:
                NodeParameters.from_values({**self._current(), **changed})
            except ConfigurationError as error:
                problems = [str(error)]
        return SetParametersResult(successful=not problems, reason='; '.join(problems))

    def _swap(self, parameters: list[Parameter[Any]]) -> None:
        if any(parameter.name in schema_fields() for parameter in parameters):
            self._on_update(self.read())
