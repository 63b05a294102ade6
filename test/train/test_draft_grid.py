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
"""The comparison of drafts: what it runs, what it leaves on disk, what a failure costs."""

from collections import Counter
import json

from draft_toys import toy_cache, toy_target
import pytest
from safetensors.torch import load_file
import torch

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.draft import DraftConfig
from rspec_planner.model.draft_checkpoint import load_draft
from rspec_planner.train import draft as draft_front
from rspec_planner.train import draft_grid
from rspec_planner.train.draft import clip_specs
from rspec_planner.train.draft_acceptance import acceptance, simulate
from rspec_planner.train.draft_runs import grid_runs, GROUPS, tuned_changes
from rspec_planner.train.draft_settings import DraftSettings
from rspec_planner.train.draft_target import split_name
from rspec_planner.train.draft_unpack import main as unpack_main
from rspec_planner.train.draft_unpack import unpack
from rspec_planner.train.profiles import new_target

SPLITS = ('train', 'val', 'on-shelf', 'off-shelf')
QUICK = ('--set', 'batch_clips=4', '--set', 'epochs=2', '--set', 'precision=fp32')


def test_runs_come_by_group_and_seed_with_unique_names():
    runs = grid_runs(GROUPS, DraftSettings(), (0, 1))
    keys = [run.key for run in runs]
    assert len(set(keys)) == len(keys) > 60
    assert keys[:2] == ['dflash-l2-b16-w8-flat/s0', 'eagle3-b16-w8-flat/s0']
    assert 'eagle3-b16-wall-mirror/s1' in keys and 'dflash-l4-b16-w8-flat/s0' in keys
    groups = [run.group for run in runs]
    assert groups == sorted(groups, key=GROUPS.index)
    assert [r.name for r in grid_runs(('main',), DraftSettings(), (0,), 'mirror')] == [
        'dflash-l2-b16-wall-mirror', 'eagle3-b16-wall-mirror', 'dflash-l2-b16-w8-mirror',
        'eagle3-b16-w8-mirror']
    with pytest.raises(ConfigurationError, match='main, shapes'):
        grid_runs(('all',), DraftSettings())


def test_processes_share_the_training_pairs_and_all_see_the_validation_clips():
    settings = DraftSettings(train_clips=12, extra_clips=4, test_clips=2)
    whole, first, second = (clip_specs(settings, *place) for place in ((0, 1), (0, 2), (1, 2)))
    count = Counter(split_name(spec) for spec in whole)
    assert count == {'train': 12, 'extra': 4, 'val': 2, 'on-shelf': 2, 'off-shelf': 2,
                     'val-drive': 2}
    assert 0 < sum(spec.drive for spec in whole if spec.split == 'train') < 12
    learned = [[s for s in specs if s.split in ('train', 'extra')] for specs in (first, second)]
    assert len(learned[0]) == len(learned[1]) == 8 and not set(learned[0]) & set(learned[1])
    assert [s.split for s in second if s not in learned[1]] == ['val', 'val']


def test_the_best_rate_and_one_clear_gain_are_adopted():
    base = DraftSettings()

    def record(tag, length, **changes):
        settings = {**base.to_dict(), 'window': 8, **changes}
        return {'name': f'dflash-l2-b16-w8-flat+{tag}', 'group': 'tune', 'settings': settings,
                'splits': {'val': {'L': length}}}

    records = [record('lr0.002-e20', 7.0), record('lr0.004-e40', 7.2, learning_rate=4e-3,
                                                  epochs=40.0),
               record('soft-1', 7.04, soft_weight=1.0), {'run': 'x', 'failed': 'no memory'}]
    rate = {'learning_rate': 4e-3, 'epochs': 40.0}
    assert tuned_changes(records, base, 'dflash') == rate
    records.append(record('noise', 7.1, tap_noise=0.3))
    found = tuned_changes(records, base, 'dflash')
    assert found == {**rate, 'tap_noise': 0.3}
    assert tuned_changes(records, base, 'eagle3') == {}
    runs = grid_runs(('shapes',), base, (0,), tuned={'dflash': found})
    first, eagle = runs[0].settings, next(r.settings for r in runs if r.settings.kind == 'eagle3')
    assert (first.tap_noise, first.epochs, first.layers) == (0.3, 40.0, 1)
    assert (eagle.tap_noise, eagle.epochs) == (0.0, 20.0)


@pytest.fixture
def toys(monkeypatch, tmp_path):
    target = toy_target()
    toy_cache(target, 40, splits=SPLITS).save(tmp_path / 'cache')
    monkeypatch.setattr(draft_front, 'open_target', lambda folder, device: (target, None, 'toy'))
    return target, tmp_path


def work(folder, *arguments):
    code = draft_grid.main(['--cache', str(folder / 'cache'), '--out', str(folder / 'out'),
                            '--lanes', '2', *QUICK, *arguments])
    assert code == 0
    return json.loads((folder / 'out' / 'results.json').read_text())


