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
Public draft checkpoints as drafts of ours: the DFlash layout of z-lab and SpecForge, and EAGLE-3.

DFlash (`DFlashDraftModel`): decoder layers at the target's width, `fc` and `hidden_norm` over the
tapped states; embedding and head are the target's, the mask is a token of the target.
EAGLE-3 (`LlamaForCausalLMEagle3` of SafeAILab and SpecForge, `Qwen3ForCausalLMEagle3` of
SpecForge): one cell, called `midlayer` or `layers.0`, and a head of its own over part of the
vocabulary; `d2t[i]` is the distance from draft id i to its target id, `t2d` marks those ids.

Names of modules were read in the `dflash` wheel 0.1.0 and in SpecForge's draft models. Weights are
strict: every tensor must be known and have the shape that config.json implies. Only safetensors
are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
import torch
from torch import Tensor

from rspec_planner.errors import EngineError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.draft import dflash_taps, Draft, DraftConfig, eagle3_taps
from rspec_planner.model.draft_checkpoint import build_draft, IDS_NAME
from rspec_planner.model.upstream_fields import Fields, read_json
from rspec_planner.model.upstream_folder import read_headers

CONFIG_NAME = 'config.json'
_ATTENTION = ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj')
_MLP = ('mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj')
_NORMS = ('self_attn.q_norm', 'self_attn.k_norm')
#: extras of a DFlash 2 draft, which this loader does not run
_DFLASH2 = ('candidate_selector.', 'attention_conv.', 'mlp_conv.')
#: options that would change the arithmetic, and their neutral values
_NEUTRAL = {'input_embedding_scale': 1.0, 'output_multiplier': 1.0,
            'final_logit_softcapping': 0.0}
REMEDY = 'give the folder as it was published'


@dataclass(frozen=True)
class PublicDraft:
    """A public draft, read and named as ours; `mask_id` is set for DFlash."""

    cfg: DraftConfig
    tensors: dict[str, Tensor]
    ids: tuple[int, ...] | None  # target ids of a reduced head, rising
    mask_id: int | None
    architecture: str


def read_public_draft(folder: str | Path, profile: ProfileConfig, *, block: int = 0,
                      window: int = 0) -> PublicDraft:
    """
    Return a public draft for a target of `profile`.

    block: anchor and proposals, 0 for what config.json says (EAGLE-3: 8). window: context rows
    that a block sees, 0 for all, as these drafts were trained. EngineError names the file, field
    or tensor at fault.
    """
    place = Path(folder)
    path = place / CONFIG_NAME
    pickled = sorted(f.name for f in place.glob('*.bin')) if place.is_dir() else []
    if pickled and not any(place.glob('*.safetensors')):
        raise EngineError(f'{place / pickled[0]} is a pickle, which is never opened here: convert '
                          'it to model.safetensors where you trust it')
    fields = Fields(read_json(path), f'{path}: ')
    architectures = fields.texts('architectures')
    name = architectures[0] if architectures else ''
    _refuse(fields)
    if 'dflash' in name.lower() or 'dflash_config' in fields:
        return _dflash(place, fields, profile, name, block, window)
    if 'eagle3' in name.lower() or 'draft_vocab_size' in fields:
        return _eagle3(place, fields, profile, name, block, window)
    raise fields.fail('architectures', f'is {list(architectures)}; known are DFlashDraftModel '
                      'and the Eagle3 drafts of SafeAILab and SpecForge')


def draft_of(public: PublicDraft, embedding: Mapping[int, Tensor]) -> Draft:
    """
    Return the unbound draft; embedding: row (H,) of the target by token id, the mask's at least.

    The dtype is that of the file.
    """
    tensors = dict(public.tensors)
    if public.mask_id is not None:
        kind = tensors['fc.weight'].dtype
        tensors['mask_embedding'] = embedding[public.mask_id].to(kind)
    if public.ids is not None:
        tensors[IDS_NAME] = torch.tensor(public.ids)
    with torch.device('meta'):
        draft = build_draft(public.cfg)
    missing = set(draft.state_dict()) ^ set(tensors)
    if missing:
        raise EngineError(f'{public.architecture}: {sorted(missing)[0]} has no counterpart: '
                          f'{REMEDY}')
    draft.load_state_dict(tensors, assign=True)
    return draft.eval().requires_grad_(False)


