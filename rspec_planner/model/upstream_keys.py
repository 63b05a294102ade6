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
Names of tensors in released Alpamayo checkpoints, against ours, and what a folder must hold.

Two layouts: 'flat' of R1 and 1.5, and 'nested' of Alpamayo 2 Super, whose action expert lies one
level deeper with its projections beside it. Weights are strict; a few buffers, which follow from
the config, may be there or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
import re
from typing import Any

import torch

from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.target import Target

Shape = tuple[int, ...]

_VLM = (('vision.', 'vlm.model.visual.'), ('text.lm_head.', 'vlm.lm_head.'),
        ('text.', 'vlm.model.language_model.'))
#: layout -> (our prefix, theirs); the first that fits counts
LAYOUTS: Mapping[str, Sequence[tuple[str, str]]] = {
    'flat': (*_VLM, ('expert.action_in_proj.', 'action_in_proj.'),
             ('expert.action_out_proj.', 'action_out_proj.'), ('expert.', 'expert.')),
    'nested': (*_VLM, ('expert.action_in_proj.', 'expert.action_in_proj.'),
               ('expert.action_out_proj.', 'expert.action_out_proj.'),
               ('expert.', 'expert.expert.')),
}
#: buffers that a folder may hold or lack, without the prefix of the nested layout
_BUFFER = re.compile(r'(expert\.)?action_in_proj\.(sinus\.[01]|timestep_fourier_encoder)\.freqs'
                     r'|(expert\.)?action_space\.(accel|curvature)_(mean|std)'
                     r'|.+\.rotary(_pos)?_emb\.inv_freq')
#: stored kinds that are read; everything is cast to one dtype
READABLE = ('BF16', 'F16', 'F32')
#: beginnings of other exports of the same models
_RAW_RL = 'reasoning_vla.'


@dataclass(frozen=True)
class Stored:
    """A tensor as a header describes it."""

    kind: str  # safetensors' name of the dtype
    shape: Shape
    file: str


def upstream_name(name: str, layout: str) -> str:
    """Return the released name of one of our state-dict entries."""
    for ours, theirs in LAYOUTS[layout]:
        if name.startswith(ours):
            return theirs + name[len(ours):]
    raise KeyError(name)


def key_table(profile: ProfileConfig, layout: str) -> dict[str, tuple[str, Shape]]:
    """Return released name -> (our name, shape) of every weight of a profile."""
    with torch.device('meta'):
        state = Target(profile).state_dict()
    return {upstream_name(name, layout): (name, tuple(tensor.shape))
            for name, tensor in state.items()}


def is_buffer(name: str) -> bool:
    """Return whether a released name is that of a buffer, which the config gives as well."""
    return _BUFFER.fullmatch(name) is not None


def weight_problems(found: Mapping[str, Stored], table: Mapping[str, tuple[str, Shape]],
                    profile: ProfileConfig) -> list[str]:
    """
    Return one line for each tensor that is missing, surplus, misshaped or of another kind.

    What explains many lines at once comes first: an export of another stage of training, an
    expert that cannot read this decoder's cache, a head that was tied away.
    """
    missing = [name for name in table if name not in found]
    return [*_export_problems(found, missing), *_cache_problems(found, table, profile),
            *(_missing(name, table) for name in missing),
            *_surplus(found, table), *_shapes(found, table), *_kinds(found, table)]


def _export_problems(found: Mapping[str, Stored], missing: Iterable[str]) -> list[str]:
    if any(name.startswith(_RAW_RL) for name in found):
        return [f"tensors begin with '{_RAW_RL}': these are raw shards of reinforcement "
                'learning; convert them to the released layout first']
    if found and all(name.startswith('vlm.') for name in found) \
            and any(not name.startswith('vlm.') for name in missing):
        return ['only vlm.* tensors are here, no action expert: an export of reinforcement '
                'learning; join it with the expert of the released checkpoint']
    return []


def _cache_problems(found: Mapping[str, Stored], table: Mapping[str, tuple[str, Shape]],
                    profile: ProfileConfig) -> list[str]:
    """Return why the expert cannot read the decoder's cache, if so."""
    layers: dict[str, set[int]] = {'text': set(), 'expert': set()}
    rows: dict[str, set[int]] = {'text': set(), 'expert': set()}
    pattern = re.compile(r'(vlm\.model\.language_model|expert|expert\.expert)\.layers\.(\d+)'
                         r'\.self_attn\.k_proj\.weight')
    for name, stored in found.items():
        if match := pattern.fullmatch(name):
            side = 'text' if match[1].startswith('vlm') else 'expert'
            layers[side].add(int(match[2]))
            rows[side].add(stored.shape[0] if stored.shape else 0)
    if not layers['text'] or not layers['expert']:
        return []
    problems = []
    if len(layers['text']) != len(layers['expert']):
        problems.append(f'the expert has {len(layers["expert"])} layers, the decoder whose '
                        f'cache it reads has {len(layers["text"])}')
    if rows['text'] != rows['expert']:
        said = [' and '.join(map(str, sorted(rows[side]))) for side in ('expert', 'text')]
        problems.append(f'keys of the expert have {said[0]} values, those of the decoder whose '
                        f'cache it reads have {said[1]}')
    return problems


def _missing(name: str, table: Mapping[str, tuple[str, Shape]]) -> str:
    if name == 'vlm.lm_head.weight':
        return (f'tensor {name} {list(table[name][1])} is missing: the head of these models is '
                'not tied to embed_tokens')
    return f'tensor {name} {list(table[name][1])} is missing'


def _surplus(found: Mapping[str, Stored], table: Mapping[str, Any]) -> list[str]:
    return [f'tensor {name} {list(stored.shape)} in {stored.file} is not part of the model'
            for name, stored in found.items() if name not in table and not is_buffer(name)]


def _shapes(found: Mapping[str, Stored], table: Mapping[str, tuple[str, Shape]]) -> list[str]:
    return [f'tensor {name} in {found[name].file} has shape {list(found[name].shape)}, '
            f'config.json needs {list(shape)}'
            for name, (_, shape) in table.items()
            if name in found and found[name].shape != shape]


def _kinds(found: Mapping[str, Stored], table: Mapping[str, Any]) -> list[str]:
    return [f'tensor {name} in {stored.file} is stored as {stored.kind}, only '
            f'{", ".join(READABLE)} are read'
            for name, stored in found.items()
            if (name in table or is_buffer(name)) and stored.kind not in READABLE]
