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
One pass over the clips of the splits for every question at once.

Each clip is rendered, encoded and prefilled once; all contenders decode from that state, one
after the other in rotating order, so that no one always comes first. Rendering happens in this
process by default: render processes beside the clock would be measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.clips import render_clips
from rspec_planner.evaluate.reasoning_runs import Contender, Frame, Run, Stand
from rspec_planner.world.clip import Clip
from rspec_planner.world.generate import clip_observation
from rspec_planner.world.splits import split_specs

TEST_SPLITS = ('val', 'on-shelf', 'off-shelf')
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Taken:
    """One clip and what every contender did with it."""

    split: str
    clip: Clip  # without images
    prompt_length: int
    runs: dict[str, Run]  # by name of the contender


class Probe(Protocol):
    """A question that needs the buffers of a frame while they are there."""

    def take(self, stand: Stand, frame: Frame, clip: Clip, taken: Taken) -> None:
        """Look at one frame; K/V and taps of the greedy text are in place."""


def chosen_splits(split: str) -> tuple[str, ...]:
    """Return the splits of a name; ConfigurationError for an unknown one."""
    if split != 'all' and split not in TEST_SPLITS:
        raise ConfigurationError(f'split {split!r} is unknown; use one of '
                                 f'{", ".join(TEST_SPLITS)} or all')
    return TEST_SPLITS if split == 'all' else (split,)


class Survey:
    """Runs contenders and probes over splits."""

    def __init__(self, stand: Stand, contenders: Sequence[Contender],
                 probes: Sequence[Probe] = (), *, act: bool = False) -> None:
        """Take the first contender's text as the target's own; act: also plan trajectories."""
        self._stand, self._contenders, self._probes = stand, list(contenders), list(probes)
        self._act = act
        self._turn = 0

    def run(self, split: str, clips: int | None = None, *, workers: int = 0,
            progress: Progress | None = None) -> list[Taken]:
        """Return every clip of `split` ('all': the three test splits), in order."""
        jobs = [(name, split_specs(name, clips)) for name in chosen_splits(split)]
        total = sum(len(specs) for _, specs in jobs)
        cameras = self._stand.cfg.cameras
        taken: list[Taken] = []
        for name, specs in jobs:
            for clip in render_clips(specs, cameras.width, cameras.height, workers):
                if not taken:
                    self._take(name, clip, probing=False)  # warm-up
                taken.append(self._take(name, clip))
                if progress is not None:
                    progress(len(taken), total)
        return taken

    def _take(self, split: str, clip: Clip, *, probing: bool = True) -> Taken:
        """Return one clip with the runs of all contenders."""
        stand, count = self._stand, len(self._contenders)
        frame = stand.prefill(clip_observation(clip))
        runs: dict[str, Run] = {}
        for step in range(count):
            contender = self._contenders[(self._turn + step) % count]
            run = contender.reason(frame)
            if self._act:
                run = replace(run, xy=stand.act(run, frame))
            runs[contender.name] = run
        self._turn += 1
        ordered = {contender.name: runs[contender.name] for contender in self._contenders}
        taken = Taken(split, replace(clip, images=None), frame.prompt.length, ordered)
        if probing and self._probes:
            stand.speak(frame, ordered[self._contenders[0].name].ids)
            for probe in self._probes:
                probe.take(stand, frame, clip, taken)
        return taken
