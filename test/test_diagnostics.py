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

from __future__ import annotations

from dataclasses import replace
import math

from node_rig import plan_at, TEXT, turned, values_of
import pytest

from rspec_planner.cycle import CycleResult, CycleStatistics, Outcome
from rspec_planner.decode.stats import DecodeStats
from rspec_planner.diagnostics import (
    engine_status,
    EngineFacts,
    ENOUGH_PLANS,
    ERROR,
    inference_status,
    InputFacts,
    inputs_status,
    latency_status,
    make_array,
    make_status,
    OK,
    PlanFacts,
    speculation_status,
    WARN,
)
from rspec_planner.hold_ups import HoldUps
from rspec_planner.inputs import StreamState
from rspec_planner.output_check import CheckState
from rspec_planner.parameters import load_yaml_parameters, NodeParameters
from rspec_planner.planner.plan import Plan
from rspec_planner.transport import config_path

NOW = 10_000_000_000
FRESH = StreamState('image0', "camera 'cross_left'", '/c/cross_left', 50, NOW - 40_000_000, 0.04,
                    10.0, 10.0)
ODOMETRY = StreamState('odometry', 'odometry', '/odom', 500, NOW - 5_000_000, 0.01, 100.0, 100.0)
SKIP = CycleResult(NOW, Outcome.SKIPPED, 'camera_missing', 'camera front_tele: nothing received')


@pytest.fixture
def parameters():
    return NodeParameters.from_values(
        load_yaml_parameters(config_path('rspec_planner.param.yaml')))


@pytest.fixture
def plan() -> Plan:
    return plan_at(turned(0.0))


def facts(*streams, **changes):
    return InputFacts(NOW, streams, True, **changes)


def test_layout_is_that_of_diagnostic_updater():
    status = make_status('engine', OK, 'ready', {'a': 1.23456, 'b': True, 'c': 7, 'd': 'x'})
    assert (status.name, status.hardware_id) == ('rspec_planner: engine', 'rspec_planner')
    assert values_of(status) == {'a': '1.235', 'b': 'true', 'c': '7', 'd': 'x'}
    array = make_array(1_500_000_000, [status])
    assert (array.header.stamp.sec, array.header.stamp.nanosec) == (1, 500_000_000)


def test_fresh_inputs_are_ok():
    status = inputs_status(facts(FRESH, ODOMETRY))
    assert (status.level, status.message) == (OK, 'all inputs are fresh')
    values = values_of(status)
    assert values['image0_age_ms'] == '40.000'
    assert values['image0_rate_hz'] == '10.000'
    assert values['odometry_age_ms'] == '5.000'
    assert values['skip_reason'] == '' and values['skipped_total'] == '0'


def test_never_received_names_camera_topic_and_publishers():
    never = replace(FRESH, received=0, newest_ns=None, silence_s=None, rate_hz=0.0)
    status = inputs_status(facts(never, ODOMETRY))
    assert status.level == ERROR
    assert "camera 'cross_left' on /c/cross_left was never received" in status.message
    assert 'no publisher' in status.message
    status = inputs_status(facts(never, publishers={'image0': 2}))
    assert '2 publisher(s) exist; check QoS' in status.message


def test_worst_complaint_comes_first():
    late = replace(ODOMETRY, silence_s=3.2)
    never = replace(FRESH, silence_s=None)
    status = inputs_status(facts(late, never))
    assert status.level == ERROR
    assert status.message.startswith('camera')
    assert 'odometry on /odom is silent for 3.2 s' in status.message


def test_lost_frames_name_the_transport():
    status = inputs_status(facts(replace(FRESH, rate_hz=5.2)))
    assert status.level == WARN
    assert '5.2 of 10.0 Hz' in status.message
    assert 'FASTDDS_DEFAULT_PROFILES_FILE' in status.message


def test_losses_name_the_transport_or_the_computer():
    lost = replace(FRESH, lost=12, loss_age_s=1.0, rate_hz=4.0)
    status = inputs_status(InputFacts(NOW, [lost], True))
    assert status.level == WARN
    assert '12 messages were lost in transport: set FASTDDS_DEFAULT_PROFILES_FILE to ' \
        'config/fastdds.xml on both sides' in status.message
    assert 'arrives at 4.0 of 10.0 Hz' in status.message and 'too busy' not in status.message
    late = inputs_status(InputFacts(NOW, [replace(FRESH, overflowed=3, loss_age_s=1.0)], True))
    assert '3 messages arrived and were not taken in time: this computer is too busy' \
        in late.message and 'transport' not in late.message
    assert values_of(late)['image0_overflowed'] == '3' and values_of(late)['image0_lost'] == '0'
    healed = inputs_status(InputFacts(NOW, [replace(lost, loss_age_s=9.0, rate_hz=10.0)], True))
    assert healed.level == OK and values_of(healed)['image0_lost'] == '12'


