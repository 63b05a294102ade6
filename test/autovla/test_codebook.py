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
"""Closed forms of paths, the way back to tokens, files, and what an answer may look like."""

from autovla_reference import ACTION_START, small_config, TOKENS
import numpy as np
import pytest
from safetensors.numpy import save_file

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.model.codebook import (
    ActionCodebook,
    arc_codebook,
    CODEBOOK_FILE,
    compose,
    outline,
    outline_poses,
    read_codebook,
)
from rspec_planner.planner.answer import FAULTS, path_of, read_answer


def random_codebook(seed=0, size=24, steps=5):
    """Motions of a vehicle that turns and drifts at random."""
    rng = np.random.default_rng(seed)
    poses = np.cumsum(rng.normal(size=(size, steps + 1, 3)) * (1.0, 0.3, 0.2), axis=1)
    return ActionCodebook(outline(poses - poses[:, :1]))


def test_outlines_and_poses_are_inverse():
    rng = np.random.default_rng(1)
    poses = rng.normal(size=(50, 3)) * (20, 20, 1)
    np.testing.assert_allclose(outline_poses(outline(poses)), poses, atol=1e-12)
    corners = outline(np.array([10.0, -2.0, np.pi / 2]))  # it looks along y
    np.testing.assert_allclose(corners, [[9, 0.4], [11, 0.4], [11, -4.4], [9, -4.4]], atol=1e-12)


def test_a_straight_path_is_speed_times_time():
    codebook = arc_codebook([8.0], [0.0])
    assert codebook.size == 2 and codebook.steps == 5
    path = codebook.path([1] * 10)
    np.testing.assert_allclose(path[:, 0], 8.0 * 0.1 * np.arange(51), atol=1e-12)
    np.testing.assert_allclose(path[:, 1:], 0, atol=1e-12)
    np.testing.assert_allclose(codebook.path([0] * 10), 0, atol=1e-12)


@pytest.mark.parametrize('curvature', [0.1, -0.05, 0.2])
def test_a_chain_of_equal_arcs_is_one_circle(curvature):
    path = arc_codebook([6.0], [curvature]).path([1] * 10)
    arc = 6.0 * 0.1 * np.arange(51)
    want = np.stack([np.sin(curvature * arc) / curvature,
                     (1 - np.cos(curvature * arc)) / curvature], -1)
    np.testing.assert_allclose(path[:, :2], want, atol=1e-9)
    np.testing.assert_allclose(np.exp(1j * path[:, 2]), np.exp(1j * curvature * arc), atol=1e-9)


def test_four_quarter_turns_close_a_circle():
    codebook = arc_codebook([np.pi * 10.0], [0.1])  # a quarter of a circle of 10 m radius each
    path = codebook.path([1, 1, 1, 1])
    np.testing.assert_allclose(path[5::5, :2], [[10, 10], [0, 20], [-10, 10], [0, 0]], atol=1e-9)


def test_paths_equal_a_chain_of_placed_outlines():
    """Turn all corners of each entry into the frame of the last one, then read their pose."""
    codebook, rng = random_codebook(), np.random.default_rng(3)
    actions = rng.integers(0, codebook.size, 12)
    position, heading, want = np.zeros(2), 0.0, [[0.0, 0.0, 0.0]]
    for action in actions:
        turn = np.array([[np.cos(heading), -np.sin(heading)], [np.sin(heading), np.cos(heading)]])
        corners = codebook.contours[action] @ turn.T + position
        for step in corners[1:]:
            left = step[0] - step[3]
            want.append([*step.mean(0), np.arctan2(left[1], left[0])])
        position, heading = corners[-1].mean(0), want[-1][2]
    got = codebook.path(actions)
    np.testing.assert_allclose(got[:, :2], np.array(want)[:, :2], atol=1e-9)
    turned = np.exp(1j * np.array(want)[:, 2])
    np.testing.assert_allclose(np.exp(1j * got[:, 2]), turned, atol=1e-9)


@pytest.mark.parametrize('seed', range(5))
def test_tokens_of_a_path_made_of_tokens_are_those_tokens(seed):
    codebook, rng = random_codebook(seed), np.random.default_rng(seed)
    actions = rng.integers(0, codebook.size, 10)
    assert np.array_equal(codebook.actions(codebook.path(actions)[codebook.steps::codebook.steps]),
                          actions)


