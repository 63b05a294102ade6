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
Subscriptions of the node: cameras, odometry and navigation text, into the observation buffer.

CameraInfo is optional: where it comes, it tells whether a camera fits the role that it plays.

Callbacks only store references and note stamps; decoding happens in other threads, for the frames
that a plan really uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import functools
from functools import partial
import time
from typing import Any

from nav_msgs.msg import Odometry
import numpy as np
from rclpy.event_handler import SubscriptionEventCallbacks, UnsupportedEventTypeError
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import (
    DurabilityPolicy,
    qos_policy_name_from_kind,
    QoSProfile,
    ReliabilityPolicy,
)
from rclpy.qos_overriding_options import QoSOverridingOptions
from rclpy.subscription import MessageInfo
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import String

from rspec_planner.errors import InputError, one_line
from rspec_planner.inputs import InputWatch
from rspec_planner.mounting import StaticFrames, transform_matrix
from rspec_planner.overlay import camera_view, CameraView
from rspec_planner.parameters import CameraParameters
from rspec_planner.planner.buffers import ObservationBuffer, Skip
from rspec_planner.planner.calibration import CalibrationChecks
from rspec_planner.planner.images import decode_message
from rspec_planner.planner.navigation_text import REFUSED
from rspec_planner.planner.serialized import read_message
from rspec_planner.ros_conversions import BASE_FRAME, odometry_sample, stamp_to_ns

COMPRESSED = '/compressed'
#: images of one camera that wait to be taken; newer ones push older ones out
QUEUE = 10
#: with transport 'auto' the other transport may take over after this silence
_TAKEOVER_S = 1.0


def sensor_qos(depth: int) -> QoSProfile:
    """Return best effort and volatile, which matches every publisher."""
    return QoSProfile(depth=depth, reliability=ReliabilityPolicy.BEST_EFFORT,
                      durability=DurabilityPolicy.VOLATILE)


@dataclass
class _Camera:
    """One camera stream and, with transport 'auto', which transport delivers it."""

    index: int
    name: str
    topics: tuple[str, ...]
    transport: type[Any] | None = None
    heard_s: float = 0.0

    def accepts(self, kind: type[Any]) -> bool:
        """Return whether to use a message, so that two transports never deliver a frame twice."""
        now = time.monotonic()
        if self.transport not in (None, kind) and now - self.heard_s < _TAKEOVER_S:
            return False
        self.transport, self.heard_s = kind, now
        return True


