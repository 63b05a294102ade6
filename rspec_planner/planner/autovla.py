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
One frame of AutoVLA: videos and state in, reasoning and a path out, in a single decoding.

The loop is that of every other target (`decode.loop`): the draft proposes, the target verifies
and alone decides, for words and actions alike. There is no action expert and nothing to close.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from rspec_planner.decode.loop import decode
from rspec_planner.decode.reuse import place_guess, start_from_guess
from rspec_planner.decode.sampling import Sampler
from rspec_planner.decode.state import DecodeState, DecodeStats
from rspec_planner.engine.draft_executor import draft_executor
from rspec_planner.engine.executor import Executor
from rspec_planner.engine.torch_executor import prefill_executor, verify_executor
from rspec_planner.errors import InputError
from rspec_planner.model.autovla import AutoVla
from rspec_planner.model.draft import Draft
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.text import KVCache
from rspec_planner.model.window_vision import patchify_pairs
from rspec_planner.planner.prompt import Prompt


class Speaker:
    """Prefills and decodes frame by frame over one cache."""

    def __init__(self, target: AutoVla, *, prompt_rows: int, draft: Draft | None = None,
                 budget: int | None = None, stop_ids: Collection[int] | None = None) -> None:
        """
        Wire the executors; a draft is bound.

        budget: most tokens of an answer; stop_ids: what ends it; both the profile's by default.
        """
        cfg, device = target.cfg, target.device
        self.target = target
        self.stop_ids = cfg.tokens.stop_ids if stop_ids is None else tuple(stop_ids)
        self.budget = cfg.max_answer_tokens if budget is None else budget
        width = draft.cfg.block if draft is not None else 1
        capacity = prompt_rows + self.budget + width + 1
        self.cache = KVCache(cfg.text, 1, capacity, target.dtype, device)
        taps, tail = None, 1
        if draft is not None:
            taps = TapBuffer(draft.cfg.taps, 1, capacity, cfg.text.hidden_size, target.dtype,
                             device)
            # a draft that taps the last layer reads its window of prompt rows, 0 being all
            tail = draft.cfg.window if cfg.text.num_layers - 1 in draft.cfg.taps else 1
        self.prefill: Executor = prefill_executor(target, self.cache, prompt_rows, taps, 0, tail)
        self.verify: Executor = verify_executor(target, self.cache, width, taps)
        self.state = DecodeState(capacity, device)
        self.draft: Executor | None = None
        if draft is not None and taps is not None:
            self.draft = draft_executor(draft, target, self.state.tokens, taps,
                                        self.prefill.inputs['positions'])

    def see(self, frames: Tensor) -> None:
        """Encode frame pairs (N, 2, H, W, 3) uint8 of every slot of every video."""
        cfg, features = self.target.cfg, self.prefill.inputs['features']
        video = cfg.video
        wanted = (cfg.num_images, cfg.vision.temporal_patch_size, video.height, video.width, 3)
        if tuple(frames.shape) != wanted:
            raise InputError(f'frames of shape {tuple(frames.shape)}, expected {wanted}: bring '
                             f'every camera to {video.width}x{video.height}')
        with torch.inference_mode():
            patches = patchify_pairs(frames.to(self.target.device), cfg.vision.patch_size,
                                     cfg.vision.spatial_merge_size)
            features.copy_(self.target.vision(patches, cfg.patch_grid))

    def read(self, prompt: Prompt, sampler: Sampler | None = None) -> None:
        """
        Prefill a prompt over the frames seen last, and take the first token.

        sampler: draws it from the target instead of taking the best one; give `say` the same.
        """
        inputs, rows = self.prefill.inputs, len(self.prefill.inputs['ids'])
        if prompt.length > rows:
            raise InputError(f'a prompt of {prompt.length} tokens, room for {rows}: shorten the '
                             'instruction')
        inputs['ids'][:prompt.length] = torch.from_numpy(prompt.token_ids)
        inputs['positions'][:, :prompt.length] = torch.from_numpy(prompt.positions)
        place_guess(self.prefill, prompt.length, prompt.rope_delta, ())
        self.prefill.enqueue()
        for executor in (self.verify, self.draft):
            if executor is not None:
                executor.inputs['rope_delta'].fill_(prompt.rope_delta)
        start_from_guess(self.prefill, self.state, torch.from_numpy(prompt.token_ids), (),
                         self.stop_ids, self.budget, sampler)

    def say(self, sampler: Sampler | None = None) -> tuple[tuple[int, ...], DecodeStats]:
        """Decode behind the prompt read last; return the tokens said and how."""
        stats = decode(self.verify, self.state, self.stop_ids, self.budget, self.draft,
                       sampler=sampler)
        return self.state.generated, stats
