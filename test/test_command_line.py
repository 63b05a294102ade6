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

from rspec_planner.command_line import check_leftover, default_remaps, ros_arguments
from rspec_planner.errors import ConfigurationError
from rspec_planner.parameters import PARAMETER_FILE, parameter_files
from rspec_planner.transport import config_path


def test_inputs_have_default_topics():
    assert default_remaps() == {
        '~/input/image0': '/sensing/camera/cross_left/image_raw',
        '~/input/image1': '/sensing/camera/front_wide/image_raw',
        '~/input/image2': '/sensing/camera/cross_right/image_raw',
        '~/input/image3': '/sensing/camera/front_tele/image_raw',
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


def test_file_that_cannot_be_read_is_named():
    with pytest.raises(ConfigurationError, match="'/gone.yaml' cannot be read"):
        ros_arguments(['--ros-args', '--params-file', '/gone.yaml'])


def test_leftover_is_named():
    check_leftover([])
    with pytest.raises(ConfigurationError, match="'--fast' is not known"):
        check_leftover(['--fast'])
