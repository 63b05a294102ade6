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
"""Play a bag with its own clock, and plan on it."""

from pathlib import Path
import sys

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

PLANNER = str(Path(__file__).resolve().parent / 'planner.launch.py')


def generate_launch_description():
    """Return the player, and the planner under simulated time."""
    arguments = [
        DeclareLaunchArgument('bag', description='Bag to play: an .mcap file or a bag folder.'),
        DeclareLaunchArgument('rate', default_value='1.0', description='Speed of the playback.'),
        DeclareLaunchArgument('rviz', default_value='true', description='Start RViz as well.'),
    ]
    planner = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(PLANNER),
        launch_arguments={'use_sim_time': 'true', 'rviz': LaunchConfiguration('rviz')}.items())
    player = ExecuteProcess(
        cmd=[sys.executable, '-m', 'rspec_planner.live.replay', LaunchConfiguration('bag'),
             '--rate', LaunchConfiguration('rate')],
        output='screen')
    return LaunchDescription([*arguments, planner, player])
