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
"""The planner end to end on random weights: exactness, determinism, contract, named faults."""

from dataclasses import replace
import json

import numpy as np
import pytest
import torch

from rspec_planner.errors import ConfigurationError, EngineError, InputError
from rspec_planner.model.checkpoint import save_target
from rspec_planner.model.config import CameraConfig, tiny
from rspec_planner.model.flow import euler_sample
from rspec_planner.model.image import patchify
from rspec_planner.model.rope import flat_cos_sin, mrope_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.model.text import place_visual
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.pipeline import medoid, Planner
from rspec_planner.planner.prompt import build_prompt
from rspec_planner.planner.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(['turn left', 'brake behind the car because it is slowing', 'a b c'])
PROFILE = replace(tiny(TOKENIZER.token_ids, TOKENIZER.vocab_size),
                  cameras=CameraConfig(height=64, width=128), max_reasoning_tokens=8)
STEP = 100_000_000
T0 = 1_700_000_000_000_000_000


def make_target(profile=PROFILE, seed=0):
    torch.manual_seed(seed)
    target = Target(profile).eval().requires_grad_(False)
    target.text.embed_tokens.weight.normal_(std=1.0)
    return target


def stopping_profile():
    """Return a profile whose end token is the fourth new token that these weights say."""
    said = Planner(make_target(), TOKENIZER).plan(observe()).reasoning.token_ids
    ids = list(dict.fromkeys(said))
    assert len(ids) > 2, said
    tokens = replace(PROFILE.tokens, traj_future_start=ids[2])
    return replace(PROFILE, tokens=tokens), said.index(ids[2])


def frame(camera, index):
    """Return one picture of a stream; the same (camera, index) gives the same pixels."""
    rng = np.random.default_rng(1000 * camera + index)
    return rng.integers(0, 256, (64, 128, 3), dtype=np.uint8)


def observe(step=0, speed=8.0, **changes):
    """Return the observation `step` tenths of a second after T0."""
    poses = np.tile(np.eye(4), (16, 1, 1))
    poses[:, 0, 3] = speed * np.arange(-15, 1) * 0.1
    at_t0 = np.eye(4)
    at_t0[0, 3] = speed * 0.1 * step
    images = np.stack([[frame(c, step + k) for k in range(4)] for c in range(4)])
    stamps = np.array([[T0 + (step + k - 3) * STEP for k in range(4)]] * 4, dtype=np.int64)
    return replace(Observation(
        t0_ns=T0 + step * STEP, camera_names=PROFILE.cameras.names, images=images,
        image_stamps_ns=stamps, ego_poses=poses, ego_pose_at_t0=at_t0, odometry_frame='map',
        speed_mps=speed, ages_ms={'front_wide': 0.0}), **changes)


def assert_same(a, b):
    for name in ('poses', 'speeds', 'accelerations', 'curvatures', 'candidates',
                 'candidate_speeds'):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert a.reasoning.token_ids == b.reasoning.token_ids
    assert a.reasoning.text == b.reasoning.text
    assert a.verdict == b.verdict


@pytest.fixture(scope='module')
def complete():
    """A planner whose reasoning ends, and the number of tokens before its end."""
    profile, count = stopping_profile()
    return Planner(make_target(profile), TOKENIZER), count


def naive_plan(target, observation, count):
    """Everything again without executors, caches or state: ids and normalised actions."""
    cfg, text = target.cfg, target.cfg.text
    prompt = build_prompt(cfg, TOKENIZER, observation.ego_poses, observation.navigation_text)
    ids = prompt.token_ids.tolist()
    with torch.inference_mode():
        images = torch.from_numpy(observation.images).flatten(0, 1)
        features, deepstack = target.vision(patchify(images), cfg.patch_grid)
        for _ in range(count + 1):
            later = np.arange(prompt.length, len(ids)) + prompt.rope_delta
            positions = np.concatenate([prompt.positions, np.tile(later, (3, 1))], axis=1)
            cos, sin = mrope_cos_sin(torch.from_numpy(positions), text.head_dim,
                                     text.rope_theta, text.mrope_section)
            row = torch.tensor([ids])
            visual = row == cfg.tokens.image_pad
            hidden, keys, values = target.text(
                place_visual(target.text.embed(row), visual, features), cos, sin,
                visual_mask=visual, deepstack=deepstack, return_kv=True)
            logits = target.text.logits(hidden[0, -1])
            logits[cfg.tokens.forbidden_start:cfg.tokens.forbidden_end] = -torch.inf
            ids.append(int(logits.argmax()))
        del ids[-1]  # its K/V were never computed: keys hold exactly the end token's row
        offset = len(ids) + prompt.rope_delta
        cos, sin = flat_cos_sin(torch.arange(64) + offset, text.head_dim, text.rope_theta)
        noise = torch.randn((1, 64, 2), generator=torch.Generator().manual_seed(0))
        actions = euler_sample(
            lambda x, t: target.expert(x, t, keys, values, cos, sin), noise, 2)
    return tuple(ids[prompt.length:]), actions.numpy()[0]


