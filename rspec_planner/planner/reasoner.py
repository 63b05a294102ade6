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
The reasoning of one prefilled frame: draft, verify and the state that they share.

Without a draft this is greedy decoding, one token per target forward. With one the text is the
same: the target verifies a whole block at once and only what it would have said is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rspec_planner.decode.loop import close, decode
from rspec_planner.decode.reuse import start_from_guess
from rspec_planner.decode.sampling import Sampler
from rspec_planner.decode.state import DecodeState, DecodeStats
from rspec_planner.engine.draft_executor import draft_executor
from rspec_planner.engine.executor import Executor
from rspec_planner.engine.torch_executor import verify_executor
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.draft import Draft
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache
from rspec_planner.planner.prompt import Prompt

#: how many tokens of the previous reasoning a prefill can verify; a CoC has 15 to 20
GUESS_ROOM = 32


def draft_taps(target: Target, draft: Draft, capacity: int) -> TapBuffer:
    """Return the buffer of the states that a draft reads, one row per cache position."""
    return TapBuffer(draft.cfg.taps, 1, capacity, target.cfg.text.hidden_size, target.dtype,
                     target.device)


def tapped_tail(draft: Draft, target: Target) -> int:
    """
    Return how many last prompt rows the prefill must carry through the target's last layer.

    0 stands for all of them. A draft that does not tap that layer needs none but the very last.
    """
    last = target.cfg.text.num_layers - 1
    return draft.cfg.window if last in draft.cfg.taps else 1


class Reasoner:
    """Decodes frame by frame over one cache; several may share a cache, one at a time."""

    def __init__(self, target: Target, cache: KVCache, *, budget: int,
                 draft: Draft | None = None, taps: TapBuffer | None = None,
                 positions: Tensor | None = None) -> None:
        """Wire the executors; a draft needs its taps and the prefill's positions buffer."""
        self._tokens = target.cfg.tokens
        self._budget = budget
        self._cache, self._taps = cache, taps
        self._follow = {self._tokens.cot_end: self._tokens.traj_future_start}
        self.state = DecodeState(cache.capacity, target.device)
        self.draft: Executor | None = None
        width = 1
        if draft is not None:
            if taps is None or positions is None:
                raise ConfigurationError(f'draft {draft.cfg.label}: needs taps and positions, '
                                         'see draft_taps; give both')
            width = draft.cfg.block
            self.draft = draft_executor(draft, target, self.state.tokens, taps, positions)
        self.verify: Executor = verify_executor(target, cache, width, taps)

    def reason(self, prompt: Prompt, prefill: Executor, guess: Sequence[int] = (),
               sampler: Sampler | None = None) -> tuple[tuple[int, ...], DecodeStats, int]:
        """
        Decode behind a prefill that has run.

        guess: the tokens that rode in it, see `decode.reuse.place_guess`. sampler: draws from
        the target instead of taking its best token.
        Return the generated ids, how they were committed, and the rows of the expert's context,
        which ends with `<|traj_future_start|>`.
        """
        state, tokens = self.state, self._tokens
        self.verify.inputs['rope_delta'].fill_(prompt.rope_delta)
        if self.draft is not None:
            self.draft.inputs['rope_delta'].fill_(prompt.rope_delta)
        start_from_guess(prefill, state, torch.from_numpy(prompt.token_ids), guess,
                         tokens.stop_ids, self._budget, sampler)
        stats = decode(self.verify, state, tokens.stop_ids, self._budget, self.draft,
                       follow=self._follow, sampler=sampler)
        generated = state.generated
        length, forwards = close(self.verify, state, tokens.traj_future_start)
        block = len(self.verify.inputs['ids'])
        return generated, replace(stats, closing_forwards=forwards, block=block), length
