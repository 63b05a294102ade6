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
"""What the fp8 benches compare, and that they compare it."""

import pytest
import torch

from rspec_planner.cli import main
from rspec_planner.engine.cuda_fp8 import FASTEST, quantise_target, ROWS
from rspec_planner.engine.cuda_random import random_target
from rspec_planner.errors import EngineError
from rspec_planner.evaluate.bench_decode import profile_config
from rspec_planner.evaluate.bench_fp8 import apart, attempt, bench_fp8, fastest
from rspec_planner.evaluate.bench_workload import bench_prompt
from rspec_planner.evaluate.fp8_difference import Answers, difference, Reader, TOKENS


def answer(text, choices, logits, actions=None):
    return Answers(text, choices, torch.tensor(logits),
                   torch.zeros((1, 64, 2)) if actions is None else actions)


def test_the_difference_counts_what_differs():
    cfg = profile_config('tiny')
    faster = torch.zeros((1, 64, 2))
    faster[..., 0] = 1.0
    before = [answer((1, 2, 3), (1, 2), [[3.0, 4.0]]), answer((5,), (5,), [[1.0, 0.0]])]
    after = [answer((1, 9), (1, 2), [[3.0, 3.0]]), answer((5,), (6,), [[1.0, 0.0]], faster)]
    report = difference(cfg, before, after)
    assert report['free'] == {'texts_that_differ': 1, 'tokens': 2 * TOKENS,
                              'tokens_that_differ': 2}
    same = report['same_context']
    assert (same['choices'], same['choices_that_differ']) == (3, 1)
    assert same['logits_relative_error'] == {'mean': pytest.approx(0.1), 'max': pytest.approx(0.2)}
    gain = cfg.action_space.accel_std  # of the action that is one unit larger than nothing
    assert same['trajectory_max_m'] == pytest.approx(0.5 * gain * 6.4 ** 2, rel=0.01)
    assert same['trajectory_mean_m']['p50'] == pytest.approx(0.5 * same['trajectory_mean_m'][
        'p99'], rel=0.05)


def test_a_reader_reads_the_same_text_whatever_it_would_say():
    target = random_target(profile_config('tiny'), torch.device('cpu'), torch.float32)
    reader, prompt = Reader(target), bench_prompt(profile_config('tiny'), 0)
    own = reader.answers(prompt)
    # each choice behind its own text is the next token of that text
    assert own.choices[:len(own.text)] == own.text
    other = tuple((token + 1) % 100 for token in own.text)
    read = reader.answers(prompt, other)
    assert read.text == own.text
    assert read.choices[0] == own.choices[0]
    torch.testing.assert_close(read.logits[0], own.logits[0])
    assert not torch.allclose(read.logits[-1], own.logits[-1])
    assert not torch.equal(read.actions, own.actions)


def test_the_bench_checks_and_times_everything():
    report = bench_fp8('tiny', 'cpu')
    assert report['ok']
    assert set(report['checks']) == {'passes', 'narrow'}
    assert len(report['checks']['narrow']) == 8
    assert set(report['wide_products']) == {'qkv', 'out', 'gate_up', 'down'}
    for rows in report['wide_products'].values():
        assert {'float32', 'row-wise', 'tensor-wise', 'row-wise, fp32 sums'} <= set(rows)
        assert rows['row-wise']['error'] < 1e-6
    assert set(report['quantised']) >= {f'narrow rows {rows}' for rows in ROWS}
    assert set(report['quantised']['fastest'].values()) <= set(ROWS)
    assert report['quantised']['narrow rows e4m3']['verify_ms'] > 0


def test_the_fastest_rows_are_chosen_apart():
    times = {'e4m3': (3.0, 9.0), 'normed': (2.0, 10.0), 'plain': (4.0, 11.0)}
    found = {f'narrow rows {rows}': {'verify_ms': verify, 'flow_ms': flow}
             for rows, (verify, flow) in times.items()}
    assert fastest(found) == {'few': 'normed', 'many': 'e4m3'}
    found['narrow rows e4m3'] = 'CompilationError: no'
    assert fastest(found) == {'few': 'normed', 'many': 'normed'}
    for name in found:
        found[name] = 'RuntimeError: no'
    assert fastest(found) == {'few': 'e4m3', 'many': 'e4m3'}


def test_a_refusal_is_a_result():
    def refuse():
        raise ValueError('not here\nnor there')
    assert attempt(refuse) == 'ValueError: not here'
    assert attempt(lambda: 2.0) == 2.0


def test_what_is_not_finite_is_infinitely_far():
    assert apart(torch.tensor([1.0, float('nan')]), torch.ones(2)) == float('inf')


def test_plans_fit_and_survive_a_file(tmp_path):
    pytest.importorskip('triton', reason='Triton is not installed: requirements-cuda.txt')
    from rspec_planner.engine import cuda_fp8_tune as tune
    from rspec_planner.engine.kernels.fp8_linear import plan8, PLANS8
    from rspec_planner.engine.kernels.linear import SHARED, shared_bytes
    for key in ((6144, 4096, 16, False), (12288, 4096, 16, True), (4096, 12288, 16, False),
                (2048, 8256, 64, False), (8256, 2048, 64, True)):
        plans = tune.candidates(key, 50)
        assert plans[0] == plan8(*key)
        assert len(plans) == len(set(plans)) >= 2
        for plan in plans:
            assert plan.bn == 64
            assert key[1] % plan.bk == 0
            assert shared_bytes(plan, key[2], key[3], 1) <= SHARED
            assert plan.split == 1 or not key[3]
        assert tune.candidates(key, 2) == plans[:2]
    path, before = tmp_path / 'plans_fp8.json', dict(PLANS8)
    try:
        PLANS8[key] = plans[-1]
        tune.save_plans(path)
        PLANS8.clear()
        tune.load_plans(path)
        assert PLANS8 == {**before, key: plans[-1]}
        assert plan8(*key) == plans[-1]
        for text in ('[{"key": 3}]', '{"rows": {"few": "int4"}, "plans": []}', 'no'):
            path.write_text(text)
            with pytest.raises(EngineError, match='not a file of fp8 plans'):
                tune.load_plans(path)
        FASTEST['few'] = 'normed'
        tune.save_plans(path)
        FASTEST['few'] = 'plain'
        tune.load_plans(path)
        target = random_target(profile_config('tiny'), torch.device('cpu'), torch.float32)
        assert quantise_target(target).rows == ('normed', 'e4m3')
    finally:
        FASTEST.update(few='e4m3', many='e4m3')
        PLANS8.clear()
        PLANS8.update(before)


@pytest.mark.parametrize('command', ['decode', 'device-frame', 'frame'])
def test_every_bench_of_the_device_has_the_flag(capsys, command):
    assert main(['bench', command, '--help']) == 0
    assert '--fp8' in capsys.readouterr().out


def test_the_host_frame_refuses_it(capsys):
    assert main(['bench', 'frame', '--profile', 'tiny', '--fp8']) != 0
    assert 'device-resident frame' in capsys.readouterr().err
