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
"""Rendered pixels: geometry, evidence, weather, determinism."""

import hashlib
import math

import cv2
import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.renderer import Renderer
from rspec_planner.world.rig import Rig
from rspec_planner.world.scene import AGENT_KINDS, AgentState, Paint, Scene, Weather

EQUAL_VERSIONS = ('4.12.0', '5.0.0')  # OpenCV releases measured to give these bytes
BRIGHT = 24  # levels of change that count as evidence
ROAD = (92, 92, 96)
WHITE = (236, 236, 236)
CAR = (4.5, 1.85, 1.5)
LEFT, WIDE, RIGHT, TELE = range(4)


@pytest.fixture(scope='module', autouse=True)
def single_thread():
    threads = cv2.getNumThreads()
    cv2.setNumThreads(1)
    yield
    cv2.setNumThreads(threads)


@pytest.fixture(scope='module')
def renderer():
    return Renderer(Rig())


def rectangle(x0, x1, y0, y1, colour, kind='marking'):
    polygon = np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], np.float64)
    return Paint(polygon, colour, kind)


def street():
    paints = [rectangle(-40, 200, -7, 11, (150, 145, 135), 'shoulder'),
              rectangle(-40, 200, -3.7, 7.2, ROAD, 'road')]
    paints += [rectangle(x, x + 3, 1.68, 1.82, WHITE) for x in range(-36, 200, 9)]
    paints += [rectangle(35, 38, y, y + 0.5, WHITE, 'crosswalk') for y in range(-3, 7)]
    return paints


PAINTS = street()


def thing(kind, x, y, size=CAR, yaw=0.0, colour=(40, 80, 190), **changes):
    return AgentState(kind, x, y, yaw, *size, colour, **changes)


def scene(agents=(), time_s=0.0, weather=None, paints=PAINTS, seed=5, pose=(0.0, 0.0, 0.0)):
    return Scene(time_s, *pose, list(paints), list(agents), weather or Weather(), seed)


def traffic(brake=False):
    return [
        thing('car', 33.9, 0.0, brake=brake), thing('truck', 50, 3.5, (8, 2.4, 3.2), math.pi),
        thing('adult', 24, -3, (0.5, 0.5, 1.75), 1.57, gait=1.6),
        thing('traffic_light', 42, -4.5, (0.4, 0.4, 5.4), lamp='red'),
        thing('bus', 16, -5.5, (11, 2.5, 3.1), steer=0.3, indicator='left'),
        thing('tree', 30, 14, (3, 3, 7), colour=(60, 120, 60)),
        thing('building', 20, -20, (10, 8, 9), colour=(180, 150, 120)),
        thing('car', 6, 3.5, colour=(210, 40, 40)),
    ]


def changed(first, second):
    return int((np.abs(first.astype(int) - second).max(axis=-1) > BRIGHT).sum())


def pixel(rig, frames, camera, point):
    uv, in_front = rig.project(rig.names[camera], np.array([point]))
    u, v = np.round(uv[0]).astype(int)
    assert in_front[0] and 0 <= u < rig.width and 0 <= v < rig.height
    return frames[camera, v, u].astype(int)


def is_red(colour):
    return colour[0] > 130 and colour[1] < 90 and colour[2] < 90


def test_shape_type_and_order():
    rig = Rig(576, 320)
    frames = Renderer(rig).render(scene(traffic()))
    assert frames.shape == (4, 320, 576, 3)
    assert frames.dtype == np.uint8
    assert frames.flags['C_CONTIGUOUS']


@pytest.mark.parametrize('pose', [(0.0, 0.0, 0.0), (31.0, -12.0, 0.7)])
@pytest.mark.parametrize('camera,x,y,half', [
    (WIDE, 6.0, 0.0, 0.8), (WIDE, 14.0, 3.0, 2.0), (WIDE, 26.0, -5.0, 4.0),
    (LEFT, 5.0, 5.0, 1.0), (RIGHT, 6.0, -12.0, 3.0), (LEFT, -1.0, 6.0, 1.0),
    (TELE, 18.0, 0.0, 1.0), (TELE, 40.0, -5.0, 2.0), (TELE, 80.0, 4.0, 5.0)])
