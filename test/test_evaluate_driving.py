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
"""Driving evaluation on a toy checkpoint: counting, checks and the written table."""

import json

import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate.clips import pairs_of, render_clips
from rspec_planner.evaluate.driving import DrivingEvaluation, evaluate_driving
from rspec_planner.evaluate.scores import answer_of, score_of, split_report
from rspec_planner.train.profiles import new_target
from rspec_planner.train.saving import export
from rspec_planner.world.generate import generate_pair
from rspec_planner.world.splits import split_specs


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    target, tokenizer = new_target(smoke=True)
    return export(target, tokenizer, tmp_path_factory.mktemp('toy'), {'revision': 'r1'})


@pytest.fixture(scope='module')
def clips():
    return [clip for spec in split_specs('val')[:12:2] for clip in generate_pair(spec)]


def perfect(clip, text=None):
    xy = np.repeat(clip.future[None, :, :2], 6, axis=0)
    return answer_of(clip, clip.reasoning if text is None else text, xy,
                     np.repeat(clip.speeds[None], 6, axis=0))


def test_the_expert_scores_full_marks_and_never_collides(clips):
    scores = [score_of(c, {sight: perfect(c) for sight in ('camera', 'black', 'none')})
              for c in clips]
    report = split_report(scores)
    assert report['min_ade_m'] == report['min_ade6_m'] == 0.0
    assert report['decision_accuracy'] == report['pair_accuracy'] == 1.0
    assert report['attribute_accuracy'] == 1.0
    assert report['intervals']['target']['collision']['value'] == 0.0
    assert report['intervals']['expert_agreement']['value'] > 0.8
    assert report['below_constant_velocity'] == 1.0
    assert json.loads(json.dumps(report)) == report


def test_a_blind_model_that_always_says_the_event_gets_half_and_no_pair(clips):
    answers = []
    for event, twin in zip(clips[::2], clips[1::2]):
        for clip in (event, twin):
            answers.append(score_of(clip, {sight: perfect(clip, event.reasoning)
                                           for sight in ('camera', 'black', 'none')}))
    report = split_report(answers)
    assert report['decision_accuracy'] == 0.5
    assert report['pair_accuracy'] == 0.0
    halves = {name: half['decision_accuracy'] for name, half in report['halves'].items()}
    assert halves == {'event': 1.0, 'no event': 0.0}


def test_unreadable_text_is_wrong_and_has_no_agreement(clips):
    answer = perfect(clips[0], 'nonsense')
    assert not answer.right and answer.agreement is None


def test_clips_come_in_the_order_of_the_split_with_and_without_workers():
    specs = split_specs('val')[:8]
    here = list(render_clips(specs, 96, 64, workers=0))
    there = list(render_clips(specs, 96, 64, workers=1))
    assert [clip.spec for clip in here] == specs == [clip.spec for clip in there]
    assert all(np.array_equal(a.images, b.images) for a, b in zip(here, there))
    assert [len(group) for group in pairs_of(specs[:3])] == [2, 1]


def test_a_split_is_evaluated_checked_and_written(checkpoint, tmp_path):
    seen = []
    result = evaluate_driving('on-shelf', clips=6, checkpoint=checkpoint, workers=0,
                              write_results=True, results_path=tmp_path / 'results.md',
                              progress=lambda done, total: seen.append((done, total)))
    assert result['clips'] == 6 and result['revision'] == 'r1'
    assert seen[-1] == (6, 6)
    assert result['min_ade6_m'] <= result['min_ade_m']
    assert set(result['splits']) == {'on-shelf'}
    assert result['largest_difference_to_planner_m'] < 0.05
    text = (tmp_path / 'results.md').read_text()
    assert '### on-shelf (6 clips)' in text and 'cameras black' in text


def test_a_batched_path_that_disagrees_with_the_planner_is_refused(checkpoint, monkeypatch):
    evaluation = DrivingEvaluation(checkpoint, workers=0)
    evaluation.noise = evaluation.noise + 1.0
    with pytest.raises(EngineError, match='do not trust'):
        evaluation.run('val', 2)


def test_wrong_names_are_one_line(tmp_path):
    with pytest.raises(ConfigurationError, match="'in-shelf'.*off-shelf"):
        evaluate_driving('in-shelf')
    with pytest.raises(EngineError, match='nowhere'):
        evaluate_driving('val', checkpoint=tmp_path / 'nowhere')
