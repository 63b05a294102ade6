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
"""Clips of a folder that is laid out like the PhysicalAI-Autonomous-Vehicles download."""

from __future__ import annotations

from dataclasses import replace
import io
import json
import zipfile

import cv2
import numpy as np
import pyarrow
from pyarrow import parquet
import pytest

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.model.config import alpamayo_r1, CameraConfig, tiny, TokenIds
from rspec_planner.train.cache_parts import load_cache
from rspec_planner.train.cache_target import cache_target
from rspec_planner.train.physical_ai import default_times, PhysicalAiFolder

PROFILE = replace(tiny(TokenIds(*range(15)), 1000), cameras=CameraConfig(height=32, width=64))
FEATURES = {0: 'camera_cross_left_120fov', 1: 'camera_front_wide_120fov',
            2: 'camera_cross_right_120fov', 3: 'camera_front_tele_30fov'}
CLIPS = {'aaaa': 0, 'bbbb': 0, 'cccc': 7}
SPEED, YAW_RATE, SECONDS, FPS = 6.0, 0.1, 8.0, 30.0
#: the cameras start one after the other
OFFSET_US = {name: 1000 * k for k, name in FEATURES.items()}


def table(**columns):
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue()


def egomotion():
    """Return a constant turn at 100 Hz from the origin, microseconds since the clip's start."""
    t = np.arange(-0.05, SECONDS, 0.01)
    yaw, zero = YAW_RATE * t, np.zeros_like(t)
    radius = SPEED / YAW_RATE
    return table(timestamp=np.round(t * 1e6).astype(np.int64), qx=zero, qy=zero,
                 qz=np.sin(yaw / 2), qw=np.cos(yaw / 2), x=radius * np.sin(yaw),
                 y=radius * (1 - np.cos(yaw)), z=zero, vx=SPEED * np.cos(yaw),
                 vy=SPEED * np.sin(yaw), vz=zero)


def frame_stamps(feature):
    return OFFSET_US[feature] + np.round(np.arange(int(SECONDS * FPS)) * 1e6 / FPS).astype(
        np.int64)


