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
Random messages through the node's own callbacks, into the buffer, through the guard of inputs.

RSPEC_FUZZ_EXAMPLES says how many of each kind; docs/reliability.md counts the long run. Nothing
may be raised, every refusal has a known name, and what comes out is whole.
"""

import array
from collections import Counter
import os
from types import SimpleNamespace

from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import numpy as np
import pytest

pytest.importorskip('rclpy', reason='rclpy is not installed')

from geometry_msgs.msg import TransformStamped
from nav_msgs.msg import Odometry
from node_rig import fake_profile
from rclpy.serialization import serialize_message
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import String

from rspec_planner.inputs import InputWatch
from rspec_planner.planner.buffers import (
    ObservationBuffer,
    SelectionLimits,
    Skip,
    SKIP_REASONS,
)
from rspec_planner.planner.images import ENCODINGS
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plausibility import implausible, REASONS
from rspec_planner.ros_conversions import image_message, ns_to_stamp
from rspec_planner.subscriptions import _Camera, InputSubscriptions

EXAMPLES = int(os.environ.get('RSPEC_FUZZ_EXAMPLES', '40'))
T0 = 1_700_000_000_000_000_000
PROFILE = fake_profile()
NAMES = PROFILE.cameras.names
COUNTS: Counter[str] = Counter()
FUZZ = settings(max_examples=EXAMPLES, deadline=None, database=None,
                suppress_health_check=list(HealthCheck))


class World:
    """The node's subscriptions without a graph."""

    def __init__(self):
        self.buffer = ObservationBuffer(PROFILE, SelectionLimits(odometry_max_gap_ms=150.0))
        self.watch = InputWatch()
        for index in range(len(NAMES)):
            self.watch.add(f'image{index}', 'camera', 'topic')
        self.watch.add('odometry', 'odometry', 'topic')
        self.resets = []
        node = SimpleNamespace(count_publishers=lambda topic: 1)
        self.inputs = InputSubscriptions(node, self.buffer, self.watch, lambda: T0,
                                         lambda stamp: None, self.resets.append)
        self.inputs.enabled = True

    def image(self, index, kind, data):
        camera = _Camera(index, NAMES[index], ('topic',))
        self.inputs._on_image(camera, kind, 'topic', data, {'publication_sequence_number': 1})

    def finish(self):
        """Select as a cycle does; return what came of it."""
        self.buffer.prepare(T0)
        chosen = self.buffer.select(T0)
        if isinstance(chosen, Skip):
            assert chosen.reason in SKIP_REASONS or chosen.reason.startswith('camera_info_')
            assert chosen.detail and '\n' not in chosen.detail
            return chosen
        assert isinstance(chosen, Observation)
        for values in (chosen.ego_poses, chosen.ego_pose_at_t0, chosen.speed_mps):
            assert np.isfinite(values).all()
        doubt = implausible(chosen)
        assert doubt is None or doubt[0] in REASONS
        assert self.inputs.notes is not None and self.inputs.counts is not None
        return chosen


def filled():
    """Return a world that can plan at T0."""
    world = World()
    for message in WHOLE_ODOMETRY:
        world.inputs._on_odometry(message)
    for index, data in WHOLE_IMAGES:
        world.image(index, Image, data)
    return world


def odometry(stamp_ns, x=0.0):
    message = Odometry(child_frame_id='base_link')
    message.header.stamp, message.header.frame_id = ns_to_stamp(stamp_ns), 'map'
    message.pose.pose.position.x = x or 5.0 * (stamp_ns - T0) / 1e9
    message.twist.twist.linear.x = 5.0
    return message


def whole_images():
    rng = np.random.default_rng(0)
    for index, name in enumerate(NAMES):
        for back in range(4):
            pixels = rng.integers(0, 255, (32, 64, 3), dtype=np.uint8)
            message = image_message(pixels, T0 - back * 100_000_000, name)
            yield index, bytes(serialize_message(message))


WHOLE_ODOMETRY = [odometry(T0 - step * 50_000_000) for step in range(40)]
WHOLE_IMAGES = list(whole_images())


def many(*parts):
    """Return a strategy of some messages, each drawn from `parts`."""
    return st.lists(st.tuples(*parts), min_size=1, max_size=24)


anything = st.floats(allow_nan=True, allow_infinity=True, width=64)
numbers = st.one_of(anything, st.sampled_from([0.0, 1e-310, 1e300, -1e300, 5.0]))
stamps = st.one_of(st.integers(T0 - 3 * 10**9, T0 + 10**8), st.integers(0, 2**31 * 10**9 - 1),
                   st.just(0))
words = st.text(max_size=40)
bytes_of_any_kind = st.one_of(st.binary(max_size=400), st.just(b''),
                              st.integers(1, 9000).map(bytes))


def test_a_whole_world_can_plan():
    chosen = filled().finish()
    assert isinstance(chosen, Observation)