def test_a_painted_square_appears_where_it_projects(renderer, pose, camera, x, y, half):
    c, s = math.cos(pose[2]), math.sin(pose[2])
    local = np.array([[x - half, y - half], [x + half, y - half],
                      [x + half, y + half], [x - half, y + half]])
    polygon = local @ np.array([[c, s], [-s, c]]) + pose[:2]
    frames = renderer.render(scene(paints=[Paint(polygon, (230, 20, 20), 'marking')], pose=pose))
    assert is_red(pixel(renderer.rig, frames, camera, (x, y, 0.0)))
    for dx, dy in ((0.0, half + 1.0), (0.0, -half - 1.0), (half + 3.0, 0.0)):
        uv, _ = renderer.rig.project(renderer.rig.names[camera], [[x + dx, y + dy, 0.0]])
        u, v = np.round(uv[0]).astype(int)
        if 0 <= u < 384 and 0 <= v < 192 and (dx == 0.0 or x < 20.0):
            assert not is_red(frames[camera, v, u].astype(int))


@pytest.mark.parametrize('camera,x,y', [(WIDE, 9, 0), (LEFT, 4, 6), (RIGHT, 4, -6), (TELE, 40, 2)])
def test_a_box_appears_where_it_projects(renderer, camera, x, y):
    box = thing('truck', x, y, (3, 2.4, 3.0), math.pi / 2, (220, 30, 30))
    frames = renderer.render(scene([box], pose=(0.0, 0.0, 0.0)))
    box.x, box.y, box.yaw = 100 - y, 50 + x, math.pi
    moved = renderer.render(scene([box], pose=(100.0, 50.0, math.pi / 2)))
    for image in (frames, moved):
        assert is_red(pixel(renderer.rig, image, camera, (x, y + 0.9, 1.2))) \
            or is_red(pixel(renderer.rig, image, camera, (x, y - 0.9, 1.2)))


def test_a_lower_paint_is_covered_by_a_later_one(renderer):
    low, high = rectangle(4, 9, -2, 2, (230, 20, 20)), rectangle(4, 9, -2, 2, (20, 20, 230))
    first = renderer.render(scene(paints=[low, high]))
    second = renderer.render(scene(paints=[high, low]))
    assert is_red(pixel(renderer.rig, second, WIDE, (6.5, 0, 0)))
    assert not is_red(pixel(renderer.rig, first, WIDE, (6.5, 0, 0)))


@pytest.mark.parametrize('kind,size', [
    ('car', CAR), ('van', (5.2, 2.0, 2.2)), ('truck', (8.0, 2.4, 3.2)), ('bus', (11, 2.5, 3.1))])
@pytest.mark.parametrize('weather', [
    Weather(), Weather(light=0.55), Weather(fog=0.012), Weather(rain=1.0), Weather(night=True)])
def test_brake_lamps_at_30_m_change_many_tele_pixels(renderer, kind, size, weather):
    x = 31.6 + size[0] / 2
    dark = renderer.render(scene([thing(kind, x, 0, size)], weather=weather))
    lit = renderer.render(scene([thing(kind, x, 0, size, brake=True)], weather=weather))
    assert changed(dark[TELE], lit[TELE]) >= 60
    assert changed(dark[LEFT], lit[LEFT]) <= changed(dark[TELE], lit[TELE])


@pytest.mark.parametrize('distance', [12, 20, 40, 60])
def test_a_traffic_light_reads_in_the_tele_view(renderer, distance):
    def look(lamp):
        light = thing('traffic_light', 1.6 + distance, -2.2, (0.4, 0.4, 5.4), lamp=lamp)
        return renderer.render(scene([light]))[TELE]
    red, amber, green = (look(lamp) for lamp in ('red', 'amber', 'green'))
    for first, second in ((red, green), (red, amber), (amber, green)):
        assert changed(first, second) >= 16
    vivid = (red[..., 0] > 200) & (red[..., 1] < 90)
    assert vivid.sum() >= 8


