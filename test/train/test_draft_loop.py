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
"""Training of drafts: it learns, it continues exactly, and processes stay equal."""

from dataclasses import replace
import json

from draft_toys import toy_cache, toy_target
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.train.draft import new_draft
from rspec_planner.train.draft_data import draft_vocabulary, share_of, TargetCache
from rspec_planner.train.draft_loop import DraftTrainer, on_stream
from rspec_planner.train.draft_settings import DraftSettings, load_draft_settings

SETTINGS = {'block': 6, 'window': 3, 'batch_clips': 8, 'epochs': 24.0, 'learning_rate': 8e-3,
            'evaluate_epochs': 6.0, 'precision': 'fp32'}


def trainer_of(target, cache, out=None, **over):
    settings = DraftSettings(**{**SETTINGS, **over})
    rows = cache.rows('train')
    draft, _ = new_draft(settings, target, cache, rows)
    return DraftTrainer(draft, target, cache, settings, out, train_rows=rows)


def finish(trainer, resume=False):
    trainer.prepare(resume)
    for _ in trainer.steps():
        pass
    return trainer


@pytest.fixture(scope='module')
def target():
    return toy_target()


@pytest.fixture(scope='module')
def cache(target):
    return toy_cache(target, 48)


class TestSettings:
    def test_the_shipped_config_is_valid_and_overrides_win(self):
        settings = load_draft_settings('eagle3', 'config/train_draft.yaml', block=8, seed=None)
        assert (settings.kind, settings.block, settings.seed) == ('eagle3', 8, 0)
        assert settings == DraftSettings(kind='eagle3', block=8)

    @pytest.mark.parametrize('values, message', [
        ({'bloc': 3}, 'bloc.*did you mean block'), ({'epochs': 0}, 'epochs=0'),
        ({'taps': '1,x'}, 'taps'), ({'context': 'none'}, 'context.*all, text'),
        ({'ema_decay': 1.0}, 'ema_decay')])
    def test_a_wrong_setting_is_one_line_with_its_name(self, values, message):
        with pytest.raises(ConfigurationError, match=message) as caught:
            load_draft_settings('dflash', None, **values)
        assert '\n' not in str(caught.value)

    def test_a_draft_of_the_whole_prompt_taps_no_last_layer(self, target):
        cfg = DraftSettings(window=0).draft_config(target.cfg)
        assert cfg.taps == (0, 1) and cfg.label == 'dflash-l2-b16-wall-flat'
        assert DraftSettings().draft_config(target.cfg).taps == (1, 2)


class TestCache:
    def test_a_saved_cache_reads_back(self, cache, tmp_path):
        cache.save(tmp_path)
        found = TargetCache.load(tmp_path)
        assert (found.names, found.splits, found.profile) == (cache.names, cache.splits,
                                                              cache.profile)
        assert found.tensors().keys() == cache.tensors().keys()
        for name, value in cache.tensors().items():
            assert torch.equal(found.tensors()[name], value)
        found.check_target('toy')
        with pytest.raises(EngineError, match='build the cache again'):
            found.check_target('other')
        (tmp_path / 'ids.safetensors').unlink()
        with pytest.raises(EngineError, match='not a target cache'):
            TargetCache.load(tmp_path)

    def test_rows_and_parts(self, cache):
        rows = cache.rows('val')
        assert {cache.splits[i] for i in rows.tolist()} == {'val'}
        part = cache.take(rows)
        assert len(part) == len(rows) and torch.equal(part.ids, cache.ids[rows])
        assert torch.equal(part.tail_taps, cache.tail_taps[:, rows])
        with pytest.raises(ConfigurationError, match='on-shelf'):
            cache.rows('on-shelf')
        shares = [share_of(torch.arange(11), rank, 3).tolist() for rank in range(3)]
        assert shares == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


