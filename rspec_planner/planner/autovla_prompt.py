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
The prompt of AutoVLA: what the model is, a video of each camera, the vehicle's state, a route.

Chat format of Qwen2.5-VL with numbered videos. The sentences belong to the checkpoint, because
the published ones differ between versions of its code (`AutoVLA.get_prompt`, `SFTDataset`); a
`Wording` is read from a JSON file beside the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import json
from pathlib import Path
from typing import Protocol

import numpy as np

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.model.autovla_config import AutoVlaConfig
from rspec_planner.model.bounded import read_bounded
from rspec_planner.planner.prompt import Ints, Prompt

#: longest driving instruction, characters
MAX_INSTRUCTION = 200
WORDING_FILE = 'wording.json'


class Codec(Protocol):
    """Ordinary text to ids and back; special tokens are no text."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""


@dataclass(frozen=True)
class Wording:
    """
    The sentences of a checkpoint, without separators between them.

    state holds {velocity} (m/s), {acceleration} (m/s^2) and {instruction}, all optional.
    """

    system: str
    introduction: str
    videos: tuple[str, ...]  # before the video of each camera
    state: str

    @staticmethod
    def read(directory: str | Path) -> Wording:
        """Read wording.json of a folder; ConfigurationError names the file and the fault."""
        path = Path(directory) / WORDING_FILE
        try:
            found = json.loads(read_bounded(path))
            wording = Wording(**{**found, 'videos': tuple(found['videos'])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f'{path}: no wording of a prompt ({error}); write system, '
                                     'introduction, videos and state as the checkpoint was '
                                     'trained with') from None
        texts = (wording.system, wording.introduction, *wording.videos, wording.state)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigurationError(f'{path}: every sentence must be a string')
        return wording


#: of the tiny profile, and where a folder brings none for a test
DEFAULT_WORDING = Wording(
    'You drive a vehicle. You see what its cameras see and you know its state. Say what matters '
    'if anything does, then choose the action of the next five seconds.',
    'The vehicle has three cameras.',
    ('The front camera, four frames at 2 Hz:', 'The front left camera, four frames at 2 Hz:',
     'The front right camera, four frames at 2 Hz:'),
    'The velocity is {velocity} m/s and the acceleration is {acceleration} m/s^2. '
    'The instruction is: {instruction}.')


@dataclass(frozen=True)
class VehicleState:
    """What the prompt says about the vehicle at t0."""

    velocity: float  # m/s
    acceleration: float  # m/s^2
    instruction: str = 'go straight'

    def sentence(self, template: str) -> str:
        """Return the template with three decimals; InputError for what cannot be said."""
        for name in ('velocity', 'acceleration'):
            if not np.isfinite(getattr(self, name)):
                raise InputError(f'{name} {getattr(self, name)}: not a finite number; drop the '
                                 'frame')
        said = self.instruction.strip().lower()
        if len(said) > MAX_INSTRUCTION or any(mark in said for mark in '<|>') or (
                not said.isprintable()):
            raise InputError(f'instruction {said[:40]!r}: use at most {MAX_INSTRUCTION} '
                             'printable characters without <, | and >')
        for name, value in (('velocity', f'{self.velocity:.3f}'),
                            ('acceleration', f'{self.acceleration:.3f}'), ('instruction', said)):
            template = template.replace(f'{{{name}}}', value)
        return template


def video_positions(cfg: AutoVlaConfig, runs: Sequence[int]) -> tuple[Ints, int]:
    """
    Return three-axis positions (3, S) and rope_delta of text runs with a video between each.

    runs: one more than there are videos. Text advances all axes by one. Slot k of a video at
    position p has t = p + k * time_step, h = p + row, w = p + column on its merged grid, and the
    next text starts at p + max(rows, columns).
    """
    rows, cols = cfg.merged_grid
    grid = np.indices((cfg.slots, rows, cols), dtype=np.int64).reshape(3, -1)
    grid[0] *= cfg.time_step
    parts: list[Ints] = []
    start = 0
    for index, count in enumerate(runs):
        if index:
            parts.append(start + grid)
            start += max(rows, cols)
        parts.append(np.broadcast_to(np.arange(start, start + count, dtype=np.int64), (3, count)))
        start += count
    positions = np.concatenate(parts, axis=1)
    return positions, int(positions.max()) + 1 - positions.shape[1]


def build_prompt(cfg: AutoVlaConfig, codec: Codec, wording: Wording,
                 state: VehicleState) -> Prompt:
    """
    Return the prompt of one frame, which ends where the assistant begins to speak.

    InputError for a state that cannot be said, ConfigurationError for a wording of other
    cameras.
    """
    t = cfg.tokens
    if len(wording.videos) != len(cfg.video.names):
        raise ConfigurationError(f'the wording has {len(wording.videos)} videos, the profile '
                                 f'{len(cfg.video.names)}: use the wording of this profile')
    runs: list[list[int]] = []
    text = 'user\n' + wording.introduction
    begin = [t.im_start, *codec.encode('system\n' + wording.system), t.im_end,
             *codec.encode('\n'), t.im_start]
    for number, sentence in enumerate(wording.videos, start=1):
        text += f'{sentence}Video {number}: '
        runs.append([*begin, *codec.encode(text), t.vision_start])
        begin, text = [t.vision_end], ''
    runs.append([*begin, *codec.encode(state.sentence(wording.state)), t.im_end,
                 *codec.encode('\n'), t.im_start, *codec.encode('assistant\n')])
    video = [t.video_pad] * (cfg.slots * cfg.tokens_per_image)
    ids = runs[0] + [token for run in runs[1:] for token in (*video, *run)]
    positions, delta = video_positions(cfg, [len(run) for run in runs])
    return Prompt(np.array(ids, dtype=np.int64), positions, delta, len(ids))
