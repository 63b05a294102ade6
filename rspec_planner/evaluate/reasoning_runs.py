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
One prefilled frame, many reasoners: whatever is compared starts from the same state.

A `Stand` owns one target, one cache and one tap buffer. It prefills a clip once; every contender
(greedy decoding, the same through unpacked modules, the floor, each draft) then decodes from
that state through the deployed loop. Rows behind the prompt are overwritten by each, rows before
are never touched, so nobody sees what another left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import cast, Protocol

import numpy as np
import torch
from torch import Tensor

from rspec_planner.decode.reuse import place_guess
from rspec_planner.decode.sampling import Sampler
from rspec_planner.decode.stats import DecodeStats
from rspec_planner.engine.torch_executor import (
    flow_step_executor,
    prefill_executor,
    verify_executor,
    vision_executor,
)
from rspec_planner.evaluate.floor import Continuations, FloorDraft
from rspec_planner.evaluate.teacher_forcing import Spoken
from rspec_planner.model.checkpoint import load_target
from rspec_planner.model.draft import Draft
from rspec_planner.model.draft_checkpoint import load_draft
from rspec_planner.model.flow import euler_sample
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.text import KVCache
from rspec_planner.model.unicycle import UnicycleActionSpace
from rspec_planner.planner.drafts import checkpoint_folder, draft_folder
from rspec_planner.planner.history import yaw_of
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.prompt import build_prompt, max_prompt_length, Prompt
from rspec_planner.planner.reasoner import Reasoner
from rspec_planner.planner.tokenizer import load_tokenizer
from rspec_planner.world.reasoning import opener

#: names of the contenders without a learned draft
PLAIN, EAGER, FLOOR = 'ar', 'ar-eager', 'floor'  # a floor per block: `floor_name`
_BUCKET = 64


@dataclass(frozen=True)
class Frame:
    """One observation whose prompt lies in the cache."""

    observation: Observation
    prompt: Prompt

    @property
    def history(self) -> np.ndarray:
        """Return the ego history (16, 4) x, y, z, yaw, ego frame at t0."""
        poses = self.observation.ego_poses
        return np.concatenate([poses[:, :3, 3], yaw_of(poses)[:, None]], axis=1)


@dataclass(frozen=True)
class Run:
    """What one contender did with one frame."""

    ids: tuple[int, ...]  # generated, stop token included
    stats: DecodeStats
    length: int  # rows of the expert's context
    ms: float  # the whole reasoning step: decoding and closing, milliseconds
    xy: np.ndarray | None = None  # (64, 2) metres, ego frame at t0, when asked for


class Contender(Protocol):
    """Anything that reasons from a prefilled frame."""

    name: str

    def reason(self, frame: Frame) -> Run:
        """Decode until the stop token and complete the expert's context."""


class LoopContender:
    """The deployed reasoner, timed; its executors may be exchanged."""

    def __init__(self, name: str, stand: Stand, reasoner: Reasoner,
                 begin: Callable[[Frame], None] | None = None) -> None:
        """Take a reasoner over the stand's cache; begin: called untimed before every frame."""
        self.name, self._stand, self._reasoner, self._begin = name, stand, reasoner, begin

    def reason(self, frame: Frame, guess: Sequence[int] = (),
               sampler: Sampler | None = None) -> Run:
        """Decode one frame; the clock runs from the first token to the complete context."""
        if self._begin is not None:
            self._begin(frame)
        self._stand.wait()
        started = perf_counter()
        ids, stats, length = self._reasoner.reason(frame.prompt, self._stand.prefill_stage,
                                                   guess, sampler)
        self._stand.wait()
        return Run(ids, stats, length, 1e3 * (perf_counter() - started))


