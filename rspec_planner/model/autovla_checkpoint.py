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
Load the model of an AutoVLA folder: a Qwen2.5-VL config.json and safetensors.

The public code saves a pickle of its trainer, which is never opened here; docs/autovla.md says
how its weights become safetensors. Names may be those of the hub (`visual.`, `model.`), those
of transformers' modules (`model.visual.`, `model.language_model.`), or either behind `vlm.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
import torch
from torch import Tensor
from tqdm import tqdm

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.autovla import AutoVla
from rspec_planner.model.autovla_config import AutoVlaConfig, AutoVlaTokens, WindowVisionConfig
from rspec_planner.model.config import TextConfig
from rspec_planner.model.upstream_fields import Fields, read_json
from rspec_planner.model.upstream_folder import index_problems, read_headers
from rspec_planner.model.upstream_keys import Stored

CONFIG_NAME = 'config.json'
#: the longest prefix first; what follows is our name behind the second
PREFIXES = (('model.visual.', 'vision.'), ('model.language_model.', 'text.'),
            ('visual.', 'vision.'), ('model.', 'text.'), ('lm_head.', 'text.lm_head.'))
HEAD, TABLE = 'text.lm_head.weight', 'text.embed_tokens.weight'


def read_autovla_config(folder: str | Path, tokens: AutoVlaTokens) -> AutoVlaConfig:
    """
    Return the shapes of a folder; EngineError names the first field at fault.

    tokens: those of its tokenizer, whose last entries are the actions, as those of the
    vocabulary must be.
    """
    path = Path(folder) / CONFIG_NAME
    fields = Fields(read_json(path), f'{path}: ')
    kind = fields.text('model_type')
    if kind != 'qwen2_5_vl':
        raise EngineError(f"{path}: model_type is {kind!r}, AutoVLA's is 'qwen2_5_vl': give the "
                          'folder of an AutoVLA checkpoint')
    if 'quantization_config' in fields:
        raise fields.fail('quantization_config', 'is present, quantised weights are not read')
    inner = fields.child('text_config') if 'text_config' in fields else fields
    text = _text(inner, fields.flag('tie_word_embeddings', inner.flag('tie_word_embeddings',
                                                                      False)))
    for name, found in (('vision_start_token_id', tokens.vision_start),
                        ('vision_end_token_id', tokens.vision_end),
                        ('video_token_id', tokens.video_pad)):
        if fields.integer(name, found, least=0) != found:
            raise fields.fail(name, f'is another than the {found} of the tokenizer')
    try:
        return AutoVlaConfig('autovla', _vision(fields.child('vision_config'), text.hidden_size),
                             text, tokens)
    except ConfigurationError as error:
        raise EngineError(f'{path}: {error}') from None


def _text(text: Fields, tied: bool) -> TextConfig:
    heads, hidden = text.integer('num_attention_heads'), text.integer('hidden_size')
    if hidden % heads:
        raise text.fail('hidden_size', f'is {hidden}, must be a multiple of the {heads} heads')
    if text.flag('use_sliding_window', False):
        raise text.fail('use_sliding_window', 'is true, the decoder here sees everything')
    rope = text.optional('rope_scaling' if 'rope_scaling' in text else 'rope_parameters')
    section = rope.integers('mrope_section')
    if len(section) != 3 or 2 * sum(section) * heads != hidden:
        raise rope.fail('mrope_section', f'is {list(section)}, three parts must sum to half of '
                        f'{hidden // heads}')
    return TextConfig(
        vocab_size=text.integer('vocab_size'), hidden_size=hidden,
        num_layers=text.integer('num_hidden_layers'), num_heads=heads,
        num_kv_heads=text.integer('num_key_value_heads'), head_dim=hidden // heads,
        intermediate_size=text.integer('intermediate_size'),
        mrope_section=(section[0], section[1], section[2]),
        rope_theta=text.number('rope_theta', rope.number('rope_theta', 1_000_000.0)),
        rms_norm_eps=text.number('rms_norm_eps', 1e-6), mrope_interleaved=False, qk_norm=False,
        qkv_bias=True, tied_head=tied)


