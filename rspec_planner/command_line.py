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
The command line of the node: what the user gave, framed by the shipped defaults.

The shipped parameter file goes first, because later files win; the default topic names go last,
because the first matching remap wins. So a user's own file or remap always has its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import CameraConfig
from rspec_planner.parameters import (
    NODE_NAME,
    PARAMETER_FILE,
    parameter_files,
    read_parameter_file,
)
from rspec_planner.planner.camera_roles import BY_INDEX
from rspec_planner.transport import config_path

ODOMETRY_TOPIC = '/localization/kinematic_state'
NAVIGATION_TOPIC = '/planning/rspec_planner/input/navigation_text'

USAGE = """\
usage: rspec_planner_node [--ros-args ...]

Starts the lifecycle node /planning/rspec_planner with the shipped parameters.
  --ros-args --params-file FILE     values that replace shipped ones
  --ros-args -p NAME:=VALUE         one value, for example -p planning.rate_hz:=5.0
  --ros-args -r ~/input/image0:=T   another topic for an input
  --ros-args -r __ns:=/NAMESPACE    another namespace
  --ros-args --log-level debug      more to read"""


def camera_topic(name: str) -> str:
    """Return the default topic of a camera, without a transport's suffix."""
    return f'/sensing/camera/{name}/image_raw'


def info_topic(name: str) -> str:
    """Return the default topic of a camera's calibration."""
    return f'/sensing/camera/{name}/camera_info'


def default_remaps(ids: Sequence[int] = CameraConfig().ids) -> dict[str, str]:
    """Return input name -> topic for cameras of the given roles and the odometry."""
    names = [BY_INDEX[index].name for index in ids]
    images = {f'~/input/image{place}': camera_topic(name) for place, name in enumerate(names)}
    infos = {f'~/input/camera_info{place}': info_topic(name) for place, name in enumerate(names)}
    return {**images, **infos, '~/input/odometry': ODOMETRY_TOPIC}


def camera_ids(arguments: Sequence[str]) -> tuple[int, ...]:
    """
    Return `cameras.ids` of a ROS command line; the shipped ones where it says nothing usable.

    Only the names of default topics depend on it; the node itself refuses a wrong list.
    """
    given: Any = CameraConfig().ids
    for path in parameter_files(arguments):
        given = read_parameter_file(path).get('cameras.ids', given)
    for argument in arguments:
        name, assigned, value = argument.rpartition('cameras.ids:=')
        if assigned and name.rstrip(':') in ('', NODE_NAME):
            given = yaml.safe_load(value)
    usable = isinstance(given, (list, tuple)) and all(
        type(index) is int and index in BY_INDEX for index in given)
    return tuple(given) if usable else CameraConfig().ids


def ros_arguments(given: Sequence[str]) -> list[str]:
    """
    Return the full ROS command line (without the program's name) for what the user gave.

    Raises ConfigurationError for a parameter file that cannot be read or is no YAML: rcl would
    say so in four lines of C.
    """
    for path in parameter_files(given):
        read_parameter_file(path)
    remaps = [part for name, topic in default_remaps(camera_ids(given)).items()
              for part in ('-r', f'{name}:={topic}')]
    return ['--ros-args', '--params-file', str(config_path(PARAMETER_FILE)), '--', *given,
            '--ros-args', *remaps]


def check_leftover(arguments: Sequence[str]) -> None:
    """Raise ConfigurationError for arguments that are not ROS arguments."""
    if arguments:
        raise ConfigurationError(f"argument '{arguments[0]}' is not known; ROS arguments follow "
                                 '--ros-args, see --help')
