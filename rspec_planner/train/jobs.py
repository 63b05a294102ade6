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
"""Which clips a process renders, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rspec_planner.train.farm import pair_jobs, PairJob
from rspec_planner.world.clip import ClipSpec
from rspec_planner.world.splits import extra_spec, split_specs

_GOLDEN = 0.6180339887498949  # spreads a share evenly without a period


def driven_on(specs: tuple[ClipSpec, ...], number: int, share: float) -> tuple[ClipSpec, ...]:
    """Return the twins of the pair with this number, a `share` of all pairs as drive clips."""
    if (number + 0.5) * _GOLDEN % 1.0 >= share:
        return specs
    return tuple(replace(spec, drive=1) for spec in specs)


@dataclass(frozen=True)
class JobPlan:
    """Pairs of one process: held-out ones have negative numbers, see `PoolFeeder`."""

    train: list[PairJob]
    held_out: list[PairJob]
    rank: int
    world: int
    first_extra: int
    start_pairs: int  # held-out pairs are rendered after so many training pairs
    extra: bool
    drive_share: float = 0.0  # of the extra pairs; `train` holds its own already

    def stream(self) -> Iterator[PairJob]:
        """Yield training pairs, the held-out pairs among them, then extra pairs for ever."""
        early = min(self.start_pairs, len(self.train))
        yield from self.train[:early]
        yield from self.held_out
        yield from self.train[early:]
        ordinal, index = len(self.train), self.first_extra + self.rank
        while self.extra:
            pair = extra_spec(2 * index), extra_spec(2 * index + 1)
            yield ordinal, driven_on(pair, ordinal, self.drive_share)
            ordinal, index = ordinal + 1, index + self.world


def plan_jobs(*, seed: int, rank: int, world: int, train_clips: int, val_clips: int,
              start_clips: int, extra: bool, first_extra: int, drive_share: float = 0.0,
              val_drive_clips: int = 0) -> JobPlan:
    """
    Return this process's share of the shuffled train split and of the validation split.

    train_clips = 0 takes the whole split; numbers count clips over all processes. Of the training
    pairs, `drive_share` are shown in mid-manoeuvre instead of at t0.
    """
    train = pair_jobs(split_specs('train'))
    order = np.random.default_rng([seed, 20]).permutation(len(train))
    train = [train[i] for i in order]
    if train_clips:
        train = train[:max(1, train_clips // 2)]
    mine = [(i, driven_on(specs, i, drive_share))
            for i, (_, specs) in enumerate(train[rank::world])]
    seen = split_specs('val')
    later = [replace(spec, drive=1) for spec in seen[:val_drive_clips]]
    held_out = pair_jobs(seen[:val_clips] + later)[rank::world]
    return JobPlan(train=mine, held_out=[(-1 - i, specs) for i, (_, specs) in enumerate(held_out)],
                   rank=rank, world=world, first_extra=first_extra,
                   start_pairs=max(1, start_clips // 2), extra=extra, drive_share=drive_share)
