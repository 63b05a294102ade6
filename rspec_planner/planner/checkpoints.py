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
Open a checkpoint folder for planning: its target, the tokenizer that fits it, and its draft.

Our own folders hold everything. A released Alpamayo folder of R1 or 1.5 holds no tokenizer: the
user puts `tokenizer.json` of the backbone into it, or into `tokenizer/` inside it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.bounded import read_bounded
from rspec_planner.model.checkpoint import CONFIG_NAME, load_target, REMEDY
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.draft import Draft
from rspec_planner.model.draft_checkpoint import load_draft
from rspec_planner.model.target import Target
from rspec_planner.model.upstream_config import read_upstream_config, UpstreamConfig
from rspec_planner.model.upstream_folder import existing_folder, is_upstream
from rspec_planner.planner.alpamayo_tokenizer import load_alpamayo_tokenizer
from rspec_planner.planner.drafts import draft_folder, DRAFTS
from rspec_planner.planner.tokenizer import load_tokenizer, TextTokenizer, TOKENIZER_FILE

TOKENIZER_FOLDER = 'tokenizer'


def open_checkpoint(directory: str | Path, device: torch.device,
                    dtype: torch.dtype | None = None) -> tuple[Target, TextTokenizer]:
    """
    Return the target of a folder, for inference, and its tokenizer.

    dtype: None takes bfloat16 for released weights on a GPU, as they are stored, and float32
    otherwise. The tokenizer is opened first: it takes a second, the weights may take a minute.
    EngineError names the file, field or tensor at fault.
    """
    released = is_upstream(directory)
    if dtype is None:
        dtype = torch.bfloat16 if released and device.type == 'cuda' else torch.float32
    if released:
        config = read_upstream_config(directory)
        refuse_unknown_prompt(directory, config)
        open_tokenizer(directory, config.profile)
    target = load_target(directory, device, dtype).requires_grad_(False)
    return target, open_tokenizer(directory, target.cfg)


def folder_profile(directory: str | Path) -> ProfileConfig:
    """Return the profile of a folder without reading weights; EngineError names the fault."""
    if is_upstream(directory):
        config = read_upstream_config(directory)
        refuse_unknown_prompt(directory, config)
        return config.profile
    path = existing_folder(directory) / CONFIG_NAME
    try:
        return ProfileConfig.from_dict(json.loads(read_bounded(path)))
    except OSError as error:
        raise EngineError(f'{path} cannot be read ({error.strerror}): {REMEDY}') from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f'{path} is not a profile ({error}): {REMEDY}') from error


def refuse_unknown_prompt(directory: str | Path, config: UpstreamConfig) -> None:
    """Raise EngineError for a model whose weights are read but whose prompt is not known."""
    if not config.family.plans:
        raise EngineError(f'{directory}: the prompt of {config.model_type} is not known here, it '
                          'cannot plan; give a folder of Alpamayo R1 or 1.5')


def open_tokenizer(directory: str | Path, profile: ProfileConfig) -> TextTokenizer:
    """Return the tokenizer of a folder; EngineError when it is missing or its ids differ."""
    if profile.prompt.style == 'chat':
        return load_alpamayo_tokenizer(tokenizer_folder(directory), profile)
    tokenizer = load_tokenizer(directory)
    if (tokenizer.token_ids, tokenizer.vocab_size) != (profile.tokens, profile.text.vocab_size):
        raise EngineError(f'{directory}: tokenizer.json and config.json disagree about ids; '
                          'restore both from one checkpoint')
    return tokenizer


def tokenizer_folder(directory: str | Path) -> Path:
    """Return where the tokenizer of a released folder lies; EngineError when there is none."""
    places = (Path(directory), Path(directory) / TOKENIZER_FOLDER)
    for place in places:
        if (place / TOKENIZER_FILE).is_file():
            return place
    raise EngineError(f'{directory} holds no {TOKENIZER_FILE}, as released: copy that of '
                      f'Qwen/Qwen3-VL-8B-Instruct into it, or into {places[1]}')


def existing_device(name: str) -> torch.device:
    """Return a device that exists; ConfigurationError for any other name."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f'device {name!r} is unknown; use cpu or cuda') from error
    if device.type == 'cuda' and not torch.cuda.is_available():
        raise ConfigurationError(f'device {name!r}: PyTorch sees no CUDA device; use cpu')
    return device


def open_draft(draft: str | None, directory: Path, target: Target) -> Draft | None:
    """Return the draft of `chosen_draft` bound to the target, in its dtype; None for none."""
    folder = chosen_draft(draft, directory)
    return None if folder is None else \
        load_draft(folder, target, dtype=target.dtype, checkpoint=directory)


def chosen_draft(draft: str | None, directory: Path) -> Path | None:
    """
    Return the folder of the draft to use, None for one token per target forward.

    draft: see `drafts.draft_folder`; None chooses none. A released folder comes without drafts,
    so that 'default' stands for the one that was put into it, if any.
    """
    if draft is None:
        return None
    if draft == 'default' and is_upstream(directory) \
            and not (directory / DRAFTS / draft).exists():
        return None
    return draft_folder(draft, directory)
