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
Which topic of a bag is which camera: default names, a mapping file, and helpful refusals.

A missing input is never replaced by a topic that merely looks right; the refusal proposes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
import difflib
from pathlib import Path
import re
from typing import Any

from rspec_planner.command_line import (
    camera_topic,
    info_topic,
    NAVIGATION_TOPIC,
    ODOMETRY_TOPIC,
)
from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.yaml_file import read_yaml

IMAGE_TYPES = ('sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage')
INFO_TYPE = 'sensor_msgs/msg/CameraInfo'
ODOMETRY_TYPE = 'nav_msgs/msg/Odometry'
TEXT_TYPE = 'std_msgs/msg/String'


@dataclass(frozen=True)
class TopicMap:
    """Topics of one bag."""

    cameras: Mapping[str, str]  # topic -> camera
    odometry: str
    navigation_text: str = ''  # '' when the bag has none
    infos: Mapping[str, str] = field(default_factory=dict)  # CameraInfo topic -> camera

    @property
    def all(self) -> tuple[str, ...]:
        """Return every topic that planning reads."""
        text = (self.navigation_text,) if self.navigation_text else ()
        return (*self.cameras, self.odometry, *text, *self.infos)


@dataclass(frozen=True)
class TopicNames:
    """Names that a mapping file gives; what it leaves out keeps its default."""

    cameras: Mapping[str, str]  # camera -> topic
    odometry: str = ''
    navigation_text: str = ''

    @staticmethod
    def read(path: Path | None, cameras: tuple[str, ...]) -> TopicNames:
        """Read a mapping file; None gives the defaults. Raises ConfigurationError."""
        if path is None:
            return TopicNames({})
        return _checked(path, read_yaml(path, 'topic mapping') or {}, cameras)


def _checked(path: Path, content: Any, cameras: tuple[str, ...]) -> TopicNames:
    """Return the names of a parsed mapping file, or say which key is wrong."""
    form = '{cameras: {front_wide: /topic, ...}, odometry: /topic, navigation_text: /topic}'
    named = content.get('cameras', {}) if isinstance(content, dict) else None
    if not isinstance(named, dict):
        raise ConfigurationError(f'topic mapping {path} is not of the form {form}')
    for key in content:
        if key not in ('cameras', 'odometry', 'navigation_text'):
            raise ConfigurationError(f'topic mapping {path}: key {key!r} is unknown; use {form}')
    for camera in named:
        if camera not in cameras:
            raise ConfigurationError(f'topic mapping {path}: camera {camera!r} is unknown; use '
                                     f'{", ".join(cameras)}')
    texts = {**named, 'odometry': content.get('odometry', ''),
             'navigation_text': content.get('navigation_text', '')}
    for key, topic in texts.items():
        if not isinstance(topic, str):
            raise ConfigurationError(f'topic mapping {path}: {key!r} is {topic!r}; give a topic')
    return TopicNames(named, texts['odometry'], texts['navigation_text'])


def choose_topics(bag: Path, types: Mapping[str, str], counts: Mapping[str, int],
                  names: TopicNames, cameras: tuple[str, ...]) -> TopicMap:
    """
    Find every input in a bag, by mapping first and default name second.

    types: topic -> message type; counts: topic -> messages. Raises InputError that lists what
    the bag has and proposes a mapping.
    """
    found = {topic: kind for topic, kind in types.items() if counts.get(topic, 0)}
    if not found:
        raise InputError(f'bag {bag} holds no messages; record it again')
    chosen: dict[str, str] = {}
    missing = []
    for camera in cameras:
        expected = _expected(camera, names)
        topic = next((t for t in expected if found.get(t) in IMAGE_TYPES), None)
        if topic is None:
            missing.append((f"camera '{camera}'", expected))
        else:
            chosen[topic] = camera
    odometry = names.odometry or ODOMETRY_TOPIC
    if found.get(odometry) != ODOMETRY_TYPE:
        missing.append(('odometry', [odometry]))
    text = names.navigation_text or NAVIGATION_TOPIC
    if names.navigation_text and found.get(text) != TEXT_TYPE:
        missing.append(('navigation_text', [text]))
    if missing:
        raise InputError(_refusal(bag, missing, types, counts, cameras))
    infos = {info_topic(camera): camera for camera in cameras
             if found.get(info_topic(camera)) == INFO_TYPE}
    return TopicMap(chosen, odometry, text if found.get(text) == TEXT_TYPE else '', infos)


def _expected(camera: str, names: TopicNames) -> list[str]:
    """Return the topics under which a camera may be, the likeliest first."""
    if camera in names.cameras:
        return [names.cameras[camera]]
    raw = camera_topic(camera)
    return [raw, f'{raw}/compressed']


def _refusal(bag: Path, missing: list[tuple[str, list[str]]], types: Mapping[str, str],
             counts: Mapping[str, int], cameras: tuple[str, ...]) -> str:
    """Return one line: what is missing, where it was looked for, what the bag has instead."""
    wants = '; '.join(f'{what} ({" or ".join(topics)}'
                      + (', empty' if any(counts.get(t) == 0 for t in topics) else '') + ')'
                      for what, topics in missing)
    images = [t for t, kind in types.items() if kind in IMAGE_TYPES and counts.get(t)]
    odometry = [t for t, kind in types.items() if kind == ODOMETRY_TYPE and counts.get(t)]
    line = (f'bag {bag} lacks {wants}; image topics in it: {", ".join(images) or "none"}; '
            f'odometry topics in it: {", ".join(odometry) or "none"}')
    if len(images) < len(cameras) or not odometry:
        return f'{line}; record the missing topics as well'
    pairs = ', '.join(f'{c}: {t}' for c, t in propose_cameras(images, cameras).items())
    return (f"{line}; if these are right, write '{{cameras: {{{pairs}}}, "
            f"odometry: {odometry[0]}}}' to a file and pass it with --topics")


def propose_cameras(topics: list[str], cameras: tuple[str, ...]) -> dict[str, str]:
    """Return a one-to-one guess camera -> topic, the most similar names first."""
    def alike(camera: str, topic: str) -> float:
        shared = set(camera.split('_')) & set(re.split(r'[^a-z0-9]+', topic.lower()))
        return len(shared) + difflib.SequenceMatcher(None, camera, topic).ratio()
    scores = sorted(((alike(camera, topic), camera, topic) for camera in cameras
                     for topic in topics), reverse=True)
    guess: dict[str, str] = {}
    for _, camera, topic in scores:
        if camera not in guess and topic not in guess.values():
            guess[camera] = topic
    return {camera: guess[camera] for camera in cameras if camera in guess}
