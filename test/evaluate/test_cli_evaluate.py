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
"""The quality subcommands: their options, their JSON line and their exit status."""

import json

from click.testing import CliRunner
from drafted import toy_folders
import pytest

from rspec_planner.cli import cli
from rspec_planner.cli_evaluate import FLOOR_CLIPS
from rspec_planner.evaluate import everything, exactness, report
from rspec_planner.evaluate.floor import TRAIN_CLIPS
from rspec_planner.evaluate.sampled_runs import Sampling


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    return toy_folders(tmp_path_factory.mktemp('toy'))


def last_line(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_exactness_reports_the_contract_keys(folders, monkeypatch):
    # an untrained expert magnifies the last bits that wider products leave in the deployed pair
    monkeypatch.setattr(exactness, 'TOLERANCE_M', 0.1)
    target, drafts = folders
    found = last_line(CliRunner().invoke(cli, [
        'eval', 'exactness', '--split', 'val', '--clips', '2', '--checkpoint', str(target),
        '--draft', str(drafts['block']), '--draft', str(drafts['chain']), '--drives', '1',
        '--frames', '2', '--json']))
    assert found['clips'] == 2
    assert found['token_mismatches'] == found['trajectory_mismatches'] == 0
    assert set(found['drafts']) == {'block', 'chain'}
    assert found['deployed']['frames'] == 2 and found['deployed']['token_mismatches'] == 0


def test_a_mismatch_is_a_failure(folders, monkeypatch):
    fine = {'token_mismatches': 0, 'trajectory_mismatches': 0}
    for found in ({**fine, 'token_mismatches': 1, 'deployed': fine},
                  {**fine, 'deployed': {**fine, 'token_mismatches': 1}},
                  {**fine, 'deployed': {**fine, 'trajectory_mismatches': 1}}):
        monkeypatch.setattr(report, 'evaluate_one', lambda *args, found=found: found)
        assert CliRunner().invoke(cli, ['eval', 'exactness', '--json']).exit_code == 1
    monkeypatch.setattr(report, 'evaluate_one', lambda *args: {**fine, 'deployed': fine})
    assert CliRunner().invoke(cli, ['eval', 'exactness', '--json']).exit_code == 0


def test_options_reach_the_subject(monkeypatch):
    asked = []
    monkeypatch.setattr(report, 'evaluate_one',
                        lambda question, subject, bars: asked.append((question, subject)) or {})
    for question in ('length', 'attention', 'routing', 'reuse'):
        assert CliRunner().invoke(cli, ['eval', question, '--draft', 'a', '--draft', 'b',
                                        '--json']).exit_code == 0
    assert [question for question, _ in asked] == ['length', 'attention', 'routing', 'reuse']
    assert all(subject.drafts == ('a', 'b') for _, subject in asked)
    assert asked[0][1].floor_clips == FLOOR_CLIPS == TRAIN_CLIPS
    assert asked[0][1].total_clips() == 790
    assert asked[1][1].total_clips() >= 100


def test_a_temperature_asks_for_sampling(monkeypatch):
    asked = []
    monkeypatch.setattr(report, 'evaluate_one',
                        lambda question, subject, bars: asked.append(subject.sampling) or {})
    monkeypatch.setattr(everything, 'evaluate_everything',
                        lambda subject, **options: asked.append(subject.sampling) or {})
    for arguments in (['length'], ['length', '--temperature', '0.8', '--seed', '4'], ['all'],
                      ['all', '--temperature', '0']):
        assert CliRunner().invoke(cli, ['eval', *arguments, '--json']).exit_code == 0
    assert asked == [None, Sampling(0.8, 0.98, 4), Sampling(0.6, 0.98, 0), None]
    found = CliRunner().invoke(cli, ['eval', 'length', '--temperature', '-1', '--json'])
    assert 'temperature -1.0: must be above 0' in str(found.exception)


@pytest.mark.parametrize('kind', ['dflash', 'eagle3', 'aarl'])
def test_training_commands_take_every_setting(kind):
    text = CliRunner().invoke(cli, ['train', kind, '--help']).output
    assert '--learning-rate' in text and '--cache' in text and '--resume' in text
    assert '--kind' not in text