def video(path, size=(64, 128)):
    """Return an mp4 whose frame k is grey of level 30 (k mod 8)."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*'mp4v'), FPS, size[::-1])
    for k in range(int(SECONDS * FPS)):
        writer.write(np.full((*size, 3), 30 * (k % 8), np.uint8))
    writer.release()
    return path.read_bytes()


def write_folder(root, size=(64, 128)):
    root.mkdir(exist_ok=True)
    film = video(root / 'film.mp4', size)
    rows = ['feature,directory,chunk_path,clip_files_in_zip']
    chunks = {}
    for feature in (*FEATURES.values(), 'egomotion'):
        kind = 'camera' if feature.startswith('camera') else 'labels'
        inside = {'video': f'{{clip_id}}.{feature}.mp4',
                  'frame_timestamps': f'{{clip_id}}.{feature}.timestamps.parquet'} \
            if kind == 'camera' else {'egomotion': '{clip_id}.egomotion.parquet'}
        path = f'{kind}/{feature}/{feature}.chunk_{{chunk_id:04d}}.zip'
        quoted = json.dumps(inside).replace('"', '""')
        rows.append(f'{feature},{kind},{path},"{quoted}"')
        chunks[feature] = (path, inside)
    (root / 'features.csv').write_text('\n'.join(rows) + '\n')
    (root / 'clip_index.parquet').write_bytes(table(
        clip_id=list(CLIPS), chunk=list(CLIPS.values())))
    for feature, (path, inside) in chunks.items():
        archive = root / path.format(chunk_id=0)
        archive.parent.mkdir(parents=True)
        with zipfile.ZipFile(archive, 'w') as out:
            for clip in ('aaaa', 'bbbb'):
                for role, name in inside.items():
                    out.writestr(name.format(clip_id=clip), {
                        'video': film, 'egomotion': egomotion(),
                        'frame_timestamps': table(timestamp=frame_stamps(feature))
                        if kind_of(feature) else b''}[role])
    return root


def kind_of(feature):
    return feature.startswith('camera')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp('pai') / 'root')


def test_only_clips_whose_chunks_are_there_are_listed(folder):
    assert PhysicalAiFolder(folder, PROFILE.cameras).clips == ['aaaa', 'bbbb']


def test_frames_are_the_last_before_their_stamps_and_poses_interpolated(folder):
    reader = PhysicalAiFolder(folder, PROFILE.cameras)
    seen = list(reader.observations('aaaa', PROFILE, [1.0, 5.1, 6.0333, 9.0]))
    assert [s.t0_ns for s in seen] == [5_100_000_000, 6_033_300_000]
    first = seen[0]
    assert first.images.shape == (4, 4, 32, 64, 3)
    for row, name in enumerate(FEATURES.values()):
        stamps = frame_stamps(name) * 1000
        for column, back in enumerate((3, 2, 1, 0)):
            wanted = first.t0_ns - back * 100_000_000
            number = int((stamps <= wanted).sum()) - 1
            assert first.image_stamps_ns[row, column] == stamps[number] <= wanted
            shown = first.images[row, column].astype(int)
            assert np.abs(shown - 30 * (number % 8)).max() <= 10  # the codec's loss
    steps = np.arange(-15, 1) * 0.1
    radius = SPEED / YAW_RATE
    assert np.allclose(first.ego_poses[:, 0, 3], radius * np.sin(YAW_RATE * steps), atol=1e-4)
    assert np.allclose(first.ego_poses[:, 1, 3], radius * (1 - np.cos(YAW_RATE * steps)),
                       atol=1e-4)
    assert np.allclose(first.ego_poses[-1], np.eye(4), atol=1e-12)
    assert first.speed_mps == pytest.approx(SPEED, abs=1e-3)


def test_times_of_a_clip():
    assert default_times(20.0, 0.0) == [5.1]
    times = default_times(8.0, 2.0)
    assert np.allclose(times, [3.6, 5.6, 7.6])


def test_a_folder_becomes_a_cache(folder, tmp_path):
    """The shipped target reads 384x192; frames of 2:1 are resized to it."""
    made = cache_target(tmp_path / 'cache', target='tiny', physical_ai=folder, every_s=2.0,
                        device='cpu', batch=2, val_share=0.5)
    cache = load_cache(made['cache'])
    assert made['clips'] == len(cache) == 6
    assert cache.names == tuple(f'{clip}/{t0}00000000' for clip in ('aaaa', 'bbbb')
                                for t0 in (36, 56, 76))
    assert {s for n, s in zip(cache.names, cache.splits) if n.startswith('aaaa')} == {'val'}
    assert {s for n, s in zip(cache.names, cache.splits) if n.startswith('bbbb')} == {'train'}
    assert int(cache.lengths.min()) > 0


def test_a_clip_that_cannot_be_read_ends_no_run(tmp_path):
    root = write_folder(tmp_path / 'root')
    archive = next(root.glob('labels/egomotion/*.zip'))
    with zipfile.ZipFile(archive, 'w') as out:
        out.writestr('bbbb.egomotion.parquet', egomotion())
    made = cache_target(tmp_path / 'cache', target='tiny', physical_ai=root, device='cpu')
    assert (made['clips'], made['skipped']) == (1, 1)
    archive.write_bytes(b'no zip')
    with pytest.raises(InputError, match='no clip could be read .*no egomotion of clip bbbb'):
        cache_target(tmp_path / 'none', target='tiny', physical_ai=root, device='cpu')


@pytest.mark.parametrize('breaking, words', [
    (lambda root: (root / 'features.csv').unlink(), 'features.csv'),
    (lambda root: (root / 'clip_index.parquet').write_bytes(b'no'), 'not a parquet file'),
    (lambda root: (root / 'features.csv').write_text('feature,chunk_path\n'), 'knows no feature'),
    (lambda root: (root / 'features.csv').write_text(
        'feature,chunk_path,clip_files_in_zip\negomotion,../a.zip,{}\n'), 'out of the folder')])
def test_a_broken_index_is_named(tmp_path, breaking, words):
    root = write_folder(tmp_path / 'root')
    breaking(root)
    with pytest.raises(InputError, match=words) as error:
        PhysicalAiFolder(root, PROFILE.cameras)
    assert '\n' not in str(error.value)


def test_a_broken_chunk_is_named(tmp_path):
    root = write_folder(tmp_path / 'root')
    next(root.glob('labels/egomotion/*.zip')).write_bytes(b'no zip')
    reader = PhysicalAiFolder(root, PROFILE.cameras)
    with pytest.raises(InputError, match='egomotion.chunk_0000.zip: no egomotion of clip aaaa'):
        list(reader.observations('aaaa', PROFILE, [5.1]))


def test_a_frame_of_another_shape_is_named(folder):
    reader = PhysicalAiFolder(folder, alpamayo_r1().cameras)
    with pytest.raises(InputError, match='128x64 pixels'):
        list(reader.observations('aaaa', alpamayo_r1(), [5.1]))


def test_a_camera_that_the_data_set_has_not_is_refused(folder):
    with pytest.raises(ConfigurationError, match="camera 'roof'"):
        PhysicalAiFolder(folder, CameraConfig(names=('roof',), ids=(9,)))
