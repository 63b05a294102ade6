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
from contextlib import contextmanager
import dataclasses
from dataclasses import replace
import json
import math
import os

from drives import Ego, RIG, StraightDrive
from full_disk import files_of_at_most
import numpy as np
import pytest

from rspec_planner.bag_topics import propose_cameras, TopicNames
from rspec_planner.command_line import camera_topic
from rspec_planner.command_line import NAVIGATION_TOPIC as NODE_NAVIGATION_TOPIC
from rspec_planner.command_line import ODOMETRY_TOPIC as NODE_ODOMETRY_TOPIC
from rspec_planner.decode.state import DecodeStats
from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.model.config import CameraConfig, tiny, TokenIds
from rspec_planner.offline import OfflineOptions, plan_bag, read_parameters
from rspec_planner.offline_observations import bag_observations
from rspec_planner.planner.plan import Plan, Reasoning, StageTimes, Verdict
from rspec_planner.planner.tokenizer import build_tokenizer
from rspec_planner.transport import config_path
from rspec_planner.world.bag import BagReader, BagWriter, message
from rspec_planner.world.messages import make_header, odometry_message
from rspec_planner.world.record import (
    image_topic,
    NAVIGATION_TOPIC,
    ODOMETRY_TOPIC,
    record_world,
    RecordOptions,
)

CAMERAS = RIG.names
ACCEPTED = Verdict(True)
START = RecordOptions().start_ns
PROFILE = replace(tiny(TokenIds(*range(15)), 1000), cameras=CameraConfig(height=32, width=64))


class EchoPlanner:
    """Says which frames it saw and goes straight on; keeps every observation."""

    def __init__(self, parameters, verdict=ACCEPTED):
        self.profile = PROFILE
        self.tokenizer = None
        self.verdict = verdict
        self.seen = []

    def plan(self, observation):
        self.seen.append(observation)
        seen = observation.images[:, :, 0, 0, 0]
        poses = np.zeros((65, 4))
        poses[:, 0] = np.arange(65) * 0.1 * observation.speed_mps
        return Plan(
            t0_ns=observation.t0_ns, poses=poses, speeds=np.full(65, observation.speed_mps),
            accelerations=np.zeros(65), curvatures=np.zeros(65), candidates=poses[None],
            candidate_speeds=np.full((1, 65), observation.speed_mps),
            ego_pose_at_t0=observation.ego_pose_at_t0,
            odometry_frame=observation.odometry_frame,
            reasoning=Reasoning((1, 2, 3), f'frames {seen.tolist()}', True,
                                DecodeStats(2, (1, 2))),
            times=StageTimes(encode_ms=5.0 + len(self.seen)), verdict=self.verdict)


def record(path, seconds=3.0, drive=None, **options):
    record_world(path, drive or StraightDrive(), seconds, RecordOptions(**options), rig=RIG)
    return path


def run(path, verdict=ACCEPTED, progress=None, **options):
    planners = []

    def make(parameters):
        planners.append(EchoPlanner(parameters, verdict))
        return planners[0]
    report = plan_bag(path, OfflineOptions(**options), make_planner=make, progress=progress)
    records = [json.loads(line) for line in open(report['records'])]
    return report, records, planners[0]


def rewrite(source, target, change):
    """Copy a bag; `change(topic, content)` returns the new topic and content, or None."""
    with BagReader(source) as reader:
        changed = [(change(m.topic, m.content), m.log_ns, reader.topics[m.topic])
                   for m in reader.read()]
    with BagWriter(target) as writer:
        for new, log_ns, kind in changed:
            if new is None:
                continue
            topic, content = new
            if topic not in writer._topics:
                writer.add_topic(topic, kind.replace('/msg/', '/'))
            writer.write(topic, log_ns, content)
    return target


@pytest.fixture(scope='module')
def bag(tmp_path_factory):
    return record(tmp_path_factory.mktemp('bag') / 'a.mcap')


@pytest.fixture
def refused(tmp_path):
    """Return the error of planning a bag; nothing must be left behind."""
    def refuse(path, **options):
        target = tmp_path / 'never' / 'records.jsonl'
        with pytest.raises((InputError, ConfigurationError)) as caught:
            plan_bag(path, OfflineOptions(records=target, **options), make_planner=EchoPlanner)
        assert '\n' not in str(caught.value)
        assert not target.parent.exists() or not list(target.parent.iterdir())
        return str(caught.value)
    return refuse


