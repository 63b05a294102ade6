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
"""All questions in one pass over toy checkpoints: the keys, the counts and what must agree."""

import json
import shutil

from drafted import toy_folders
import pytest

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate.figures import plain_forms
from rspec_planner.evaluate.reasoning_runs import Stand
from rspec_planner.evaluate.report import evaluate_one, evaluate_reasoning, QUESTIONS, Subject
from rspec_planner.evaluate.sampled_runs import Sampling
from rspec_planner.evaluate.tables import budget_table, sampling_section
from rspec_planner.train.profiles import new_target
from rspec_planner.train.saving import export

VARIANTS = ['block+tree4', 'block+tree12', 'chain+chain12', 'chain+tree4', 'chain+branch4',
            'chain+tree12', 'chain+branch12']


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    return toy_folders(tmp_path_factory.mktemp('toy'))


@pytest.fixture(scope='module')
def result(folders):
    target, drafts = folders
    subject = Subject(drafts=(str(drafts['block']), str(drafts['chain'])),
                      readers=(str(drafts['whole-flat']), str(drafts['whole-mirror'])),
                      split='val', clips=4, checkpoint=target, floor_clips=8, drives=1, frames=2,
                      trees=(4, 12), sampling=Sampling(0.8, 0.95, seed=3))
    return evaluate_reasoning(QUESTIONS, subject)


def test_the_report_is_plain_json(result):
    assert json.loads(json.dumps(result)) == result
    assert result['draft_shapes']['block']['block'] == 6
    assert set(QUESTIONS) <= set(result)


def test_every_draft_says_and_drives_what_greedy_decoding_does(result):
    exact = result['exactness']
    assert exact['clips'] == 4 and exact['token_mismatches'] == 0
    assert exact['token_mismatches_width_1'] == 0 and not exact['divergences']
    assert set(exact['drafts']) == {'block', 'chain', *VARIANTS}
    deployed = exact['deployed']
    assert (deployed['drives'], deployed['frames'], deployed['token_mismatches']) == (1, 2, 0)
    # an untrained expert magnifies the last bits that a verify of another width leaves, so only
    # runs through the same wide verify can be held to the tolerance
    for name in ('block', 'chain'):
        row = exact['drafts'][name]
        assert row['trajectory_mismatches'] == 0
        assert row['largest_deviation_mm'] < exact['tolerance_mm']


def test_lengths_come_with_floor_intervals_and_clocks(result):
    split = result['length']['splits']['val']
    assert list(split['drafts']) == ['floor-b4', 'floor-b6', 'block', 'chain', *VARIANTS]
    assert set(split['comparisons']) == {
        'block+tree4 - block', 'block+tree12 - block',
        'chain+tree4 - chain', 'chain+branch4 - chain', 'chain+branch4 - chain+tree4',
        'chain+tree12 - chain+chain12', 'chain+branch12 - chain+chain12',
        'chain+branch12 - chain+tree12'}
    assert split['drafts']['chain+branch12']['form'] == 'branch'
    assert split['drafts']['chain+branch12']['nodes'] == 12
    more = [split['drafts'][f'block+tree{n}']['accepted_length']['mean'] for n in (4, 12)]
    assert more[0] <= more[1]  # the smaller tree is a part of the larger one
    for name, row in split['drafts'].items():
        low, high = row['accepted_length']['ci95']
        mean = row['accepted_length']['mean']
        assert low <= mean <= high and mean >= 1.0
        assert row['routine_share'] == pytest.approx((mean - 1) / mean, abs=1e-4)
        assert row['wall_clock_ratio_same_kernel'] > 0 and row['wall_clock_ratio_eager'] > 0
        assert sum(row['iterations_histogram']) == 4
        assert ('above_floor' in row) == (not name.startswith('floor'))
        parts = row['breakdown_ms']
        assert min(parts.values()) >= 0.0
    block = split['drafts']['block']
    expected = block['accepted_length']['mean'] / (1 + block['c'])
    assert block['theoretical_speedup'] == pytest.approx(expected, rel=1e-3)
    prefill = result['length']['prefill']
    assert prefill['clips'] == 4 and prefill['plain_ms'] > 0
    assert {name: row['tail'] for name, row in prefill['drafts'].items()} == {'block': 4,
                                                                              'chain': 4}


