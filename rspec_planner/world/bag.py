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
Read and write rosbag2 bags (mcap or sqlite3) without ROS; every failure is one clear line.

A path ending in .mcap or .db3 is one file; any other path is a folder with metadata.yaml.
Message types are those of ROS 2 Kilted; a bag that carries its own definitions uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
import os
from pathlib import Path
import shutil
import sqlite3
import struct
import tempfile
from types import TracebackType
from typing import Any, Self

import apsw
from rosbags.highlevel import AnyReader, AnyReaderError
from rosbags.interfaces import (
    Qos,
    QosDurability,
    QosHistory,
    QosLiveliness,
    QosReliability,
    QosTime,
)
from rosbags.rosbag1 import ReaderError as Rosbag1Error
from rosbags.rosbag2 import ReaderError, StoragePlugin, Writer
from rosbags.serde import SerdeError

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.planner.serialized import TYPES

#: storage name -> (plugin, file suffix)
STORAGES = {'mcap': (StoragePlugin.MCAP, '.mcap'), 'sqlite3': (StoragePlugin.SQLITE3, '.db3')}
_BY_SUFFIX = {suffix: name for name, (_, suffix) in STORAGES.items()}

_FOREVER = QosTime(2147483647, 4294967295)
#: what a latched topic offers, so that a player republishes it latched
LATCHED = Qos(QosHistory.KEEP_LAST, 1, QosReliability.RELIABLE, QosDurability.TRANSIENT_LOCAL,
              _FOREVER, _FOREVER, QosLiveliness.AUTOMATIC, _FOREVER, False)

#: what they raise where a file cannot be written
_FULL = (OSError, sqlite3.Error, apsw.Error)
#: what the bag libraries raise for a file that is damaged, cut off or no bag at all
_DAMAGE = (AnyReaderError, ReaderError, Rosbag1Error, SerdeError, sqlite3.Error, EOFError,
           KeyError, IndexError, TypeError, ValueError, AssertionError, MemoryError,
           AttributeError, OverflowError, RuntimeError, struct.error, apsw.Error)


def message(name: str, **fields: Any) -> Any:
    """Build a message by its short name, for example `message('std_msgs/String', data='')`."""
    package, kind = name.split('/')
    return TYPES.types[f'{package}/msg/{kind}'](**fields)


def storage_of(path: Path, storage: str = '') -> str:
    """
    Return 'mcap' or 'sqlite3' for a bag path and an explicit choice ('' means by suffix).

    Raises ConfigurationError for an unknown storage or one that contradicts the suffix.
    """
    by_suffix = _BY_SUFFIX.get(path.suffix, '')
    if storage and storage not in STORAGES:
        raise ConfigurationError(f"storage '{storage}' is unknown; use {' or '.join(STORAGES)}")
    if storage and by_suffix and storage != by_suffix:
        raise ConfigurationError(f"storage '{storage}' contradicts the name {path.name}; "
                                 f'name it *{STORAGES[storage][1]} or leave --storage out')
    return storage or by_suffix or 'sqlite3'