class InputSubscriptions:
    """
    All inputs of one configured node.

    `expected_t0` tells for which t0 the next cycle wants frames, None when nobody can say;
    `on_anchor` gets the stamp of each frame of the anchor camera; `on_discontinuity` gets a
    reason when the odometry starts to describe another point of the vehicle.
    """

    def __init__(self, node: LifecycleNode, buffer: ObservationBuffer, watch: InputWatch,
                 expected_t0: Callable[[], int | None], on_anchor: Callable[[int], None],
                 on_discontinuity: Callable[[str], None]) -> None:
        self._node = node
        self._buffer = buffer
        self._watch = watch
        self._expected_t0 = expected_t0
        self._on_anchor = on_anchor
        self._on_discontinuity = on_discontinuity
        self._subscriptions: list[Any] = []
        self._topics: dict[str, tuple[str, ...]] = {}
        self._qos_faults: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._anchor = ''
        self._image_size = (buffer.cameras.height, buffer.cameras.width)
        self._decode_size = buffer.cameras.decode_size
        self._refuse_unfit = False
        self.calibration = CalibrationChecks(buffer.cameras)
        self._frames = StaticFrames()
        self._frame_ids: dict[str, str] = {}
        self._child_frame_id: str | None = None
        self.enabled = False  # data is dropped unless the node is active

    def create(self, cameras: CameraParameters, names: tuple[str, ...], anchor: str) -> None:
        """Subscribe; `names` are the cameras of the model in the order of `cameras.ids`."""
        self._anchor = anchor
        self._refuse_unfit = cameras.info_check == 'refuse'
        self.calibration.tolerance_deg = cameras.fov_tolerance_deg
        for index, (name, transport) in enumerate(zip(names, cameras.transport)):
            self._add_camera(index, name, transport)
            if cameras.info_check != 'ignore':
                self._subscribe(CameraInfo, f'~/input/camera_info{index}', sensor_qos(1),
                                partial(self._on_camera_info, name))
        self._topics['odometry'] = (self._node.resolve_topic_name('~/input/odometry'),)
        self._watch.add('odometry', 'odometry', self._topics['odometry'][0])
        self._subscribe(Odometry, '~/input/odometry', sensor_qos(50), self._on_odometry)
        self._subscribe(String, '~/input/navigation_text', QoSProfile(depth=1),
                        self._on_navigation_text)
        try:
            from tf2_msgs.msg import TFMessage
        except ImportError:  # not on PyPI; only pictures need it, and they say what is assumed
            return
        self._subscribe(TFMessage, '/tf_static', QoSProfile(
            depth=100, durability=DurabilityPolicy.TRANSIENT_LOCAL), self._on_static_transforms)

    def destroy(self) -> None:
        """Take the subscriptions off the graph, for cleanup."""
        self.enabled = False
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions.clear()

    def publishers(self) -> dict[str, int]:
        """Return how many publishers each stream has."""
        return {name: sum(self._node.count_publishers(topic) for topic in topics)
                for name, topics in self._topics.items()}

    @property
    def faults(self) -> list[str]:
        """Return QoS mismatches, one line each."""
        return list(self._qos_faults.values())

    @property
    def notes(self) -> list[str]:
        """Return further complaints about the content of messages, one line each."""
        unfit = [f'{fault.reason}: {fault.detail}' for fault in self.calibration.faults.values()]
        crowded = [f'{count} publishers on {topic} alternate; stop all but one'
                   for topics in self._topics.values() for topic in topics
                   if (count := self._node.count_publishers(topic)) > 1]
        return [*self._notes.values(), *unfit, *crowded]

    @property
    def counts(self) -> dict[str, int]:
        """Return how many messages were dropped or complained about, by reason."""
        return {**self._buffer.dropped, **self.calibration.counts}

    def view(self, camera: str) -> CameraView:
        """Return where a camera looks, for pictures at the size that the model sees."""
        return camera_view(camera, self._image_size, self.calibration.calibrations.get(camera),
                           self._frames.pose(self._frame_ids.get(camera, ''), BASE_FRAME))

    def _add_camera(self, index: int, name: str, transport: str) -> None:
        base = self._node.resolve_topic_name(f'~/input/image{index}')
        plain = base.removesuffix(COMPRESSED)
        kinds: dict[str, type[Any]] = {}
        if transport in ('raw', 'auto'):
            kinds[plain] = Image
        if transport in ('compressed', 'auto'):
            kinds[plain + COMPRESSED] = CompressedImage
        camera = _Camera(index, name, tuple(kinds))
        stream = f'image{index}'
        self._topics[stream] = camera.topics
        label = '[/compressed]' if len(kinds) > 1 else ''
        self._watch.add(stream, f"camera '{name}'", next(iter(kinds)) + label)
        for topic, kind in kinds.items():
            self._subscribe(kind, topic, sensor_qos(QUEUE),
                            partial(self._on_image, camera, kind, topic), stream=stream)

    def _subscribe(self, kind: type[Any], topic: str, qos: QoSProfile,
                   callback: Callable[..., None], stream: str = '') -> None:
        """Subscribe; a `stream` of images comes serialized and its losses are watched."""
        name = self._node.resolve_topic_name(topic)
        losses: dict[str, Any] = {} if not stream else {
            'message_lost': lambda event: self._watch.lost(stream, topic, event.total_count)}

        def create(events: dict[str, Any]) -> Any:
            return self._node.create_subscription(
                kind, topic, self._guarded(name, callback), qos, raw=bool(stream),
                event_callbacks=SubscriptionEventCallbacks(
                    incompatible_qos=lambda event: self._on_incompatible(name, event),
                    use_default_callbacks=False, **events),
                qos_overriding_options=QoSOverridingOptions.with_default_policies())
        try:
            made = create(losses)
        except UnsupportedEventTypeError:  # some middlewares do not tell what they lose
            made = create({})
        self._subscriptions.append(made)

    def _guarded(self, topic: str, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a callback of which no message can end the executor, and so the node."""
        @functools.wraps(callback)  # rclpy looks at the number of arguments
        def run(*arguments: Any) -> None:
            if len(arguments) == 1 and isinstance(arguments[0], tuple):
                arguments = arguments[0]  # EventsExecutor gives both as one (rclpy 9.1.2)
            try:
                callback(*arguments)
            except Exception as error:
                self._buffer.dropped['unusable'] += 1
                self._notes['unusable'] = (f'a message on {topic} could not be used '
                                           f'({type(error).__name__}: {error}); report it')
        return run

    def _on_incompatible(self, topic: str, event: Any) -> None:
        policy = qos_policy_name_from_kind(event.last_policy_kind)
        self._qos_faults[topic] = (
            f'{event.total_count} publisher(s) on {topic} offer an incompatible {policy} policy '
            f'and are not heard; set the parameter qos_overrides.{topic}.subscription.* or '
            "change the publisher's QoS")
        self._node.get_logger().warning(self._qos_faults[topic])

    def _on_image(self, camera: _Camera, kind: type[Any], topic: str, data: bytes,
                  info: MessageInfo) -> None:
        stream = f'image{camera.index}'
        self._watch.took(stream, topic, info['publication_sequence_number'])
        if not self.enabled or not camera.accepts(kind):
            return
        try:
            message = read_message(f'sensor_msgs/msg/{kind.__name__}', data)
        except InputError:
            self._buffer.dropped['unreadable'] += 1
            return
        stamp_ns = stamp_to_ns(message.header.stamp)
        self._frame_ids[camera.name] = message.header.frame_id
        self._buffer.add_image(camera.name, stamp_ns,
                               partial(decode_message, message, self._decode_size),
                               size=len(data), expected_ns=self._expected_t0())
        self._watch.record(stream, stamp_ns)
        if camera.name == self._anchor:
            self._on_anchor(stamp_ns)

    def _on_camera_info(self, camera: str, message: CameraInfo) -> None:
        fault = self.calibration.update(camera, message)
        if self._refuse_unfit:
            self._buffer.refuse_camera(
                camera, Skip(fault.reason, fault.detail) if fault else None)

    def _on_odometry(self, message: Odometry) -> None:
        if not self.enabled:
            return
        sample = odometry_sample(message)
        self._check_child_frame(sample.child_frame_id)
        self._buffer.add_pose(sample.stamp_ns, sample.position, sample.quaternion_xyzw,
                              sample.speed_mps, sample.frame_id)
        self._watch.record('odometry', sample.stamp_ns)

    def _check_child_frame(self, frame_id: str) -> None:
        """Notice odometry of another point: plans would start there instead of the rear axle."""
        if frame_id == self._child_frame_id:
            return
        if self._child_frame_id is not None:
            self._on_discontinuity(one_line("odometry child_frame_id changed from "
                                            f"'{self._child_frame_id}' to '{frame_id}'"))
        self._child_frame_id = frame_id
        self._notes.pop('child_frame_id', None)
        if frame_id != BASE_FRAME:
            self._notes['child_frame_id'] = (
                f"odometry child_frame_id is '{one_line(frame_id, 80)}', plans need "
                f"'{BASE_FRAME}' (the centre of the rear axle); publish odometry of that point")

    def _on_navigation_text(self, message: String) -> None:
        fault = self._buffer.set_navigation_text(message.data)
        self._notes.pop(REFUSED, None)
        if fault:
            self._notes[REFUSED] = fault

    def _on_static_transforms(self, message: Any) -> None:
        for item in message.transforms:
            move, turn = item.transform.translation, item.transform.rotation
            with np.errstate(all='ignore'):  # no rotation: judged below
                matrix = transform_matrix((move.x, move.y, move.z),
                                          (turn.x, turn.y, turn.z, turn.w))
            if np.isfinite(matrix).all():
                self._frames.add(item.header.frame_id, item.child_frame_id, matrix)
            else:
                self._buffer.dropped['static_transform_not_finite'] += 1
