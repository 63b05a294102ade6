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
"""The section of docs/results.md about closed-loop driving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rspec_planner.evaluate.results import percent, table, write_section

_LABELS = {'blind': 'cameras black', 'constant_velocity': 'constant velocity',
           'expert': "the expert's own plan, tracked"}


def _number(estimate: Mapping[str, float], unit: str = '') -> str:
    return f'{estimate["value"]:.2f}{unit} ({estimate["low"]:.2f}–{estimate["high"]:.2f})'


def _share(count: int, of: int) -> str:
    return f'{100 * count / of:.1f} %' if of else '-'


def _latency(name: str, row: Mapping[str, Any]) -> str:
    step = f' + {row["step_ms"]:g} ms per {row["tokens_per_step"]:g} tokens' if row['step_ms'] \
        else ''
    return f'`{name}` {row["fixed_ms"]:g} ms{step}'


def _ways(ways: Mapping[str, Any]) -> str:
    rows = [[_LABELS.get(name, f'target, {name}'), percent(way['collision']),
             percent(way['at_fault']), percent(way['off_road']), percent(way['red_light']),
             percent(way['stop_line']), percent(way['failed']), _number(way['progress']),
             _number(way['min_ttc_s'], ' s'), percent(way['comfortable']),
             _number(way['driven_ade_m'], ' m'), _share(way.get('cautious', 0), way['plans'])]
            for name, way in ways.items()]
    return table(['', 'collision', 'at fault', 'off road', 'red light', 'stop line', 'any failure',
                  'progress', 'least TTC', 'comfortable', 'from the expert', 'cautious plans'],
                 rows)


def _bought(bought: Mapping[str, Any]) -> str:
    rows = [[name, *(f'{row[key]["mean"]:+.3f} ({row[key]["ci95"][0]:+.3f}…'
                     f'{row[key]["ci95"][1]:+.3f})'
                     for key in ('collision', 'failed', 'min_ttc_s', 'progress'))]
            for name, row in bought.items()]
    return table(['slower by', 'collision rate', 'any failure', 'least TTC, s', 'progress'], rows)


def _families(families: Mapping[str, Any], first: str) -> str:
    rows = [[name.replace('_', ' '), *(str(row[key]) for key in (
        'runs', 'collision', 'off_road', 'red_light', 'stop_line')), f'{row["progress"]:.2f}',
        str(families['blind'][name]['failed']), str(families['constant_velocity'][name]['failed'])]
        for name, row in families[first].items()]
    return table(['family', 'runs', 'collisions', 'off road', 'red light', 'stop line', 'progress',
                  'failures blind', 'failures constant velocity'], rows)


def closed_section(result: Mapping[str, Any]) -> str:
    """Return the Markdown of a whole evaluation."""
    latencies, first = result['latencies'], next(iter(result['latencies']))
    parts = ['## Closed-loop driving\n',
             f'`rspec eval driving --closed-loop`, checkpoint `{result["checkpoint"]}`, device '
             f'{result["device"]}; {result["runs"]} scenarios of each split, 6.4 s from t0; a '
             'bicycle with slow actuators tracks the newest plan that is ready, at most '
             f'{result["plan_hz"]:g} plans a second, the next one when the last is done. A plan '
             'takes: ' + '; '.join(_latency(n, row) for n, row in latencies.items())
             + ' (docs/performance.md). Baselines have the first latency. Brackets: 95 % '
             'intervals, Wilson for rates, bootstrap over runs for means.\n']
    for split, report in result['splits'].items():
        parts += [f'### {split} ({report["runs"]} runs)\n', _ways(report['ways']), '']
        if report['bought']:
            parts += [f'Differences from `{first}` over the same runs:\n',
                      _bought(report['bought']), '']
        parts += [_families(report['families'], first), '']
    if result['iso']:
        rows = [[f'`{draft}`', str(row['runs']), str(row['plans']),
                 str(row['runs_with_other_texts']), str(row['runs_with_other_outcomes']),
                 f'{1000 * row["largest_path_difference_m"]:.2f} mm',
                 'yes' if row['identical'] else '**no**'] for draft, row in result['iso'].items()]
        parts += ['### The same drive with every draft\n',
                  'The deployed planner drives the same scenarios with each draft and decoding '
                  'one token a forward, same seed, same latency:\n',
                  table(['draft', 'runs', 'plans', 'runs with another text',
                         'with another outcome', 'paths apart', 'identical'], rows), '']
    return '\n'.join(parts)


def write_closed_loop(result: Mapping[str, Any], path: str | Path | None = None) -> Path:
    """Replace the section of the results file."""
    return write_section('closed-loop', closed_section(result), path)
