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
Clips of a downloaded PhysicalAI-Autonomous-Vehicles folder as observations.

The folder is read as it is downloaded (its own `features.csv` says where things are):
`features.csv` maps a feature to the path of its chunks and to the files of a clip inside a chunk's
zip, `clip_index.parquet` maps a clip to its chunk. Used are `egomotion` (poses at about 100 Hz,
microseconds) and the `camera_*` features (an mp4 and the stamps of its frames). As upstream does,
poses are interpolated at the exact stamps and a frame is the last one before its stamp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import csv
from dataclasses import dataclass
import io
import json
from pathlib import Path
import tempfile
from typing import Any
import zipfile

import cv2
import numpy as np
from numpy.typing import NDArray

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.model.config import CameraConfig, ProfileConfig
from rspec_planner.model.image_size import resize_bicubic, size_fault
from rspec_planner.planner.camera_roles import BY_NAME
from rspec_planner.planner.frames import averaged_down
from rspec_planner.planner.history import history_stamps, resample_poses, to_local
from rspec_planner.planner.observation import Observation

Ints = NDArray[np.int64]

EGOMOTION = 'egomotion'
#: the history reaches 1.5 s back; upstream asks for t0 behind 1.6 s
FIRST_T0_S = 1.6
DEFAULT_T0_S = 5.1
_ASPECT_TOLERANCE = 0.02


@dataclass(frozen=True)
class _Feature:
    """Where a feature of the data set lies."""

    chunk_path: str  # with {chunk_id}
    files: dict[str, str]  # role -> name inside the zip, with {clip_id}


class PhysicalAiFolder:
    """One downloaded folder; only clips whose chunks are all there are listed."""

    def __init__(self, root: str | Path, cameras: CameraConfig) -> None:
        """Read the two index files; InputError names the one that is missing or damaged."""
        self.root, self.cameras = Path(root), cameras
        self._features = _read_features(self.root / 'features.csv')
        self._chunks = _read_index(self.root / 'clip_index.parquet')
        self.camera_features = tuple(_feature_name(name) for name in cameras.names)
        for name in (EGOMOTION, *self.camera_features):
            if name not in self._features:
                raise InputError(f'{self.root / "features.csv"} knows no feature {name}; '
                                 "download the features of the checkpoint's cameras")

    @property
    def clips(self) -> list[str]:
        """Return the ids of the clips that can be read, in order."""
        needed = (EGOMOTION, *self.camera_features)
        return [clip for clip, chunk in sorted(self._chunks.items())
                if all(self._archive(name, chunk).is_file() for name in needed)]

    def observations(self, clip: str, profile: ProfileConfig,
                     t0_s: Sequence[float]) -> Iterator[Observation]:
        """
        Yield what the planner would see at these times since the clip's start.

        Times that the recording does not cover are left out. InputError names a broken file.
        """
        motion = self._table(EGOMOTION, clip, 'egomotion')
        stamps = np.asarray(motion['timestamp'], dtype=np.int64) * 1000
        videos = [self._video(name, clip) for name in self.camera_features]
        steps = history_stamps(0, self.cameras.frames)
        covered = [t0 for t0 in (round(s * 1e9) for s in t0_s) if _covers(
            t0, stamps, [video.stamps for video in videos], profile)]
        wanted = [np.array([_frame_before(v.stamps, t0 + steps) for t0 in covered],
                           dtype=np.int64).reshape(-1, len(steps)) for v in videos]
        pixels = [video.read(np.unique(frames), self.cameras, name) for video, frames, name
                  in zip(videos, wanted, self.camera_features)]
        for row, t0 in enumerate(covered):
            images = np.stack([np.stack([shown[int(k)] for k in frames[row]])
                               for shown, frames in zip(pixels, wanted)])
            chosen = np.stack([video.stamps[frames[row]] for video, frames
                               in zip(videos, wanted)])
            yield _observation(profile, motion, stamps, t0, images, chosen)

    def _archive(self, feature: str, chunk: int) -> Path:
        return self.root / self._features[feature].chunk_path.format(chunk_id=chunk)

    def _member(self, feature: str, clip: str, role: str) -> bytes:
        """Return one file of a clip out of its chunk's zip."""
        path = self._archive(feature, self._chunks[clip])
        try:
            name = self._features[feature].files[role].format(clip_id=clip)
            with zipfile.ZipFile(path) as archive:
                return archive.read(name)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(f'{path}: no {role} of clip {clip} ({error}); download the chunk '
                             'again') from error

    def _table(self, feature: str, clip: str, role: str) -> dict[str, Any]:
        path = self._archive(feature, self._chunks[clip])
        return _parquet(self._member(feature, clip, role), f'{path}: {role} of clip {clip}')

    def _video(self, feature: str, clip: str) -> _Video:
        times = self._table(feature, clip, 'frame_timestamps')['timestamp']
        return _Video(self._member(feature, clip, 'video'),
                      np.asarray(times, dtype=np.int64) * 1000, f'{feature} of clip {clip}')


