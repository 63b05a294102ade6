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
What a model that says its trajectory has said: reasoning in words, and actions.

An answer that does not end, or has another number of actions than the horizon, is no plan; it
has a named fault, and nothing is filled in or cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rspec_planner.model.autovla_config import AutoVlaConfig
from rspec_planner.model.codebook import ActionCodebook, Floats
from rspec_planner.planner.autovla_prompt import Codec

FAULTS = ('unfinished', 'no_actions', 'action_count', 'scattered_actions')


@dataclass(frozen=True)
class Answer:
    """One decoded answer."""

    token_ids: tuple[int, ...]
    text: str  # all words, without the actions
    actions: tuple[int, ...]  # entries of the codebook
    fault: str = ''  # one of FAULTS, '' for a complete answer


def read_answer(cfg: AutoVlaConfig, codec: Codec, said: Sequence[int]) -> Answer:
    """Return words, actions and the fault, if any, of the tokens said after the prompt."""
    tokens = cfg.tokens
    ended = bool(said) and said[-1] in tokens.stop_ids
    at = [index for index, token in enumerate(said)
          if tokens.action_start <= token < tokens.action_end]
    spoken = set(at)
    words = [token for index, token in enumerate(said)
             if index not in spoken and token not in tokens.stop_ids]
    fault = ''
    if not ended:
        fault = 'unfinished'
    elif not at:
        fault = 'no_actions'
    elif len(at) != cfg.horizon_actions:
        fault = 'action_count'
    elif at[-1] - at[0] != len(at) - 1:
        fault = 'scattered_actions'
    return Answer(tuple(said), codec.decode(words),
                  tuple(said[index] - tokens.action_start for index in at), fault)


@dataclass(frozen=True)
class SaidPath:
    """The path of an answer in the ego frame at t0."""

    times: Floats  # (n + 1,) s after t0
    poses: Floats  # (n + 1, 3) x m, y m, yaw rad; the first is the origin


def path_of(answer: Answer, cfg: AutoVlaConfig, codebook: ActionCodebook) -> SaidPath | None:
    """Return the path of a complete answer, None for one with a fault."""
    if answer.fault:
        return None
    poses = codebook.path(answer.actions)
    times: Floats = np.arange(len(poses), dtype=np.float64) * (cfg.action_s / codebook.steps)
    return SaidPath(times, poses)
