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
Which tokens the draft supplies and which the target must: routing by kind and by offset.

Every generated token has a kind: decided by the ego history (the opener), phrase, deliberative
(only the images determine it), or closing. Accepted tokens came from the draft, bonus tokens
from the target. Where a proposal is rejected, the rank of the target's token among the draft's
choices says what a wider proposal would have caught. The disturbance test gives a clip the ego
history of another one: the opener must follow, the decision should not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rspec_planner.errors import InputError
from rspec_planner.evaluate.metrics import wilson
from rspec_planner.evaluate.reasoning_runs import Contender, Frame, PLAIN, Run, Stand
from rspec_planner.evaluate.survey import Taken
from rspec_planner.evaluate.teacher_forcing import ask
from rspec_planner.model.draft import Draft
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.tokenizer import Tokenizer
from rspec_planner.world.clip import Clip, Decision, STOP
from rspec_planner.world.reasoning import opener, parse, write
from rspec_planner.world.reasoning import tokens as words_of

KINDS = ('history', 'phrase', 'deliberative', 'closing', 'unreadable')
CLOSING, UNREADABLE = STOP, 4
#: rejected tokens are counted up to these ranks of the draft
RANKS = (1, 2, 3, 5, 10)


def spoken_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return what generated ids say before <|cot_end|>."""
    end = tokenizer.token_ids.cot_end
    return tokenizer.decode(ids[:list(ids).index(end)] if end in ids else ids)


def token_kinds(tokenizer: Tokenizer, ids: Sequence[int], history: np.ndarray) -> list[int]:
    """
    Return the kind of each generated id, an index of KINDS.

    history: (16, >=2). The target's own sentence is taken apart and written again, which gives
    its kinds; a sentence that the catalogue cannot produce is unreadable.
    """
    text = spoken_text(tokenizer, ids)
    sentence, said = parse(text), words_of(text)
    closing = [CLOSING] * (len(ids) - len(said))
    if sentence is None:
        return [UNREADABLE] * len(said) + closing
    try:
        again, kinds = write(history, Decision(sentence.action, sentence.cause,
                                               sentence.attributes))
    except InputError:
        return [UNREADABLE] * len(said) + closing
    if words_of(again)[2:] != said[2:]:
        return [UNREADABLE] * len(said) + closing
    return [*(int(kind) for kind in kinds[:-1]), *closing]


class _Counts:
    """What is counted about one draft."""

    def __init__(self, block: int) -> None:
        self.accepted, self.bonus = (np.zeros(len(KINDS), np.int64) for _ in range(2))
        self.tried, self.right = (np.zeros((len(KINDS), block - 1), np.int64) for _ in range(2))
        self.rejected = np.zeros(len(KINDS), np.int64)
        self.ranks: list[int | None] = []  # None: the token is not in a reduced head
        self.rejected_offsets = np.zeros(block - 1, np.int64)

    def report(self) -> dict[str, Any]:
        """Return shares by kind, rates by offset and ranks at rejections."""
        total = self.accepted + self.bonus
        shares = {kind: {'tokens': int(total[i]), 'accepted': int(self.accepted[i]),
                         'bonus': int(self.bonus[i]),
                         'accepted_share': wilson(int(self.accepted[i]), int(total[i])).to_dict()}
                  for i, kind in enumerate(KINDS) if total[i]}
        rates = {kind: [round(float(r / t), 5) if t else None
                        for r, t in zip(self.right[i], self.tried[i])]
                 for i, kind in enumerate(KINDS) if self.tried[i].any()}
        known = np.array([rank for rank in self.ranks if rank is not None], np.int64)
        count = len(self.ranks)
        return {'kinds': shares,
                'accepted_deliberative_share': _part(self.accepted, 2),
                'bonus_deliberative_share': _part(self.bonus, 2),
                'offsets': rates, 'rejections': count,
                'rejected_by_kind': dict(zip(KINDS, self.rejected.tolist())),
                'rejected_by_offset': self.rejected_offsets.tolist(),
                'within_rank': {str(rank): wilson(int((known <= rank).sum()), count).to_dict()
                                for rank in RANKS},
                'median_rank': float(np.median(known)) if len(known) else 0.0,
                'not_in_head': count - len(known)}


def _part(counts: np.ndarray, kind: int) -> dict[str, float]:
    return wilson(int(counts[kind]), int(counts.sum())).to_dict()


class RoutingProbe:
    """Counts the tokens of every draft, see `survey.Probe`."""

    def __init__(self, drafts: Mapping[str, Draft]) -> None:
        self._drafts = dict(drafts)
        self._counts = {name: _Counts(draft.cfg.block) for name, draft in drafts.items()}
        self._kinds = np.zeros(len(KINDS), np.int64)

    def take(self, stand: Stand, frame: Frame, clip: Clip, taken: Taken) -> None:
        """Count one frame."""
        ids = taken.runs[PLAIN].ids
        kinds = token_kinds(stand.tokenizer, ids, frame.history)
        self._kinds += np.bincount(kinds, minlength=len(KINDS))
        for name, draft in self._drafts.items():
            run = taken.runs[name]
            if run.ids == ids and run.stats.iterations:
                self._count(stand, frame, run, name, draft, kinds)

    def _count(self, stand: Stand, frame: Frame, run: Run, name: str, draft: Draft,
               kinds: Sequence[int]) -> None:
        counts, ids = self._counts[name], run.ids
        starts = [0, *np.cumsum(run.stats.committed)[:-1].tolist()]
        answer = ask(draft, stand.spoken(frame, ids, name),
                     [frame.prompt.length + start for start in starts])
        for row, (start, committed) in enumerate(zip(starts, run.stats.committed)):
            end = start + committed
            closed = end == len(ids) - 1 and run.stats.closing_forwards == 0
            matched = committed if closed else committed - 1
            for offset in range(1, min(matched + 1, draft.cfg.block - 1, len(ids) - 1 - start)
                                + 1):
                counts.tried[kinds[start + offset], offset - 1] += 1
            for offset in range(1, matched + 1):
                counts.accepted[kinds[start + offset]] += 1
                counts.right[kinds[start + offset], offset - 1] += 1
            if closed:
                continue
            counts.bonus[kinds[end]] += 1
            if matched < draft.cfg.block - 1:
                counts.rejected[kinds[end]] += 1
                counts.rejected_offsets[matched] += 1
                counts.ranks.append(rank_of(draft, answer.logits[row, matched], ids[end]))

    def report(self) -> dict[str, Any]:
        """Return the counts of every draft and the kinds of all generated tokens."""
        return {'kinds': dict(zip(KINDS, self._kinds.tolist())),
                'deliberative_share': _part(self._kinds, 2),
                'drafts': {name: counts.report() for name, counts in self._counts.items()}}


def rank_of(draft: Draft, logits: Any, token: int) -> int | None:
    """Return the rank (1 = best) of a target id in logits (V_d,); None if the head lacks it."""
    import torch
    index = int(draft.draft_index(torch.tensor(token, device=logits.device)))
    return None if index < 0 else int((logits > logits[index]).sum()) + 1


class DisturbanceProbe:
    """
    Decodes clips under the ego history of another clip.

    It overwrites the frame's cache, so it must be the last probe of a survey.
    """

    def __init__(self, plain: Contender, every: int = 1) -> None:
        """Disturb every `every`-th pair of twins, decoding with `plain`."""
        self._plain, self._every, self._seen = plain, every, 0
        self._donors: dict[str, np.ndarray] = {}  # one history per opener
        self._flags: list[dict[str, bool]] = []

    def take(self, stand: Stand, frame: Frame, clip: Clip, taken: Taken) -> None:
        """Swap the history of one frame for a known one with another opener."""
        own = opener(frame.history)
        donors = [name for name in self._donors if name != own]
        self._seen += 1
        if donors and not (self._seen - 1) // 2 % self._every:
            chosen = donors[self._seen % len(donors)]
            self._disturb(stand, frame, taken.runs[PLAIN].ids, own, chosen)
        self._donors[own] = frame.observation.ego_poses

    def _disturb(self, stand: Stand, frame: Frame, ids: Sequence[int], own: str,
                 chosen: str) -> None:
        observation: Observation = replace(frame.observation, ego_poses=self._donors[chosen])
        other = stand.prefill(observation, encode=False)
        before = spoken_text(stand.tokenizer, ids)
        after = spoken_text(stand.tokenizer, self._plain.reason(other).ids)
        first, second = parse(before), parse(after)
        if first is None or second is None:
            self._flags.append({'readable': False})
            return
        self._flags.append({
            'readable': True, 'opener_follows': second.opener == chosen,
            'opener_stays': second.opener == own,
            'action_changes': first.action != second.action,
            'cause_changes': first.cause != second.cause,
            'attributes_change': first.attributes != second.attributes})

    def report(self) -> dict[str, Any]:
        """Return the rates with intervals over readable sentences."""
        readable = [flags for flags in self._flags if flags['readable']]
        names = ('opener_follows', 'opener_stays', 'action_changes', 'cause_changes',
                 'attributes_change')
        return {'clips': len(self._flags), 'readable': len(readable),
                **{name: wilson(sum(flags[name] for flags in readable), len(readable)).to_dict()
                   for name in names}}