class BagWriter:
    """
    Write messages in the order given; the same calls give the same bytes.

    The bag appears under its name only when it is complete. Raises InputError when the path
    exists already (unless `overwrite`) or cannot be written.
    """

    def __init__(self, path: Path, *, storage: str = '', overwrite: bool = False) -> None:
        self.path = path
        self.messages = 0
        self._storage = storage_of(path, storage)
        self._overwrite = overwrite
        self._topics: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if self.path.exists() and not self._overwrite:
            raise InputError(f'bag {self.path} exists already; choose another name or pass '
                             '--overwrite')
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix='.bag-', dir=self.path.parent))
        except OSError as error:
            raise InputError(f'bag {self.path} cannot be written: {error.strerror}; choose '
                             'another place') from None
        # the name inside is the final one, because metadata.yaml repeats it
        self._writer = Writer(self._folder / self._stem, version=9,
                              storage_plugin=STORAGES[self._storage][0])
        try:
            with self._writable():
                self._writer.open()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Turn what the file system or the database says into one line that names the bag."""
        try:
            yield
        except _FULL as error:
            reason = getattr(error, 'strerror', None) or ' '.join(str(error).split())
            raise InputError(f'bag {self.path} cannot be written ({reason}); free disk space, or '
                             'choose another folder') from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with self._writable():
                    self._writer.close()
                    self._publish()
            else:
                with suppress(*_FULL):  # what was raised before says more
                    self._writer.abort()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _stem(self) -> str:
        return self.path.stem if self.path.suffix in _BY_SUFFIX else self.path.name

    def _publish(self) -> None:
        made = self._folder / self._stem
        if self.path.is_dir():
            shutil.rmtree(self.path)
        if self.path.suffix in _BY_SUFFIX:
            made = made / f'{self._stem}{self.path.suffix}'
        made.replace(self.path)

    def add_topic(self, topic: str, kind: str, *, latched: bool = False) -> None:
        """Declare a topic; the order of declarations is part of the bytes."""
        package, name = kind.split('/')
        with self._writable():
            self._topics[topic] = self._writer.add_connection(
                topic, f'{package}/msg/{name}', typestore=TYPES,
                offered_qos_profiles=[LATCHED] if latched else [])

    def write(self, topic: str, stamp_ns: int, content: Any) -> None:
        """Append one message at a log time; the topic must have been added."""
        connection = self._topics[topic]
        self.write_serialized(topic, stamp_ns,
                              TYPES.serialize_cdr(content, connection.msgtype))

    def write_serialized(self, topic: str, stamp_ns: int, data: bytes | memoryview) -> None:
        """Append one message that is already CDR; the topic must have been added."""
        with self._writable():
            self._writer.write(self._topics[topic], stamp_ns, data)
        self.messages += 1


@dataclass(frozen=True)
class BagMessage:
    """One message of a bag; `content` has the fields of its ROS type as attributes."""

    topic: str
    log_ns: int
    content: Any


class BagReader:
    """
    Read a bag in log-time order.

    Raises InputError on entering or while iterating when the bag is missing, empty, cut off
    or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        try:
            _check_path(self.path)
            self._reader = AnyReader([self.path], default_typestore=TYPES)
            self._reader.open()
        except PermissionError:
            raise InputError(f'bag {self.path} cannot be read; check its permissions') from None
        except (*_DAMAGE, OSError) as error:
            raise _damaged(self.path, error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._reader.close()

    @property
    def topics(self) -> Mapping[str, str]:
        """Return topic -> type, for example 'sensor_msgs/msg/Image', in name order."""
        return {connection.topic: connection.msgtype
                for connection in sorted(self._reader.connections, key=lambda c: c.topic)}

    @property
    def counts(self) -> Mapping[str, int]:
        """Return topic -> number of messages."""
        counts: dict[str, int] = {}
        for connection in self._reader.connections:
            counts[connection.topic] = counts.get(connection.topic, 0) + connection.msgcount
        return counts

    @property
    def message_count(self) -> int:
        """Return the number of messages over all topics."""
        return int(self._reader.message_count)

    @property
    def start_ns(self) -> int:
        """Return the log time of the first message."""
        return int(self._reader.start_time)

    @property
    def end_ns(self) -> int:
        """Return the log time of the last message."""
        return int(self._reader.end_time)

    def read(self, topics: tuple[str, ...] | None = None) -> Iterator[BagMessage]:
        """Yield the messages of some topics (default: all) by log time."""
        chosen = [connection for connection in self._reader.connections
                  if topics is None or connection.topic in topics]
        if not chosen:
            return
        try:
            for connection, log_ns, data in self._reader.messages(connections=chosen):
                yield BagMessage(connection.topic, log_ns,
                                 self._reader.deserialize(data, connection.msgtype))
        except (*_DAMAGE, OSError) as error:
            raise _damaged(self.path, error) from None

    def latched_topics(self) -> frozenset[str]:
        """Return the topics that were offered transient local, such as /tf_static."""
        return frozenset(
            connection.topic for connection in self._reader.connections
            for qos in getattr(connection.ext, 'offered_qos_profiles', [])
            if qos.durability == QosDurability.TRANSIENT_LOCAL)

    def read_serialized(self, topics: tuple[str, ...]) -> Iterator[tuple[str, int, bytes]]:
        """Yield (topic, log time, CDR) of some topics by log time, without decoding."""
        chosen = [connection for connection in self._reader.connections
                  if connection.topic in topics]
        if not chosen:
            return
        try:
            for connection, log_ns, data in self._reader.messages(connections=chosen):
                yield connection.topic, log_ns, bytes(data)
        except (*_DAMAGE, OSError) as error:
            raise _damaged(self.path, error) from None


def _check_path(path: Path) -> None:
    """Raise InputError for a path that cannot be a bag."""
    if not path.exists():
        raise InputError(f'bag {path} does not exist; check the path, or record one with: '
                         f'rspec record-world {path.name}')
    if path.is_dir():
        if not (path / 'metadata.yaml').exists():
            raise InputError(f'bag folder {path} has no metadata.yaml; name the .mcap or .db3 '
                             'file itself, or run: ros2 bag reindex')
    elif path.suffix not in (*_BY_SUFFIX, '.bag'):
        raise InputError(f'bag {path} ends in neither .mcap nor .db3; name a rosbag2 file or '
                         'folder')
    elif path.stat().st_size == 0:
        raise InputError(f'bag {path} is an empty file (0 bytes); record it again')
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not os.access(file, os.R_OK):
            raise InputError(f'bag {file} cannot be read; check its permissions')


def _damaged(path: Path, error: Exception) -> InputError:
    """Return the error of a bag that the libraries cannot read, in one line."""
    reason = ' '.join(str(error).split()) or type(error).__name__
    if path.suffix == '.mcap':
        remedy = f'recover it with: mcap recover {path.name} -o fixed.mcap'
    elif path.suffix == '.db3':
        remedy = f'recover it with: sqlite3 {path.name} .recover | sqlite3 fixed.db3'
    else:
        remedy = 'record it again, or recover the files in it one by one'
    return InputError(f'bag {path} is truncated or damaged ({reason}); {remedy}')
