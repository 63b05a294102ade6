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
Ablation tables from the training comparisons whose results lie in docs/data.

`rspec_planner.train.draft_grid` and `aarl_grid` leave one JSON each. L there is simulated from
one teacher-forced pass per clip, which equals what the deployed loop commits up to taps rounded to
bf16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import json
from pathlib import Path
from typing import Any

import numpy as np

from rspec_planner.errors import InputError
from rspec_planner.evaluate.intervals import difference_interval, ratio_interval
from rspec_planner.evaluate.published import AARL_GAINS, FLATROPE_GAIN
from rspec_planner.evaluate.results import table
from rspec_planner.evaluate.tables import change, interval, sign

SPLITS = ('val', 'on-shelf', 'off-shelf')
#: everything else in the ablation table is compared with this draft of its kind
BASE = {'dflash': 'dflash-l2-b16-w8-flat', 'eagle3': 'eagle3-b16-w8-flat'}
Run = Mapping[str, Any]


def read_grids(folder: Path) -> tuple[list[Run], list[Mapping[str, Any]]]:
    """
    Return the runs of all draft comparisons and the contents of all AARL comparisons.

    InputError names a file that is no JSON.
    """
    drafts: list[Run] = []
    aarl: list[Mapping[str, Any]] = []
    for path in sorted(folder.glob('*.json')) if folder.is_dir() else ():
        try:
            content = json.loads(path.read_text(encoding='utf-8'))
        except ValueError as error:
            raise InputError(f'{path}: not JSON ({error}); store the comparison again') from None
        if 'runs' not in content:  # other numbers lie there too
            continue
        if 'variants' in content:
            aarl.append(content)
        else:
            drafts += [run for run in content['runs']
                       if 'splits' in run and run.get('group') != 'tune']
    return drafts, aarl


