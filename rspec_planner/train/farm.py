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
Worker processes that render clip pairs into shared memory while a GPU trains.

The workers import NumPy and OpenCV only. A pair costs one slot of shared memory; labels
travel as a small pickled clip without its pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import ctypes
from dataclasses import dataclass, replace
import multiprocessing
import os
import queue
from typing import Any

import numpy as np

from rspec_planner.errors import RspecError
from rspec_planner.train.labels import object_grid
from rspec_planner.world.clip import Clip, ClipSpec

PairJob = tuple[int, tuple[ClipSpec, ...]]  # ordinal, one or two specs of one pair
#: gets a failed job and its message, returns the job to do instead or raises
Substitute = Callable[[PairJob, str], PairJob]


@dataclass(frozen=True)
class FailedJob:
    """A job that raised in its worker."""

    slot: int
    job: PairJob
    message: str


@dataclass(frozen=True)
class RenderedPair:
    """A finished job: where its pixels lie, and its labels."""

    ordinal: int
    slot: int
    clips: tuple[Clip, ...]  # one or two, without images and agents
    objects: np.ndarray  # (clips, 16, tokens per image) uint8, see `object_grid`


def pair_jobs(specs: list[ClipSpec], first: int = 0) -> list[PairJob]:
    """Return jobs of neighbouring twins, numbered from `first`."""
    grouped: dict[str, list[ClipSpec]] = {}
    for spec in specs:
        grouped.setdefault(spec.pair_id, []).append(spec)
    return [(first + i, tuple(group)) for i, group in enumerate(grouped.values())]


class RenderFarm:
    """
    Render jobs in `workers` spawned processes; finished pairs come back out of order.

    `poll` never blocks longer than its timeout. `release` gives a slot back once its pixels
    were copied; without free slots no further job is handed out, so memory stays bounded.
    """

    def __init__(self, jobs: Iterator[PairJob], *, workers: int,
                 image_shape: tuple[int, int, int, int, int], slots: int = 0,
                 substitute: Substitute | None = None):
        self._jobs, self._substitute = jobs, substitute
        self._shape = image_shape  # of one clip: (4, 4, H, W, 3)
        self._workers = workers
        self.slots = slots or 4 * workers
        context = multiprocessing.get_context('spawn')
        nbytes = self.slots * 2 * int(np.prod(image_shape))
        self._memory = context.RawArray(ctypes.c_uint8, nbytes)
        self.pixels = _as_pixels(self._memory, self.slots, image_shape)
        self._tasks: Any = context.Queue()
        self._done: Any = context.Queue()
        self._free = list(range(self.slots))
        self._outstanding = 0
        self._processes = [
            context.Process(target=_work, daemon=True, name=f'render-{i}',
                            args=(self._tasks, self._done, self._memory, self.slots, image_shape))
            for i in range(workers)]

    def start(self) -> None:
        """Start the processes and hand out the first jobs."""
        for process in self._processes:
            process.start()
        self._hand_out()

    @property
    def idle(self) -> bool:
        """Return whether every job is finished and collected."""
        self._hand_out()
        return self._outstanding == 0

    def poll(self, limit: int = 64, timeout_s: float = 0.0) -> list[RenderedPair]:
        """
        Return up to `limit` finished pairs.

        Raises RspecError with the clip's name when a worker failed and nobody substitutes its
        job, and when a worker died.
        """
        finished: list[RenderedPair] = []
        while len(finished) < limit:
            try:
                wait = timeout_s if not finished else 0.0
                item = self._done.get(timeout=wait) if wait else self._done.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, FailedJob):
                if self._substitute is None:
                    raise RspecError(item.message)
                self._tasks.put((item.slot, self._substitute(item.job, item.message)))
                continue
            self._outstanding -= 1
            finished.append(item)
        if not finished and any(p.exitcode not in (None, 0) for p in self._processes):
            raise RspecError('render worker: a process died; start fewer workers or look at its '
                             'message above')
        self._hand_out()
        return finished

    def release(self, slot: int) -> None:
        """Give back a slot whose pixels were copied."""
        self._free.append(slot)

    def close(self) -> None:
        """End the processes; jobs in flight are dropped."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            if process.pid is not None:
                process.join(timeout=5.0)
        for channel in (self._tasks, self._done):
            channel.cancel_join_thread()
            channel.close()

    def _hand_out(self) -> None:
        while self._free:
            job = next(self._jobs, None)
            if job is None:
                return
            self._tasks.put((self._free.pop(), job))
            self._outstanding += 1


def _as_pixels(memory: Any, slots: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(memory, np.uint8).reshape(slots, 2, *shape)


def _work(tasks: Any, done: Any, memory: Any, slots: int, shape: tuple[int, ...]) -> None:
    os.environ['OMP_NUM_THREADS'] = '1'
    import cv2

    from rspec_planner.world.renderer import Renderer
    from rspec_planner.world.rig import Rig

    cv2.setNumThreads(1)
    rig = Rig(width=shape[3], height=shape[2])
    renderer = Renderer(rig)
    pixels = _as_pixels(memory, slots, shape)
    while True:
        slot, (ordinal, specs) = tasks.get()
        try:
            done.put(_render(pixels[slot], slot, ordinal, specs, renderer, rig))
        except Exception as error:  # a worker's only voice is the queue
            done.put(FailedJob(slot, (ordinal, specs),
                               f'clip {specs[0].pair_id}: {type(error).__name__}: {error}'))


def _render(pixels: np.ndarray, slot: int, ordinal: int, specs: tuple[ClipSpec, ...],
            renderer: Any, rig: Any) -> RenderedPair:
    from rspec_planner.world.generate import generate_clip
    from rspec_planner.world.onward import make_pair
    if len(specs) == 2:
        clips = tuple(make_pair(specs[0], renderer))
    elif specs[0].drive:
        clips = (make_pair(specs[0], renderer)[0 if specs[0].event else 1],)
    else:
        clips = (generate_clip(specs[0], renderer),)
    objects = np.stack([object_grid(clip, rig) for clip in clips])
    for target, clip in zip(pixels, clips):
        if clip.images is None:
            raise RspecError('the generator returned no images')
        np.copyto(target, clip.images)
    bare = tuple(replace(clip, images=None, agents=np.zeros((80, 0, 7), np.float32),
                         paints_polygons=[]) for clip in clips)
    return RenderedPair(ordinal, slot, bare, objects)
