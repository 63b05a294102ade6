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
"""What closed-loop runs amount to: rates with intervals, by family, and what saved time buys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rspec_planner.evaluate.closed_latency import Latency
from rspec_planner.evaluate.closed_world import Outcome
from rspec_planner.evaluate.intervals import difference_interval
from rspec_planner.evaluate.metrics import bootstrap_mean, wilson

#: a run with less time to collision than this was close, seconds
CLOSE_S = 1.5

RATES: dict[str, Callable[[Outcome], bool]] = {
    'collision': lambda o: bool(o.collision), 'at_fault': lambda o: o.at_fault,
    'off_road': lambda o: o.off_road, 'red_light': lambda o: o.red_light,
    'stop_line': lambda o: o.stop_line, 'failed': lambda o: o.failed,
    'close': lambda o: o.min_ttc_s < CLOSE_S, 'comfortable': lambda o: o.comfortable}
MEANS: dict[str, Callable[[Outcome], float]] = {
    'progress': lambda o: o.progress, 'min_ttc_s': lambda o: o.min_ttc_s,
    'jerk_mps3': lambda o: o.jerk, 'hardest_brake_mps2': lambda o: o.hardest_brake,
    'driven_ade_m': lambda o: o.driven_ade_m}


def way_table(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return every rate (Wilson) and mean (bootstrap over runs), 95 % intervals."""
    result: dict[str, Any] = {'runs': len(outcomes)}
    for name, holds in RATES.items():
        result[name] = wilson(sum(map(holds, outcomes)), len(outcomes)).to_dict()
    for name, value in MEANS.items():
        result[name] = bootstrap_mean(np.array([value(o) for o in outcomes])).to_dict()
    first = np.array([o.first_ade_m for o in outcomes])
    result['min_ade_m'] = bootstrap_mean(first[np.isfinite(first)]).to_dict()
    result['plans'] = sum(o.plans for o in outcomes)
    result['rejected'] = sum(o.rejected for o in outcomes)
    result['cautious'] = sum(o.cautious for o in outcomes)
    return result


def family_table(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return counts of each family."""
    families: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        families.setdefault(outcome.spec.family, []).append(outcome)
    return {family: {'runs': len(group), **{
        name: sum(map(RATES[name], group)) for name in ('collision', 'off_road', 'red_light',
                                                         'stop_line', 'failed')},
        'progress': round(float(np.mean([o.progress for o in group])), 3),
        'driven_ade_m': round(float(np.mean([o.driven_ade_m for o in group])), 3)}
        for family, group in sorted(families.items())}


def split_table(ways: Mapping[str, Sequence[Outcome]], latencies: Sequence[Latency]
                ) -> dict[str, Any]:
    """Return the tables of one split; `bought` compares later latencies with the first one."""
    first = latencies[0].name
    ones = np.ones(len(ways[first]))

    def paired(name: str, value: Callable[[Outcome], float]) -> dict[str, object]:
        other, mine = (np.array([float(value(o)) for o in ways[way]]) for way in (name, first))
        return difference_interval((other, ones), (mine, ones))

    return {'runs': len(ones), 'ways': {name: way_table(found) for name, found in ways.items()},
            'families': {name: family_table(found) for name, found in ways.items()},
            'bought': {latency.name: {
                'collision': paired(latency.name, RATES['collision']),
                'failed': paired(latency.name, RATES['failed']),
                'min_ttc_s': paired(latency.name, MEANS['min_ttc_s']),
                'progress': paired(latency.name, MEANS['progress'])} for latency in latencies[1:]},
            'failures': [{'family': o.spec.family, 'index': o.spec.index, 'event': o.spec.event,
                          'variant': o.spec.variant, 'collision': o.collision,
                          'at_fault': o.at_fault, 'off_road': o.off_road,
                          'red_light': o.red_light, 'stop_line': o.stop_line,
                          'end_s': round(o.end_s, 1), 'text': o.texts[-1] if o.texts else ''}
                         for o in ways[first] if o.failed]}