class Stand:
    """One target with the buffers that all contenders share."""

    def __init__(self, checkpoint: str | Path = 'tiny', device: str = 'cpu', *,
                 drafts: Sequence[str | Path | Draft] = (), guess: int = 0,
                 widest: int = 1) -> None:
        """
        Load a target and drafts: embedded names, folders, or drafts bound to this target.

        guess: rows that the prefill can verify behind a prompt; widest: of any verify that is
        no draft's own. Raises EngineError for an unusable folder.
        """
        folder = checkpoint_folder(checkpoint)
        self.folder, self.device = folder, torch.device(device)
        self.target = load_target(folder, self.device).requires_grad_(False).pack()
        self.tokenizer, self.cfg = load_tokenizer(folder), self.target.cfg
        self.budget = self.cfg.max_reasoning_tokens
        self.drafts: dict[str, Draft] = {}
        self._labels: dict[Path, str] = {}
        for chosen in drafts:
            if isinstance(chosen, Draft):
                self.drafts[chosen.cfg.name or chosen.cfg.label] = chosen
            else:
                path = draft_folder(str(chosen), folder)
                if path.resolve() in self._labels:
                    continue
                label = self._labels[path.resolve()] = free_label(path, self.drafts)
                self.drafts[label] = load_draft(path, self.target, checkpoint=folder)
        self._build(guess, widest)

    def label(self, chosen: str | Path) -> str:
        """Return what a draft that was given by name or folder is called here."""
        return self._labels[draft_folder(str(chosen), self.folder).resolve()]

    def _build(self, guess: int, widest: int) -> None:
        cfg, target, blocks = self.cfg, self.target, [d.cfg.block for d in self.drafts.values()]
        rows = (max_prompt_length(cfg, self.tokenizer) + self.budget + 1
                + max(cfg.action_space.n_waypoints, *blocks, guess, widest))
        rows += -rows % _BUCKET
        self.capacity = rows
        self.cache = KVCache(cfg.text, 1, rows, target.dtype, self.device)
        self.taps = {draft.cfg.taps: TapBuffer(draft.cfg.taps, 1, rows, cfg.text.hidden_size,
                                               target.dtype, self.device)
                     for draft in self.drafts.values()}
        self.vision = vision_executor(target, len(cfg.cameras.names))
        self.prefill_stage = prefill_executor(target, self.cache, rows, self._all_taps(), guess,
                                              tail=0)
        self._narrow = verify_executor(target, self.cache, 1)
        self.flow_step = flow_step_executor(target, self.cache, 1)
        self.space = UnicycleActionSpace(cfg.action_space)
        shape = (1, cfg.action_space.n_waypoints, 2)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.noise = noise.to(self.device) * cfg.flow.noise_scale

    def _all_taps(self) -> TapBuffer | None:
        """Return what fills the tap buffers of all drafts at once."""
        return cast('TapBuffer', _TapFan(list(self.taps.values()))) if self.taps else None

    @property
    def positions(self) -> Tensor:
        """Return the prompt's three-axis positions (3, capacity) int64."""
        return self.prefill_stage.inputs['positions']

    def wait(self) -> None:
        """Wait for the device, so that clocks measure work and not its submission."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)

    def encode(self, observation: Observation) -> None:
        """Put the features of all images into the prefill's buffers."""
        inputs = self.prefill_stage.inputs
        images = torch.from_numpy(observation.images).flatten(0, 1)
        per_call = self.vision.inputs['images'].shape[0]
        for start in range(0, len(images), per_call):
            end = min(start + per_call, len(images))
            self.vision.inputs['images'][:end - start].copy_(images[start:end])
            self.vision.enqueue()
            inputs['features'][start:end].copy_(self.vision.outputs['features'][:end - start])
            inputs['deepstack'][:, start:end].copy_(
                self.vision.outputs['deepstack'][:, :end - start])

    def place(self, observation: Observation) -> Prompt:
        """Put the prompt of an observation into the prefill's buffers, without a guess."""
        prompt = build_prompt(self.cfg, self.tokenizer, observation.ego_poses,
                              observation.navigation_text)
        inputs = self.prefill_stage.inputs
        inputs['ids'][:prompt.length] = torch.from_numpy(prompt.token_ids)
        inputs['positions'][:, :prompt.length] = torch.from_numpy(prompt.positions)
        place_guess(self.prefill_stage, prompt.length, prompt.rope_delta, ())
        return prompt

    def prefill(self, observation: Observation, *, encode: bool = True) -> Frame:
        """Read an observation into the cache; encode=False keeps the features of the last."""
        if encode:
            self.encode(observation)
        prompt = self.place(observation)
        self.prefill_stage.enqueue()
        return Frame(observation, prompt)

    def act(self, run: Run, frame: Frame) -> np.ndarray:
        """Return the trajectory (64, 2) m behind a run, from the cache as the run left it."""
        step = self.flow_step
        step.inputs['length'].fill_(run.length)
        step.inputs['rope_delta'].fill_(frame.prompt.rope_delta)

        def velocity(noisy: Tensor, t: Tensor) -> Tensor:
            step.inputs['noisy'].copy_(noisy)
            step.inputs['t'].copy_(t[:1])
            step.enqueue()
            return step.outputs['velocity']

        poses = frame.observation.ego_poses
        with torch.inference_mode():
            actions = euler_sample(velocity, self.noise, self.cfg.flow.num_steps).cpu().double()
            v0 = self.space.initial_speed(torch.from_numpy(poses[None, :, :2, 3]),
                                          torch.from_numpy(yaw_of(poses)[None])).clamp(min=0.0)
            xy, _, _ = self.space.integrate(actions, v0, floor_at_zero=True)
        path: np.ndarray = xy[0].numpy()
        return path

    def speak(self, frame: Frame, ids: Sequence[int]) -> None:
        """Write K/V and taps of a whole generated text, so that drafts can be asked about it."""
        stage = verify_executor(self.target, self.cache, len(ids), self._all_taps())
        stage.inputs['ids'].copy_(torch.tensor(ids))
        stage.inputs['start'].fill_(frame.prompt.length)
        stage.inputs['rope_delta'].fill_(frame.prompt.rope_delta)
        stage.enqueue()

    def top_two(self, frame: Frame, ids: Sequence[int], index: int) -> float:
        """Return the gap of the two best logits that decide token `index` >= 1 of a text."""
        stage = self._narrow
        stage.inputs['ids'].fill_(ids[index - 1])
        stage.inputs['start'].fill_(frame.prompt.length + index - 1)
        stage.inputs['rope_delta'].fill_(frame.prompt.rope_delta)
        stage.enqueue()
        best = stage.outputs['logits'][0].topk(2).values
        return float(best[0] - best[1])

    def spoken(self, frame: Frame, ids: Sequence[int], name: str) -> Spoken:
        """Return the text of a frame as one draft reads it, after `speak`."""
        tokens = torch.cat((torch.from_numpy(frame.prompt.token_ids), torch.tensor(ids)))
        taps = self.taps[self.drafts[name].cfg.taps].rows[:, 0, :len(tokens)]
        return Spoken(tokens.to(self.device), frame.prompt.length, taps, self.positions,
                      frame.prompt.rope_delta)

    def plain(self) -> LoopContender:
        """Return greedy decoding, one token a forward, through the packed layers."""
        return LoopContender(PLAIN, self, self._reasoner())

    def eager(self) -> LoopContender:
        """Return greedy decoding through the modules as they are written, nothing packed."""
        target = load_target(self.folder, self.device).requires_grad_(False).eval()
        return LoopContender(EAGER, self, Reasoner(target, self.cache, budget=self.budget))

    def speculative(self, name: str) -> LoopContender:
        """Return one of the loaded drafts as the planner runs it."""
        draft = self.drafts[name]
        return LoopContender(name, self, Reasoner(
            self.target, self.cache, budget=self.budget, draft=draft,
            taps=self.taps[draft.cfg.taps], positions=self.positions))

    def floor(self, table: Continuations, block: int) -> LoopContender:
        """Return the image-blind draft in the same loop."""
        reasoner = self._reasoner(block)
        draft = FloorDraft(table, reasoner.state.tokens, block)
        reasoner.draft = draft

        def begin(frame: Frame) -> None:
            draft.begin(self.tokenizer.encode(opener(frame.history)))

        return LoopContender(floor_name(block), self, reasoner, begin)

    def junk(self, block: int) -> LoopContender:
        """Return greedy decoding through the wide verify: every proposal is a forbidden id."""
        reasoner = self._reasoner(block)
        reasoner.draft = _Junk(self.cfg.tokens.forbidden_start, block)
        return LoopContender(wide_plain(block), self, reasoner)

    def _reasoner(self, block: int = 1) -> Reasoner:
        """Return a reasoner without a draft whose verify reads `block` rows."""
        reasoner = Reasoner(self.target, self.cache, budget=self.budget)
        if block > 1:
            reasoner.verify = verify_executor(self.target, self.cache, block)
        return reasoner


