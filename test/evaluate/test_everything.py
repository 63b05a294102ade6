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
"""From measured numbers to tables and figures, and back without measuring."""

import json
from types import SimpleNamespace

from drafted import toy_folders
import pytest

from rspec_planner.errors import InputError
from rspec_planner.evaluate.everything import evaluate_everything
from rspec_planner.evaluate.figures import colours, wrapped
from rspec_planner.evaluate.grids import aarl_section, ablation_section, curves, read_grids
from rspec_planner.evaluate.report import Subject
from rspec_planner.evaluate.sampled_runs import Sampling
from rspec_planner.evaluate.tables import _goals, change, interval, sign
from rspec_planner.planner.drafts import DEFAULT_DRAFT


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp('all')
    target, drafts = toy_folders(root)
    docs, data = root / 'docs', root / 'docs' / 'data'
    data.mkdir(parents=True)
    (data / 'drafts.json').write_text(json.dumps({'runs': grid()}))
    (data / 'aarl.json').write_text(json.dumps(post_trained()))
    subject = Subject(drafts=(str(drafts['block']),), split='all', clips=2, checkpoint=target,
                      readers=(str(drafts['whole-flat']), str(drafts['whole-mirror'])),
                      floor_clips=4, drives=1, frames=1, sampling=Sampling())
    result = evaluate_everything(subject, driving=False, data=data, docs=docs)
    return SimpleNamespace(result=result, docs=docs, data=data, subject=subject)


def grid():
    def run(name, seed, per_clip, group='main', epochs=20.0):
        report = {'L': 5.0, 'per_clip': per_clip}
        return {'run': f'{name}/s{seed}', 'name': name, 'seed': seed, 'group': group,
                'parameters': 980_000, 'config': {'kind': 'dflash'},
                'settings': {'epochs': epochs},
                'splits': {split: report for split in ('val', 'on-shelf', 'off-shelf')}}

    runs = [run('dflash-l2-b16-w8-flat', seed, [[12, 2], [16, 2]]) for seed in (0, 1)]
    runs += [run('dflash-l2-b16-w8-mirror', seed, [[12, 3], [16, 3]]) for seed in (0, 1)]
    return [*runs, run('dflash-l2-b16-w8-flat+lr1', 0, [[1, 1], [1, 1]], 'tune'),
            {'run': 'broken/s0', 'failed': 'OutOfMemoryError'}]


def post_trained():
    moved = {split: {'mean': gain, 'least': gain - 0.01, 'most': gain + 0.01, 'last_L': [5.0]}
             for split, gain in (('val', 0.03), ('on-shelf', 0.02), ('off-shelf', 0.01))}
    curve = [{'step': step, 'val_L': 5.0 + 1e-4 * step} for step in (0, 50, 100)]
    runs = [{'kind': kind, 'anchors': anchors, 'samples': 5, 'rate': 3e-5, 'seed': 0,
             'curve': curve} for kind in ('dflash', 'eagle3') for anchors in ('static', 'live')]
    return {'rates': {'dflash': 3e-5, 'eagle3': 1e-4}, 'runs': runs,
            'variants': [{'kind': 'dflash', 'anchors': 'static', 'samples': 5, 'rate': 3e-5,
                          'seeds': [0, 1], 'change': moved, 'final_val_L': [5.0],
                          'final_drifted': [0.01, 0.02]}]}


def test_every_section_and_figure_is_written(world):
    text = (world.docs / 'results.md').read_text()
    for name in ('drafts', 'sampling', 'exactness', 'attention', 'routing', 'reuse', 'ablations',
                 'aarl'):
        assert f'<!-- {name}: generated' in text and f'<!-- /{name} -->' in text
    for path in world.result['figures']:
        assert open(path, 'rb').read(4) == b'\x89PNG'
    shown = [line.split('](')[1].rstrip(')') for line in text.splitlines()
             if line.startswith('![')]
    assert len(shown) == 6 == len(world.result['figures'])
    assert all((world.docs / link).is_file() for link in shown)
    assert 'EAGLE-3 (paper)' in text and 'Goals, off-shelf' in text and 'not met' in text


def test_redrawing_measures_nothing_and_gives_the_same(world):
    before = (world.docs / 'results.md').read_text()
    figures = {path: open(path, 'rb').read() for path in world.result['figures']}
    again = evaluate_everything(Subject(), data=world.data, docs=world.docs, redraw=True)
    assert (world.docs / 'results.md').read_text() == before
    assert {path: open(path, 'rb').read() for path in again['figures']} == figures


