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
"""What is cached of a target over noise, bags and recorded clips, and drafts trained from it."""

from __future__ import annotations

from dataclasses import replace
import json
from pathlib import Path

from click.testing import CliRunner
from drives import RIG, StraightDrive
import pytest
import torch

from rspec_planner.cli import cli
from rspec_planner.errors import ConfigurationError, EngineError, InputError
from rspec_planner.model.config import alpamayo_r1, tiny
from rspec_planner.model.draft_checkpoint import load_draft
from rspec_planner.offline_observations import bag_observations
from rspec_planner.planner import staging
from rspec_planner.planner.pipeline import Planner
from rspec_planner.planner.tokenizer import build_tokenizer
from rspec_planner.train import cache_parts
from rspec_planner.train.aarl_loop import train_aarl
from rspec_planner.train.cache_parts import join_caches, load_cache, part_folders
from rspec_planner.train.cache_target import cache_target, draft_layers, RANDOM_TOKENS
from rspec_planner.train.draft import train_draft
from rspec_planner.train.draft_batch import DraftRows
from rspec_planner.train.draft_data import TargetCache
from rspec_planner.train.profiles import smoke_profile
from rspec_planner.train.random_target import open_any_target
from rspec_planner.train.target_clips import random_clips, split_of
from rspec_planner.world.record import record_world, RecordOptions

CPU = torch.device('cpu')


@pytest.fixture(scope='module', autouse=True)
def toy():
    """Let `--profile toy` stand for a target of width 64 and four layers."""
    tokenizer = build_tokenizer(['brake because it is slowing'])
    profile = smoke_profile(tiny(tokenizer.token_ids, tokenizer.vocab_size))
    profile = replace(profile, name='toy', text=replace(profile.text, num_layers=4))
    patch = pytest.MonkeyPatch()
    patch.setitem(staging.SHAPES_ONLY, 'toy', lambda: profile)
    yield profile
    patch.undo()


@pytest.fixture(scope='module')
def noise(tmp_path_factory):
    """Return the report of ten clips of noise in parts of four, prompts included."""
    return cache_target(tmp_path_factory.mktemp('noise'), profile='toy', random_clip_count=10,
                        prefix=True, actions=True, part_clips=4, batch=3, val_share=0.25,
                        device='cpu')


def test_layers_of_the_released_profile():
    assert draft_layers(alpamayo_r1()) == (1, 9, 17, 25, 32, 33, 35)


def test_random_prompts_have_the_length_of_the_profile():
    clip = next(random_clips(alpamayo_r1(), 1, 0.1))
    assert clip.prompt.length == 3006
    assert clip.prompt.rope_delta == -2592
    assert clip.images.shape == (16, 320, 576, 3)
    ids = clip.prompt.token_ids
    assert ids[-1] == alpamayo_r1().tokens.cot_start
    assert (ids == alpamayo_r1().tokens.image_pad).sum() == 2880


def test_parts_join_to_what_one_part_holds(noise, tmp_path):
    assert (noise['clips'], noise['parts'], noise['synthetic']) == (10, 3, True)
    whole = cache_target(tmp_path, profile='toy', random_clip_count=10, prefix=True,
                         actions=True, part_clips=64, batch=3, val_share=0.25, device='cpu')
    assert whole['parts'] == 1
    joined, single = load_cache(noise['cache']), load_cache(whole['cache'])
    assert joined.names == single.names
    assert joined.splits == single.splits == tuple(split_of(k, 0.25) for k in range(10))
    assert joined.layers == single.layers == (1, 2, 3)
    for name in ('ids', 'lengths', 'prompt_lengths', 'prompt_ids'):
        assert torch.equal(getattr(joined, name), getattr(single, name)), name
    for name in ('tail_taps', 'prefix', 'actions'):
        torch.testing.assert_close(getattr(joined, name).float(), getattr(single, name).float(),
                                   rtol=2e-2, atol=2e-2)
    for row in range(10):
        mine, other = (cache.positions[cache.layouts[row]] for cache in (joined, single))
        assert torch.equal(mine, other)
    assert int(joined.lengths.max()) == RANDOM_TOKENS  # some may have stopped by chance
    assert bool(joined.finished.all())


