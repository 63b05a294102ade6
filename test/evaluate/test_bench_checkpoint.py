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
"""The proof at full size, at a size that fits a test; and that it can fail."""

from dataclasses import replace

import pytest
import torch
from upstream_rig import edit_shard, released_profile

from rspec_planner.cli import main
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate import bench_checkpoint as module
from rspec_planner.evaluate.bench_checkpoint import bench_checkpoint, noise_observation
from rspec_planner.evaluate.reference_backbone import ReferenceBackbone
from rspec_planner.evaluate.synthetic_checkpoint import upstream_config, write_checkpoint
from rspec_planner.model.config import alpamayo_1_5, alpamayo_r1
from rspec_planner.model.upstream_config import read_upstream_config

PARTS = {'features', 'deepstack', 'logits', 'keys', 'values', 'velocity'}


@pytest.fixture(scope='module')
def profile():
    small = released_profile()
    return replace(small, text=replace(small.text, num_layers=2),
                   vision=replace(small.vision, depth=3, deepstack_layers=(0, 2)))


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(module, 'FRAMES', 2)
    monkeypatch.setattr(module, 'TOKENS', 6)


@pytest.mark.parametrize(('dtype', 'loop'), [(torch.float32, 'host'), (torch.bfloat16, 'while')])
def test_a_folder_is_written_loaded_driven_and_compared(profile, tmp_path, dtype, loop):
    report = bench_checkpoint(profile, 'cpu', tmp_path, shards=2, dtype=dtype, loop=loop)
    steps = [report[name] for name in ('write', 'doctor', 'load', 'frame', 'compare')]
    assert [step.get('error') for step in steps] == [None] * 5
    assert report['ok']
    assert report['load']['bytes'] == report['load']['parameters'] * dtype.itemsize
    assert report['frame']['tokens'] == report['compare']['of_words'] == 6
    assert report['frame']['loop'] == loop
    assert set(report['compare']['relative_error']) == PARTS
    assert ('against_float32' in report['compare']) == (dtype != torch.float32)
    assert not (tmp_path / 'checkpoint').exists()


def test_a_step_that_fails_is_told_and_the_others_go_on(profile, tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError('no such\nkernel')

    monkeypatch.setattr(module, 'Planner', broken)
    report = bench_checkpoint(profile, 'cpu', tmp_path, shards=2, keep=True)
    assert not report['ok'] and not report['frame']['ok'] and report['compare']['ok']
    assert report['frame']['error'] == 'RuntimeError: no such kernel'
    with pytest.raises(ConfigurationError, match='checkpoint exists'):
        bench_checkpoint(profile, 'cpu', tmp_path)


def test_a_wrong_weight_is_seen(profile, tmp_path, monkeypatch):
    class Twisted(ReferenceBackbone):
        def read(self, *arguments):
            with torch.no_grad():
                self.vlm.model.language_model.layers[1].mlp.up_proj.weight[0].neg_()
            return super().read(*arguments)

    monkeypatch.setattr(module, 'ReferenceBackbone', Twisted)
    report = bench_checkpoint(profile, 'cpu', tmp_path, shards=2)
    assert report['compare']['relative_error']['logits'] > 1e-4
    assert not report['compare']['ok'] and not report['ok']


def test_time_runs_out(profile, tmp_path):
    report = bench_checkpoint(profile, 'cpu', tmp_path, shards=2, seconds=30.0)
    assert not report['ok'] and 'left out' in report['compare']['error']


def test_transformers_and_the_folder_must_agree(profile, tmp_path):
    write_checkpoint(tmp_path, profile, shards=2)
    edit_shard(tmp_path, lambda tensors: tensors.pop('vlm.model.visual.pos_embed.weight'))
    with pytest.raises(EngineError, match='disagree about 1 tensors, vlm.model.visual.pos_embed'):
        ReferenceBackbone(tmp_path, torch.device('cpu'), torch.float32)


def test_an_unknown_profile(tmp_path):
    with pytest.raises(ConfigurationError, match='alpamayo-r1'):
        bench_checkpoint('tiny', 'cpu', tmp_path)


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    arguments = ['bench', 'checkpoint', '--profile', 'tiny', '--device', 'cpu', '--out',
                 str(tmp_path)]
    assert main(arguments) == 2
    assert "profile 'tiny': use one of alpamayo-r1" in capsys.readouterr().err


def test_neighbouring_frames_share_images(profile):
    first, second = (noise_observation(profile, frame=k) for k in (0, 1))
    assert (first.images[:, 1:] == second.images[:, :-1]).all()
    assert not (first.images[:, 0] == second.images[:, 0]).all()
    assert (first.image_stamps_ns[:, 1:] == second.image_stamps_ns[:, :-1]).all()


@pytest.mark.parametrize(('made', 'kind'), [(alpamayo_r1, 'alpamayo_r1'),
                                            (alpamayo_1_5, 'alpamayo1_5')])
def test_the_written_config_reads_back_as_the_profile(made, kind, tmp_path):
    import json
    config = upstream_config(made(), kind)
    (tmp_path / 'config.json').write_text(json.dumps(config))
    assert read_upstream_config(tmp_path).profile == made()
    del config['vlm_config']  # as released: the backbone is named, its shapes are known
    (tmp_path / 'config.json').write_text(json.dumps(config))
    assert read_upstream_config(tmp_path).profile == made()