def test_plans_begin_with_the_first_full_history(bag, tmp_path):
    report, records, planner = run(bag, records=tmp_path / 'r.jsonl')
    assert report['plans'] == len(records) == 15
    assert report['skipped'] == {'history_short': 15}
    assert [r['t0_ns'] for r in records] == [START + k * 10**8 for k in range(15, 30)]
    assert report['accepted_length'] == 1.5
    assert report['frame_ms'] == {'p50': 13.0, 'p95': 19.3, 'p99': 19.86}
    for index, observation in enumerate(planner.seen, start=15):
        frames = observation.images[:, :, 0, 0, 0].astype(int)
        assert np.abs(frames - [index - 3, index - 2, index - 1, index]).max() <= 4  # JPEG
        assert observation.ego_poses[:, 0, 3] == pytest.approx(np.arange(-15, 1), abs=1e-6)
        assert observation.odometry_frame == 'map'
        assert observation.navigation_text == ('Turn left' if index >= 20 else '')


def test_a_route_that_the_prompt_has_no_room_for_stops_no_plan(bag, tmp_path):
    def lengthen(topic, content):
        if topic.endswith('navigation_text') and content.data:
            content.data = '1 ' * 65
        return topic, content
    long = rewrite(bag, tmp_path / 'long.mcap', lengthen)
    tokenizer = build_tokenizer(['1'])
    seen = list(bag_observations(long, PROFILE, tokenizer=tokenizer))
    assert [o.navigation_text for o in seen] == [''] * 15
    planner = EchoPlanner(None)
    planner.tokenizer = tokenizer
    report = plan_bag(long, OfflineOptions(records=tmp_path / 'r'),
                      make_planner=lambda parameters: planner)
    assert report['plans'] == 15 and not any(o.navigation_text for o in planner.seen)
    assert report['messages'] == {'navigation_text_refused': 10}


def test_the_world_records_on_the_topics_of_the_node():
    assert [image_topic(c) for c in CAMERAS] == [camera_topic(c) for c in CAMERAS]
    assert (ODOMETRY_TOPIC, NAVIGATION_TOPIC) == (
        NODE_ODOMETRY_TOPIC, NODE_NAVIGATION_TOPIC)


def test_records_hold_what_the_planner_said(bag, tmp_path):
    _, records, planner = run(bag, records=tmp_path / 'r.jsonl')
    first = records[0]
    assert set(first) >= {'t0_ns', 'text', 'tokens', 'poses', 'iterations'}
    assert first['text'].startswith('frames [[')
    assert (first['tokens'], first['iterations']) == ([1, 2, 3], 2)
    assert np.shape(first['poses']) == (65, 4)
    assert first['poses'][10][0] == pytest.approx(10.0)


@pytest.mark.parametrize('encoding, name', [('raw', 'a.db3'), ('png', 'folder')])
def test_other_encodings_and_storages_plan_alike(tmp_path, encoding, name):
    path = record(tmp_path / name, encoding=encoding)
    report, records, planner = run(path)
    assert report['plans'] == 15
    assert report['records'] == str(tmp_path / f'{name}.plans.jsonl')
    frames = planner.seen[0].images[:, :, 0, 0, 0]
    assert np.array_equal(frames, np.tile([12, 13, 14, 15], (4, 1)))


def test_two_runs_give_the_same_bytes(bag, tmp_path):
    for name in ('x', 'y'):
        run(bag, records=tmp_path / name)
    assert (tmp_path / 'x').read_bytes() == (tmp_path / 'y').read_bytes()


def test_late_cameras_are_waited_for(tmp_path):
    path = record(tmp_path / 'a.mcap', encoding='png', phase_ms={'front_tele': 20.0,
                                                                'cross_left': -20.0})
    report, _, planner = run(path)
    assert report['plans'] == 15
    frames = planner.seen[0].images[:, -1, 0, 0, 0]
    assert frames.tolist() == [15] * 4


