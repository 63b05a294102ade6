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
"""The objective of post-training: gradients in closed form, anchors, sampling, all processes."""

from __future__ import annotations

import copy
from dataclasses import replace

from aarl_toy import END, toy_cache, toy_draft, toy_target, WAYPOINTS
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from rspec_planner.errors import ConfigurationError
from rspec_planner.train.aarl import (
    AarlObjective,
    advantages,
    anchor_weights,
    kl_terms,
    policy_terms,
)
from rspec_planner.train.aarl_loop import AarlTrainer
from rspec_planner.train.aarl_reward import TextPlanner
from rspec_planner.train.aarl_sampling import (
    choose_starts,
    clip_order,
    contaminated,
    correct,
    draw_randoms,
    pick,
    visited,
)
from rspec_planner.train.aarl_settings import AarlSettings, load_aarl_settings
from rspec_planner.train.draft_acceptance import acceptance, simulate
from rspec_planner.train.draft_batch import DraftRows
from rspec_planner.train.optimizer import average_gradients

KINDS = ('dflash', 'eagle3')
SMALL = AarlSettings(samples=4, positions=2, reward_rows=40)


def objective_of(kind, settings=SMALL, drift=0.0):
    """Return the objective of a toy draft whose reference is itself before a drift."""
    target = toy_target()
    cache = toy_cache(target)
    draft = toy_draft(target, kind)
    reference = copy.deepcopy(draft).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(8)
    for weight in draft.parameters():
        weight.data += drift * torch.randn(weight.shape, generator=generator)
    rows = DraftRows(cache, draft.cfg, torch.arange(len(cache)))
    return AarlObjective(draft, reference, TextPlanner(target, 4), rows, settings)


def randoms_of(clips, settings=SMALL, step=0):
    return draw_randoms(5, step, clips, settings.samples, settings.positions,
                        settings.noise_draws, WAYPOINTS)


def test_policy_gradient_of_two_tokens_is_the_closed_form():
    logits = torch.tensor([0.3, -0.8], dtype=torch.float64, requires_grad=True)
    drawn = torch.tensor([[[0], [1], [1]]])
    rewards = torch.tensor([[0.5, 0.1, -0.4]], dtype=torch.float64)
    advantage = advantages(rewards, 1e-3)
    policy_terms(logits.log_softmax(-1).view(1, 1, 2), drawn, advantage).sum().backward()
    # d/dz of -mean_k A_k log softmax(z)[d_k] = -mean_k A_k (onehot(d_k) - p)
    p = 1.0 / (1.0 + np.exp(-1.1))
    a = (rewards[0].numpy() - rewards[0].numpy().mean()) / rewards[0].numpy().std()
    expected = -np.mean([a[0] * (1 - p), a[1] * (0 - p), a[2] * (0 - p)])
    np.testing.assert_allclose(logits.grad.numpy(), [expected, -expected], rtol=1e-10)


def test_positions_that_do_not_exist_have_no_gradient():
    logits = torch.randn((1, 2, 5), requires_grad=True)
    drawn = torch.tensor([[[3, -1], [1, -1]]])
    policy_terms(logits.log_softmax(-1), drawn, torch.tensor([[1.0, -2.0]])).sum().backward()
    assert logits.grad[0, 0].abs().max() > 0
    assert torch.equal(logits.grad[0, 1], torch.zeros(5))


def test_advantages_are_normalised_down_to_a_floor():
    rewards = torch.tensor([[1.0, 3.0], [0.001, 0.003]])
    found = advantages(rewards, 0.1)
    torch.testing.assert_close(found, torch.tensor([[-1.0, 1.0], [-0.01, 0.01]]))
    torch.testing.assert_close(advantages(rewards, 0.1, normalise=False)[0],
                               torch.tensor([-1.0, 1.0]))


def test_kl_is_the_exact_sum_in_the_direction_of_the_policy():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.3, 0.6])
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close(kl_terms(p.log(), q.log()), expected)
    assert not torch.isclose(kl_terms(q.log(), p.log()), expected)


@pytest.mark.parametrize(('kind', 'returns'), [('static', True), ('live', False),
                                               ('weighted_all', True), ('none', False)])
def test_only_fixed_anchors_pull_a_drifted_position_back(kind, returns):
    reference = torch.tensor([[[2.0, 0.0, 0.0], [0.0, 1.5, 0.0]]]).log_softmax(-1)
    labels = torch.tensor([[0, 1]])
    logits = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]], requires_grad=True)
    known = torch.ones((1, 2), dtype=torch.bool)
    before = correct(reference, labels)
    assert before.all() and correct(logits, labels).tolist() == [[False, True]]
    optimizer = torch.optim.SGD([logits], lr=2.0)
    for _ in range(200):
        weight = anchor_weights(kind, before, correct(logits, labels), known)
        optimizer.zero_grad()
        kl = kl_terms(logits.log_softmax(-1), reference)
        ((weight * kl).sum() / weight.sum().clamp(min=1.0)).backward()
        optimizer.step()
    assert correct(logits, labels).tolist() == [[returns, True]]