def test_a_repeated_run_adds_nothing_and_an_interrupted_one_goes_on(noise, tmp_path):
    options = {'profile': 'toy', 'part_clips': 4, 'val_share': 0.25, 'device': 'cpu'}
    first = cache_target(tmp_path, random_clip_count=10, limit=4, **options)
    assert (first['clips'], first['parts']) == (4, 1)
    written = (part_folders(tmp_path)[0] / 'ids.safetensors').stat().st_mtime_ns
    second = cache_target(tmp_path, random_clip_count=10, **options)
    assert (second['clips'], second['parts']) == (10, 3)
    assert (part_folders(tmp_path)[0] / 'ids.safetensors').stat().st_mtime_ns == written
    assert cache_target(tmp_path, random_clip_count=10, **options)['parts'] == 3
    with pytest.raises(EngineError, match='choose another --out'):
        cache_target(tmp_path, random_clip_count=10, **options, seed=1)


def test_chosen_layers_are_the_rows_of_all_layers(noise, tmp_path):
    every = cache_target(tmp_path, profile='toy', random_clip_count=10, layers='all', batch=3,
                         val_share=0.25, device='cpu')
    every, some = load_cache(every['cache']), load_cache(noise['cache'])
    assert every.layers == () and len(every.tail_taps) == 4
    for layer in some.layers:
        torch.testing.assert_close(some.tail_taps[some.tap_row(layer)].float(),
                                   every.tail_taps[layer].float(), rtol=2e-2, atol=2e-2)
    with pytest.raises(ConfigurationError, match='keeps layers .* and not 0'):
        some.tap_row(0)


def test_prompts_may_stay_in_their_files(noise, monkeypatch):
    near = load_cache(noise['cache'])
    monkeypatch.setattr(cache_parts, 'MAPPED_BYTES', 0)
    far = load_cache(noise['cache'])
    assert 'prefix' in near.tensors() and 'prefix' not in far.tensors()
    index = torch.tensor([9, 0, 4, 3, 3])
    assert torch.equal(far.prefix[index], near.prefix[index])


@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
def test_drafts_and_post_training_run_from_the_cache(noise, kind, tmp_path, monkeypatch):
    options = {'profile': 'toy', 'cache': noise['cache'], 'batch_clips': 4, 'block': 4,
               'keep_state': False}
    result = train_draft(kind, None, tmp_path / kind, epochs=8.0, evaluate_epochs=8.0, **options)
    assert result['steps'] > 5 and result['synthetic']
    memory = result['memory_gib']
    assert memory['optimizer'] == pytest.approx(2 * memory['draft'], abs=2e-3)
    assert not (tmp_path / kind / 'state.pt').exists()
    opened = open_any_target('', 'toy', CPU, whole=False)
    draft = load_draft(result['checkpoint'], opened.target)
    assert draft.cfg.kind == kind
    if kind == 'eagle3':  # once with prompts that stay in their files
        monkeypatch.setattr(cache_parts, 'MAPPED_BYTES', 0)
    after = train_aarl(None, tmp_path / 'aarl', init_from=result['checkpoint'], profile='toy',
                       cache=noise['cache'], max_steps=2, checkpoint_every=2, batch_clips=2,
                       samples=2, keep_state=False)
    assert after['steps'] == 2 and after['synthetic']
    assert 'memory_gib' in after


@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
def test_training_goes_on_from_a_draft(noise, kind, tmp_path):
    """A run without steps to speak of leaves the weights of the draft that it began with."""
    options = {'profile': 'toy', 'cache': noise['cache'], 'batch_clips': 4, 'keep_state': False}
    first = train_draft(kind, None, tmp_path / 'first', block=4, epochs=4.0, **options)
    second = train_draft(kind, None, tmp_path / 'second', init_from=first['checkpoint'],
                         epochs=1.0, learning_rate=1e-9, **options)
    target = open_any_target('', 'toy', CPU, whole=False).target
    one, two = (load_draft(r['checkpoint'], target) for r in (first, second))
    assert two.cfg == one.cfg and two.cfg.block == 4  # the settings say 16
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], weight, rtol=1e-3, atol=1e-4)
    other = {'dflash': 'eagle3', 'eagle3': 'dflash'}[kind]
    with pytest.raises(ConfigurationError, match=f'is a draft of kind {kind}'):
        train_draft(other, None, tmp_path / 'third', init_from=first['checkpoint'], **options)


