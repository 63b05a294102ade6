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
Time-bounded buffers of camera frames and odometry, and the choice of one Observation by time.

Adding stores references only; decoding and resizing happen in threads of their own, once per
frame. Adding and selecting may run in different threads, selecting in one at a time. Whatever
cannot be used becomes a Skip with a name from SKIP_REASONS; nothing is replaced by a guess.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.planner.frame_store import BUFFER_FULL, FrameStore
from rspec_planner.planner.frames import CameraFrame, FrameDecoder, FrameFault, ImageSource
from rspec_planner.planner.history import (
    extrapolate_pose,
    history_stamps,
    resample_poses,
    to_local,
)
from rspec_planner.planner.navigation_text import navigation_fault, REFUSED
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.timeline import SECOND_NS, Timeline
from rspec_planner.planner.tokenizer import TextTokenizer

SKIP_REASONS = (
    'stamp_invalid', 'input_too_old', 'camera_missing', 'image_out_of_tolerance',
    'image_decode_failed', 'image_wrong_size', 'odometry_missing', 'odometry_not_finite',
    'odometry_frame_changed', 'odometry_gap', 'history_short', BUFFER_FULL,
)

_MS = 1_000_000

#: longest waits for images and for odometry that the parameters allow, after the age was judged
_WAIT_MS = 400.0

T = TypeVar('T')


@dataclass(frozen=True)
class Skip:
    """Why no Observation could be made; `detail` names the input, the value and the limit."""

    reason: str  # one of SKIP_REASONS
    detail: str


@dataclass(frozen=True)
class SelectionLimits:
    """How far inputs may be from the ideal stamps."""

    image_tolerance_ms: float = 50.0
    odometry_max_gap_ms: float = 100.0
    odometry_max_extrapolation_ms: float = 20.0  # at constant speed and turn rate
    max_input_age_ms: float = 300.0
    aspect_tolerance: float = 0.02  # relative difference of width / height from the model's
    image_window_s: float = 2.0  # of decoded frames; others are held as long as `held_s` says
    image_buffer_mib: float = 512.0  # of frames that are not decoded
    odometry_window_s: float = 3.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not np.isfinite(value) or value < 0:
                raise ConfigurationError(f'{name}: {value}, must be finite and not negative')

    def held_s(self, frames: int) -> float:
        """Return how far before the newest frame a selection of `frames` a camera can reach."""
        reach_ms = self.image_tolerance_ms + self.max_input_age_ms + _WAIT_MS
        return min(self.image_window_s, (frames - 1) / 10 + reach_ms / 1e3)


