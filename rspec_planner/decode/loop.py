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
The decoding loop: verify a block, commit what the target agrees with, repeat.

Without a draft the block is the anchor alone (B = 1) and the loop is greedy decoding. This loop
reads every iteration's result on the host; it is the reference for the device-resident one.
"""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

from rspec_planner.decode.accept import accept
from rspec_planner.decode.state import DecodeState, DecodeStats
from rspec_planner.engine.executor import Executor
from rspec_planner.errors import ConfigurationError


def decode(verify: Executor, state: DecodeState, stop_ids: Collection[int], max_tokens: int,
           draft: Executor | None = None) -> DecodeStats:
    """
    Generate until a stop token or `max_tokens`, the first token included.

    `state` was started with the prompt and the token that the prefill decided.
    verify: inputs 'ids' (B,) int64 and 'start' (1,) int64, output 'best' (B,) int64; it writes
    the K/V of rows start .. start + B - 1. draft: inputs 'anchor' (1,) and 'start' (1,), output
    'proposals' (B - 1,); needed exactly when B > 1.
    """
    ids, best = verify.inputs['ids'], verify.outputs['best']
    if (draft is None) != (ids.shape[0] == 1):
        raise ConfigurationError(f'verify width {ids.shape[0]} and draft {draft}: width 1 goes '
                                 'without a draft, a wider block with one')
    committed: list[int] = []
    draft_ms = verify_ms = 0.0
    while not state.done and state.num_generated < max_tokens:
        started = perf_counter()
        ids[0] = state.anchor
        if draft is not None:
            _propose(draft, state)
            ids[1:] = draft.outputs['proposals']
        drafted = perf_counter()
        verify.inputs['start'].fill_(state.p)
        verify.enqueue()
        taken = accept(ids.tolist(), best.tolist(), stop_ids,
                       max_tokens - state.num_generated)
        state.commit(taken.committed, taken.stopped)
        committed.append(len(taken.committed))
        draft_ms += 1e3 * (drafted - started)
        verify_ms += 1e3 * (perf_counter() - drafted)
    return DecodeStats(len(committed), tuple(committed), draft_ms, verify_ms)


def close(verify: Executor, state: DecodeState, end_id: int) -> int:
    """
    Put `end_id` with its K/V at the end of the context and return the context's length.

    The action expert reads the cache up to and including `<|traj_future_start|>`. A bonus token
    is not in the cache yet; a reasoning that ran out of budget gets the end token appended, so
    that its (rejected) trajectory is still drawn from a well-formed context.
    """
    while True:
        verify.inputs['ids'].fill_(state.anchor)
        verify.inputs['start'].fill_(state.p)
        verify.enqueue()
        if state.anchor == end_id:
            return state.p + 1
        state.commit((end_id,), True)


def _propose(draft: Executor, state: DecodeState) -> None:
    draft.inputs['anchor'].fill_(state.anchor)
    draft.inputs['start'].fill_(state.p)
    draft.enqueue()