def test_skip_reason_qos_fault_and_skew_are_told():
    other = replace(FRESH, name='image1', newest_ns=NOW - 10_000_000)
    status = inputs_status(facts(
        FRESH, other, last_result=SKIP, skipped={'camera_missing': 3, 'history_short': 1},
        qos_faults=['1 publisher(s) on /t offer an incompatible RELIABILITY policy']))
    assert status.level == WARN
    assert 'camera_missing: camera front_tele: nothing received' in status.message
    assert 'incompatible RELIABILITY' in status.message
    values = values_of(status)
    assert values['camera_skew_ms'] == '30.000'
    assert (values['skip_reason'], values['skipped_total']) == ('camera_missing', '4')
    assert values['skipped_history_short'] == '1'
    assert values['history_ok'] == 'false'


def test_inactive_node_does_not_complain():
    status = inputs_status(InputFacts(NOW, [replace(FRESH, silence_s=None)], False))
    assert (status.level, status.message) == (OK, 'inactive: inputs are not read')


@pytest.mark.parametrize('state, level', [('ready', OK), ('loading', WARN), ('failed', ERROR),
                                          ('unconfigured', WARN)])
def test_engine_levels(state, level):
    status = engine_status(EngineFacts(state, 'the cause', {'gpu': 'none'}))
    assert (status.level, status.message) == (level, f'{state}: the cause')
    assert values_of(status) == {'state': state, 'gpu': 'none'}


def test_inference_of_a_published_plan(plan):
    statistics = CycleStatistics(published=7, superseded=2, rate_limited=14)
    status = inference_status(PlanFacts(
        statistics, CycleResult(NOW, Outcome.PUBLISHED, plan=plan)))
    assert (status.level, status.message) == (OK, 'plan published')
    values = values_of(status)
    assert values['message'] == TEXT
    assert (values['num_points'], values['reasoning_tokens']) == ('65', '3')
    assert (values['published_total'], values['superseded_total'],
            values['rate_limited_total']) == ('7', '2', '14')


def test_inference_that_went_silent_is_a_warning(plan):
    status = inference_status(PlanFacts(
        CycleStatistics(), CycleResult(NOW, Outcome.PUBLISHED, plan=plan), silence_s=4.0))
    assert status.level == WARN
    assert 'no plan for 4.0 s' in status.message


@pytest.mark.parametrize('outcome, reason, level, part', [
    (Outcome.REJECTED, 'start_jump', WARN, 'plan rejected: start_jump why'),
    (Outcome.LATE, 'deadline_missed', WARN, 'deadline_missed: why'),
    (Outcome.FAILED, 'exception', ERROR, 'exception: why')])
def test_inference_levels(outcome, reason, level, part):
    status = inference_status(PlanFacts(
        CycleStatistics(), CycleResult(NOW, outcome, reason, 'why')))
    assert (status.level, status.message) == (level, part)
    assert (values_of(status)['reject_reason'] == reason) == (outcome is Outcome.REJECTED)


def test_latency_within_and_above_budget(plan, parameters):
    statistics = CycleStatistics()
    for milliseconds in (100.0, 200.0, 300.0):
        statistics.processing.add(milliseconds)
    good = CycleResult(NOW, Outcome.PUBLISHED, plan=plan, processing_ms=120.0,
                       pipeline_latency_ms=140.0)
    status = latency_status(statistics, good, parameters)
    assert (status.level, status.message) == (OK, 'within budget')
    values = values_of(status)
    assert values['decode_ms'] == '4.000' and values['p50_ms'] == '200.000'
    assert values['t0_ns'] == str(NOW)
    assert values['pipeline_latency_ms'] == '140.000'
    slow = latency_status(statistics, replace(good, processing_ms=180.0), parameters)
    assert slow.level == WARN
    assert '180 ms, the budget is 150 ms; the slowest stage is postprocess, 6 ms' in slow.message
    waiting = latency_status(statistics, replace(good, processing_ms=180.0, wait_ms=90.0),
                             parameters)
    assert 'the slowest stage is wait, 90 ms' in waiting.message
    late = replace(good, outcome=Outcome.LATE, reason='deadline_missed', detail='1200 ms old')
    assert latency_status(statistics, late, parameters).level == ERROR


def test_nothing_planned_yet(parameters):
    assert latency_status(CycleStatistics(), None, parameters).message == 'no plan yet'
    assert inference_status(PlanFacts(CycleStatistics())).message == 'no plan yet'
    assert speculation_status(CycleStatistics(), None, 1.5).message == 'no plan yet'