def test_a_run_that_fails_stops_no_other(toys):
    _, folder = toys
    # the toy target has layers 0 to 2; only the two runs that choose taps themselves can work
    found = work(folder, '--groups', 'main,ablations', '--seeds', '1', '--set', "taps='7'",
                 '--only', 'dflash-l2-b16-w8-flat')
    failed = {run['run']: run['failed'] for run in found['runs'] if 'failed' in run}
    assert {run['run'] for run in found['runs']} - set(failed) == {
        'dflash-l2-b16-w8-flat+last-tap/s0', 'dflash-l2-b16-w8-flat+lower-taps/s0'}
    assert failed and all('layers 0 .. 2' in reason for reason in failed.values())


def test_results_and_weights_of_every_run(toys, capsys):
    target, folder = toys
    found = work(folder, '--groups', 'main,ablations', '--seeds', '1', '--only', 'b16-w')
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    runs = {run['run']: run for run in found['runs']}
    assert summary['runs'] == len(runs) and found['not_finished'] == []
    assert found['clips'] == dict.fromkeys(sorted(SPLITS), 10)
    assert not any('more-clips' in run for run in runs)
    assert not [name for name, run in runs.items() if 'failed' in run]
    name = 'dflash-l2-b16-w8-flat/s0'
    run = runs[name]
    assert set(run['splits']) == {'val', 'on-shelf', 'off-shelf'}
    report = run['splits']['val']
    assert len(report['per_clip']) == 10 and report['ci95'][0] <= report['L']
    assert unpack_main([str(folder / 'out'), '--run', name, '--out', str(folder / 'one')]) == 0
    draft = load_draft(folder / 'one', target)
    assert draft.cfg == DraftConfig.from_dict(run['config'])
    cache = toy_cache(target, 40, splits=SPLITS)
    rows = cache.rows('val')
    length = simulate(acceptance(draft, cache, rows), cache.lengths[rows], 16).strict
    assert length == pytest.approx(report['L'], abs=0.25)  # weights went through fp16
    with pytest.raises(ConfigurationError, match='dflash-l9.*choose one of dflash'):
        unpack(folder / 'out', 'dflash-l9/s0', folder / 'two')
    with pytest.raises(EngineError, match='cannot be read'):
        unpack(folder / 'nothing', name, folder / 'two')
    assert all(path.stat().st_size < 15_000_000 for path in (folder / 'out').iterdir())


def test_runs_go_on_from_drafts_of_their_names(toys):
    target, folder = toys
    chosen = ('--groups', 'embedded', '--seeds', '1', '--only', 'l2-b16-w')
    first = work(folder, *chosen)
    begin = folder / 'begin'
    for run in first['runs']:
        unpack(folder / 'out', run['run'], begin / run['name'])
    work(folder, *chosen, '--init-from', str(begin), '--set', 'learning_rate=1e-12')
    for run in first['runs']:
        unpack(folder / 'out', run['run'], folder / 'then')
        before, after = (load_draft(place, target).state_dict()
                         for place in (begin / run['name'], folder / 'then'))
        assert all(torch.equal(before[name], after[name]) for name in before)
    missing = work(folder, *chosen, '--init-from', str(folder / 'nowhere'))
    assert all('nowhere' in run['failed'] for run in missing['runs'])


def test_packs_stay_below_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_grid, 'PACK_BYTES', 5000)
    results = draft_grid.Results(tmp_path, {'note': 1})
    for i in range(4):
        results.add({'run': f'r{i}'}, {'w': torch.full((1000,), float(i))})
    content = json.loads((tmp_path / 'results.json').read_text())
    files = [run['weights'] for run in content['runs']]
    assert files == ['weights-00.safetensors'] * 2 + ['weights-01.safetensors'] * 2
    assert load_file(tmp_path / files[3])['r3:w'][0] == 3.0 and content['note'] == 1


def test_when_the_time_is_over_the_rest_is_named(toys):
    _, folder = toys
    found = work(folder, '--groups', 'main', '--seeds', '1', '--minutes', '0')
    assert found['runs'] == [] and len(found['not_finished']) == 8


@pytest.mark.slow
def test_a_small_comparison_from_rendering_to_results(tmp_path, monkeypatch):
    target, tokenizer = new_target(smoke=True)
    target = target.eval().requires_grad_(False)
    with torch.no_grad():  # a random target would never stop
        target.text.lm_head.weight[target.cfg.tokens.traj_future_start] *= 2.0
    monkeypatch.setattr(draft_front, 'open_target',
                        lambda folder, device: (target, tokenizer, 'digest'))
    code = draft_grid.main(['--smoke', '--out', str(tmp_path / 'out'), '--lanes', '2',
                            '--groups', 'main', '--seeds', '1', '--minutes', '30', '--only',
                            'flat', '--set', 'epochs=1', '--more-clips', '2'])
    found = json.loads((tmp_path / 'out' / 'results.json').read_text())
    assert code == 0 and [run.get('failed') for run in found['runs']] == [None] * 4
    assert found['clips'].pop('extra') == 2
    assert found['clips'] == {'off-shelf': 4, 'on-shelf': 4, 'train': 12, 'val': 4,
                              'val-drive': 4}
