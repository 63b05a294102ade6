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
"""Generated sections of docs/results.md; everything outside the markers stays untouched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rspec_planner.errors import InputError

DEFAULT_PATH = Path('docs') / 'results.md'
_HEAD = '# Results\n\nSections between markers are generated; run the command they name.\n'


def write_section(name: str, body: str, path: str | Path | None = None) -> Path:
    """Replace or append the section `name` of the results file and return its path."""
    target = Path(path or DEFAULT_PATH)
    if not target.parent.is_dir():
        raise InputError(f'{target}: folder {target.parent} does not exist; run this from the '
                         'top of the repository')
    begin, end = f'<!-- {name}: generated, do not edit -->', f'<!-- /{name} -->'
    text = target.read_text(encoding='utf-8') if target.exists() else _HEAD
    section = f'{begin}\n{body.strip()}\n{end}'
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        text = before + section + rest.split(end, 1)[1]
    else:
        text = text.rstrip() + '\n\n' + section + '\n'
    target.write_text(text, encoding='utf-8')
    return target


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = ['| ' + ' | '.join(columns) + ' |', '|' + '---|' * len(columns)]
    return '\n'.join(lines + ['| ' + ' | '.join(row) + ' |' for row in rows])


def percent(estimate: Mapping[str, float]) -> str:
    """Return a rate with its interval in percent."""
    return f'{100 * estimate["value"]:.1f} % ({100 * estimate["low"]:.1f}–' \
           f'{100 * estimate["high"]:.1f})'


def metres(estimate: Mapping[str, float]) -> str:
    """Return a distance with its interval."""
    return f'{estimate["value"]:.2f} m ({estimate["low"]:.2f}–{estimate["high"]:.2f})'


def write_driving(result: Mapping[str, Any], path: str | Path | None = None) -> Path:
    """Write the driving section from the output of `evaluate_driving`."""
    parts = [
        '## Open-loop driving of the embedded target\n',
        f'`rspec eval driving --split {result["split"]} --write-results`, checkpoint '
        f'`{result["checkpoint"]}`, device {result["device"]}, fp32, {result["threads"]} threads. '
        'Horizon 6.4 s; minADE₁ is the one published sample, minADE₆ the best of six. Brackets: '
        '95 % intervals (Wilson for rates, bootstrap over clips for metres). The first clips of '
        'each split were also planned by the planner itself: same tokens, paths at most '
        f'{1000 * result["largest_difference_to_planner_m"]:.1f} mm apart.\n']
    for name, report in result['splits'].items():
        parts.append(_split_section(name, report))
    return write_section('driving', '\n'.join(parts), path)


def _split_section(name: str, report: Mapping[str, Any]) -> str:
    found = report['intervals']
    rows = []
    for label, key in (('target', 'target'), ('target, cameras black', 'black'),
                       ('target, no visual features', 'history_only')):
        values = found[key]
        best = metres(values['min_ade6']) if key == 'target' else '–'
        rows.append([label, metres(values['min_ade']), best,
                     percent(values['decision']), percent(values['pair']),
                     percent(values['attributes']), percent(values['agreement']),
                     percent(values['collision'])])
    rows.append(['constant velocity', metres(found['constant_velocity']['min_ade']),
                 *['–'] * 6])
    text = [f'### {name} ({report["clips"]} clips)\n',
            table(['', 'minADE₁', 'minADE₆', 'decision', 'pairs', 'attributes',
                   'text agrees with action', 'collision'], rows),
            f'\nminADE₁ is {100 * report["below_constant_velocity"]:.0f} % below constant '
            f'velocity and {100 * report["below_black"]:.0f} % below black cameras. The expert\'s '
            f'own text agrees with its drive in '
            f'{100 * found["expert_agreement"]["value"]:.1f} % by the same rule.\n']
    for title, key in (('half', 'halves'), ('part', 'parts'), ('family', 'families')):
        if key in report:
            text += [_brief_table(title, report[key]), '']
    return '\n'.join(text)


def _brief_table(title: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    rows = [[name.replace('_', ' '), f'{g["clips"]:.0f}', f'{100 * g["decision_accuracy"]:.1f} %',
             f'{100 * g["pair_accuracy"]:.1f} %' if 'pair_accuracy' in g else '–',
             f'{g["min_ade_m"]:.2f} m',
             f'{g["constant_velocity_m"]:.2f} m', f'{g["black_m"]:.2f} m']
            for name, g in groups.items()]
    return table([title, 'clips', 'decision', 'pairs', 'minADE₁', 'constant velocity',
                  'cameras black'], rows)
