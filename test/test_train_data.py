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
"""The data of a training run: jobs, render farm, labels, examples, pool, augmentation."""

from dataclasses import replace
import itertools

import numpy as np
import pytest
import torch

from rspec_planner.errors import InputError, RspecError
from rspec_planner.planner.prompt import build_prompt
from rspec_planner.train.augment import (
    augment_patches,
    Augmentation,
    draw_shifts,
    shift_images,
)
from rspec_planner.train.examples import ExampleEncoder, history_poses
from rspec_planner.train.farm import pair_jobs, RenderedPair, RenderFarm
from rspec_planner.train.jobs import plan_jobs
from rspec_planner.train.labels import object_grid
from rspec_planner.train.pool import ClipPool, PoolFeeder
from rspec_planner.train.profiles import new_target
from rspec_planner.world.clip import ClipSpec, DELIBERATIVE
from rspec_planner.world.generate import clip_observation, generate_pair
from rspec_planner.world.renderer import Renderer
from rspec_planner.world.rig import Rig
from rspec_planner.world.scene import AGENT_KINDS
from rspec_planner.world.splits import split_specs

SHAPE = (4, 4, 96, 192, 3)


@pytest.fixture(scope='module')
def pair():
    return generate_pair(split_specs('train')[0])


@pytest.fixture(scope='module')
def encoder():
    target, tokenizer = new_target(smoke=True)
    return ExampleEncoder(target.cfg, tokenizer, 3.0)


def plan(**changes):
    settings = {'seed': 0, 'rank': 0, 'world': 1, 'train_clips': 0, 'val_clips': 300,
                'start_clips': 100, 'extra': True, 'first_extra': 0}
    return plan_jobs(**{**settings, **changes})


class TestJobs:
    def test_twins_form_one_job_and_a_single_clip_stays_single(self):
        specs = split_specs('train')
        jobs = pair_jobs(specs)
        assert [ordinal for ordinal, _ in jobs] == list(range(len(jobs)))
        assert sum(len(group) for _, group in jobs) == len(specs) == 11_655
        assert all(len({spec.pair_id for spec in group}) == 1 for _, group in jobs)
        assert len(jobs[-1][1]) == 1

    def test_processes_share_the_split_without_overlap(self):
        shares = [plan(rank=rank, world=3) for rank in range(3)]
        seen = [spec for share in shares for _, specs in share.train for spec in specs]
        assert len(seen) == len(set(seen)) == 11_655
        held = [spec for share in shares for _, specs in share.held_out for spec in specs]
        assert sorted(held, key=str) == sorted(split_specs('val'), key=str)

    def test_the_stream_starts_with_training_pairs_then_holds_out_then_never_ends(self):
        share = plan(train_clips=20, val_clips=6, start_clips=8)
        stream = list(itertools.islice(share.stream(), 40))
        ordinals = [ordinal for ordinal, _ in stream]
        assert ordinals[:7] == [0, 1, 2, 3, -1, -2, -3]
        assert [o for o in ordinals if o >= 0] == list(range(37))
        extra = [specs for ordinal, specs in stream if ordinal >= 10]
        assert all(a.split == 'extra' and a.pair_id == b.pair_id and a.event != b.event
                   for a, b in extra)

    def test_extra_pairs_differ_between_processes_and_runs(self):
        def extras(**changes):
            share = plan(train_clips=2, val_clips=2, **changes)
            return {specs[0].pair_id for o, specs in itertools.islice(share.stream(), 30)
                    if specs[0].split == 'extra'}
        assert not extras(rank=0, world=2) & extras(rank=1, world=2)
        assert not extras() & extras(first_extra=1000)

    def test_the_order_is_a_function_of_the_seed(self):
        assert plan().train == plan().train
        assert plan().train != plan(seed=1).train


class TestLabels:
    def agents(self, pair, rows):
        block = np.zeros((80, len(rows), 7), np.float32)
        block[:] = np.array(rows, np.float32)
        return replace(pair[0], agents=block, history=np.zeros((16, 4), np.float32))

    def test_a_car_straight_ahead_lies_in_the_middle_of_both_front_cameras(self, pair):
        rig = Rig()
        clip = self.agents(pair, [(20.0, 0.0, 0.0, 4.5, 1.8, 0.0, AGENT_KINDS.index('car'))])
        grid = object_grid(clip, rig).reshape(4, 4, 6, 12)
        for camera in (1, 3):
            rows, cols = np.nonzero(grid[camera, 3])
            assert {5, 6} <= set(cols) and cols.min() + cols.max() == 11
            assert set(grid[camera, 3][rows, cols]) == {AGENT_KINDS.index('car') + 1}
        assert (grid[3] > 0).sum() > (grid[1] > 0).sum()  # the tele camera sees it larger

    def test_the_nearer_of_two_agents_wins_and_scenery_is_left_out(self, pair):
        car, bus, tree = (AGENT_KINDS.index(k) for k in ('car', 'bus', 'tree'))
        clip = self.agents(pair, [(12.0, 0, 0, 4.5, 1.8, 0, car), (40.0, 0, 0, 11, 2.5, 0, bus),
                                  (8.0, 0, 0, 1, 1, 0, tree)])
        wide = object_grid(clip, Rig()).reshape(4, 4, 6, 12)[1, 3]
        assert wide[:, 5:7].max() == car + 1
        assert tree + 1 not in wide

    def test_an_agent_behind_the_ego_is_in_no_picture(self, pair):
        clip = self.agents(pair, [(-20.0, 0, 0, 4.5, 1.8, 0, 0)])
        assert not object_grid(clip, Rig()).any()