@pytest.mark.parametrize('kind,size,yaw', [
    ('adult', (0.5, 0.5, 1.75), 1.57), ('child', (0.4, 0.4, 1.2), 1.57),
    ('dog', (0.8, 0.3, 0.6), 1.57), ('cyclist', (1.8, 0.6, 1.75), 0.0),
    ('stop_sign', (0.1, 0.9, 2.4), 0.0), ('cone', (0.4, 0.4, 0.75), 0.0)])
def test_small_things_at_30_m_fill_many_tele_pixels(renderer, kind, size, yaw):
    empty = renderer.render(scene())
    seen = renderer.render(scene([thing(kind, 31.6, -1.0, size, yaw, (235, 90, 30))]))
    assert changed(empty[TELE], seen[TELE]) >= 60


def test_a_near_car_hides_a_far_car(renderer):
    near, far = thing('van', 15, 0, (5.2, 2, 2.2)), thing('car', 40, 0, colour=(230, 30, 30))
    alone = renderer.render(scene([near]))
    assert changed(alone[TELE], renderer.render(scene([far]))[TELE]) > 1000
    for agents in ([near, far], [far, near]):
        assert changed(alone[TELE], renderer.render(scene(agents))[TELE]) == 0


def test_an_indicator_can_be_seen_from_behind_and_from_the_side(renderer):
    def look(x, y, indicator):
        return renderer.render(scene([thing('car', x, y, indicator=indicator)]))
    off, on = look(25, 3.5, ''), look(25, 3.5, 'right')
    assert changed(off[TELE], on[TELE]) >= 20
    off, on = look(3, 4.0, ''), look(3, 4.0, 'right')
    assert changed(off[LEFT], on[LEFT]) >= 8


def test_the_wheels_of_a_bus_show_that_it_pulls_out(renderer):
    looks = [renderer.render(scene([thing('bus', 22, -3.4, (11, 2.5, 3.1), steer=steer)]))
             for steer in (0.0, 0.35)]
    assert changed(looks[0][TELE], looks[1][TELE]) >= 40


def test_the_same_scene_gives_the_same_bytes(renderer):
    def instant():
        return scene(traffic(), weather=Weather(0.8, 0.004, 0.4))
    first = renderer.render(instant())
    renderer.render(scene([thing('car', 9, 0)], weather=Weather(night=True), time_s=3.0))
    assert np.array_equal(first, renderer.render(instant()))
    assert np.array_equal(first, Renderer(Rig()).render(instant()))


def test_noise_follows_the_seed_and_the_time_and_stays_small(renderer):
    base = renderer.render(scene(seed=1))
    for other in (renderer.render(scene(seed=2)), renderer.render(scene(seed=1, time_s=0.1))):
        assert not np.array_equal(base, other)
        assert max(changed(a, b) for a, b in zip(base, other)) == 0


def test_replacing_a_paint_in_the_same_list_is_noticed(renderer):
    paints = street()
    instant = scene(paints=paints)
    before = renderer.render(instant)
    instant.paints[1] = rectangle(-40, 200, -3.7, 7.2, (230, 20, 20), 'road')
    assert changed(before[WIDE], renderer.render(instant)[WIDE]) > 1000


def test_an_empty_scene_is_sky_over_grass(renderer):
    frames = renderer.render(Scene(0.0, 0.0, 0.0, 0.0)).astype(int)
    for camera in (LEFT, WIDE, RIGHT):
        sky, grass = frames[camera, :60], frames[camera, 110:]
        assert (sky[..., 2] > sky[..., 0]).all()
        assert (grass[..., 1] > grass[..., 2]).all()


@pytest.mark.parametrize('weather', [
    Weather(), Weather(0.55, 0.012), Weather(rain=1.0), Weather(night=True),
    Weather(0.9, 0.02, 0.6, True)])
def test_every_kind_renders_in_every_weather_at_every_place(renderer, weather):
    agents = [thing(kind, 6.0 + 3 * i, (-1) ** i * 6.0, (2.0, 1.0, 1.8), 0.5 * i, lamp='flash',
                    gait=1.5, indicator='hazard', brake=True)
              for i, kind in enumerate(AGENT_KINDS)]
    for dx in (0.0, 25.0, 60.0):
        frames = renderer.render(scene(agents, weather=weather, pose=(dx, 0.3, 0.2)))
        assert frames.std() > 5


