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
"""The benches of the device-resident planner, as a CPU runs them: correctness only."""

from collections import Counter
from dataclasses import replace
import json

import pytest

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate.bench_decode import Bed, bench_decode, BUDGET, profile_config
from rspec_planner.evaluate.bench_device_frame import bench_device_frame
from rspec_planner.evaluate.bench_drafts import bench_drafts
from rspec_planner.evaluate.bench_kernels import bench_kernels, kernel_times
from rspec_planner.evaluate.bench_workload import (
    bench_prompt,
    fixed_schedule,
    matches,
    traced_schedule,
)
from rspec_planner.evaluate.gpu_goals import goal_table, GOALS, lines
from rspec_planner.evaluate.gpu_session import run_session
from rspec_planner.evaluate.gpu_state import summary, watched
from rspec_planner.model.config import alpamayo_r1


def test_the_prompt_has_the_published_layout():
    """3,006 tokens, 2,880 visual, rope_delta -2592 and last position 413 (docs of R1)."""
    profile = alpamayo_r1()
    prompt = bench_prompt(profile, 3)
    assert len(prompt.ids) == 3006
    assert int((prompt.ids == profile.tokens.image_pad).sum()) == 2880
    assert (prompt.rope_delta, prompt.positions[:, -1].tolist()) == (-2592, [413] * 3)


@pytest.mark.parametrize('length', [1.0, 4.6, 7.4])
def test_a_fixed_schedule_meets_its_length(length):
    schedule = fixed_schedule(200, length, 16)
    assert schedule.accepted_length == pytest.approx(length, abs=0.05)
    assert sum(schedule.tokens) / 200 == pytest.approx(17.4, abs=0.05)
    for tokens, committed in zip(schedule.tokens, schedule.committed):
        assert sum(committed) == tokens - 1
        assert max(committed) <= 16


def test_matches_leave_out_the_bonus_except_at_the_end():
    assert matches((4, 5, 3), 16, 5).tolist() == [3, 4, 3, 0, 0]
    assert matches((16,), 16, 2).tolist() == [15, 0]
    assert matches((), 16, 2).tolist() == [0, 0]


def test_a_trace_repeats_and_names_what_is_wrong(tmp_path):
    path = tmp_path / 'trace.json'
    path.write_text(json.dumps({'name': 'x', 'frames': [
        {'tokens': 8, 'committed': [7]}, {'tokens': 6, 'committed': [2, 3]}]}))
    schedule = traced_schedule(path, 3)
    assert schedule.tokens == (8, 6, 8)
    assert schedule.accepted_length == pytest.approx(19 / 4)
    path.write_text('{"frames": []}')
    with pytest.raises(EngineError, match='acceptance_trace'):
        traced_schedule(path, 3)


def test_decode_says_the_same_in_every_way():
    report = bench_decode(frames=2, eager=1, block=8)
    assert report['weights'] == 'random' and report['accepted_lengths'] == 'forced'
    for name, way in report['ways'].items():
        assert way['token_mismatches'] == 0, name
    assert report['ways']['one token']['accepted_length'] == 1.0
    assert 3.5 < report['ways']['L=4.6, eager']['accepted_length'] < 5.5
    assert report['eager']['tokens'] == 17
    assert report['reasoning_speedup_vs_eager']['L=4.6, eager'] > 0


@pytest.mark.parametrize(('reuse_in', 'iterations'), [('verify', 2), ('prefill', 0)])
def test_frames_keep_their_text_in_every_way(reuse_in, iterations):
    report = bench_device_frame('tiny', 'cpu', 6, eager=0, lengths=(7.4,), samples=2, block=10,
                                reuse_in=reuse_in, per_prompt=4)
    assert report['nondeterministic_frames'] == 0
    assert (report['repeated_frames'], report['prompts'], report['ways_compared']) == (3, 2, 1)
    assert {name: (way['token_mismatches'], way['frames'])
            for name, way in report['ways'].items()} == {
        'L=7.4': (0, 4), 'whole text reused': (0, 2)}
    assert report['token_mismatches'] == 0 and report['host_syncs_per_frame'] > 1
    assert report['ways']['whole text reused']['iterations_per_frame'] == iterations


def test_a_leftover_that_is_read_is_counted(monkeypatch):
    """Frames that do depend on what earlier ones left must not pass for deterministic."""
    from rspec_planner.engine.cuda_decoder import Prefill
    plain = Prefill.__call__

    def forgetful(self):
        leftover = self.cache.values[0, 0, 0, -1, 0].clone()
        plain(self)
        self.cache.values[:, 0, :, :40] += 1e-3 * leftover
    monkeypatch.setattr(Prefill, '__call__', forgetful)
    report = bench_device_frame('tiny', 'cpu', 2, eager=0, lengths=(7.4,))
    assert report['nondeterministic_frames'] == 1
    assert report['ways']['whole text reused'] == {'frames': 0}  # and no times


def test_every_kind_of_draft_is_timed_beside_its_verify():
    report = bench_drafts('tiny', 'cpu')
    assert set(report['drafts']) == {
        'dflash-l2-b16-w8-flat-rv', 'dflash-l2-b16-wall-flat-rv', 'dflash-l2-b16-wall-mirror-rv',
        'eagle3-b8-w8-flat-rv', 'eagle3-b8-wall-flat-rv'}
    for name, draft in report['drafts'].items():
        assert draft['c'] == pytest.approx(draft['block_ms'] / report['target_step_ms'])
        assert (draft['prompt_ms'] > 0) == ('wall' in name), name