class _Refused(Exception):
    """Carries a Skip out of the selection."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.skip = Skip(reason, detail)


@dataclass(frozen=True)
class _Pose:
    """One odometry sample: x y z, quaternion x y z w, speed."""

    values: tuple[float, ...]  # (8,)
    frame_id: str


class ObservationBuffer:
    """Collects inputs as they come and selects what belongs to one t0."""

    def __init__(self, profile: ProfileConfig, limits: SelectionLimits | None = None,
                 tokenizer: TextTokenizer | None = None) -> None:
        self.cameras = profile.cameras
        self._num_poses = profile.history.num_poses
        self._limits = limits or SelectionLimits()
        self._lock = Lock()
        self.decoder = FrameDecoder(profile.cameras, self._limits.aspect_tolerance)
        #: inputs that were not stored, by reason: 'duplicate_stamp', 'stamp_invalid', ...
        self.dropped: Counter[str] = Counter()
        self._frames = FrameStore(profile.cameras, self._limits.image_window_s,
                                  self._limits.held_s(profile.cameras.frames),
                                  round(self._limits.image_buffer_mib * 2**20), self.dropped)
        self._poses = Timeline[_Pose](self._limits.odometry_window_s)
        self._bad_poses = Timeline[str](self._limits.odometry_window_s)
        self._bad_stamps: dict[str, int] = {}
        self._refused_cameras: dict[str, Skip] = {}
        self._route_fault = partial(navigation_fault, profile=profile, tokenizer=tokenizer)
        self._navigation_text = self._cleared = ''

    def add_image(self, camera: str, stamp_ns: int, image: ImageSource, *, size: int = 0,
                  expected_ns: int | None = None) -> None:
        """
        Store a frame: (H, W, 3) uint8 RGB, or a callable of `size` bytes that returns it.

        The callable is called once at most, in another thread: at once when the frame is the one
        that a selection at `expected_ns` takes, else when a selection takes it. An array is kept
        by reference and must not be written to afterwards.
        """
        if camera not in self._frames:
            raise ConfigurationError(
                f'camera {camera!r} is not in the profile; it has {", ".join(self._frames.names)}')
        frame = CameraFrame(image, size if callable(image) else image.nbytes)
        with self._lock:
            if not self._stamp_is_valid(camera, stamp_ns):
                return
            if not self._frames.insert(camera, stamp_ns, frame):
                self.dropped['duplicate_stamp'] += 1
            elif expected_ns is not None \
                    and abs(stamp_ns - expected_ns) <= self._settled_ns(camera):
                self.decoder.start(camera, frame)

    def allow_age(self, max_input_age_ms: float) -> None:
        """Hold frames long enough for a selection whose t0 is this old."""
        self._limits = replace(self._limits, max_input_age_ms=max_input_age_ms)
        with self._lock:
            self._frames.held_s = self._limits.held_s(self.cameras.frames)

    def add_pose(self, stamp_ns: int, position: Sequence[float] | NDArray[np.float64],
                 quaternion_xyzw: Sequence[float] | NDArray[np.float64], speed_mps: float,
                 frame_id: str) -> None:
        """
        Store one odometry sample: position (3,) m and rotation of the ego in `frame_id`.

        A sample with a value that is not finite, or without a rotation, is kept as a named
        fault: every t0 whose history it touches is skipped.
        """
        values = (*map(float, position), *map(float, quaternion_xyzw), float(speed_mps))
        fault = _pose_fault(values)
        with self._lock:
            if not self._stamp_is_valid('odometry', stamp_ns):
                return
            if fault:
                self.dropped['odometry_not_finite'] += 1
                self._bad_poses.insert(stamp_ns, fault)
            else:
                self._store(self._poses, stamp_ns, _Pose(values, frame_id))

    def set_navigation_text(self, text: str) -> str:
        """
        Set the text that later observations carry, '' for none; return why it is refused, or ''.

        A refused one is counted, and planning goes on with the last one that was accepted.
        """
        fault = self._route_fault(text)
        with self._lock:
            if fault:
                self.dropped[REFUSED] += 1
            else:
                self._navigation_text = text.strip()
        return fault

    def refuse_camera(self, camera: str, skip: Skip | None) -> None:
        """Skip every t0 for a reason that lies in a camera itself; None accepts it again."""
        with self._lock:
            self._refused_cameras.pop(camera, None)
            if skip is not None:
                self._refused_cameras[camera] = skip

    def clear(self, reason: str) -> None:
        """Forget frames and poses, for example after a clock jump; `reason` explains skips."""
        with self._lock:
            self._frames.clear()
            self._poses.clear()
            self._bad_poses.clear()
            self._bad_stamps.clear()
            self._cleared = reason

    def newest_stamp_ns(self, name: str) -> int | None:
        """Return the newest stamp of a camera or of 'odometry', None before the first."""
        timeline = self._poses if name == 'odometry' else self._frames[name]
        with self._lock:
            return timeline.stamps[-1] if timeline.stamps else None

    def frame_at(self, camera: str, stamp_ns: int) -> NDArray[np.uint8] | None:
        """Return the pixels that a plan at `stamp_ns` saw of a camera, None when they are gone."""
        with self._lock:
            frames = self._frames[camera]
            if not frames.stamps:
                return None
            return frames.entries[frames.nearest(stamp_ns)].decoded

    def awaited_stamps(self, t0_ns: int) -> dict[str, int]:
        """
        Return the stamp that each camera must have reached before its frame at t0 is settled.

        A newest frame less than half a period before t0 is nearer than the next one will be.
        """
        with self._lock:
            return {name: t0_ns - self._settled_ns(name) for name in self.cameras.names}

    def prepare(self, t0_ns: int) -> None:
        """Decode what a selection at t0 will use; whatever is wrong shows at the selection."""
        with suppress(_Refused, FrameFault):
            with self._lock:
                chosen = {name: self._choose(name, t0_ns)[1] for name in self.cameras.names}
            self.decoder.finish(chosen)

    def select(self, t0_ns: int, now_ns: int | None = None) -> Observation | Skip:
        """
        Return the Observation at `t0_ns`, or why there is none.

        With `now_ns` (same clock as the stamps) an old t0 is refused too.
        """
        try:
            self._check_age(t0_ns, now_ns)
            with self._lock:
                chosen = {name: self._choose(name, t0_ns) for name in self.cameras.names}
                text = self._navigation_text
                pose, local, speed, frame_id = self._ego(t0_ns)
                ages = {name: (t0_ns - stamps[-1]) / _MS for name, (stamps, _) in chosen.items()}
                ages['odometry'] = (t0_ns - self._poses.stamps[-1]) / _MS
            images = self.decoder.stack({name: frames for name, (_, frames) in chosen.items()})
        except _Refused as refused:
            return refused.skip
        except FrameFault as fault:
            return Skip(fault.reason, fault.detail)
        stamps = np.array([stamps for stamps, _ in chosen.values()], dtype=np.int64)
        return Observation(
            t0_ns=t0_ns, camera_names=self.cameras.names, images=images,
            image_stamps_ns=stamps, ego_poses=local, ego_pose_at_t0=pose,
            odometry_frame=frame_id, speed_mps=speed, navigation_text=text, ages_ms=ages)

    def _settled_ns(self, camera: str) -> int:
        """Return how near to t0 a frame is the nearest one, whatever still comes."""
        return min(int(self._limits.image_tolerance_ms * _MS),
                   self._frames[camera].half_period_ns())

    def _stamp_is_valid(self, name: str, stamp_ns: int) -> bool:
        if stamp_ns > 0:
            self._bad_stamps.pop(name, None)
            return True
        self._bad_stamps[name] = stamp_ns
        self.dropped['stamp_invalid'] += 1
        return False

    def _store(self, timeline: Timeline[T], stamp_ns: int, entry: T) -> None:
        if not timeline.insert(stamp_ns, entry):
            self.dropped['duplicate_stamp'] += 1

    def _check_age(self, t0_ns: int, now_ns: int | None) -> None:
        if t0_ns <= 0:
            raise _Refused('stamp_invalid', f't0: stamp {t0_ns} ns, must be positive; '
                           'fill header.stamp of the anchor camera')
        age_ms = (now_ns - t0_ns) / _MS if now_ns is not None else 0.0
        if age_ms > self._limits.max_input_age_ms:
            raise _Refused('input_too_old', f't0 is {age_ms:.1f} ms old, limit '
                           f'{self._limits.max_input_age_ms:.1f} ms')

    def _refuse_missing(self, name: str, reason: str, noun: str) -> _Refused:
        """Return the refusal of an input without any usable entry."""
        if name in self._bad_stamps:
            return _Refused('stamp_invalid', f'{noun}: stamp {self._bad_stamps[name]} ns, must '
                            'be positive; fill header.stamp')
        since = f' since reset: {self._cleared}' if self._cleared else ''
        return _Refused(reason, f'{noun}: nothing received{since}; check the topic and its QoS')

    def _choose(self, camera: str, t0_ns: int) -> tuple[list[int], list[CameraFrame]]:
        """Return stamps and frames nearest to t0-0.3 ... t0 of one camera."""
        if camera in self._refused_cameras:
            fault = self._refused_cameras[camera]
            raise _Refused(fault.reason, fault.detail)
        timeline = self._frames[camera]
        if not timeline.stamps:
            raise self._refuse_missing(camera, 'camera_missing', f'camera {camera}')
        stamps, frames = [], []
        for target in history_stamps(t0_ns, self.cameras.frames).tolist():
            index = timeline.nearest(target)
            off_ms = abs(timeline.stamps[index] - target) / _MS
            if off_ms > self._limits.image_tolerance_ms:
                raise self._refuse_distance(camera, timeline.stamps[0], t0_ns, target, off_ms)
            stamps.append(timeline.stamps[index])
            frames.append(timeline.entries[index])
        return stamps, frames

    def _refuse_distance(self, camera: str, oldest_ns: int, t0_ns: int, target_ns: int,
                         off_ms: float) -> _Refused:
        """Return the refusal of a frame time that no frame is near; a start is no fault."""
        limit_ms = self._limits.image_tolerance_ms
        covered_ms = (t0_ns - oldest_ns) / _MS
        if oldest_ns > target_ns and covered_ms >= -limit_ms:
            return _Refused('history_short', f'camera {camera} covers '
                            f'{max(covered_ms, 0.0) / 1e3:.2f} s before t0, needs '
                            f'{(self.cameras.frames - 1) / 10:.2f} s')
        return _Refused('image_out_of_tolerance', f'camera {camera}: nearest frame to '
                        f't0-{(t0_ns - target_ns) / SECOND_NS:.1f} s is {off_ms:.1f} ms away, '
                        f'limit {limit_ms:.1f} ms')

    def _ego(self, t0_ns: int) -> tuple[NDArray[np.float64], NDArray[np.float64], float, str]:
        """Return pose at t0, local history, speed and frame id, all at the same t0."""
        query = history_stamps(t0_ns, self._num_poses)
        stamps, values, frame_id = self._odometry(int(query[0]), t0_ns)
        poses = resample_poses(stamps, values[:, :3], values[:, 3:7], query)
        speed = float(np.interp(0.0, (stamps - t0_ns).astype(np.float64), values[:, 7]))
        return poses[-1], to_local(poses, poses[-1]), speed, frame_id

    def _odometry(self, start_ns: int, t0_ns: int) \
            -> tuple[NDArray[np.int64], NDArray[np.float64], str]:
        """Return the samples that bracket start ... t0, or refuse."""
        self._check_faults(start_ns, t0_ns)
        stamps = self._poses.stamps
        if not stamps:
            raise self._refuse_missing('odometry', 'odometry_missing', 'odometry')
        if stamps[0] > start_ns:
            covered = max(t0_ns - stamps[0], 0) / SECOND_NS
            raise _Refused('history_short', f'odometry covers {covered:.2f} s before t0, needs '
                           f'{(t0_ns - start_ns) / SECOND_NS:.2f} s')
        first = bisect_left(stamps, start_ns + 1) - 1
        last = min(bisect_left(stamps, t0_ns), len(stamps) - 1)
        entries = self._poses.entries[first:last + 1]
        self._check_frames(stamps[first:last + 1], entries, t0_ns)
        times = np.array(stamps[first:last + 1], dtype=np.int64)
        values = np.array([entry.values for entry in entries])
        if times[-1] < t0_ns:
            values = np.concatenate([values, self._extrapolated(times, values, t0_ns)])
            times = np.append(times, np.int64(t0_ns))
        self._check_gaps(times, t0_ns)
        return times, values, entries[-1].frame_id

    def _check_faults(self, start_ns: int, t0_ns: int) -> None:
        bad = self._bad_poses
        inside = [i for i, s in enumerate(bad.stamps) if start_ns <= s <= t0_ns]
        if inside:
            before = (t0_ns - bad.stamps[inside[-1]]) / SECOND_NS
            raise _Refused('odometry_not_finite', f'odometry: {bad.entries[inside[-1]]} '
                           f'{before:.2f} s before t0 ({len(inside)} such samples); check the '
                           'localization')

    def _check_frames(self, stamps: list[int], entries: list[_Pose], t0_ns: int) -> None:
        newest = entries[-1].frame_id
        for stamp, entry in zip(reversed(stamps), reversed(entries)):
            if entry.frame_id != newest:
                raise _Refused(
                    'odometry_frame_changed', f'odometry: frame_id changed from '
                    f'{entry.frame_id!r} to {newest!r} {(t0_ns - stamp) / SECOND_NS:.2f} s before '
                    't0; wait for a whole history in one frame')

    def _extrapolated(self, times: NDArray[np.int64], values: NDArray[np.float64],
                      t0_ns: int) -> NDArray[np.float64]:
        """Return one sample (1, 8) at t0, a little after the newest one."""
        missing_ms = (t0_ns - int(times[-1])) / _MS
        limit_ms = self._limits.odometry_max_extrapolation_ms
        if missing_ms > limit_ms:
            raise _Refused('odometry_gap', f'odometry ends {missing_ms:.1f} ms before t0, '
                           f'limit {limit_ms:.1f} ms')
        speed = values[-1, 7]
        position, rotation = extrapolate_pose(times, values[:, :3], values[:, 3:7], speed, t0_ns)
        return np.concatenate([position, rotation, [speed]])[None]

    def _check_gaps(self, times: NDArray[np.int64], t0_ns: int) -> None:
        gaps = np.diff(times)
        worst = int(np.argmax(gaps))
        gap_ms = float(gaps[worst]) / _MS
        if gap_ms > self._limits.odometry_max_gap_ms:
            before_s = (t0_ns - int(times[worst])) / SECOND_NS
            raise _Refused('odometry_gap', f'odometry: {gap_ms:.1f} ms without a sample '
                           f'{before_s:.2f} s before t0, limit '
                           f'{self._limits.odometry_max_gap_ms:.1f} ms')


def _pose_fault(values: tuple[float, ...]) -> str:
    """Return what is wrong with x y z, quaternion, speed, or '' when they are usable."""
    names = ['position'] * 3 + ['rotation'] * 4 + ['speed']
    for name, value in zip(names, values):
        if not np.isfinite(value):
            return f'{name} is {value}'
    norm = sum(q * q for q in values[3:7]) ** 0.5
    return '' if norm > 0.1 else f'rotation quaternion has norm {norm:.3g}'
