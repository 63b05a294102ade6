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

from __future__ import annotations

from dataclasses import fields, is_dataclass
import json
import math
from typing import get_type_hints

from hypothesis import given
from hypothesis import strategies as st
import jsonschema
import pytest
import yaml

from rspec_planner.errors import ConfigurationError
from rspec_planner.parameters import (
    load_schema,
    load_yaml_parameters,
    NodeParameters,
    parameter_files,
    parameter_table,
    read_parameter_file,
    schema_fields,
)
from rspec_planner.transport import config_path

SHIPPED = config_path('rspec_planner.param.yaml')


def values(**changes):
    given_values = load_yaml_parameters(SHIPPED)
    given_values.update({name.replace('__', '.'): value for name, value in changes.items()})
    return given_values


def written(tmp_path, text):
    path = tmp_path / 'mine.yaml'
    path.write_text(text, encoding='utf-8')
    return path


def nested(flat, section='/**'):
    tree = {}
    for name, value in flat.items():
        *groups, leaf = name.split('.')
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = value
    return yaml.safe_dump({section: {'ros__parameters': tree}})


def leaves(cls, prefix=''):
    hints = get_type_hints(cls)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], f'{prefix}{field.name}.')
        else:
            yield f'{prefix}{field.name}'


def test_shipped_file_fits_the_whole_schema():
    tree = yaml.safe_load(SHIPPED.read_text(encoding='utf-8'))
    jsonschema.validate(tree, load_schema(), cls=jsonschema.Draft7Validator)


def test_shipped_file_schema_and_dataclasses_have_the_same_keys():
    names = set(schema_fields())
    assert set(load_yaml_parameters(SHIPPED)) == names
    assert set(leaves(NodeParameters)) == names


def test_every_key_has_a_unit_a_sentence_and_bounds_or_choices():
    for field in schema_fields().values():
        assert field.description.endswith('.'), field.name
        assert field.unit, field.name
        rules = field.schema.get('items', field.schema)
        if rules['type'] in ('number', 'integer'):
            assert rules['minimum'] < rules['maximum'], field.name
            suffix = field.name.rsplit('_', 1)[-1]
            if suffix in ('ms', 'hz', 'm'):
                assert field.unit.lower() == suffix


def test_no_group_accepts_unknown_keys():
    def check(schema):
        if schema.get('type') == 'object':
            assert schema['additionalProperties'] is False
            for entry in schema['properties'].values():
                check(entry)
    check(load_schema()['definitions']['rspec_planner'])


def test_values_become_the_frozen_configuration():
    config = NodeParameters.from_values(values(planning__rate_hz=5.0))
    assert config.planning.rate_hz == 5.0
    assert config.cameras.ids == (0, 1, 2, 6)
    with pytest.raises(AttributeError):
        config.planning.rate_hz = 1.0


@pytest.mark.parametrize('wrong, nearest', [
    ('planning.rate_hx', 'planning.rate_hz'),
    ('deadline.on_mis', 'deadline.on_miss'),
    ('rate_hz', 'planning.rate_hz'),
    ('sync.rate_hz', 'planning.rate_hz'),
])
def test_misspelt_key_names_key_file_and_nearest(tmp_path, wrong, nearest):
    path = written(tmp_path, nested({**values(), wrong: 1.0}))
    with pytest.raises(ConfigurationError) as caught:
        load_yaml_parameters(path)
    line = str(caught.value)
    assert line == f"unknown parameter '{wrong}' in {path}; did you mean '{nearest}'?"


def test_all_problems_are_reported_on_one_line(tmp_path):
    wrong = values(planning__rate_hz=0.0, deadline__on_miss='stop', model__seed='x')
    del wrong['debug.marker']
    with pytest.raises(ConfigurationError) as caught:
        load_yaml_parameters(written(tmp_path, nested(wrong)))
    line = str(caught.value)
    assert '\n' not in line
    for part in ("'planning.rate_hz' is 0.0; give a number (0.1 to 100.0)",
                 "'deadline.on_miss' is 'stop'", "'skip', 'last_valid'",
                 "'model.seed' is 'x'", "'debug.marker' is missing"):
        assert part in line