class TestExamples:
    def test_prompt_and_reasoning_are_what_the_planner_would_see(self, pair, encoder):
        clip = pair[0]
        row = encoder.encode(clip, np.zeros((16, 18), np.uint8))
        prompt = build_prompt(encoder.profile, encoder.tokenizer, history_poses(clip.history),
                              clip.navigation_text)
        tokens = encoder.profile.tokens
        assert np.array_equal(row.token_ids[:row.prompt_length], prompt.token_ids)
        said = row.token_ids[row.prompt_length:row.length].tolist()
        assert said[-2:] == [tokens.cot_end, tokens.traj_future_start]
        assert encoder.tokenizer.decode(said) == clip.reasoning
        assert np.array_equal(encoder.positions[:, :prompt.length], prompt.positions)

    def test_poses_equal_those_of_the_observation(self, pair):
        clip = replace(pair[0], images=np.zeros(SHAPE, np.uint8))
        assert np.allclose(history_poses(clip.history), clip_observation(clip).ego_poses,
                           atol=1e-12)

    def test_deliberative_tokens_weigh_more_and_are_named_in_order(self, pair, encoder):
        clip = pair[0]
        row = encoder.encode(clip, np.zeros((16, 18), np.uint8))
        decisive = clip.token_kind[:-1] == DELIBERATIVE
        assert set(row.token_weights[:len(decisive)][decisive]) == {3.0}
        assert row.token_weights.sum() == 2.0 * decisive.sum() + len(decisive) + 2
        ids = np.array(encoder.tokenizer.encode(clip.reasoning))[decisive]
        assert row.words[:len(ids)].tolist() == ids.tolist()
        assert set(row.words[len(ids):]) <= {-1}

    def test_actions_are_normalised_with_the_profile(self, pair, encoder):
        row = encoder.encode(pair[0], np.zeros((16, 18), np.uint8))
        space = encoder.profile.action_space
        expected = (pair[0].actions[:, 0] - space.accel_mean) / space.accel_std
        assert np.allclose(row.actions[:, 0], expected, atol=1e-5)

    @pytest.mark.parametrize('change', [
        {'reasoning': 'cruising straight, zigzag because it is fun.'},
        {'token_kind': np.zeros(3, np.uint8)}])
    def test_a_text_that_does_not_fit_names_the_clip(self, pair, encoder, change):
        with pytest.raises(InputError, match='train/'):
            encoder.encode(replace(pair[0], **change), np.zeros((16, 18), np.uint8))


class TestFarm:
    def run_farm(self, jobs, **options):
        farm = RenderFarm(iter(jobs), workers=1, image_shape=SHAPE, slots=2, **options)
        farm.start()
        done = []
        try:
            while not farm.idle:
                for item in farm.poll(timeout_s=1.0):
                    done.append((item, farm.pixels[item.slot].copy()))
                    farm.release(item.slot)
        finally:
            farm.close()
        return done

    def test_workers_render_the_same_bytes_as_this_process(self):
        jobs = pair_jobs(split_specs('train')[:6]) + [(3, (split_specs('train')[-1],))]
        done = self.run_farm(jobs)
        assert sorted(item.ordinal for item, _ in done) == [0, 1, 2, 3]
        renderer = Renderer(Rig(width=192, height=96))
        for item, pixels in done:
            if item.ordinal == 1:
                expected = generate_pair(jobs[1][1][0], renderer)
                assert np.array_equal(pixels, np.stack([clip.images for clip in expected]))
                assert [clip.spec for clip in item.clips] == [clip.spec for clip in expected]
            assert len(item.clips) == (1 if item.ordinal == 3 else 2)
            assert all(clip.images is None for clip in item.clips)
            assert item.objects.shape == (len(item.clips), 16, 18)

    def test_a_failing_clip_is_named_or_substituted(self):
        bad = ClipSpec('train', 'no_such_family', 0, True)
        jobs = [(0, (bad, replace(bad, event=False)))]
        with pytest.raises(RspecError, match='train/no_such_family/0'):
            self.run_farm(jobs)
        good = tuple(split_specs('train')[:2])
        messages = []

        def substitute(job, message):
            messages.append(message)
            return job[0], good
        done = self.run_farm(jobs, substitute=substitute)
        assert done[0][0].clips[0].spec == good[0] and 'no_such_family' in messages[0]


