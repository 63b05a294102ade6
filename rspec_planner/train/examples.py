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
"""From a rendered clip to the fixed-size arrays that a training step reads."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from rspec_planner.errors import InputError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.unicycle import UnicycleActionSpace
from rspec_planner.planner.prompt import build_prompt
from rspec_planner.planner.tokenizer import Tokenizer
from rspec_planner.world.clip import Clip, DELIBERATIVE

#: room behind the shortest prompt for a route block, the reasoning and its two closing tokens
SEQUENCE_ROOM = 40
MAX_REASONING = 32
MAX_WORDS = 8  # deliberative words that the auxiliary head names


@dataclass(frozen=True)
class ClipRow:
    """One clip as arrays; `Batch` documents the fields."""

    token_ids: np.ndarray  # (S,) int32
    prompt_length: int
    length: int
    token_weights: np.ndarray  # (R,) float32
    actions: np.ndarray  # (64, 2) float32
    words: np.ndarray  # (W,) int64
    objects: np.ndarray  # (16, T) uint8
    history: np.ndarray  # (16, 4) float32
    future: np.ndarray  # (64, 4) float32

    @staticmethod
    def tensor_fields() -> tuple[str, ...]:
        """Return the names of all fields."""
        return tuple(field.name for field in fields(ClipRow))


def history_poses(history: np.ndarray) -> np.ndarray:
    """Return (n, 4, 4) float64 homogeneous poses of (n, 4) rows x, y, z, yaw."""
    rows = np.asarray(history, np.float64)
    poses = np.tile(np.eye(4), (len(rows), 1, 1))
    cos, sin = np.cos(rows[:, 3]), np.sin(rows[:, 3])
    poses[:, 0, 0], poses[:, 0, 1] = cos, -sin
    poses[:, 1, 0], poses[:, 1, 1] = sin, cos
    poses[:, :3, 3] = rows[:, :3]
    return poses


class ExampleEncoder:
    """Encode clips for one profile and tokenizer; positions are the same for every clip."""

    def __init__(self, profile: ProfileConfig, tokenizer: Tokenizer,
                 deliberative_weight: float = 1.0):
        self.profile, self.tokenizer = profile, tokenizer
        self.deliberative_weight = deliberative_weight
        still = history_poses(np.zeros((profile.history.num_poses, 4)))
        prompt = build_prompt(profile, tokenizer, still)
        self.rope_delta = prompt.rope_delta
        self.visual_index = np.flatnonzero(prompt.token_ids == profile.tokens.image_pad)
        self.capacity = -(-(prompt.length + SEQUENCE_ROOM) // 16) * 16
        after = np.arange(prompt.length, self.capacity) + prompt.rope_delta
        self.positions = np.concatenate(
            [prompt.positions, np.broadcast_to(after, (3, len(after)))], axis=1)
        self._space = UnicycleActionSpace(profile.action_space)
        self._closing = (profile.tokens.cot_end, profile.tokens.traj_future_start)

    def encode(self, clip: Clip, objects: np.ndarray) -> ClipRow:
        """Return the arrays of one clip; raises InputError when its text does not fit."""
        prompt = build_prompt(self.profile, self.tokenizer, history_poses(clip.history),
                              clip.navigation_text)
        words = self._reasoning(clip)
        said = np.array([*words, *self._closing], np.int64)
        length = prompt.length + len(said)
        if length > self.capacity or len(said) > MAX_REASONING:
            raise InputError(f'clip {clip.spec.pair_id}: {len(said)} reasoning tokens behind a '
                             f'prompt of {prompt.length} do not fit; shorten the text')
        ids = np.full(self.capacity, self.profile.tokens.pad, np.int32)
        ids[:prompt.length], ids[prompt.length:length] = prompt.token_ids, said
        decisive = clip.token_kind[:len(words)] == DELIBERATIVE
        weights = np.zeros(MAX_REASONING, np.float32)
        weights[:len(said)] = 1.0
        weights[:len(words)][decisive] = self.deliberative_weight
        named = np.full(MAX_WORDS, -1, np.int64)
        chosen = np.asarray(words, np.int64)[decisive][:MAX_WORDS]
        named[:len(chosen)] = chosen
        actions = self._space.normalise(torch.from_numpy(np.asarray(clip.actions, np.float32)))
        return ClipRow(ids, prompt.length, length, weights, actions.numpy(), named, objects,
                       np.asarray(clip.history, np.float32), np.asarray(clip.future, np.float32))

    def _reasoning(self, clip: Clip) -> list[int]:
        words = self.tokenizer.encode(clip.reasoning)
        if self.tokenizer.unknown_id in words:
            raise InputError(f'clip {clip.spec.pair_id}: reasoning {clip.reasoning!r} has a word '
                             'outside the vocabulary; add it to world.reasoning.vocabulary()')
        if len(clip.token_kind) != len(words) + 1:
            raise InputError(f'clip {clip.spec.pair_id}: token_kind has {len(clip.token_kind)} '
                             f'entries for {len(words)} tokens and the stop; regenerate the clip')
        return words
