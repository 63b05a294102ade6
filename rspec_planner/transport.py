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
Find the shipped configuration files and choose the Fast DDS transport for camera streams.

Knows nothing of ROS, so that every process around the node can prepare its environment before
it starts one.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import sys

from rspec_planner.errors import ConfigurationError

PACKAGE = 'rspec_planner'
PROFILE_VARIABLE = 'FASTDDS_DEFAULT_PROFILES_FILE'
RANGE_VARIABLE = 'ROS_AUTOMATIC_DISCOVERY_RANGE'
VIEWER_PROFILES = ('fastdds_viewer.xml', 'fastdds_viewer_localhost.xml')
OWN_PROFILES = ('fastdds.xml', *VIEWER_PROFILES)


def _config_directories() -> list[Path]:
    """Return the places where config/ can lie: source tree, ROS workspace, pip prefix."""
    source = Path(__file__).resolve().parents[1]
    places = [source / 'config'] if (source / 'launch').is_dir() else []
    prefixes = [p for p in os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep) if p]
    # A wheel's data_files land below its prefix; walk up for environments that nest site-packages.
    prefixes += [sys.prefix, *(str(p) for p in Path(__file__).resolve().parents)]
    places += [Path(prefix) / 'share' / PACKAGE / 'config' for prefix in prefixes]
    return places


def config_path(name: str) -> Path:
    """
    Return the path of a shipped configuration file, for example 'fastdds.xml'.

    A source checkout comes first, then the installed share folder. Raises ConfigurationError
    when neither holds the file.
    """
    places = _config_directories()
    for place in places:
        if (place / name).is_file():
            return place / name
    raise ConfigurationError(
        f"configuration file '{name}' is missing (looked in {places[0]} and "
        f'share/{PACKAGE}/config of {len(places) - 1} prefixes); reinstall the package')


def fastdds_environment() -> dict[str, str]:
    """
    Return the environment that keeps four camera streams complete between processes.

    A profile of the user's own is kept, the one for viewers is not: whoever exported it for RViz
    would lose images. The publisher's shared-memory segment is what overflows, so every process
    needs it, not only the node.
    """
    chosen = os.environ.get(PROFILE_VARIABLE, '')
    if chosen and Path(chosen).name not in VIEWER_PROFILES:
        return {PROFILE_VARIABLE: chosen}
    return {PROFILE_VARIABLE: str(config_path('fastdds.xml'))}


def viewer_environment() -> dict[str, str]:
    """
    Return the environment of what only watches: no shared memory, hence no lock with the node.

    A subscriber that shares memory and is frozen while it holds a lock of it holds up whoever
    sends to it, for seconds. A profile of the user's own is kept, the one for cameras is not.
    """
    chosen = os.environ.get(PROFILE_VARIABLE)
    if chosen is not None and Path(chosen).name not in OWN_PROFILES:
        return {PROFILE_VARIABLE: chosen}
    if os.environ.get(RANGE_VARIABLE, '').upper() != 'LOCALHOST':
        return {PROFILE_VARIABLE: str(config_path('fastdds_viewer.xml'))}
    # rmw_fastrtps answers LOCALHOST with transports of its own, shared memory among them
    return {PROFILE_VARIABLE: str(config_path('fastdds_viewer_localhost.xml')),
            RANGE_VARIABLE: 'SYSTEM_DEFAULT'}


@contextlib.contextmanager
def fastdds_applied(*, viewer: bool = False) -> Iterator[None]:
    """
    Set it for as long as the context lasts, so that processes started later are no viewers too.

    This process keeps the first profile that Fast DDS read in it, whatever the environment says.
    """
    before = {name: os.environ.get(name) for name in (PROFILE_VARIABLE, RANGE_VARIABLE)}
    apply_fastdds_environment(viewer=viewer)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def apply_fastdds_environment(*, viewer: bool = False) -> None:
    """Set `fastdds_environment` or that of a viewer here; call it before `rclpy.init`."""
    os.environ.update(viewer_environment() if viewer else fastdds_environment())