def test_a_draft_alone_needs_only_the_tables(toy):
    target = open_any_target('', 'toy', CPU, whole=False).target
    held = sum(weight.numel() for weight in target.parameters() if not weight.is_meta)
    text = toy.text
    assert held == 2 * text.vocab_size * text.hidden_size + text.hidden_size


def test_a_draft_of_random_weights_is_refused_by_real_ones(noise, tmp_path):
    with pytest.raises(EngineError, match='build the cache again'):
        train_draft('dflash', None, tmp_path, cache=noise['cache'], target='tiny')


def test_a_draft_that_taps_other_layers_names_them(noise):
    cache = load_cache(noise['cache'])
    from rspec_planner.model.draft import dflash_config
    cfg = dflash_config(cache.profile, taps=(0, 2), window=8, block=4)
    rows = torch.arange(2)
    with pytest.raises(ConfigurationError, match='not 0'):
        DraftRows(cache, cfg, rows).batch(rows)


def test_caches_of_two_targets_do_not_join(noise, tmp_path):
    parts = [TargetCache.load(folder) for folder in part_folders(noise['cache'])]
    with pytest.raises(EngineError, match='differ in digest'):
        join_caches([parts[0], replace(parts[1], digest='other')])
    wide = torch.cat((parts[1].prompt_ids, parts[1].prompt_ids), dim=1)
    with pytest.raises(EngineError, match='prompt columns; .*--route-room'):
        join_caches([parts[0], replace(parts[1], prompt_ids=wide)])
    with pytest.raises(EngineError, match='different tensors'):
        join_caches([parts[0], replace(parts[1], prefix=None)])


@pytest.fixture(scope='module')
def bag(tmp_path_factory):
    path = tmp_path_factory.mktemp('bag') / 'world.mcap'
    record_world(path, StraightDrive(), 3.0, RecordOptions(), rig=RIG)
    return path


def test_a_bag_is_cached_as_it_is_planned(bag, tmp_path):
    """The texts are the planner's own, trigger by trigger, in the order of the bag."""
    made = cache_target(tmp_path, target='tiny', bag=(bag,), bag_source=bag_observations,
                        device='cpu', max_tokens=64, limit=6)
    assert not made['synthetic']
    cache, planner = load_cache(tmp_path), Planner.load('tiny')
    seen = list(bag_observations(bag, planner.profile, None))
    assert len(seen) > 10
    assert cache.names == tuple(f'world.mcap/{s.t0_ns}' for s in seen[:6])
    assert set(cache.families) == {'bag'} and set(cache.splits) == {'val'}
    for row, observation in enumerate(seen[:6]):
        said = cache.ids[row, :cache.lengths[row]].tolist()
        assert tuple(said) == planner.plan(observation).reasoning.token_ids


@pytest.mark.parametrize('options, words', [
    ({'profile': 'toy'}, 'give one source'),
    ({'random_clip_count': 2}, 'either --target'),
    ({'profile': 'nobody', 'random_clip_count': 2}, "profile 'nobody' is unknown"),
    ({'profile': 'toy', 'random_clip_count': 2, 'layers': '1,9'}, 'the target has layers 0 .. 3'),
    ({'profile': 'toy', 'random_clip_count': 2, 'layers': 'a'}, "layers='a'"),
    ({'profile': 'toy', 'random_clip_count': 2, 'val_share': 1.0}, 'between 0 and 1'),
    ({'profile': 'toy', 'bag': (Path('x'),)}, 'nobody reads bags here'),
    ({'profile': 'toy', 'physical_ai': Path('x')}, 'no weights and no tokenizer')])
def test_arguments_that_make_no_sense_are_one_line(tmp_path, options, words):
    with pytest.raises(ConfigurationError, match=words) as error:
        cache_target(tmp_path, device='cpu', **options)
    assert '\n' not in str(error.value)


def test_the_command_prints_one_object(tmp_path):
    result = CliRunner().invoke(cli, [
        'train', 'cache-target', '--profile', 'toy', '--random-clips', '2', '--device', 'cpu',
        '--out', str(tmp_path), '--json'])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])['clips'] == 2


def test_a_missing_bag_is_named(tmp_path):
    with pytest.raises(InputError, match='nowhere'):
        cache_target(tmp_path / 'out', target='tiny', bag=(tmp_path / 'nowhere',),
                     bag_source=bag_observations, device='cpu')