def _refuse(fields: Fields) -> None:
    """Raise for what changes the arithmetic and is not supported."""
    if fields.flag('attention_bias', False):
        raise fields.fail('attention_bias', 'is true, drafts here have no biases')
    if 'quantization_config' in fields:
        raise fields.fail('quantization_config', 'is present; give the draft in bfloat16')
    for name in ('rope_scaling', 'rope_parameters'):
        scaling = fields.optional(name)
        kind = next((scaling.text(key) for key in ('rope_type', 'type') if key in scaling),
                    'default')
        if kind != 'default':
            raise fields.fail(name, f'is of type {kind!r}, drafts here have plain rotary '
                              'positions')


def _shared(fields: Fields, profile: ProfileConfig) -> dict[str, Any]:
    """Return the fields of a DraftConfig that both kinds read alike."""
    text = profile.text
    hidden, heads = fields.integer('hidden_size'), fields.integer('num_attention_heads')
    if hidden != text.hidden_size:
        raise fields.fail('hidden_size', f'is {hidden}, the target has {text.hidden_size}; a '
                          'draft works for the target that it was trained for')
    rope = fields.optional('rope_parameters')
    theta = fields.number('rope_theta', rope.number('rope_theta', 10_000.0))
    return {'hidden_size': hidden, 'num_heads': heads,
            'num_kv_heads': fields.integer('num_key_value_heads', heads),
            'head_dim': fields.integer('head_dim', hidden // heads),
            'intermediate_size': fields.integer('intermediate_size'), 'rope_theta': theta,
            'mrope_section': text.mrope_section,
            'rms_norm_eps': fields.number('rms_norm_eps', 1e-6), 'rotary': 'flat',
            'target_vocab': text.vocab_size}


def _taps(fields: Fields, holder: Fields, key: str, default: tuple[int, ...], shift: int,
          layers: int) -> tuple[int, ...]:
    """Return the tapped layers that a field names, `shift` added to each."""
    taps = tuple(int(i) + shift for i in holder.integers(key)) if key in holder else default
    if tuple(sorted(set(taps))) != taps or taps[0] < 0 or taps[-1] >= layers:
        raise fields.fail(key, f'names layers {list(taps)}, must rise and lie among the '
                          f'{layers} of the target')
    return taps


def _dflash(place: Path, fields: Fields, profile: ProfileConfig, name: str, block: int,
            window: int) -> PublicDraft:
    inner = fields.optional('dflash_config')
    for option, neutral in _NEUTRAL.items():
        holder = inner if option in inner else fields
        if option in holder and holder.number(option, neutral) != neutral:
            raise fields.fail(option, f'is {holder.number(option, neutral)}, only {neutral} runs '
                              'here')
    kinds = fields.texts('layer_types')
    if any(kind != 'full_attention' for kind in kinds):
        raise fields.fail('layer_types', f'is {list(kinds)}, only full_attention runs here')
    layers = profile.text.num_layers
    taps = _taps(fields, inner if 'target_layer_ids' in inner else fields, 'target_layer_ids',
                 dflash_taps(layers), 0, layers)
    holder = inner if 'block_size' in inner else fields
    mask_holder = inner if 'mask_token_id' in inner else fields
    mask = mask_holder.integer('mask_token_id', least=0)
    if mask >= profile.text.vocab_size:
        raise fields.fail('mask_token_id', f'is {mask}, the target has '
                          f'{profile.text.vocab_size} rows')
    count = fields.integer('num_hidden_layers')
    cfg = DraftConfig(kind='dflash', block=block or holder.integer('block_size', 16),
                      window=window, taps=taps, num_layers=count, draft_vocab=0, layout='dflash',
                      **_shared(fields, profile))
    names = {'fc.weight': 'fc.weight', 'hidden_norm.weight': 'context_norm.weight',
             'norm.weight': 'norm.weight'}
    for index in range(count):
        for part in (*_ATTENTION, *_NORMS, *_MLP, 'input_layernorm', 'post_attention_layernorm'):
            key = f'layers.{index}.{part}.weight'
            names[key] = key
    tensors = _read(place, cfg, names, {'mask_embedding'})
    return PublicDraft(replace(cfg, name=place.name), tensors, None, mask, name)


def _eagle3(place: Path, fields: Fields, profile: ProfileConfig, name: str, block: int,
            window: int) -> PublicDraft:
    problems: list[str] = []
    found, _, _ = read_headers(place, problems)
    if problems:
        raise EngineError(problems[0])
    cell = 'midlayer.' if any(key.startswith('midlayer.') for key in found) else 'layers.0.'
    if fields.integer('num_hidden_layers', 1) != 1:
        raise fields.fail('num_hidden_layers', f'is {fields.integer("num_hidden_layers")}, an '
                          'EAGLE-3 draft has one')
    rows = fields.integer('draft_vocab_size', fields.integer('vocab_size'))
    layers = profile.text.num_layers
    inner = fields.optional('eagle_config')
    holder = inner if 'eagle_aux_hidden_state_layer_ids' in inner else fields
    # those ids count layer inputs, ours outputs
    taps = _taps(fields, holder, 'eagle_aux_hidden_state_layer_ids', eagle3_taps(layers), -1,
                 layers)
    normed = f'{cell}self_attn.q_norm.weight' in found
    cfg = DraftConfig(kind='eagle3', block=block or 8, window=window, taps=taps, num_layers=1,
                      draft_vocab=rows, qk_norm=normed, own_head=True, layout='eagle3',
                      **_shared(fields, profile))
    names = {'fc.weight': 'fc.weight', 'norm.weight': 'norm.weight',
             'lm_head.weight': 'own_head', f'{cell}input_layernorm.weight': 'embed_norm.weight',
             f'{cell}hidden_norm.weight': 'feature_norm.weight',
             f'{cell}post_attention_layernorm.weight': 'post_attention_layernorm.weight'}
    for part in (*_ATTENTION, *(_NORMS if normed else ()), *_MLP):
        names[f'{cell}{part}.weight'] = f'{part}.weight'
    known = {'d2t', 't2d', 'embed_tokens.weight'}  # the last is the target's, never read
    tensors = _read(place, cfg, names, {IDS_NAME}, known)
    ids = _head_ids(place, rows, profile, found)
    allowed = torch.tensor([not profile.tokens.forbidden_start <= i < profile.tokens.forbidden_end
                            for i in ids])
    if not bool(allowed.all()):  # rows that no CoC has: padding of the base vocabulary
        tensors['own_head'] = tensors['own_head'][allowed].contiguous()
        ids = tuple(i for i, kept in zip(ids, allowed.tolist()) if kept)
    cfg = replace(cfg, draft_vocab=len(ids), name=place.name)
    return PublicDraft(cfg, tensors, ids, None, name)


def _read(place: Path, cfg: DraftConfig, names: Mapping[str, str], made: set[str],
          optional: frozenset[str] | set[str] = frozenset()) -> dict[str, Tensor]:
    """Return our name -> tensor; EngineError for the first missing, surplus or misshaped one."""
    problems: list[str] = []
    found, _, _ = read_headers(place, problems)
    if problems:
        raise EngineError(problems[0])
    with torch.device('meta'):
        expected = {name: tuple(t.shape) for name, t in build_draft(cfg).state_dict().items()
                    if name not in made}
    for theirs, ours in names.items():
        if theirs not in found:
            raise EngineError(f'{place} lacks tensor {theirs}: {REMEDY}')
        if found[theirs].shape != expected[ours]:
            raise EngineError(f'{place / found[theirs].file}: tensor {theirs} has shape '
                              f'{list(found[theirs].shape)}, {CONFIG_NAME} and the target need '
                              f'{list(expected[ours])}: {REMEDY}')
    for theirs in found:
        if theirs not in names and theirs not in optional:
            extra = 'a DFlash 2 draft does not run here' \
                if any(part in f'{theirs}.' for part in _DFLASH2) else REMEDY
            raise EngineError(f'{place / found[theirs].file} holds surplus tensor {theirs}: '
                              f'{extra}')
    return {ours: _tensor(place, found[theirs].file, theirs) for theirs, ours in names.items()}


def _tensor(place: Path, file: str, name: str) -> Tensor:
    with safe_open(place / file, framework='pt') as shard:
        value: Tensor = shard.get_tensor(name)
    return value


def _head_ids(place: Path, rows: int, profile: ProfileConfig,
              found: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the target id of each head row."""
    vocabulary = profile.text.vocab_size
    ids = torch.arange(rows)
    if 'd2t' in found:
        offsets = _tensor(place, found['d2t'].file, 'd2t')
        if offsets.shape != ids.shape:
            raise EngineError(f'{place}: tensor d2t has shape {list(offsets.shape)}, the head '
                              f'has {rows} rows: {REMEDY}')
        ids = ids + offsets.long()
    if int(ids[0]) < 0 or int(ids[-1]) >= vocabulary or bool((ids.diff() <= 0).any()):
        raise EngineError(f'{place}: d2t does not map the {rows} head rows to rising ids below '
                          f'{vocabulary}: {REMEDY}')
    if 't2d' in found:
        marked = _tensor(place, found['t2d'].file, 't2d').bool().nonzero()[:, 0]
        if not torch.equal(marked, ids):
            raise EngineError(f'{place}: t2d and d2t name different ids: {REMEDY}')
    return tuple(ids.tolist())
