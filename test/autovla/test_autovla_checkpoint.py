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
"""Folders that transformers wrote load and say the same; damaged ones are named."""

import json
import shutil

from autovla_reference import reference_inputs, reference_model, small_autovla
from click.testing import CliRunner
import pytest
from safetensors.torch import load_file, save_file
import torch

from rspec_planner.cli import cli
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.autovla_checkpoint import load_autovla, our_name, read_autovla_config
from rspec_planner.model.autovla_config import AutoVlaTokens
from rspec_planner.model.codebook import arc_codebook, CODEBOOK_FILE
from rspec_planner.model.window_vision import patchify_pairs
from rspec_planner.planner.action_tokenizer import build_action_tokenizer
from rspec_planner.planner.autovla import Speaker
from rspec_planner.planner.autovla_folder import AutoVlaFolder
from rspec_planner.planner.autovla_prompt import build_prompt, DEFAULT_WORDING, VehicleState

SHARD = 'model.safetensors'


@pytest.fixture(scope='module')
def codebook():
    return arc_codebook((2.0, 5.0, 9.0), (-0.05, 0.0, 0.05))


@pytest.fixture(scope='module')
def written(tmp_path_factory, codebook):
    """A folder with the real file names, written by transformers."""
    folder = tmp_path_factory.mktemp('autovla')
    tokenizer = build_action_tokenizer(['Yield to the pedestrian.'], codebook.size)
    base = small_autovla().cfg
    text = type(base.text)(**{**vars(base.text), 'vocab_size': tokenizer.tokens.action_end})
    source = small_autovla(text=text, tokens=tokenizer.tokens)
    model = reference_model(source)
    model.save_pretrained(folder)
    codebook.write(folder)
    tokenizer.save(folder)
    wording = {**vars(DEFAULT_WORDING), 'videos': list(DEFAULT_WORDING.videos)}
    (folder / 'wording.json').write_text(json.dumps(wording))
    return folder, source


@pytest.fixture
def folder(written, tmp_path):
    """A copy to damage."""
    return shutil.copytree(written[0], tmp_path / 'copy')


def rewrite(folder, change):
    tensors = load_file(folder / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD, metadata={'format': 'pt'})


def edit(folder, **values):
    path = folder / 'config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@torch.inference_mode()
def test_a_folder_of_transformers_says_what_transformers_says(folder, written):
    found = AutoVlaFolder.load(folder, dtype=torch.float32)
    target = found.target
    assert target.cfg.text == written[1].cfg.text and target.cfg.vision == written[1].cfg.vision
    for name, weight in written[1].state_dict().items():
        assert torch.equal(target.state_dict()[name], weight), name
    assert target.text.lm_head.weight is target.text.embed_tokens.weight
    prompt = build_prompt(target.cfg, found.tokenizer, found.wording, VehicleState(4.0, 0.5))
    speaker = Speaker(target, prompt_rows=prompt.length, budget=12, stop_ids=())
    video, generator = target.cfg.video, torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (target.cfg.num_images, 2, video.height, video.width, 3),
                           dtype=torch.uint8, generator=generator)
    speaker.see(frames)
    speaker.read(prompt)
    said, _ = speaker.say()
    model = reference_model(target)
    model.generation_config.eos_token_id = None
    want = model.generate(**reference_inputs(target, prompt.token_ids.tolist(),
                                             patchify_pairs(frames)),
                          do_sample=False, max_new_tokens=12)
    assert said == tuple(want[0, prompt.length:].tolist())


def test_names_of_both_layouts():
    for theirs in ('visual.blocks.0.norm1.weight', 'model.visual.blocks.0.norm1.weight',
                   'vlm.visual.blocks.0.norm1.weight', 'autovla.vlm.model.visual.blocks.0.norm1.'
                   'weight'):
        assert our_name(theirs) == 'vision.blocks.0.norm1.weight'
    for theirs in ('model.layers.1.mlp.up_proj.weight', 'vlm.model.layers.1.mlp.up_proj.weight',
                   'model.language_model.layers.1.mlp.up_proj.weight'):
        assert our_name(theirs) == 'text.layers.1.mlp.up_proj.weight'
    assert our_name('lm_head.weight') == 'text.lm_head.weight' and our_name('optimizer') == ''


