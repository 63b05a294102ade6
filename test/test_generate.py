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
"""Clips: exact futures, determinism, the pixel gate, observations, text statistics."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.clip import ClipSpec
from rspec_planner.world.generate import (
    clip_observation,
    GATE_PIXELS,
    generate_clip,
    generate_pair,
    renderer_of,
    simulate_pair,
    visible_difference,
)
from rspec_planner.world.reasoning import opener, tokens
from rspec_planner.world.renderer import Renderer
from rspec_planner.world.rig import Rig
from rspec_planner.world.scenarios import FAMILIES
from rspec_planner.world.simulation import DT
from rspec_planner.world.splits import split_specs


@pytest.fixture(scope='module')
def renderer():
    return Renderer(Rig())


@pytest.fixture(scope='module')
def clips():
    """Return twins of every family, without pictures."""
    specs = split_specs('train')[:1000:2]
    return [clip for spec in specs for clip in generate_pair(spec)]


def integrate(clip):
    """Return the poses that the actions lead to, from the ego frame at t0."""
    x = y = yaw = 0.0
    v, poses = clip.speed, []
    for a, k in clip.actions.astype(np.float64):
        after = max(0.0, v + a * DT)
        turned = yaw + k * (v * DT + 0.5 * a * DT * DT)
        x += 0.5 * DT * (v * np.cos(yaw) + after * np.cos(turned))
        y += 0.5 * DT * (v * np.sin(yaw) + after * np.sin(turned))
        v, yaw = after, turned
        poses.append((x, y, 0.0, yaw))
    return np.array(poses)


def test_actions_integrate_to_the_future(clips):
    for clip in clips:
        error = integrate(clip) - clip.future
        error[:, 3] = np.arctan2(np.sin(error[:, 3]), np.cos(error[:, 3]))
        assert np.abs(error).max() < 2e-3
        assert (clip.speeds >= 0.0).all()


def test_shapes_limits_and_origin(clips):
    for clip in clips:
        assert clip.history.shape == (16, 4) and clip.future.shape == (64, 4)
        assert clip.agents.shape[::2] == (80, 7) and clip.agents.dtype == np.float32
        assert np.abs(clip.history[15]).max() == 0.0
        hardest = -6.05 if clip.decision.action == 'brake_hard' else -4.05
        assert clip.actions[:, 0].min() >= hardest and clip.actions[:, 0].max() <= 2.40
        assert clip.paints_polygons and clip.reasoning.startswith(opener(clip.history))


def test_pairs_share_history_to_the_bit(clips):
    for event, twin in zip(clips[::2], clips[1::2]):
        assert event.history.tobytes() == twin.history.tobytes()
        assert (event.speed, event.t0_ns) == (twin.speed, twin.t0_ns)
        assert event.reasoning != twin.reasoning
        assert event.reasoning.split(',')[0] == twin.reasoning.split(',')[0]


def test_turns_carry_a_command(clips):
    for clip in clips:
        turn = {'left_turn': 'turn left', 'right_turn': 'turn right'}.get(clip.spec.family, '')
        assert clip.navigation_text.startswith(turn) and bool(clip.navigation_text) == bool(turn)


def test_text_statistics(clips):
    lengths = [len(tokens(c.reasoning)) for c in clips]
    assert 16.3 < np.mean(lengths) < 17.5 and min(lengths) >= 15 and max(lengths) <= 20
    assert 100 <= len({w for c in clips for w in tokens(c.reasoning)}) <= 119
    openers = Counter(' '.join(tokens(c.reasoning)[:2]) for c in clips)
    assert openers['cruising straight'] < 0.7 * len(clips)
    assert {w for o in openers for w in o.split()} == {
        'stopped', 'creeping', 'slowing', 'cruising', 'accelerating', 'straight', 'left', 'right'}


def test_a_drafter_without_images_stays_behind(clips):
    texts = [[*tokens(c.reasoning), '<stop>'] for c in clips]
    known, fresh = texts[:750], texts[750:]
    counts = defaultdict(Counter)

    def contexts(text, i):
        yield tuple(text[:2]), tuple(text[3:i])
        yield ('*', tuple(text[3:i]))
        for n in (4, 2, 1):
            yield ('n', tuple(text[max(0, i - n):i]))
    for text in known:
        for i in range(2, len(text)):
            for key in contexts(text, i):
                counts[key][text[i]] += 1

    def guess(text, i):
        for key in contexts(text, i):
            if sum(counts[key].values()) >= 4:
                return counts[key].most_common(1)[0][0]
        return '.'
    right = [1.0 if i < 2 else guess(text, i) == text[i]
             for text in fresh for i in range(len(text))]
    assert 0.74 < np.mean(right) < 0.90


@pytest.mark.parametrize('index', [2, 4])
def test_same_spec_same_bytes(index, renderer):
    spec = ClipSpec('val', 'cut_in', index, False)
    event, twin = generate_pair(spec, renderer)
    again = generate_clip(spec, Renderer(Rig()))
    assert again.images.tobytes() == twin.images.tobytes()
    assert again.future.tobytes() == twin.future.tobytes()
    assert again.reasoning == twin.reasoning
    assert event.images.shape == (4, 4, 192, 384, 3) and event.images.dtype == np.uint8
    pair, _ = simulate_pair(spec)
    for frame, (a, b) in enumerate(zip(pair.event.scenes, pair.twin.scenes)):
        same = (event.images[:, frame] == twin.images[:, frame]).all()
        assert same == (a.agents == b.agents)


@pytest.mark.parametrize('family', FAMILIES)
def test_twins_differ_visibly(family, renderer):
    rejected = 0
    for i in range(6):
        spec = ClipSpec('val', family, 100 + i, True)
        pair, _ = simulate_pair(spec)
        eye = renderer_of(spec, renderer)
        seen = [eye.render(r.scenes[-1]) for r in (pair.event, pair.twin)]
        rejected += visible_difference(*seen) < GATE_PIXELS
    assert rejected == 0


def test_empty_pairs_would_be_noticed():
    a = np.zeros((4, 10, 10, 3), np.uint8)
    b = a.copy()
    b[2, 0, :8] = 25
    assert visible_difference(a, a) == 0 and visible_difference(a, b) == 8
    b[2, 0, :8] = 24
    assert visible_difference(a, b) == 0


def test_mounts_move_the_rig(renderer):
    rigs = {renderer_of(s, renderer).rig for s in split_specs('train')[:400:2]}
    assert len(rigs) == 5 and max(abs(r.height_offset) for r in rigs) == 0.05
    foreign = renderer_of(ClipSpec('off-shelf', 'parked', 0, True, 'rig'), renderer).rig
    assert foreign.height_offset == 0.10
    assert foreign.pitch_offset == pytest.approx(-np.radians(1.0))


def test_observation_of_a_clip(renderer):
    clip = generate_clip(ClipSpec('val', 'left_turn', 1, True), renderer)
    seen = clip_observation(clip)
    assert seen.t0_ns == clip.t0_ns and (seen.image_stamps_ns[:, -1] == clip.t0_ns).all()
    assert seen.ego_poses.shape == (16, 4, 4)
    np.testing.assert_allclose(seen.ego_poses[:, :2, 3], clip.history[:, :2])
    np.testing.assert_allclose(seen.ego_poses[15], np.eye(4), atol=1e-7)
    assert seen.navigation_text == 'turn left at the junction'
    with pytest.raises(ConfigurationError, match='no images'):
        clip_observation(generate_clip(ClipSpec('val', 'left_turn', 1, True)))


def test_unknown_family_is_named():
    with pytest.raises(ConfigurationError, match="family 'ufo' is unknown"):
        generate_clip(ClipSpec('val', 'ufo', 0, True))
