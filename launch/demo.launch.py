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
"""Drive the embedded world in real time, and plan on it."""

from pathlib import Path
import sys

from launch import LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    ExecuteProcess,
    IncludeLaunchDescription,
    RegisterEventHandler,
)
from launch.event_handlers import OnProcessExit
from launch.events import Shutdown
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

PLANNER = str(Path(__file__).resolve().parent / 'planner.launch.py')


def generate_launch_description():
    """Return the world and the planner; the end of the drive ends the launch."""
    arguments = [
        DeclareLaunchArgument('seconds', default_value='0.0',
                              description='Length of the drive; 0 drives until interrupted.'),
        DeclareLaunchArgument('seed', default_value='0', description='Seed of the drive.'),
        DeclareLaunchArgument('scenario', default_value='',
                              description='Scenario families, comma separated; empty for all.'),
        DeclareLaunchArgument('encoding', default_value='jpeg',
                              description='How the cameras publish: jpeg or rgb8.'),
        DeclareLaunchArgument('rviz', default_value='true', description='Start RViz as well.'),
    ]
    planner = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(PLANNER),
        launch_arguments={'rviz': LaunchConfiguration('rviz')}.items())
    world = ExecuteProcess(
        cmd=[sys.executable, '-m', 'rspec_planner.live.world_publisher',
             '--seconds', LaunchConfiguration('seconds'), '--seed', LaunchConfiguration('seed'),
             '--scenario', LaunchConfiguration('scenario'),
             '--encoding', LaunchConfiguration('encoding')],
        output='screen')
    finished = RegisterEventHandler(OnProcessExit(
        target_action=world, on_exit=[EmitEvent(event=Shutdown(reason='the drive is over'))]))
    return LaunchDescription([*arguments, planner, world, finished])
