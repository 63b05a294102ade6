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
"""Whole post-training runs of toy drafts: learning, resuming, selecting, exporting, the grid."""

from __future__ import annotations

from dataclasses import replace
import json

from aarl_toy import DIGEST, toy_cache, toy_draft, toy_target
import numpy as np
import pytest
import torch

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.draft_checkpoint import load_draft, save_draft
from rspec_planner.train import aarl_loop
from rspec_planner.train.aarl_grid import find_drafts, Plan, variants_of
from rspec_planner.train.aarl_loop import AarlTrainer, compare, context_of
from rspec_planner.train.aarl_settings import AarlSettings
from rspec_planner.train.draft_acceptance import AcceptedLengths
from rspec_planner.train.random_target import OpenedTarget

SPLITS = ('train',) * 10 + ('val',) * 4 + ('on-shelf',) * 3 + ('off-shelf',) * 3
SHORT = AarlSettings(max_steps=4, checkpoint_every=2, batch_clips=4, samples=3, flow_steps=2,
                     learning_rate=1e-3, warmup_steps=2, drift_clips=6)


@pytest.fixture(scope='module')
def toy():
    target = toy_target()
    return target, toy_cache(target, len(SPLITS), splits=SPLITS)


def trainer_of(toy, kind='dflash', settings=SHORT, out=None):
    target, cache = toy
    return AarlTrainer(toy_draft(target, kind), target, cache, settings, out)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.draft.parameters()])


@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
def test_training_lengthens_what_the_target_accepts(toy, kind):
    settings = replace(SHORT, max_steps=60, checkpoint_every=60, learning_rate=3e-3,
                       batch_clips=10)
    trainer = trainer_of(toy, kind, settings)
    before = trainer.lengths(trainer.draft, 'train').strict
    trainer.run()
    assert trainer.lengths(trainer.draft, 'train').strict > before + 0.15
    assert trainer.lengths(trainer.reference, 'train').strict == before


