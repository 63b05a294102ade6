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
"""Whether an AutoVLA folder will load, from headers and small files alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from rspec_planner.doctor import Check
from rspec_planner.errors import EngineError, RspecError
from rspec_planner.model.autovla import AutoVla
from rspec_planner.model.autovla_checkpoint import (
    CONFIG_NAME,
    read_autovla_config,
    weight_problems,
)
from rspec_planner.model.codebook import read_codebook
from rspec_planner.model.upstream_fields import read_json
from rspec_planner.planner.action_tokenizer import load_action_tokenizer
from rspec_planner.planner.autovla_prompt import Wording

Part = TypeVar('Part')
SEE = 'see docs/autovla.md, "A checkpoint folder"'


def is_autovla(folder: Path) -> bool:
    """Return whether a folder's config.json is that of a Qwen2.5-VL."""
    try:
        return read_json(folder / CONFIG_NAME).get('model_type') == 'qwen2_5_vl'
    except EngineError:
        return False


def examine_autovla(folder: Path) -> tuple[list[Check], dict[str, Any], list[str]]:
    """Return the findings of a folder, what it is, and why it does not load."""
    checks: list[Check] = []
    problems: list[str] = []

    def read(name: str, body: Callable[[], Part], told: Callable[[Part], str]) -> Part | None:
        try:
            part = body()
        except RspecError as error:
            problems.append(str(error))
            checks.append(Check(name, False, str(error), SEE))
            return None
        checks.append(Check(name, True, told(part)))
        return part

    codebook = read('codebook', lambda: read_codebook(folder), lambda found: (
        f'{found.size} actions of {found.steps} steps'))
    read('wording', lambda: Wording.read(folder), lambda found: f'{len(found.videos)} videos')
    tokenizer = codebook and read(
        'tokenizer', lambda: load_action_tokenizer(folder, codebook.size),
        lambda found: f'{found.tokens.action_end} ids, the actions last')
    cfg = tokenizer and read(
        'config', lambda: read_autovla_config(folder, tokenizer.tokens),
        lambda found: f'{found.text.num_layers} layers of {found.text.hidden_size}, head '
        f'{"tied" if found.text.tied_head else "apart"}')
    found: dict[str, Any] = {'kind': 'released', 'model_type': 'qwen2_5_vl', 'profile': 'autovla'}
    if cfg:
        with torch.device('meta'):
            target = AutoVla(cfg)
        shards, wrong = weight_problems(folder, target)
        problems += wrong
        found['parameters'] = target.num_parameters()
        told = f'{len(shards)} safetensors, {target.num_parameters():,} weights'
        checks.append(Check('weights', not wrong, wrong[0] if wrong else told,
                            SEE if wrong else ''))
    checks.append(Check('use', True, 'library and benches; the node does not run this target '
                        '(docs/autovla.md)'))
    return checks, found, problems