def test_the_check_compares_a_device_with_its_references():
    report = bench_kernels()
    assert report['ok']
    assert report['small_frames']['said'] == report['small_frames']['expected']
    assert report['verify_check']['choices_equal'] == report['verify_check']['choices']
    parts = ('qkv + rotary + K/V write', 'attention', 'out + sum + norm', 'gate and up',
             'down + sum + norm')
    assert set(report['kernels_us']) == {
        *parts, 'head + argmax', 'accept', *(f'flow, {part}' for part in parts)}
    assert min(report['kernels_us'].values()) > 0


def test_the_launches_that_are_timed_are_those_of_a_layer(monkeypatch):
    bed, called = Bed.make('tiny', 'cpu'), []
    bed.begin(bench_prompt(bed.target.cfg, 0), BUDGET)
    rows = bed.frame.verify.runner

    def noted(name):
        kernel = getattr(rows.kernels, name)
        return lambda *args, **options: (called.append(name), kernel(*args, **options))[1]

    rows.kernels = replace(rows.kernels, **{name: noted(name) for name in (
        'linear', 'product', 'gather', 'rotate', 'attend', 'norm')})
    bed.frame.verify()
    whole = Counter(called)
    whole['norm'] -= 1  # the first layer's, which no layer before it takes
    called.clear()
    monkeypatch.setattr('rspec_planner.evaluate.bench_kernels.repeat',
                        lambda bed, body, repeats=0: (body(), {'p50': 1.0})[1])
    kernel_times(bed)
    assert Counter(called) == whole and called


def step(**values):
    return {'profile': 'tiny', 'device': 'cpu', **values}


def test_goals_are_met_missed_or_open(tmp_path):
    decode = step(verify_over_floor=1.2, c=0.09, prefill_ms={'p50': 64.0}, flow_ms=13.0,
                  reasoning_speedup_vs_eager={'L=4.6, sync': 40.0, 'L=4.6, while': 31.0})
    frames = step(p99=99.0, host_syncs_per_frame=1, allocations_after_warmup=0, frames=600,
                  token_mismatches=0, nondeterministic_frames=0,
                  frame_speedup_vs_original={'L=4.6': 11.0})
    other = {**step(p99=1.0), 'profile': 'alpamayo-r1'}
    for name, found in (('decode', decode), ('frame1000', frames), ('frame_fp8', other)):
        (tmp_path / f'{name}.json').write_text(json.dumps(found))
    (tmp_path / 'plans.json').write_text('[]')
    table = goal_table(tmp_path, 'tiny', 'cpu')
    met = {key: line['met'] for key, line in table.items()}
    assert met == {
        'verify16_over_floor': True, 'c': False, 'reasoning_speedup_vs_eager': True,
        'reasoning_speedup_vs_graphed_ar': None, 'prefill_3006_ms': True, 'flow10_ms': True,
        'frame_ms.p99': True, 'frame_speedup_vs_original': False, 'frame_fp8_ms.p99': None,
        'host_syncs_per_frame': True, 'allocations_after_warmup': True, 'token_mismatches': True,
        'nondeterministic_frames': None}  # 600 frames prove no determinism over 1,000
    assert table['reasoning_speedup_vs_eager']['value'] == 31.0
    assert table['frame_fp8_ms.p99']['why'] == 'not measured: run frame_fp8'
    assert '600 frames ran' in table['nondeterministic_frames']['why']
    assert len(lines(table)) == len(GOALS)


def test_samples_of_a_gpu_are_summed_up():
    found = summary([{'sm_mhz': 1980.0, 'throttle_reasons': 4.0}, {'sm_mhz': 1500.0},
                     {'sm_mhz': 1980.0, 'throttle_reasons': 1.0, 'power_w': 600.0}])
    assert found == {'samples': 3, 'sm_mhz': {'min': 1500.0, 'p50': 1980.0, 'max': 1980.0},
                     'throttle_reasons': '0x5', 'power_w': {'min': 600.0, 'p50': 600.0,
                                                            'max': 600.0}}
    with watched('cpu') as state:
        pass
    assert state == {}


def test_a_session_writes_a_file_a_step_and_goes_on(tmp_path):
    report = run_session('tiny', 'cpu', tmp_path, 1000.0, ['check', 'sync'])
    assert report['ok'] and report['goals']['c']['met'] is None
    assert sorted(p.stem for p in tmp_path.glob('*.json')) == ['check', 'sync']
    late = run_session('tiny', 'cpu', tmp_path, 10.0, ['frame'])
    assert late['steps']['frame'].startswith('left out')
    with pytest.raises(ConfigurationError, match="step 'nonsense'"):
        run_session('tiny', 'cpu', tmp_path, 10.0, ['nonsense'])


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigurationError, match="profile 'huge'"):
        profile_config('huge')
    with pytest.raises(ConfigurationError, match='frames 0'):
        bench_decode(frames=0)
    for values, words in (({'frames': 0}, 'frames 0'), ({'per_prompt': 3}, 'per_prompt 3'),
                          ({'reuse_in': 'draft'}, "reuse_in 'draft'")):
        with pytest.raises(ConfigurationError, match=words):
            bench_device_frame('tiny', 'cpu', **values)
