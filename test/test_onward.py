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
"""Clips in mid-manoeuvre: what they record, what they say, and whether their labels can drive."""

from __future__ import annotations

from dataclasses import replace
import math

import numpy as np
import pytest

from rspec_planner.evaluate.closed_world import ClosedRun, Outcome
from rspec_planner.world.anchor import anchored
from rspec_planner.world.clip import Clip, ClipSpec
from rspec_planner.world.expert import Driver, Maneuver, offset_at, Shift, SpeedLimit
from rspec_planner.world.generate import generate_pair, simulate_pair
from rspec_planner.world.onward import drive_pair, LATEST, make_pair
from rspec_planner.world.reasoning import opener, parse
from rspec_planner.world.scenarios import FAMILIES
from rspec_planner.world.simulation import (
    Actor,
    DT,
    EGO_FRONT,
    EGO_WIDTH,
    EgoState,
    follow_ego,
)

SIZE = (128, 64)
ACTOR_STATE = tuple(name for name in Actor.__slots__ if name not in ('kind', 'path', 'script'))


class Oracle:
    """The driver that labels drive clips, as a planner: it plans from wherever the ego is."""

    def __init__(self, run: ClosedRun):
        self.run, self.stage = run, run._stage
        self.limit = SpeedLimit(self.stage.path)

    def plan(self) -> tuple[np.ndarray, ...]:
        """Return the undisturbed drive of the next 6.4 s as a plan; the world is left as it is."""
        stage, run = self.stage, self.run
        maneuver, trailing = stage.maneuver, stage.trailing
        kept = [(a, [getattr(a, name) for name in ACTOR_STATE]) for a in stage.actors]
        state, holding = run._state, maneuver.holding
        ego = EgoState(state.x, state.y, state.yaw, state.speed)
        laid = anchored(maneuver, run._driver.s, run._driver.d, ego.speed, stage.actors)
        driver = Driver(stage.path, self.limit, laid, run._driver.s)
        rows = []
        for k in range(65):
            if k:
                for actor in stage.actors:
                    actor.advance((run.tick + k) * DT)
                if trailing is not None:
                    gap = driver.s - 0.9 - trailing.s - trailing.size[0] / 2.0
                    follow_ego(trailing, gap, ego.speed)
            driver.locate(ego)
            bend = driver.curvature(ego)
            ego = ego.driven(driver.acceleration(ego, stage.actors), bend)
            rows.append((ego.x, ego.y, ego.yaw, ego.speed, ego.acceleration, bend))
            ego = ego.at(DT)
        for actor, values in kept:
            for name, value in zip(ACTOR_STATE, values):
                setattr(actor, name, value)
        maneuver.holding = holding
        x, y, yaw, speed, push, bend = np.array(rows).T
        cosine, sine = math.cos(state.yaw), math.sin(state.yaw)
        dx, dy = x - state.x, y - state.y
        poses = np.stack([dx * cosine + dy * sine, dy * cosine - dx * sine, np.zeros_like(dx),
                          yaw - state.yaw], axis=1)
        return poses, speed, push, bend


def driven_by_labels(spec: ClipSpec, seed: int) -> Outcome:
    """Return what becomes of a run that plans every 0.1 to 0.5 s, late and shoved about."""
    run = ClosedRun(spec, *SIZE, render=False)
    oracle, rng = Oracle(run), np.random.default_rng([seed, 5])
    while not run.done:
        if run.wants_plan:
            run.apply(oracle.plan(), float(rng.uniform(0.02, 0.5)))
        if run._state.speed > 2.0:
            run._state.yaw += float(rng.normal(0.0, 0.01))
            run._state.speed += float(rng.normal(0.0, 0.1))
        run.step()
    return run.finish()


@pytest.mark.parametrize('family', FAMILIES)
def test_the_driver_of_the_labels_drives_well_from_wherever_the_ego_is(family: str) -> None:
    for event in (True, False):
        outcome = driven_by_labels(ClipSpec('extra', family, 0, event), 0)
        assert not outcome.failed, (outcome.spec, outcome.collision, outcome.off_road,
                                    outcome.red_light, outcome.stop_line)


def clips(index: int = 1) -> list[Clip]:
    """Return the twins of one drive clip of every family, without images."""
    return [clip for family in FAMILIES
            for clip in drive_pair(ClipSpec('extra', family, index, True, drive=1))]


def test_twins_share_the_instant_and_differ_in_the_event() -> None:
    found = clips()
    for event, twin in zip(found[::2], found[1::2]):
        assert event.spec.drive == twin.spec.drive == 1
        assert event.t0_ns == twin.t0_ns
        assert event.spec.event and not twin.spec.event
        at_t0 = generate_pair(replace(event.spec, drive=0))[0].t0_ns
        assert 0.1 <= (event.t0_ns - at_t0) / 1e9 <= 0.1 * LATEST + 1e-6


def test_text_speaks_the_catalogue_and_opens_with_the_driven_history() -> None:
    for clip in clips():
        assert clip.reasoning.startswith(opener(clip.history))
        sentence = parse(clip.reasoning)
        assert sentence is not None, clip.reasoning
        assert (sentence.action, sentence.cause) == (clip.decision.action, clip.decision.cause)