@FUZZ
@given(many(stamps, st.lists(numbers, min_size=8, max_size=8), words, words))
def test_odometry(drawn):
    world = filled()
    for stamp_ns, values, frame, child in drawn:
        message = odometry(stamp_ns)
        message.header.frame_id, message.child_frame_id = frame, child
        place, turn = message.pose.pose.position, message.pose.pose.orientation
        place.x, place.y, place.z, turn.x, turn.y, turn.z, turn.w = values[:7]
        message.twist.twist.linear.x = values[7]
        world.inputs._on_odometry(message)
    world.finish()
    COUNTS['Odometry'] += len(drawn)


@FUZZ
@given(many(stamps, st.one_of(st.sampled_from(ENCODINGS), words), st.integers(0, 70),
            st.integers(0, 140), st.integers(0, 500), bytes_of_any_kind, st.booleans(),
            st.integers(0, 3)))
def test_raw_images(drawn):
    world = filled()
    for stamp_ns, encoding, height, width, step, data, fits, camera in drawn:
        # a payload as long as the header says gets further
        message = Image(height=height, width=width, encoding=encoding, step=step,
                        data=array.array('B', bytes(height * step) if fits else data))
        message.header.stamp = ns_to_stamp(stamp_ns)
        world.image(camera, Image, bytes(serialize_message(message)))
    world.finish()
    COUNTS['Image'] += len(drawn)


JPEG = bytes.fromhex('ffd8ffe000104a46494600010100000100010000ffdb004300')
PNG = b'\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR'


@FUZZ
@given(many(stamps, words, st.sampled_from([b'', JPEG, PNG]), bytes_of_any_kind,
            st.sampled_from([b'', b'\xff\xd9', b'IEND']), st.integers(0, 3)))
def test_compressed_images(drawn):
    world = filled()
    for stamp_ns, form, head, body, tail, camera in drawn:
        message = CompressedImage(format=form, data=array.array('B', head + body + tail))
        message.header.stamp = ns_to_stamp(stamp_ns)
        world.image(camera, CompressedImage, bytes(serialize_message(message)))
    world.finish()
    COUNTS['CompressedImage'] += len(drawn)


@FUZZ
@given(many(st.binary(max_size=600), st.booleans(), st.sampled_from([Image, CompressedImage]),
            st.integers(0, 3)))
def test_bytes_that_may_be_no_message(drawn):
    world = filled()
    for data, header, kind, camera in drawn:
        world.image(camera, kind, (b'\x00\x01\x00\x00' if header else b'') + data)
    world.finish()
    COUNTS['bytes'] += len(drawn)


@FUZZ
@given(many(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1),
            st.lists(numbers, min_size=9, max_size=9), st.lists(numbers, max_size=14),
            st.one_of(st.sampled_from(['plumb_bob', 'rational_polynomial', 'equidistant']), words),
            st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6), st.sampled_from(NAMES),
            words))
def test_camera_info(drawn):
    world = filled()
    world.inputs._refuse_unfit = True
    for width, height, matrix, distortion, model, crop, camera, frame in drawn:
        message = CameraInfo(width=width, height=height, k=matrix, d=distortion,
                             distortion_model=model, binning_x=crop[4], binning_y=crop[5])
        message.header.frame_id = frame
        roi = message.roi
        roi.x_offset, roi.y_offset, roi.width, roi.height = crop[:4]
        world.inputs._on_camera_info(camera, message)
        world.inputs.view(camera)
    world.finish()
    COUNTS['CameraInfo'] += len(drawn)


@FUZZ
@given(many(st.one_of(st.text(max_size=700), st.just('turn left ' * 10_000))))
def test_navigation_text(drawn):
    world = filled()
    for text, in drawn:
        world.inputs._on_navigation_text(String(data=text))
    chosen = world.finish()
    assert isinstance(chosen, Observation) and len(chosen.navigation_text) <= 500
    assert '<' not in chosen.navigation_text
    COUNTS['String'] += len(drawn)


@FUZZ
@given(many(words, words, st.lists(numbers, min_size=7, max_size=7)))
def test_static_transforms(drawn):
    world = filled()
    for parent, child, values in drawn:
        item = TransformStamped(child_frame_id=child)
        item.header.frame_id = parent
        move, turn = item.transform.translation, item.transform.rotation
        move.x, move.y, move.z, turn.x, turn.y, turn.z, turn.w = values
        world.inputs._on_static_transforms(SimpleNamespace(transforms=[item]))
    for name in NAMES:
        world.inputs._frame_ids[name] = drawn[0][1]
        assert np.isfinite(world.inputs.view(name).pose).all()
    world.finish()
    COUNTS['TFMessage'] += len(drawn)


def test_all_kinds_were_sent():
    """Print what the long run counts; the kinds above ran before this one."""
    print(f'fuzzed messages: {sum(COUNTS.values())}, {dict(COUNTS)}')
    assert len(COUNTS) in (0, 7)