def test_tokens_follow_a_path_between_them_without_drifting_off():
    codebook = arc_codebook(np.arange(0.5, 15, 0.5), np.linspace(-0.06, 0.06, 13))
    arc = 7.3 * 0.5 * np.arange(1, 11)
    ends = np.stack([np.sin(0.013 * arc) / 0.013, (1 - np.cos(0.013 * arc)) / 0.013,
                     0.013 * arc], -1)
    path = codebook.path(codebook.actions(ends))[codebook.steps::codebook.steps]
    # each entry is at most half a step of speed and curvature off, and the next one corrects
    assert np.linalg.norm(path[:, :2] - ends[:, :2], axis=-1).max() < 0.25


def test_compose_is_the_group_of_planar_motions():
    rng = np.random.default_rng(2)
    a, b, c = rng.normal(size=(3, 3)) * 2
    np.testing.assert_allclose(compose(compose(a, b), c), compose(a, compose(b, c)), atol=1e-12)


def test_files(tmp_path):
    codebook = random_codebook()
    codebook.write(tmp_path)
    np.testing.assert_allclose(read_codebook(tmp_path, 24).contours, codebook.contours, atol=1e-6)
    with pytest.raises(ConfigurationError, match='24 entries, the profile has 2048'):
        read_codebook(tmp_path, 2048)
    (tmp_path / CODEBOOK_FILE).write_bytes(b'\x80\x04pickle')
    with pytest.raises(ConfigurationError, match='no codebook'):
        read_codebook(tmp_path)
    save_file({'other': np.zeros(3)}, tmp_path / CODEBOOK_FILE)
    with pytest.raises(ConfigurationError, match="expected 'contours' alone"):
        read_codebook(tmp_path)
    with pytest.raises(ConfigurationError, match='no codebook'):
        read_codebook(tmp_path / 'nowhere')


@pytest.mark.parametrize(('contours', 'message'), [
    (np.zeros((3, 4, 2)), 'must be'), (np.zeros((3, 1, 4, 2)), 'must be'),
    (np.full((3, 6, 4, 2), np.nan), 'not finite'), (np.zeros((3, 6, 4, 2)), 'without a left')])
def test_what_is_no_motion_is_refused(contours, message):
    with pytest.raises(ConfigurationError, match=message):
        ActionCodebook(contours)


def test_unknown_actions_are_refused():
    with pytest.raises(InputError, match='the codebook has 0 .. 23'):
        random_codebook().path([3, 24])


# ------------------------------------------------------------------------------------ answers

class Letters:
    """Ids 6 .. 31 are letters."""

    def encode(self, text):
        return [ord(letter) - ord('a') + 6 for letter in text]

    def decode(self, ids):
        return ''.join(chr(ord('a') + token - 6) for token in ids)


def said(words, actions, behind='', stop=True):
    ids = [*Letters().encode(words), *(ACTION_START + action for action in actions),
           *Letters().encode(behind)]
    return ids + [TOKENS.im_end] if stop else ids


@pytest.mark.parametrize(('ids', 'fault'), [
    (said('think', [0, 1, 2, 3], 'end'), ''), (said('', [3, 3, 3, 3]), ''),
    (said('think', [0, 1, 2, 3], stop=False), 'unfinished'), ([], 'unfinished'),
    (said('think', []), 'no_actions'), (said('a', [1, 2, 3]), 'action_count'),
    (said('a', [1, 2, 3, 4, 5]), 'action_count'),
    (said('a', [1, 2], 'b')[:-1] + said('', [3, 4]), 'scattered_actions')])
def test_only_whole_answers_become_paths(ids, fault):
    cfg, codebook = small_config(), random_codebook(size=32)
    answer = read_answer(cfg, Letters(), ids)
    assert answer.fault == fault and (not fault or fault in FAULTS)
    path = path_of(answer, cfg, codebook)
    assert (path is None) == bool(fault)
    if path is not None:
        np.testing.assert_allclose(path.poses, codebook.path(answer.actions))
        np.testing.assert_allclose(path.times, 0.1 * np.arange(21))


def test_words_and_actions_are_told_apart():
    answer = read_answer(small_config(), Letters(), said('think', [0, 9, 2, 31], 'end'))
    assert answer.text == 'thinkend' and answer.actions == (0, 9, 2, 31)