def test_speculation_reports_block_iterations_and_reuse(plan):
    stats = DecodeStats(2, (9, 8), 1.5, 12.0, reused=3, block=24)
    plan = replace(plan, reasoning=replace(plan.reasoning, stats=stats))
    status = speculation_status(CycleStatistics(),
                                CycleResult(NOW, Outcome.PUBLISHED, plan=plan), 1.5)
    assert status.message == 'drafts are verified; 3 tokens of the last reasoning held'
    values = values_of(status)
    assert (values['enabled'], values['block_size'], values['mean_accepted_length'],
            values['iterations'], values['reused_tokens'], values['draft_ms'],
            values['verify_ms']) == ('true', '24', '8.500', '2', '3', '1.500', '12.000')


def test_words_that_are_not_the_targets_are_an_error(plan):
    result = CycleResult(1, Outcome.PUBLISHED, plan=plan)
    fine = speculation_status(CycleStatistics(), result, 1.5, CheckState(7, 0))
    assert fine.level == OK and values_of(fine)['checked_total'] == '7'
    status = speculation_status(CycleStatistics(), result, 1.5,
                                CheckState(7, 2, 'at t0 5 token 3 differs'))
    assert status.level == ERROR and values_of(status)['mismatch_total'] == '2'
    assert status.message.startswith('output mismatch in 2 of 7 checked plans, the newest at t0 5')


def test_speculation_is_off_without_a_draft(plan):
    status = speculation_status(CycleStatistics(),
                                CycleResult(NOW, Outcome.PUBLISHED, plan=plan), 1.5)
    assert status.message == 'off: the target decodes alone'
    values = values_of(status)
    assert (values['enabled'], values['mean_accepted_length'], values['iterations']) == (
        'false', '1.000', '2')


def test_a_cycle_that_failed_has_no_plan_but_is_not_the_beginning(parameters):
    failed = CycleResult(NOW, Outcome.FAILED, reason='exception', detail='boom')
    assert speculation_status(CycleStatistics(), failed, 1.5).message == \
        'no plan in the last cycle'
    assert latency_status(CycleStatistics(), failed, parameters).message == \
        'no plan in the last cycle'


def test_every_time_has_a_window_in_the_latency_task(plan, parameters):
    statistics, result = CycleStatistics(), None
    for k in range(1, 101):
        result = CycleResult(NOW, Outcome.PUBLISHED, plan=plan, processing_ms=float(k),
                             pipeline_latency_ms=2.0 * k, cyclic_ms=100.0 + k, wait_ms=3.0,
                             images_ms=5.0, select_ms=4.0)
        statistics.count(result, budget_ms=90.0)
    values = values_of(latency_status(statistics, result, parameters))
    assert (values['p50_ms'], values['p95_ms'], values['p99_ms']) == ('50.500', '95.050', '99.010')
    assert values['pipeline_latency_p95_ms'] == '190.100'
    assert values['cyclic_p50_ms'] == '150.500' and values['cyclic_ms'] == '200.000'
    assert (values['decode_ms'], values['decode_p99_ms']) == ('4.000', '4.000')
    assert (values['wait_ms'], values['select_p95_ms']) == ('3.000', '4.000')
    assert values['images_ms'] == '5.000'
    assert values['budget_misses'] == '10'


def test_a_publication_that_was_held_up_is_told_and_counted(plan, monkeypatch):
    now = [100.0]
    monkeypatch.setattr('rspec_planner.hold_ups.time.monotonic', lambda: now[0])
    hold_ups = HoldUps()
    facts = PlanFacts(CycleStatistics(), CycleResult(NOW, Outcome.PUBLISHED, plan=plan),
                      hold_ups=hold_ups)

    def told():
        status = inference_status(facts)
        return status.level, status.message.split(',')[0], values_of(status)['held_up_total']

    with hold_ups.watch():
        now[0] += 0.4
        assert told() == (OK, 'plan published', '0')
    assert told() == (OK, 'plan published', '0')
    with hold_ups.watch():
        now[0] += 0.7  # still waiting, and the executor's thread reports
        assert told() == (WARN, 'publication was held up for 0.7 s', '0')
        now[0] += 2.0
    assert told() == (WARN, 'publication was held up for 2.7 s', '1')
    with hold_ups.watch():
        now[0] += 0.1
    now[0] += 4.0
    assert told()[0] == WARN  # one report may be held up itself
    now[0] += 2.0
    assert told() == (OK, 'plan published', '1')
    assert values_of(inference_status(facts))['longest_publication_ms'] == '2700.000'
    with pytest.raises(RuntimeError), hold_ups.watch():
        now[0] += 1.0
        raise RuntimeError('the context is gone')
    assert told()[2] == '2'


