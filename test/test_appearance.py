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
"""What agents look like: every kind, every lamp, every moving limb."""

import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.appearance import parts_of
from rspec_planner.world.look import look_of
from rspec_planner.world.scene import AGENT_KINDS, AgentState

SIZES = {
    'car': (4.5, 1.85, 1.5), 'van': (5.2, 2.0, 2.2), 'truck': (8.0, 2.4, 3.2),
    'bus': (11.0, 2.5, 3.1), 'emergency': (5.5, 2.1, 2.5), 'cyclist': (1.8, 0.6, 1.75),
    'adult': (0.5, 0.5, 1.75), 'child': (0.4, 0.4, 1.2), 'dog': (0.8, 0.3, 0.6),
    'deer': (1.6, 0.5, 1.5), 'cone': (0.4, 0.4, 0.75), 'barrier': (0.2, 2.2, 1.0),
    'traffic_light': (0.4, 0.4, 5.4), 'stop_sign': (0.1, 0.9, 2.4), 'bus_stop': (3.0, 1.2, 2.6),
    'crossing_gate': (0.3, 6.0, 3.4), 'tree': (3.0, 3.0, 7.0), 'building': (10.0, 8.0, 9.0),
    'pole': (0.2, 0.2, 6.0),
}
VEHICLES = ('car', 'van', 'truck', 'bus', 'emergency')


def agent(kind, **changes):
    length, width, height = SIZES[kind]
    return AgentState(kind, 0.0, 0.0, 0.0, length, width, height, (150, 60, 40), **changes)


def colours(parts, glowing=False):
    rows = [part.colours[part.glow >= 1.0] if glowing else part.colours for part in parts]
    return {tuple(row) for block in rows for row in block}


def test_sizes_cover_every_kind():
    assert set(SIZES) == set(AGENT_KINDS)


@pytest.mark.parametrize('night', [False, True])
@pytest.mark.parametrize('kind', AGENT_KINDS)
def test_every_kind_is_a_solid_on_the_ground_near_its_footprint(kind, night):
    parts = parts_of(agent(kind), 0.0, night)
    assert parts
    for part in parts:
        count = len(part.quads)
        assert part.quads.shape == (count, 4, 3) and part.colours.shape == (count, 3)
        assert np.isfinite(part.quads).all()
        assert np.allclose(np.linalg.norm(part.normals, axis=1), 1.0)
        assert ((part.colours >= 0) & (part.colours <= 255)).all()
        assert ((part.glow >= 0) & (part.glow <= 1)).all()
        assert part.quads[..., 2].min() >= -0.01
    points = np.concatenate([part.quads.reshape(-1, 3) for part in parts])
    length, width, height = SIZES[kind]
    assert points[:, 2].max() <= height * 1.25 + 4.5 * (kind == 'crossing_gate')
    assert abs(points[:, 0]).max() <= length / 2 + 0.55
    assert abs(points[:, 1]).max() <= width / 2 + 0.9


@pytest.mark.parametrize('kind', AGENT_KINDS)
def test_footprints_are_counter_clockwise(kind):
    for part in parts_of(agent(kind), 0.0, False):
        x, y = part.footprint.T
        area = 0.5 * float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum())
        assert area > 0


def test_an_unknown_kind_is_refused_in_one_line():
    with pytest.raises(ConfigurationError, match="'tank'.*car") as caught:
        parts_of(AgentState('tank', 0, 0, 0, 6, 3, 2), 0.0, False)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('night', [False, True])
@pytest.mark.parametrize('kind', VEHICLES)
def test_brake_lamps_shine_only_when_lit(kind, night):
    def red_glow(brake):
        area = 0.0
        for part in parts_of(agent(kind, brake=brake), 0.0, night):
            strong = (part.glow >= 1.0) & (part.colours[:, 0] > 200) & (part.colours[:, 2] < 120)
            rear = part.normals[:, 0] < -0.9
            for quad in part.quads[strong & rear]:
                spans = quad.max(axis=0) - quad.min(axis=0)
                area += spans[1] * spans[2]
        return area
    assert red_glow(False) == 0.0
    assert red_glow(True) > 0.25  # square metres, third lamp included


