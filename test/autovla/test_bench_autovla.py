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
"""The bench of the tiny profile: whole report, exact answers, forced lengths met."""

import json

from click.testing import CliRunner
import pytest
import torch

from rspec_planner.cli import cli
from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.autovla_profiles import (
    autovla_profile,
    AUTOVLA_PROFILES,
    tiny_codebook,
)
from rspec_planner.evaluate.bench_autovla import (
    bench_autovla,
    DRAFTS,
    lengths_of,
    random_autovla,
    random_draft,
    random_prompt,
)
from rspec_planner.planner.autovla import Speaker


@pytest.fixture(scope='module')
def report():
    return bench_autovla(frames=1, lengths=(3.0,), block=6, tokens=20)


def test_every_way_says_the_same(report):
    assert report['token_mismatches'] == report['token_mismatches_width_1'] == 0
    assert set(report['ways']) == {'one token', *(f'{name}, L=3' for name in DRAFTS)}
    assert report['weights'] == 'random' and report['accepted_lengths'] == 'forced'


def test_forced_lengths_are_met(report):
    for name, way in report['ways'].items():
        assert way['accepted_length'] == (1.0 if name == 'one token' else 3.167)
        assert way['p50'] > 0 and report['speedup_vs_one_token'][name] > 0
    assert lengths_of(20, 3.0, 6) == [4, 3, 3, 3, 3, 3]
    assert lengths_of(20, 99.0, 6) == [5, 5, 5, 4]  # a verify of six rows commits no more


def test_random_weights_say_more_than_one_word():
    cfg = autovla_profile('autovla-tiny')
    target = random_autovla(cfg, torch.device('cpu'), torch.float32)
    prompt = random_prompt(cfg, 0)
    speaker = Speaker(target, prompt_rows=prompt.length, budget=48, stop_ids=())
    with torch.inference_mode():
        speaker.see(torch.zeros((cfg.num_images, 2, cfg.video.height, cfg.video.width, 3),
                                dtype=torch.uint8))
        speaker.read(prompt)
        said, _ = speaker.say()
    assert len(said) == 48 and len(set(said)) > 12


def test_profiles():
    tiny, full = autovla_profile('autovla-tiny'), autovla_profile('autovla')
    assert (tiny.name, full.name) == AUTOVLA_PROFILES
    assert tiny.tokens.num_actions == tiny_codebook().size == 64
    assert tiny.text.tied_head and not tiny.text.qk_norm and not tiny.text.mrope_interleaved
    with pytest.raises(ConfigurationError, match='use one of autovla-tiny, autovla'):
        autovla_profile('autovla-huge')
    assert 0.01 < sum(w.numel() for w in random_draft(
        random_autovla(tiny, torch.device('cpu'), torch.float32), 'dflash', 'flat', 8
    ).parameters()) / 2e6 < 1


def test_commands():
    run = CliRunner()
    shown = run.invoke(cli, ['profiles', '--json'])
    rows = {row['name']: row for row in json.loads(shown.output.splitlines()[-1])['profiles']}
    assert set(AUTOVLA_PROFILES) | {'tiny', 'alpamayo-r1'} <= set(rows)
    assert rows['autovla']['parameters'] == 3_758_262_272
    assert rows['autovla']['visual_tokens'] == 720 and rows['autovla']['vocabulary'] == 153_713
    timed = run.invoke(cli, ['bench', 'decode', '--profile', 'autovla-tiny', '--frames', '1',
                             '--length', '4', '--block', '4', '--json'])
    assert timed.exit_code == 0, timed.output
    assert json.loads(timed.output.splitlines()[-1])['token_mismatches'] == 0


@pytest.mark.parametrize('over', [{'frames': 0}, {'tokens': 1}, {'block': 1},
                                  {'lengths': (0.5,)}, {'profile': 'autovla-x'}])
def test_impossible_options_are_named(over):
    with pytest.raises(ConfigurationError):
        bench_autovla(**over)