def test_rivals_a_hanging_planner_and_a_repeated_plan_are_told(plan):
    good = CycleResult(NOW, Outcome.PUBLISHED, plan=plan)
    two = PlanFacts(CycleStatistics(), good, rivals=('2 nodes are called /x',))
    status = inference_status(two)
    assert (status.level, status.message) == (WARN, '2 nodes are called /x; plan published')
    failed = replace(good, outcome=Outcome.FAILED, plan=None, reason='exception')
    assert inference_status(PlanFacts(CycleStatistics(), failed, rivals=('x',))).level == ERROR
    status = inference_status(PlanFacts(CycleStatistics(), None, busy_s=7.0))
    assert status.level == WARN and 'in the making for 7.0 s' in status.message
    assert values_of(status)['busy_ms'] == '7000.000'
    late = replace(good, outcome=Outcome.LATE, reason='deadline_missed', repeated=True)
    statistics = CycleStatistics()
    statistics.count(late, budget_ms=1.0)
    status = inference_status(PlanFacts(statistics, late))
    assert 'published again with its old stamp' in status.message
    assert values_of(status)['repeated_total'] == '1'


def test_a_draft_that_does_not_pay_is_a_warning(plan):
    statistics = CycleStatistics()
    stats = DecodeStats(4, (1, 1, 1, 2), block=24)
    poor = CycleResult(NOW, Outcome.PUBLISHED, plan=replace(
        plan, reasoning=replace(plan.reasoning, stats=stats)))
    for _ in range(ENOUGH_PLANS - 1):
        statistics.count(poor, budget_ms=1e6)
    assert speculation_status(statistics, poor, 1.5).level == OK
    statistics.count(poor, budget_ms=1e6)
    status = speculation_status(statistics, poor, 1.5)
    assert status.level == WARN
    assert '1.25 on average over 20 plans, below 1.5' in status.message
    assert values_of(status)['window_accepted_length'] == '1.250'
    assert values_of(status)['tokens_per_second'] == '1250.000'
    assert speculation_status(statistics, poor, 0.0).level == OK


def test_what_a_sender_put_into_a_field_is_one_short_line():
    """A frame_id of 1 MB went into every report, ten times a second, and into the log."""
    hostile = '\x1b[2J\n' * 200_000
    result = CycleResult(NOW, Outcome.SKIPPED, 'odometry_frame_changed', f'to {hostile}; remedy')
    assert result.detail.startswith('to  [2J  [2J') and result.detail.endswith('...')
    status = make_status('inputs', OK, hostile, {'last_reset': hostile, 'count': 3})
    for text in (result.detail, status.message, *(item.value for item in status.values)):
        assert text.isprintable() and len(text) <= 2000


def unsure(plan, confidence, cautious):
    stats = DecodeStats(1, (1,), log_probability=math.log(confidence))
    return replace(plan, cautious=cautious, reasoning=replace(plan.reasoning, stats=stats))


def test_a_plan_driven_slower_than_drawn_is_told_and_counted(plan):
    statistics = CycleStatistics()
    for made, level, total in ((unsure(plan, 0.97, False), OK, '0'),
                               (unsure(plan, 0.31, True), WARN, '1')):
        last = CycleResult(NOW, Outcome.PUBLISHED, plan=made)
        statistics.count(last, 100.0)
        status = inference_status(PlanFacts(statistics, last))
        values = values_of(status)
        assert status.level == level
        assert values['confidence'] == f'{made.reasoning.stats.confidence:.3f}'
        assert values['cautious_total'] == total
    assert 'unsure of its words (planning.caution), confidence 0.31' in status.message


def test_silence_behind_a_plan_driven_slower_is_told(plan):
    last = CycleResult(NOW, Outcome.PUBLISHED, plan=unsure(plan, 0.31, True))
    status = inference_status(PlanFacts(CycleStatistics(), last, silence_s=4.0))
    assert (status.level, 'no plan for 4.0 s' in status.message) == (WARN, True)


def test_a_refused_plan_was_not_driven_slower(plan):
    statistics = CycleStatistics()
    last = CycleResult(NOW, Outcome.REJECTED, 'start_jump', plan=unsure(plan, 0.31, True))
    statistics.count(last, 100.0)
    assert statistics.cautious == 0
    assert 'unsure' not in inference_status(PlanFacts(statistics, last)).message


def test_a_loop_that_does_not_tell_has_no_confidence(plan):
    last = CycleResult(NOW, Outcome.PUBLISHED, plan=unsure(plan, math.nan, False))
    assert 'confidence' not in values_of(inference_status(PlanFacts(CycleStatistics(), last)))
