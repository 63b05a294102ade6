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
"""The frame benchmark: real neighbouring frames, honest bookkeeping."""

from dataclasses import replace

from click.testing import CliRunner
import numpy as np
import pytest

from rspec_planner.cli import cli
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate.bench import bench_frame, drive_observations, percentiles
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config
from rspec_planner.model.draft_checkpoint import save_draft, target_digest
from rspec_planner.planner.pipeline import Planner
from rspec_planner.train.profiles import new_target
from rspec_planner.train.saving import export

WAYS = ('streaming', 'stateless', 'autoregressive', 'cold')
CAMERAS = ('cross_left', 'front_wide', 'cross_right', 'front_tele')


def test_neighbouring_observations_share_three_of_four_frames():
    first, second = drive_observations(2, 96, 64, CAMERAS)
    assert np.array_equal(first.images[:, 1:], second.images[:, :-1])
    assert np.array_equal(first.image_stamps_ns[:, 1:], second.image_stamps_ns[:, :-1])
    assert second.t0_ns - first.t0_ns == 100_000_000
    assert np.allclose(first.ego_poses[-1], np.eye(4))
    step = np.linalg.norm(second.ego_poses[-2][:3, 3])
    assert step == pytest.approx(0.1 * second.speed_mps, abs=0.1)


def test_a_short_run_reports_every_stage_of_every_way(tmp_path):
    target, tokenizer = new_target(smoke=True)
    folder = export(target, tokenizer, tmp_path, {})
    draft = Dflash(dflash_config(target.cfg, block=8)).initialise(target.text)
    save_draft(draft, folder / 'drafts' / 'default', {'target': target_digest(folder)})
    report = bench_frame(frames=2, checkpoint=folder, warm_up=2)
    assert report['profile'] == 'smoke' and report['frames'] == 2
    assert report['draft'] == 'dflash-l2-b8-w8-flat'
    assert report['p50'] == report['streaming']['p50'] > 0
    for way in WAYS:
        stages = report[way]['stages']
        assert set(stages) >= {'encode', 'prefill', 'decode', 'action'}
        assert sum(stage['p50'] for stage in stages.values()) <= 1.5 * report[way]['p99']
        assert report[way]['tokens'] == report['streaming']['tokens']  # the same plans
        assert report[way]['token_mismatches'] == 0
    assert report['token_mismatches'] == report['nondeterministic_frames'] == 0
    assert (report['loop'], report['host_syncs_per_frame']) == ('host', None)
    assert report['autoregressive']['iterations'] == report['autoregressive']['tokens'] - 1


def test_the_device_resident_loop_says_the_same_and_counts_its_waits():
    report = bench_frame(frames=2, loop='while', warm_up=1)
    assert report['token_mismatches'] == report['nondeterministic_frames'] == 0
    assert (report['loop'], report['host_syncs_per_frame']) == ('while', 1)
    assert report['allocations_after_warmup'] == 0


def test_a_way_that_says_something_else_is_named(monkeypatch):
    plan, made = Planner.plan, []

    def other(planner, observation):
        found = plan(planner, observation)
        made.append(found)
        if planner._reuse and len(made) % 2:
            said = replace(found.reasoning, token_ids=found.reasoning.token_ids[:-1])
            return replace(found, reasoning=said)
        return found

    monkeypatch.setattr(Planner, 'plan', other)
    report = bench_frame(frames=2, warm_up=0, tokens=3)
    assert {name: report[name]['token_mismatches'] for name in WAYS} == {
        'streaming': 1, 'stateless': 0, 'autoregressive': 0, 'cold': 0}
    assert report['token_mismatches'] == 1


def test_a_folder_of_another_profile_is_refused(tmp_path):
    target, tokenizer = new_target(smoke=True)
    folder = export(target, tokenizer, tmp_path, {})
    with pytest.raises(ConfigurationError, match=f"profile 'tiny': {folder} holds smoke; leave"):
        bench_frame('tiny', frames=1, checkpoint=folder)
    done = CliRunner().invoke(cli, ['bench', 'frame', '--profile', 'alpamayo-1.5', '--checkpoint',
                                    str(folder)])
    assert done.exit_code != 0 and 'holds smoke' in str(done.exception)
    with pytest.raises(EngineError, match='does not exist: give the folder that holds config.json '
                                          'and the weights'):
        bench_frame(checkpoint=tmp_path / 'none')


def test_percentiles_of_a_ramp():
    assert percentiles(list(range(101))) == {'p50': 50.0, 'p95': 95.0, 'p99': 99.0}
    assert percentiles([]) == {}


def test_no_frames_is_refused():
    with pytest.raises(ConfigurationError, match='frames 0'):
        bench_frame(frames=0)