def test_text_outside_the_sections_stays(world):
    path = world.docs / 'results.md'
    path.write_text(path.read_text().replace('# Results', '# Results\n\nWritten by hand.'))
    evaluate_everything(Subject(), data=world.data, docs=world.docs, redraw=True)
    assert 'Written by hand.' in path.read_text()


def test_nothing_to_redraw_is_one_line(tmp_path):
    with pytest.raises(InputError, match='--redraw'):
        evaluate_everything(Subject(), data=tmp_path, docs=tmp_path, redraw=True)


def test_grids_are_read_by_what_they_hold(world):
    (world.data / 'other.json').write_text('{"variants": {"fp8": {}}}')  # no comparison of drafts
    drafts, aarl = read_grids(world.data)
    assert len(drafts) == 4 and len(aarl) == 1  # tuning and failed runs do not count
    assert len(curves(aarl)) == 2  # those at the learning rate of their kind


def test_the_ablation_table_pools_clips_over_seeds(world):
    text = ablation_section(read_grids(world.data)[0])
    # flat: 28 tokens in 4 iterations, mirror: 28 in 6, both seeds alike
    assert '7.00 (6.00–8.00)' in text and '4.67 (4.00–5.33)' in text
    assert '+2.333' in text
    assert 'positive in 3, negative in 0 and undecided in 0 of 3 cells' in text


def test_the_post_training_table_shows_the_range_over_seeds(world):
    text = aarl_section(read_grids(world.data)[1])
    assert '+0.030 (+0.020 … +0.040)' in text and '1.50 %' in text
    assert '5.000' in text and 'Seeds per variant: 2' in text


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / 'x.json').write_text('{')
    with pytest.raises(InputError, match=r'x\.json'):
        read_grids(tmp_path)


def test_numbers_are_written_with_their_doubt():
    found = {'mean': 0.061, 'ci95': [-0.01, 0.13]}
    assert interval(found) == '0.06 (-0.01–0.13)'
    assert change(found, 3) == '+0.061 (-0.010 … +0.130)'
    assert sign(found) == 'not distinguishable from zero'
    assert sign({'ci95': [0.01, 0.2]}) == 'positive'
    assert sign({'ci95': [-0.2, -0.1]}) == 'negative'


def test_names_keep_their_letters_and_colours_differ():
    assert wrapped('dflash-l2-b16-wall-flat').replace('\n', '') == 'dflash-l2-b16-wall-flat'
    assert '\n' in wrapped('dflash-l2-b16-wall-flat') and wrapped('paper\n3D mirror') == \
        'paper\n3D mirror'
    found = colours(['floor-b4', 'a', 'b', 'c', 'floor-b6'])
    assert len(set(found.values())) == 4 and found['floor-b4'] == found['floor-b6']


def test_only_drafts_of_equal_epochs_are_compared_with_the_base(world):
    runs = read_grids(world.data)[0]
    short = [{**run, 'name': 'dflash-l1+six-epochs', 'settings': {'epochs': 6.0}} for run in runs
             if run['name'] == 'dflash-l2-b16-w8-mirror']
    rows = {line.split('`')[1]: line for line in ablation_section([*runs, *short]).splitlines()
            if line.startswith('| `') and ' M |' in line}
    assert rows['dflash-l2-b16-w8-mirror'].endswith('| -2.33 (-2.67 … -2.00) |')
    assert rows['dflash-l1+six-epochs'].endswith('| – |')


def shown_draft(block, length, speed, clock):
    return {'block': block, 'accepted_length': {'mean': length}, 'theoretical_speedup': speed,
            'speedup_measured_verify': speed - 1, 'wall_clock_ratio_same_kernel': clock,
            'wall_clock': {'same_kernel_with_prefill': {'mean': clock - 0.5}},
            'above_floor': {'ci95': [1.0, 2.0]}}


def test_goals_judge_block_16_and_the_default_draft():
    drafts = {'other': shown_draft(16, 6.5, 9.0, 9.0), 'wide': shown_draft(32, 12.0, 8.0, 8.0),
              DEFAULT_DRAFT: shown_draft(24, 9.0, 4.0, 2.9)}
    result = {'length': {'splits': {'off-shelf': {'drafts': drafts}}}, 'draft_shapes': drafts}
    text = '\n'.join(_goals(result))
    assert 'accepted length at block 16: 6.50 (`other`), goal 7: **not met**' in text
    assert f'theoretical speed-up: 4.00 (`{DEFAULT_DRAFT}`), goal 4.36: **not met**' in text
    assert 'with the measured verify 3.00' in text and 'with the extra prefill 2.40' in text
    del drafts['other'], drafts[DEFAULT_DRAFT]
    text = '\n'.join(_goals(result))
    assert 'no draft of this block' in text and '8.00 (`wide`), goal 4.36: **met**' in text
