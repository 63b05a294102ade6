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
history is fused as its 48 ids, placeholders never reach the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rspec_planner.errors import InputError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.planner.history import history_token_ids
from rspec_planner.planner.tokenizer import (
    INSTRUCTION_TEXT,
    ROLE_TEXTS,
    SYSTEM_TEXT,
    Tokenizer,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: a layout is a sequence of text runs (token counts) and images (merged rows, columns)
Segment = int | tuple[int, int]

#: longest navigation text; buffers are sized for it
MAX_ROUTE_WORDS = 64


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


def build_prompt(profile: ProfileConfig, tokenizer: Tokenizer, ego_poses: Floats,
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


def route_ids(profile: ProfileConfig, tokenizer: Tokenizer, navigation_text: str) -> Ints:
    """Return the route block, or no ids at all when there is nothing to say."""
    words = tokenizer.encode(navigation_text)
    if len(words) > MAX_ROUTE_WORDS:
        raise InputError(f'navigation text: {len(words)} words, limit {MAX_ROUTE_WORDS}; '
                         'send one short command')
    if not words:
        return np.zeros(0, dtype=np.int64)
    return np.array([tokenizer.special('route_start'), *words, tokenizer.special('route_end')],
                    dtype=np.int64)


def max_prompt_length(profile: ProfileConfig, tokenizer: Tokenizer) -> int:
    """Return the length of the longest prompt that `build_prompt` makes."""
    head, tail = _fixed_ids(profile, tokenizer)
    return len(head) + 3 * profile.history.num_poses + 1 + MAX_ROUTE_WORDS + 2 + len(tail)


def visual_mask(profile: ProfileConfig, token_ids: Ints) -> NDArray[np.bool_]:
    """Return (S,) bool, True where an image feature replaces the embedding."""
    return np.asarray(token_ids == profile.tokens.image_pad)


@lru_cache(maxsize=8)
def _fixed_ids(profile: ProfileConfig, tokenizer: Tokenizer) -> tuple[Ints, Ints]:
    """Return the ids before the history bins and those after the route block."""
    t = profile.tokens
    assistant = tokenizer.encode(ROLE_TEXTS[-1])
    image = [t.vision_start] + [t.image_pad] * profile.tokens_per_image + [t.vision_end]
    num_images = len(profile.cameras.names) * profile.cameras.frames
    head = [*_preamble(profile, tokenizer), *image * num_images, t.traj_history_start]
    tail = [*tokenizer.encode(INSTRUCTION_TEXT), t.im_end,
            t.im_start, *assistant, t.cot_start]
    return np.array(head, dtype=np.int64), np.array(tail, dtype=np.int64)


def _preamble(profile: ProfileConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the ids before the first image."""
    t = profile.tokens
    system, user, _ = (tokenizer.encode(text) for text in ROLE_TEXTS)
    return [t.im_start, *system, *tokenizer.encode(SYSTEM_TEXT), t.im_end, t.im_start, *user]


@lru_cache(maxsize=32)
def _positions(profile: ProfileConfig, tokenizer: Tokenizer, length: int) -> tuple[Ints, int]:
    """Return positions and rope_delta; the layout depends on the prompt's length alone."""
    rows, cols = profile.patch_grid
    merge = profile.vision.spatial_merge_size
    num_images = len(profile.cameras.names) * profile.cameras.frames
    before = len(_preamble(profile, tokenizer))
    after = length - before - num_images * (profile.tokens_per_image + 2)
    image: list[Segment] = [1, (rows // merge, cols // merge), 1]
    return segment_positions([before, *image * num_images, after])
