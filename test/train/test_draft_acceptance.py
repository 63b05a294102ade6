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
"""Accepted lengths without running the decoder, against runs of a plain speculative loop."""

from draft_toys import toy_cache, toy_target
import numpy as np
import pytest
import torch

from rspec_planner.decode.accept import accept
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config, eagle3_config
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.train.draft_acceptance import acceptance, matches, proposals_of, simulate
from rspec_planner.train.draft_batch import DraftRows


def plain_run(text, propose, block, stops):
    """Return what each iteration of a speculative run commits, token by token."""
    done, committed = 1, []
    while text[done - 1] not in stops and done < len(text):
        guess = propose(done - 1)[:block - 1]
        best = [*text[done:], *[-7] * block][:block]
        taken = accept([text[done - 1], *guess], best, stops, 99).committed
        assert list(taken) == text[done:done + len(taken)]
        committed.append(len(taken))
        done += len(taken)
    return committed


@pytest.fixture(scope='module')
def target():
    return toy_target()


@pytest.fixture(scope='module')
def cache(target):
    return toy_cache(target)


@pytest.mark.parametrize('seed', range(8))
def test_walking_the_matches_equals_plain_runs(seed):
    rng = np.random.default_rng(seed)
    stops, block = (1, 2), int(rng.integers(2, 9))
    texts = [[*rng.integers(3, 6, rng.integers(0, 15)).tolist(), int(rng.integers(1, 3))]
             for _ in range(20)]
    longest = max(len(t) for t in texts)
    m = torch.zeros((20, longest), dtype=torch.int64)
    runs = []
    for row, text in enumerate(texts):
        guesses = []
        for j in range(len(text)):
            guess = (text[j + 1:] + [9] * block)[:block - 1]
            guesses.append([g if rng.random() < 0.7 else 8 for g in guess])
            label = (text[j + 1:] + [-1] * block)[:block - 1]
            m[row, j] = matches(torch.tensor(guesses[j]), torch.tensor(label))
        runs.append(plain_run(text, lambda j, g=guesses: g[j], block, stops))
    found = simulate(m, torch.tensor([len(t) for t in texts]), block)
    assert found.committed.tolist() == [sum(run) for run in runs]
    assert found.iterations.tolist() == [len(run) for run in runs]
    total = sum(len(run) for run in runs)
    assert found.strict == pytest.approx(sum(map(sum, runs)) / total if total else 0.0)
    assert found.drafted_share <= 1.0
    assert found.author_style >= found.strict


def test_counts_of_one_run_by_hand():
    # text of 7 tokens: 3 matches and a bonus, then the last two both accepted, stop included
    m = torch.tensor([[3, 0, 0, 0, 5, 0, 0]])
    found = simulate(m, torch.tensor([7]), 6)
    assert (found.committed.tolist(), found.iterations.tolist()) == ([6], [2])
    assert found.strict == 3.0 and found.author_style == 3.5
    assert found.right.tolist() == [2, 2, 1, 0, 0]
    assert found.tried.tolist() == [2, 2, 1, 1, 1]
    assert found.drafted_share == pytest.approx(5 / 6)
    short = simulate(m, torch.tensor([7]), 3)  # a narrower block commits 3 at most
    assert short.iterations.tolist() == [3] and short.committed.tolist() == [6]
    report = found.report()
    assert report['per_clip'] == [[6, 2]] and report['L'] == 3.0
    assert report['ci95'] == [3.0, 3.0] and report['iterations_histogram'] == [0, 0, 1]


def test_a_text_that_is_only_the_stop_has_no_iteration():
    found = simulate(torch.zeros((2, 4), dtype=torch.int64), torch.tensor([1, 1]), 4)
    assert found.iterations.tolist() == [0, 0] and found.strict == 0.0


@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
@pytest.mark.parametrize('window', [0, 3])
def test_acceptance_equals_a_run_that_drafts_step_by_step(target, cache, kind, window):
    build, config = {'dflash': (Dflash, dflash_config), 'eagle3': (Eagle3, eagle3_config)}[kind]
    cfg = config(target.cfg, block=6, window=window, taps=(0, 1))
    draft = build(cfg).initialise(seed=1).bind(target.text, target.cfg.tokens)
    teach(draft, cache)
    index = torch.arange(len(cache))
    m = acceptance(draft, cache)
    assert 0 < int(m.max())
    found = simulate(m, cache.lengths, cfg.block)
    view = DraftRows(cache, cfg, index)
    stops = target.cfg.tokens.stop_ids
    for clip in range(len(cache)):
        text = cache.ids[clip, :cache.lengths[clip]].tolist()
        _, guesses, _ = proposals_of(draft, view, index[clip:clip + 1])
        run = plain_run(text, lambda j, g=guesses: g[0, j].tolist(), cfg.block, stops)
        assert (found.committed[clip], found.iterations[clip]) == (sum(run), len(run))


def teach(draft, cache):
    """Train a little, so that some proposals are right."""
    from rspec_planner.train.draft_objective import DraftObjective, LossOptions
    index = torch.arange(len(cache))
    view = DraftRows(cache, draft.cfg, index)
    objective = DraftObjective(draft, toy_target().text, LossOptions())
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    draft.train()
    for _ in range(12):
        optimizer.zero_grad()
        objective(view.batch(index))[0].backward()
        optimizer.step()


def test_behind_the_end_of_the_reasoning_comes_the_trajectory(target, cache):
    cfg = dflash_config(target.cfg, block=6, window=3)
    draft = Dflash(cfg).initialise(seed=1).bind(target.text, target.cfg.tokens).eval()
    tokens = target.cfg.tokens
    _, guesses, labels = proposals_of(draft, DraftRows(cache, cfg, torch.arange(len(cache))),
                                      torch.arange(len(cache)))
    for clip in range(len(cache)):
        anchor = int(cache.lengths[clip]) - 2  # the token cot_end itself
        assert cache.ids[clip, anchor] == tokens.cot_end
        assert guesses[clip, anchor, 0] == tokens.traj_future_start
    assert int(matches(guesses, labels)[0, int(cache.lengths[0]) - 2]) == 1
