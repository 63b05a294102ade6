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
One planning cycle: from a trigger t0 to a published plan or a named reason why not.

Runs on the worker's thread. Knows neither ROS nor where plans go: the clock, the publisher and
the planner are given. Stamps and ages use that clock, durations the monotonic one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
import time
from typing import Protocol

from rspec_planner.errors import one_line
from rspec_planner.guard import Guard, guard_limits
from rspec_planner.inputs import InputWatch
from rspec_planner.parameters import NodeParameters
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plan import Plan, Verdict
from rspec_planner.planner.plausibility import implausible
from rspec_planner.planner.timing import LatencyWindow, STAGES
from rspec_planner.planner.trajectory import check_plan

#: skip reasons that this module adds to those of the observation buffer
CYCLE_SKIP_REASONS = ('clock_not_running', 'input_too_old', 'stamp_in_future', 'reset')

#: images may arrive a little before the /clock message of the same instant
_FUTURE_TOLERANCE_MS = 200.0


class Outcome(Enum):
    """How a cycle ended."""

    PUBLISHED = 'published'
    SKIPPED = 'skipped'  # no observation; the reason names the input
    REJECTED = 'rejected'  # the trajectory checks refused the plan
    LATE = 'late'  # older than deadline.max_pipeline_latency_ms
    FAILED = 'failed'  # the planner raised


@dataclass(frozen=True)
class CycleResult:
    """What one cycle did; times in milliseconds."""

    t0_ns: int
    outcome: Outcome
    reason: str = ''  # snake_case, '' when published
    detail: str = ''  # one line: the thing, the value, the remedy
    plan: Plan | None = None
    processing_ms: float = 0.0  # mailbox pick-up to publication, monotonic clock
    wait_ms: float = 0.0  # of these, waiting for the inputs of the same instant
    images_ms: float = 0.0  # of these, waiting until the newest frames are decoded
    select_ms: float = 0.0  # of these, choosing the inputs by time
    pipeline_latency_ms: float = 0.0  # publication minus t0, node clock
    cyclic_ms: float | None = None  # since the previous published plan, monotonic clock
    repeated: bool = False  # the previous plan was published again, with its old stamp
    stopped: bool = False  # a controlled stop was published, on its own topic

    def __post_init__(self) -> None:
        object.__setattr__(self, 'detail', one_line(self.detail))  # may quote a message's fields


class PlannerLike(Protocol):
    """The part of `planner.pipeline.Planner` that a cycle uses."""

    def plan(self, observation: Observation) -> Plan:
        """Return the plan of an observation."""

    def reset(self) -> None:
        """Drop what is cached from earlier frames."""


class SkipLike(Protocol):
    """Why there is no observation."""

    @property
    def reason(self) -> str:
        """Return the snake_case name."""

    @property
    def detail(self) -> str:
        """Return one line with the value and the remedy."""


class SourceLike(Protocol):
    """The part of `planner.buffers.ObservationBuffer` that a cycle uses."""

    def prepare(self, t0_ns: int) -> None:
        """Decode what a selection at t0 will use."""

    def select(self, t0_ns: int) -> Observation | SkipLike:
        """Return the observation at t0 or the reason why there is none."""


#: what the windows of the latency diagnostic hold, milliseconds
TIMES = ('processing', 'pipeline_latency', 'cyclic', 'wait', 'images', 'select', *STAGES)


def _windows() -> dict[str, LatencyWindow]:
    return {name: LatencyWindow() for name in TIMES}


@dataclass
class CycleStatistics:
    """Counts and windows since activation; written by the worker, read by diagnostics."""

    published: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # by the name of the failed check
    failed: int = 0
    superseded: int = 0  # replaced in the mailbox by a newer frame
    rate_limited: int = 0  # above planning.rate_hz
    repeated: int = 0
    stopped: int = 0
    cautious: int = 0  # published, slower than drawn
    deadline_misses: int = 0
    budget_misses: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    windows: dict[str, LatencyWindow] = field(default_factory=_windows)  # by name from TIMES
    accepted_length: LatencyWindow = field(default_factory=LatencyWindow)  # of decoded plans

    @property
    def processing(self) -> LatencyWindow:
        """Return the window from mailbox pick-up to publication."""
        return self.windows['processing']

    def count(self, result: CycleResult, budget_ms: float) -> None:
        """Add one finished cycle."""
        if result.outcome is Outcome.SKIPPED:
            self.skipped[result.reason] += 1
            return
        self.published += result.outcome is Outcome.PUBLISHED
        self.cautious += (result.outcome is Outcome.PUBLISHED and result.plan is not None
                          and result.plan.cautious)
        if result.outcome is Outcome.REJECTED:
            self.rejected[result.reason] += 1
        self.failed += result.outcome is Outcome.FAILED
        self.deadline_misses += result.outcome is Outcome.LATE
        self.repeated += result.repeated
        self.stopped += result.stopped
        for name, value in times_of(result).items():
            self.windows[name].add(value)
        if result.plan is not None:
            self.budget_misses += result.processing_ms > budget_ms
            if result.plan.reasoning.stats.iterations:
                self.accepted_length.add(result.plan.reasoning.stats.accepted_length)


