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
"""Start the planner node, and RViz when asked for."""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction, SetEnvironmentVariable
from launch.conditions import IfCondition
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

from rspec_planner.command_line import ODOMETRY_TOPIC
from rspec_planner.planner.camera_roles import ROLES
from rspec_planner.transport import config_path, fastdds_environment, viewer_environment

#: what may be mapped for as many cameras as a checkpoint can have; without a mapping the node
#: takes the topics of the roles in cameras.ids, which this file does not know
CAMERA_NAMES = tuple(f'~/input/{kind}{place}' for kind in ('image', 'camera_info')
                     for place in range(len(ROLES)))
#: inputs and outputs that keep their own name, below the node's, unless they are mapped
OWN_NAMES = ('~/input/navigation_text', '~/output/path', '~/output/trajectory',
             '~/output/trajectories', '~/output/reasoning', '~/output/stop_trajectory')


def topic_arguments():
    """Return argument name -> (topic in code, default topic or '') of every input and output."""
    topics = {**{name: '' for name in CAMERA_NAMES}, '~/input/odometry': ODOMETRY_TOPIC,
              **{name: name for name in OWN_NAMES}}
    return {name.removeprefix('~/').replace('/', '_'): (name, topic)
            for name, topic in topics.items()}


def declare_arguments():
    """Return all arguments; each one has a description and a default."""
    plain = [
        ('rspec_planner_param_path', str(config_path('rspec_planner.param.yaml')),
         'Parameter file of the node; it may hold just the values that replace shipped ones.'),
        ('namespace', 'planning', 'Namespace of the node; its outputs follow.'),
        ('use_sim_time', 'false', 'Follow /clock; needed when a bag is played.'),
        ('autostart', 'true', 'Configure and activate without a lifecycle manager.'),
        ('use_respawn', 'false', 'Start the node again, 2 s after it died.'),
        ('log_level', 'info', 'Log level of the node.'),
        ('rviz', 'false', 'Start RViz as well.'),
        ('rviz_config', str(config_path('rspec_planner.rviz')),
         'RViz configuration file; rspec_planner_autoware.rviz beside it has Autoware displays.'),
    ]
    topics = [(argument, topic, f'Topic that {name} is mapped to'
               + ('.' if topic else '; empty for the topic of its role in cameras.ids.'))
              for argument, (name, topic) in topic_arguments().items()]
    return [DeclareLaunchArgument(name, default_value=default, description=description)
            for name, default, description in plain + topics]


def planner_node(context):
    """Return the node with its parameters and the remaps that were asked for."""
    targets = {name: LaunchConfiguration(argument).perform(context)
               for argument, (name, _) in topic_arguments().items()}
    return [Node(
        package='rspec_planner', executable='rspec_planner_node', name='rspec_planner',
        namespace=LaunchConfiguration('namespace'), output='screen',
        respawn=LaunchConfiguration('use_respawn'), respawn_delay=2.0,
        parameters=[
            LaunchConfiguration('rspec_planner_param_path'),
            {'use_sim_time': ParameterValue(LaunchConfiguration('use_sim_time'), value_type=bool),
             'autostart': ParameterValue(LaunchConfiguration('autostart'), value_type=bool)}],
        remappings=[(name, topic) for name, topic in targets.items() if topic],
        arguments=['--ros-args', '--log-level', LaunchConfiguration('log_level')])]


def generate_launch_description():
    """Return the transport environment, the node and RViz."""
    environment = [SetEnvironmentVariable(name, value)
                   for name, value in fastdds_environment().items()]
    rviz = Node(package='rviz2', executable='rviz2', output='screen',
                arguments=['-d', LaunchConfiguration('rviz_config')],
                additional_env=viewer_environment(),
                parameters=[{'use_sim_time': ParameterValue(
                    LaunchConfiguration('use_sim_time'), value_type=bool)}],
                condition=IfCondition(LaunchConfiguration('rviz')))
    return LaunchDescription([*declare_arguments(), *environment,
                              OpaqueFunction(function=planner_node), rviz])
