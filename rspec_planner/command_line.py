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

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import CameraConfig
from rspec_planner.parameters import PARAMETER_FILE, parameter_files, read_parameter_file
from rspec_planner.transport import config_path

ODOMETRY_TOPIC = '/localization/kinematic_state'

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


def default_remaps() -> dict[str, str]:
    """Return input name -> topic for the cameras of the shipped profiles and the odometry."""
    remaps = {f'~/input/image{index}': camera_topic(name)
              for index, name in enumerate(CameraConfig().names)}
    return {**remaps, '~/input/odometry': ODOMETRY_TOPIC}


def ros_arguments(given: Sequence[str]) -> list[str]:
    """
    Return the full ROS command line (without the program's name) for what the user gave.

    Raises ConfigurationError for a parameter file that cannot be read or is no YAML: rcl would
    say so in four lines of C.
    """
    for path in parameter_files(given):
        read_parameter_file(path)
    remaps = [part for name, topic in default_remaps().items()
              for part in ('-r', f'{name}:={topic}')]
    return ['--ros-args', '--params-file', str(config_path(PARAMETER_FILE)), '--', *given,
            '--ros-args', *remaps]


def check_leftover(arguments: Sequence[str]) -> None:
    """Raise ConfigurationError for arguments that are not ROS arguments."""
    if arguments:
        raise ConfigurationError(f"argument '{arguments[0]}' is not known; ROS arguments follow "
                                 '--ros-args, see --help')
