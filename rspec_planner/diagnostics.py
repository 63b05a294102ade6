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
Diagnostics of the node: five tasks, each one status with string values.

The layout is that of diagnostic_updater (name '<node>: <task>', hardware_id), written directly on
DiagnosticArray because five tasks need no dependency. Levels and texts are decided here, from
frozen facts; sending is the node's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
import math
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from rspec_planner.cycle import CycleResult, CycleStatistics, Outcome, times_of
from rspec_planner.errors import LONGEST, one_line
from rspec_planner.hold_ups import HoldUps
from rspec_planner.inputs import StreamState
from rspec_planner.output_check import CheckState
from rspec_planner.outputs import tokens_per_second
from rspec_planner.parameters import NODE_NAME, NodeParameters
from rspec_planner.planner.timing import STAGES
from rspec_planner.ros_conversions import ns_to_stamp
from rspec_planner.transport import PROFILE_VARIABLE

TASKS = ('inputs', 'engine', 'inference_status', 'latency', 'speculation')

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR

LATE_S = 1.0  # a stream that was silent for longer is late
ENOUGH_PLANS = 20  # for a mean accepted length that says something
_LOSS_SHARE = 0.7  # below this share of the expected rate, frames are being lost
_LOSS_RECENT_S = 5.0  # a loss is told for so long


def text_of(value: Any) -> str:
    """Return a value as one line: floats with 3 decimals, truth in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f'{value:.3f}'
    return one_line(str(value))


def make_status(task: str, level: bytes, message: str,
                values: Mapping[str, Any]) -> DiagnosticStatus:
    """Return the status of one task."""
    return DiagnosticStatus(
        level=level, name=f'{NODE_NAME}: {task}', message=one_line(message, 4 * LONGEST),
        hardware_id=NODE_NAME,
        values=[KeyValue(key=key, value=text_of(value)) for key, value in values.items()])


def make_array(stamp_ns: int, statuses: Sequence[DiagnosticStatus]) -> DiagnosticArray:
    """Return the statuses under one stamp, the node's clock."""
    array = DiagnosticArray(status=list(statuses))
    array.header.stamp = ns_to_stamp(stamp_ns)
    return array


@dataclass(frozen=True)
class Fault:
    """One complaint about the inputs."""

    level: bytes
    text: str  # one line: the thing, the value, the remedy


@dataclass(frozen=True)
class InputFacts:
    """What the node knows about its inputs at one instant."""

    now_ns: int
    streams: Sequence[StreamState]
    active: bool
    publishers: Mapping[str, int] = field(default_factory=dict)  # stream -> matched publishers
    qos_faults: Sequence[str] = ()
    notes: Sequence[str] = ()  # further complaints, e.g. an unusual child_frame_id
    last_result: CycleResult | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    last_reset: str = ''
    messages: Mapping[str, int] = field(default_factory=dict)  # dropped or odd ones, by reason


def stream_fault(stream: StreamState, publishers: int) -> Fault | None:
    """Return what is wrong with one stream, or None."""
    where = f'{stream.label} on {stream.topic}'
    if stream.silence_s is None:
        cause = ('no publisher is there; start it or remap the topic' if publishers == 0 else
                 f'{publishers} publisher(s) exist; check QoS, ROS_DOMAIN_ID and network')
        return Fault(ERROR, f'{where} was never received; {cause}')
    if stream.silence_s > LATE_S:
        return Fault(WARN, f'{where} is silent for {stream.silence_s:.1f} s; check its source')
    slow = 0 < stream.rate_hz < _LOSS_SHARE * stream.expected_hz
    rate = f'{where} arrives at {stream.rate_hz:.1f} of {stream.expected_hz:.1f} Hz; ' \
        if slow else f'{where}: '
    if stream.loss_age_s is not None and stream.loss_age_s < _LOSS_RECENT_S:
        return Fault(WARN, rate + _loss_cause(stream))
    if slow:
        return Fault(WARN, f'{rate}if the source is faster, frames are lost in transport: set '
                           f'{PROFILE_VARIABLE} to config/fastdds.xml on both sides')
    return None


def _loss_cause(stream: StreamState) -> str:
    """Return what became of messages that were published and not taken."""
    lost = (f'{stream.lost} messages were lost in transport: set {PROFILE_VARIABLE} to '
            'config/fastdds.xml on both sides (rspec doctor checks this one)')
    late = (f'{stream.overflowed} messages arrived and were not taken in time: this computer is '
            'too busy, lower the rate or the size of the images, or model.num_threads')
    return '; '.join([lost] * (stream.lost > 0) + [late] * (stream.overflowed > 0))