def test_plan_equals_the_naive_computation(complete):
    # two flow steps: on random weights the Fourier features amplify rounding step by step
    profile, count = complete[0].profile, complete[1]
    planner = Planner(make_target(profile), TOKENIZER, flow_steps=2)
    plan = planner.plan(observe())
    ids, actions = naive_plan(make_target(profile), observe(), count + 1)
    assert plan.reasoning.token_ids == ids
    space = planner.profile.action_space
    curvature = actions[:, 1] * space.curvature_std + space.curvature_mean
    assert np.allclose(plan.curvatures[:64], curvature, atol=1e-5)
    acceleration = actions[:, 0] * space.accel_std + space.accel_mean
    moving = plan.speeds[1:] > 0
    assert np.allclose(plan.accelerations[:64][moving], acceleration[moving], atol=1e-4)


def test_plan_contract(complete):
    planner, count = complete
    seen = observe()
    plan = planner.plan(seen)
    assert plan.t0_ns == seen.t0_ns
    assert plan.poses.shape == (65, 4)
    assert plan.speeds.shape == plan.accelerations.shape == plan.curvatures.shape == (65,)
    assert plan.candidates.shape == (1, 65, 4)
    assert plan.candidate_speeds.shape == (1, 65)
    assert plan.poses.dtype == plan.speeds.dtype == np.float64
    assert not plan.poses[0].any()
    assert plan.speeds[0] == seen.speed_mps
    assert plan.speeds.min() >= 0.0
    assert plan.odometry_frame == 'map'
    assert plan.ages_ms == {'front_wide': 0.0}
    assert np.array_equal(plan.ego_pose_at_t0, seen.ego_pose_at_t0)
    assert plan.reasoning.complete
    assert plan.reasoning.token_ids[-1] == planner.profile.tokens.traj_future_start
    assert len(plan.reasoning.token_ids) == count + 1
    assert plan.reasoning.stats.iterations == count
    assert plan.verdict.reason != 'reasoning_incomplete'
    times = plan.times
    assert min(times.preprocess_ms, times.encode_ms, times.prefill_ms, times.decode_ms,
               times.action_ms, times.postprocess_ms) > 0.0


def test_speeds_and_positions_agree(complete):
    plan = complete[0].plan(observe(speed=12.0))
    yaw = plan.poses[:, 3]
    velocity = plan.speeds[:, None] * np.stack([np.cos(yaw), np.sin(yaw)], axis=1)
    steps = np.diff(plan.poses[1:, :2], axis=0)
    assert np.allclose(steps, 0.05 * (velocity[1:-1] + velocity[2:]), atol=1e-9)
    assert np.allclose(np.diff(plan.speeds[1:]), 0.1 * plan.accelerations[1:-1], atol=1e-9)


def test_standing_ego_never_reverses(complete):
    plan = complete[0].plan(observe(speed=0.0))
    assert plan.speeds.min() >= 0.0
    heading = plan.poses[:-1, 3]
    step = np.diff(plan.poses[:, :2], axis=0)
    assert (step[:, 0] * np.cos(heading) + step[:, 1] * np.sin(heading)).min() > -1e-3


def test_same_input_same_bits(complete):
    planner, _ = complete
    first = planner.plan(observe())
    planner.plan(observe(5, speed=3.0, navigation_text='turn left'))
    assert_same(first, planner.plan(observe()))
    planner.reset()
    assert_same(first, planner.plan(observe()))
    assert_same(first, Planner(make_target(planner.profile), TOKENIZER).plan(observe()))


