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
"""A whole AutoVLA checkpoint folder: weights, tokenizer, codebook and the prompt's wording."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rspec_planner.model.autovla import AutoVla
from rspec_planner.model.autovla_checkpoint import load_autovla
from rspec_planner.model.codebook import ActionCodebook, read_codebook
from rspec_planner.planner.action_tokenizer import ActionTokenizer, load_action_tokenizer
from rspec_planner.planner.autovla_prompt import Wording


@dataclass(frozen=True)
class AutoVlaFolder:
    """What a folder holds; the parts belong to each other."""

    target: AutoVla
    tokenizer: ActionTokenizer
    codebook: ActionCodebook
    wording: Wording

    @staticmethod
    def load(folder: str | Path, device: torch.device | str = 'cpu',
             dtype: torch.dtype = torch.bfloat16) -> AutoVlaFolder:
        """
        Read config.json, safetensors, tokenizer.json, wording.json and the codebook.

        EngineError or ConfigurationError names the file at fault; small files come first.
        """
        wording, codebook = Wording.read(folder), read_codebook(folder)
        tokenizer = load_action_tokenizer(folder, codebook.size)
        target = load_autovla(folder, tokenizer.tokens, device, dtype)
        return AutoVlaFolder(target, tokenizer, codebook, wording)