def inputs_status(facts: InputFacts) -> DiagnosticStatus:
    """Return the `inputs` task: every stream by name, worst complaint first."""
    faults = [fault for stream in facts.streams
              if (fault := stream_fault(stream, facts.publishers.get(stream.name, 0)))]
    faults += [Fault(WARN, text) for text in (*facts.qos_faults, *facts.notes)]
    skip = facts.last_result if facts.last_result is not None \
        and facts.last_result.outcome is Outcome.SKIPPED else None
    if skip is not None:
        faults.append(Fault(WARN, f'{skip.reason}: {skip.detail}'))
    faults.sort(key=lambda fault: -fault.level[0])
    values: dict[str, Any] = {}
    for stream in facts.streams:
        age = -1.0 if stream.newest_ns is None else (facts.now_ns - stream.newest_ns) / 1e6
        values[f'{stream.name}_age_ms'] = age
        values[f'{stream.name}_rate_hz'] = stream.rate_hz
        values[f'{stream.name}_received'] = stream.received
        if stream.name.startswith('image'):
            values[f'{stream.name}_lost'] = stream.lost
            values[f'{stream.name}_overflowed'] = stream.overflowed
    values.update(_selection_values(facts, skip))
    if not facts.active:
        return make_status('inputs', OK, 'inactive: inputs are not read', values)
    message = '; '.join(fault.text for fault in faults) or 'all inputs are fresh'
    return make_status('inputs', faults[0].level if faults else OK, message, values)


def _selection_values(facts: InputFacts, skip: CycleResult | None) -> dict[str, Any]:
    newest = [stream.newest_ns for stream in facts.streams
              if stream.name.startswith('image') and stream.newest_ns is not None]
    return {
        'camera_skew_ms': (max(newest) - min(newest)) / 1e6 if newest else 0.0,
        'history_ok': facts.last_result is not None and skip is None,
        'skip_reason': skip.reason if skip is not None else '',
        'skipped_total': sum(facts.skipped.values()),
        **{f'skipped_{reason}': count for reason, count in sorted(facts.skipped.items())},
        **{f'messages_{reason}': count for reason, count in sorted(facts.messages.items())},
        'last_reset': facts.last_reset,
    }


@dataclass(frozen=True)
class EngineFacts:
    """What runs the model; filled at configure."""

    state: str  # 'unconfigured', 'loading', 'ready', 'failed'
    detail: str = ''
    values: Mapping[str, Any] = field(default_factory=dict)


def engine_status(facts: EngineFacts) -> DiagnosticStatus:
    """Return the `engine` task: ready, on its way, or why it cannot run."""
    level = {'ready': OK, 'failed': ERROR}.get(facts.state, WARN)
    message = f'{facts.state}: {facts.detail}' if facts.detail else facts.state
    return make_status('engine', level, message, {'state': facts.state, **facts.values})


@dataclass(frozen=True)
class PlanFacts:
    """What the node knows about its plans at one instant."""

    statistics: CycleStatistics
    last: CycleResult | None = None  # the newest cycle that was not skipped
    silence_s: float | None = None  # since a plan was published; None before the first
    busy_s: float = 0.0  # how long the cycle in progress has run
    rivals: Sequence[str] = ()  # nodes with the same name or the same output, one line each
    hold_ups: HoldUps = field(default_factory=HoldUps)  # of publications


def inference_status(facts: PlanFacts) -> DiagnosticStatus:
    """Return the `inference_status` task: what became of the newest cycle that planned."""
    statistics, last = facts.statistics, facts.last
    plan = last.plan if last is not None else None
    level, message = _inference(facts)
    notes = [*facts.rivals, *([facts.hold_ups.note] if facts.hold_ups.note else ())]
    if notes:
        level, message = max(level, WARN), '; '.join([*notes, message])
    return make_status('inference_status', level, message, {
        'message': plan.reasoning.text if plan else '',
        'num_points': len(plan.poses) if plan else 0,
        'reasoning_tokens': len(plan.reasoning.token_ids) if plan else 0,
        'reject_reason': last.reason if last and last.outcome is Outcome.REJECTED else '',
        'published_total': statistics.published,
        'rejected_total': statistics.rejected.total(),
        **{f'rejected_{name}': count for name, count in sorted(statistics.rejected.items())},
        **({'confidence': plan.reasoning.stats.confidence}
           if plan and not math.isnan(plan.reasoning.stats.confidence) else {}),
        'cautious': bool(plan and plan.cautious), 'cautious_total': statistics.cautious,
        'fallback': _fallback_of(last), 'stopped_total': statistics.stopped,
        'failed_total': statistics.failed, 'superseded_total': statistics.superseded,
        'rate_limited_total': statistics.rate_limited,
        'repeated_total': statistics.repeated, 'busy_ms': 1e3 * facts.busy_s,
        'held_up_total': facts.hold_ups.count,
        'longest_publication_ms': 1e3 * facts.hold_ups.longest_s})