def test_weighted_anchors_reach_beyond_the_static_set():
    before = torch.tensor([[True, False, False]])
    known = torch.tensor([[True, True, False]])
    found = anchor_weights('weighted_all', before, before, known)
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.05, 0.0]]))


def test_pick_follows_the_weights_and_never_takes_a_zero():
    weights = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    uniform = torch.linspace(0, 1, 10001)
    drawn = pick(weights.expand(10001, 1, 6), uniform[:, None])[:, 0]
    share = torch.bincount(drawn, minlength=6) / 10001
    torch.testing.assert_close(share, weights, atol=2e-4, rtol=0)


def test_starts_are_anchors_with_a_refusal():
    wrong = torch.zeros((3, 4, 3), dtype=torch.bool)
    wrong[0, 1, 2] = wrong[0, 3, 0] = wrong[1, 2, 1] = True
    known = torch.ones_like(wrong)
    seen = set()
    for u in np.linspace(0.0, 0.999, 40):
        start, active = choose_starts(wrong, known, 'rejected', torch.full((3,), u))
        assert active.tolist() == [True, True, False]
        assert int(start[1]) == 2
        seen.add(int(start[0]))
    assert seen == {1, 3}


def test_geometric_starts_follow_a_decoding_run():
    known = torch.ones((1, 6, 2), dtype=torch.bool)
    known[0, 5] = known[0, 4, 1] = False  # the last anchors have one token and none to come
    wrong = torch.zeros_like(known)
    wrong[0, 0, 1] = wrong[0, 2, 0] = True
    # 0 accepts one -> 2 accepts none -> 3 accepts both -> 6
    assert visited(wrong, known).tolist() == [[0, -1, 1, 2, -1, -1]]
    total = 1 + 0.8 + 0.64
    for u, expected in ((0.99 / total, 0), (1.01 / total, 2), (1.79 / total, 2), (0.99, 3)):
        start, active = choose_starts(wrong, known, 'geometric', torch.tensor([u]))
        assert (int(start), bool(active)) == (expected, expected != 3)


def test_the_first_wrong_positions_are_contaminated():
    wrong = torch.tensor([[False, True, False, True, True], [False] * 5, [True] + [False] * 4])
    assert contaminated(wrong, 2).tolist() == [[1, 3], [-1, -1], [0, -1]]
    assert contaminated(wrong, 7).shape == (3, 7)


def test_clip_order_repeats_and_visits_every_clip_once_per_epoch():
    batches = [clip_order(3, 10, 4, step) for step in range(5)]
    stream = np.concatenate(batches)
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert list(stream[:10]) != list(stream[10:])
    np.testing.assert_array_equal(batches[3], clip_order(3, 10, 4, 3))
    assert len(clip_order(3, 3, 8, 2)) == 8


@pytest.mark.parametrize('kind', KINDS)
def test_kl_and_its_gradient_are_zero_at_the_start(kind):
    objective = objective_of(kind, AarlSettings(samples=4, positions=2, kl_weight=1.0))
    randoms = randoms_of(6)
    index = torch.arange(6)
    loss, parts = objective.loss(index, randoms)
    loss.backward()
    with_kl = [p.grad.clone() for p in objective.draft.parameters()]
    assert float(parts['kl']) < 1e-6  # rounding alone
    assert float(parts['drifted']) == 0.0 and float(parts['live']) == 1.0
    plain = objective_of(kind, AarlSettings(samples=4, positions=2, kl_weight=0.0))
    plain.loss(index, randoms)[0].backward()
    largest = max(float(p.grad.abs().max()) for p in plain.draft.parameters())
    assert largest > 0.0
    for one, p in zip(with_kl, plain.draft.parameters()):
        torch.testing.assert_close(one, p.grad, atol=2e-3 * largest, rtol=1e-3)


@pytest.mark.parametrize('kind', KINDS)
def test_the_draft_is_judged_where_the_simulation_rejects(kind):
    objective = objective_of(kind)
    cache, index = objective.cache, torch.arange(12)
    batch = objective.rows.batch(index)
    labels, free = objective.positions(batch)
    wrong = free & ~correct(objective.log_policy(objective.draft, batch), labels)
    order = visited(wrong, batch.labels >= 0)
    m = acceptance(objective.draft, cache)
    taken = simulate(m, cache.lengths, objective.draft.cfg.block)
    np.testing.assert_array_equal((order >= 0).sum(1).numpy(), taken.iterations)
    ended = batch.labels[..., :-1] == END
    assert ended.any() and not (free[..., 1:] & ended).any()