def test_rate_limit_is_the_one_of_the_parameters(bag, tmp_path):
    from rspec_planner.parameters import PARAMETER_FILE
    text = config_path(PARAMETER_FILE).read_text()
    slow = tmp_path / 'slow.yaml'
    slow.write_text(text.replace('rate_hz: 10.0', 'rate_hz: 5.0'))
    _, records, _ = run(bag, records=tmp_path / 'r', params=slow)
    assert set(np.diff([r['t0_ns'] for r in records])) == {200_000_000}
    slow.write_text(text.replace('rate_hz', 'rate_herz'))
    with pytest.raises(ConfigurationError, match="did you mean 'planning.rate_hz'"):
        run(bag, records=tmp_path / 'r', params=slow)


@pytest.mark.parametrize('draft, enabled, name', [
    ('', True, 'default'), ('none', False, 'default'), ('eagle3-b16-w8-flat', True,
                                                        'eagle3-b16-w8-flat')])
def test_the_draft_option_overrides_the_parameters(draft, enabled, name):
    speculation = read_parameters(OfflineOptions(draft=draft)).speculation
    assert (speculation.enabled, speculation.draft) == (enabled, name)


def test_dropped_frames_are_named_skips(tmp_path):
    report, records, _ = run(record(tmp_path / 'a.mcap', drop=0.1, seed=4))
    assert report['plans'] == len(records) > 0
    assert report['skipped']['image_out_of_tolerance'] > 3


def test_nan_odometry_is_a_named_skip_and_heals(tmp_path):
    class Faulty(StraightDrive):
        def ego(self):
            return Ego(x=math.nan) if self.index == 5 else super().ego()
    report, records, _ = run(record(tmp_path / 'a.mcap', seconds=4.0, drive=Faulty()))
    assert report['skipped']['odometry_not_finite'] > 10
    assert records[-1]['t0_ns'] == START + 39 * 10**8
    assert report['plans'] + sum(report['skipped'].values()) == 40


def test_rejected_plans_are_counted_by_reason(bag, refused, tmp_path):
    with pytest.raises(InputError, match='rejected_start_jump: 9 m'):
        run(bag, verdict=Verdict(False, 'start_jump', '9 m'), records=tmp_path / 'r')


def test_plan_bag_holds_paths_and_trajectories_in_the_map(bag, tmp_path):
    _, records, _ = run(bag, records=tmp_path / 'r', out=tmp_path / 'out.mcap')
    with BagReader(tmp_path / 'out.mcap') as reader:
        got = list(reader.read())
    paths = [m for m in got if m.topic.endswith('/path')]
    trajectories = [m for m in got if m.topic.endswith('/trajectory')]
    assert [m.log_ns for m in paths] == [r['t0_ns'] for r in records]
    path, trajectory = paths[0].content, trajectories[0].content
    assert len(path.poses) == len(trajectory.points) == 65
    assert path.header.frame_id == trajectory.header.frame_id == 'map'
    at = 10.0 * (1.5 + 4.3)  # metres along a straight road with heading 0.1
    point = path.poses[43].pose.position
    assert (point.x, point.y) == pytest.approx((at * math.cos(0.1), at * math.sin(0.1)))
    late = trajectory.points[43].time_from_start
    assert (late.sec, late.nanosec) == (4, 300_000_000)
    assert trajectory.points[43].velocities[0].linear.x == 10.0
    texts = [m.content.data for m in got if m.topic.endswith('/reasoning')]
    assert texts == [r['text'] for r in records]
    with pytest.raises(InputError, match='exists already'):
        run(bag, records=tmp_path / 'r', out=tmp_path / 'out.mcap')
    run(bag, records=tmp_path / 'r', out=tmp_path / 'out.mcap', overwrite=True)


@pytest.mark.parametrize('policy, plans', [('ignore', True), ('warn', True), ('refuse', False)])
def test_a_camera_in_another_role_is_counted_and_refused_as_the_node_does(
        tmp_path, refused, policy, plans):
    record(tmp_path / 'a.mcap')

    def swap(topic, content):
        if topic.endswith('front_wide/camera_info'):
            longer = content.k * [4, 1, 1, 1, 4, 1, 1, 1, 1]
            return topic, dataclasses.replace(content, k=longer)
        return topic, content
    rewrite(tmp_path / 'a.mcap', tmp_path / 'b.mcap', swap)
    params = tmp_path / 'p.yaml'
    shipped = config_path('rspec_planner.param.yaml').read_text()
    params.write_text(shipped.replace('info_check: warn', f'info_check: {policy}'))
    if not plans:
        assert 'camera_info_' in refused(tmp_path / 'b.mcap', params=params)
        return
    report, _, _ = run(tmp_path / 'b.mcap', params=params)
    assert report['plans'] == 15
    assert report['messages'] == ({} if policy == 'ignore' else
                                  {'camera_info_field_of_view': 30})


