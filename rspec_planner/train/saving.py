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
"""Checkpoints of a training run: the folder that ships, and the state that resumes."""

from __future__ import annotations

from collections.abc import Mapping
import os
from pathlib import Path
import pickle
import shutil
import tempfile
from typing import Any

import torch
from torch import nn

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.checkpoint import save_target
from rspec_planner.model.target import Target
from rspec_planner.planner.tokenizer import Tokenizer, TOKENIZER_FILE
from rspec_planner.train.optimizer import WeightAverage

CHECKPOINT_FOLDER = 'checkpoint'
STATE_FILE = 'state.pt'


def export(target: Target, tokenizer: Tokenizer, out_dir: Path,
           manifest: Mapping[str, Any]) -> Path:
    """
    Write OUT/checkpoint as a whole: an interrupted write leaves the previous folder in place.

    Weights are stored as fp16 with the tokenizer beside them.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = tokenizer.save(folder).read_bytes()
    final, fresh = out_dir / CHECKPOINT_FOLDER, out_dir / f'{CHECKPOINT_FOLDER}.new'
    shutil.rmtree(fresh, ignore_errors=True)
    save_target(target, fresh, manifest, extra_files={TOKENIZER_FILE: words})
    if final.exists():
        shutil.rmtree(final)
    fresh.rename(final)
    return final


def save_state(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer],
               average: WeightAverage, progress: Mapping[str, float]) -> None:
    """Write everything that an exact continuation needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {'model': model.state_dict(), 'average': average.values,
             'updates': average.updates, 'progress': dict(progress),
             'optimizers': [optimizer.state_dict() for optimizer in optimizers]}
    fresh = path.with_suffix('.new')
    torch.save(state, fresh)
    os.replace(fresh, path)


def load_state(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer],
               average: WeightAverage) -> dict[str, float]:
    """
    Read `save_state` output into the given objects and return its progress entries.

    Raises EngineError for a file of another model, ConfigurationError when there is none.
    """
    if not path.is_file():
        raise ConfigurationError(f'{path}: no training state there; run without --resume')
    device = next(model.parameters()).device
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state['model'])
        for optimizer, values in zip(optimizers, state['optimizers'], strict=True):
            optimizer.load_state_dict(values)
        with torch.no_grad():
            for mine, stored in zip(average.values, state['average'], strict=True):
                mine.copy_(stored)
    except (RuntimeError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise EngineError(f'{path}: does not fit this model and these settings '
                          f'({str(error).splitlines()[0]}); start without --resume') from None
    average.updates = int(state['updates'])
    return {key: float(value) for key, value in state['progress'].items()}