class TestTraining:
    @pytest.mark.parametrize('kind, window', [('dflash', 3), ('eagle3', 3), ('dflash', 0),
                                              ('eagle3', 0)])
    def test_it_learns_texts_that_the_states_tell(self, target, cache, kind, window, tmp_path):
        trainer = trainer_of(target, cache, tmp_path, kind=kind, window=window)
        first = trainer.lengths(trainer.val_rows).strict
        finish(trainer)
        best = trainer.lengths(trainer.val_rows)
        assert first < 2.0 and best.strict > 3.5  # a run of one clip can commit 5 to 7
        lines = [json.loads(x) for x in (tmp_path / 'log.jsonl').read_text().splitlines()]
        assert lines == trainer.curve and len(lines) == 4
        assert lines[-1]['val_L'] > lines[0]['val_L'] - 0.5
        assert lines[-1]['loss'] < lines[0]['loss']

    def test_a_reduced_head_learns_too(self, target, cache):
        trainer = finish(trainer_of(target, cache, reduced_vocab=True))
        ids, _ = draft_vocabulary(cache, trainer.train_rows)
        assert trainer.draft.cfg.draft_vocab == len(ids)
        assert trainer.lengths(trainer.val_rows).strict > 3.5

    def test_the_average_of_the_weights_is_what_remains(self, target, cache):
        trainer = finish(trainer_of(target, cache, ema_decay=0.9, epochs=4.0))
        live = [p.detach().clone() for p in trainer.draft.parameters()]
        assert any(not torch.equal(a, b) for a, b in zip(live, trainer.average.values))

    def test_a_resumed_run_ends_where_an_unbroken_one_does(self, target, cache, tmp_path):
        whole = finish(trainer_of(target, cache, epochs=4.0, ema_decay=0.9))
        broken = trainer_of(target, cache, tmp_path, epochs=4.0, ema_decay=0.9)
        broken.prepare()
        for step in broken.steps():
            if step == 5:
                break
        broken.save_state()
        again = finish(trainer_of(target, cache, tmp_path, epochs=4.0, ema_decay=0.9), True)
        assert again.step == whole.step
        for a, b in zip(again.draft.parameters(), whole.draft.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def test_preparing_leaves_the_weights_alone(self, target, cache):
        trainer = trainer_of(target, cache)
        before = [p.detach().clone() for p in trainer.draft.parameters()]
        trainer.prepare()
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.draft.parameters()))
        for state in trainer.step_of.optimizer.state.values():
            assert all(float(value.abs().sum()) == 0.0 for value in state.values())

    def test_every_epoch_visits_every_clip_in_another_order(self, target, cache):
        trainer = trainer_of(target, cache)
        orders = [trainer.order(epoch) for epoch in range(2)]
        assert all(sorted(order) == list(range(len(trainer.rows))) for order in orders)
        assert not np.array_equal(*orders)
        assert np.array_equal(orders[1], trainer_of(target, cache).order(1))

    def test_warm_up_then_cosine(self, target, cache):
        trainer = trainer_of(target, cache, warmup_fraction=0.1, final_lr_fraction=0.2)
        peak = SETTINGS['learning_rate']
        assert trainer.rate(0.0) < 0.2 * peak
        assert trainer.rate(0.1) == pytest.approx(peak * (0.2 + 0.8 * 0.9755), rel=1e-3)
        assert trainer.rate(1.0) == pytest.approx(0.2 * peak)

    def test_a_time_limit_ends_the_run(self, target, cache):
        trainer = finish(trainer_of(target, cache, minutes=0.002, epochs=1e6))
        assert 0 < trainer.step < 1000

    def test_unfinished_texts_are_not_learned(self, target, cache):
        ids = cache.ids.clone()
        lengths = cache.lengths.clone()
        rows = cache.rows('train')[:3]
        ids[rows, lengths[rows] - 1] = -1
        lengths[rows] -= 1
        trainer = trainer_of(target, replace(cache, ids=ids, lengths=lengths))
        assert len(trainer.rows) == len(cache.rows('train')) - 3
        assert not torch.isin(rows, trainer.rows).any()


@pytest.mark.gpu
@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
@pytest.mark.parametrize('window', [3, 0])
@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_a_captured_step_trains_like_a_plain_one(kind, window, precision):
    target = toy_target().to('cuda')
    cache = toy_cache(target, 48).to('cuda')
    found = []
    for graph in (True, False):
        with on_stream(torch.device('cuda')):
            trainer = finish(trainer_of(target, cache, kind=kind, window=window, graph=graph,
                                        precision=precision, ema_decay=0.9, epochs=4.0))
            assert trainer.graphed == graph
            found.append([p.detach().clone() for p in trainer.draft.parameters()])
        torch.cuda.synchronize()
    exact = 1e-3 if precision == 'fp32' else 3e-2
    for a, b in zip(*found):
        assert float((a - b).norm() / b.norm()) < exact


def _rank(rank, world, port, folder):
    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank,
                            world_size=world)
    torch.set_num_threads(1)
    target = toy_target()
    trainer = finish(trainer_of(target, toy_cache(target, 48), epochs=2.0))
    torch.save({'weights': trainer.draft.state_dict(), 'rows': trainer.rows,
                'step': trainer.step}, folder / f'{rank}.pt')
    dist.destroy_process_group()


def test_two_processes_keep_equal_weights_and_share_the_clips(target, cache, tmp_path):
    port = 20_000 + (torch.initial_seed() + id(tmp_path)) % 20_000
    mp.spawn(_rank, args=(2, port, tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f'{rank}.pt') for rank in range(2))
    assert first['step'] == second['step'] == 6
    for name, value in first['weights'].items():
        assert torch.equal(value, second['weights'][name]), name
    assert not torch.isin(first['rows'], second['rows']).any()
    began = trainer_of(target, cache).draft.state_dict()
    assert not any(torch.equal(value, first['weights'][name]) for name, value in began.items()
                   if value.is_floating_point() and value.dim() == 2)