def test_integer_for_a_float_names_the_remedy(tmp_path):
    with pytest.raises(ConfigurationError, match=r"'planning.rate_hz' is the integer 10; write "
                                                 r'10\.0'):
        load_yaml_parameters(written(tmp_path, nested(values(planning__rate_hz=10))))


def test_item_of_a_list_is_named(tmp_path):
    transport = ['raw', 'jpg', 'raw', 'raw']
    with pytest.raises(ConfigurationError, match=r"'cameras.transport\[1\]' is 'jpg'"):
        load_yaml_parameters(written(tmp_path, nested(values(cameras__transport=transport))))


@pytest.mark.parametrize('changes, part', [
    ({'cameras__ids': [1, 0, 2, 6]}, 'not ascending'),
    ({'cameras__transport': ['raw']}, 'has 1 entries for 4'),
    ({'sync__anchor_camera': 5}, "'sync.anchor_camera' 5 is not one of"),
    ({'deadline__budget_ms': 2000.0}, "'deadline.budget_ms' 2000 exceeds"),
    ({'vehicle__rear_overhang_m': 6.0}, "'vehicle.rear_overhang_m' 6 is not below"),
])
def test_cross_field_rules(changes, part):
    with pytest.raises(ConfigurationError) as caught:
        NodeParameters.from_values(values(**changes))
    assert part in str(caught.value)


def test_cross_field_rules_of_two_groups_are_reported_together():
    with pytest.raises(ConfigurationError) as caught:
        NodeParameters.from_values(values(cameras__transport=['raw'], deadline__budget_ms=2000.0))
    assert 'cameras.transport' in str(caught.value)
    assert 'deadline.budget_ms' in str(caught.value)


@pytest.mark.parametrize('section', ['/**', 'rspec_planner', '/planning/rspec_planner'])
def test_partial_file_of_this_node(tmp_path, section):
    path = written(tmp_path, nested({'planning.rate_hz': 5.0}, section))
    assert load_yaml_parameters(path, partial=True) == {'planning.rate_hz': 5.0}
    with pytest.raises(ConfigurationError, match='is missing'):
        load_yaml_parameters(path)


def test_sections_of_other_nodes_are_left_alone(tmp_path):
    text = nested({'planning.rate_hz': 5.0}) + nested({'what': 1}, '/other/node')
    assert read_parameter_file(written(tmp_path, text)) == {'planning.rate_hz': 5.0}


def test_ros_parameters_may_stand_beside_ours(tmp_path):
    flat = {'use_sim_time': True, 'qos_overrides./a.subscription.depth': 3}
    load_yaml_parameters(written(tmp_path, nested(flat)), partial=True)


@pytest.mark.parametrize('text, part', [
    ('a: [1', 'is not YAML'), ('', "has no '/**: ros__parameters:'"), ('a: 1', 'has no'),
    ('/**:\n  ros__parameters: 7', "'ros__parameters' is 7")])
def test_file_that_is_no_parameter_file(tmp_path, text, part):
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        load_yaml_parameters(path)
    assert part in str(caught.value) and str(path) in str(caught.value)
    assert '\n' not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match='gone.yaml.*cannot be read'):
        load_yaml_parameters(tmp_path / 'gone.yaml')


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_bounded_number_accepts_its_range_and_nothing_else(value):
    field = schema_fields()['planning.rate_hz']
    low, high = field.schema['minimum'], field.schema['maximum']
    fits = math.isfinite(value) and low <= value <= high
    assert (field.problem(value) is None) == fits


def test_parameter_files_of_a_command_line():
    found = parameter_files(['--ros-args', '--params-file', 'a.yaml', '-p', 'x:=1',
                             '--params-file', 'b.yaml'])
    assert [str(path) for path in found] == ['a.yaml', 'b.yaml']
    assert parameter_files(['--params-file']) == []


def test_table_has_one_row_per_key_with_the_shipped_value():
    rows = parameter_table().strip().splitlines()
    assert len(rows) == 2 + len(schema_fields())
    assert len({row.count(' | ') for row in rows[2:]}) == 1
    row = next(row for row in rows if '`planning.rate_hz`' in row)
    assert '| `10.0` | Hz | 0.1 to 100.0 | yes |' in row


def test_schema_is_draft_7_json():
    schema = json.loads(config_path('rspec_planner.schema.json').read_text(encoding='utf-8'))
    assert schema['$schema'] == 'http://json-schema.org/draft-07/schema#'
