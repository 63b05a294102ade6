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
Figures of docs/results.md, drawn from the reports alone.

One message each, large enough for a slide: values are written at the marks, intervals are
drawn, the paper's numbers stand beside ours in hatched grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rspec_planner.evaluate.attention import GROUPS
from rspec_planner.evaluate.published import ATTENTION, LENGTHS

SPLITS = ('val', 'on-shelf', 'off-shelf')
FLOOR_COLOUR, PAPER_COLOUR = '#9aa0a6', '#d7dade'
DRAFT_COLOURS = ('#1f5fa8', '#e07b39', '#3a8f5c', '#8e5aa8', '#c2a12b', '#b0413e', '#5aa9c9',
                 '#7a5c43', '#d98cb3', '#7f8f2e')
GROUP_COLOURS = {'visual': '#4c78a8', 'history': '#f2a93b', 'text': '#e8d5a9',
                 'generated': '#57a773'}
PART_COLOURS = {'draft': '#57a773', 'verify': '#4c78a8', 'closing': '#c8ccd1'}
_DPI = 110


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[['top', 'right']].set_visible(False)
        ax.tick_params(labelsize=9)
    return figure, list(axes)


def _save(figure: Figure, folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f'{name}.png'
    figure.savefig(path, dpi=_DPI, metadata={'Software': None})
    return path


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return one colour per draft; floors are grey."""
    drafts = [name for name in names if not name.startswith('floor')]
    found = {name: DRAFT_COLOURS[i % len(DRAFT_COLOURS)] for i, name in enumerate(drafts)}
    return {**{name: FLOOR_COLOUR for name in names if name.startswith('floor')}, **found}


def wrapped(label: str, width: int = 16) -> str:
    """Return a draft's name on several lines, broken at its hyphens."""
    lines = ['']
    for part in label.split('-'):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append('')
        lines[-1] += f'{part}-'
    return '\n'.join(lines)[:-1]


def plain_forms(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return floors and drafts of one split; trees and longer chains have tables of their own."""
    return {name: row for name, row in report['drafts'].items() if 'form' not in row}


def length_figure(length: Mapping[str, Any], folder: Path) -> Path:
    """Draw L of every draft and split with intervals beside the paper's."""
    splits = [name for name in SPLITS if name in length['splits']]
    names = list(plain_forms(length['splits'][splits[0]]))
    colour = colours(names)
    rows = [*names, *LENGTHS]
    figure, (ax,) = _figure(11.5, 5.4)
    width = 0.86 / len(rows)
    for index, name in enumerate(rows):
        for place, split in enumerate(splits):
            x = place + (index - (len(rows) - 1) / 2) * width
            label = name if place == 0 else None
            if name in LENGTHS:
                value = high = LENGTHS[name].get(split, 0.0)
                ax.bar(x, value, 0.92 * width, color=PAPER_COLOUR, edgecolor='#888888',
                       hatch='//' if name.startswith('DFlash') else '..', linewidth=0.6,
                       label=label)
            else:
                found = length['splits'][split]['drafts'][name]['accepted_length']
                value = found['mean']
                low, high = found['ci95']
                ax.bar(x, value, 0.92 * width, color=colour[name], label=label,
                       yerr=[[value - low], [high - value]],
                       error_kw={'elinewidth': 1.0, 'capsize': 2})
            if value:
                ax.text(x, high + 0.12, f'{value:.1f}', ha='center', fontsize=7)
    ax.set_xticks(range(len(splits)), splits)
    ax.set_ylabel('tokens per target forward, L')
    ax.set_ylim(0, ax.get_ylim()[1] * 1.08)
    ax.legend(fontsize=8, frameon=False, ncols=4, loc='upper center',
              bbox_to_anchor=(0.5, -0.07))
    ax.set_title('Accepted length (strict, 95 % intervals over clips)', fontsize=11, loc='left')
    return _save(figure, folder, 'accepted_length')


def offset_figure(length: Mapping[str, Any], folder: Path) -> Path:
    """Draw how often proposals up to each offset are accepted."""
    splits = [name for name in SPLITS if name in length['splits']]
    colour = colours(list(plain_forms(length['splits'][splits[0]])))
    figure, axes = _figure(9.5, 3.3, len(splits))
    for ax, split in zip(axes, splits):
        for name, row in plain_forms(length['splits'][split]).items():
            points = [(i + 1, rate) for i, rate in enumerate(row['acceptance_by_offset']['rate'])
                      if rate is not None and row['acceptance_by_offset']['tried'][i] >= 10]
            ax.plot(*zip(*points), marker='o', markersize=3, color=colour[name], label=name,
                    linestyle='--' if name.startswith('floor') else '-')
        ax.set_title(split, fontsize=10)
        ax.set_xlabel('offset in the block')
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_ylim(0, 1.02)
        ax.grid(alpha=0.25)
    axes[0].set_ylabel('accepted up to here')
    axes[-1].legend(fontsize=8, frameon=False)
    return _save(figure, folder, 'acceptance_by_offset')


def attention_figure(attention: Mapping[str, Any], folder: Path) -> Path:
    """Draw the budget of the first layer: the paper's pair, then every draft looked at."""
    bars: list[tuple[str, dict[str, float]]] = [
        (f'paper\n{name}', {'visual': row['visual'], 'history': 0.0,
                            'text': row['text_and_history'], 'generated': row['generated']})
        for name, row in ATTENTION.items()]
    for name, row in attention['drafts'].items():
        layer = row['layers'][0]
        bars.append((name, {group: layer[group]['mean'] for group in GROUPS}))
    figure, (ax,) = _figure(max(6.0, 1.55 * len(bars)), 4.2)
    for place, (_, shares) in enumerate(bars):
        bottom = 0.0
        for group in GROUPS:
            share = 100 * shares[group]
            ax.bar(place, share, 0.66, bottom=bottom, color=GROUP_COLOURS[group],
                   label=group if place == 0 else None)
            if share > 3.0:
                ax.text(place, bottom + share / 2, f'{share:.1f}', ha='center', va='center',
                        fontsize=9, color='white' if group == 'visual' else 'black')
            bottom += share
    ax.axvline(len(ATTENTION) - 0.5, color='#888888', linewidth=0.8, linestyle=':')
    ax.set_xticks(range(len(bars)), [wrapped(label) for label, _ in bars])
    ax.set_ylabel('attention of the block, %')
    ax.legend(fontsize=8, frameon=False, ncols=4, loc='lower center', bbox_to_anchor=(0.5, 1.0))
    return _save(figure, folder, 'attention_budget')


def clock_figure(length: Mapping[str, Any], reuse: Mapping[str, Any] | None,
                 folder: Path) -> Path:
    """Draw where the milliseconds of a reasoning step go, all splits together."""
    bars: list[tuple[str, dict[str, float]]] = []
    splits = length['splits'].values()
    names = {'ar-eager': 'AR, width 1 (eager)', 'ar': 'AR, width 1 (packed)'}
    for name, label in names.items():
        bars.append((label, _mean_parts([(s['clips'], s['greedy'][name]) for s in splits])))
    for name in plain_forms(next(iter(splits))):
        bars.append((name, _mean_parts([(s['clips'], s['drafts'][name]) for s in splits])))
    if reuse is not None:
        way = reuse['ways']['0.1 s']['breakdown_ms']
        bars.append((f'{reuse["draft"]} + reuse\n(drives, 0.1 s)', way))
    figure, (ax,) = _figure(9.0, 0.55 * len(bars) + 1.2)
    for place, (_, parts) in enumerate(bars):
        left = 0.0
        for part, colour in PART_COLOURS.items():
            ax.barh(place, parts[part], 0.62, left=left, color=colour,
                    label=part if place == 0 else None)
            left += parts[part]
        ax.text(left, place, f' {left:.1f} ms', va='center', fontsize=9)
    ax.set_yticks(range(len(bars)), [label for label, _ in bars])
    ax.invert_yaxis()
    ax.set_xlim(0, ax.get_xlim()[1] * 1.1)
    ax.set_xlabel('mean time of the reasoning step behind the prefill, ms')
    ax.legend(fontsize=8, frameon=False, loc='lower right')
    return _save(figure, folder, 'wall_clock')


def _mean_parts(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, float]:
    total = sum(clips for clips, _ in rows)
    return {part: sum(clips * row['breakdown_ms'][part] for clips, row in rows) / total
            for part in PART_COLOURS}


def routing_figure(routing: Mapping[str, Any], folder: Path) -> Path:
    """Draw who supplies the tokens of each kind: the draft or the target."""
    kinds = ('history', 'phrase', 'deliberative', 'closing')
    figure, axes = _figure(2.6 * len(routing['drafts']) + 1.5, 3.4, len(routing['drafts']))
    for ax, (name, row) in zip(axes, routing['drafts'].items()):
        for place, kind in enumerate(kinds):
            found = row['kinds'].get(kind)
            share = 100 * found['accepted_share']['value'] if found else 0.0
            ax.bar(place, share, 0.66, color=PART_COLOURS['draft'],
                   label='draft' if place == 0 else None)
            ax.bar(place, 100 - share, 0.66, bottom=share, color=PART_COLOURS['verify'],
                   label='target (bonus)' if place == 0 else None)
            ax.text(place, max(share / 2, 4.0), f'{share:.0f}', ha='center', va='center',
                    fontsize=9)
        ax.set_xticks(range(len(kinds)), kinds, rotation=25)
        ax.set_title(name, fontsize=10)
        ax.set_ylim(0, 100)
    axes[0].set_ylabel('tokens of this kind, %')
    axes[-1].legend(fontsize=8, frameon=False, loc='lower left', bbox_to_anchor=(0.0, 1.07))
    return _save(figure, folder, 'routing')


def curves_figure(runs: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Draw validation L per checkpoint of post-training, one panel per kind of draft."""
    styles = {'static': ('#1f5fa8', 'static anchors'), 'live': ('#b0413e', 'live anchors'),
              'none': ('#9aa0a6', 'no anchors'), 'weighted_all': ('#3a8f5c', 'weighted')}
    kinds = list(dict.fromkeys(run['kind'] for run in runs))
    figure, axes = _figure(4.9 * len(kinds), 3.6, len(kinds))
    for ax, kind in zip(axes, kinds):
        labelled: set[str] = set()
        for run in (run for run in runs if run['kind'] == kind):
            colour, label = styles.get(run['anchors'], ('#444444', run['anchors']))
            steps = [point['step'] for point in run['curve']]
            base = run['curve'][0]['val_L']
            ax.plot(steps, [point['val_L'] - base for point in run['curve']], color=colour,
                    alpha=0.75, linewidth=1.3, label=None if label in labelled else label)
            labelled.add(label)
        ax.axhline(0.0, color='#888888', linewidth=0.8, linestyle=':')
        ax.set_title({'dflash': 'DFlash', 'eagle3': 'EAGLE-3'}.get(kind, kind), fontsize=10)
        ax.set_xlabel('step')
    axes[0].set_ylabel('change of validation L')
    axes[-1].legend(fontsize=8, frameon=False)
    return _save(figure, folder, 'aarl_validation')
