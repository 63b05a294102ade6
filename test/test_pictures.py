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
"""Pictures: the band lies where the road point projects, text fits, colours mean speed."""

from __future__ import annotations

from dataclasses import replace

import cv2
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from rspec_planner import drawing
from rspec_planner.decode.stats import DecodeStats
from rspec_planner.errors import InputError
from rspec_planner.live import pictures
from rspec_planner.live.pictures import contact_sheet, draw_frame, Extras
from rspec_planner.overlay import split_reasoning
from rspec_planner.planner.plan import Plan, PLAN_POINTS, Reasoning, StageTimes, Verdict
from rspec_planner.projection import densify, ground_view, project, ribbon_edges
from rspec_planner.world.rig import Rig

RIG = Rig()
TEXT = 'cruising straight, brake behind the red van because it is braking close in our lane.'


def make_plan(speed: float = 8.0, curvature: float = 0.0, text: str = TEXT) -> Plan:
    """Return a plan of constant speed and curvature."""
    s = np.arange(PLAN_POINTS) * 0.1 * speed
    poses = np.zeros((PLAN_POINTS, 4))
    poses[:, 3] = s * curvature
    if curvature:
        poses[:, 0] = np.sin(poses[:, 3]) / curvature
        poses[:, 1] = (1 - np.cos(poses[:, 3])) / curvature
    else:
        poses[:, 0] = s
    speeds = np.full(PLAN_POINTS, speed)
    return Plan(12_300_000_000, poses, speeds, np.zeros(PLAN_POINTS),
                np.full(PLAN_POINTS, curvature), poses[None], speeds[None], np.eye(4), 'map',
                Reasoning((1,), text, True, DecodeStats(4, (5, 5, 5, 3))),
                StageTimes(2.0, 40.0, 30.0, 35.0, 20.0, 1.0), Verdict(True))


def grey(level: int = 90) -> np.ndarray:
    return np.full((4, RIG.height, RIG.width, 3), level, np.uint8)


def changed(a: np.ndarray, b: np.ndarray, box: tuple[int, int, int, int]) -> np.ndarray:
    """Return where two pictures differ inside a box."""
    left, top, right, bottom = box
    return np.any(a[top:bottom, left:right] != b[top:bottom, left:right], axis=-1)


def test_projection_agrees_with_the_rig():
    points = np.random.default_rng(0).uniform([3, -8, -1], [60, 8, 4], (200, 3))
    for name in RIG.names:
        expected, in_front = RIG.project(name, points)
        found, depth = project(points, RIG, name)
        assert np.array_equal(depth > 1e-6, in_front)
        assert np.allclose(found[in_front], expected[in_front], atol=1e-9)


def test_a_point_straight_ahead_lands_where_pinhole_geometry_says():
    x, pitch, focal = 21.6, np.radians(3.0), RIG.intrinsics['front_wide'][0, 0]
    (u, v), _ = (a.ravel() for a in project(np.array([[x, 0.0, 0.0]]), RIG, 'front_wide'))
    below = np.arctan2(1.5, x - 1.6) - pitch
    assert u == pytest.approx((RIG.width - 1) / 2)
    assert v == pytest.approx((RIG.height - 1) / 2 + focal * np.tan(below))


@pytest.mark.parametrize('curvature', [0.0, 0.03, -0.03])
def test_band_covers_the_projected_path_and_nothing_else(curvature):
    plan, scale = make_plan(8.0, curvature), 3.0
    before = np.full((int(RIG.height * scale), int(RIG.width * scale), 3), 90, np.uint8)
    view = before.copy()
    pictures.draw_trajectory(view, plan, RIG, 'front_wide', scale)
    touched = np.any(view != before, axis=-1)
    middle = np.pad(plan.poses[8:24, :2], ((0, 0), (0, 1)))
    pixels = np.round((project(middle, RIG, 'front_wide')[0] + 0.5) * scale).astype(int)
    inside = (pixels >= 0).all(1) & (pixels < (touched.shape[1], touched.shape[0])).all(1)
    assert inside.sum() >= 12
    assert touched[pixels[inside, 1], pixels[inside, 0]].all()
    # two metres beside the path nothing is drawn
    for edge in ribbon_edges(plan.poses[8:24, :2], 4.0):
        beside = np.round((project(edge, RIG, 'front_wide')[0] + 0.5) * scale).astype(int)
        ok = (beside >= 0).all(1) & (beside < (touched.shape[1], touched.shape[0])).all(1)
        assert ok.sum() >= 8
        assert not touched[beside[ok, 1], beside[ok, 0]].any()


