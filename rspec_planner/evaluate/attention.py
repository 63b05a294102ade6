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
Where a draft looks: the attention budget of its first block, and what the parts are worth.

As in arXiv 2606.31160: one block anchored at the first generated token, its attention averaged
over heads and rows, split into visual, text and generated columns. Beyond it: every layer, many
clips with intervals, the ego history apart from the other text, and controls at test time that
show what a share means for the accepted length: the other rotary, hidden columns, short windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rspec_planner.evaluate.intervals import (
    difference_interval,
    ratio_interval,
    statistic_interval,
)
from rspec_planner.evaluate.pairs import rotary_pairs
from rspec_planner.evaluate.reasoning_runs import Frame, PLAIN, Stand
from rspec_planner.evaluate.survey import Taken
from rspec_planner.evaluate.teacher_forcing import Answer, ask, Reading, Spoken, walk
from rspec_planner.model.config import TokenIds
from rspec_planner.model.draft import Draft, DraftConfig
from rspec_planner.world.clip import Clip

GROUPS = ('visual', 'history', 'text', 'generated')
_OTHER = {'flat': 'mirror', 'mirror': 'flat'}


def column_groups(ids: Tensor, tokens: TokenIds) -> dict[str, Tensor]:
    """Return which rows (S,) of a prompt are visual, ego history and other text, bool."""
    visual = ids == tokens.image_pad
    history = (ids >= tokens.forbidden_start) & (ids < tokens.forbidden_end)
    return {'visual': visual, 'history': history, 'text': ~visual & ~history}


def shares(answer: Answer, groups: Mapping[str, Tensor]) -> np.ndarray:
    """
    Return the budget (layers, 4 + 2) of one anchor.

    Columns: the shares of GROUPS, which sum to 1, then the normalised entropy over text and
    history together (the paper's set) and over the history alone; NaN where a set has fewer
    than two columns.
    """
    weights = answer.weights.mean(dim=(1, 2)).double()
    context = len(answer.context)
    member = {name: mask[answer.context] for name, mask in groups.items()}
    parts = [weights[:, :context][:, member[name]].sum(-1) for name in GROUPS[:3]]
    parts.append(weights[:, context:].sum(-1))
    rows = answer.weights[..., :context].double()
    parts.append(entropy(rows[..., ~member['visual']]))
    parts.append(entropy(rows[..., member['history']]))
    found: np.ndarray = torch.stack(parts, dim=1).numpy()
    return found


def entropy(weights: Tensor) -> Tensor:
    """Return the normalised entropy (layers,) of (layers, heads, rows, n), mean over rows."""
    count = weights.shape[-1]
    if count < 2:
        return torch.full(weights.shape[:1], float('nan'), dtype=weights.dtype)
    total = weights.sum(-1, keepdim=True).clamp(min=1e-30)
    a = weights / total
    spread = -(a * a.clamp(min=1e-30).log()).sum(-1) / np.log(count)
    mean: Tensor = spread.mean(dim=(1, 2))
    return mean


def controls(cfg: DraftConfig, groups: Mapping[str, Tensor]) -> dict[str, Reading]:
    """Return the readings whose accepted length is compared with the trained one."""
    own = Reading(cfg.rotary, cfg.window)
    found = {'as trained': own, 'other rotary': replace(own, rotary=_OTHER[cfg.rotary])}
    if cfg.window == 0:
        hide = {'no visual columns': groups['visual'], 'no ego history': groups['history'],
                'other text only': groups['visual'] | groups['history']}
        found.update({name: replace(own, columns=~mask) for name, mask in hide.items()})
    found.update({f'window {window}': replace(own, window=window) for window in (1, 8, 64)
                  if cfg.window == 0 or window < cfg.window})
    return found