def test_actions_integrate_to_the_future() -> None:
    for clip in clips():
        ego = EgoState(0.0, 0.0, 0.0, clip.speed)
        for (push, bend), (x, y, _, yaw), speed in zip(clip.actions, clip.future, clip.speeds):
            ego = EgoState(ego.x, ego.y, ego.yaw, ego.speed, float(push), float(bend)).at(DT)
            assert abs(ego.speed - speed) < 1e-3
            assert math.hypot(ego.x - x, ego.y - y) < 0.02
            assert abs(math.atan2(math.sin(ego.yaw - yaw), math.cos(ego.yaw - yaw))) < 1e-3


def test_a_drive_is_not_the_experts_own() -> None:
    """Most clips lie beside the line that the undisturbed expert drives, or ahead or behind."""
    apart = []
    for clip in clips(2):
        pair = generate_pair(replace(clip.spec, drive=0))
        truth = pair[0 if clip.spec.event else 1]
        ticks = round((clip.t0_ns - truth.t0_ns) / 1e8)
        # where the clip's ego is, from the chord that it drove since t0 if t0 is in its history
        if ticks < 15:
            x, y = clip.history[15 - ticks, :2]
            apart.append(abs(math.hypot(x, y) - math.hypot(*truth.future[ticks - 1, :2])))
    assert len(apart) > 5 and np.median(apart) > 0.03


def test_the_same_spec_gives_the_same_clip_and_another_number_another() -> None:
    spec = ClipSpec('extra', 'cyclist', 4, True, drive=1)
    first, again = make_pair(spec)[0], make_pair(spec)[0]
    other = make_pair(replace(spec, drive=2))[0]
    assert first.t0_ns == again.t0_ns and np.array_equal(first.future, again.future)
    assert first.t0_ns != other.t0_ns or not np.array_equal(first.history, other.history)
    assert make_pair(replace(spec, drive=0))[0].t0_ns == generate_pair(
        replace(spec, drive=0))[0].t0_ns


def test_standing_and_released_situations_get_their_own_sentences() -> None:
    """What was decided at t0 is not repeated when it is over."""
    said = {}
    for family in ('stop_sign', 'light_change', 'blocked_lane', 'left_turn', 'cut_in'):
        for index in range(12):
            for clip in drive_pair(ClipSpec('extra', family, index, True, drive=1)):
                said.setdefault(family, set()).add((clip.decision.action, clip.decision.cause))
    assert ('continue', 'light_green') in said['light_change']
    assert ('wait', 'lead_standing') in said['blocked_lane']
    assert ('keep_straight', 'road_straight') in said['blocked_lane']
    assert ('keep_lane', 'parked_leaves_room') not in said['blocked_lane']
    assert ('keep_straight', 'road_straight') in said['stop_sign']
    assert ('turn_left', 'oncoming_free') in said['left_turn']
    assert ('follow', 'lead_driving') in said['cut_in']


def test_nobody_who_must_wait_is_taught_to_go() -> None:
    for family in ('red_light', 'stop_sign', 'person_and_sign'):
        for index in range(6):
            clip = drive_pair(ClipSpec('extra', family, index, True, drive=1))[0]
            assert clip.stop_line_x is not None
            assert clip.future[-1, 0] + 3.6 <= clip.stop_line_x + 0.1


def test_a_shift_is_laid_through_the_place_of_the_ego() -> None:
    shifts = (Shift(10.0, 20.0, 1.0), Shift(60.0, 20.0, 0.0))
    maneuver = Maneuver(8.0, shifts=shifts)
    assert anchored(maneuver, 5.0, 0.2, 8.0, []) is maneuver  # not begun: nothing to lay anew
    for s, d in ((20.0, 0.5), (16.0, 0.4), (30.0, 0.6), (50.0, 0.9)):
        laid = anchored(maneuver, s, d, 8.0, [])
        assert offset_at(laid.shifts, s)[0] == pytest.approx(d, abs=1e-6)
        assert laid.shifts[-1] == shifts[1]  # its obstacle is in view
        assert offset_at(laid.shifts, min(s + 20.0, 60.0))[0] == pytest.approx(1.0)
    assert anchored(maneuver, 20.0, 0.5, 8.0, []).shifts[0].start == pytest.approx(10.0, abs=1e-6)
    back = anchored(maneuver, 66.0, 0.5, 8.0, [])
    assert offset_at(back.shifts, 66.0)[0] == pytest.approx(0.5, abs=1e-6)
    assert back.shifts[-1].start == pytest.approx(56.0, abs=1e-6)


def test_a_late_shift_hurries_where_an_obstacle_is_near() -> None:
    stage = simulate_pair(ClipSpec('extra', 'parked', 0, True))[0].event.stage
    shift = stage.maneuver.shifts[0]
    left = shift.target > 0.0
    parked = next(a for a in stage.actors if a.kind in ('car', 'van', 'truck')
                  and a.speed == 0.0 and (a.d < 0.0) == left and abs(a.d) < 2.6)
    s, side = parked.rear - EGO_FRONT - 4.5, math.copysign(1.0, shift.target)
    laid = anchored(stage.maneuver, s, 0.2 * side, 8.0, stage.actors)
    assert laid.shifts[0].length < shift.length
    clear = abs(offset_at(laid.shifts, s + 4.5)[0] - parked.d) - 0.5 * (parked.size[1] + EGO_WIDTH)
    assert clear > 0.44