def test_a_resumed_run_equals_an_uninterrupted_one(toy, tmp_path):
    whole = trainer_of(toy, out=tmp_path / 'whole')
    whole.run()
    trainer_of(toy, settings=replace(SHORT, max_steps=2), out=tmp_path / 'parts').run()
    second = trainer_of(toy, out=tmp_path / 'parts')
    second.run(resume=True)
    assert second.step == 4
    torch.testing.assert_close(weights(second), weights(whole), atol=1e-6, rtol=1e-5)
    lines = (tmp_path / 'parts' / 'curve.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in lines] == [0, 2, 4]
    assert second.best_step == whole.best_step


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(toy):
    first, again, other = (trainer_of(toy, settings=replace(SHORT, seed=seed, max_steps=2))
                           for seed in (0, 0, 1))
    for trainer in (first, again, other):
        trainer.run()
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


def test_the_best_checkpoint_is_exported_with_its_lengths(toy, tmp_path, monkeypatch):
    target, _ = toy
    trainer = trainer_of(toy, out=tmp_path)
    kept = {}
    values = iter((1.0, 3.0, 2.0))  # at steps 0, 2 and 4
    real = trainer.lengths

    def scripted(draft, split):
        found = real(draft, split)
        kept[trainer.step] = weights(trainer)
        value = next(values)
        return replace(found, committed=np.array([int(value * 10)]), iterations=np.array([10]))

    monkeypatch.setattr(trainer, 'lengths', scripted)
    trainer.run()
    monkeypatch.undo()
    assert trainer.best_step == 2
    result = trainer.finish({'kind': 'draft', 'target': DIGEST, 'context': 'all'})
    stored = load_draft(tmp_path / 'checkpoint', target, 'cpu')
    flat = torch.cat([p.flatten() for p in stored.parameters()])
    assert torch.equal(flat, kept[2].half().float())
    assert stored.cfg.name == 'toy-dflash-aarl' and context_of(tmp_path / 'checkpoint') == 'all'
    again = trainer.lengths(stored, 'off-shelf')
    assert result['L']['off-shelf'] == round(again.strict, 4)
    assert set(result['difference']) == {'val', 'on-shelf', 'off-shelf'}
    assert json.loads((tmp_path / 'result.json').read_text())['best_step'] == 2


def test_the_curve_counts_what_drifted(toy):
    trainer = trainer_of(toy, settings=replace(SHORT, anchors='none', max_steps=2))
    trainer.run()
    first, last = trainer.curve[0], trainer.curve[-1]
    assert first['val_drifted'] == first['train_drifted'] == 0.0
    assert first['val_live'] == first['train_live'] == 1.0
    with torch.no_grad():
        for weight in trainer.draft.parameters():
            weight.mul_(-1.0)  # nothing is right any more but by chance
    moved = trainer.drift(trainer.rows)
    assert moved['drifted'] > 0.5 and last['kl'] >= 0.0


def test_differences_are_paired():
    def lengths(iterations):
        iterations = np.array(iterations)
        return AcceptedLengths(np.full(40, 12), iterations, np.zeros(40, np.int64),
                               np.ones(3, np.int64), np.ones(3, np.int64))

    spread = np.tile([2, 3, 4, 6], 10)
    found = compare(lengths(spread), lengths(spread))
    assert found['pooled'] == {'mean': 0.0, 'ci95': [0.0, 0.0]} and found['clips_changed'] == 0
    better = spread.copy()
    better[::4] = 1
    low, high = compare(lengths(spread), lengths(better))['per_clip']['ci95']
    assert 0.0 < low < 0.25 * 6.0 < high


def test_a_folder_of_the_command_is_a_whole_run(toy, tmp_path, monkeypatch):
    target, cache = toy
    save_draft(toy_draft(target, 'eagle3'), tmp_path / 'sft', {
        'kind': 'draft', 'target': DIGEST, 'settings': {'context': 'all'}})
    cache.save(tmp_path / 'cache')
    monkeypatch.setattr(aarl_loop, 'open_any_target',
                        lambda *_, **__: OpenedTarget(target, None, DIGEST))
    found = aarl_loop.train_aarl(None, tmp_path / 'out', init_from=tmp_path / 'sft',
                                 cache=tmp_path / 'cache', **{
                                     key: getattr(SHORT, key) for key in (
                                         'max_steps', 'checkpoint_every', 'batch_clips',
                                         'samples', 'flow_steps', 'drift_clips')})
    assert found['steps'] == 4 and found['name'] == 'toy-eagle3-aarl'
    assert (tmp_path / 'out' / 'checkpoint' / 'manifest.json').is_file()


def test_the_grid_tunes_each_kind_before_its_variants():
    plan = Plan(('dflash', 'eagle3'), (1e-5, 1e-4), seeds=2)
    first = [plan.pop() for _ in range(4)]
    assert plan.pop() is None
    assert {(job.kind, job.rate) for job in first} == {
        (kind, rate) for kind in ('dflash', 'eagle3') for rate in (1e-5, 1e-4)}
    for job in first:
        if job.kind == 'dflash':
            plan.done(job, 3.0 + job.rate)
    order = [plan.pop() for _ in range(9)]
    assert plan.pop() is None
    assert all(job.kind == 'dflash' and job.rate == 1e-4 for job in order)
    assert [(job.anchors, job.samples, job.seed) for job in order[:5]] == [
        ('live', 5, 0), ('none', 5, 0), ('static', 5, 1), ('live', 5, 1), ('none', 5, 1)]
    for job in first:
        if job.kind == 'eagle3':
            plan.done(job, float('-inf'))  # nothing to learn from runs that failed
    assert plan.pop() is None


def test_drafts_are_found_by_kind_and_name(tmp_path):
    for name, kind in (('a', 'dflash'), ('b', 'dflash'), ('c', 'eagle3')):
        (tmp_path / name / 'checkpoint').mkdir(parents=True)
        (tmp_path / name / 'checkpoint' / 'config.json').write_text(
            json.dumps({'draft': {'kind': kind}}))
    found = find_drafts(tmp_path, {'dflash': 'b', 'eagle3': None})
    assert found == {'dflash': str(tmp_path / 'b' / 'checkpoint'),
                     'eagle3': str(tmp_path / 'c' / 'checkpoint')}
    with pytest.raises(ConfigurationError, match='no draft'):
        find_drafts(tmp_path, {'dflash': 'd', 'eagle3': None})


def test_variants_are_averaged_over_seeds():
    def entry(seed, change):
        return {'kind': 'dflash', 'anchors': 'live', 'samples': 5, 'rate': 1e-5, 'seed': seed,
                'difference': {'val': {'pooled': {'mean': change}}},
                'last_L': {'val': 3.0 + seed},
                'curve': [{'val_L': 4.0 + change, 'val_drifted': 0.1}]}

    found = variants_of([entry(0, 0.1), entry(1, 0.3), {'error': 'x'}])
    assert len(found) == 1 and found[0]['seeds'] == [0, 1]
    assert found[0]['change']['val'] == {'mean': pytest.approx(0.2), 'least': 0.1, 'most': 0.3,
                                         'last_L': [3.0, 4.0]}
