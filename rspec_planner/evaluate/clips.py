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
"""Clips of a split, rendered in worker processes and handed over in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
import multiprocessing
from multiprocessing.pool import AsyncResult
import os

from rspec_planner.world.clip import Clip, ClipSpec


def pairs_of(specs: list[ClipSpec]) -> list[tuple[ClipSpec, ...]]:
    """Return the specs grouped by pair, in order of appearance."""
    grouped: dict[str, list[ClipSpec]] = {}
    for spec in specs:
        grouped.setdefault(spec.pair_id, []).append(spec)
    return [tuple(group) for group in grouped.values()]


def render_clips(specs: list[ClipSpec], width: int, height: int,
                 workers: int | None = None) -> Iterator[Clip]:
    """
    Yield the clips of `specs`, twins neighbouring.

    workers: processes to render in; 0 renders in this process, None takes one per processor.
    """
    jobs = [(group, width, height) for group in pairs_of(specs)]
    count = min(len(os.sched_getaffinity(0)), 14) if workers is None else workers
    if count == 0 or len(jobs) < 4:
        for job in jobs:
            yield from _render(job)
        return
    with multiprocessing.get_context('spawn').Pool(count) as pool:
        # a window of jobs, not all of them: a clip is 3.5 MB and planning is slower
        running: deque[AsyncResult[list[Clip]]] = deque()
        for job in jobs:
            running.append(pool.apply_async(_render, (job,)))
            if len(running) > 4 * count:
                yield from running.popleft().get()
        while running:
            yield from running.popleft().get()


def _render(job: tuple[tuple[ClipSpec, ...], int, int]) -> list[Clip]:
    import cv2

    from rspec_planner.world.generate import generate_clip, generate_pair
    from rspec_planner.world.renderer import Renderer
    from rspec_planner.world.rig import Rig
    specs, width, height = job
    cv2.setNumThreads(1)
    renderer = Renderer(Rig(width=width, height=height))
    if len(specs) == 1:
        return [generate_clip(specs[0], renderer)]
    event, twin = generate_pair(specs[0], renderer)
    return [event if spec.event else twin for spec in specs]
