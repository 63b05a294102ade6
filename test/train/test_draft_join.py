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
"""Joining comparisons: names that tell their epochs, nothing lost, refusals."""

import json

import pytest

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.train.draft_join import join, main, named_run


def run(name, epochs, seed=0, group='main'):
    return {'run': f'{name}/s{seed}', 'name': name, 'group': group, 'seed': seed,
            'settings': {'epochs': epochs}, 'curve': [1.0]}


def write(folder, name, runs, target='t', **more):
    path = folder / name
    path.write_text(json.dumps({'target': target, 'cache_s': len(name), **more, 'runs': runs,
                                'not_finished': [f'rest of {name}']}))
    return path


@pytest.mark.parametrize(('name', 'epochs', 'expected'), [
    ('a', 20.0, 'a'), ('a', 6.0, 'a+six-epochs'), ('a', 3.0, 'a+3-epochs'),
    ('a+scratch', 6.0, 'a+scratch+six-epochs'), ('a+two-epochs', 2.0, 'a+two-epochs'),
    ('a+lr0.001-e40', 40.0, 'a+lr0.001-e40'), ('a+lr0.001-e40', 6.0, 'a+lr0.001-e40+six-epochs')])
def test_a_name_tells_epochs_that_are_not_the_base(name, epochs, expected):
    found = named_run(run(name, epochs, seed=2))
    assert (found['name'], found['run']) == (expected, f'{expected}/s2')


def test_curves_of_tuning_runs_are_left_out_and_failures_stay():
    assert 'curve' in named_run(run('a', 20.0))
    assert 'curve' not in named_run(run('a', 20.0, group='tune'))
    assert named_run({'run': 'a/s0', 'failed': 'x'}) == {'run': 'a/s0', 'failed': 'x'}


def test_files_are_joined_in_order(tmp_path, capsys):
    one = write(tmp_path, 'one.json', [run('a', 20.0)], tuned={'x': 1}, command='first command')
    two = write(tmp_path, 'second.json', [run('a', 6.0)], command='second command')
    out = tmp_path / 'joined.json'
    assert main([str(one), str(two), '--out', str(out)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])['runs'] == 2
    found = json.loads(out.read_text())
    assert [r['run'] for r in found['runs']] == ['a/s0', 'a+six-epochs/s0']
    assert found['commands'] == ['first command', 'second command'] and 'command' not in found
    assert found['cache_s'] == len('one.json') and found['tuned'] == {'x': 1}
    assert found['not_finished'] == {'first': ['rest of one.json'],
                                     'second': ['rest of second.json']}
    assert join([one, two], ['p', 'q'])['commands'] == ['p', 'q']
    assert main([str(one), str(two), '--out', str(out), '--base-epochs', '6']) == 0
    names = [r['run'] for r in json.loads(out.read_text())['runs']]
    assert names == ['a+twenty-epochs/s0', 'a/s0']


def test_what_does_not_belong_together_is_refused(tmp_path):
    one = write(tmp_path, 'one.json', [run('a', 20.0)])
    with pytest.raises(ConfigurationError, match='different targets'):
        join([one, write(tmp_path, 'two.json', [], target='u')])
    with pytest.raises(ConfigurationError, match='a/s0: in more than one file'):
        join([one, write(tmp_path, 'again.json', [run('a', 20.0)])])
    with pytest.raises(ConfigurationError, match='1 commands for 2 files'):
        join([one, one], ['x'])
    with pytest.raises(InputError, match=r'none\.json'):
        join([tmp_path / 'none.json'])
