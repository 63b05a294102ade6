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
"""The closed loop: what tracks plans, what counts as a failure, and that a run can be resumed."""

from dataclasses import replace
import json
import math

from node_rig import fake_plan, fake_profile
import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate import closed_policies
from rspec_planner.evaluate.closed_farm import Answer, RunFarm, Stepping
from rspec_planner.evaluate.closed_latency import Latency, MEASURED, parse_latency
from rspec_planner.evaluate.closed_loop import (
    ClosedLoop,
    ClosedOptions,
    compared,
    key_of,
    RunStore,
)
from rspec_planner.evaluate.closed_policies import Cautions, ConstantVelocity
from rspec_planner.evaluate.closed_report import split_table
from rspec_planner.evaluate.closed_results import closed_section
from rspec_planner.evaluate.closed_sheets import contact_sheet
from rspec_planner.evaluate.closed_world import ClosedRun, Outcome, View
from rspec_planner.evaluate.tracking import (
    SUBSTEP_S,
    track,
    VehicleModel,
    VehicleState,
    WorldPlan,
)
from rspec_planner.model.config import CautionConfig
from rspec_planner.planner.plan import Verdict
from rspec_planner.world.clip import ClipSpec
from rspec_planner.world.generate import simulate_pair

WIDTH, HEIGHT = 320, 192
MODEL = VehicleModel()
T = 0.1 * np.arange(65)


def plan_of(speeds, curvature=0.0, ego=(0.0, 0.0, 0.0), t0_s=0.0):
    """Return a plan along an arc with a speed profile (65,)."""
    s = np.concatenate([[0.0], np.cumsum(0.05 * (speeds[1:] + speeds[:-1]))])
    yaw = curvature * s
    poses = np.zeros((65, 4))
    poses[:, 0] = np.sin(yaw) / curvature if curvature else s
    poses[:, 1] = (1 - np.cos(yaw)) / curvature if curvature else 0.0
    poses[:, 3] = yaw
    accelerations = np.append(np.diff(speeds) / 0.1, 0.0)
    return WorldPlan.placed(t0_s, ego, poses, speeds, accelerations, np.full(65, curvature))


def followed(plan, state, seconds, start_s=0.0, until_plan=0.0):
    """Drive a plan that becomes known at `until_plan`; before, keep going. Return the states."""
    trace = []
    for step in range(round(seconds / SUBSTEP_S)):
        now = start_s + step * SUBSTEP_S
        command = (0.0, 0.0) if now < until_plan else track(plan, now, state, MODEL)
        state.advance(*command, MODEL)
        trace.append((state.x, state.y, state.speed))
    return np.array(trace)


def test_a_plan_is_tracked_along_an_arc_and_back_to_it():
    plan = plan_of(np.full(65, 8.0), 0.05)
    on = followed(plan, VehicleState(0.0, 0.0, 0.0, 8.0), 6.0)
    radius = np.hypot(on[:, 0], on[:, 1] - 20.0)
    assert np.abs(radius - 20.0).max() < 0.4 and np.abs(on[:, 2] - 8.0).max() < 0.2
    beside = followed(plan_of(np.full(65, 8.0)), VehicleState(0.0, 1.0, 0.1, 8.0), 6.0)
    assert abs(beside[-1, 1]) < 0.05


def test_latency_costs_distance():
    speeds = np.maximum(0.0, 10.0 - 4.0 * T)
    rest = {late: followed(plan_of(speeds), VehicleState(0.0, 0.0, 0.0, 10.0), 6.4,
                           until_plan=late)[-1] for late in (0.0, 0.5, 1.0)}
    assert all(state[2] == 0.0 for state in rest.values())  # it stands, and does not creep
    assert rest[0.0][0] == pytest.approx(12.5, abs=1.0)
    assert rest[0.0][0] + 0.3 < rest[0.5][0] < rest[1.0][0]


