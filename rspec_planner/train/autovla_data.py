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
Clips of the embedded world as AutoVLA reads and answers them.

Three cameras, four frames 0.5 s apart; the answer is the reasoning between marks, the actions
that follow the expert's drive best, and the stop token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
import multiprocessing
from typing import Any

import numpy as np
from numpy.typing import NDArray
import torch
from torch import Tensor
from tqdm import tqdm

from rspec_planner.model.autovla_config import AutoVlaConfig
from rspec_planner.model.codebook import ActionCodebook
from rspec_planner.planner.action_tokenizer import action_name, ActionTokenizer
from rspec_planner.planner.autovla_prompt import build_prompt, DEFAULT_WORDING, VehicleState
from rspec_planner.world.clip import Clip, ClipSpec

#: cameras of the world in the order of the profile's videos
CAMERAS = ('front_wide', 'cross_left', 'cross_right')
DT = 0.1
IGNORED = -100
TENSORS = ('pairs', 'ids', 'labels', 'positions', 'prompts', 'deltas')


@dataclass(frozen=True)
class Labelled:
    """One clip: frame pairs (N, 2, H, W, 3) uint8, and the clip without its pixels."""

    pairs: NDArray[np.uint8]
    clip: Clip


@lru_cache(maxsize=1)
def _renderer(width: int, height: int) -> Any:
    import cv2

    from rspec_planner.world.renderer import Renderer
    from rspec_planner.world.rig import Rig
    cv2.setNumThreads(1)
    return Renderer(Rig(width, height))


def render(spec: ClipSpec, cfg: AutoVlaConfig) -> tuple[Labelled, ...]:
    """Return both twins of a pair with their videos; the last frame is that of t0."""
    from dataclasses import replace

    from rspec_planner.world.generate import CAMERAS as DRAWN
    from rspec_planner.world.generate import generate_pair, HISTORY
    video = cfg.video
    step = round(video.interval_s / DT)
    frames = [HISTORY - 1 - step * k for k in reversed(range(video.frames))]
    order = [DRAWN.index(name) for name in CAMERAS[:len(video.names)]]
    found = []
    for clip in generate_pair(spec, _renderer(video.width, video.height), frames):
        assert clip.images is not None
        pairs = clip.images[order].reshape(cfg.num_images, cfg.vision.temporal_patch_size,
                                           *clip.images.shape[2:])
        bare = replace(clip, images=None, agents=np.zeros((80, 0, 7), np.float32),
                       paints_polygons=[])
        found.append(Labelled(pairs, bare))
    return tuple(found)


def render_all(specs: Iterable[ClipSpec], cfg: AutoVlaConfig, workers: int
               ) -> Iterator[Labelled]:
    """Yield the clips of the pairs that specs name, in order; workers: 0 renders here."""
    pairs = list({spec.pair_id: spec for spec in specs}.values())
    with tqdm(total=len(pairs), desc='rendering pairs', disable=None, leave=False) as bar:
        if not workers:
            for spec in pairs:
                yield from render(spec, cfg)
                bar.update()
            return
        context = multiprocessing.get_context('spawn')
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            for found in pool.map(partial(render, cfg=cfg), pairs, chunksize=8):
                yield from found
                bar.update()


def state_of(clip: Clip) -> VehicleState:
    """Return what the prompt says of a clip: speed, its last change, and the command."""
    moved = np.linalg.norm(np.diff(clip.history[-3:, :2], axis=0), axis=-1) / DT
    return VehicleState(float(clip.speed), float((moved[1] - moved[0]) / DT),
                        clip.navigation_text or 'go straight')


def ends_of(clip: Clip, cfg: AutoVlaConfig) -> NDArray[np.float64]:
    """Return the expert's poses (n, 3) at the end of each action."""
    step = round(cfg.action_s / DT)
    return clip.future[step - 1::step][:cfg.horizon_actions, [0, 1, 3]].astype(np.float64)


