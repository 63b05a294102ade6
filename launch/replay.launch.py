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
"""Play a bag with its own clock, plan on it, and record the plans when asked to."""

from pathlib import Path
import sys

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, IncludeLaunchDescription
from launch.conditions import LaunchConfigurationNotEquals
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

PLANNER = str(Path(__file__).resolve().parent / 'planner.launch.py')


def generate_launch_description():
    """Return the planner under simulated time, the recorder and the player."""
    arguments = [
        DeclareLaunchArgument('bag', description='Bag to play: an .mcap file or a bag folder.'),
        DeclareLaunchArgument('rate', default_value='1.0', description='Speed of the playback.'),
        DeclareLaunchArgument('loop', default_value='false',
                              description='Start the bag again at its end.'),
        DeclareLaunchArgument('topics', default_value='',
                              description='YAML that maps topics of the bag to cameras and '
                                          'odometry, as for rspec plan.'),
        DeclareLaunchArgument('record', default_value='',
                              description='New .mcap file for the plans; empty for none.'),
        DeclareLaunchArgument('rviz', default_value='true', description='Start RViz as well.'),
    ]
    planner = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(PLANNER),
        launch_arguments={'use_sim_time': 'true', 'rviz': LaunchConfiguration('rviz')}.items())
    recorder = ExecuteProcess(
        cmd=[sys.executable, '-m', 'rspec_planner.live.recorder', LaunchConfiguration('record'),
             '--no-inputs'],
        output='screen', condition=LaunchConfigurationNotEquals('record', ''))
    player = ExecuteProcess(
        cmd=[sys.executable, '-m', 'rspec_planner.live.replay', LaunchConfiguration('bag'),
             '--rate', LaunchConfiguration('rate'), '--loop', LaunchConfiguration('loop'),
             '--topics', LaunchConfiguration('topics'), '--inputs-only', '--wait', '60'],
        output='screen')
    return LaunchDescription([*arguments, planner, recorder, player])
