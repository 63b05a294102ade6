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
The faults of `rspec bench faults` that act on inputs, clock and engine; others: fault_actions.py.

A fault names what it does, how long the model must see whole inputs before it can plan again
(its history), and the names of which at least one must appear in the diagnostics.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from nav_msgs.msg import Odometry
import numpy as np
from sensor_msgs.msg import CompressedImage, Image

from rspec_planner.live.fault_feed import Feed, ImageHook, OdometryHook
from rspec_planner.live.fault_node import CAMERAS
from rspec_planner.ros_conversions import ns_to_stamp, stamp_to_ns

if TYPE_CHECKING:
    from rspec_planner.live.bench_faults import Harness

#: seconds of whole inputs that the model needs: frames, poses
FRAMES_S, POSES_S = 0.3, 1.5
MS = 1_000_000
TELE, ANCHOR = 'front_tele', CAMERAS.anchor


@dataclass(frozen=True)
class Fault:
    """One way to break things; `start` may return what it found out itself, `stop` heals."""

    name: str
    group: str
    what: str
    names: tuple[str, ...]  # parts of diagnostic keys or messages; () when plans must go on
    start: Callable[[Harness], str | None]
    stop: Callable[[Harness], None]
    seconds: float = 1.2
    history_s: float = 0.0


def image_fault(name: str, what: str, names: Sequence[str], hook: Callable[[Feed], ImageHook],
                *, seconds: float = 1.2, history_s: float = FRAMES_S) -> Fault:
    """Return a fault of camera messages."""
    def start(harness: Harness) -> None:
        feed: Feed = harness.feed
        feed.image_hook = hook(feed)

    def stop(harness: Harness) -> None:
        harness.feed.image_hook = None
    return Fault(name, 'camera', what, tuple(names), start, stop, seconds, history_s)


def odometry_fault(name: str, what: str, names: Sequence[str], hook: Callable[[], OdometryHook],
                   *, history_s: float = POSES_S) -> Fault:
    """Return a fault of odometry messages."""
    def start(harness: Harness) -> None:
        harness.feed.odometry_hook = hook()

    def stop(harness: Harness) -> None:
        harness.feed.odometry_hook = None
    return Fault(name, 'odometry', what, tuple(names), start, stop, history_s=history_s)


def engine_fault(name: str, what: str, *names: str, seconds: float = 1.2) -> Fault:
    """Return a fault of the planner; `name` is the word that fault_node.py knows."""
    def start(harness: Harness) -> None:
        harness.planner(name)

    def stop(harness: Harness) -> None:
        harness.planner('')
    return Fault(name, 'engine', what, names, start, stop, seconds)


def _only(camera: str | None, change: Callable[[Image], Any]) -> Callable[[Feed], ImageHook]:
    """Return a hook that changes (or with None drops) the messages of one camera, or of all."""
    def hook(name: str, message: Image) -> list[tuple[str, Any]]:
        if camera not in (None, name):
            return [(name, message)]
        changed = change(message)
        return [] if changed is None else [(name, changed)]
    return lambda feed: hook


def _filled(values: np.ndarray) -> Callable[[Image], Image]:
    """Return a change to constant pixels."""
    data = array.array('B', np.ascontiguousarray(values, np.uint8).tobytes())
    return lambda message: _with(message, data=data)