def _vision(vision: Fields, hidden: int) -> WindowVisionConfig:
    names = {'hidden_size': 1280, 'depth': 32, 'num_heads': 16, 'intermediate_size': 3420,
             'window_size': 112, 'patch_size': 14, 'temporal_patch_size': 2,
             'spatial_merge_size': 2, 'tokens_per_second': 2}
    values = {name: vision.integer(name, default) for name, default in names.items()}
    whole = vision.integers('fullatt_block_indexes') if 'fullatt_block_indexes' in vision \
        else (7, 15, 23, 31)
    out = vision.integer('out_hidden_size', hidden)
    if out != hidden:
        raise vision.fail('out_hidden_size', f'is {out}, the decoder takes rows of {hidden}')
    return WindowVisionConfig(out_hidden_size=out, full_attention_layers=whole, **values)


def our_name(theirs: str) -> str:
    """Return our name of a released tensor, '' for one that no prefix fits."""
    name = theirs.split('vlm.', 1)[-1]
    for prefix, ours in PREFIXES:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return ''


def load_autovla(folder: str | Path, tokens: AutoVlaTokens, device: torch.device | str = 'cpu',
                 dtype: torch.dtype = torch.bfloat16) -> AutoVla:
    """
    Return a packed target for inference; EngineError names the first file or tensor at fault.

    tokens: those of its tokenizer. Shards are memory-mapped; weights are cast one by one.
    """
    place = Path(folder)
    cfg = read_autovla_config(place, tokens)
    with torch.device('meta'):
        target = AutoVla(cfg)
    shards, problems = weight_problems(place, target)
    if problems:
        raise EngineError(problems[0] + (
            f' (and {len(problems) - 1} more)' if len(problems) > 1 else ''))
    weights: dict[str, Tensor] = {}
    for name in tqdm(shards, desc=f'loading {place.name}', disable=None, leave=False):
        with safe_open(place / name, framework='pt') as shard:
            for theirs in shard.keys():
                weights[our_name(theirs)] = shard.get_tensor(theirs).to(device, dtype)
    if cfg.text.tied_head:
        weights[HEAD] = weights[TABLE]
    target.load_state_dict(weights, assign=True)
    if cfg.text.tied_head:
        target.text.lm_head.weight = target.text.embed_tokens.weight
    return target.eval().requires_grad_(False).pack()


def weight_problems(folder: Path, target: AutoVla) -> tuple[list[str], list[str]]:
    """Return the shards of a folder, and why they cannot fill a target, from headers alone."""
    problems: list[str] = []
    stored, shards, mapped = read_headers(folder, problems)
    if problems:
        return shards, problems
    problems = index_problems(folder, mapped, stored)
    table = {our_name(theirs): theirs for theirs in stored}
    wanted = {name: tuple(weight.shape) for name, weight in target.state_dict().items()}
    return shards, problems + [f'{folder}: {problem}' for problem in _misfits(
        stored, table, wanted, target.cfg.text.tied_head)]


def _misfits(stored: Mapping[str, Stored], table: Mapping[str, str],
             wanted: Mapping[str, tuple[int, ...]], tied: bool) -> list[str]:
    """Return missing, surplus and misshaped tensors, one line each."""
    found = []
    for name, shape in wanted.items():
        if name not in table:
            if not (tied and name == HEAD):
                found.append(f'tensor {name} is missing: download the folder again')
        elif stored[table[name]].shape != shape:
            found.append(f'tensor {table[name]} has shape {stored[table[name]].shape}, '
                         f'{CONFIG_NAME} needs {shape}')
    found += [f'tensor {theirs[:80]} has no place in the model' for theirs in stored
              if our_name(theirs) not in wanted]
    if len(stored) != len(table):
        found.append('two tensors have the same place in the model')
    return found
