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
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from rspec_planner.cycle import CycleResult, CycleStatistics, Outcome
from rspec_planner.inputs import StreamState
from rspec_planner.parameters import NODE_NAME, NodeParameters
from rspec_planner.planner.timing import STAGES
from rspec_planner.ros_conversions import ns_to_stamp
from rspec_planner.transport import PROFILE_VARIABLE

TASKS = ('inputs', 'engine', 'inference_status', 'latency', 'speculation')

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR

LATE_S = 1.0  # a stream that was silent for longer is late
_LOSS_SHARE = 0.7  # below this share of the expected rate, frames are being lost


def text_of(value: Any) -> str:
    """Return a diagnostic value as text: floats with 3 decimals, truth in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f'{value:.3f}'
    return str(value)


def make_status(task: str, level: bytes, message: str,
                values: Mapping[str, Any]) -> DiagnosticStatus:
    """Return the status of one task."""
    return DiagnosticStatus(
        level=level, name=f'{NODE_NAME}: {task}', message=message, hardware_id=NODE_NAME,
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


def stream_fault(stream: StreamState, publishers: int) -> Fault | None:
    """Return what is wrong with one stream, or None."""
    where = f'{stream.label} on {stream.topic}'
    if stream.silence_s is None:
        cause = ('no publisher is there; start it or remap the topic' if publishers == 0 else
                 f'{publishers} publisher(s) exist; check QoS, ROS_DOMAIN_ID and network')
        return Fault(ERROR, f'{where} was never received; {cause}')
    if stream.silence_s > LATE_S:
        return Fault(WARN, f'{where} is silent for {stream.silence_s:.1f} s; check its source')
    if 0 < stream.rate_hz < _LOSS_SHARE * stream.expected_hz:
        return Fault(WARN, f'{where} arrives at {stream.rate_hz:.1f} of '
                           f'{stream.expected_hz:.1f} Hz; if the source is faster, frames are '
                           f'lost in transport: set {PROFILE_VARIABLE} to config/fastdds.xml '
                           'on both sides')
    return None


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


def inference_status(statistics: CycleStatistics, last: CycleResult | None,
                     silence_s: float | None = None) -> DiagnosticStatus:
    """
    Return the `inference_status` task: what became of the newest cycle that planned.

    `silence_s` is the time since a plan was published, None before the first.
    """
    plan = last.plan if last is not None else None
    level, message = OK, 'no plan yet'
    if last is not None:
        level = {Outcome.PUBLISHED: OK, Outcome.FAILED: ERROR}.get(last.outcome, WARN)
        message = {Outcome.PUBLISHED: 'plan published',
                   Outcome.REJECTED: f'plan rejected: {last.reason} {last.detail}'.rstrip(),
                   Outcome.LATE: f'{last.reason}: {last.detail}',
                   Outcome.SKIPPED: f'cycle skipped: {last.reason}',
                   Outcome.FAILED: f'{last.reason}: {last.detail}'}[last.outcome]
        if level == OK and silence_s is not None and silence_s > LATE_S:
            level, message = WARN, f'no plan for {silence_s:.1f} s; see the inputs task'
    return make_status('inference_status', level, message, {
        'message': plan.reasoning.text if plan else '',
        'num_points': len(plan.poses) if plan else 0,
        'reasoning_tokens': len(plan.reasoning.token_ids) if plan else 0,
        'reject_reason': last.reason if last and last.outcome is Outcome.REJECTED else '',
        'published_total': statistics.published, 'rejected_total': statistics.rejected,
        'failed_total': statistics.failed, 'superseded_total': statistics.superseded})


def latency_status(statistics: CycleStatistics, last: CycleResult | None,
                   parameters: NodeParameters) -> DiagnosticStatus:
    """Return the `latency` task of the newest plan and of the last 600 cycles."""
    plan = last.plan if last is not None else None
    if last is None or plan is None:
        message = 'no plan yet' if last is None else 'no plan in the last cycle'
        return make_status('latency', OK, message,
                           {'deadline_misses': statistics.deadline_misses})
    budget_ms = parameters.deadline.budget_ms
    level, message = OK, 'within budget'
    if last.outcome is Outcome.LATE:
        level, message = ERROR, f'{last.reason}: {last.detail}'
    elif last.processing_ms > budget_ms:
        slowest = max(STAGES, key=lambda stage: getattr(plan.times, f'{stage}_ms'))
        level = WARN
        message = (f'processing took {last.processing_ms:.0f} ms, the budget is '
                   f'{budget_ms:.0f} ms; the slowest stage is {slowest}')
    return make_status('latency', level, message, {
        'processing_time_ms': last.processing_ms,
        **{f'{stage}_ms': getattr(plan.times, f'{stage}_ms') for stage in STAGES},
        'pipeline_latency_ms': last.pipeline_latency_ms,
        **{f'{name}_ms': value for name, value in statistics.processing.summary().items()},
        'deadline_misses': statistics.deadline_misses,
        'budget_misses': statistics.budget_misses})


def speculation_status(last: CycleResult | None) -> DiagnosticStatus:
    """Return the `speculation` task of the last plan."""
    plan = last.plan if last is not None else None
    if plan is None:
        return make_status('speculation', OK, 'no plan yet' if last is None
                           else 'no plan in the last cycle', {})
    stats = plan.reasoning.stats
    enabled = stats.block > 1
    message = 'drafts are verified' if enabled else 'off: the target decodes alone'
    if stats.reused:
        message += f'; {stats.reused} tokens of the last reasoning held'
    return make_status('speculation', OK, message, {
        'enabled': enabled, 'block_size': stats.block,
        'mean_accepted_length': stats.accepted_length, 'iterations': stats.iterations,
        'reused_tokens': stats.reused, 'draft_ms': stats.draft_ms,
        'verify_ms': stats.verify_ms})
