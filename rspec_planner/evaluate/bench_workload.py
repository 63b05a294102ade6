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
What a latency bench of a profile runs on: prompts of its layout, and how far drafts get.

Random weights say nothing sensible, so accepted lengths are forced: the target's own greedy text
is proposed, right up to the token that the schedule names. Every proposal is still verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import json
from pathlib import Path

import torch
from torch import Tensor

from rspec_planner.errors import EngineError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.planner.prompt import Segment, segment_positions

#: text tokens of the R1 prompt besides the images' 16 x 2 marks: system line, history, instruction
TEXT_BEFORE, TEXT_BEHIND = 22, 72
#: mean length of a reasoning (arXiv 2606.31160)
MEAN_TOKENS = 17.4
#: longest text of a bench; a trace's longer ones, which ran away, are left out
LONGEST = 32


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt of the profile's layout with random words."""

    ids: Tensor  # (S,) int64
    positions: Tensor  # (3, S) int64
    rope_delta: int


def bench_prompt(profile: ProfileConfig, seed: int) -> BenchPrompt:
    """Return a prompt; the R1 profile's has 3,006 tokens, 2,880 of them visual."""
    tokens, cameras = profile.tokens, profile.cameras
    rows, cols = profile.patch_grid
    merge = profile.vision.spatial_merge_size
    images = len(cameras.names) * cameras.frames
    image: list[Segment] = [1, (rows // merge, cols // merge), 1]
    layout: list[Segment] = [TEXT_BEFORE, *image * images, TEXT_BEHIND]
    positions, delta = segment_positions(layout)
    pad = [tokens.vision_start, *[tokens.image_pad] * profile.tokens_per_image,
           tokens.vision_end]
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(min(profile.text.vocab_size, tokens.forbidden_start),
                          (TEXT_BEFORE + TEXT_BEHIND,), generator=generator)
    words[words == tokens.image_pad] = tokens.pad
    ids = torch.cat((words[:TEXT_BEFORE], torch.tensor(pad * images), words[TEXT_BEFORE:]))
    return BenchPrompt(ids, torch.from_numpy(positions), delta)


@dataclass(frozen=True)
class Schedule:
    """How each frame is decoded: tokens of its text, and tokens committed by each iteration."""

    name: str
    tokens: tuple[int, ...]
    committed: tuple[tuple[int, ...], ...]

    @property
    def accepted_length(self) -> float:
        """Return the pooled L, bonus token included."""
        return sum(map(sum, self.committed)) / max(sum(map(len, self.committed)), 1)


def texts(frames: int) -> list[int]:
    """Return the lengths of the frames' texts, 17 or 18 tokens, 17.4 on average."""
    return [int(MEAN_TOKENS * (i + 1)) - int(MEAN_TOKENS * i) for i in range(frames)]


def fixed_schedule(frames: int, length: float, block: int) -> Schedule:
    """
    Return a schedule whose pooled L is `length`, as far as whole iterations allow.

    The first token of a text comes from the prefill; the others are spread evenly over a number
    of iterations, which differs by one between frames so that the mean is met.
    """
    lengths, committed, spent, said = texts(frames), [], 0, 0
    for tokens in lengths:
        said += tokens - 1
        rounds = max(round(said / length) - spent, -(-(tokens - 1) // block), 1)
        spent += rounds
        even, more = divmod(tokens - 1, rounds)
        committed.append(tuple(even + (index < more) for index in range(rounds)))
    return Schedule(f'L={length:g}', tuple(lengths), tuple(committed))


def traced_schedule(path: Path, frames: int) -> Schedule:
    """
    Return what was measured with a trained draft, repeated to the number of frames.

    path: JSON {"name": ..., "frames": [{"tokens": n, "committed": [...]}, ...]}. Raises
    EngineError for anything else.
    """
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
        fits = [frame for frame in found['frames'] if frame['tokens'] <= LONGEST]
        kept = [fits[index % len(fits)] for index in range(frames)]
        return Schedule(str(found['name']), tuple(int(frame['tokens']) for frame in kept),
                        tuple(tuple(map(int, frame['committed'])) for frame in kept))
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise EngineError(f'{path}: not a trace of accepted lengths ({error!r}); write it with '
                          'python -m rspec_planner.evaluate.acceptance_trace') from None


def matches(committed: Sequence[int], block: int, rows: int) -> Tensor:
    """
    Return how many proposals of each iteration are right, (rows,) int64.

    Of n committed tokens the last is the bonus. In the last iteration all are proposals and the
    text's end cuts the bonus off, as where `<|traj_future_start|>` is proposed behind
    `<|cot_end|>`.
    """
    right = [count - 1 for count in committed]
    if right:
        right[-1] = min(right[-1] + 1, block - 1)
    return torch.tensor((right + [0] * rows)[:rows])
