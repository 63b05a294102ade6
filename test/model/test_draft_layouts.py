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
"""
Public draft files, written from modules with the public names, propose here what they propose.

The modules follow the `dflash` wheel 0.1.0 and SpecForge's EAGLE-3 drafts, written out anew.
"""

from __future__ import annotations

from dataclasses import dataclass
import json

from click.testing import CliRunner
from draft_reference import FORBIDDEN, randomise, small_target
import pytest
from safetensors.torch import load_file, save_file
import torch
from torch import nn
from torch.nn import functional

from rspec_planner.cli import cli
from rspec_planner.engine.cuda_draft_rows import check_draft
from rspec_planner.engine.draft_executor import draft_executor
from rspec_planner.engine.stage_draft import draft_stage
from rspec_planner.engine.stages import StageShapes
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.checkpoint import save_target
from rspec_planner.model.config import alpamayo_r1
from rspec_planner.model.draft_checkpoint import load_draft
from rspec_planner.model.draft_layouts import read_public_draft
from rspec_planner.model.taps import TapBuffer
from rspec_planner.train.convert_draft import convert_draft

HIDDEN, HEADS, KV_HEADS, DIM, MIDDLE, THETA, EPS = 32, 4, 2, 8, 40, 10_000.0, 1e-5
CAPACITY, MASK = 40, 16
#: rising target ids of the EAGLE-3 head; 18 lies among those that no CoC has
HEAD_IDS = (0, 1, 2, 4, 7, 9, 13, 15, 18, 25, 30, 33, 38)
CONFIG = {'hidden_size': HIDDEN, 'num_attention_heads': HEADS, 'num_key_value_heads': KV_HEADS,
          'head_dim': DIM, 'intermediate_size': MIDDLE, 'rms_norm_eps': EPS,
          'rope_theta': THETA, 'vocab_size': 40, 'attention_bias': False, 'rope_scaling': None}


