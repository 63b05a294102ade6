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
"""
Choose a checkpoint's caution on its validation split, see `planner.caution`.

The closed loop is driven without caution. The highest threshold is taken at which no more than a
given share of validation plans would have been slowed: scenes of the kind that the checkpoint was
made for pay at most that. What it does elsewhere is measured, not chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.closed_farm import RunFarm
from rspec_planner.evaluate.closed_loop import (
    closed_specs,
    ClosedLoop,
    ClosedOptions,
    Progress,
)
from rspec_planner.evaluate.closed_world import Outcome
from rspec_planner.model.checkpoint import replace_config
from rspec_planner.model.config import CautionConfig
from rspec_planner.planner.caution import Caution
from rspec_planner.planner.drafts import checkpoint_folder
from rspec_planner.world.simulation import DT

#: how far above the one that begins a caution the threshold is that ends it
GAP = 0.07
_GRID = np.arange(0.98, 0.0, -0.01)
_ALWAYS = CautionConfig(1 - 2e-12, 1 - 1e-12)  # slows every plan that it can judge


def slowed_plans(outcome: Outcome, config: CautionConfig) -> int:
    """Return how many plans of a run that was driven without caution it would have slowed."""
    caution = Caution(config)
    return sum(caution.note(round(1e9 * DT * tick), confidence)
               for tick, confidence in zip(outcome.ticks, outcome.confidences))


def slowed_share(outcomes: Sequence[Outcome], config: CautionConfig) -> float:
    """Return the share of all plans that it would have slowed."""
    return sum(slowed_plans(o, config) for o in outcomes) / sum(len(o.ticks) for o in outcomes)


def calibrated(outcomes: Sequence[Outcome], share: float) -> CautionConfig:
    """Return the caution that slows at most `share` of the plans; ConfigurationError if none."""
    if not slowed_share(outcomes, _ALWAYS):
        raise ConfigurationError('no plan could be judged: too few of them in '
                                 f'{_ALWAYS.window_s:g} s; plan more often')
    for enter in _GRID:
        config = CautionConfig(round(float(enter), 2), round(float(min(enter + GAP, 0.99)), 2))
        if slowed_share(outcomes, config) <= share:
            return config
    raise ConfigurationError(f'no threshold slows {share:.1%} of the plans or fewer: this '
                             'target is never sure; train it on')


def evaluate_caution(options: ClosedOptions, share: float, write: bool = False,
                     progress: Progress | None = None) -> dict[str, Any]:
    """
    Drive the first split of `options` and choose; `write` puts it into the checkpoint's config.

    Raises ConfigurationError for a share outside (0, 1).
    """
    if not 0.0 < share < 1.0:
        raise ConfigurationError(f'--share {share:g}: choose a part of the plans, 0 to 1')
    with RunFarm(options.workers or 0) as farm:
        loop = ClosedLoop(options, farm)
        specs = closed_specs(options.splits[0], options.runs)
        how, outcomes = loop.stepping(True, options.period), list[Outcome]()
        for outcome in loop.drive(specs, loop.target(caution=False), how, options.latencies[0]):
            outcomes.append(outcome)
            if progress is not None:
                progress(len(outcomes), len(specs))
    config = calibrated(outcomes, share)
    if write:
        replace_config(checkpoint_folder(options.checkpoint), caution=asdict(config))
    confidences = np.concatenate([o.confidences for o in outcomes])
    failed = [o for o in outcomes if o.failed]
    return {'checkpoint': options.checkpoint, 'split': options.splits[0], 'runs': len(outcomes),
            'plans': len(confidences), 'caution': asdict(config), 'written': write,
            'slowed_share': round(slowed_share(outcomes, config), 4),
            'slowed_runs': sum(slowed_plans(o, config) > 0 for o in outcomes),
            'failed_runs': len(failed),
            'failed_and_slowed': sum(slowed_plans(o, config) > 0 for o in failed),
            'confidence': {f'p{q:g}': round(float(np.percentile(confidences, q)), 4)
                           for q in (1, 5, 10, 25, 50)},
            'shares': {f'{enter:g}': round(slowed_share(
                outcomes, replace(config, enter_below=enter, leave_above=min(enter + GAP, 0.99))),
                4) for enter in (0.6, 0.7, 0.75, 0.8, 0.85, 0.9)}}
