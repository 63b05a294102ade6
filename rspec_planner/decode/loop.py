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

Without a draft the block is the anchor alone (B = 1) and the loop is greedy decoding. Order and
state are those of the device-resident loop, for which this one, which reads every iteration's
result on the host, is the reference: all that an iteration needs is data in `DecodeState` and
in fixed buffers, and shapes never change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from time import perf_counter

import torch

from rspec_planner.decode.accept import accept, apply_follow
from rspec_planner.decode.confidence import log_probability
from rspec_planner.decode.sampling import Sampler
from rspec_planner.decode.state import DecodeState, DecodeStats
from rspec_planner.engine.executor import Executor
from rspec_planner.errors import ConfigurationError

_NO_RULE: Mapping[int, int] = {}


def decode(verify: Executor, state: DecodeState, stop_ids: Collection[int], max_tokens: int,
           draft: Executor | None = None, *, follow: Mapping[int, int] = _NO_RULE,
           sampler: Sampler | None = None) -> DecodeStats:
    """
    Generate until a stop token or `max_tokens`, tokens committed by the prefill included.

    `state` was started with the prompt and what the prefill decided.
    verify: inputs 'ids' (B,) int64 and 'start' (1,) int64, outputs 'best' (B,) int64 and
    'logits' (B, V), for a sampler and the log probability; it writes the K/V of rows
    start .. start + B - 1.
    draft: inputs 'start' (1,) the anchor's row, 'since' (1,) the first row that is new to it,
    'length' (1,) of the prompt; output 'proposals' (B - 1,); needed exactly when B > 1. It may
    read tokens up to the anchor, and taps of the rows before it.
    follow: see `apply_follow`. sampler: draws from the target instead of taking its best token.
    Raises ConfigurationError when widths or capacities do not fit.
    """
    ids, best = verify.inputs['ids'], verify.outputs['best']
    check_fit(ids.shape[0], draft, state, max_tokens)
    reused = state.num_generated - 1
    committed: list[int] = []
    draft_ms = verify_ms = 0.0
    while not state.done and state.num_generated < max_tokens:
        started = perf_counter()
        block = [state.anchor]
        if draft is not None:
            run_draft(draft, state)
            drawn = draft.outputs['proposals'] if sampler is None else \
                sampler.propose(draft.outputs, state.p + 1)
            block = apply_follow([state.anchor, *drawn.tolist()], follow)
        ids.copy_(torch.tensor(block))
        drafted = perf_counter()
        verify.inputs['start'].fill_(state.p)
        verify.enqueue()
        chosen = best.tolist() if sampler is None else sampler.choose(
            block, verify.outputs, draft.outputs if draft else None, follow, state.p + 1)
        taken = accept(block, chosen, stop_ids, max_tokens - state.num_generated)
        state.since = state.p
        state.commit(taken)
        verified = perf_counter()
        state.log_probability += log_probability(verify.outputs, taken.committed)
        committed.append(len(taken.committed))
        draft_ms += 1e3 * (drafted - started)
        verify_ms += 1e3 * (verified - drafted)
    return DecodeStats(len(committed), tuple(committed), draft_ms, verify_ms, reused,
                       log_probability=state.log_probability)


def close(verify: Executor, state: DecodeState, end_id: int) -> tuple[int, int]:
    """
    Complete the context: `end_id` with its K/V last. Return its length and the forwards taken.

    The action expert reads the cache up to and including `<|traj_future_start|>`. Where that
    token was a verified proposal nothing is left to do. A bonus token is not in the cache yet;
    a reasoning that ran out of budget gets the end token appended, so that its (rejected)
    trajectory is still drawn from a well-formed context.
    """
    ids, forwards = verify.inputs['ids'], 0
    if state.anchor != end_id:
        state.append((end_id,), True)
    while not state.closed:
        missing = state.tokens[state.cached:state.p + 1][:ids.shape[0]]
        ids.fill_(end_id)
        ids[:len(missing)] = missing
        verify.inputs['start'].fill_(state.cached)
        verify.enqueue()
        state.cached += len(missing)
        forwards += 1
    return state.p + 1, forwards


def run_draft(draft: Executor, state: DecodeState) -> None:
    """Let the draft propose what follows the anchor."""
    draft.inputs['start'].fill_(state.p)
    draft.inputs['since'].fill_(state.since)
    draft.inputs['length'].fill_(state.length)
    draft.enqueue()


def check_fit(width: int, draft: Executor | None, state: DecodeState, max_tokens: int) -> None:
    """Raise ConfigurationError when verify, draft and token buffer do not fit each other."""
    if (draft is None) != (width == 1):
        raise ConfigurationError(f'verify width {width} and draft {draft}: width 1 goes without '
                                 'a draft, a wider block with one')
    needed = state.length + max_tokens + 1
    if needed > len(state.tokens):
        raise ConfigurationError(f'decoding needs {needed} tokens, the buffer holds '
                                 f'{len(state.tokens)}; build DecodeState with more')
