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
"""The comparison must see a wrong token, a moved path, and the place where texts part."""

from types import SimpleNamespace

import numpy as np
import pytest

from rspec_planner.decode.stats import DecodeStats
from rspec_planner.evaluate.exactness import (
    apart_m,
    DeployedPair,
    Divergences,
    exactness_report,
    first_difference,
    LISTED,
    TOLERANCE_M,
)
from rspec_planner.evaluate.reasoning_runs import PLAIN, Run, wide_plain
from rspec_planner.evaluate.survey import Taken

PATH = np.cumsum(np.ones((64, 2)), axis=0)
SHAPE = SimpleNamespace(block=4)


def run(ids=(1, 2, 3), xy=PATH):
    return Run(tuple(ids), DecodeStats(1, (2,)), 5, 1.0, xy)


def taken(**changed):
    runs = {PLAIN: run(), 'd': run(), wide_plain(4): run(), **changed}
    clip = SimpleNamespace(spec=SimpleNamespace(pair_id='val/x/0/', event=True))
    return Taken('val', clip, 9, runs)


def test_equal_runs_have_no_mismatch():
    report = exactness_report([taken(), taken()], {'d': SHAPE}, Divergences())
    assert report['clips'] == 2 and report['token_mismatches'] == 0
    assert report['trajectory_mismatches'] == 0 and report['largest_deviation_mm'] == 0.0
    assert report['drafts']['d']['bit_equal_trajectories'] == 2


def test_one_wrong_token_and_one_moved_waypoint_are_counted():
    moved = PATH.copy()
    moved[40, 1] += 2 * TOLERANCE_M
    clips = [taken(d=run((1, 9, 3))), taken(d=run(xy=moved)), taken()]
    report = exactness_report(clips, {'d': SHAPE}, Divergences())
    assert report['token_mismatches'] == report['token_mismatches_width_1'] == 1
    assert report['trajectory_mismatches'] == 1
    assert report['largest_deviation_mm'] == pytest.approx(2e3 * TOLERANCE_M)


def test_a_deviation_within_the_tolerance_is_no_mismatch():
    report = exactness_report([taken(d=run(xy=PATH + 0.5 * TOLERANCE_M))], {'d': SHAPE},
                              Divergences())
    assert report['trajectory_mismatches'] == 0
    assert report['drafts']['d']['bit_equal_trajectories'] == 0


def test_the_worst_draft_stands_at_the_top():
    shapes = {'d': SHAPE, 'e': SHAPE}
    report = exactness_report([taken(e=run((1, 2))), taken(e=run((1, 2)))], shapes,
                              Divergences())
    assert report['token_mismatches'] == 2 and report['drafts']['d']['token_mismatches'] == 0


def test_texts_part_where_they_first_differ():
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 7, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


def test_divergences_are_listed_with_the_gap():
    divergences, clip = Divergences(), taken(d=run((1, 9, 3)))
    stand = SimpleNamespace(top_two=lambda frame, ids, index: 0.25 if index == 1 else 9.0)
    divergences.take(stand, None, clip.clip, clip)
    assert divergences.found == [{'clip': 'val/x/0//True', 'run': 'd', 'index': 1, 'width_1': 2,
                                  'said': 9, 'top2_gap': 0.25}]


def test_runs_without_trajectories_are_refused():
    with pytest.raises(ValueError, match='act=True'):
        apart_m(run(xy=None), run())


def test_divergences_behind_the_list_are_still_counted():
    divergences, clip = Divergences(), taken(d=run((1, 9, 3)))
    stand = SimpleNamespace(top_two=lambda frame, ids, index: 0.25)
    for _ in range(LISTED + 7):
        divergences.take(stand, None, clip.clip, clip)
    report = exactness_report([clip], {'d': SHAPE}, divergences)
    assert len(report['divergences']) == LISTED and report['divergences_found'] == LISTED + 7


def test_the_deployed_pair_sees_another_text_and_another_path():
    def plan(ids=(1, 2), shift=0.0):
        return SimpleNamespace(reasoning=SimpleNamespace(token_ids=ids),
                               poses=np.zeros((65, 4)) + [shift, 0.0, 0.0, 5.0 * shift])

    said = iter([plan(), plan((1, 3)), plan(shift=2 * TOLERANCE_M), plan(shift=1e-5)])
    pair = DeployedPair(lambda observation: next(said), lambda observation: plan())
    for _ in range(4):
        pair.take(None)
    assert pair.report() == {'frames': 4, 'token_mismatches': 1, 'trajectory_mismatches': 1,
                             'bit_equal_trajectories': 2,
                             'largest_deviation_mm': pytest.approx(2e3 * TOLERANCE_M)}
