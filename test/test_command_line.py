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

from __future__ import annotations

import pytest

from rspec_planner.command_line import (
    camera_ids,
    check_leftover,
    default_remaps,
    ros_arguments,
)
from rspec_planner.errors import ConfigurationError
from rspec_planner.parameters import PARAMETER_FILE, parameter_files
from rspec_planner.transport import config_path


def test_inputs_have_default_topics():
    assert default_remaps() == {
        '~/input/image0': '/sensing/camera/cross_left/image_raw',
        '~/input/image1': '/sensing/camera/front_wide/image_raw',
        '~/input/image2': '/sensing/camera/cross_right/image_raw',
        '~/input/image3': '/sensing/camera/front_tele/image_raw',
        '~/input/camera_info0': '/sensing/camera/cross_left/camera_info',
        '~/input/camera_info1': '/sensing/camera/front_wide/camera_info',
        '~/input/camera_info2': '/sensing/camera/cross_right/camera_info',
        '~/input/camera_info3': '/sensing/camera/front_tele/camera_info',
        '~/input/odometry': '/localization/kinematic_state'}


def test_users_file_comes_after_the_shipped_one_and_their_remap_before(tmp_path):
    mine = tmp_path / 'mine.yaml'
    mine.write_text('/**:\n  ros__parameters:\n    planning: {rate_hz: 5.0}\n')
    full = ros_arguments(['--ros-args', '--params-file', str(mine),
                          '-r', '~/input/image0:=/mine'])
    assert parameter_files(full) == [config_path(PARAMETER_FILE), mine]
    remaps = [part for part in full if part.startswith('~/input/image0:=')]
    assert remaps == ['~/input/image0:=/mine',
                      '~/input/image0:=/sensing/camera/cross_left/image_raw']


@pytest.mark.parametrize('ids, last', [
    ([1], 'front_wide'), ([0, 1, 2, 3, 5, 6], 'front_tele'), (list(range(7)), 'front_tele')])
@pytest.mark.parametrize('how', ['file', 'line', 'line with the node'])
def test_topics_follow_the_roles_that_are_given(tmp_path, ids, last, how):
    mine = tmp_path / 'mine.yaml'
    mine.write_text(f'/**:\n  ros__parameters:\n    cameras: {{ids: {ids}}}\n')
    given = {'file': ['--params-file', str(mine)], 'line': ['-p', f'cameras.ids:={ids}'],
             'line with the node': ['-p', f'rspec_planner:cameras.ids:={ids}']}[how]
    remaps = [part for part in ros_arguments(['--ros-args', *given]) if '/sensing/' in part]
    assert len(remaps) == 2 * len(ids)
    place = len(ids) - 1
    assert f'~/input/image{place}:=/sensing/camera/{last}/image_raw' in remaps
    assert f'~/input/camera_info{place}:=/sensing/camera/{last}/camera_info' in remaps


@pytest.mark.parametrize('value', ['[0, 99]', 'front', '[[1]]', ''])
def test_unusable_roles_leave_the_complaint_to_the_node(value):
    assert camera_ids(['-p', f'cameras.ids:={value}']) == (0, 1, 2, 6)


def test_file_that_cannot_be_read_is_named():
    with pytest.raises(ConfigurationError, match='/gone.yaml cannot be read'):
        ros_arguments(['--ros-args', '--params-file', '/gone.yaml'])


def test_leftover_is_named():
    check_leftover([])
    with pytest.raises(ConfigurationError, match="'--fast' is not known"):
        check_leftover(['--fast'])
