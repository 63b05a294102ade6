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
The prompt: system line, images, ego history, route, instruction, open assistant turn.

Pieces and order are those of Alpamayo R1 (images first, camera-major, oldest frame first, then
the history, then the instruction); the route block is 1.5's and exists only with a text. The
history is fused as its 48 ids, placeholders never reach the model. The profile says how the
text between them is written: in plain words, or in the chat format (`alpamayo_prompt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rspec_planner.errors import InputError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.planner.alpamayo_prompt import driving_head, driving_tail, question_ids
from rspec_planner.planner.history import history_token_ids
from rspec_planner.planner.tokenizer import (
    INSTRUCTION_TEXT,
    ROLE_TEXTS,
    SYSTEM_TEXT,
    TextTokenizer,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: a layout is a sequence of text runs (token counts) and images (merged rows, columns)
Segment = int | tuple[int, int]

#: longest navigation text; buffers are sized for it
MAX_ROUTE_TOKENS = 64


@dataclass(frozen=True)
class Prompt:
    """Token ids and rotary positions of one observation."""

    token_ids: Ints  # (S,) int64; image slots hold image_pad
    positions: Ints  # (3, S) int64: temporal, height, width
    rope_delta: int  # position of cache index i after the prompt is i + rope_delta
    length: int  # S


def segment_positions(segments: Sequence[Segment]) -> tuple[Ints, int]:
    """
    Return three-axis positions (3, S) and rope_delta of a layout.

    Text advances all axes by one. An image at position p has t = p, h = p + row, w = p + column
    on its merged grid, and the next segment starts at p + max(rows, columns).
    """
    parts: list[Ints] = []
    start = 0
    for segment in segments:
        if isinstance(segment, tuple):
            rows, cols = segment
            grid = np.indices((rows, cols), dtype=np.int64).reshape(2, -1)
            parts.append(start + np.concatenate([np.zeros_like(grid[:1]), grid]))
            start += max(rows, cols)
        else:
            run = np.arange(start, start + segment, dtype=np.int64)
            parts.append(np.broadcast_to(run, (3, segment)))
            start += segment
    positions = np.concatenate(parts, axis=1)
    return positions, int(positions.max()) + 1 - positions.shape[1]


def build_prompt(profile: ProfileConfig, tokenizer: TextTokenizer, ego_poses: Floats,
                 navigation_text: str = '') -> Prompt:
    """
    Return the prompt of one observation.

    `ego_poses` (16, 4, 4) homogeneous, ego frame at t0, oldest first. A navigation text of
    white space only counts as none: an empty route block was never trained.
    """
    route = route_ids(profile, tokenizer, navigation_text)
    head, tail = _fixed_ids(profile, tokenizer)
    expected = (profile.history.num_poses, 4, 4)
    if ego_poses.shape != expected:
        raise InputError(f'ego_poses: shape {ego_poses.shape}, expected {expected}; '
                         'resample the odometry at t0-1.5 ... t0 s')
    history = history_token_ids(ego_poses[:, :3, 3], profile.history,
                                profile.tokens.traj_token_start)
    end = np.array([profile.tokens.traj_history_end], dtype=np.int64)
    ids = np.concatenate([head, history, end, route, tail])
    positions, rope_delta = _positions(profile, tokenizer, len(ids))
    return Prompt(ids, positions, rope_delta, len(ids))


def build_question(profile: ProfileConfig, tokenizer: TextTokenizer, question: str) -> Prompt:
    """
    Return the prompt of a question about the images of one observation (Alpamayo 1.5).

    InputError when the weights behind `profile` were not trained to answer.
    """
    if profile.prompt.style != 'chat' or not profile.prompt.navigation:
        raise InputError(f'question: {profile.name} was not trained to answer any; '
                         'load alpamayo-1.5')
    ids = np.array(question_ids(profile, tokenizer, question), dtype=np.int64)
    positions, rope_delta = segment_positions(_segments(profile, ids))
    return Prompt(ids, positions, rope_delta, len(ids))


def route_ids(profile: ProfileConfig, tokenizer: TextTokenizer, navigation_text: str) -> Ints:
    """Return the route block, or no ids at all when there is nothing to say."""
    words = tokenizer.encode(navigation_text.strip())
    if len(words) > MAX_ROUTE_TOKENS:
        raise InputError(f'navigation text: {len(words)} tokens, limit {MAX_ROUTE_TOKENS}; '
                         'send one short command')
    if not words:
        return np.zeros(0, dtype=np.int64)
    if not profile.prompt.navigation:
        raise InputError(f'navigation text: {profile.name} was trained without any; send none, '
                         'or load alpamayo-1.5')
    return np.array([tokenizer.special('route_start'), *words, tokenizer.special('route_end')],
                    dtype=np.int64)


def max_prompt_length(profile: ProfileConfig, tokenizer: TextTokenizer) -> int:
    """Return the length of the longest prompt that `build_prompt` makes."""
    head, tail = _fixed_ids(profile, tokenizer)
    route = MAX_ROUTE_TOKENS + 2 if profile.prompt.navigation else 0
    return len(head) + 3 * profile.history.num_poses + 1 + route + len(tail)


def visual_mask(profile: ProfileConfig, token_ids: Ints) -> NDArray[np.bool_]:
    """Return (S,) bool, True where an image feature replaces the embedding."""
    return np.asarray(token_ids == profile.tokens.image_pad)


@lru_cache(maxsize=8)
def _fixed_ids(profile: ProfileConfig, tokenizer: TextTokenizer) -> tuple[Ints, Ints]:
    """Return the ids before the history bins and those after the route block."""
    if profile.prompt.style == 'chat':
        head, tail = driving_head(profile, tokenizer), driving_tail(profile, tokenizer)
    else:
        head, tail = _word_head(profile, tokenizer), _word_tail(profile, tokenizer)
    return np.array(head, dtype=np.int64), np.array(tail, dtype=np.int64)


def _word_head(profile: ProfileConfig, tokenizer: TextTokenizer) -> list[int]:
    """Return the ids up to the history bins of the embedded profile."""
    t = profile.tokens
    system, user, _ = (tokenizer.encode(text) for text in ROLE_TEXTS)
    image = [t.vision_start] + [t.image_pad] * profile.tokens_per_image + [t.vision_end]
    num_images = len(profile.cameras.names) * profile.cameras.frames
    return [t.im_start, *system, *tokenizer.encode(SYSTEM_TEXT), t.im_end, t.im_start, *user,
            *image * num_images, t.traj_history_start]


def _word_tail(profile: ProfileConfig, tokenizer: TextTokenizer) -> list[int]:
    """Return the ids behind the route block of the embedded profile."""
    t = profile.tokens
    return [*tokenizer.encode(INSTRUCTION_TEXT), t.im_end, t.im_start,
            *tokenizer.encode(ROLE_TEXTS[-1]), t.cot_start]


@lru_cache(maxsize=32)
def _positions(profile: ProfileConfig, tokenizer: TextTokenizer,
               length: int) -> tuple[Ints, int]:
    """Return positions and rope_delta; the layout depends on the prompt's length alone."""
    head, _ = _fixed_ids(profile, tokenizer)
    return segment_positions([*_segments(profile, head), length - len(head)])


def _segments(profile: ProfileConfig, ids: Ints) -> list[Segment]:
    """Return the layout of ids (S,): runs of text, and images of the profile's size."""
    rows, cols = (n // profile.vision.spatial_merge_size for n in profile.patch_grid)
    starts = np.flatnonzero(ids == profile.tokens.image_pad)[::rows * cols]
    segments: list[Segment] = []
    end = 0
    for start in starts:
        segments += [int(start) - end, (rows, cols)]
        end = int(start) + rows * cols
    return [*segments, len(ids) - end]
