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
"""The cache holds what the target says and what its layers hold, against plain forwards."""

import numpy as np
import pytest
import torch

from rspec_planner.errors import InputError, RspecError
from rspec_planner.evaluate.batched import BatchedPlanner
from rspec_planner.evaluate.clips import render_clips
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.text import place_visual
from rspec_planner.planner.prompt import build_prompt
from rspec_planner.train.draft_data import CacheOptions
from rspec_planner.train.draft_target import _Substitutes, build_cache
from rspec_planner.train.examples import history_poses
from rspec_planner.train.profiles import new_target
from rspec_planner.world.generate import clip_observation
from rspec_planner.world.splits import extra_spec, split_specs

OPTIONS = CacheOptions(full=True, prefix=True, prefix_dtype=torch.float32, actions=True,
                       tail=40, max_tokens=7, batch=3)


@pytest.fixture(scope='module')
def made():
    target, tokenizer = new_target(smoke=True, seed=4)
    target = target.eval().requires_grad_(False)
    # a random target repeats itself for ever; larger logits of the stop let some texts end
    tokens = target.cfg.tokens
    with torch.no_grad():
        target.text.lm_head.weight[tokens.traj_future_start] *= 1.5
        target.expert.action_out_proj.weight *= 0.1  # random weights amplify rounding
    train = split_specs('train')
    turn = next(i for i, s in enumerate(train) if s.family == 'left_turn') // 2 * 2
    specs = [*train[:2], *train[turn:turn + 2], split_specs('val')[0]]
    cache = build_cache(target, tokenizer, specs, 'digest', OPTIONS, workers=1)
    clips = list(render_clips(specs, 192, 96, 0))
    return target, tokenizer, specs, clips, cache


def test_rows_follow_the_specs(made):
    _, _, specs, clips, cache = made
    assert cache.splits == ('train',) * 4 + ('val',)
    assert [name.rsplit('/', 1)[0] for name in cache.names] == [s.pair_id for s in specs]
    assert len(set(cache.names)) == 5 and cache.families[0] == specs[0].family
    assert len(set(cache.prompt_lengths.tolist())) > 1  # a route block makes one longer


def test_texts_and_plans_equal_the_batched_planner(made):
    target, tokenizer, _, clips, cache = made
    planner = BatchedPlanner(target, tokenizer, max_reasoning_tokens=OPTIONS.max_tokens)
    assert int(cache.lengths.max()) <= 7
    for row, clip in enumerate(clips):
        prompt = build_prompt(target.cfg, tokenizer, clip_observation(clip).ego_poses,
                              clip.navigation_text)
        found = planner.answer([prompt], torch.from_numpy(clip.images).flatten(0, 1)[None],
                               clip.history[None], cache.noise[None, None])
        said = cache.ids[row, :cache.lengths[row]].tolist()
        assert tuple(said) == found.token_ids[0]
        assert (cache.ids[row, cache.lengths[row]:] == -1).all()
        assert bool(cache.finished[row]) == (said[-1] in target.cfg.tokens.stop_ids)
        np.testing.assert_allclose(cache.actions[row].numpy(), found.actions[0, 0], atol=2e-3)
        assert float((cache.actions[row] - cache.noise).abs().max()) > 0.05


def test_states_keys_and_positions_equal_one_forward_over_the_whole_text(made):
    target, tokenizer, _, clips, cache = made
    columns, text = cache.positions.shape[-1], target.cfg.text
    for row, clip in enumerate(clips):
        prompt = build_prompt(target.cfg, tokenizer, history_poses(clip.history),
                              clip.navigation_text)
        said = cache.ids[row, :cache.lengths[row]]
        ids = torch.cat((torch.from_numpy(prompt.token_ids), said))[None]
        after = torch.arange(prompt.length, ids.shape[1]) + prompt.rope_delta
        positions = torch.cat((torch.from_numpy(prompt.positions.copy()),
                               after.expand(3, -1)), dim=1)
        features, deepstack = BatchedPlanner(target, tokenizer).encode(
            torch.from_numpy(clip.images).flatten(0, 1)[None])
        visual = ids == target.cfg.tokens.image_pad
        cos, sin = mrope_cos_sin(positions, text.head_dim, text.rope_theta, text.mrope_section)
        layers = tuple(range(text.num_layers))
        _, taps, keys, values = target.text(
            place_visual(target.text.embed(ids), visual, features), cos, sin,
            visual_mask=visual, deepstack=deepstack, taps=layers, return_kv=True)
        start = columns - prompt.length
        assert cache.prompt_ids[row, start:].tolist() == prompt.token_ids.tolist()
        layout = int(cache.layouts[row])
        assert torch.equal(cache.positions[layout, :, start:], positions[:, :prompt.length])
        assert int(cache.rope_delta[layout]) == prompt.rope_delta
        first, last = cache.history[layout].tolist()
        assert last - first == 48
        assert cache.prompt_ids[row, first - 1] == target.cfg.tokens.traj_history_start
        for layer in layers:
            rows = taps[layer][0, prompt.length - 40:]
            torch.testing.assert_close(cache.tail_taps[layer, row, :len(rows)].float(), rows,
                                       rtol=2e-2, atol=2e-3)
            assert not cache.tail_taps[layer, row, len(rows):].any()
            if layer < len(layers) - 1:
                torch.testing.assert_close(cache.full_taps[layer, row, start:].float(),
                                           taps[layer][0, :prompt.length], rtol=2e-2, atol=2e-3)
        for part, expected in enumerate((keys, values)):
            torch.testing.assert_close(cache.prefix[row, :, part, :, :prompt.length],
                                       expected[:, 0, :, :prompt.length], rtol=1e-3, atol=1e-4)


def test_a_prompt_without_room_and_a_clip_that_fails_are_named(made):
    target, tokenizer, specs, _, _ = made
    with pytest.raises(InputError, match='raise route_room'):
        build_cache(target, tokenizer, specs[2:4], '', CacheOptions(route_room=-64, tail=8),
                    workers=1)
    replace_job = _Substitutes()
    ordinal, other = replace_job((3, tuple(specs[:2])), 'cannot be made')
    assert ordinal == 3 and other[0].split == 'extra' and other[0] != extra_spec(0)
    with pytest.raises(RspecError, match='cannot be made'):
        replace_job((3, (specs[4],)), 'cannot be made')
