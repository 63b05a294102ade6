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

import errno
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import time

import pytest
from test_offline import EchoPlanner, record

from rspec_planner.cli import main
from rspec_planner.errors import ConfigurationError
from rspec_planner.fleet import _connect, fleet_jobs, plan_fleet
from rspec_planner.offline import OfflineOptions, plan_bag
from rspec_planner.parameters import PARAMETER_FILE
from rspec_planner.transport import config_path

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


class DyingPlanner(EchoPlanner):
    """Ends its process without a word, as one does that runs out of memory."""

    def plan(self, observation):
        """Never return."""
        os._exit(9)


#: plans bags slowly enough to be killed between two of them
_DRIVER = """
import sys, time
from pathlib import Path
from test_offline import EchoPlanner
from rspec_planner.fleet import plan_fleet
from rspec_planner.offline import OfflineOptions

def make(parameters):
    time.sleep(0.5)
    return EchoPlanner(parameters)
plan_fleet([Path(name) for name in sys.argv[3:]], OfflineOptions(), Path(sys.argv[1]),
           workers=int(sys.argv[2]), make_planner=make)
"""


@pytest.fixture
def importable(monkeypatch):
    """Let other processes import this folder's planners."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join(
        [here, str(Path(__file__).parents[1]), os.environ.get('PYTHONPATH', '')]))


def killed_fleet(bags, folder, workers):
    """Start a fleet and kill it when three bags are done; return the time of those records."""
    process = subprocess.Popen([sys.executable, '-c', _DRIVER, str(folder), str(workers),
                                *map(str, bags)], stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 120.0
        while len(list(folder.glob('*.report.json'))) < 3:
            assert process.poll() is None and time.monotonic() < give_up
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    done = [path.name.removesuffix('.report.json') for path in folder.glob('*.report.json')]
    return {name: (folder / f'{name}.plans.jsonl').stat().st_mtime_ns for name in done}


def check_the_rest_is_planned(bags, folder, before, serial, workers):
    """Run the fleet again: what was done stays, the whole equals one that nobody killed."""
    assert 3 <= len(before) < 9
    (folder / '.drive9.mcap.plans.jsonl.77').touch()  # half written when the kill came
    report = plan_fleet(bags, OfflineOptions(), folder, workers=workers,
                        make_planner=EchoPlanner)
    assert (report['planned'], list(report['failed'])) == (9, [str(bags[CORRUPT])])
    assert len(before) <= report['resumed'] < 9
    assert not list(folder.glob('.*'))
    for n in set(range(10)) - {CORRUPT}:
        name = f'drive{n}.mcap'
        records = folder / f'{name}.plans.jsonl'
        assert records_of(records) == records_of(serial[0] / records.name) != []
        assert records.stat().st_mtime_ns == before.get(name, records.stat().st_mtime_ns)
    assert plan_fleet(bags, OfflineOptions(), folder, workers=workers,
                      make_planner=EchoPlanner)['resumed'] == 9


def test_a_killed_fleet_plans_only_what_is_missing(bags, serial, tmp_path, importable):
    before = killed_fleet(bags, tmp_path, workers=0)
    check_the_rest_is_planned(bags, tmp_path, before, serial, workers=0)


def test_the_same_through_ray(bags, serial, tmp_path, importable):
    ray = pytest.importorskip('ray', reason='Ray is not installed; requirements-fleet.txt has it')
    before = killed_fleet(bags, tmp_path, workers=2)
    ray.init(address='local', num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        check_the_rest_is_planned(bags, tmp_path, before, serial, workers=2)
        report = plan_fleet(bags[:2], OfflineOptions(seed=1), tmp_path, workers=2,
                            make_planner=DyingPlanner)
        assert report['planned'] == 0
        assert all('the worker ended: ' in line for line in report['failed'].values())
        with pytest.raises(ConfigurationError, match='Ray finds no GPU; use --device cpu'):
            plan_fleet(bags[:2], OfflineOptions(device='cuda'), tmp_path, workers=2,
                       make_planner=EchoPlanner)
    finally:
        ray.shutdown()


def test_a_cluster_that_does_not_answer_is_named(monkeypatch):
    class Silent:
        @staticmethod
        def init(**options):
            assert options == {'address': '10.0.0.1:6379', 'log_to_driver': False,
                               'configure_logging': False}  # Ray allows no size of another's
            raise SystemExit(15)
    monkeypatch.setenv('RAY_ADDRESS', '10.0.0.1:6379')
    with pytest.raises(ConfigurationError, match=r"did not start at '10.0.0.1:6379' .*RAY_ADDR"):
        _connect(Silent, 2)


def test_a_bag_that_is_given_twice_is_planned_once(bags, tmp_path):
    same = bags[0].parent / 'nowhere' / '..' / bags[0].name
    (bags[0].parent / 'nowhere').mkdir()
    link = tmp_path / 'link.mcap'
    link.symlink_to(bags[0])
    report = plan_fleet([bags[0], bags[0], same, link], OfflineOptions(), tmp_path / 'out',
                        make_planner=EchoPlanner)
    assert (report['bags'], report['planned']) == (1, 1)
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == [
        'drive0.mcap.plans.jsonl', 'drive0.mcap.report.json']


def test_what_decides_the_plans_is_compared(bags, serial, tmp_path, monkeypatch):
    """A parameter file that changes under its name, tampered records and a tampered report."""
    folder = tmp_path / 'again'
    shutil.copytree(serial[0], folder)
    shipped = config_path(PARAMETER_FILE).read_text(encoding='utf-8')
    params = tmp_path / 'mine.yaml'
    params.write_text(shipped, encoding='utf-8')
    options = OfflineOptions(params=params)

    def resumed(chosen=options):
        return plan_fleet(bags[:2], chosen, folder, make_planner=EchoPlanner)['resumed']
    assert resumed() == 2  # another name, the same content
    params.write_text(shipped.replace('seed: 0', 'seed: 7'), encoding='utf-8')
    assert (resumed(), resumed()) == (0, 2)
    records = folder / 'drive0.mcap.plans.jsonl'
    records.write_text(records.read_text()[:-40], encoding='utf-8')
    assert resumed() == 1
    for text in ('[' * 100_000, '[]', '{"settings": 1}', records.read_text()):
        (folder / 'drive1.mcap.report.json').write_text(text, encoding='utf-8')
        assert resumed() == 1
    monkeypatch.setattr('rspec_planner.__version__', '9.9.9')
    assert resumed() == 0
    with pytest.raises(ConfigurationError, match='nothing.yaml'):  # once, not for every bag
        resumed(OfflineOptions(params=tmp_path / 'nothing.yaml'))


def test_a_bag_without_permission_stops_no_other(bags, tmp_path, monkeypatch, capsys):
    """The tests may run as root, whom no permission stops; what asks for it is answered no."""
    allowed = os.access
    monkeypatch.setattr(os, 'access', lambda path, *mode, **more: str(path) != str(bags[0])
                        and allowed(path, *mode, **more))
    assert main(['plan', str(bags[0]), str(bags[CORRUPT]), '--folder', str(tmp_path),
                 '--json']) == 1
    failed = json.loads(capsys.readouterr().out)['failed']
    assert f'bag {bags[0]} cannot be read; check its permissions' == failed[str(bags[0])]
    assert 'truncated or damaged' in failed[str(bags[CORRUPT])]


def test_a_full_disk_is_one_failed_bag_and_leaves_nothing(bags, tmp_path, monkeypatch):
    def full(job, files, report):
        raise OSError(errno.ENOSPC, 'No space left on device', str(job.report))
    monkeypatch.setattr('rspec_planner.fleet._write', full)
    report = plan_fleet(bags[:2], OfflineOptions(), tmp_path, make_planner=EchoPlanner)
    assert report['planned'] == 0 and len(report['failed']) == 2
    assert report['failed'][str(bags[0])].startswith(
        f'{tmp_path}/drive0.mcap.report.json: No space left on device; check')


def test_without_ray_the_remedy_is_named(bags, tmp_path, monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(ConfigurationError, match='requirements-fleet.txt'):
        plan_fleet(bags[:2], OfflineOptions(), tmp_path, workers=2)
