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
        ('dflash', {**_SHORT, 'taps': '3'}, 'last-tap'),
        ('dflash', {**_SHORT, 'taps': '0,1,2'}, 'lower-taps'),
        ('dflash', {**_SHORT, 'extra_clips': MORE_CLIPS}, 'more-clips'),
        ('eagle3', {**_SHORT, 'unroll': 7}, 'unroll-7'),
        ('dflash', {**_WHOLE, 'context': 'text'}, 'text-only')],
    'tune': [
        *(('dflash', {**_SHORT, 'learning_rate': rate, 'epochs': epochs},
           f'lr{rate:g}-e{epochs:g}')
          for epochs in (20.0, 60.0) for rate in (5e-4, 1e-3, 2e-3, 4e-3)),
        *(('eagle3', {**_SHORT, 'learning_rate': rate, 'epochs': epochs},
           f'lr{rate:g}-e{epochs:g}')
          for epochs in (20.0, 60.0) for rate in (1e-3, 2e-3, 4e-3)),
        *(('dflash', {**_SHORT, **change}, tag) for change, tag in (
            ({'confidence': 0.5}, 'length-weight-0.5'), ({'confidence': 1.0}, 'length-weight-1'),
            ({'soft_weight': 0.5}, 'soft-0.5'), ({'soft_weight': 1.0}, 'soft-1'),
            ({'first_weight': 3.0}, 'first-3'), ({'gamma': 3.0}, 'gamma-3'),
            ({'gamma': 16.0}, 'gamma-16'), ({'tap_noise': 0.1}, 'noise-0.1'),
            ({'tap_noise': 0.3}, 'noise-0.3'), ({'weight_decay': 0.1}, 'decay-0.1'),
            ({'ema_decay': 0.998}, 'ema'), ({'batch_clips': 32}, 'batch-32'),
            ({'batch_clips': 256, 'learning_rate': 3e-3}, 'batch-256'))),
        *(('eagle3', {**_SHORT, **change}, tag) for change, tag in (
            ({'decay': 0.9}, 'decay-0.9'), ({'decay': 1.0}, 'decay-1'),
            ({'confidence': 0.5}, 'length-weight-0.5'), ({'soft_weight': 0.5}, 'soft-0.5'),
            ({'tap_noise': 0.1}, 'noise-0.1')))],
}
GROUPS = tuple(_GROUPS)


def grid_runs(groups: tuple[str, ...], base: DraftSettings, seeds: tuple[int, ...] = SEEDS,
              only: str = '') -> list[GridRun]:
    """
    Return the runs of these groups in order, the first seed of a whole group before the next.

    base: settings that every run starts from; only: keep names that contain this.
    """
    runs: list[GridRun] = []
    for group in groups:
        if group not in _GROUPS:
            raise ConfigurationError(f'group {group!r} is unknown; use {", ".join(GROUPS)}')
        for seed in seeds:
            for kind, changes, tag in _GROUPS[group]:
                settings = replace(base, kind=kind, seed=seed, **changes)
                name = _named(settings, tag)
                if only in name:
                    runs.append(GridRun(name, group, settings))
    keys = [run.key for run in runs]
    return [run for i, run in enumerate(runs) if run.key not in keys[:i]]