def turned(x, positions):
    """Rotate (rows, heads, d) halves by the positions (rows,)."""
    angle = positions[:, None] * THETA ** (-2 * torch.arange(DIM // 2) / DIM)
    cos, sin = (torch.cat((f(angle),) * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self, width, normed):
        super().__init__()
        self.q_proj = nn.Linear(width, HEADS * DIM, bias=False)
        self.k_proj = nn.Linear(width, KV_HEADS * DIM, bias=False)
        self.v_proj = nn.Linear(width, KV_HEADS * DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        self.q_norm = nn.RMSNorm(DIM, EPS) if normed else None
        self.k_norm = nn.RMSNorm(DIM, EPS) if normed else None

    def keys(self, x, positions):
        k = self.k_proj(x).view(len(x), KV_HEADS, DIM)
        return turned(self.k_norm(k) if self.k_norm else k, positions)

    def forward(self, x, positions, keys, values, mask=None):
        q = self.q_proj(x).view(len(x), HEADS, DIM)
        q = turned(self.q_norm(q) if self.q_norm else q, positions).transpose(0, 1)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for y in (keys, values))
        mixed = functional.scaled_dot_product_attention(q, k, v, mask)
        return self.o_proj(mixed.transpose(0, 1).flatten(1))

    def values(self, x):
        return self.v_proj(x).view(len(x), KV_HEADS, DIM)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, MIDDLE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, MIDDLE, bias=False)
        self.down_proj = nn.Linear(MIDDLE, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer of DFlash, or the cell of EAGLE-3, which has a norm more."""

    def __init__(self, eagle=False, normed=True):
        super().__init__()
        self.self_attn = Attention(2 * HIDDEN if eagle else HIDDEN, normed)
        self.mlp = Mlp()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)
        if eagle:
            self.hidden_norm = nn.RMSNorm(HIDDEN, EPS)

    def finish(self, residual, mixed):
        x = residual + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class PublicDflash(nn.Module):
    config = {**CONFIG, 'architectures': ['DFlashDraftModel'], 'num_hidden_layers': 2,
              'num_target_layers': 4, 'block_size': 5, 'layer_types': ['full_attention'] * 2,
              'dflash_config': {'target_layer_ids': [0, 1, 3], 'mask_token_id': MASK}}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.hidden_norm = (nn.RMSNorm(HIDDEN, EPS) for _ in range(2))
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)

    def propose(self, taps, tokens, target):
        """Return logits (B - 1, V) behind the last of tokens (p + 1,); taps: (3, p, H)."""
        p, block = taps.shape[1], self.config['block_size']
        context = self.hidden_norm(self.fc(torch.cat(taps.unbind(0), -1)))
        ids = torch.tensor([int(tokens[-1])] + [MASK] * (block - 1))
        x = target.text.embed_tokens.weight[ids]
        for layer in self.layers:
            attn, normed = layer.self_attn, layer.input_layernorm(x)
            both = torch.cat((context, normed))
            x = layer.finish(x, attn(normed, torch.arange(p, p + block),
                                     attn.keys(both, torch.arange(p + block)),
                                     attn.values(both)))
        logits = target.text.lm_head(self.norm(x)[1:])
        logits[:, FORBIDDEN[0]:FORBIDDEN[1]] = -torch.inf
        return logits


class PublicEagle3(nn.Module):
    config = {**CONFIG, 'architectures': ['LlamaForCausalLMEagle3'], 'num_hidden_layers': 1,
              'draft_vocab_size': len(HEAD_IDS)}
    taps, cell, block = (1, 2, 3), 'midlayer', 5

    def __init__(self, normed=False):
        super().__init__()
        setattr(self, self.cell, Layer(eagle=True, normed=normed)
                if self.cell == 'midlayer' else nn.ModuleList([Layer(True, normed)]))
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.lm_head = nn.Linear(HIDDEN, len(HEAD_IDS), bias=False)
        ids = torch.tensor(HEAD_IDS)
        self.register_buffer('d2t', ids - torch.arange(len(ids)))
        self.register_buffer('t2d', torch.isin(torch.arange(40), ids))

    def propose(self, taps, tokens, target):
        layer = getattr(self, self.cell)
        layer = layer if self.cell == 'midlayer' else layer[0]
        table, p = target.text.embed_tokens.weight, taps.shape[1]
        features = list(self.fc(torch.cat(taps.unbind(0), -1)))
        words, rows = tokens[1:].tolist(), []
        for _ in range(self.block - 1):
            feature, count = torch.stack(features), len(features)
            slots = torch.cat((layer.input_layernorm(table[words]),
                               layer.hidden_norm(feature)), -1)
            attn, at = layer.self_attn, torch.arange(count)
            mixed = attn(slots, at, attn.keys(slots, at), attn.values(slots),
                         torch.ones(count, count, dtype=torch.bool).tril())
            out = layer.finish(feature, mixed)[-1]
            logits = self.lm_head(self.norm(out))
            logits[HEAD_IDS.index(18)] = -torch.inf
            best = int(logits.argmax())
            rows.append(logits)
            words.append(best + int(self.d2t[best]))
            features.append(out)
        assert count == p + self.block - 2
        return torch.stack(rows)


class SpecForgeEagle3(PublicEagle3):
    """The Qwen3 draft of SpecForge: QK-norm, another name of the cell, aux layers named."""

    config = {**PublicEagle3.config, 'architectures': ['Qwen3ForCausalLMEagle3'],
              'eagle_config': {'eagle_aux_hidden_state_layer_ids': [1, 2, 4]}}
    taps, cell = (0, 1, 3), 'layers'

    def __init__(self):
        super().__init__(normed=True)


KINDS = {'dflash': PublicDflash, 'eagle3-llama': PublicEagle3, 'eagle3-qwen': SpecForgeEagle3}


@dataclass
class Rig:
    target: object
    folder: object  # of the target
    public: dict
    sources: dict


@pytest.fixture(scope='module')
def rig(tmp_path_factory):
    root = tmp_path_factory.mktemp('layouts')
    target = small_target()
    save_target(target, root / 'target', {}, torch.float32)
    public, sources = {}, {}
    for name, kind in KINDS.items():
        model = kind().eval().requires_grad_(False)
        randomise(model, seed=len(name))
        public[name], sources[name] = model, root / name
        write(root / name, model.state_dict(), kind.config)
    return Rig(target, root / 'target', public, sources)


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / 'model.safetensors')
    (folder / 'config.json').write_text(json.dumps(config))
    return folder


def copied(rig, name, tmp_path, change=None, **config):
    """Return a copy of a source with changed tensors and config fields."""
    tensors = load_file(rig.sources[name] / 'model.safetensors')
    if change is not None:
        change(tensors)
    return write(tmp_path / 'source', tensors, {**KINDS[name].config, **config})


def proposals(draft, target, taps, tokens):
    """Return what our executor proposes behind the last of tokens (p + 1,)."""
    rows = torch.zeros(CAPACITY, dtype=torch.int64)
    rows[:len(tokens)] = tokens
    buffer = TapBuffer(draft.cfg.taps, 1, CAPACITY, HIDDEN)
    buffer.rows[:, 0, :taps.shape[1]] = taps
    executor = draft_executor(draft, target, rows, buffer,
                              torch.zeros((3, CAPACITY), dtype=torch.int64))
    for name, value in (('start', taps.shape[1]), ('since', 0), ('length', taps.shape[1]),
                        ('rope_delta', 0)):
        executor.inputs[name].fill_(value)
    executor.enqueue()
    return executor.outputs['proposals'].clone(), executor.outputs['logits'].clone()


@pytest.mark.parametrize('name', KINDS)
def test_a_converted_draft_proposes_what_the_public_one_does(rig, name, tmp_path):
    options = {} if name == 'dflash' else {'block': 5}
    made = convert_draft(rig.sources[name], tmp_path / 'out', target=rig.folder, **options)
    draft = load_draft(tmp_path / 'out', rig.target, checkpoint=rig.folder)
    assert made['parameters'] == draft.num_parameters()
    public = rig.public[name]
    assert draft.cfg.block == 5 and draft.cfg.window == 0 and draft.cfg.rope_theta == THETA
    generator = torch.Generator().manual_seed(1)
    said = set()
    for p in (3, 9, 20):
        taps = torch.randn((3, p, HIDDEN), generator=generator)
        tokens = torch.randint(0, 16, (p + 1,), generator=generator)
        with torch.no_grad():
            want = public.propose(taps, tokens, rig.target)
        got, logits = proposals(draft, rig.target, taps, tokens)
        if name != 'dflash':
            assert draft.draft_ids.tolist() == [i for i in HEAD_IDS if i != 18]
            kept = torch.tensor([i != 18 for i in HEAD_IDS])
            want = want[:, kept]
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
        assert torch.equal(got, draft.target_ids(want.argmax(-1)))
        said |= set(got.tolist())
    assert len(said) > 2


@pytest.mark.parametrize('name', ['dflash', 'eagle3-qwen'])
def test_the_graph_of_a_converted_draft_proposes_the_same(rig, name, tmp_path):
    convert_draft(rig.sources[name], tmp_path / 'out', target=rig.folder, block=5)
    draft = load_draft(tmp_path / 'out', rig.target)
    shapes = StageShapes(capacity=CAPACITY, prompt=20, guess=0, block=5, images=1, samples=1,
                         taps=draft.cfg.taps, tail=1)
    stage = draft_stage(draft, rig.target, shapes)
    generator = torch.Generator().manual_seed(2)
    taps = torch.randn((3, 9, HIDDEN), generator=generator)
    tokens = torch.randint(0, 16, (10,), generator=generator)
    want, logits = proposals(draft, rig.target, taps, tokens)
    angles = torch.arange(CAPACITY)[:, None] * THETA ** (-2 * torch.arange(DIM // 2) / DIM)
    inputs = {'tokens': functional.pad(tokens, (0, CAPACITY - 10)), 'start': torch.tensor([9]),
              'cos': angles.cos(), 'sin': angles.sin(),
              **{f'tap{j}': functional.pad(tap, (0, 0, 0, CAPACITY - 9))[None, None]
                 for j, tap in enumerate(taps)}}
    with torch.no_grad():
        out = stage(inputs)
    torch.testing.assert_close(out['logits'], logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(out['proposals'], want)


def test_the_taps_are_those_that_the_file_names(rig):
    taps = {name: read_public_draft(source, rig.target.cfg).cfg.taps
            for name, source in rig.sources.items()}
    assert taps == {'dflash': (0, 1, 3), 'eagle3-llama': (1, 2, 3), 'eagle3-qwen': (0, 1, 3)}


def test_llama_drafts_have_no_qk_norm_and_run_on_the_host_only(rig, tmp_path):
    convert_draft(rig.sources['eagle3-llama'], tmp_path / 'out', target=rig.folder)
    draft = load_draft(tmp_path / 'out', rig.target)
    assert not draft.cfg.qk_norm and draft.cfg.own_head
    with pytest.raises(ConfigurationError, match='no QK-norm'):
        check_draft(draft)
    convert_draft(rig.sources['eagle3-qwen'], tmp_path / 'two', target=rig.folder)
    check_draft(load_draft(tmp_path / 'two', rig.target))


def test_a_head_of_its_own_survives_a_twin_and_a_new_target(rig, tmp_path):
    convert_draft(rig.sources['eagle3-qwen'], tmp_path / 'out', target=rig.folder)
    draft = load_draft(tmp_path / 'out', rig.target)
    twin = draft.twin()
    assert torch.equal(twin.own_head, draft.own_head)
    assert twin.own_head.data_ptr() != draft.own_head.data_ptr()
    assert twin.shared.embedding.data_ptr() == draft.shared.embedding.data_ptr()
    draft.bind(rig.target.text, rig.target.cfg.tokens)
    assert draft.shared.rows[0].data_ptr() == draft.own_head.data_ptr()


def set_shape(key, *shape):
    return lambda tensors: tensors.update({key: torch.zeros(shape)})


@pytest.mark.parametrize('name, change, words', [
    ('dflash', lambda t: t.pop('hidden_norm.weight'), 'lacks tensor hidden_norm.weight'),
    ('dflash', lambda t: t.pop('layers.1.self_attn.q_norm.weight'),
     'lacks tensor layers.1.self_attn.q_norm.weight'),
    ('dflash', set_shape('fc.weight', HIDDEN, 2 * HIDDEN),
     r'tensor fc.weight has shape \[32, 64\].* need \[32, 96\]'),
    ('dflash', set_shape('layers.2.mlp.up_proj.weight', 4, 4),
     'surplus tensor layers.2.mlp.up_proj.weight'),
    ('dflash', set_shape('candidate_selector.hidden_projection.weight', 4, 4),
     'a DFlash 2 draft does not run here'),
    ('eagle3-llama', lambda t: t.pop('midlayer.hidden_norm.weight'),
     'lacks tensor midlayer.hidden_norm.weight'),
    ('eagle3-llama', set_shape('midlayer.self_attn.k_proj.weight', 16, 32),
     r'k_proj.weight has shape \[16, 32\].* need \[16, 64\]'),
    ('eagle3-llama', set_shape('midlayer.self_attn.q_proj.bias', 32), 'surplus tensor .*bias'),
    ('eagle3-llama', set_shape('lm_head.weight', 7, 32), r'need \[13, 32\]'),
    ('eagle3-llama', lambda t: t.update(d2t=t['d2t'].flip(0)), 'd2t does not map the 13'),
    ('eagle3-llama', lambda t: t.update(d2t=t['d2t'][:-1]), 'd2t has shape'),
    ('eagle3-llama', lambda t: t['t2d'].logical_not_(), 't2d and d2t name different ids'),
    ('eagle3-qwen', lambda t: t.pop('layers.0.self_attn.k_norm.weight'),
     'lacks tensor layers.0.self_attn.k_norm.weight')])
def test_each_wrong_tensor_is_named(rig, name, change, words, tmp_path):
    with pytest.raises(EngineError, match=words) as error:
        read_public_draft(copied(rig, name, tmp_path, change), rig.target.cfg)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name, config, words', [
    ('dflash', {'architectures': ['BertModel'], 'dflash_config': None}, 'architectures is'),
    ('dflash', {'attention_bias': True}, 'attention_bias is true'),
    ('dflash', {'rope_scaling': {'rope_type': 'yarn'}}, "rope_scaling is of type 'yarn'"),
    ('dflash', {'hidden_size': 64}, 'hidden_size is 64, the target has 32'),
    ('dflash', {'layer_types': ['sliding_attention'] * 2}, 'only full_attention runs here'),
    ('dflash', {'dflash_config': {'target_layer_ids': [0, 9]}}, 'lie among the 4'),
    ('dflash', {'dflash_config': {'target_layer_ids': [0, 1, 3], 'mask_token_id': 40}},
     'the target has 40 rows'),
    ('dflash', {'dflash_config': {'target_layer_ids': [0, 1, 3]}}, 'mask_token_id is missing'),
    ('dflash', {'output_multiplier': 2.0}, 'only 1.0 runs here'),
    ('eagle3-llama', {'num_hidden_layers': 2}, 'an EAGLE-3 draft has one')])
def test_each_wrong_field_is_named(rig, name, config, words, tmp_path):
    with pytest.raises(EngineError, match=words) as error:
        read_public_draft(copied(rig, name, tmp_path, **config), rig.target.cfg)
    assert '\n' not in str(error.value)


def test_a_pickle_is_never_read(rig, tmp_path):
    source = copied(rig, 'eagle3-llama', tmp_path)
    (source / 'model.safetensors').rename(source / 'pytorch_model.bin')
    with pytest.raises(EngineError, match='pytorch_model.bin is a pickle, which is never opened'):
        read_public_draft(source, rig.target.cfg)


def test_the_embedding_of_a_file_is_left_alone(rig, tmp_path):
    source = copied(rig, 'eagle3-llama', tmp_path, set_shape('embed_tokens.weight', 40, 32))
    assert 'embed_tokens.weight' not in read_public_draft(source, rig.target.cfg).tensors


def test_another_target_refuses_the_draft(rig, tmp_path):
    convert_draft(rig.sources['dflash'], tmp_path / 'out', target=rig.folder)
    other = small_target(seed=1)
    save_target(other, tmp_path / 'other', {}, torch.float32)
    with pytest.raises(EngineError, match='train the draft again'):
        load_draft(tmp_path / 'out', other, checkpoint=tmp_path / 'other')


def test_the_published_shapes_of_a_draft_for_qwen3_8b(tmp_path):
    """Five layers at width 4096: names and shapes, on tensors without memory behind them."""
    config = {**PublicDflash.config, 'hidden_size': 4096, 'num_attention_heads': 32,
              'num_key_value_heads': 8, 'head_dim': 128, 'intermediate_size': 12_288,
              'num_hidden_layers': 5, 'rope_theta': 1e6, 'block_size': 16, 'vocab_size': 151_936,
              'layer_types': ['full_attention'] * 5,
              'dflash_config': {'target_layer_ids': [1, 9, 17, 25, 33], 'mask_token_id': 151_669}}
    write(tmp_path, {'fc.weight': torch.zeros(1)}, config)
    with pytest.raises(EngineError, match=r'fc.weight has shape \[1\].* \[4096, 20480\]'):
        read_public_draft(tmp_path, alpamayo_r1())


def test_the_command_prints_what_it_made(rig, tmp_path):
    result = CliRunner().invoke(cli, [
        'train', 'convert-draft', str(rig.sources['dflash']), '--target', str(rig.folder),
        '--out', str(tmp_path / 'out'), '--json'])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report['kind'], report['mask_id'], report['taps']) == ('dflash', MASK, [0, 1, 3])