def answer_ids(clip: Clip, cfg: AutoVlaConfig, tokenizer: ActionTokenizer,
               codebook: ActionCodebook) -> list[int]:
    """Return the answer that a clip teaches, with the stop token."""
    actions = ''.join(map(action_name, codebook.actions(ends_of(clip, cfg)).tolist()))
    text = f'<think>\n{clip.reasoning}\n</think>\n<answer>\n{actions}\n</answer>'
    return [*tokenizer.encode(text), cfg.tokens.im_end]


@dataclass(frozen=True)
class Examples:
    """N clips, right-padded to L columns, on one device."""

    clips: tuple[Clip, ...]
    pairs: Tensor  # (N, P, 2, H, W, 3) uint8
    ids: Tensor  # (N, L) int64, prompt, answer, pad
    labels: Tensor  # (N, L) int64, the answer in the columns of its ids, else IGNORED
    positions: Tensor  # (N, 3, L) int64
    prompts: Tensor  # (N,) int64 prompt lengths
    deltas: Tensor  # (N,) int64 rope_delta

    def __len__(self) -> int:
        """Return N."""
        return len(self.clips)

    def first(self, count: int) -> Examples:
        """Return the first clips."""
        tensors = {name: getattr(self, name)[:count] for name in TENSORS}
        return Examples(self.clips[:count], **tensors)

    def joined(self, other: Examples) -> Examples:
        """Return these clips and others behind them, padded to the longer columns."""
        columns = max(self.ids.shape[1], other.ids.shape[1])
        tensors = {name: torch.cat([part.widened(columns, name) for part in (self, other)])
                   for name in TENSORS}
        return Examples((*self.clips, *other.clips), **tensors)

    def widened(self, columns: int, name: str) -> Tensor:
        """Return a tensor with more columns; their positions go on as those before."""
        tensor: Tensor = getattr(self, name)
        more = columns - self.ids.shape[1]
        if name not in ('ids', 'labels', 'positions') or not more:
            return tensor
        if name == 'positions':
            behind = torch.arange(1, more + 1, device=tensor.device)
            return torch.cat((tensor, tensor[..., -1:] + behind), dim=-1)
        fill = tensor.new_full((len(tensor), more), IGNORED if name == 'labels' else 0)
        return torch.cat((tensor, fill), dim=-1)

    @staticmethod
    def of(labelled: Iterable[Labelled], cfg: AutoVlaConfig, tokenizer: ActionTokenizer,
           codebook: ActionCodebook, device: torch.device, room: int = 0) -> Examples:
        """Lay clips out on a device; room: least columns behind the longest prompt."""
        kept = list(labelled)
        prompts = [build_prompt(cfg, tokenizer, DEFAULT_WORDING, state_of(item.clip))
                   for item in kept]
        answers = [answer_ids(item.clip, cfg, tokenizer, codebook) for item in kept]
        room = max(room, max(map(len, answers)))
        columns = max(prompt.length for prompt in prompts) + room
        ids = np.full((len(kept), columns), cfg.tokens.pad)
        labels = np.full((len(kept), columns), IGNORED)
        positions = np.zeros((len(kept), 3, columns), dtype=np.int64)
        for row, (prompt, answer) in enumerate(zip(prompts, answers)):
            start, end = prompt.length, prompt.length + len(answer)
            ids[row, :start], ids[row, start:end] = prompt.token_ids, answer
            labels[row, start:end] = answer
            positions[row, :, :start] = prompt.positions
            positions[row, :, start:] = np.arange(start, columns) + prompt.rope_delta
        pairs = torch.from_numpy(np.stack([item.pairs for item in kept]))

        def put(array: Any) -> Tensor:
            return torch.as_tensor(array, dtype=torch.int64).to(device)

        return Examples(tuple(item.clip for item in kept), pairs.to(device), put(ids),
                        put(labels), put(positions), put([p.length for p in prompts]),
                        put([p.rope_delta for p in prompts]))
