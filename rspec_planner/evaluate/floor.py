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
The floor: a draft without eyes that every learned draft must clearly beat.

It knows the ego state (the opener, a function of the history poses alone) and how often the
sentences of the training split go on in which way. A draft that does not beat it has learned the
phrase book and nothing of the scene.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import multiprocessing
import os

import torch
from torch import Tensor

from rspec_planner.errors import ConfigurationError
from rspec_planner.planner.tokenizer import Tokenizer
from rspec_planner.world.clip import ClipSpec
from rspec_planner.world.splits import split_specs

#: texts that the floor reads by default: all of the training split
TRAIN_CLIPS = 11_655
#: for a prefix that no training text has, this many of its last tokens decide, then fewer
SUFFIX = 6
Texts = list[tuple[str, str]]  # (opener, whole text)


class Continuations:
    """
    The most frequent next token after a prefix of a text.

    A prefix that no text has (the target says things that nobody said in training) falls back
    to its longest known suffix. Ties go to the smaller id, so that the order of the texts does
    not matter.
    """

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        counts: dict[tuple[int, ...], Counter[int]] = {}
        for ids in texts:
            for index, token in enumerate(ids):
                for key in self._keys(tuple(ids[:index])):
                    counts.setdefault(key, Counter())[token] += 1
        self._best = {key: min(found, key=lambda t: (-found[t], t))
                      for key, found in counts.items()}
        if not self._best:
            raise ConfigurationError('no training texts: the floor needs at least one')

    @staticmethod
    def _keys(prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return what a prefix is looked up by, the most exact first; -1 marks a beginning."""
        suffixes = [prefix[-size:] for size in range(min(SUFFIX, len(prefix)), 0, -1)]
        return [(-1, *prefix), *suffixes, ()]

    def next(self, prefix: tuple[int, ...]) -> int:
        """Return the most frequent token after a prefix."""
        return next(self._best[key] for key in self._keys(prefix) if key in self._best)

    def walk(self, prefix: Sequence[int], count: int, opener: Sequence[int] = ()) -> list[int]:
        """
        Return the `count` most likely tokens after a prefix, each given those before.

        opener: the first tokens of the text, known from the ego state.
        """
        said = list(prefix)
        for _ in range(count):
            known = len(said) < len(opener)
            said.append(opener[len(said)] if known else self.next(tuple(said)))
        return said[len(prefix):]


class FloorDraft:
    """The floor as an executor, with the buffers of a draft; `begin` it at every frame."""

    def __init__(self, table: Continuations, tokens: Tensor, width: int) -> None:
        """tokens: (capacity,) int64 committed text, `DecodeState.tokens`; width: the block."""
        self._table, self._tokens, self._opener = table, tokens, tuple[int, ...]()
        names = ('start', 'since', 'rope_delta', 'length')
        self._inputs = {name: torch.zeros(1, dtype=torch.int64) for name in names}
        self._outputs = {'proposals': torch.zeros(width - 1, dtype=torch.int64)}

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that the loop fills."""
        return self._inputs

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """Return 'proposals' (B - 1,) int64."""
        return self._outputs

    def begin(self, opener: Sequence[int]) -> None:
        """Take the opener's ids of the next frame."""
        self._opener = tuple(opener)

    def enqueue(self, stream: torch.cuda.Stream | None = None) -> None:
        """Propose the most frequent continuation of what is committed."""
        length, start = int(self._inputs['length']), int(self._inputs['start'])
        said = self._tokens[length:start + 1].tolist()
        proposals = self._outputs['proposals']
        proposals.copy_(torch.tensor(
            self._table.walk(said, len(proposals), self._opener), dtype=torch.int64))


def training_texts(clips: int = TRAIN_CLIPS, workers: int | None = None) -> list[str]:
    """
    Return the expert's texts of the first `clips` clips of the training split, unrendered.

    workers: processes; 0 works in this one, None takes one per processor.
    """
    specs = split_specs('train', clips)
    count = len(os.sched_getaffinity(0)) if workers is None else workers
    pairs = [specs[index:index + 2] for index in range(0, len(specs), 2)]
    if count == 0 or len(pairs) < 100:
        return [text for pair in pairs for text in _texts(pair)]
    with multiprocessing.get_context('spawn').Pool(count) as pool:
        found = pool.map(_texts, pairs, chunksize=32)
    return [text for pair in found for text in pair]


def _texts(pair: list[ClipSpec]) -> list[str]:
    from rspec_planner.world.generate import generate_pair
    return [clip.reasoning for clip in generate_pair(pair[0])[:len(pair)]]


def target_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return a text as a target would say it, both closing tokens included."""
    tokens = tokenizer.token_ids
    return (*tokenizer.encode(text), tokens.cot_end, tokens.traj_future_start)


def floor_table(tokenizer: Tokenizer, clips: int = TRAIN_CLIPS,
                workers: int | None = None) -> Continuations:
    """Return the floor's table of the training split."""
    return Continuations(target_ids(tokenizer, text) for text in training_texts(clips, workers))