def test_things_behind_and_around_the_near_plane_are_harmless(renderer):
    empty = renderer.render(scene())
    behind = renderer.render(scene([thing('car', -12, 0), thing('car', 900, 0)]))
    assert changed(empty[WIDE], behind[WIDE]) == changed(empty[TELE], behind[TELE]) == 0
    around = [thing('truck', 1.6, 0.0, (8, 2.4, 3.2)), thing('bus', 2.0, 3.2, (12, 2.5, 3.1)),
              thing('car', 1.6, -2.6)]
    beside = renderer.render(scene(around[1:]))
    assert changed(empty[LEFT], beside[LEFT]) > 5000
    renderer.render(scene(around))  # the eye is inside the truck: must not raise


def test_night_is_dark_and_its_lamps_are_bright(renderer):
    day = renderer.render(scene(traffic(brake=True)))
    night = renderer.render(scene(traffic(brake=True), weather=Weather(night=True)))
    assert night.mean() < 0.45 * day.mean()
    red = (night[TELE, ..., 0] > 220) & (night[TELE, ..., 1] < 110)
    assert red.sum() > 50
    cone = pixel(renderer.rig, night, WIDE, (12.0, -0.8, 0.0)).mean()
    assert cone > 2.0 * pixel(renderer.rig, night, WIDE, (12.0, -6.5, 0.0)).mean()


def test_fog_swallows_the_distance_first(renderer):
    def contrast(x, fog):
        weather = Weather(fog=fog)
        empty = renderer.render(scene(weather=weather))[TELE].astype(int)
        seen = renderer.render(scene([thing('van', x, 0, (5, 2, 2.2), colour=(200, 20, 20))],
                                     weather=weather))[TELE]
        return np.abs(seen - empty).max()
    assert contrast(90, 0.02) < 0.35 * contrast(90, 0.0)
    assert contrast(20, 0.02) > 0.5 * contrast(20, 0.0)


def test_rain_darkens_and_streaks(renderer):
    dry = renderer.render(scene(time_s=0.1))
    wet = [renderer.render(scene(time_s=t, weather=Weather(rain=1.0))) for t in (0.1, 0.2)]
    assert wet[0].mean() < 0.95 * dry.mean()
    assert changed(wet[0][WIDE], wet[1][WIDE]) > 300


def test_exposure_scales_the_picture(renderer):
    bright, dim = (renderer.render(scene(weather=Weather(light=light))).mean()
                   for light in (1.0, 0.55))
    assert dim == pytest.approx(0.55 * bright, rel=0.06)


def test_a_raised_rig_sees_the_scene_from_above(renderer):
    high = Renderer(Rig(height_offset=0.1, pitch_offset=math.radians(-1.0)))
    agents = traffic()
    assert changed(renderer.render(scene(agents))[TELE], high.render(scene(agents))[TELE]) > 1000


def test_an_unknown_kind_is_refused(renderer):
    with pytest.raises(ConfigurationError, match='tank'):
        renderer.render(scene([thing('tank', 10, 0)]))


@pytest.mark.parametrize('name,weather', [
    ('day', Weather(0.9, 0.003)), ('rain', Weather(0.8, 0.0, 0.7)),
    ('night', Weather(night=True))])
def test_known_bytes(renderer, name, weather):
    if cv2.__version__ not in EQUAL_VERSIONS:
        pytest.skip(f'hashes were taken with OpenCV {" and ".join(EQUAL_VERSIONS)}, '
                    f'this is {cv2.__version__}')
    frames = renderer.render(scene(traffic(brake=True), 0.3, weather, pose=(1.7, 0.21, 0.017)))
    assert hashlib.sha256(frames.tobytes()).hexdigest() == HASHES[name]


HASHES = {
    'day': 'da94b77a589b664f82d486204931e9abbd78fd4d7cb518412d33dba20ebc38bf',
    'rain': '984c8e2ba286a46886a41e699bc7425c8f96cf3643401d8ccea967cd5d8fffa0',
    'night': '555c643538802c05a91f6d12be9a59133447736c0bbbe4681db1b97188bf0a4c',
}
