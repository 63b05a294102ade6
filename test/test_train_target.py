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
"""Training of the target: settings, schedule, losses, optimisers, and whole short runs."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
import torch.distributed as dist
import torch.multiprocessing as mp

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate.batched import BatchedPlanner
from rspec_planner.model.checkpoint import load_target, read_manifest
from rspec_planner.model.text import place_visual
from rspec_planner.model.unicycle import UnicycleActionSpace
from rspec_planner.planner.pipeline import Planner
from rspec_planner.planner.prompt import build_prompt
from rspec_planner.train.augment import Augmentation
from rspec_planner.train.examples import ExampleEncoder, history_poses
from rspec_planner.train.farm import RenderedPair
from rspec_planner.train.labels import object_grid
from rspec_planner.train.objective import _ACROSS_M, _ALONG_M, LossWeights, TargetObjective
from rspec_planner.train.optimizer import (
    average_gradients,
    build_optimizers,
    Muon,
    orthogonalise,
    WeightAverage,
)
from rspec_planner.train.pool import ClipPool
from rspec_planner.train.profiles import new_target, with_noise_scale
from rspec_planner.train.schedule import TimeSchedule
from rspec_planner.train.settings import load_settings, TargetSettings
from rspec_planner.train.target import main, train_target
from rspec_planner.world.generate import clip_observation, generate_pair
from rspec_planner.world.renderer import Renderer
from rspec_planner.world.rig import Rig
from rspec_planner.world.splits import split_specs

STILL = Augmentation(0, 0, 0, 0, 0, 0)


@pytest.fixture(scope='module')
def pairs():
    renderer = Renderer(Rig(width=192, height=96))
    specs = split_specs('train')
    turn = next(s for s in specs if s.family == 'left_turn' and s.event)
    return [generate_pair(spec, renderer) for spec in (specs[0], turn)]


@pytest.fixture(scope='module')
def batch(pairs):
    target, tokenizer = new_target(smoke=True)
    rig = Rig(width=192, height=96)
    pool = ClipPool(len(pairs), 0, ExampleEncoder(target.cfg, tokenizer, 3.0),
                    (4, 4, 96, 192, 3), torch.device('cpu'))
    for ordinal, clips in enumerate(pairs):
        pool.add(RenderedPair(ordinal, 0, clips, np.stack([object_grid(c, rig) for c in clips])),
                 np.stack([c.images for c in clips]))
    return pool.batch(np.arange(len(pairs)))


def objective(weights=None, augmentation=STILL):
    target, tokenizer = new_target(smoke=True)
    return TargetObjective(target, ExampleEncoder(target.cfg, tokenizer, 3.0),
                           weights or LossWeights(flow_samples=2), augmentation)


class TestSettings:
    def test_the_shipped_config_is_valid_and_overrides_win(self):
        settings = load_settings('config/train_target.yaml', minutes=3, batch_clips=None)
        assert settings.minutes == 3.0
        assert settings.batch_clips == load_settings('config/train_target.yaml').batch_clips

    @pytest.mark.parametrize('values, message', [
        ({'learnig_rate': 1e-3}, 'learnig_rate.*did you mean learning_rate'),
        ({'batch_clips': 'many'}, "batch_clips='many'.*int"),
        ({'batch_clips': 2.5}, 'batch_clips=2.5'),
        ({'batch_clips': 7}, 'batch_clips=7.*even'),
        ({'minutes': -1}, 'minutes=-1'),
        ({'compile': 'yes'}, 'compile'),
        ({'precision': 'fp8'}, 'precision.*bf16'),
        ({'quiet_samples': 7}, 'quiet_samples=7.*flow_samples=6'),
        ({'noise_scale': -0.5}, 'noise_scale=-0.5'),
    ])
    def test_a_wrong_setting_is_one_line_with_its_name(self, values, message):
        with pytest.raises(ConfigurationError, match=message) as caught:
            load_settings(None, **values)
        assert '\n' not in str(caught.value)

    @pytest.mark.parametrize('content', ['- a list', 'a: [', None])
    def test_an_unreadable_file_is_named(self, tmp_path, content):
        path = tmp_path / 'train.yaml'
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigurationError, match='train.yaml'):
            load_settings(path)


class TestSchedule:
    def make(self, **options):
        now = [100.0]
        schedule = TimeSchedule(total_s=110, reserve_s=10, warmup_s=8, clock=lambda: now[0],
                                **options)
        return schedule, now

    def test_warm_up_then_cosine_over_the_time_left_after_the_first_step(self):
        schedule, now = self.make()
        now[0] = 120.0  # rendering took 20 s
        schedule.begin()
        assert schedule.factor() < 0.05
        now[0] = 128.0
        assert schedule.factor() == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.1)), abs=1e-6)
        now[0] = 160.0
        assert schedule.factor() == pytest.approx(0.5)
        assert not schedule.finished()
        now[0] = 200.0
        assert schedule.finished() and schedule.factor() == pytest.approx(0.0)

    def test_steps_can_end_it_and_drive_the_decay(self):
        schedule, now = self.make(max_steps=10)
        schedule.begin()
        assert schedule.factor(5) == pytest.approx(0.5, abs=1e-3)
        assert schedule.finished(10) and not schedule.finished(9)


class TestObjective:
    def test_its_forward_is_the_decoder_of_the_target(self, batch):
        model = objective().eval()
        target = model.target
        rows = batch.token_ids.shape[1]
        with torch.no_grad():
            features, deepstack = model.see(batch.images)
            hidden, keys, values = model.read(batch.token_ids, features, deepstack)
            seen, taps = BatchedPlanner(target, None).encode(batch.images)
            visual = batch.token_ids == target.cfg.tokens.image_pad
            expected, k, v = target.text(
                place_visual(target.text.embed(batch.token_ids), visual, seen),
                model.cos[:rows], model.sin[:rows], visual_mask=visual, deepstack=taps,
                return_kv=True)
        assert torch.allclose(target.text.norm(hidden), expected, atol=1e-5)
        assert torch.allclose(torch.stack(keys), k, atol=1e-5)
        assert torch.allclose(torch.stack(values), v, atol=1e-5)

    def test_text_loss_is_the_weighted_cross_entropy_of_the_reasoning(self, batch):
        model = objective().eval()
        with torch.no_grad():
            hidden, _, _ = model.read(batch.token_ids, *model.see(batch.images))
            loss = model._text_loss(hidden, batch)
            logits = model.target.text.logits(model.target.text.norm(hidden)).log_softmax(-1)
        total = weight = 0.0
        for row in range(batch.token_ids.shape[0]):
            start, end = int(batch.prompt_lengths[row]), int(batch.lengths[row])
            for k, position in enumerate(range(start, end)):
                w = float(batch.token_weights[row, k])
                total -= w * float(logits[row, position - 1, batch.token_ids[row, position]])
                weight += w
        assert float(loss) == pytest.approx(total / weight, rel=1e-5)

    @pytest.mark.parametrize('scale', [0.0, 0.5])
    def test_the_flow_loss_reaches_the_decoder_only_as_far_as_asked(self, batch, scale):
        gradients = []
        for gradient in (scale, 1.0):
            model = objective(LossWeights(expert_gradient=gradient, flow_samples=2)).eval()
            hidden, keys, values = model.read(batch.token_ids, *model.see(batch.images))
            torch.manual_seed(3)
            model._flow_error(keys, values, batch).square().mean().backward()
            grad = model.target.text.layers[0].self_attn.v_proj.weight.grad
            gradients.append(torch.zeros(1) if grad is None else grad)
            assert model.target.expert.action_out_proj.weight.grad.abs().sum() > 0
        assert torch.allclose(gradients[0], scale * gradients[1], atol=1e-7)

    def test_the_expert_sees_nothing_behind_the_reasoning(self, batch):
        model = objective().eval()
        with torch.no_grad():
            hidden, keys, values = model.read(batch.token_ids, *model.see(batch.images))
            losses = []
            for noise in (0.0, 5.0):
                for row, length in enumerate(batch.lengths.tolist()):
                    for cache in (*keys, *values):
                        cache[row, :, length:] += noise
                torch.manual_seed(3)
                losses.append(float(model._flow_error(keys, values, batch).square().mean()))
        assert losses[0] == losses[1]

    def test_the_path_loss_counts_the_metres_that_an_error_leads_away(self, batch):
        model = objective(LossWeights(path=1.0, flow_samples=2))
        error = torch.zeros(2 * len(batch.actions), 64, 2)
        error[:, :20] = torch.tensor((0.3, 0.2))  # normalised, for two seconds
        loss = float(model._path_loss(error, batch))
        # the same by rolling the label out with and without the error
        space = UnicycleActionSpace(model.target.cfg.action_space)
        speed = 10.0 * batch.future[:, 0, :2].norm(dim=-1)
        actions = batch.actions.clone()
        straight = actions * torch.tensor((1.0, 0.0))
        shoved = straight + error[:len(actions)]
        paths = [space.integrate(a.double(), speed.double())[0] for a in (straight, shoved)]
        apart = (paths[1] - paths[0])[:, :40]
        tolerance = torch.tensor((_ALONG_M, _ACROSS_M)).T.double()
        expected = float(0.5 * (apart / tolerance).square().sum(-1).mean())
        assert loss == pytest.approx(expected, rel=0.25) and loss > 0.0
        assert float(model._path_loss(2.0 * error, batch)) == pytest.approx(4.0 * loss, rel=1e-4)
        late = torch.zeros_like(error)
        late[:, 40:] = 1.0
        assert float(model._path_loss(late, batch)) == 0.0

    def test_quiet_copies_start_nearer_to_the_middle_of_the_noise(self, batch):
        model = objective(LossWeights(flow_samples=4, quiet_samples=2))
        data = torch.zeros(400, 64, 2)
        spread = model._noise(data).flatten(1).std(1)
        assert float(spread[200:].min()) > 0.7 and float(spread[:200].max()) < 1.3
        assert float(spread[:200].mean()) == pytest.approx(1 / 3, abs=0.07)
        model = objective(LossWeights(flow_samples=4))
        assert float(model._noise(data).flatten(1).std(1).min()) > 0.7

    def test_new_heads_can_learn_without_moving_the_tower(self, batch):
        model = objective()
        losses = {}
        for share in (0.0, 1.0):
            model.head_gradient = share
            model.zero_grad()
            torch.manual_seed(3)
            model(batch)[0].backward()
            losses[share] = (model.target.vision.blocks[0].attn.qkv.weight.grad.norm(),
                             model.heads.object_logits.weight.grad.norm())
        assert losses[0.0][0] < 0.9 * losses[1.0][0]
        assert losses[0.0][1] == pytest.approx(float(losses[1.0][1]), rel=1e-4)

    def test_every_weight_gets_a_gradient(self, batch):
        model = objective(augmentation=Augmentation()).train()
        loss, parts = model(batch)
        loss.backward()
        assert set(parts) == {'text', 'flow', 'decision', 'objects'}
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


class TestOptimizer:
    def test_orthogonalised_matrices_have_singular_values_near_one(self):
        torch.manual_seed(0)
        for shape in ((3, 20, 50), (2, 50, 20)):
            values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
            assert 0.6 < float(values.min()) and float(values.max()) < 1.3

    def test_muon_descends_on_matrices_of_several_shapes(self):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8)),
                  nn.Parameter(torch.randn(8, 16))]
        optimizer = Muon(params, lr=0.05)
        losses = []
        for _ in range(60):
            loss = sum(p.square().sum() for p in params)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.2 * losses[0]

    @pytest.mark.parametrize('choice', ['adamw', 'muon'])
    def test_each_weight_is_optimised_once_and_tables_do_not_decay(self, choice):
        model = objective()
        optimizers = build_optimizers(model, learning_rate=1e-3, betas=(0.9, 0.95),
                                      weight_decay=0.05, matrix_optimizer=choice,
                                      muon_learning_rate=0.02)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        seen = [id(p) for group in groups for p in group['params']]
        assert sorted(seen) == sorted(id(p) for p in model.parameters())
        decays = {id(p): group['weight_decay'] for group in groups for p in group['params']}
        text = model.target.text
        assert decays[id(text.embed_tokens.weight)] == decays[id(text.lm_head.weight)] == 0.0
        assert decays[id(text.layers[0].mlp.up_proj.weight)] == 0.05

    def test_the_average_swaps_in_and_out(self):
        model = nn.Linear(2, 2)
        average = WeightAverage(model, 0.9)
        start = model.weight.detach().clone()
        with torch.no_grad():
            model.weight += 1.0
        average.update()
        moved = model.weight.detach().clone()
        average.swap()
        assert torch.all(model.weight > start) and torch.all(model.weight < moved)
        average.swap()
        assert torch.equal(model.weight, moved)


def _mean_gradient(rank, port, results):
    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank,
                            world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    data = torch.arange(24.0).view(8, 3) / 10
    model(data[4 * rank:4 * rank + 4]).square().mean().backward()
    if rank == 1:
        model[2].bias.grad = None  # unused in one process: counts as zero
    average_gradients(list(model.parameters()))
    results[rank] = [p.grad.tolist() for p in model.parameters()]
    dist.destroy_process_group()


def test_two_processes_get_the_gradient_of_the_whole_batch(unused_tcp_port):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_mean_gradient, (unused_tcp_port, results), nprocs=2)
        first, second = results[0], results[1]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    data = torch.arange(24.0).view(8, 3) / 10
    model(data).square().mean().backward()
    assert first == second
    for ours, p in zip(first[:-1], model.parameters()):
        assert torch.allclose(torch.tensor(ours), p.grad, atol=1e-6)


@pytest.fixture
def unused_tcp_port():
    import socket
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


class TestBatchedPlanner:
    @pytest.mark.parametrize('scale', [1.0, 0.0])
    def test_it_says_and_drives_what_the_planner_does(self, pairs, scale):
        target, tokenizer = new_target(smoke=True)
        with_noise_scale(target.eval(), scale)
        clips = [clip for pair in pairs for clip in pair]
        # one Euler step: with random weights more steps amplify the last bit a millionfold
        options = {'max_reasoning_tokens': 12, 'flow_steps': 1}
        planner = Planner(target, tokenizer, num_samples=2, **options)
        batched = BatchedPlanner(target, tokenizer, **options)
        prompts = [build_prompt(target.cfg, tokenizer, history_poses(c.history),
                                c.navigation_text) for c in clips]
        for rows in ([0, 1], [2, 3]):  # one prompt length each
            images = torch.from_numpy(np.stack([clips[i].images for i in rows])).flatten(1, 2)
            noise = torch.randn((2, 64, 2), generator=torch.Generator().manual_seed(0))
            answers = batched.answer([prompts[i] for i in rows], images,
                                     np.stack([clips[i].history for i in rows]),
                                     noise[None].repeat(len(rows), 1, 1, 1))
            for k, i in enumerate(rows):
                plan = planner.plan(clip_observation(clips[i]))
                assert plan.reasoning.token_ids == answers.token_ids[k]
                assert plan.reasoning.text == answers.texts[k]
                assert np.abs(plan.candidates[:, 1:, :2] - answers.xy[k]).max() < 2e-3
                again = Planner(target, tokenizer, num_samples=2, seed=1, **options).plan(
                    clip_observation(clips[i])).candidates
                same = [np.allclose(a, b) for a, b in zip(again, plan.candidates)]
                assert same == [scale == 0.0, False]  # the first no longer depends on the noise


@pytest.mark.slow
class TestRuns:
    def test_eight_clips_are_learnt_and_the_checkpoint_plans(self, tmp_path, pairs):
        result = train_target(None, tmp_path, smoke=True, max_steps=60, ema_decay=0.9,
                              report_every_s=4.0, revision='abc', path_weight=0.1,
                              quiet_samples=1, noise_scale=0.25)
        records = [json.loads(line) for line in (tmp_path / 'log.jsonl').open()]
        losses = [record['losses'] for record in records if 'losses' in record]
        assert result['steps'] == 60
        assert losses[-1]['text'] < 0.35 * losses[0]['text'] or losses[-1]['text'] < 1.0
        manifest = read_manifest(result['checkpoint'])
        assert manifest['revision'] == 'abc' and manifest['steps'] == 60
        assert manifest['validation']['clips'] == 4
        assert load_target(result['checkpoint']).cfg.flow.noise_scale == 0.25
        plan = Planner.load(result['checkpoint']).plan(clip_observation(pairs[0][0]))
        assert plan.poses.shape == (65, 4)

    def test_a_run_resumes_and_another_starts_from_its_weights(self, tmp_path):
        small = {'smoke': True, 'train_clips': 4, 'start_clips': 4, 'val_clips': 2}
        train_target(None, tmp_path / 'a', max_steps=3, **small)
        result = train_target(None, tmp_path / 'a', max_steps=5, resume=True, **small)
        assert result['steps'] == 5 and result['clips_seen'] == 20
        result = train_target(None, tmp_path / 'b', max_steps=2, **small,
                              init_from=tmp_path / 'a' / 'checkpoint')
        assert result['steps'] == 2
        with pytest.raises(EngineError, match='state.pt.*start without --resume'):
            (tmp_path / 'a' / 'state.pt').write_bytes(b'nonsense')
            train_target(None, tmp_path / 'a', max_steps=6, resume=True, **small)

    def test_time_that_ends_before_the_first_step_is_an_error(self, tmp_path):
        with pytest.raises(ConfigurationError, match='minutes=0.1'):
            train_target(None, tmp_path, smoke=True, minutes=0.1, reserve_s=5.9)


class TestFront:
    @pytest.mark.parametrize('arguments, message', [
        (['--config', '/no/such.yaml'], '/no/such.yaml'),
        (['--resume', '--init-from', 'x'], '--resume and --init-from'),
        (['--batch-clips', '5'], 'batch_clips=5'),
    ])
    def test_bad_input_is_one_line_and_an_exit_code(self, tmp_path, capsys, arguments, message):
        assert main(['--out', str(tmp_path), *arguments]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count('\n') == 1

    def test_settings_cover_what_a_run_needs(self):
        assert TargetSettings().reserve_s < TargetSettings().minutes * 60