@pytest.mark.parametrize('kind', VEHICLES)
@pytest.mark.parametrize('side,sign', [('left', 1.0), ('right', -1.0)])
def test_an_indicator_shows_behind_in_front_and_on_its_flank(kind, side, sign):
    seen = set()
    for part in parts_of(agent(kind, indicator=side), 0.0, False):
        amber = (part.glow >= 1.0) & (part.colours[:, 1] == 172.0)
        for normal, quad in zip(part.normals[amber], part.quads[amber]):
            assert sign * quad[:, 1].mean() > 0
            seen.add(tuple(np.round(normal[:2]).astype(int)))
    assert seen == {(-1, 0), (1, 0), (0, int(sign))}


def test_hazard_lights_both_sides_and_blinks_at_one_and_a_half_hertz():
    looks = [look_of(agent('car', indicator='hazard'), t / 100.0, False) for t in range(400)]
    assert all(look.left == look.right for look in looks)
    lit = np.array([look.left for look in looks])
    assert np.count_nonzero(~lit[1:] & lit[:-1]) == 6  # falling edges in 4 s
    assert 0.5 < lit.mean() < 0.7


@pytest.mark.parametrize('start', np.linspace(0.0, 0.66, 23))
def test_four_frames_always_catch_a_lit_indicator(start):
    frames = [look_of(agent('car', indicator='left', agent_id=3), start + 0.1 * i, False).left
              for i in range(4)]
    assert any(frames)


def test_flashing_lamps_change_sides():
    for kind in ('emergency', 'crossing_gate'):
        first = parts_of(agent(kind, lamp='flash'), 0.0, False)
        second = parts_of(agent(kind, lamp='flash'), 0.3, False)
        dark = parts_of(agent(kind), 0.0, False)

        def middle(parts):
            return [quad[:, 1].mean() for part in parts
                    for quad in part.quads[(part.glow >= 1.0)]]
        assert np.mean(middle(first)) > np.mean(middle(second))
        assert middle(dark) == []


@pytest.mark.parametrize('lamp,channel', [('red', 0), ('green', 1)])
def test_a_traffic_light_shines_in_its_colour(lamp, channel):
    shining = colours(parts_of(agent('traffic_light', lamp=lamp), 0.0, False), glowing=True)
    assert shining
    assert all(np.argmax(colour) == channel for colour in shining)
    assert not colours(parts_of(agent('traffic_light'), 0.0, False), glowing=True)


def test_red_is_above_amber_above_green():
    tops = []
    for lamp in ('red', 'amber', 'green'):
        (part,) = parts_of(agent('traffic_light', lamp=lamp), 0.0, False)
        tops.append(part.quads[part.glow >= 1.0][..., 2].max())
    assert tops[0] > tops[1] > tops[2]
    assert tops[0] == pytest.approx(5.2, abs=0.2)


def test_limbs_swing_only_with_a_gait():
    for kind in ('adult', 'child', 'dog', 'deer', 'cyclist'):
        still = [parts_of(agent(kind), t, False)[0].quads for t in (0.0, 0.2)]
        walk = [parts_of(agent(kind, gait=1.5), t, False)[0].quads for t in (0.0, 0.2)]
        assert np.array_equal(*still)
        assert np.abs(walk[0] - walk[1]).max() > 0.05


def test_steering_turns_the_front_wheels_of_the_bus_only():
    straight, turned = (parts_of(agent('bus', steer=steer), 0.0, False) for steer in (0.0, 0.4))
    rear, front = (np.abs(a.normals - b.normals).max() for a, b in zip(straight, turned))
    assert rear == 0.0
    assert front > 0.3


def test_the_gate_arm_rises():
    down, up = (parts_of(agent('crossing_gate', open=o), 0.0, False)[0].quads for o in (0.0, 1.0))
    assert down[..., 2].max() == pytest.approx(1.09)
    assert np.ptp(down[..., 1]) == pytest.approx(6.0)
    assert up[..., 2].max() == pytest.approx(7.0, abs=0.1)
    assert np.ptp(up[..., 1]) < 0.3


def test_equal_looks_share_one_shape():
    here = agent('tree')
    there = agent('tree')
    there.x = 30.0
    assert parts_of(here, 0.0, False) is parts_of(there, 5.0, False)