def by_name(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Return the runs of each name by seed; a later file replaces an earlier one."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(run['name'], {})[run['seed']] = run
    return found


def pooled(seeds: Mapping[int, Run], split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return committed tokens and iterations (clips,) summed over seeds; None if not kept."""
    kept = [run['splits'][split].get('per_clip') for run in seeds.values()
            if split in run['splits']]
    if not kept or any(clips is None for clips in kept):
        return None
    table_ = np.array(kept, np.int64).sum(0)
    return table_[:, 0], table_[:, 1]


def cell(seeds: Mapping[int, Run], split: str) -> str:
    """Return L with its interval over clips, all seeds together."""
    found = pooled(seeds, split)
    if found is not None:
        return interval(ratio_interval(*found))
    values = [run['splits'][split]['L'] for run in seeds.values() if split in run['splits']]
    return f'{np.mean(values):.2f} ({min(values):.2f}–{max(values):.2f} over seeds)' \
        if values else '–'


def difference(one: Mapping[int, Run], other: Mapping[int, Run],
               split: str) -> dict[str, object] | None:
    """Return the paired difference of L over the seeds that both have; None without clips."""
    shared = sorted(set(one) & set(other))
    pairs = [pooled({seed: runs[seed] for seed in shared}, split) for runs in (one, other)]
    if not shared or pairs[0] is None or pairs[1] is None:
        return None
    return difference_interval(pairs[0], pairs[1])


def ablation_section(runs: Sequence[Run]) -> str:
    """Return FlatRoPE against the mirror, then every other change against the base draft."""
    named = by_name(runs)
    return '\n'.join([
        '## Ablations\n',
        'From the comparisons in `docs/data` (`python -m rspec_planner.train.draft_grid`): each '
        'draft trained with the seeds given, L over all seeds and clips, 95 % intervals over '
        'clips. Only drafts trained for as many epochs are compared with the base.\n',
        '### FlatRoPE and the 3D mirror\n', *_rotary(named),
        '### Shapes, data and losses\n',
        table(['draft', 'seeds', 'parameters', *SPLITS, 'off-shelf to the base'],
              _rows(named))])


def _rotary(named: Mapping[str, Mapping[int, Run]]) -> Iterator[str]:
    rows = []
    verdicts: Counter[str] = Counter()
    for name, flat in named.items():
        mirror = named.get(name.replace('-flat', '-mirror'), {})
        if '-flat' not in name or not mirror:
            continue
        cells = []
        for split in SPLITS:
            found = difference(flat, mirror, split)
            cells.append('–' if found is None else f'{change(found, 3)}, {sign(found)}')
            if found is not None:
                verdicts[sign(found)] += 1
        rows.append([f'`{name}`', str(len(set(flat) & set(mirror))), *cells])
    yield table(['flat − mirror, L', 'seeds', *SPLITS], rows)
    positive, negative = verdicts['positive'], verdicts['negative']
    yield (f'\nBy the interval, flat − mirror is positive in {positive}, negative in {negative} '
           f'and undecided in {verdicts.total() - positive - negative} of {verdicts.total()} '
           f'cells; the paper reports {FLATROPE_GAIN:+.2f}.\n')


def _epochs(seeds: Mapping[int, Run]) -> set[float | None]:
    return {run.get('settings', {}).get('epochs') for run in seeds.values()}


def _rows(named: Mapping[str, Mapping[int, Run]]) -> list[list[str]]:
    rows = []
    for name, seeds in sorted(named.items(), key=lambda item: _order(item[0])):
        any_run = next(iter(seeds.values()))
        base = BASE.get(any_run['config']['kind'], '')
        comparable = base in named and name != base and _epochs(seeds) == _epochs(named[base])
        found = difference(seeds, named[base], 'off-shelf') if comparable else None
        rows.append([f'`{name}`', str(len(seeds)), f'{any_run["parameters"] / 1e6:.2f} M',
                     *(cell(seeds, split) for split in SPLITS),
                     '–' if found is None else change(found)])
    return rows


def _order(name: str) -> tuple[int, int, str]:
    kind = 0 if name.startswith('dflash') else 1
    return kind, 0 if name in BASE.values() else 1, name


def aarl_section(contents: Sequence[Mapping[str, Any]]) -> str:
    """Return the change of L by action-aware post-training, and what drifted."""
    rows, seeds = [], list[int]()
    for content in contents:
        for variant in content['variants']:
            seeds.append(len(variant['seeds']))
            rows.append([
                variant['kind'], variant['anchors'].replace('_', ' '), str(variant['samples']),
                f'{variant["rate"]:g}', str(seeds[-1]),
                *(part for split in SPLITS for part in _change(variant['change'].get(split))),
                f'{100 * float(np.mean(variant["final_drifted"])):.2f} %'])
    paper = ['paper (DFlash val and on-shelf, EAGLE-3 off-shelf)', 'static', '5', '–', '–',
             *(part for split in SPLITS for part in (f'{AARL_GAINS[split]:+.3f}', '–')), '–']
    counted = f'{min(seeds)} to {max(seeds)}' if len(set(seeds)) > 1 else \
        f'{seeds[0] if seeds else 0}'
    return '\n'.join([
        '## Action-aware post-training\n',
        'From the comparison in `docs/data` (`python -m rspec_planner.train.aarl_grid`). Change '
        'of L from the draft it starts from to the checkpoint with the best validation L, mean '
        'over seeds (least … most), and L of the last checkpoint, mean over seeds. The start '
        'itself may be selected, so the selected change on val is never negative. Seeds per '
        f'variant: {counted}, see the column. The learning rate was tuned with static anchors '
        'at K = 5 only. Drifted: positions that were right before the training and are wrong at '
        'its last checkpoint; anchors that leave the set for good would let this grow.\n',
        '![Validation L during post-training](figures/aarl_validation.png)\n',
        table(['draft', 'anchors', 'K', 'learning rate', 'seeds',
               *(head for split in SPLITS for head in (f'{split}, selected',
                                                       f'{split}, L of the last')), 'drifted'],
              [*rows, paper])])


def _change(found: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the change to the selected checkpoint and L of the last one."""
    if found is None:
        return '–', '–'
    return (f'{found["mean"]:+.3f} ({found["least"]:+.3f} … {found["most"]:+.3f})',
            f'{np.mean(found["last_L"]):.3f}')


def curves(contents: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Return the runs with a curve, K = 5 at the chosen learning rate of their kind."""
    return [run for content in contents for run in content['runs']
            if run.get('curve') and run['samples'] == 5
            and run['rate'] == content.get('rates', {}).get(run['kind'], run['rate'])]
