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
"""What the loader of released folders does besides arithmetic: names, fields, buffers, memory."""

import json
import math

import pytest
from safetensors.torch import load_file, save_file
import torch
from upstream_rig import (
    edit_config,
    edit_shard,
    make_upstream,
    save_folder,
    upstream_profile,
    written_config,
)

from rspec_planner.errors import EngineError
from rspec_planner.evaluate.synthetic_checkpoint import write_checkpoint
from rspec_planner.model import upstream_checkpoint
from rspec_planner.model.action import FourierEncoder
from rspec_planner.model.checkpoint import load_target
from rspec_planner.model.config import alpamayo_1_5, alpamayo_r1
from rspec_planner.model.draft_checkpoint import target_digest
from rspec_planner.model.target import Target
from rspec_planner.model.upstream_checkpoint import empty_target, load_upstream
from rspec_planner.model.upstream_config import read_upstream_config
from rspec_planner.model.upstream_folder import INDEX_NAME, is_upstream
from rspec_planner.model.upstream_keys import is_buffer, key_table

EXACT = torch.tensor([10 ** (2 * k / 9) for k in range(10)])
#: as bf16 holds them
ROUNDED = torch.tensor([1, 1.671875, 2.78125, 4.65625, 7.75, 12.9375, 21.5, 36, 60, 100])


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path, upstream_profile(), 'alpamayo1_5', shards=2)
    return tmp_path


def fails(folder, *parts):
    with pytest.raises(EngineError) as caught:
        load_target(folder)
    assert '\n' not in str(caught.value)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


# --- names and shapes -------------------------------------------------------------------------


def test_the_released_size_has_the_released_keys():
    table = key_table(alpamayo_r1(), 'flat')
    sides = [name.split('.')[0] for name in table]
    assert [sides.count(side) for side in ('vlm', 'expert')] == [750, 397]
    assert sides.count('action_in_proj') == 10 and sides.count('action_out_proj') == 2
    assert sum(math.prod(shape) for _, shape in table.values()) == 11_078_526_194
    shapes = {name: list(shape) for name, (_, shape) in table.items()}
    assert shapes['vlm.model.visual.patch_embed.proj.weight'] == [1152, 3, 2, 16, 16]
    assert shapes['vlm.model.visual.blocks.26.attn.qkv.weight'] == [3456, 1152]
    assert shapes['vlm.model.visual.deepstack_merger_list.2.linear_fc2.weight'] == [4096, 4608]
    assert shapes['vlm.lm_head.weight'] == [155_697, 4096]
    assert shapes['expert.layers.35.mlp.gate_proj.weight'] == [8256, 2048]
    assert shapes['action_in_proj.encoder.trunk.0.weight'] == [512, 60]


def test_the_nested_layout_of_alpamayo_2_super():
    table = key_table(upstream_profile(), 'nested')
    assert {'vlm.lm_head.weight', 'expert.expert.layers.0.self_attn.q_proj.weight',
            'expert.expert.norm.weight', 'expert.action_in_proj.encoder.trunk.0.weight',
            'expert.action_out_proj.bias'} <= set(table)
    assert not any(name.startswith('action_') for name in table)


@pytest.mark.parametrize(('name', 'is_one'), [
    ('action_in_proj.sinus.0.freqs', True), ('action_in_proj.sinus.2.freqs', False),
    ('expert.action_in_proj.timestep_fourier_encoder.freqs', True),
    ('action_space.curvature_std', True), ('action_space.jerk_std', False),
    ('vlm.model.language_model.rotary_emb.inv_freq', True),
    ('vlm.model.visual.rotary_pos_emb.inv_freq', True), ('vlm.lm_head.bias', False)])
def test_buffers_are_told_from_weights(name, is_one):
    assert is_buffer(name) == is_one


# --- config -----------------------------------------------------------------------------------


def test_a_released_config_gives_the_released_profile(tmp_path):
    for make, kind in ((alpamayo_r1, 'alpamayo_r1'), (alpamayo_1_5, 'alpamayo1_5')):
        config = written_config(make(), kind)
        del config['vlm_config'], config['diffusion_cfg']['num_inference_steps']
        config['vlm_name_or_path'] = '/models/nvidia/Cosmos-Reason2-8B/'
        (tmp_path / 'config.json').write_text(json.dumps(config))
        assert read_upstream_config(tmp_path).profile == make()