def test_vision_cache_changes_no_bit():
    cached = Planner(make_target(), TOKENIZER, use_vision_cache=True)
    plain = Planner(make_target(), TOKENIZER, use_vision_cache=False)
    for step in (0, 1, 2, 3, 5, 9, 10):
        assert_same(cached.plan(observe(step)), plain.plan(observe(step)))


def test_vision_cache_is_exact_at_the_real_image_size():
    full = replace(PROFILE, cameras=CameraConfig(), max_reasoning_tokens=3)
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 256, (4, 5, 192, 384, 3), dtype=np.uint8)
    cached = Planner(make_target(full), TOKENIZER, use_vision_cache=True)
    plain = Planner(make_target(full), TOKENIZER, use_vision_cache=False)
    for step in (0, 1):
        seen = observe(step, images=stream[:, step:step + 4])
        assert_same(cached.plan(seen), plain.plan(seen))


def test_only_new_frames_are_encoded(monkeypatch):
    planner = Planner(make_target(), TOKENIZER)
    calls = []
    vision = planner._stages.vision
    enqueue = vision.enqueue
    monkeypatch.setattr(vision, 'enqueue', lambda: (calls.append(1), enqueue()))
    for step, expected in ((0, 4), (1, 1), (1, 0), (3, 2), (30, 4)):
        calls.clear()
        planner.plan(observe(step))
        assert len(calls) == expected, step
    assert len(planner._cache) == 16  # older frames are forgotten


def test_equal_stamps_with_other_pixels_are_not_confused():
    planner = Planner(make_target(), TOKENIZER)
    planner.plan(observe())
    black = observe(images=np.zeros_like(observe().images))
    fresh = Planner(make_target(), TOKENIZER)
    assert_same(planner.plan(black), fresh.plan(black))


def test_the_callers_arrays_may_change_after_planning():
    planner = Planner(make_target(), TOKENIZER)
    seen = observe()
    first = planner.plan(seen)
    seen.images[...] = 0  # a caller that reuses its buffer
    again = planner.plan(seen)
    assert_same(planner.plan(observe()), first)
    fresh = Planner(make_target(), TOKENIZER)
    assert_same(again, fresh.plan(seen))


def test_incomplete_reasoning_is_rejected():
    plan = Planner(make_target(), TOKENIZER, max_reasoning_tokens=3).plan(observe())
    assert not plan.verdict.accepted
    assert plan.verdict.reason == 'reasoning_incomplete'
    assert not plan.reasoning.complete
    assert len(plan.reasoning.token_ids) == 3
    assert np.isfinite(plan.poses).all()


@pytest.mark.parametrize('where, reason', [
    ('all', 'reasoning_incomplete'), ('stop', 'reasoning_empty'), ('expert', 'not_finite')])
def test_nan_inside_is_never_driven(where, reason):
    """NaN is the largest of all logits, so that alone it would end the text at once."""
    profile, _ = stopping_profile()
    target = make_target(profile)
    head = target.text.lm_head.weight
    with torch.no_grad():
        if where == 'expert':
            next(target.expert.parameters()).fill_(torch.nan)
        else:
            head[profile.tokens.traj_future_start if where == 'stop' else slice(None)] = torch.nan
    plan = Planner(target, TOKENIZER).plan(observe())
    assert (plan.verdict.accepted, plan.verdict.reason) == (False, reason)


def test_the_other_stop_token_is_incomplete_too():
    profile, count = stopping_profile()
    tokens = replace(PROFILE.tokens, im_end=profile.tokens.traj_future_start)
    prompt_free = replace(PROFILE, tokens=tokens)
    plan = Planner(make_target(prompt_free), TOKENIZER).plan(observe())
    assert plan.verdict.reason == 'reasoning_incomplete'


def test_text_ends_at_cot_end():
    planner = Planner(make_target(), TOKENIZER)
    ids = (*TOKENIZER.encode('brake behind the car'), TOKENIZER.special('cot_end'),
           TOKENIZER.special('traj_future_start'))
    reasoning = planner._read(ids, None)
    assert reasoning.text == 'brake behind the car'
    assert reasoning.complete