def test_picture_shows_the_plan_in_camera_and_from_above():
    straight = draw_frame(grey(), make_plan(8.0), RIG)
    left = draw_frame(grey(), make_plan(8.0, 0.03), RIG)
    assert straight.shape == (900, 1600, 3) and straight.dtype == np.uint8
    for box in (pictures.MAIN, pictures.BIRDSEYE):
        moved = changed(straight, left, box)
        columns = np.flatnonzero(moved.any(0))
        # a left bend adds pixels left of the middle
        assert columns.min() < moved.shape[1] / 2 - 40
    header = changed(straight, left, pictures.HEADER)
    assert not header.any()  # neither speed nor time changed


def test_picture_does_not_touch_its_inputs_and_repeats_exactly():
    images, plan = grey(), make_plan(6.0, 0.02)
    before = images.copy()
    first = draw_frame(images, plan, RIG, Extras(elapsed_s=3.0, plan_number=7))
    assert np.array_equal(images, before)
    assert np.array_equal(first, draw_frame(images, plan, RIG, Extras(elapsed_s=3.0,
                                                                      plan_number=7)))


def test_decision_is_written_in_its_accent_colour():
    def accent_pixels(text: str) -> int:
        left, top, right, bottom = pictures.REASONING
        panel = draw_frame(grey(), make_plan(text=text), RIG)[top:bottom, left + 12:right]
        return int((np.abs(panel.astype(int) - drawing.ACCENT).sum(-1) < 30).sum())
    assert accent_pixels(TEXT) > 500
    assert accent_pixels('cruising straight, ') == 0


@pytest.mark.parametrize('text,parts', [
    (TEXT, ('cruising straight,', 'brake behind the red van',
            'because it is braking close in our lane.')),
    ('stop now.', ('', 'stop now.', '')),
    ('', ('', '', '')),
    ('stopped, wait because a because b.', ('stopped,', 'wait', 'because a because b.')),
])
def test_reasoning_splits_into_opener_decision_and_cause(text, parts):
    assert split_reasoning(text) == parts


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text('abcdefgh', min_size=1, max_size=12), min_size=1, max_size=40))
def test_wrapped_lines_fit_and_lose_no_word(words):
    lines = drawing.wrap_runs([(' '.join(words), drawing.TEXT, drawing.REGULAR)], 400, 24)
    assert [word for line in lines for word, _, _ in line] == words
    for line in lines:
        text = ' '.join(word for word, _, _ in line)
        assert len(line) == 1 or drawing.text_width(text, 24) <= 412


def test_long_reasoning_stays_inside_its_panel():
    long = draw_frame(grey(), make_plan(text=' '.join([TEXT] * 4)), RIG)
    short = draw_frame(grey(), make_plan(text=''), RIG)
    left, _, right, bottom = pictures.REASONING
    below = changed(long, short, (0, bottom + 1, 1600, 900))
    beside = changed(long, short, (right + 1, 0, 1600, 900))
    assert not below.any() and not beside.any()


def test_standing_plan_is_drawn_without_a_band():
    standing = make_plan(0.0)
    picture = draw_frame(grey(), standing, RIG)
    left, top, right, bottom = pictures.MAIN
    assert np.all(picture[top + 60:bottom, left:right] == 90)