def test_ids_are_read_not_assumed(folder):
    profile = load_target(folder).cfg
    assert profile.tokens == upstream_profile().tokens
    config = json.loads((folder / 'config.json').read_text())
    moved = {name: number + 3 for name, number in config['traj_token_ids'].items()}
    edit_config(folder, traj_token_ids=moved, vocab_size=112,
                traj_token_start_idx=config['traj_token_start_idx'] + 3)
    tokens = read_upstream_config(folder).profile.tokens
    assert tokens.cot_start == profile.tokens.cot_start + 3
    assert tokens.traj_future_start == profile.tokens.traj_future_start + 3
    assert (tokens.forbidden_start, tokens.forbidden_end) == (39, 79)


@pytest.mark.parametrize(('change', 'parts'), [
    ({'vocab_size': 90}, ('vocab_size is 90', 'ids go up to')),
    ({'vocab_size': 'many'}, ("vocab_size is 'many'", 'whole number')),
    ({'vocab_size': True}, ('vocab_size is True',)),
    ({'add_special_tokens': False}, ('add_special_tokens', 'cot_start')),
    ({'traj_token_ids': None}, ('traj_token_ids is missing',)),
    ({'traj_token_start_idx': 37}, ('traj_token_ids.', 'behind 40 bins from 37')),
    ({'tokens_per_history_traj': 45}, ('tokens_per_history_traj is 45', '48')),
    ({'expert_cfg': None}, ('expert_cfg is missing',)),
    ({'action_in_proj_cfg': {'_target_': 'x.PerWaypointActionInProj'}},
     ('action_in_proj_cfg._target_', 'PerWaypointActionInProjV2')),
    ({'diffusion_cfg': {'_target_': 'a.FlowMatching', 'int_method': 'heun'}},
     ('diffusion_cfg.int_method', 'heun')),
    ({'hist_traj_tokenizer_cfg': {'predict_yaw': True}}, ('predict_yaw',)),
    ({'quantization_config': {'quant_method': 'fp8'}}, ('quantization_config',)),
    ({'expert_non_causal_attention': False}, ('expert_non_causal_attention',)),
    ({'vlm_config': None, 'vlm_name_or_path': 'Qwen/Qwen3-VL-32B-Instruct'},
     ('vlm_name_or_path', 'Qwen3-VL-32B-Instruct', 'vlm_config'))])
def test_a_field_that_is_wrong_is_named(folder, change, parts):
    edit_config(folder, **change)
    fails(folder, 'config.json', *parts)


@pytest.mark.parametrize(('path', 'value', 'part'), [
    (('text_config', 'num_attention_heads'), 5, 'multiple of num_key_value_heads'),
    (('text_config', 'rope_scaling'), {'mrope_section': [5, 4, 4]}, 'mrope_section'),
    (('text_config', 'attention_bias'), True, 'attention_bias'),
    (('vision_config', 'out_hidden_size'), 65, 'out_hidden_size'),
    (('vision_config', 'deepstack_visual_indexes'), [0, 9], 'deepstack_visual_indexes')])
def test_a_backbone_that_cannot_be_is_named(folder, path, value, part):
    config = json.loads((folder / 'config.json').read_text())
    config['vlm_config'][path[0]][path[1]] = value
    (folder / 'config.json').write_text(json.dumps(config))
    fails(folder, 'vlm_config.', part)


# --- buffers and constants --------------------------------------------------------------------


def frequencies(target):
    found = {tuple(module.freqs[0].tolist()) for module in target.modules()
             if isinstance(module, FourierEncoder)}
    assert len(found) == 1
    return torch.tensor(found.pop())


def test_r1_keeps_the_file_s_frequencies(tmp_path):
    write_checkpoint(tmp_path, upstream_profile(), 'alpamayo_r1', shards=2, dtype=torch.float32)
    torch.testing.assert_close(frequencies(load_target(tmp_path)), EXACT, rtol=1e-6, atol=0)
    for number in (0, 1):
        edit_shard(tmp_path, lambda tensors: tensors.update({
            name: tensors[name] * 2 for name in tensors if name.endswith('.freqs')}), number)
    torch.testing.assert_close(frequencies(load_target(tmp_path)), 2 * EXACT, rtol=1e-6, atol=0)