def test_seed_and_samples(complete):
    profile = complete[0].profile
    first = complete[0].plan(observe())
    other = Planner(make_target(profile), TOKENIZER, seed=1).plan(observe())
    assert first.reasoning.token_ids == other.reasoning.token_ids
    assert not np.array_equal(first.poses, other.poses)
    many = Planner(make_target(profile), TOKENIZER, num_samples=5, flow_steps=2).plan(observe())
    one = Planner(make_target(profile), TOKENIZER, flow_steps=2).plan(observe())
    assert many.candidates.shape == (5, 65, 4)
    assert np.allclose(many.candidates[0], one.poses, atol=1e-3)
    best = medoid(many.candidates)
    assert np.array_equal(many.poses, many.candidates[best])
    assert np.array_equal(many.speeds, many.candidate_speeds[best])


def test_medoid_is_the_middle_one():
    poses = np.zeros((3, 65, 4))
    poses[1, :, 1] = 1.0
    poses[2, :, 1] = 5.0
    assert medoid(poses) == 1


def test_navigation_text_changes_the_prompt_only():
    planner = Planner(make_target(), TOKENIZER)
    plain = planner.plan(observe())
    turned = planner.plan(observe(navigation_text='turn left'))
    assert not np.array_equal(plain.poses, turned.poses)
    assert_same(planner.plan(observe()), plain)
    with pytest.raises(InputError, match='navigation text'):
        planner.plan(observe(navigation_text='left ' * 65))


@pytest.mark.parametrize(('changes', 'words'), [
    ({'camera_names': ('a', 'b', 'c', 'd')}, 'camera_names'),
    ({'images': np.zeros((4, 4, 32, 128, 3), np.uint8)}, 'images'),
    ({'images': np.zeros((4, 4, 64, 128, 3), np.float32)}, 'float32'),
    ({'image_stamps_ns': np.zeros((4, 3), np.int64)}, 'image_stamps_ns'),
    ({'ego_poses': np.zeros((15, 4, 4))}, 'ego_poses'),
    ({'ego_poses': np.full((16, 4, 4), np.nan)}, 'ego_poses'),
    ({'speed_mps': float('nan')}, 'speed_mps'),
])
def test_bad_observations_are_one_line(complete, changes, words):
    with pytest.raises(InputError, match=words) as error:
        complete[0].plan(observe(**changes))
    assert '\n' not in str(error.value)
    assert complete[0].plan(observe()).reasoning.complete  # and the planner goes on


def test_arguments_are_checked():
    for name in ('num_samples', 'flow_steps', 'max_reasoning_tokens'):
        with pytest.raises(ConfigurationError, match=f'{name}: 0'):
            Planner(make_target(), TOKENIZER, **{name: 0})


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp('checkpoint')
    save_target(make_target(), directory, {'note': 'random weights'}, dtype=torch.float32)
    TOKENIZER.save(directory)
    return directory


def test_load_round_trip(folder):
    # two flow steps: on random weights the Fourier features amplify rounding step by step
    loaded = Planner.load(folder, flow_steps=2)
    assert loaded.profile == PROFILE
    built = Planner(make_target(), TOKENIZER, flow_steps=2)
    a, b = loaded.plan(observe()), built.plan(observe())
    assert a.reasoning.token_ids == b.reasoning.token_ids
    assert np.allclose(a.poses, b.poses, atol=1e-3)
    assert_same(a, Planner.load(str(folder), flow_steps=2).plan(observe()))


def test_load_names_what_is_wrong(folder, tmp_path):
    with pytest.raises(ConfigurationError, match='abacus'):
        Planner.load(folder, device='abacus')
    with pytest.raises(EngineError, match='nowhere'):
        Planner.load(tmp_path / 'nowhere')
    copy = tmp_path / 'copy'
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    build_tokenizer(['other words entirely']).save(copy)
    with pytest.raises(EngineError, match='tokenizer.json'):
        Planner.load(copy)
    (copy / 'tokenizer.json').unlink()
    with pytest.raises(EngineError, match='tokenizer.json'):
        Planner.load(copy)
    manifest = json.loads((copy / 'manifest.json').read_text())
    shard = next(name for name in manifest['files'] if name.endswith('.safetensors'))
    (copy / shard).unlink()
    with pytest.raises(EngineError, match=shard):
        Planner.load(copy)