class TestPool:
    def rendered(self, pair, ordinal, clips=2):
        return RenderedPair(ordinal, 0, pair[:clips], np.zeros((clips, 16, 18), np.uint8))

    def pool(self, encoder, capacity, pinned):
        return ClipPool(capacity, pinned, encoder, SHAPE, torch.device('cpu'))

    def test_only_the_gap_free_beginning_is_sampled(self, pair, encoder):
        pool = self.pool(encoder, 4, 0)
        pixels = np.zeros((2, *SHAPE), np.uint8)
        for ordinal, size in ((0, 1), (2, 1), (1, 3)):
            pool.add(self.rendered(pair, ordinal), pixels)
            assert pool.size == size
        rows = pool.sample(10, np.random.default_rng(0))
        assert sorted(rows) == [0, 1, 2]

    def test_late_pairs_replace_the_oldest_that_are_not_pinned(self, encoder):
        pool = self.pool(encoder, 5, 2)
        assert [pool.place(i) for i in range(12)] == [0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 2]
        assert [self.pool(encoder, 2, 9).place(i) for i in range(5)] == [0, 1, 0, 1, 0]

    def test_a_batch_holds_twins_side_by_side_with_their_pixels(self, pair, encoder):
        pool = self.pool(encoder, 3, 0)
        for ordinal in range(2):
            pixels = np.full((2, *SHAPE), 10 * ordinal, np.uint8)
            pixels[1] += 1
            pool.add(self.rendered(pair, ordinal), pixels)
        batch = pool.batch(np.array([1, 0]))
        assert batch.images[:, 0, 0, 0, 0].tolist() == [10, 11, 0, 1]
        assert batch.images.shape == (4, 16, 96, 192, 3)
        assert batch.token_ids.shape == (4, encoder.capacity)
        assert torch.equal(batch.actions[0], batch.actions[2])
        assert not torch.equal(batch.actions[0], batch.actions[1])

    def test_a_clip_without_its_twin_stands_in_for_it(self, pair, encoder):
        pool = self.pool(encoder, 1, 0)
        pixels = np.full((2, *SHAPE), 7, np.uint8)
        pixels[1] = 99
        pool.add(self.rendered(pair, 0, clips=1), pixels)
        batch = pool.batch(np.array([0]))
        assert batch.images.unique().tolist() == [7]
        assert pool.clips_rendered == 1

    def test_negative_jobs_go_to_the_held_out_pool(self, pair, encoder):
        class Farm:
            pixels = np.zeros((1, 2, *SHAPE), np.uint8)
            released = []

            def poll(self, limit, timeout_s):
                return [outer.rendered(pair, -1), outer.rendered(pair, 0)]

            def release(self, slot):
                self.released.append(slot)
        outer = self
        pools = self.pool(encoder, 1, 0), self.pool(encoder, 1, 0)
        assert PoolFeeder(Farm(), *pools).feed() == 2
        assert [pool.size for pool in pools] == [1, 1]
        assert Farm.released == [0, 0]


class TestAugmentation:
    def test_images_move_by_the_given_pixels_and_repeat_their_edges(self):
        images = torch.randint(0, 256, (2, 2, 8, 9, 3), dtype=torch.uint8)
        moves = torch.tensor([[[2, 0], [-1, 3]], [[0, -2], [1, 0]]])
        moved = shift_images(images, moves)
        assert torch.equal(moved[0, 0, :-2], images[0, 0, 2:])
        assert torch.equal(moved[0, 0, -1], images[0, 0, -1])
        assert torch.equal(moved[0, 1, :, 2:], images[0, 1, :, :-2])
        assert torch.equal(moved[1, 0, 1:, :-1], images[1, 0, :-1, 1:])
        assert torch.equal(shift_images(images, torch.zeros_like(moves)), images)

    def test_an_angle_moves_a_tele_picture_by_its_focal_length(self):
        torch.manual_seed(0)
        focal = torch.tensor([100.0, 800.0])
        rows, cols = draw_shifts(500, focal, Augmentation(1.0, 0.5, 0))
        assert abs(int(rows[:, 1].abs().max()) - 800 * np.deg2rad(1.0)) < 2
        assert abs(int(cols[:, 1].abs().max()) - 800 * np.deg2rad(0.5)) < 2
        assert (rows[:, 1] - 8 * rows[:, 0]).abs().max() <= 4  # one angle for all cameras

    def test_light_changes_are_the_same_for_all_images_of_a_clip(self):
        torch.manual_seed(1)
        patches = torch.rand(3, 1, 4, 5).expand(3, 4, 4, 5).reshape(12, 4, 5) - 0.5
        out = augment_patches(patches, 3, Augmentation(noise=0.0)).view(3, 4, 4, 5)
        assert torch.equal(out[:, :1].expand_as(out), out)
        assert not torch.allclose(out[0], patches.view(3, 4, 4, 5)[0])
        still = augment_patches(patches, 3, Augmentation(brightness=0, contrast=0, noise=0))
        assert torch.equal(still, patches)