def test_actuators_have_limits():
    state = VehicleState(0.0, 0.0, 0.0, 20.0)
    state.advance(-50.0, 1.0, MODEL)
    assert state.acceleration == pytest.approx(-MODEL.jerk_mps3 * SUBSTEP_S)
    for _ in range(100):
        state.advance(-50.0, 1.0, MODEL)
    assert state.acceleration > -MODEL.brake_mps2 - 1e-9
    assert state.curvature(MODEL) <= math.tan(MODEL.steer_rad) / MODEL.wheelbase_m + 1e-9


SPECS = [ClipSpec('val', family, 0, event) for family in ('red_light', 'lead_brake', 'left_turn')
         for event in (True, False)]


@pytest.mark.parametrize('spec', SPECS, ids=key_of)
def test_the_experts_own_plan_is_driven_without_failure(spec):
    """The approach equals the clip's, and what the tracking costs is small."""
    run = ClosedRun(spec, WIDTH, HEIGHT, render=False)
    start = run._expert.states[15]
    assert (run._state.x, run._state.y, run._state.yaw) == (start.x, start.y, start.yaw)
    run.apply(run.expert_plan(), 0.0)
    run.next_plan = 1000
    while not run.done:
        run.step()
    outcome = run.finish()
    assert not outcome.failed, outcome
    assert outcome.driven_ade_m < 0.5 and outcome.progress == pytest.approx(1.0, abs=0.1)
    assert outcome.first_ade_m == pytest.approx(0.0, abs=1e-6)


def constant(spec, latency_s=0.1):
    run = ClosedRun(spec, WIDTH, HEIGHT, render=False, period=5)
    policy = ConstantVelocity()
    while not run.done:
        if run.wants_plan:
            run.apply(policy.plan({0: run.view()})[0].plan, latency_s)
        run.step()
    return run.finish()


def test_who_ignores_a_red_light_or_a_braking_car_fails_by_that_name():
    red = constant(SPECS[0])
    assert red.red_light and not red.stop_line
    assert red.plans == 13 and red.end_s == pytest.approx(6.4)
    hit = constant(SPECS[2])
    assert hit.collision in ('car', 'van', 'truck') and hit.at_fault and hit.min_ttc_s == 0.0
    assert hit.end_s < 6.4 and hit.failed
    assert not constant(SPECS[1]).red_light  # green for the twin


def test_plans_wait_for_the_one_in_the_making():
    run = ClosedRun(SPECS[1], WIDTH, HEIGHT, render=False, period=2)
    plan = ConstantVelocity().plan({0: run.view()})[0].plan
    run.apply(plan, 0.75)
    assert run.next_plan == 8
    run.step()
    assert run._plan is None and not run.wants_plan
    while not run.wants_plan:
        run.step()
    assert run.tick == 8 and run._plan is not None
    run.apply(None, 0.01)
    assert run.next_plan == 10 and run.outcome.rejected == 1


def test_frames_reach_the_planner_once_and_without_gaps():
    run = ClosedRun(SPECS[0], WIDTH, HEIGHT, period=3)
    seen: dict[int, np.ndarray] = {}
    for _ in range(3):
        view = run.view()
        assert not set(view.images) & set(seen)
        seen.update(view.images)
        assert {view.tick - back for back in range(4)} <= set(seen)
        assert view.history[-1].tolist() == [0.0] * 4 and view.history.shape == (16, 4)
        run.apply(run.expert_plan(), 0.0)
        while not run.wants_plan:
            run.step()
    pair, _ = simulate_pair(SPECS[0])
    assert seen[0].shape == (4, HEIGHT, WIDTH, 3) and pair.blueprint.speed > 0


@pytest.fixture(scope='module')
def loop():
    options = ClosedOptions(splits=('val',), runs=2, plan_hz=1.0, iso_runs=0, batch=2)
    with RunFarm(0) as farm:
        yield ClosedLoop(options, farm)


