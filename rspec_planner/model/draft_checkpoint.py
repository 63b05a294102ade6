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
Draft checkpoints: the folders of `checkpoint`, tied to the target they were trained for.

config.json holds the draft's configuration and the ids of a reduced head; manifest.json also
holds "target", a digest of the target's weight files. A draft for other weights would still be
exact, but its proposals would rarely be accepted, so it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
from pathlib import Path
from typing import Any

import torch

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.checkpoint import (
    check_tensors,
    CONFIG_NAME,
    read_manifest,
    read_weights,
    REMEDY,
    write_weights,
)
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import Draft, DraftConfig
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.target import Target
from rspec_planner.model.upstream_checkpoint import upstream_digest
from rspec_planner.model.upstream_folder import is_upstream

TARGET_KEY = 'target'
IDS_NAME = 'draft_ids'


def build_draft(cfg: DraftConfig) -> Dflash | Eagle3:
    """Return an unbound draft with untrained weights."""
    return Dflash(cfg) if cfg.kind == 'dflash' else Eagle3(cfg)


def target_digest(directory: str | Path) -> str:
    """
    Return what identifies the weights of a target's checkpoint folder, a sha256 in hex.

    It covers the names and digests of the weight files in the folder's manifest; a released
    folder has none and is told by `upstream_folder.fingerprint`. EngineError otherwise.
    """
    if is_upstream(directory):
        return upstream_digest(directory)
    files = read_manifest(directory)['files']
    weights = sorted((name, str(digest)) for name, digest in files.items()
                     if name.endswith('.safetensors'))
    return hashlib.sha256(repr(weights).encode()).hexdigest()


def save_draft(draft: Draft, folder: str | Path, manifest: Mapping[str, Any],
               dtype: torch.dtype = torch.float16) -> None:
    """
    Write a draft.

    manifest: JSON-ready entries; its "target" must be the `target_digest` of the target's
    folder, else ConfigurationError.
    """
    if not isinstance(manifest.get(TARGET_KEY), str):
        raise ConfigurationError(f'the manifest of draft {draft.cfg.name} names no target: add '
                                 f'"{TARGET_KEY}": target_digest(folder of the target)')
    tensors = {name: value for name, value in draft.state_dict().items() if name != IDS_NAME}
    # ids are kept as whole numbers: fp16 holds them up to 2,048 only
    ids = None if draft.draft_ids is None else draft.draft_ids.tolist()
    write_weights(tensors, {'draft': draft.cfg.to_dict(), IDS_NAME: ids}, folder, manifest,
                  dtype)


def load_draft(folder: str | Path, target: Target, device: torch.device | str | None = None,
               dtype: torch.dtype = torch.float32, *,
               checkpoint: str | Path | None = None) -> Dflash | Eagle3:
    """
    Return a draft for inference, bound to `target` and on its device unless told otherwise.

    checkpoint: the folder that the target came from; a draft for other weights is then
    refused, see `check_target`. EngineError names the file, tensor or value at fault.
    """
    if checkpoint is not None:
        check_target(folder, target_digest(checkpoint))
    device = target.device if device is None else torch.device(device)
    tensors, config = read_weights(folder, device, dtype)
    try:
        cfg = DraftConfig.from_dict(config['draft'])
        ids = config[IDS_NAME]
    except (ConfigurationError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f'{Path(folder) / CONFIG_NAME} is not a draft ({error}): '
                          f'{REMEDY}') from error
    if ids is not None:
        tensors[IDS_NAME] = torch.tensor(ids, dtype=torch.int64, device=device)
    with torch.device('meta'):  # no time spent on random weights
        draft = build_draft(cfg)
    check_tensors(tensors, draft.state_dict(), folder)
    draft.load_state_dict(tensors, assign=True)
    try:
        if ids is not None:
            draft.set_vocabulary(ids)
        draft.bind(target.text, target.cfg.tokens)
    except ConfigurationError as error:
        raise EngineError(f'{folder}: {error}') from error
    return draft.eval().requires_grad_(False)


def check_target(folder: str | Path, digest: str) -> None:
    """Raise EngineError unless the draft in `folder` was trained for the target of `digest`."""
    trained = read_manifest(folder).get(TARGET_KEY)
    if trained != digest:
        raise EngineError(f'draft {folder} was trained for target {str(trained)[:12]}, the '
                          f'loaded one is {digest[:12]}: train the draft again for these '
                          'weights, or load the target it belongs to')
