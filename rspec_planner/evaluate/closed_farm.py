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
Processes that step closed-loop runs; planning happens in the process that asks.

A run is stepped until it wants a plan or is over, so one exchange is one plan of every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
import math
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rspec_planner.evaluate.closed_world import ClosedRun, Outcome, View
from rspec_planner.world.clip import ClipSpec


@dataclass(frozen=True)
class Stepping:
    """How runs are stepped; the same for all runs of one way to plan."""

    width: int
    height: int
    render: bool
    period: int  # ticks of 0.1 s between two plans at least
    expert: bool = False  # track the expert's own future: what the harness itself costs


@dataclass(frozen=True)
class Answer:
    """One plan for one run, and how long its making took."""

    plan: tuple[np.ndarray, ...] | None  # None: refused by the guard
    latency_s: float
    text: str = ''
    cautious: bool = False  # see `planner.caution`
    confidence: float = math.nan


State = View | Outcome


class RunHost:
    """The runs of one process."""

    def __init__(self) -> None:
        self._runs: dict[int, ClosedRun] = {}

    def open(self, jobs: Sequence[tuple[int, ClipSpec]], how: Stepping) -> dict[int, State]:
        """Start runs; each one's first view, or its outcome."""
        states = {}
        for number, spec in jobs:
            run = ClosedRun(spec, how.width, how.height, render=how.render, period=how.period)
            self._runs[number] = run
            if how.expert:
                run.apply(run.expert_plan(), 0.0)
                run.next_plan = 1 << 30
            states[number] = self._advance(number)
        return states

    def answer(self, answers: Mapping[int, Answer]) -> dict[int, State]:
        """Give plans; step each run until it wants the next one."""
        states = {}
        for number, answer in answers.items():
            self._runs[number].apply(answer.plan, answer.latency_s, answer.text,
                                     answer.cautious, answer.confidence)
            states[number] = self._advance(number)
        return states

    def _advance(self, number: int) -> State:
        run = self._runs[number]
        while not run.done and not run.wants_plan:
            run.step()
        return run.view() if not run.done else self._runs.pop(number).finish()


def _serve(link: Connection) -> None:
    import cv2
    cv2.setNumThreads(1)
    host = RunHost()
    while (request := link.recv()) is not None:
        name, arguments = request
        try:
            link.send((True, getattr(host, name)(*arguments)))
        except Exception as error:  # told where it can be reported
            link.send((False, f'{type(error).__name__}: {error}'))


class RunFarm:
    """Hosts in `workers` processes; 0 steps in this one. Use as a context."""

    def __init__(self, workers: int) -> None:
        self._local = RunHost() if workers == 0 else None
        self._links: list[Connection] = []
        self._processes: list[Any] = []
        self._owner: dict[int, int] = {}
        context = multiprocessing.get_context('spawn')
        for _ in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._links.append(mine)
            self._processes.append(process)

    def __enter__(self) -> RunFarm:
        return self

    def __exit__(self, *details: object) -> None:
        for link in self._links:
            try:
                link.send(None)
            except OSError:  # that process is gone already
                continue
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.terminate()

    def open(self, jobs: Sequence[tuple[int, ClipSpec]], how: Stepping) -> dict[int, State]:
        """Start runs over all processes; twins share one, which draws their pair once."""
        if self._local is not None:
            return self._local.open(jobs, how)
        groups: dict[int, list[tuple[int, ClipSpec]]] = {}
        places: dict[str, int] = {}
        for number, spec in jobs:
            place = places.setdefault(spec.pair_id, len(places) % len(self._links))
            self._owner[number] = place
            groups.setdefault(place, []).append((number, spec))
        return self._ask('open', {place: (jobs, how) for place, jobs in groups.items()})

    def answer(self, answers: Mapping[int, Answer]) -> dict[int, State]:
        """Give plans to runs; return what each wants next."""
        if self._local is not None:
            return self._local.answer(answers)
        groups: dict[int, dict[int, Answer]] = {}
        for number, answer in answers.items():
            groups.setdefault(self._owner[number], {})[number] = answer
        return self._ask('answer', {place: (part,) for place, part in groups.items()})

    def _ask(self, name: str, requests: Mapping[int, tuple[Any, ...]]) -> dict[int, State]:
        for place, arguments in requests.items():
            self._links[place].send((name, arguments))
        return dict(_merged(self._links[place].recv() for place in requests))


def _merged(replies: Iterable[tuple[bool, Any]]) -> Iterable[tuple[int, State]]:
    for fine, states in replies:
        if not fine:
            raise RuntimeError(f'a run process failed: {states}')
        yield from states.items()
