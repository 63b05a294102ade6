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
Accepted length when the target samples instead of taking its best token.

Both exact rules of `decode.sampling` are asked: the match rule, which takes the draft's best
tokens as they are, and the rejection rule, whose proposals are drawn from the draft at the
target's own temperature and top-p. Every clip has its own random numbers, a function of the seed
and its name, so a run repeats itself; by the match rule the text is that of plain sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from zlib import crc32

import numpy as np

from rspec_planner.decode.sampling import Sampler, SamplingRule
from rspec_planner.evaluate.intervals import difference_interval, ratio_interval
from rspec_planner.evaluate.length import counts
from rspec_planner.evaluate.reasoning_runs import Frame, Run, Stand
from rspec_planner.evaluate.survey import Taken
from rspec_planner.model.draft import Draft
from rspec_planner.world.clip import Clip


@dataclass(frozen=True)
class Sampling:
    """How the target is sampled, and the seed of all clips."""

    temperature: float = 0.6
    top_p: float = 0.98
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigurationError for a temperature or top-p that cannot be."""
        SamplingRule(self.temperature, self.top_p)

    def sampler(self, clip: str, draft: Draft | None = None, *,
                rejection: bool = False) -> Sampler:
        """Return what draws the tokens of one clip."""
        rule = SamplingRule(self.temperature, self.top_p)
        return Sampler(rule, self.seed << 32 | crc32(clip.encode()), rejection, rule,
                       None if draft is None else draft.draft_ids)


@dataclass(frozen=True)
class _Sampled:
    """One clip: plain sampling, and both rules beside greedy decoding for every draft."""

    split: str
    said: tuple[int, ...]  # greedy text
    plain: Run
    greedy: dict[str, Run]  # by draft, as the next two
    match: dict[str, Run]
    rejection: dict[str, Run]


class SampledProbe:
    """Decodes every frame again with sampling, see `survey.Probe`; keeps the prompt intact."""

    def __init__(self, stand: Stand, drafts: Sequence[str], sampling: Sampling) -> None:
        """Take the drafts whose greedy runs the survey has as well."""
        self.sampling = sampling
        self._plain = stand.plain()
        self._contenders = {name: stand.speculative(name) for name in drafts}
        self._taken: list[_Sampled] = []

    def take(self, stand: Stand, frame: Frame, clip: Clip, taken: Taken) -> None:
        """Decode one frame by both rules with every draft."""
        name = f'{taken.split}/{clip.spec.pair_id}/{clip.spec.event}'
        plain = self._plain.reason(frame, sampler=self.sampling.sampler(name))
        match, rejection = (
            {draft: contender.reason(frame, sampler=self.sampling.sampler(
                name, stand.drafts[draft], rejection=tested))
             for draft, contender in self._contenders.items()} for tested in (False, True))
        self._taken.append(_Sampled(
            taken.split, taken.runs[self._plain.name].ids, plain,
            {draft: taken.runs[draft] for draft in self._contenders}, match, rejection))

    def report(self) -> dict[str, Any]:
        """Return the rule and, per split, L of every draft by both rules beside greedy."""
        splits = dict.fromkeys(clip.split for clip in self._taken)
        return {**asdict(self.sampling),
                'splits': {split: self._split([clip for clip in self._taken
                                               if clip.split == split]) for split in splits}}

    def _split(self, clips: Sequence[_Sampled]) -> dict[str, Any]:
        tokens = [len(clip.plain.ids) for clip in clips]
        return {'clips': len(clips), 'tokens': round(float(np.mean(tokens)), 4),
                'texts_unlike_greedy': sum(clip.plain.ids != clip.said for clip in clips),
                'drafts': {name: _draft_report(clips, name) for name in self._contenders}}


def _draft_report(clips: Sequence[_Sampled], name: str) -> dict[str, Any]:
    """
    Return L by three ways of decoding.

    `text_mismatches` counts texts of the match rule that are not those of plain sampling: a
    verify of another width rounds differently, which a number close to a boundary shows.
    """
    greedy, match, rejection = (counts([getattr(clip, way)[name] for clip in clips])
                                for way in ('greedy', 'match', 'rejection'))
    return {
        'greedy': {'accepted_length': ratio_interval(*greedy)},
        'match': {'accepted_length': ratio_interval(*match),
                  'change': difference_interval(match, greedy),
                  'text_mismatches': sum(clip.match[name].ids != clip.plain.ids
                                         for clip in clips)},
        'rejection': {'accepted_length': ratio_interval(*rejection),
                      'change': difference_interval(rejection, greedy),
                      'above_match': difference_interval(rejection, match)}}