def _with(message: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def _noise(message: Image) -> Image:
    pixels = np.random.default_rng(stamp_to_ns(message.header.stamp)).integers(
        0, 256, (CAMERAS.height, CAMERAS.width, 3), dtype=np.uint8)
    return _filled(pixels)(message)  # type: ignore[no-any-return]


def _late(offset_ms: float) -> Callable[[Any], Any]:
    """Return a change of the stamp."""
    def change(message: Any) -> Any:
        message.header.stamp = ns_to_stamp(stamp_to_ns(message.header.stamp)
                                           + round(offset_ms * MS))
        return message
    return change


def _swapped(feed: Feed) -> ImageHook:
    """Exchange two cameras with their calibrations, as two cables would."""
    one, other = 'cross_left', TELE
    infos = feed.infos
    infos[one], infos[other] = infos[other], infos[one]
    exchanged = {one: other, other: one}
    return lambda name, message: [(exchanged.get(name, name), message)]


def _swap(harness: Harness) -> None:
    feed: Feed = harness.feed
    feed.image_hook = _swapped(feed)


def _restore_infos(harness: Harness) -> None:
    harness.feed.image_hook = None
    infos = harness.feed.infos
    infos['cross_left'], infos[TELE] = infos[TELE], infos['cross_left']


def _every(count: int) -> Callable[[Feed], ImageHook]:
    seen = {'n': 0}

    def hook(name: str, message: Image) -> list[tuple[str, Any]]:
        seen['n'] += name == TELE
        return [] if name == TELE and seen['n'] % count else [(name, message)]
    return lambda feed: hook


def _back_and_forth(feed: Feed) -> ImageHook:
    turn = {'n': 0}

    def hook(name: str, message: Image) -> list[tuple[str, Any]]:
        turn['n'] += name == TELE
        return [(name, _late(-150.0 if name == TELE and turn['n'] % 2 else 0.0)(message))]
    return hook


def _same_stamp(feed: Feed) -> ImageHook:
    kept: dict[str, Any] = {}

    def hook(name: str, message: Image) -> list[tuple[str, Any]]:
        message.header.stamp = kept.setdefault(name, message.header.stamp)
        return [(name, message)]
    return hook


def _broken_jpeg(message: Image) -> CompressedImage:
    return CompressedImage(header=message.header, format='jpeg',
                           data=array.array('B', b'\xff\xd8\xff\xe0' + bytes(60)))


def _garbage(message: Image) -> bytes:
    return b'\x00\x01\x00\x00' + bytes(range(200))


IMAGES = (
    image_fault('camera_drop', 'one camera stops', ('image_out_of_tolerance', 'is silent'),
                _only(TELE, lambda message: None)),
    image_fault('anchor_drop', 'the anchor camera stops', ('is silent', 'no plan for'),
                _only(ANCHOR, lambda message: None), seconds=1.6),
    image_fault('all_cameras_drop', 'all cameras stop', ('is silent', 'no plan for'),
                _only(None, lambda message: None), seconds=2.4),
    image_fault('camera_freeze', 'one picture under new stamps', ('camera_frozen',),
                _only('cross_left', _filled(np.tile(
                    np.arange(CAMERAS.width, dtype=np.uint8)[None, :, None],
                    (CAMERAS.height, 1, 3))))),
    image_fault('camera_black', 'a covered camera', ('camera_black',),
                _only(TELE, _filled(np.zeros((CAMERAS.height, CAMERAS.width, 3))))),
    image_fault('camera_noise', 'white noise', ('camera_noise',), _only(TELE, _noise)),
    image_fault('wrong_size', 'another aspect ratio', ('image_wrong_size', 'aspect'),
                _only(TELE, lambda m: _with(m, height=m.height // 2, data=m.data[
                    :len(m.data) // 2]))),
    image_fault('huge_size', '65535 x 65535 declared', ('image_decode_failed',),
                _only(TELE, lambda m: _with(m, height=65535, width=65535, step=196605))),
    image_fault('wrong_encoding', "encoding 'foo32'", ('image_decode_failed',),
                _only(TELE, lambda m: _with(m, encoding='foo32'))),
    image_fault('truncated_data', 'half of the bytes', ('image_decode_failed',),
                _only(TELE, lambda m: _with(m, data=m.data[:len(m.data) // 2]))),
    image_fault('truncated_jpeg', 'a JPEG without content on the other transport',
                ('image_decode_failed',), _only(TELE, _broken_jpeg), seconds=2.2,
                history_s=FRAMES_S + 1.0),
    image_fault('garbage_message', 'bytes that are no image message', ('messages_unreadable',),
                _only(TELE, _garbage)),
    Fault('swapped_cameras', 'camera', 'two cameras exchanged, calibration included',
          ('camera_info_',), _swap, _restore_infos, history_s=FRAMES_S),
    image_fault('stamp_future', 'anchor stamps 5 s ahead', ('stamp_in_future',),
                _only(ANCHOR, _late(5000.0)), history_s=POSES_S),
    image_fault('stamp_past', 'anchor stamps 5 s behind', ('input_too_old', 'went back'),
                _only(ANCHOR, _late(-5000.0)), history_s=POSES_S),
    image_fault('stamp_zero', 'stamps never filled', ('stamp_invalid',),
                _only(None, lambda m: _with(m, header=type(m.header)(
                    frame_id=m.header.frame_id)))),
    image_fault('stamp_not_monotonic', 'stamps that jump back and forth',
                ('image_out_of_tolerance', 'duplicate_stamp'), _back_and_forth),
    image_fault('stamp_repeated', 'the same stamp for ever', ('duplicate_stamp',), _same_stamp),
    image_fault('camera_slow', 'one camera at 2 Hz', ('image_out_of_tolerance',), _every(5)),
    image_fault('camera_skew', 'one camera 80 ms late', ('image_out_of_tolerance',),
                _only(TELE, _late(-80.0)), history_s=FRAMES_S + 0.1),
)


def _odometry(change: Callable[[Odometry], Any]) -> Callable[[], OdometryHook]:
    def hook(message: Odometry) -> list[Any]:
        changed = change(message)
        return [] if changed is None else [changed]
    return lambda: hook


def _x(value: Callable[[float], float]) -> Callable[[Odometry], Odometry]:
    def change(message: Odometry) -> Odometry:
        message.pose.pose.position.x = value(message.pose.pose.position.x)
        return message
    return change


def _turned(w: float) -> Callable[[Odometry], Odometry]:
    def change(message: Odometry) -> Odometry:
        turn = message.pose.pose.orientation
        turn.x, turn.y, turn.z, turn.w = 0.0, 0.0, 0.0, w
        return message
    return change


def _speed(value: float) -> Callable[[Odometry], Odometry]:
    def change(message: Odometry) -> Odometry:
        message.twist.twist.linear.x = value
        return message
    return change


def _frozen() -> OdometryHook:
    kept: list[float] = []

    def hook(message: Odometry) -> list[Any]:
        kept.append(message.pose.pose.position.x)
        message.pose.pose.position.x = kept[0]
        return [message]
    return hook


def _slow() -> OdometryHook:
    seen = {'n': 0}

    def hook(message: Odometry) -> list[Any]:
        seen['n'] += 1
        return [] if seen['n'] % 25 else [message]
    return hook


ODOMETRY = (
    odometry_fault('odometry_nan', 'position NaN', ('odometry_not_finite',),
                   _odometry(_x(lambda x: float('nan')))),
    odometry_fault('odometry_inf', 'speed infinite', ('odometry_not_finite',),
                   _odometry(_speed(float('inf')))),
    odometry_fault('odometry_teleport', '50 m aside', ('odometry_jump',),
                   _odometry(_x(lambda x: x + 50.0))),
    odometry_fault('odometry_far', 'position 1e300',
                   ('odometry_jump', 'odometry_contradicts_speed', 'odometry_not_finite'),
                   _odometry(_x(lambda x: 1e300))),
    odometry_fault('odometry_frozen', 'the pose stands, the twist drives',
                   ('odometry_contradicts_speed', 'odometry_jump'), _frozen),
    odometry_fault('odometry_lies', 'twist of 300 m/s', ('odometry_contradicts_speed',),
                   _odometry(_speed(300.0)), history_s=0.1),
    odometry_fault('odometry_wrong_frame', 'another frame_id', ('odometry_frame_changed',),
                   _odometry(lambda m: _with(m, header=type(m.header)(
                       stamp=m.header.stamp, frame_id='odom')))),
    odometry_fault('odometry_long_frame', 'a frame_id of 1 MB with line breaks',
                   ('odometry_frame_changed',), _odometry(lambda m: _with(m, header=type(m.header)(
                       stamp=m.header.stamp, frame_id='\x1b[2J\n' * 200_000)))),
    odometry_fault('odometry_child_frame', 'another point of the vehicle', ('child_frame_id',),
                   _odometry(lambda m: _with(m, child_frame_id='imu_link'))),
    odometry_fault('quaternion_denormal', 'a rotation of norm 1e-310', ('odometry_not_finite',),
                   _odometry(_turned(1e-310))),
    odometry_fault('quaternion_zero', 'no rotation', ('odometry_not_finite',),
                   _odometry(_turned(0.0))),
    odometry_fault('odometry_stops', 'no odometry', ('odometry_gap', 'is silent'),
                   _odometry(lambda m: None)),
    odometry_fault('odometry_sparse', '2 Hz', ('odometry_gap',), _slow),
    odometry_fault('odometry_stamp_zero', 'stamps never filled', ('stamp_invalid',),
                   _odometry(lambda m: _with(m, header=type(m.header)(frame_id='map')))),
    odometry_fault('odometry_stamp_future', 'stamps 3 s ahead',
                   ('odometry_gap', 'history_short', 'went back', 'odometry_jump'),
                   _odometry(_late(3000.0)), history_s=POSES_S + 3.0),
    odometry_fault('odometry_garbage', 'bytes that are no odometry',
                   ('odometry_gap', 'unreadable'),
                   _odometry(lambda m: b'\x00\x01\x00\x00' + bytes(40))),
)


def clock_fault(name: str, what: str, names: Sequence[str], offset_s: float, *,
                runs: bool = True, history_s: float = POSES_S) -> Fault:
    """Return a fault of /clock; the stamps follow the clock, as those of a bag do."""
    def start(harness: Harness) -> None:
        harness.feed.clock_offset_ns += round(offset_s * 1e9)
        harness.feed.clock_runs = runs

    def stop(harness: Harness) -> None:
        harness.feed.clock_runs = True
    return Fault(name, 'clock', what, tuple(names), start, stop,
                 seconds=1.2 if runs else 1.6, history_s=history_s)


CLOCK = (
    clock_fault('clock_forward', '/clock jumps 30 s ahead', ('clock jump',), 30.0),
    clock_fault('clock_back', '/clock jumps 30 s back', ('clock jump',), -30.0),
    clock_fault('clock_loop', 'a bag starts again, 5 s back', ('clock jump', 'went back'), -5.0),
    clock_fault('clock_pause', '/clock and stamps stand still', ('no plan for', 'duplicate_stamp'),
                0.0, runs=False, history_s=FRAMES_S),
)

ENGINE = (
    engine_fault('exception', 'every plan raises', 'RuntimeError'),
    engine_fault('out_of_memory', 'the GPU has no memory left', 'OutOfMemoryError'),
    engine_fault('host_memory', 'the host has no memory left', 'MemoryError'),
    engine_fault('hang', 'a plan takes 2.5 s', 'in the making', 'deadline_missed', seconds=2.6),
    engine_fault('slow', 'plans take 1.3 s', 'deadline_missed', seconds=3.0),
    engine_fault('nan_logits', 'an engine returns NaN and calls it good', 'rejected_not_finite'),
    engine_fault('nan_candidate', 'a candidate is NaN', 'rejected_not_finite'),
    engine_fault('old_stamp', 'a plan of the frame before', 'rejected_wrong_t0'),
    engine_fault('jump', 'a trajectory with a jump', 'rejected_point_jump'),
    engine_fault('behind', 'a rollout from 10.6 m behind the car', 'rejected_start_jump'),
    engine_fault('wild_curvature', 'curvature 0.9 1/m', 'rejected_curvature_out_of_bounds'),
    engine_fault('short', 'twelve points', 'rejected_wrong_shape'),
    engine_fault('endless_reasoning', 'the text does not end', 'rejected_reasoning_incomplete'),
    engine_fault('thread_death', 'SystemExit in the planning thread', 'another one was started'),
)
