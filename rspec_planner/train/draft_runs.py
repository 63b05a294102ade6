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
"""The list of drafts that a comparison trains, by priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rspec_planner.errors import ConfigurationError
from rspec_planner.train.draft_settings import DraftSettings

#: clips beyond the train split that the runs 'more-clips' read; all others leave them out
MORE_CLIPS = 11_655
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class GridRun:
    """One training of one draft."""

    name: str  # unique within a comparison, without the seed
    group: str
    settings: DraftSettings

    @property
    def key(self) -> str:
        """Return the unique name of the run."""
        return f'{self.name}/s{self.settings.seed}'


def _named(settings: DraftSettings, tag: str = '') -> str:
    """Return the systematic name of a draft, with what else was changed behind it."""
    layers = f'-l{settings.layers}' if settings.kind == 'dflash' else ''
    reduced = '-rv' if settings.reduced_vocab else ''
    name = (f'{settings.kind}{layers}-b{settings.block}-w{settings.window or "all"}-'
            f'{settings.rotary}{reduced}')
    return f'{name}+{tag}' if tag else name


_SHORT = {'window': 8, 'block': 16}
_WHOLE = {'window': 0, 'block': 16}
#: group: (kind, changes, tag); a tag marks what the name does not tell
_GROUPS: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    'main': [
        ('dflash', {**_SHORT}, ''), ('eagle3', {**_SHORT}, ''),
        ('dflash', {**_WHOLE, 'rotary': 'flat'}, ''),
        ('dflash', {**_WHOLE, 'rotary': 'mirror'}, ''),
        ('eagle3', {**_WHOLE, 'rotary': 'flat'}, ''),
        ('eagle3', {**_WHOLE, 'rotary': 'mirror'}, ''),
        ('dflash', {**_SHORT, 'rotary': 'mirror'}, ''),
        ('eagle3', {**_SHORT, 'rotary': 'mirror'}, '')],
    'shapes': [
        ('dflash', {**_SHORT, 'layers': 1}, ''), ('dflash', {**_SHORT, 'layers': 4}, ''),
        ('dflash', {**_SHORT, 'block': 8}, ''), ('dflash', {**_SHORT, 'block': 24}, ''),
        ('dflash', {**_SHORT, 'window': 1}, ''), ('dflash', {**_SHORT, 'window': 64}, ''),
        ('dflash', {**_SHORT, 'reduced_vocab': True}, ''),
        ('eagle3', {**_SHORT, 'block': 8}, ''), ('eagle3', {**_SHORT, 'window': 1}, ''),
        ('eagle3', {**_SHORT, 'reduced_vocab': True}, ''),
        ('dflash', {**_SHORT, 'block': 4}, ''), ('dflash', {**_SHORT, 'block': 12}, '')],
    'ablations': [
        ('dflash', {**_SHORT, 'partial_blocks': False}, 'whole-blocks'),
        ('dflash', {**_SHORT, 'warm_start': False}, 'scratch'),
        ('dflash', {**_SHORT, 'random_masks': True}, 'random-masks'),
        ('dflash', {**_SHORT, 'soft_weight': 0.5}, 'soft'),
        ('dflash', {**_SHORT, 'confidence': 0.5}, 'length-weight'),
        ('dflash', {**_SHORT, 'taps': '2'}, 'last-tap'),  # of three layers
        ('dflash', {**_SHORT, 'taps': '0,1'}, 'lower-taps'),
        ('dflash', {**_SHORT, 'extra_clips': MORE_CLIPS}, 'more-clips'),
        ('eagle3', {**_SHORT, 'unroll': 7}, 'unroll-7'),
        ('dflash', {**_WHOLE, 'context': 'text'}, 'text-only')],
    # what is shipped: a block that holds a whole reasoning, so that one iteration can be enough
    'ship': [('dflash', {**_SHORT, 'block': 24, 'layers': layers, 'epochs': 20.0}, '')
             for layers in (1, 2)],
    # all six that the package embeds, to go on from with --init-from
    'embedded': [('eagle3', {**_SHORT, 'epochs': 5.0}, ''),
                 ('dflash', {**_WHOLE, 'rotary': 'flat', 'epochs': 9.0}, ''),
                 ('dflash', {**_WHOLE, 'rotary': 'mirror', 'epochs': 9.0}, ''),
                 ('dflash', {**_SHORT, 'block': 24, 'epochs': 14.0}, ''),
                 ('dflash', {**_SHORT, 'epochs': 12.0}, ''),
                 ('dflash', {**_SHORT, 'block': 24, 'layers': 1, 'epochs': 14.0}, '')],
    'rotary': [(kind, {**_WHOLE, 'rotary': rotary}, '') for kind in ('dflash', 'eagle3')
               for rotary in ('flat', 'mirror')],
    # early in training a draft still errs on trained clips: what post-training starts from
    'early': [(kind, {**_SHORT, 'epochs': 2.0}, 'two-epochs') for kind in ('dflash', 'eagle3')],
    'tune': [
        *((kind, {**_SHORT, 'learning_rate': rate, 'epochs': epochs}, f'lr{rate:g}-e{epochs:g}')
          for kind in ('dflash', 'eagle3') for epochs in (20.0, 40.0)
          for rate in (1e-3, 2e-3, 4e-3)),
        *(('dflash', {**_SHORT, **change}, tag) for change, tag in (
            ({'confidence': 0.5}, 'length-weight-0.5'), ({'confidence': 1.0}, 'length-weight-1'),
            ({'soft_weight': 0.5}, 'soft-0.5'), ({'soft_weight': 1.0}, 'soft-1'),
            ({'first_weight': 3.0}, 'first-3'), ({'gamma': 3.0}, 'gamma-3'),
            ({'tap_noise': 0.1}, 'noise-0.1'), ({'tap_noise': 0.3}, 'noise-0.3'),
            ({'weight_decay': 0.1}, 'decay-0.1'), ({'ema_decay': 0.998}, 'ema'),
            ({'batch_clips': 32}, 'batch-32'))),
        *(('eagle3', {**_SHORT, **change}, tag) for change, tag in (
            ({'decay': 0.9}, 'decay-0.9'), ({'decay': 1.0}, 'decay-1'),
            ({'confidence': 0.5}, 'length-weight-0.5'), ({'soft_weight': 0.5}, 'soft-0.5'),
            ({'tap_noise': 0.1}, 'noise-0.1'), ({'ema_decay': 0.998}, 'ema')))],
}
_GROUPS['study'] = [*_GROUPS['shapes'], *_GROUPS['ablations']]  # both, seed by seed
#: a loss option must gain this much validation L over the plain run to be adopted
MIN_GAIN = 0.05
GROUPS = tuple(_GROUPS)


def tuned_changes(records: Sequence[Mapping[str, Any]], base: DraftSettings,
                  kind: str) -> dict[str, Any]:
    """
    Return the settings that the group 'tune' found best for a kind of draft, by validation L.

    Learning rate and epochs come from the best run of their sweep; of the other changes the
    best one is taken if it gains more than MIN_GAIN over the same run without it.
    """
    found = {record['name'].partition('+')[2]: record for record in records
             if record.get('group') == 'tune' and record['settings']['kind'] == kind}
    length = {tag: float(record['splits']['val']['L']) for tag, record in found.items()}
    swept = [tag for tag in found if tag.startswith('lr')]
    if not swept:
        return {}
    best = found[max(swept, key=length.__getitem__)]['settings']
    changes = {name: best[name] for name in ('learning_rate', 'epochs')}
    plain = f'lr{base.learning_rate:g}-e{base.epochs:g}'
    others = [tag for tag in found if tag not in swept]
    if plain in found and others:
        tag = max(others, key=length.__getitem__)
        if length[tag] > length[plain] + MIN_GAIN:
            given = base.to_dict()
            changes |= {name: value for name, value in found[tag]['settings'].items()
                        if value != given[name] and name not in ('kind', 'seed', *_SHORT)}
    return changes


def grid_runs(groups: tuple[str, ...], base: DraftSettings, seeds: tuple[int, ...] = SEEDS,
              only: str = '', tuned: Mapping[str, Mapping[str, Any]] | None = None
              ) -> list[GridRun]:
    """
    Return the runs of these groups in order, the first seed of a whole group before the next.

    base: settings that every run starts from; only: keep names that contain this; tuned:
    changes to the base for each kind, which the run's own changes override.
    """
    runs: list[GridRun] = []
    for group in groups:
        if group not in _GROUPS:
            raise ConfigurationError(f'group {group!r} is unknown; use {", ".join(GROUPS)}')
        for seed in seeds:
            for kind, changes, tag in _GROUPS[group]:
                settings = replace(base, **{**(tuned or {}).get(kind, {}), **changes,
                                            'kind': kind, 'seed': seed})
                name = _named(settings, tag)
                if only in name:
                    runs.append(GridRun(name, group, settings))
    keys = [run.key for run in runs]
    return [run for i, run in enumerate(runs) if run.key not in keys[:i]]