@dataclass(frozen=True)
class _Video:
    """The bytes of an mp4 and the stamps of its frames, nanoseconds."""

    data: bytes
    stamps: Ints
    label: str

    def read(self, frames: Ints, cameras: CameraConfig, feature: str) -> dict[int, np.ndarray]:
        """
        Return frame number -> (H, W, 3) RGB at the model's size.

        The video is decoded from its start: seeking in a stream with B-frames is not exact.
        """
        found: dict[int, np.ndarray] = {}
        with tempfile.NamedTemporaryFile(suffix='.mp4') as file:
            file.write(self.data)
            file.flush()
            video = cv2.VideoCapture(file.name)
            try:
                for number in range(int(frames[-1]) + 1 if len(frames) else 0):
                    if not video.grab():
                        break
                    if number in frames:
                        image = cv2.cvtColor(video.retrieve()[1], cv2.COLOR_BGR2RGB)
                        found[number] = _fit(np.asarray(image, np.uint8), cameras, feature)
            finally:
                video.release()
        missing = sorted(set(map(int, frames)) - set(found))
        if missing:
            raise InputError(f'{self.label}: frame {missing[0]} cannot be decoded, its stamps '
                             f'name {len(self.stamps)}; download the chunk again')
        return found


def default_times(seconds: float, every_s: float) -> list[float]:
    """Return t0 = 5.1 s, or every `every_s` seconds from 1.6 s on where that is above 0."""
    if every_s <= 0.0:
        return [DEFAULT_T0_S]
    return list(np.arange(FIRST_T0_S + every_s, seconds, every_s))


def _feature_name(camera: str) -> str:
    role = BY_NAME.get(camera)
    if role is None:
        raise ConfigurationError(f"camera {camera!r} is none of the data set's "
                                 f'({", ".join(BY_NAME)}); use a profile of the Alpamayo family')
    return f'camera_{camera}_{role.fov_deg:.0f}fov'


def _read_features(path: Path) -> dict[str, _Feature]:
    try:
        with path.open(newline='', encoding='utf-8') as stream:
            found = {row['feature']: _Feature(row['chunk_path'],
                                              json.loads(row['clip_files_in_zip'] or '{}'))
                     for row in csv.DictReader(stream)}
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f'{path}: cannot be read ({error}); give the root of a '
                         'PhysicalAI-Autonomous-Vehicles download') from error
    for name, feature in found.items():
        if Path(feature.chunk_path).is_absolute() or '..' in Path(feature.chunk_path).parts:
            raise InputError(f'{path}: chunk_path of {name} is {feature.chunk_path!r}, which '
                             'leads out of the folder; download the file again')
    return found


def _read_index(path: Path) -> dict[str, int]:
    """Return clip -> chunk."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f'{path}: cannot be read ({error.strerror}); give the root of a '
                         'PhysicalAI-Autonomous-Vehicles download') from error
    table = _parquet(data, str(path))
    ids = table.get('clip_id', table.get('__index_level_0__'))
    if ids is None or 'chunk' not in table:
        raise InputError(f'{path}: no columns clip_id and chunk, it has {", ".join(table)}')
    return {str(clip): int(chunk) for clip, chunk in zip(ids, table['chunk'])}


def _parquet(data: bytes, label: str) -> dict[str, Any]:
    """Return column -> values of a parquet file."""
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ConfigurationError('PhysicalAI-AV folders hold parquet files: pip install -r '
                                 'requirements-data.txt') from error
    try:
        table = parquet.read_table(io.BytesIO(data))
    except (ArrowInvalid, OSError) as error:
        raise InputError(f'{label}: not a parquet file ({str(error).splitlines()[0]}); download '
                         'it again') from error
    return {name: table[name].to_numpy() for name in table.column_names}


def _covers(t0: int, motion: Ints, videos: Sequence[Ints], profile: ProfileConfig) -> bool:
    """Return whether history and frames of t0 (ns since the start) were recorded."""
    first = history_stamps(t0, profile.history.num_poses)[0]
    oldest = history_stamps(t0, profile.cameras.frames)[0]
    return bool(t0 >= FIRST_T0_S * 1e9 and motion[0] <= first and t0 <= motion[-1]
                and all(v[0] <= oldest and t0 <= v[-1] for v in videos))


def _frame_before(stamps: Ints, wanted: Ints) -> Ints:
    """Return the number of the last frame at or before each stamp."""
    return (np.searchsorted(stamps, wanted, side='right') - 1).astype(np.int64)


def _fit(image: np.ndarray, cameras: CameraConfig, feature: str) -> np.ndarray:
    rows, cols = image.shape[:2]
    fault = size_fault(cameras, rows, cols, _ASPECT_TOLERANCE)
    if fault:
        raise InputError(f'{feature}: {fault}')
    resize = resize_bicubic if cameras.resize == 'bicubic' else averaged_down
    return resize(image, cameras.height, cameras.width)


def _observation(profile: ProfileConfig, motion: dict[str, Any], stamps: Ints, t0: int,
                 images: np.ndarray, frames: Ints) -> Observation:
    positions = np.stack([motion[axis] for axis in 'xyz'], axis=1).astype(np.float64)
    turns = np.stack([motion[f'q{axis}'] for axis in 'xyzw'], axis=1).astype(np.float64)
    speeds = np.sqrt(sum(np.square(np.asarray(motion[f'v{axis}'], np.float64))
                         for axis in 'xyz'))
    poses = resample_poses(stamps, positions, turns,
                           history_stamps(t0, profile.history.num_poses))
    return Observation(
        t0_ns=t0, camera_names=profile.cameras.names, images=images, image_stamps_ns=frames,
        ego_poses=to_local(poses, poses[-1]), ego_pose_at_t0=poses[-1], odometry_frame='map',
        speed_mps=float(np.interp(t0, stamps, speeds)))
