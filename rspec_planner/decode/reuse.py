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
Temporal reuse: the previous plan's reasoning rides in this frame's prefill and is checked there.

The guess follows the prompt, so the prefill's last rows are one wide verify of the block
[last prompt token, *guess] on the current frame. What the target would not say now is dropped;
a full match leaves nothing to decode, and its K/V and taps are already in place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rspec_planner.decode.accept import accept
from rspec_planner.decode.confidence import log_probability
from rspec_planner.decode.sampling import Sampler
from rspec_planner.decode.state import DecodeState
from rspec_planner.engine.executor import Executor


def place_guess(prefill: Executor, length: int, rope_delta: int,
                guess: Sequence[int]) -> tuple[int, ...]:
    """
    Put the guess behind a prompt of `length` tokens that already lies in the prefill's buffers.

    Return the part that the stage has room for; an empty guess makes a plain prefill.
    """
    inputs = prefill.inputs
    room = min(len(prefill.outputs['best']) - 1, len(inputs['ids']) - length)
    kept = tuple(guess[:room])
    end = length + len(kept)
    if kept:
        inputs['ids'][length:end] = torch.tensor(kept)
        inputs['positions'][:, length:end] = torch.arange(length, end) + rope_delta
    inputs['length'].fill_(end)
    inputs['guess_length'].fill_(len(kept))
    return kept


def start_from_guess(prefill: Executor, state: DecodeState, prompt: Tensor,
                     guess: Sequence[int], stop_ids: Collection[int], max_tokens: int,
                     sampler: Sampler | None = None) -> None:
    """
    Begin a frame with what the prefill confirms of the guess, and the target's token behind it.

    prompt: (S,) int64; guess: what `place_guess` returned; max_tokens: the frame's budget.
    """
    state.open(prompt)
    block = [state.anchor, *guess]
    if sampler is None:
        best = prefill.outputs['best'][:len(block)].tolist()
    else:
        best = sampler.draw(prefill.outputs['logits'][:len(block)], state.length)
    taken = accept(block, best, stop_ids, max_tokens)
    state.commit(taken)
    state.log_probability = log_probability(prefill.outputs, taken.committed)
