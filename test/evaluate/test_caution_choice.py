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
"""The thresholds of a caution come from the validation split, and end up in the checkpoint."""

from dataclasses import asdict
import json
import shutil

import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.caution import (
    calibrated,
    evaluate_caution,
    slowed_plans,
    slowed_share,
)
from rspec_planner.evaluate.closed_loop import ClosedOptions
from rspec_planner.evaluate.closed_world import Outcome
from rspec_planner.model.checkpoint import load_target, replace_config
from rspec_planner.model.config import CautionConfig
from rspec_planner.planner.drafts import EMBEDDED
from rspec_planner.train.profiles import start_from
from rspec_planner.world.clip import ClipSpec

SPEC = ClipSpec('val', 'curve', 0, True, '', 0)


def run_of(confidences):
    """Return a run with a plan every 0.2 s."""
    return Outcome(SPEC, ticks=list(range(0, 2 * len(confidences), 2)),
                   confidences=list(confidences))


def test_plans_that_would_be_slowed_are_counted():
    config = CautionConfig(0.5, 0.6)
    assert slowed_plans(run_of([0.9] * 30), config) == 0
    assert slowed_plans(run_of([0.1] * 30), config) == 24  # all behind the first 1.2 s
    assert slowed_share([run_of([0.9] * 30), run_of([0.1] * 30)], config) == 24 / 60


def test_the_highest_threshold_is_taken_that_slows_few_enough():
    runs = [run_of(np.full(32, level)) for level in np.linspace(0.505, 0.995, 50)]
    config = calibrated(runs, 0.1)
    assert slowed_share(runs, config) <= 0.1
    higher = CautionConfig(config.enter_below + 0.01, config.leave_above + 0.01)
    assert slowed_share(runs, higher) > 0.1
    assert config.leave_above == pytest.approx(config.enter_below + 0.07)


def test_a_target_that_is_never_sure_is_refused():
    with pytest.raises(ConfigurationError, match='never sure; train it on'):
        calibrated([run_of([0.0] * 30)], 0.5)


def test_plans_too_far_apart_choose_nothing():
    run = Outcome(SPEC, ticks=list(range(0, 64, 5)), confidences=[0.01] * 13)
    with pytest.raises(ConfigurationError, match='could be judged: too few'):
        calibrated([run], 0.04)


@pytest.mark.parametrize('share', [0.0, 1.0])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigurationError, match='--share'):
        evaluate_caution(ClosedOptions(splits=('val',), runs=1), share)


def test_a_checkpoint_is_driven_and_gets_its_thresholds(tmp_path):
    folder = tmp_path / 'tiny'
    shutil.copytree(EMBEDDED / 'tiny', folder)
    told = []
    report = evaluate_caution(
        ClosedOptions(splits=('val',), runs=1, plan_hz=3.3, checkpoint=str(folder)), 0.5, True,
        lambda done, of: told.append((done, of)))
    assert (report['runs'], told) == (1, [(1, 1)])
    assert report['plans'] == 22  # every 0.3 s of 6.4
    assert report['slowed_share'] <= 0.5
    assert 0.0 < report['confidence']['p1'] <= report['confidence']['p50'] <= 1.0
    chosen = CautionConfig(**report['caution'])
    assert load_target(folder).cfg.caution == chosen  # hashes are checked
    assert json.loads((folder / 'config.json').read_text())['flow']['num_steps'] == 4


def test_thresholds_are_replaced(tmp_path):
    folder = tmp_path / 'tiny'
    shutil.copytree(EMBEDDED / 'tiny', folder)
    for enter in (0.5, 0.7):
        replace_config(folder, caution=asdict(CautionConfig(enter, 0.9)))
    assert load_target(folder).cfg.caution == CautionConfig(0.7, 0.9)
    assert start_from(folder)[0].cfg.caution is None  # those of other weights