def test_progress_sees_every_message(bag, tmp_path):
    seen = []

    @contextmanager
    def progress(total):
        seen.append(total)
        yield lambda: seen.append(1)
    run(bag, records=tmp_path / 'r', progress=progress)
    assert seen[0] == len(seen) - 1 > 100


def test_bag_without_odometry_is_refused(bag, refused, tmp_path):
    path = rewrite(bag, tmp_path / 'b.mcap',
                   lambda t, c: None if t == ODOMETRY_TOPIC else (t, c))
    line = refused(path)
    assert f'odometry ({ODOMETRY_TOPIC})' in line
    assert 'record the missing topics' in line


def test_bag_with_one_camera_missing_is_refused(bag, refused, tmp_path):
    path = rewrite(bag, tmp_path / 'b.mcap',
                   lambda t, c: None if 'front_tele/image' in t else (t, c))
    line = refused(path)
    assert "camera 'front_tele' (/sensing/camera/front_tele/image_raw or " in line
    assert '/sensing/camera/cross_left/image_raw/compressed' in line


def test_other_topic_names_are_proposed_and_accepted(bag, refused, tmp_path):
    def rename(topic, content):
        return topic.replace('/sensing/camera/', '/vehicle/').replace('/localization', ''), content
    path = rewrite(bag, tmp_path / 'b.mcap', rename)
    line = refused(path)
    start = line.index("'{cameras") + 1
    mapping = tmp_path / 'mapping.yaml'
    mapping.write_text(line[start:line.index("' to a file")])
    report, _, _ = run(path, topics=mapping)
    assert report['plans'] == 15


@pytest.mark.parametrize('text, says', [
    ('- a', 'not of the form'),
    ('cameras: 3', 'not of the form'),
    ('camera: {}', "key 'camera' is unknown"),
    ('cameras: {front: /a}', "camera 'front' is unknown"),
    ('odometry: 3', "'odometry' is 3"),
    ('{', 'not YAML'),
    (None, 'cannot be read'),
])
def test_bad_mappings_are_named(tmp_path, text, says):
    path = tmp_path / 'mapping.yaml'
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=says) as caught:
        TopicNames.read(path, CAMERAS)
    assert 'mapping.yaml' in str(caught.value)


def test_proposals_pair_similar_names():
    topics = ['/cam/front_left', '/cam/front_120', '/cam/tele_front_30', '/cam/front_right']
    guess = propose_cameras(topics, ('cross_left', 'front_wide', 'cross_right', 'front_tele'))
    assert guess['cross_left'] == '/cam/front_left'
    assert guess['cross_right'] == '/cam/front_right'
    assert len(set(guess.values())) == 4


def test_empty_bags_are_refused(refused, tmp_path):
    with BagWriter(tmp_path / 'a.mcap'):
        pass
    assert 'holds no messages' in refused(tmp_path / 'a.mcap')


def test_truncated_and_missing_bags_are_refused(bag, refused, tmp_path):
    cut = tmp_path / 'cut.mcap'
    cut.write_bytes(bag.read_bytes()[:-1000])
    assert 'cut.mcap is truncated' in refused(cut)
    assert 'does not exist' in refused(tmp_path / 'no.mcap')


def test_unknown_encoding_is_refused_with_its_topic(refused, tmp_path):
    def spoil(topic, content):
        if topic == image_topic('cross_right'):
            content.encoding = '16UC1'
        return topic, content
    raw = record(tmp_path / 'raw.mcap', encoding='raw')
    line = refused(rewrite(raw, tmp_path / 'b.mcap', spoil))
    assert "/sensing/camera/cross_right/image_raw: image encoding '16UC1'" in line
    assert 'publish one of rgb8' in line