def test_1_5_rounds_them_as_it_was_built(folder):
    target = load_target(folder, dtype=torch.bfloat16)
    assert torch.equal(frequencies(target), ROUNDED)
    assert next(target.expert.action_in_proj.buffers()).dtype == torch.float32


def test_the_nested_model_has_exact_ones(nested):
    torch.testing.assert_close(frequencies(load_target(nested)), EXACT, rtol=1e-6, atol=0)


def test_constants_are_exact_unless_bits_are_compared(folder):
    space = load_upstream(folder).cfg.action_space
    assert space == upstream_profile().action_space
    rounded = load_upstream(folder, bf16_constants=True).cfg.action_space
    assert rounded.accel_mean == pytest.approx(0.0290527, abs=1e-7)
    assert rounded.accel_std == 0.6796875
    assert rounded.curvature_mean == pytest.approx(0.00026894, abs=1e-8)
    assert rounded.curvature_std == pytest.approx(0.0261230, abs=1e-7)


def test_a_misshaped_buffer_is_named(tmp_path):
    write_checkpoint(tmp_path, upstream_profile(), 'alpamayo_r1', shards=2)
    name = 'action_in_proj.sinus.0.freqs'
    for number in (0, 1):
        edit_shard(tmp_path, lambda tensors: tensors.update(
            {name: torch.zeros(1, 7)} if name in tensors else {}), number)
    fails(tmp_path, name, '[1, 7]', '[1, 10]')


# --- loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_weights_come_in_the_asked_dtype(folder, dtype):
    target = load_target(folder, dtype=dtype)
    assert {weight.dtype for weight in target.parameters()} == {dtype}
    assert not any(weight.requires_grad for weight in target.parameters())
    [path] = [p for p in folder.glob('*.safetensors') if 'vlm.lm_head.weight' in load_file(p)]
    stored = load_file(path)['vlm.lm_head.weight']
    assert torch.equal(target.text.lm_head.weight, stored.to(dtype))


def test_other_dtypes_are_refused(folder):
    with pytest.raises(EngineError, match='float8_e4m3fn'):
        load_upstream(folder, dtype=torch.float8_e4m3fn)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(folder, monkeypatch):
    monkeypatch.setattr(upstream_checkpoint, 'free_bytes', lambda _: 10_000)
    monkeypatch.setattr(upstream_checkpoint, '_fill', None)
    fails(folder, '0.0 GB of weights in float32', 'free on cpu', 'rspec doctor --checkpoint')
    monkeypatch.setattr(upstream_checkpoint, 'free_bytes', lambda _: None)

    def full(*arguments):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB.\nMore')

    monkeypatch.setattr(upstream_checkpoint, 'empty_target', full)
    fails(folder, 'CUDA out of memory', 'rspec doctor --checkpoint')


def test_the_free_memory_is_that_of_the_machine():
    assert 2 ** 26 < upstream_checkpoint.free_bytes(torch.device('cpu')) < 2 ** 50


def test_joined_projections_cost_no_second_copy(folder):
    target = load_target(folder)
    for layer in (*target.text.layers, *target.expert.layers):
        packed, attention = layer.packed, layer.self_attn
        assert packed.qkv.data_ptr() == attention.q_proj.weight.data_ptr()
        assert packed.gate_up.data_ptr() == layer.mlp.gate_proj.weight.data_ptr()
        assert packed.qkv.t()[-1].tolist() == attention.v_proj.weight[-1].tolist()
        held = attention.k_proj.weight.untyped_storage()
        assert held.nbytes() == packed.qkv.nbytes


def test_a_target_packed_again_is_the_same(folder):
    target = load_target(folder)
    before = [layer.packed.qkv.data_ptr() for layer in target.text.layers]
    assert [layer.packed.qkv.data_ptr() for layer in target.pack().text.layers] == before
    moved = target.to(torch.float64).pack()
    assert torch.equal(moved.text.layers[0].packed.qkv.t()[:144],
                       moved.text.layers[0].self_attn.q_proj.weight)


def test_an_empty_target_has_every_weight_and_no_more():
    profile = upstream_profile()
    with torch.device('meta'):
        want = {name: tuple(w.shape) for name, w in Target(profile).state_dict().items()}
    made = empty_target(profile, torch.device('cpu'), torch.bfloat16)
    assert {name: tuple(w.shape) for name, w in made.state_dict().items()} == want
    assert not any(weight.is_meta for weight in made.state_dict().values())


