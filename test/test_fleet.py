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
"""Ten bags, one corrupt: nine results, one named failure, resumed; here and through Ray."""

import json
import os
from pathlib import Path
import shutil

import pytest
from test_offline import EchoPlanner, record

from rspec_planner.errors import ConfigurationError
from rspec_planner.fleet import fleet_jobs, plan_fleet
from rspec_planner.offline import OfflineOptions, plan_bag

CORRUPT = 4


@pytest.fixture(scope='module')
def bags(tmp_path_factory):
    """Return ten bags of different lengths; the fifth is cut in the middle."""
    folder = tmp_path_factory.mktemp('bags')
    paths = [record(folder / f'drive{n}.mcap', seconds=2.2 + 0.1 * n) for n in range(3)]
    for n in range(3, 10):
        paths.append(folder / f'drive{n}.mcap')
        shutil.copy(paths[n % 3], paths[n])
    data = paths[CORRUPT].read_bytes()
    paths[CORRUPT].write_bytes(data[:len(data) // 2])
    return paths


def records_of(path):
    """Return records without the times that no run repeats."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.endswith('_ms')}
            for row in rows]


@pytest.fixture(scope='module')
def serial(bags, tmp_path_factory):
    folder = tmp_path_factory.mktemp('serial')
    return folder, plan_fleet(bags, OfflineOptions(), folder, make_planner=EchoPlanner)


def test_nine_of_ten(bags, serial, tmp_path):
    folder, report = serial
    assert (report['bags'], report['planned'], report['resumed'], report['ok']) == (
        10, 9, 0, False)
    assert list(report['failed']) == [str(bags[CORRUPT])]
    assert 'drive4.mcap' in report['failed'][str(bags[CORRUPT])]
    assert not (folder / 'drive4.mcap.plans.jsonl').exists()
    alone = tmp_path / 'alone.jsonl'
    plan_bag(bags[1], OfflineOptions(records=alone), make_planner=EchoPlanner)
    assert records_of(folder / 'drive1.mcap.plans.jsonl') == records_of(alone) != []


def test_it_goes_on_where_it_stopped(bags, serial, tmp_path):
    folder = tmp_path / 'again'
    shutil.copytree(serial[0], folder)
    made = []

    def make(parameters):
        made.append(parameters)
        return EchoPlanner(parameters)
    report = plan_fleet(bags, OfflineOptions(), folder, make_planner=make)
    assert (report['resumed'], report['planned'], len(made)) == (9, 9, 0)
    (folder / 'drive7.mcap.report.json').write_text('{"settings": ')  # killed while it wrote
    (folder / 'drive8.mcap.plans.jsonl').unlink()
    report = plan_fleet(bags, OfflineOptions(), folder, make_planner=make)
    assert (report['resumed'], report['planned'], len(made)) == (7, 9, 2)
    report = plan_fleet(bags[:2], OfflineOptions(seed=3), folder, make_planner=make)
    assert (report['resumed'], len(made)) == (0, 4)  # other settings, other results


def test_a_defect_in_one_bag_stops_no_other(bags, tmp_path):
    def make(parameters):
        make.calls += 1
        if make.calls == 1:
            raise ZeroDivisionError('a defect')
        return EchoPlanner(parameters)
    make.calls = 0
    report = plan_fleet([bags[0], tmp_path / 'none.mcap', bags[1]], OfflineOptions(), tmp_path,
                        make_planner=make)
    assert report['planned'] == 1
    assert report['failed'][str(bags[0])] == 'unexpected ZeroDivisionError: a defect'
    assert 'does not exist' in report['failed'][str(tmp_path / 'none.mcap')]


def test_bags_of_one_name_do_not_overwrite_each_other(tmp_path):
    jobs = fleet_jobs([tmp_path / 'a' / 'x.mcap', tmp_path / 'b' / 'x.mcap'], tmp_path,
                      OfflineOptions())
    assert len({job.options.records for job in jobs}) == len({job.report for job in jobs}) == 2
    with pytest.raises(ConfigurationError, match='give --folder'):
        fleet_jobs([tmp_path / 'x.mcap'], tmp_path, OfflineOptions(records=tmp_path / 'r'))


def test_ray_gives_what_serial_gives(bags, serial, tmp_path, monkeypatch):
    pytest.importorskip('ray', reason='ray is not installed (requirements-fleet.txt)')
    # workers import this folder's EchoPlanner
    here = str(Path(__file__).parent)
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([here, os.environ.get('PYTHONPATH', '')]))
    report = plan_fleet(bags, OfflineOptions(), tmp_path, workers=2, make_planner=EchoPlanner)
    assert (report['planned'], list(report['failed'])) == (9, [str(bags[CORRUPT])])
    for n in set(range(10)) - {CORRUPT}:
        name = f'drive{n}.mcap.plans.jsonl'
        assert records_of(tmp_path / name) == records_of(serial[0] / name) != []
    again = plan_fleet(bags, OfflineOptions(), tmp_path, workers=2, make_planner=EchoPlanner)
    assert again['resumed'] == 9


def test_without_ray_the_remedy_is_named(bags, tmp_path, monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(ConfigurationError, match='requirements-fleet.txt'):
        plan_fleet(bags[:2], OfflineOptions(), tmp_path, workers=2)