class _TapFan:
    """Stands for several tap buffers: a forward fills each with the layers that it keeps."""

    def __init__(self, buffers: Sequence[TapBuffer]) -> None:
        self._buffers = buffers
        self.layers = tuple(sorted({layer for taps in buffers for layer in taps.layers}))

    def write(self, parts: Sequence[Tensor], start: int | Tensor, count: int) -> None:
        """Store what one forward of `count` rows gave."""
        given = dict(zip(self.layers, parts))
        for taps in self._buffers:
            taps.write([given[layer] for layer in taps.layers], start, count)


class _Junk:
    """A draft whose proposals no target can choose."""

    def __init__(self, never: int, block: int) -> None:
        self.inputs = {name: torch.zeros(1, dtype=torch.int64)
                       for name in ('start', 'since', 'rope_delta', 'length')}
        self.outputs = {'proposals': torch.full((block - 1,), never)}

    def enqueue(self, stream: torch.cuda.Stream | None = None) -> None:
        """Leave the proposals as they are."""


def floor_name(block: int) -> str:
    """Return the name of the floor that proposes blocks of that width."""
    return f'{FLOOR}-b{block}'


def wide_plain(block: int) -> str:
    """Return the name of greedy decoding through the verify of a draft of that width."""
    return f'{PLAIN}-wide-{block}'


def draft_label(folder: Path) -> str:
    """Return what a draft is called in tables: its folder, or the one above a 'checkpoint'."""
    return folder.parent.name if folder.name == 'checkpoint' else folder.name


def free_label(folder: Path, taken: Collection[str]) -> str:
    """Return the label of a draft's folder, with as much of its path as makes it a new one."""
    label, depth = draft_label(folder), 2
    while label in taken and depth <= len(folder.parts):
        label, depth = '/'.join(folder.parts[-depth:]), depth + 1
    return label