def _inference(facts: PlanFacts) -> tuple[bytes, str]:
    """Return level and message of the newest cycle that planned."""
    last = facts.last
    if facts.busy_s > LATE_S:
        return WARN, (f'a plan has been in the making for {facts.busy_s:.1f} s; the device is '
                      'overloaded or the planner hangs')
    if last is None:
        return OK, 'no plan yet'
    level = {Outcome.PUBLISHED: OK, Outcome.FAILED: ERROR}.get(last.outcome, WARN)
    message = {Outcome.PUBLISHED: 'plan published',
               Outcome.REJECTED: f'plan rejected: {last.reason} {last.detail}'.rstrip(),
               Outcome.LATE: f'{last.reason}: {last.detail}',
               Outcome.SKIPPED: f'cycle skipped: {last.reason}',
               Outcome.FAILED: f'{last.reason}: {last.detail}'}[last.outcome]
    if last.outcome is Outcome.PUBLISHED and last.plan is not None and last.plan.cautious:
        level = WARN
        message += (', slower than drawn: the target is unsure of its words (planning.caution), '
                    f'confidence {last.plan.reasoning.stats.confidence:.2f}')
    if last.repeated:
        message += '; the previous plan was published again with its old stamp'
    if last.stopped:
        message += '; a controlled stop was published on ~/output/stop_trajectory'
    if last.outcome is Outcome.PUBLISHED and facts.silence_s is not None \
            and facts.silence_s > LATE_S:
        return WARN, f'no plan for {facts.silence_s:.1f} s; see the inputs task'
    return level, message


def _fallback_of(last: CycleResult | None) -> str:
    """Return what was published in a plan's stead."""
    if last is None:
        return ''
    return 'last_valid' if last.repeated else 'stop' if last.stopped else ''


def latency_status(statistics: CycleStatistics, last: CycleResult | None,
                   parameters: NodeParameters) -> DiagnosticStatus:
    """
    Return the `latency` task: the times of the newest plan, percentiles of the last 600.

    p50_ms, p95_ms and p99_ms are those of processing_time_ms; others carry their name before it.
    """
    level, message = _lateness(last, parameters.deadline.budget_ms)
    values: dict[str, Any] = {'t0_ns': last.t0_ns} if last is not None else {}
    for name, value in (times_of(last) if last is not None else {}).items():
        values['processing_time_ms' if name == 'processing' else f'{name}_ms'] = value
    for name, window in statistics.windows.items():
        prefix = '' if name == 'processing' else f'{name}_'
        values.update({f'{prefix}{key}_ms': value for key, value in window.summary().items()})
    return make_status('latency', level, message, {
        **values, 'deadline_misses': statistics.deadline_misses,
        'budget_misses': statistics.budget_misses})


def _lateness(last: CycleResult | None, budget_ms: float) -> tuple[bytes, str]:
    """Return level and message of the newest cycle's times."""
    if last is None:
        return OK, 'no plan yet'
    if last.plan is None:
        return OK, 'no plan in the last cycle'
    if last.outcome is Outcome.LATE:
        return ERROR, f'{last.reason}: {last.detail}'
    if last.processing_ms <= budget_ms:
        return OK, 'within budget'
    parts = {name: value for name, value in times_of(last).items()
             if name in STAGES or name in ('wait', 'images', 'select')}
    slowest = max(parts, key=lambda name: parts[name])
    return WARN, (f'processing took {last.processing_ms:.0f} ms, the budget is {budget_ms:.0f} '
                  f'ms; the slowest stage is {slowest}, {parts[slowest]:.0f} ms')


def speculation_status(statistics: CycleStatistics, last: CycleResult | None,
                       minimum: float, check: CheckState | None = None) -> DiagnosticStatus:
    """
    Return the `speculation` task of the last plan.

    Warns when the mean accepted length of the last plans is below `minimum`: the draft then
    costs more than it saves. With a `check`, a plan since activation whose words were not those
    of the target alone is an error.
    """
    plan = last.plan if last is not None else None
    checks = {} if check is None else {'checked_total': check.checked,
                                       'mismatch_total': check.mismatches}
    if plan is None:
        return make_status('speculation', OK, 'no plan yet' if last is None
                           else 'no plan in the last cycle', checks)
    stats, window = plan.reasoning.stats, statistics.accepted_length
    enabled = stats.block > 1
    level, message = OK, 'drafts are verified' if enabled else 'off: the target decodes alone'
    if stats.reused:
        message += f'; {stats.reused} tokens of the last reasoning held'
    if enabled and len(window) >= ENOUGH_PLANS and window.mean < minimum:
        level, message = WARN, (
            f'the accepted length is {window.mean:.2f} on average over {len(window)} plans, '
            f'below {minimum:g} (speculation.min_accepted_length); train the draft for this '
            'target or set speculation.enabled to false')
    if check is not None and check.mismatches:
        level, message = ERROR, (f'output mismatch in {check.mismatches} of {check.checked} '
                                 f'checked plans, the newest {check.detail}; set '
                                 'speculation.enabled to false and report it')
    return make_status('speculation', level, message, {
        'enabled': enabled, 'block_size': stats.block,
        'mean_accepted_length': stats.accepted_length,
        'window_accepted_length': window.mean, 'iterations': stats.iterations,
        'reused_tokens': stats.reused, 'tokens_per_second': tokens_per_second(plan),
        'draft_ms': stats.draft_ms, 'verify_ms': stats.verify_ms, **checks})