def test_red_is_standing_and_colours_are_monotone_in_hue():
    hues = [cv2.cvtColor(np.uint8([[drawing.speed_colour(v, 15.0)]]), cv2.COLOR_RGB2HSV)[0, 0, 0]
            for v in np.linspace(0, 15, 16)]
    assert hues[0] == 0 and np.all(np.diff(np.int32(hues)) >= 0) and hues[-1] > 80
    assert drawing.speed_colour(99.0, 15.0) == drawing.speed_colour(15.0, 15.0)


def test_ground_view_puts_a_painted_point_back_where_it_is():
    images = grey(0)
    spot = np.array([[12.0, 1.0, 0.0]])
    for image, name in zip(images, RIG.names):
        (u, v), depth = (a.ravel() for a in project(spot, RIG, name))
        if depth[0] > 0:
            cv2.circle(image, (round(u), round(v)), 3, (255, 0, 0), -1)
    x, y = np.meshgrid(np.linspace(6, 18, 121), np.linspace(-4, 4, 81), indexing='ij')
    view, seen = ground_view(images, RIG, x, y)
    red = view[..., 0] > 128
    assert seen.all() and red.any()
    assert x[red].mean() == pytest.approx(12.0, abs=0.5)
    assert y[red].mean() == pytest.approx(1.0, abs=0.2)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 20.0), st.floats(-0.2, 0.2), st.floats(0.1, 2.0))
def test_densified_path_keeps_ends_and_step(speed, curvature, step):
    plan = make_plan(speed, curvature if abs(curvature) > 1e-3 else 0.0)
    path, values = densify(plan.poses[:, :2], plan.speeds, step)
    assert np.allclose(path[0], plan.poses[0, :2]) and np.allclose(path[-1], plan.poses[-1, :2])
    assert np.hypot(*np.diff(path, axis=0).T).max() <= step + 1e-6
    assert np.allclose(values, speed)


def test_wrong_images_are_refused_by_shape():
    with pytest.raises(InputError, match=r'shape \(3, 192, 384, 3\) uint8, expected \(4, H'):
        draw_frame(grey()[:3], make_plan(), RIG)
    with pytest.raises(InputError, match='float32'):
        draw_frame(grey().astype(np.float32), make_plan(), RIG)


def test_contact_sheet_tiles_row_by_row():
    shades = [np.full((90, 160, 3), 20 * i + 40, np.uint8) for i in range(4)]
    sheet = contact_sheet(shades, columns=3, width=480)
    assert sheet.shape == (180, 480, 3)
    assert [int(sheet[45, x, 0]) for x in (80, 240, 400)] == [40, 60, 80]
    assert int(sheet[135, 80, 0]) == 100
    with pytest.raises(InputError, match='no picture to tile'):
        contact_sheet([])


def test_written_picture_reads_back_in_rgb(tmp_path):
    picture = draw_frame(grey(), make_plan(), RIG)
    pictures.write_picture(tmp_path / 'new' / 'a.png', picture)
    back = cv2.cvtColor(cv2.imread(str(tmp_path / 'new' / 'a.png')), cv2.COLOR_BGR2RGB)
    assert np.array_equal(back, picture)


def test_a_reused_reasoning_is_told_instead_of_an_accepted_length():
    base = make_plan()
    reused = replace(base, reasoning=replace(base.reasoning, stats=DecodeStats(0, (), reused=17)))
    assert changed(draw_frame(grey(), base, RIG), draw_frame(grey(), reused, RIG),
                   pictures.HEADER).any()


def test_times_and_accepted_length_reach_the_header():
    base = make_plan()
    slower = replace(base, times=replace(base.times, decode_ms=400.0))
    longer = replace(base, reasoning=replace(base.reasoning, stats=DecodeStats(2, (9, 9))))
    for other in (slower, longer):
        assert changed(draw_frame(grey(), base, RIG), draw_frame(grey(), other, RIG),
                       pictures.HEADER).any()