NEVER_SURE = CautionConfig(1 - 2e-9, 1 - 1e-9, window_s=0.3, min_plans=2)


@pytest.mark.parametrize('caution', [None, NEVER_SURE])
def test_the_batch_plans_what_the_deployed_planner_plans(loop, caution):
    """Over three views of two runs, the later ones with features that are kept."""
    batched, planner = loop.target(), loop.planner('default')
    batched._cautions, planner._cautions = Cautions(caution), Cautions(caution)
    runs = {number: ClosedRun(spec, *loop.size, period=2) for number, spec in
            enumerate((SPECS[0], SPECS[4]))}  # the second one has navigation text
    for turn in range(3):
        views = {number: run.view() for number, run in runs.items()}
        ours, theirs = batched.plan(views), planner.plan(views)
        for number, run in runs.items():
            assert ours[number].token_ids == theirs[number].token_ids
            assert ours[number].text and theirs[number].iterations >= 1
            assert ours[number].cautious == theirs[number].cautious
            assert ours[number].cautious == (caution is not None and turn == 2)
            for mine, other in zip(ours[number].plan, theirs[number].plan):
                assert np.abs(mine - other).max() < 0.02
            run.apply(theirs[number].plan, 0.1)
            while not run.wants_plan:
                run.step()
    assert len(batched._encoded) <= 8


def test_a_caution_speeds_the_comparison_up_and_is_part_of_what_is_kept(loop, monkeypatch):
    monkeypatch.setattr(loop._target, 'cfg', replace(loop._target.cfg, caution=None))
    assert (loop.caution, loop.iso_period) == ({}, 5)
    monkeypatch.setattr(loop._target, 'cfg', replace(loop._target.cfg, caution=NEVER_SURE))
    assert loop.caution['caution']['window_s'] == 0.3
    assert loop.iso_period == 3  # more than three plans in the usual window


@pytest.mark.parametrize('reason', ['reasoning_incomplete', 'reasoning_empty'])
def test_what_was_not_said_is_not_driven_slowly_either(monkeypatch, reason):
    class Mute:
        profile = replace(fake_profile(), caution=NEVER_SURE)

        def plan(self, observation):
            return replace(fake_plan(observation), verdict=Verdict(False, reason))

    monkeypatch.setattr(closed_policies.Planner, 'load', lambda *given, **options: Mute())
    planner = closed_policies.DeployedPlanner('tiny', 'cpu', None)
    run = ClosedRun(SPECS[0], WIDTH, HEIGHT, period=2)
    for _ in range(3):
        made = planner.plan({0: run.view()})[0]
        run.apply(None, 0.1)
        while not run.wants_plan:
            run.step()
    assert made.cautious and made.plan is None


def test_the_blind_target_gets_no_images(loop):
    blind = loop.target('black')
    run = ClosedRun(SPECS[0], *loop.size, render=False)
    view = run.view()
    assert not blind.needs_images and view.images == {}
    assert blind.plan({7: view})[7].text


@pytest.fixture(scope='module')
def outcomes():
    """Constant velocity over two pairs, once in this process and once in another."""
    how = Stepping(WIDTH, HEIGHT, render=False, period=5)
    found = []
    for workers in (0, 1):
        with RunFarm(workers) as farm:
            states = farm.open(list(enumerate(SPECS[:4])), how)
            done = {}
            while states:
                done.update({n: s for n, s in states.items() if isinstance(s, Outcome)})
                views = {n: s for n, s in states.items() if isinstance(s, View)}
                made = ConstantVelocity().plan(views)
                states = farm.answer({n: Answer(m.plan, 0.1) for n, m in made.items()})
            found.append([done[n] for n in range(4)])
    return found


def test_other_processes_drive_the_same(outcomes):
    assert outcomes[0] == outcomes[1] or [o.path for o in outcomes[0]] == [
        o.path for o in outcomes[1]]
    assert outcomes[0][0].red_light and outcomes[0][2].collision