def test_the_layout_of_the_trainer_loads_too(folder, written):
    def rename(tensors):
        for name in list(tensors):
            longer = 'model.' + name.replace('model.', 'language_model.')
            tensors['autovla.vlm.' + longer] = tensors.pop(name)
    rewrite(folder, rename)
    target = load_autovla(folder, written[1].cfg.tokens, dtype=torch.float32)
    assert torch.equal(target.text.norm.weight, written[1].text.norm.weight)


@pytest.mark.parametrize(('change', 'message'), [
    (lambda t: t.pop('model.norm.weight'), 'text.norm.weight is missing'),
    (lambda t: t.update(extra=torch.zeros(2)), 'extra has no place'),
    (lambda t: t.update({'visual.merger.ln_q.weight': torch.zeros(7)}), r'shape \(7,\)'),
    (lambda t: t.update({'model.visual.merger.ln_q.weight': torch.zeros(48)}), 'the same place')])
def test_wrong_tensors_are_named(folder, written, change, message):
    rewrite(folder, change)
    with pytest.raises(EngineError, match=message):
        load_autovla(folder, written[1].cfg.tokens)


@pytest.mark.parametrize(('values', 'message'), [
    ({'model_type': 'qwen3_vl'}, "model_type is 'qwen3_vl'"),
    ({'quantization_config': {}}, 'quantization_config'),
    ({'video_token_id': 9}, 'video_token_id is another than the 5'),
    ({'vision_config': {'out_hidden_size': 5}}, 'out_hidden_size is 5'),
    ({'text_config': {'num_attention_heads': 6}}, 'hidden_size is missing')])
def test_wrong_configurations_are_named(folder, written, values, message):
    edit(folder, **values)
    with pytest.raises(EngineError, match=message):
        read_autovla_config(folder, written[1].cfg.tokens)


def test_missing_and_foreign_parts_are_named(folder, written):
    with pytest.raises(EngineError, match='action tokens end at 31'):
        read_autovla_config(folder, AutoVlaTokens(0, 1, 2, 3, 4, 5, 30, 1))
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])
    with pytest.raises(EngineError, match='damaged or cut off'):
        load_autovla(folder, written[1].cfg.tokens)
    arc_codebook((2.0,), (0.0,)).write(folder)
    with pytest.raises(EngineError, match='tokenizer.json: tokenizer: .* the last entries'):
        AutoVlaFolder.load(folder)
    (folder / CODEBOOK_FILE).unlink()
    with pytest.raises(ConfigurationError, match='no codebook'):
        AutoVlaFolder.load(folder)


def doctor(folder):
    """What rspec doctor --checkpoint finds: exit code, and each check."""
    result = CliRunner().invoke(cli, ['doctor', '--checkpoint', str(folder), '--device', 'cpu',
                                      '--json'])
    report = json.loads(result.output.splitlines()[-1])
    return result.exit_code, {check['name']: check for check in report['checks']}, report


def test_the_doctor_passes_a_whole_folder(folder):
    code, checks, report = doctor(folder)
    assert code == 0 and report['ok'] and report['problems'] == []
    assert report['profile'] == 'autovla' and '10 actions' in checks['codebook']['detail']
    assert set(checks) == {'codebook', 'wording', 'tokenizer', 'config', 'weights', 'use'}


@pytest.mark.parametrize(('damage', 'check'), [
    (lambda f: (f / CODEBOOK_FILE).unlink(), 'codebook'),
    (lambda f: (f / 'wording.json').unlink(), 'wording'),
    (lambda f: (f / 'tokenizer.json').unlink(), 'tokenizer'),
    (lambda f: edit(f, quantization_config={}), 'config'),
    (lambda f: rewrite(f, lambda t: t.pop('model.norm.weight')), 'weights'),
    (lambda f: (f / SHARD).write_bytes(b'\x80\x04pickle'), 'weights')])
def test_the_doctor_names_what_is_wrong(folder, damage, check):
    damage(folder)
    code, checks, report = doctor(folder)
    assert code == 1 and not checks[check]['ok'] and checks[check]['fix']
    assert len(report['problems']) >= 1