def test_one_file_without_an_index(folder):
    joined = {}
    for path in list(folder.glob('*.safetensors')):
        joined |= load_file(path)
        path.unlink()
    (folder / INDEX_NAME).unlink()
    save_file(joined, folder / 'model.safetensors')
    assert load_target(folder).num_parameters() == sum(w.numel() for w in joined.values())
    (folder / 'model.safetensors').rename(folder / 'other.safetensors')
    fails(folder, INDEX_NAME, 'missing')


def test_an_index_that_names_another_shard_is_refused(folder):
    index = json.loads((folder / INDEX_NAME).read_text())
    index['weight_map']['vlm.lm_head.weight'] = 'model-00001-of-00002.safetensors'
    (folder / INDEX_NAME).write_text(json.dumps(index))
    fails(folder, 'maps tensor vlm.lm_head.weight', 'model-00002-of-00002')


def test_folders_are_told_apart(folder, tmp_path):
    assert is_upstream(folder)
    (folder / 'manifest.json').write_text('{}')
    assert not is_upstream(folder)
    assert not is_upstream(tmp_path / 'nowhere')


# --- identity ---------------------------------------------------------------------------------


def test_the_fingerprint_is_of_the_weights_not_of_their_files(tmp_path):
    profile, config = upstream_profile(), written_config()
    state = make_upstream(profile, config).state()
    folders = [save_folder(tmp_path / str(shards), state, config, shards)
               for shards in (2, 5)]
    first = target_digest(folders[0])
    assert first == target_digest(folders[1])
    edit_shard(folders[1], lambda tensors: tensors[next(iter(tensors))].flatten()[0].add_(1))
    assert target_digest(folders[1]) != first
    assert len(first) == 64


# --- Alpamayo 2 Super -------------------------------------------------------------------------


@pytest.fixture
def nested(tmp_path):
    """Return a folder of the second layout: nested config, expert one level deeper."""
    flat = tmp_path / 'flat'
    write_checkpoint(flat, upstream_profile(), 'alpamayo1_5', shards=2)
    config = json.loads((flat / 'config.json').read_text())
    state = {}
    for path in flat.glob('*.safetensors'):
        state |= load_file(path)
    deep = {}
    for name, tensor in state.items():
        if name.startswith('expert.'):
            name = 'expert.' + name
        elif name.startswith('action_'):
            name = 'expert.' + name
        deep[name] = tensor
    ids, behind = config['traj_token_ids'], config['traj_token_start_idx']
    text = config['vlm_config']['text_config']
    return save_folder(tmp_path / 'nested', deep, {
        'model_type': 'alpamayo2_super', 'architectures': ['Alpamayo2Super'],
        'vlm_config': config['vlm_config'], 'history_vocab_size': 10, 'future_vocab_size': 30,
        'tokens_per_history_traj': 45, 'hist_traj_tokenizer_cfg': {
            'num_bins': 10, 'pad_origin_at_beginning': False},
        'traj_ids': {'history_pad': ids['history'], 'future_pad': ids['future'],
                     **{name: ids[name] for name in ('history_start', 'future_start',
                                                     'history_end', 'future_end')},
                     'history_id0': behind, 'future_id0': behind + 10},
        'expert_config': {
            'llm_config': {**text, **config['expert_cfg']}, 'action_space_cfg':
            config['action_space_cfg'], 'diffusion_cfg': config['diffusion_cfg'],
            'action_in_proj_cfg': config['action_in_proj_cfg']}}, 2)


def test_the_second_layout_loads_the_same_weights(nested):
    flat, deep = load_target(nested.parent / 'flat'), load_target(nested)
    assert deep.cfg.name == 'alpamayo-2-super'
    assert deep.cfg.history.first_bin_offset == 0 and deep.cfg.cameras.ids == (0, 1, 2, 3, 5, 6)
    want, found = flat.state_dict(), deep.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in want.items())
    assert deep.cfg.text == flat.cfg.text and deep.cfg.expert == flat.cfg.expert


def test_its_prompt_is_not_known_and_so_it_does_not_plan(nested):
    from rspec_planner.planner.pipeline import Planner
    with pytest.raises(EngineError, match='alpamayo2_super is not known here.*R1 or 1.5'):
        Planner.load(nested)