def test_damaged_jpegs_are_named_skips(bag, tmp_path):
    count = [0]

    def spoil(topic, content):
        if 'front_wide/image' in topic:
            count[0] += 1
            if count[0] == 20:
                content.data = content.data[:200]
        return topic, content
    report, _, _ = run(rewrite(bag, tmp_path / 'b.mcap', spoil))
    assert report['skipped']['image_decode_failed'] == 4
    assert report['plans'] == 11


def test_too_short_bags_say_what_is_short(refused, tmp_path):
    line = refused(record(tmp_path / 'a.mcap', seconds=1.0))
    assert 'history_short' in line
    assert 'needs 1.50 s' in line


def test_the_input_bag_is_not_overwritten(bag, refused):
    assert 'is the input bag' in refused(bag, out=bag, overwrite=True)


def test_odometry_alone_is_refused(refused, tmp_path):
    with BagWriter(tmp_path / 'a.mcap') as writer:
        writer.add_topic(ODOMETRY_TOPIC, 'nav_msgs/Odometry')
        writer.add_topic('/text', 'std_msgs/String')
        writer.write(ODOMETRY_TOPIC, 1, odometry_message(make_header(1, 'map'), Ego(),
                                                         (0, 0, 0, 1)))
        writer.write('/text', 2, message('std_msgs/String', data='x'))
    line = refused(tmp_path / 'a.mcap')
    for camera in CAMERAS:
        assert f"'{camera}'" in line


def test_real_networks_give_the_same_records_twice(tmp_path):
    from rspec_planner.planner.pipeline import Planner
    from rspec_planner.train.profiles import new_target
    from rspec_planner.world.drive import Drive
    from rspec_planner.world.rig import Rig
    rig = Rig(width=192, height=96)
    record_world(tmp_path / 'a.mcap', Drive(['lead_brake'], 3, rig=rig), 2.2, RecordOptions(),
                 rig=rig)

    class AcceptedPlanner(Planner):
        """Random weights never end their reasoning, which alone would reject every plan."""

        def plan(self, observation):
            return replace(super().plan(observation), verdict=ACCEPTED)

    def make(parameters):
        target, tokenizer = new_target(smoke=True)
        return AcceptedPlanner(target.eval().requires_grad_(False).pack(), tokenizer,
                               max_reasoning_tokens=8)
    for name in ('x', 'y'):
        report = plan_bag(tmp_path / 'a.mcap', OfflineOptions(records=tmp_path / name),
                          make_planner=make)
        assert report['plans'] == 7
        assert report['frame_ms']['p50'] > 0.0
    assert (tmp_path / 'x').read_bytes() == (tmp_path / 'y').read_bytes()
    records = [json.loads(line) for line in open(tmp_path / 'x')]
    assert len({json.dumps(r['poses']) for r in records}) == 7  # each plan is its own


@pytest.mark.parametrize('existing', ['the bag itself', "somebody's notes", 'a pipe', 'the out'])
def test_nothing_but_records_is_replaced(bag, tmp_path, existing):
    """Somebody mistypes, or names /dev/null: what is there must be there afterwards."""
    mine, options = tmp_path / bag.name, {}
    mine.write_bytes(bag.read_bytes())
    target = tmp_path / 'there'
    if existing == 'the bag itself':
        target = mine
    elif existing == 'a pipe':
        os.mkfifo(target)
    elif existing == 'the out':
        target, options = tmp_path / 'both.mcap', {'out': tmp_path / 'both.mcap'}
    else:
        target.write_text('milk, bread\n', encoding='utf-8')
    before = target.stat() if target.exists() else None
    with pytest.raises(ConfigurationError, match='also --records' if options else
                       'exists and holds no records of plans; choose another name'):
        run(mine, records=target, **options)
    assert (target.stat() if target.exists() else None) == before
    run(mine, records=tmp_path / 'fresh')
    run(mine, records=tmp_path / 'fresh')  # records may be replaced by records


def test_records_on_a_full_disk_are_refused_by_name(bag, tmp_path):
    """The limit on the size of a file stands for the disk; both raise OSError in a write."""
    told = r'r\.jsonl: cannot be written \(File too'
    with files_of_at_most(3000), pytest.raises(ConfigurationError, match=told):
        run(bag, records=tmp_path / 'r.jsonl')
    assert not list(tmp_path.iterdir())