class AttentionProbe:
    """Collects budgets and control lengths of drafts, see `survey.Probe`."""

    def __init__(self, drafts: Mapping[str, Draft], every: int = 1) -> None:
        """Look at every `every`-th pair of twins."""
        self._drafts, self._every, self._seen = dict(drafts), every, 0
        self.budgets: dict[str, dict[str, list[np.ndarray]]] = {
            name: {'as trained': [], 'other rotary': []} for name in drafts}
        self.lengths: dict[str, dict[str, list[tuple[int, int]]]] = {
            name: {} for name in drafts}

    def take(self, stand: Stand, frame: Frame, clip: Clip, taken: Taken) -> None:
        """Ask every draft about one frame."""
        self._seen += 1
        if (self._seen - 1) // 2 % self._every:
            return
        ids, tokens = taken.runs[PLAIN].ids, stand.cfg.tokens
        if len(ids) < 2:
            return
        follow = {tokens.cot_end: tokens.traj_future_start}
        for name, draft in self._drafts.items():
            spoken = stand.spoken(frame, ids, name)
            groups = column_groups(spoken.ids, tokens)
            for label, reading in controls(draft.cfg, groups).items():
                if label in self.budgets[name]:
                    answer = ask(draft, spoken, [spoken.length], reading)
                    self.budgets[name][label].append(shares(answer, groups))
                committed = self._walk(draft, spoken, reading, tokens, follow)
                self.lengths[name].setdefault(label, []).append((sum(committed),
                                                                 len(committed)))

    @staticmethod
    def _walk(draft: Draft, spoken: Spoken, reading: Reading, tokens: TokenIds,
              follow: Mapping[int, int]) -> list[int]:
        anchors = range(spoken.length, len(spoken.ids) - 1)
        proposals = ask(draft, spoken, anchors, reading).proposals
        return walk(spoken.text, proposals, tokens.stop_ids, follow)

    def report(self) -> dict[str, Any]:
        """Return the budgets, the control lengths and the shift from mirror to flat."""
        count = max((len(found['as trained']) for found in self.budgets.values()), default=0)
        return {'clips': count,
                'drafts': {name: self._draft_report(name) for name in self._drafts},
                'shift': self._shifts()}

    def _draft_report(self, name: str) -> dict[str, Any]:
        cfg = self._drafts[name].cfg
        own = self.lengths[name].get('as trained', [])
        lengths = {}
        for label, found in self.lengths[name].items():
            lengths[label] = {'accepted_length': ratio_interval(*_columns(found)),
                              'change': difference_interval(_columns(found), _columns(own))}
        return {'kind': cfg.kind, 'rotary': cfg.rotary, 'window': cfg.window,
                'layers': layer_reports(self.budgets[name]['as trained']),
                'other_rotary_layers': layer_reports(self.budgets[name]['other rotary']),
                'controls': lengths}

    def _shifts(self) -> dict[str, Any]:
        """Return flat minus mirror, layer 0, for drafts that differ in nothing else."""
        found = {}
        for flat, mirror in rotary_pairs({n: draft.cfg for n, draft in self._drafts.items()}):
            ours, theirs = (np.array(self.budgets[name]['as trained'])[:, 0]
                            for name in (flat, mirror))
            found[f'{flat} - {mirror}'] = budget_report(ours - theirs)
        return found


def layer_reports(budgets: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Return one report per layer of budgets (layers, 6) of many clips."""
    if not budgets:
        return []
    stacked = np.stack(budgets)
    return [budget_report(stacked[:, layer]) for layer in range(stacked.shape[1])]


def budget_report(values: np.ndarray) -> dict[str, Any]:
    """Return the mean and interval of each column of (clips, 6), see `shares`."""
    names = (*GROUPS, 'entropy', 'history_entropy')
    report = {name: statistic_interval(values[:, i]) for i, name in enumerate(names)
              if not np.isnan(values[:, i]).any()}
    report['text_and_history'] = statistic_interval(values[:, 1] + values[:, 2])
    return report


def _columns(found: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(found, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