def test_sampling_stands_beside_greedy_by_both_rules(result):
    sampled = result['length']['sampled']
    assert (sampled['temperature'], sampled['top_p'], sampled['seed']) == (0.8, 0.95, 3)
    split = sampled['splits']['val']
    assert split['texts_unlike_greedy'] > 0  # it does sample
    for name in ('block', 'chain'):
        row, greedy = split['drafts'][name], result['length']['splits']['val']['drafts'][name]
        assert row['greedy']['accepted_length'] == greedy['accepted_length']
        assert row['match']['text_mismatches'] == 0
        for rule in ('match', 'rejection'):
            length, change = row[rule]['accepted_length']['mean'], row[rule]['change']['mean']
            assert length >= 1.0
            assert change == pytest.approx(length - greedy['accepted_length']['mean'], abs=1e-4)
    text = sampling_section(sampled)
    assert '--temperature 0.8`, top-p 0.95, seed 3' in text
    assert text.count('| val | ') == 2


def test_the_seed_alone_decides_what_is_sampled(folders):
    target, drafts = folders

    def sampled(seed):
        subject = Subject(drafts=(str(drafts['chain']),), split='val', clips=2, floor_clips=4,
                          checkpoint=target, sampling=Sampling(seed=seed))
        return evaluate_one('length', subject)['sampled']['splits']

    first = sampled(1)
    assert sampled(1) == first != sampled(2)


def test_equal_budgets_stand_in_one_table(result):
    lines = '\n'.join(budget_table(result['length']['splits']['val'])).splitlines()
    assert [line.split(' | ')[1] for line in lines if line.startswith('| `chain`')] == ['4', '12']
    assert list(budget_table({'drafts': {'a': {}}})) == []


def test_figures_leave_trees_and_longer_chains_to_the_tables(result):
    split = result['length']['splits']['val']
    assert list(plain_forms(split)) == ['floor-b4', 'floor-b6', 'block', 'chain']


def test_attention_is_that_of_the_drafts_that_read_everything(result):
    attention = result['attention']
    assert set(attention['drafts']) == {'whole-flat', 'whole-mirror'}
    for row in attention['drafts'].values():
        for layer in row['layers']:
            total = sum(layer[group]['mean'] for group in ('visual', 'history', 'text',
                                                           'generated'))
            assert total == pytest.approx(1.0, abs=1e-3)
        assert row['controls']['as trained']['change']['mean'] == 0.0
        assert {'other rotary', 'no visual columns', 'window 1', 'window 8', 'window 64'} <= set(
            row['controls'])
    assert list(attention['shift']) == ['whole-flat - whole-mirror']


def test_routing_counts_every_token_once(result):
    routing, split = result['routing'], result['length']['splits']['val']
    total = sum(routing['kinds'].values())
    assert total == pytest.approx(4 * split['tokens'])
    for name in ('block', 'chain'):
        kinds = routing['drafts'][name]['kinds'].values()
        assert sum(kind['tokens'] for kind in kinds) == total - 4  # the first is of no iteration


def test_reuse_is_exact_and_has_every_spacing(result):
    reuse = result['reuse']
    assert reuse['frames'] == 2 and reuse['token_mismatches'] == 0
    assert list(reuse['ways']) == ['greedy', 'stateless', '0.1 s', '0.2 s', '0.5 s']


def test_one_question_has_its_keys_at_the_top(folders):
    target, drafts = folders
    found = evaluate_one('length', Subject(drafts=(str(drafts['block']),), split='on-shelf',
                                           clips=2, checkpoint=target, floor_clips=4))
    assert found['drafts']['block'] == found['splits']['on-shelf']['drafts']['block']
    assert found['clips'] == 2 and found['revision'] == 'r1'


def test_refusals_name_the_remedy(folders, tmp_path):
    target, drafts = folders
    with pytest.raises(ConfigurationError, match='in-shelf'):
        evaluate_one('length', Subject(drafts=(str(drafts['block']),), split='in-shelf',
                                       checkpoint=target))
    with pytest.raises(ConfigurationError, match='nowhere'):
        evaluate_one('length', Subject(drafts=('nowhere',), checkpoint=target))
    other = export(*new_target(smoke=True, seed=5), tmp_path / 'other', {})
    with pytest.raises(EngineError, match='trained for target'):
        evaluate_one('exactness', Subject(drafts=(str(drafts['block']),), checkpoint=other))


def test_one_draft_under_two_names_decodes_once_and_equal_folder_names_stay_apart(folders,
                                                                                  tmp_path):
    target, drafts = folders
    other = tmp_path / 'second' / 'block'
    shutil.copytree(drafts['whole-flat'], other)
    stand = Stand(target, drafts=(drafts['block'], f'{drafts["block"]}/../block', other))
    assert list(stand.drafts) == ['block', 'second/block']
    assert stand.label(f'{drafts["block"]}/../block') == 'block'
    assert stand.label(other) == 'second/block'
    assert [draft.cfg.window for draft in stand.drafts.values()] == [4, 0]