def test_samples_are_drawn_from_the_draft_at_wrong_positions_only():
    objective = objective_of('dflash')
    index = torch.arange(12)
    batch = objective.rows.batch(index)
    seen = {}

    def spy(index, group, labels, noise):
        seen['group'] = group
        return real(index, group, labels, noise)

    real, objective.rewards = objective.rewards, spy
    objective.loss(index, randoms_of(12))
    group = seen['group']
    labels, free = objective.positions(batch)
    log_pi = objective.log_policy(objective.draft, batch)
    placed = group.offsets >= 0
    assert group.active.any() and placed.any()
    best = group.at_offsets(log_pi).argmax(-1)
    assert (best != group.at_offsets(labels))[placed].all()
    assert torch.equal((group.drawn >= 0).all(1), placed)
    assert int(objective.head.ids[group.drawn.max()]) < 24  # never a forbidden id


def test_rewards_prefer_the_target_s_own_words():
    objective = objective_of('dflash')
    index = torch.arange(12)
    seen = {}

    def teach(index, group, labels, noise):
        teacher = group.at_offsets(labels)
        group.drawn[:, 0] = torch.where(group.offsets >= 0, teacher, -1)
        seen['found'] = real(index, group, labels, noise)
        seen['drawn'], seen['teacher'] = group.drawn, teacher
        return seen['found']

    real, objective.rewards = objective.rewards, teach
    objective.loss(index, randoms_of(12))
    errors, same = seen['found']
    active = same[:, 0] > 0
    assert active.any()
    assert torch.equal(errors[:, 0], torch.zeros(12)) and (same[active, 0] == 1.0).all()
    changed = (seen['drawn'] != seen['drawn'][:, :1]).any(-1) & active[:, None]
    assert changed.any()
    assert (errors[changed] > 0).all() and (same[changed] < 1.0).all()


def test_pieces_of_the_reward_do_not_change_it():
    whole = objective_of('dflash', AarlSettings(samples=4, positions=2, reward_rows=1000))
    pieces = objective_of('dflash', AarlSettings(samples=4, positions=2, reward_rows=10))
    index, randoms = torch.arange(7), randoms_of(7)
    torch.testing.assert_close(whole.loss(index, randoms)[1]['error'],
                               pieces.loss(index, randoms)[1]['error'])


def test_a_cache_without_prompts_is_refused():
    objective = objective_of('dflash')
    cache = replace(objective.cache, prefix=None)
    with pytest.raises(ConfigurationError, match='prefix=True'):
        AarlObjective(objective.draft, objective.reference, objective.planner,
                      DraftRows(cache, objective.draft.cfg, torch.arange(4)), SMALL)


def test_settings_are_checked():
    assert load_aarl_settings(None, samples=10, anchors='live').samples == 10
    with pytest.raises(ConfigurationError, match='anchors'):
        load_aarl_settings(None, anchors='fixed')
    with pytest.raises(ConfigurationError, match='samples=1'):
        load_aarl_settings(None, samples=1)
    with pytest.raises(ConfigurationError, match='sample'):
        load_aarl_settings(None, sample=3)


STEPS, BATCH = 2, 4


def train(kind, rank, world):
    """Take two steps of `world` processes with BATCH clips each; return the weights."""
    objective = objective_of(kind, drift=0.02)
    params = list(objective.draft.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05)
    for step in range(STEPS):
        order = clip_order(1, 12, BATCH * world if world > 1 else 2 * BATCH, step)
        randoms = randoms_of(len(order), step=step).share(rank, world)
        loss, _ = objective.loss(torch.from_numpy(order[rank::world].copy()), randoms)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(params)
        optimizer.step()
    return [p.detach().clone() for p in params]


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=2)
    weights = {kind: train(kind, rank, 2) for kind in KINDS}
    settings = replace(SMALL, max_steps=2, checkpoint_every=1, batch_clips=3, minutes=10.0)
    target = toy_target()
    cache = toy_cache(target, splits=('train',) * 8 + ('val',) * 4)
    draft = toy_draft(target, 'dflash', seed=rank)  # rank 0 shares its weights
    AarlTrainer(draft, target, cache, settings).run()
    weights['loop'] = [p.detach().clone() for p in draft.parameters()]
    torch.save(weights, f'{folder}/{rank}.pt')
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_take_the_step_of_one_with_twice_the_clips(tmp_path, monkeypatch):
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'lo')
    processes.spawn(work, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f'{rank}.pt', weights_only=True) for rank in (0, 1))
    assert all(torch.equal(one, two) for one, two in zip(first['loop'], second['loop']))
    for kind in KINDS:
        alone = train(kind, 0, 1)
        start = list(objective_of(kind, drift=0.02).draft.parameters())
        assert max(float((a - b.detach()).abs().max()) for a, b in zip(alone, start)) > 1e-3
        for one, two, single in zip(first[kind], second[kind], alone):
            assert torch.equal(one, two)
            torch.testing.assert_close(one, single, atol=1e-5, rtol=1e-4)