def test_finished_runs_are_kept_and_found_again(outcomes, tmp_path):
    settings = {'way': 'x', 'period': 5}
    store = RunStore(tmp_path, 'val.x', settings)
    for outcome in outcomes[0][:2]:
        store.add(outcome)
    with (tmp_path / 'val.x.jsonl').open('a') as file:
        file.write('{"spec": {"split": "val", "fam')  # killed while it wrote
    again = RunStore(tmp_path, 'val.x', settings)
    assert set(again.found) == {key_of(spec) for spec in SPECS[:2]}
    assert np.allclose(again.found[key_of(SPECS[0])].path, outcomes[0][0].path)
    again.add(outcomes[0][2])
    assert len(RunStore(tmp_path, 'val.x', settings).found) == 3
    with pytest.raises(ConfigurationError, match='other settings'):
        RunStore(tmp_path, 'val.x', {**settings, 'period': 1})


def test_drives_that_differ_are_told(outcomes):
    greedy = {key_of(o.spec): o for o in outcomes[0]}
    assert compared(greedy, greedy)['identical']
    key = key_of(SPECS[1])
    other = {**greedy, key: replace(greedy[key], texts=['another text'])}
    assert compared(greedy, other)['runs_with_other_texts'] == 1
    path = [(x + 0.02, *rest) for x, *rest in greedy[key].path]
    report = compared(greedy, {**greedy, key: replace(greedy[key], path=path)})
    assert report['largest_path_difference_m'] == pytest.approx(0.02) and not report['identical']
    struck = {**greedy, key: replace(greedy[key], off_road=True)}
    assert compared(greedy, struck)['runs_with_other_outcomes'] == 1


def test_rates_differences_and_tables(outcomes):
    runs = outcomes[0]
    better = [replace(o, collision='', at_fault=False) for o in runs]
    ways = {'fast': better, 'slow': runs, 'blind': runs, 'constant_velocity': runs,
            'expert': better}
    latencies = (Latency('fast', 100.0), Latency('slow', 900.0, 30.0))
    report = split_table(ways, latencies)
    assert report['ways']['slow']['collision']['value'] == 0.25
    assert report['bought']['slow']['collision']['mean'] == 0.25
    assert report['families']['slow']['lead_brake']['collision'] == 1
    assert {f['family'] for f in report['failures']} == {'red_light'}
    text = closed_section({
        'checkpoint': 'tiny', 'device': 'cpu', 'runs': 4, 'plan_hz': 2.0,
        'latencies': {latency.name: latency.to_dict() for latency in latencies},
        'splits': {'val': report}, 'iso': {'d': compared(
            {key_of(o.spec): o for o in runs}, {key_of(o.spec): o for o in runs})}})
    assert '| target, slow | 25.0 %' in text and '| `d` | 4 |' in text
    json.dumps(report)


def test_a_failure_can_be_looked_at(outcomes):
    sheet = contact_sheet(outcomes[0][2], WIDTH, HEIGHT)
    assert sheet.shape == (44 + 180 + 240, 6 * 300, 3) and sheet.std() > 30


def test_latencies():
    assert parse_latency('graphed=115.5+6.3') == Latency('graphed', 115.5, 6.3)
    assert parse_latency('fast=100').seconds(18) == pytest.approx(0.1)
    assert parse_latency('spec=100+7/7.4').seconds(18) == pytest.approx(0.121)
    fast, graphed, original = (latency.seconds(18) for latency in MEASURED)
    assert fast < graphed < original
    for wrong in ('fast', 'fast=', 'Fast=1', 'f=1+2/0', 'f=1+2/0.5', 'f=-1', 'f=1+2/x'):
        with pytest.raises(ConfigurationError, match='latency'):
            parse_latency(wrong)
    with pytest.raises(ConfigurationError, match='split'):
        ClosedOptions(splits=('train',))
    with pytest.raises(ConfigurationError, match='at least one run'):
        ClosedOptions(plan_hz=20.0)