def times_of(result: CycleResult) -> dict[str, float]:
    """Return the times of a cycle that planned, by name from TIMES; empty for another one."""
    if result.plan is None:
        return {}
    times = {'processing': result.processing_ms, 'pipeline_latency': result.pipeline_latency_ms,
             'wait': result.wait_ms, 'images': result.images_ms, 'select': result.select_ms,
             **{stage: getattr(result.plan.times, f'{stage}_ms') for stage in STAGES}}
    if result.cyclic_ms is not None:
        times['cyclic'] = result.cyclic_ms
    return times


class RateLimit:
    """
    Let at most `rate_hz` triggers per second through, by their own stamps.

    A camera at exactly that rate jitters, so a trigger may come a quarter of a period early; the
    schedule then moves on by a whole period and the mean stays below the limit.
    """

    def __init__(self) -> None:
        self._due_ns: int | None = None

    def allows(self, t0_ns: int, rate_hz: float) -> bool:
        """Return whether a trigger at t0 may start a cycle, and schedule the next one."""
        period_ns = round(1e9 / rate_hz)
        due_ns = t0_ns if self._due_ns is None else self._due_ns
        if t0_ns < due_ns - period_ns // 4:
            return False
        self._due_ns = max(due_ns, t0_ns - period_ns // 4) + period_ns
        return True

    @property
    def due_ns(self) -> int | None:
        """Return the stamp at which the next trigger is due, None when any one is."""
        return self._due_ns

    def reset(self) -> None:
        """Let the next trigger through, for example after a clock jump."""
        self._due_ns = None


class PlanningCycle:
    """
    Run cycles and remember the last good plan.

    `publish` gets a plan that passed all checks, or the previous one again; `publish_stop` gets
    controlled stops.
    """

    def __init__(self, planner: PlannerLike, source: SourceLike, watch: InputWatch,
                 clock_ns: Callable[[], int], publish: Callable[[Plan], None],
                 publish_stop: Callable[[Plan], None]) -> None:
        self._planner = planner
        self._source = source
        self._watch = watch
        self._clock_ns = clock_ns
        self._publish = publish
        self._guard = Guard(publish, publish_stop)
        self._fallback = ''
        self._generation = 0
        self._previous: Plan | None = None
        self._previous_at: float | None = None
        self._started: float | None = None
        self._collecting: int | None = None

    @property
    def collecting_ns(self) -> int | None:
        """Return the t0 of a cycle that still takes frames, None when none does; any thread."""
        return self._collecting

    @property
    def busy_s(self) -> float:
        """Return how long the cycle in progress has run, 0 when none has; any thread."""
        started = self._started
        return 0.0 if started is None else time.perf_counter() - started

    @property
    def fallback(self) -> str:
        """Return what the last cycle published in a plan's stead: '', 'last_valid', 'stop'."""
        return self._fallback

    def invalidate(self) -> None:
        """Make a cycle in progress end without publishing; any thread may call this."""
        self._generation += 1

    def reset(self) -> None:
        """Forget everything from before a clock jump; only on the worker's thread."""
        self._previous = None
        self._previous_at = None
        self._planner.reset()

    def run(self, t0_ns: int, parameters: NodeParameters, cameras: Mapping[str, int]
            ) -> CycleResult:
        """
        Plan for t0 and publish; `cameras` maps streams to the stamp that they must have reached.

        What the planner raises goes through to the worker.
        """
        self._started = started = time.perf_counter()
        try:
            result = self._run(t0_ns, parameters, cameras)
        finally:
            self._started = self._collecting = None
        return replace(result, processing_ms=_elapsed_ms(started))

    def _run(self, t0_ns: int, parameters: NodeParameters, cameras: Mapping[str, int]
             ) -> CycleResult:
        generation, self._fallback = self._generation, ''
        refusal = self._check_age(t0_ns, parameters.sync.max_input_age_ms)
        if refusal is not None:
            return refusal
        timer = _Timer()
        deadline = time.monotonic() + parameters.sync.odometry_wait_ms / 1e3
        self._collecting = t0_ns
        with timer.of('wait'):
            self._watch.wait_for(cameras, parameters.sync.image_wait_ms / 1e3)
        with timer.of('images'):
            self._source.prepare(t0_ns)  # the odometry may arrive meanwhile
        with timer.of('wait'):
            self._watch.wait_for({'odometry': t0_ns}, max(0.0, deadline - time.monotonic()))
        with timer.of('select'):
            chosen = self._source.select(t0_ns)
        self._collecting = None
        if generation != self._generation:
            return _reset_result(t0_ns)
        doubt = implausible(chosen, parameters.cameras.content_check == 'refuse') \
            if isinstance(chosen, Observation) else None
        if doubt is not None:
            result = CycleResult(t0_ns, Outcome.SKIPPED, *doubt)
        elif isinstance(chosen, Observation):
            result = self._plan(chosen, generation, parameters)
        else:
            result = CycleResult(t0_ns, Outcome.SKIPPED, chosen.reason, chosen.detail)
        return replace(result, wait_ms=timer.ms['wait'], images_ms=timer.ms['images'],
                       select_ms=timer.ms['select'])

    def _check_age(self, t0_ns: int, limit_ms: float) -> CycleResult | None:
        """Return why a trigger is not worth a cycle, or None."""
        if t0_ns <= 0:
            return None  # the buffer names an unset stamp better than an age of 56 years
        now_ns = self._clock_ns()
        age_ms = (now_ns - t0_ns) / 1e6
        if now_ns == 0:
            return CycleResult(t0_ns, Outcome.SKIPPED, 'clock_not_running',
                               'use_sim_time is true but nothing came on /clock; start the bag '
                               'with --clock or set use_sim_time to false')
        if age_ms < -_FUTURE_TOLERANCE_MS:
            return CycleResult(t0_ns, Outcome.SKIPPED, 'stamp_in_future',
                               f'the anchor frame is {-age_ms:.0f} ms ahead of the node clock; '
                               'check the clock of the camera computer')
        if age_ms > limit_ms:
            return CycleResult(t0_ns, Outcome.SKIPPED, 'input_too_old',
                               f'the anchor frame is {age_ms:.0f} ms old, the limit is '
                               f'{limit_ms:.0f} ms (sync.max_input_age_ms); a recorded bag needs '
                               '--clock and use_sim_time')
        return None

    def _plan(self, observation: Observation, generation: int,
              parameters: NodeParameters) -> CycleResult:
        """Plan, judge and publish; a plan that failed or was rejected may have a fallback."""
        try:
            plan = self._planner.plan(observation)
        except Exception as error:
            if generation == self._generation:
                self._fall_back(observation, parameters, f'exception {type(error).__name__}')
            raise
        verdict = check_plan(plan, observation.t0_ns, guard_limits(parameters.guard))
        result = self._finish(replace(plan, verdict=verdict), generation, parameters)
        if result.outcome is Outcome.REJECTED:
            self._fall_back(observation, parameters, result.reason)
        return replace(result, repeated=result.repeated or self._fallback == 'last_valid',
                       stopped=self._fallback == 'stop')

    def _fall_back(self, observation: Observation, parameters: NodeParameters,
                   reason: str) -> None:
        self._fallback = self._guard.fall_back(parameters.guard, observation, self._previous,
                                               self._clock_ns(), reason)

    def _finish(self, plan: Plan, generation: int, parameters: NodeParameters) -> CycleResult:
        """Publish a judged plan, or say why not."""
        latency_ms = (self._clock_ns() - plan.t0_ns) / 1e6
        result = CycleResult(plan.t0_ns, Outcome.PUBLISHED, plan=plan,
                             pipeline_latency_ms=latency_ms)
        limit_ms = parameters.deadline.max_pipeline_latency_ms
        if generation != self._generation:
            result = replace(_reset_result(plan.t0_ns), plan=plan)
        elif not plan.verdict.accepted:
            result = _rejected(result, plan.verdict)
        elif latency_ms < -_FUTURE_TOLERANCE_MS:
            result = _rejected(result, Verdict(False, 'stamp_in_future', f'the plan is '
                                               f'{-latency_ms:.0f} ms ahead of the node clock'))
        elif latency_ms > limit_ms:
            result = self._miss(result, limit_ms, parameters.deadline.on_miss)
        else:
            result = self._publish_new(result, plan)
        return result

    def _publish_new(self, result: CycleResult, plan: Plan) -> CycleResult:
        self._publish(plan)
        now = time.perf_counter()
        cyclic_ms = None if self._previous_at is None else 1e3 * (now - self._previous_at)
        self._previous, self._previous_at = plan, now
        return replace(result, cyclic_ms=cyclic_ms,
                       pipeline_latency_ms=(self._clock_ns() - plan.t0_ns) / 1e6)

    def _miss(self, result: CycleResult, limit_ms: float, on_miss: str) -> CycleResult:
        """Handle a plan that is too old; an old plan keeps its old stamp."""
        repeat = on_miss == 'last_valid' and self._previous is not None
        if repeat and self._previous is not None:
            self._publish(self._previous)
        return replace(result, outcome=Outcome.LATE, reason='deadline_missed', repeated=repeat,
                       detail=f'the plan is {result.pipeline_latency_ms:.0f} ms old, the limit is '
                              f'{limit_ms:.0f} ms (deadline.max_pipeline_latency_ms); '
                              'see the latency diagnostic for the slowest stage')


class _Timer:
    """Adds up the time of named parts, milliseconds."""

    def __init__(self) -> None:
        self.ms: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.ms[name] += _elapsed_ms(started)


def _reset_result(t0_ns: int) -> CycleResult:
    return CycleResult(t0_ns, Outcome.SKIPPED, 'reset',
                       'the node was reset while this plan was made')


def _rejected(result: CycleResult, verdict: Verdict) -> CycleResult:
    return replace(result, outcome=Outcome.REJECTED, reason=verdict.reason,
                   detail=verdict.detail)


def _elapsed_ms(started: float) -> float:
    return 1e3 * (time.perf_counter() - started)
