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
The prompts of Alpamayo R1 and 1.5 in Qwen's chat format, byte for byte.

The pieces follow the released models: images first (camera-major, oldest frame first), then the
ego history, the route (1.5) and the instruction. 1.5 names the camera before its first image
and numbers every frame; the trailing spaces are part of the text. Text between two special
tokens is encoded in one run, as the whole prompt would be.
"""

from __future__ import annotations

from collections.abc import Sequence

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.planner.camera_roles import BY_INDEX
from rspec_planner.planner.tokenizer import (
    INSTRUCTION_TEXT,
    ROLE_TEXTS,
    SYSTEM_TEXT,
    TextTokenizer,
)

#: a piece is text or the id of one special token
Piece = str | int


def encode_pieces(tokenizer: TextTokenizer, pieces: Sequence[Piece]) -> list[int]:
    """Return the ids of pieces; neighbouring texts are joined before they are encoded."""
    ids: list[int] = []
    text = ''
    for piece in (*pieces, -1):
        if isinstance(piece, str):
            text += piece
            continue
        if text:
            ids += tokenizer.encode(text)
            text = ''
        ids.append(piece)
    return ids[:-1]


def driving_head(profile: ProfileConfig, tokenizer: TextTokenizer) -> list[int]:
    """Return the ids from the system line to `<|traj_history_start|>`."""
    return encode_pieces(tokenizer, [*_images(profile), profile.tokens.traj_history_start])


def driving_tail(profile: ProfileConfig, tokenizer: TextTokenizer) -> list[int]:
    """Return the ids from the instruction to `<|cot_start|>`, behind which the model writes."""
    return encode_pieces(tokenizer, [INSTRUCTION_TEXT,
                                     *_assistant(profile, profile.tokens.cot_start)])


def question_ids(profile: ProfileConfig, tokenizer: TextTokenizer, question: str) -> list[int]:
    """
    Return the ids of a question about the images; the answer ends with `<|im_end|>`.

    No history and no instruction. InputError for a question without any text.
    """
    if not question.strip():
        raise InputError('question: no text; ask something about the images')
    start, end, answer = (tokenizer.special(name) for name in (
        'question_start', 'question_end', 'answer_start'))
    return encode_pieces(tokenizer, [*_images(profile), start, question, end,
                                     *_assistant(profile, answer)])


def _images(profile: ProfileConfig) -> list[Piece]:
    """Return the pieces from the system line to the last image."""
    t, cameras = profile.tokens, profile.cameras
    system, user, _ = ROLE_TEXTS
    pieces: list[Piece] = [t.im_start, system, SYSTEM_TEXT, t.im_end, '\n', t.im_start, user]
    image = [t.vision_start, *[t.image_pad] * profile.tokens_per_image, t.vision_end]
    for index in cameras.ids:
        if profile.prompt.camera_names:
            pieces.append(f'{_display_name(index)}: ')
        for frame in range(cameras.frames):
            if profile.prompt.frame_numbers:
                pieces.append(f'frame {frame} ')
            pieces += image
    return pieces


def _display_name(index: int) -> str:
    role = BY_INDEX.get(index)
    if role is None:
        raise ConfigurationError(f'camera index {index}: the model knows {sorted(BY_INDEX)}')
    return role.display


def _assistant(profile: ProfileConfig, opening: int) -> list[Piece]:
    """Return the pieces that close the user's turn and open the assistant's."""
    t = profile.tokens
    return [t.im_end, '\n', t.im_start, ROLE_TEXTS[-1], opening]
