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
Compare exported graphs with the PyTorch stages, one stage at a time, on the same inputs.

Both sides have buffers of their own. Before every stage the graph's side gets the inputs and
the state of PyTorch's side, so that an error belongs to the stage that made it. Inputs are real
frames of the world, and random ones that reach what no frame does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rspec_planner.decode.accept import accept
from rspec_planner.engine.draft_executor import draft_executor
from rspec_planner.engine.executor import Executor
from rspec_planner.engine.onnx_executor import OnnxExecutor
from rspec_planner.engine.stage_buffers import make_stage, shared_buffers, SharedBuffers
from rspec_planner.engine.stages import StageSet
from rspec_planner.engine.torch_executor import (
    flow_step_executor,
    prefill_executor,
    verify_executor,
    vision_executor,
)
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.draft import Draft
from rspec_planner.model.target import Target
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.prompt import build_prompt
from rspec_planner.planner.tokenizer import TextTokenizer

#: precision -> largest error of a stage that still passes, see `Errors`. Measured on the tiny
#: profile: 1.2e-6, 2.1e-3 and 1.8e-2; the rest is room for other weights and machines.
TOLERANCES = {'fp32': 1e-4, 'fp16': 2e-2, 'bf16': 1e-1, 'fp8': 1e-1, 'int8': 1e-1}


@dataclass(frozen=True)
class Case:
    """What one frame puts into the stages."""

    images: Tensor  # (N, H, W, 3) uint8, all images in prompt order
    ids: Tensor  # (S,) int64, prompt and guess
    positions: Tensor  # (3, S) int64
    guessed: int
    rope_delta: int
    noisy: Tensor  # (samples, W, 2) fp32
    times: tuple[float, ...]  # of the flow steps, the first one 0


class Errors:
    """
    The largest error of every stage.

    The error of an output is its largest absolute deviation over the largest absolute value of
    the reference, infinite where one side is not finite and the other is.
    """

    def __init__(self) -> None:
        self.worst: dict[str, tuple[float, str]] = {}  # stage -> error, output

    def take(self, stage: str, output: str, found: Tensor, wanted: Tensor) -> None:
        """Compare one output."""
        finite = wanted.isfinite()
        error = float('inf')
        if torch.equal(finite, found.isfinite()):
            one, other = found[finite].double(), wanted[finite].double()
            scale = float(other.abs().max()) if other.numel() else 0.0
            apart = float((one - other).abs().max()) if other.numel() else 0.0
            error = apart / scale if scale else apart
        self.worst[stage] = max(self.worst.get(stage, (0.0, output)), (error, output))

    def exact(self, stage: str, output: str, found: Tensor, wanted: Tensor) -> None:
        """Compare whole numbers: any difference is an infinite error."""
        error = 0.0 if torch.equal(found.cpu(), wanted.cpu()) else float('inf')
        self.worst[stage] = max(self.worst.get(stage, (0.0, output)), (error, output))


@dataclass(frozen=True)
class Side:
    """The stages of one implementation and the buffers that they share."""

    stages: Mapping[str, Executor]
    shared: SharedBuffers

    def states(self) -> list[Tensor]:
        """Return what outlives a call."""
        taps = [] if self.shared.taps is None else [self.shared.taps.rows]
        return [self.shared.cache.keys, self.shared.cache.values, self.shared.tokens,
                self.shared.positions, *taps]


def torch_side(stages: StageSet, target: Target, draft: Draft | None) -> Side:
    """Return the PyTorch stages, of the sizes that the graphs have."""
    shapes, shared = stages.shapes, shared_buffers(stages, target, draft)
    prefill = prefill_executor(target, shared.cache, shapes.prompt, shared.taps, shapes.guess,
                               shapes.tail)
    made: dict[str, Executor] = {
        'vision': vision_executor(target, shapes.images), 'prefill': prefill,
        'verify': verify_executor(target, shared.cache, shapes.block, shared.taps),
        'flow_step': flow_step_executor(target, shared.cache, shapes.samples)}
    if draft is not None and shared.taps is not None:
        made['draft'] = draft_executor(draft, target, shared.tokens, shared.taps,
                                       prefill.inputs['positions'])
    return Side(made, shared)


def graph_side(stages: StageSet, folder: Path, target: Target, draft: Draft | None) -> Side:
    """Return the exported graphs on ONNX Runtime."""
    shared = shared_buffers(stages, target, draft)
    return Side({stage.name: make_stage(
        stage, stages, shared, lambda file, bound: OnnxExecutor(file, folder, bound))
        for stage in stages.stages}, shared)


def check_stages(stages: StageSet, folder: Path, target: Target, draft: Draft | None,
                 cases: Iterable[Case], progress: Callable[[], object] = lambda: None) -> Errors:
    """Run every stage of an export folder on every case beside PyTorch; return the errors."""
    return compare_sides(torch_side(stages, target, draft),
                         graph_side(stages, folder, target, draft), stages, target.cfg, cases,
                         progress)


def compare_sides(torch_: Side, graph: Side, stages: StageSet, cfg: ProfileConfig,
                  cases: Iterable[Case], progress: Callable[[], object] = lambda: None
                  ) -> Errors:
    """Run every case through both sides; return the errors of the graphs."""
    checker = _Checker(torch_, graph, stages, cfg)
    for case in cases:
        checker.check(case)
        progress()
    return checker.errors


class _Checker:
    """Two sides and what they differ by."""

    def __init__(self, torch_: Side, graph: Side, stages: StageSet, cfg: ProfileConfig) -> None:
        self._torch, self._graph, self._shapes, self._cfg = torch_, graph, stages.shapes, cfg
        self._names = {stage.name for stage in stages.stages}
        self.errors = Errors()

    @torch.inference_mode()
    def check(self, case: Case) -> None:
        """Take one case through all stages."""
        self._vision(case)
        length = self._prefill(case)
        block = self._draft(case, length)
        self._verify(case, length, block)
        self._flow(case, length + 1)

    def _run(self, stage: str, values: Mapping[str, Tensor | int | float]
             ) -> Iterator[tuple[Mapping[str, Tensor], Side]]:
        """Run a stage on both sides from the same inputs and state; yield the outputs."""
        for mine, theirs in zip(self._graph.states(), self._torch.states()):
            mine.copy_(theirs)
        for side in (self._torch, self._graph):
            if stage not in side.stages:
                continue
            executor = side.stages[stage]
            for name, value in values.items():
                if isinstance(value, Tensor):
                    buffer = executor.inputs[name]
                    buffer[tuple(slice(0, size) for size in value.shape)] = value
                else:
                    executor.inputs[name].fill_(value)
            executor.enqueue()
            yield executor.outputs, side

    def _compare(self, stage: str, outputs: Mapping[str, slice],
                 values: Mapping[str, Tensor | int | float], rows: slice | None = None
                 ) -> Mapping[str, Tensor]:
        """Compare outputs (their first dimension cut) and cache rows; return PyTorch's."""
        (wanted, theirs), *found = self._run(stage, values)
        for outputs_found, side in found:
            for name, part in outputs.items():
                self.errors.take(stage, name, outputs_found[name][part], wanted[name][part])
            if rows is not None:
                for name in ('keys', 'values'):
                    one, other = (getattr(each.shared.cache, name)[:, :, :, rows]
                                  for each in (side, theirs))
                    self.errors.take(stage, name, one, other)
        return wanted

    def _compare_taps(self, stage: str, end: int, first: int, last_first: int) -> None:
        """Compare tapped rows first .. end - 1, of the decoder's last layer from last_first."""
        if self._graph.shared.taps is None or self._torch.shared.taps is None:
            return
        last = self._cfg.text.num_layers - 1
        for layer, one, other in zip(self._shapes.taps, self._graph.shared.taps.rows,
                                     self._torch.shared.taps.rows):
            rows = slice(last_first if layer == last else first, end)
            self.errors.take(stage, f'tap of layer {layer}', one[:, rows], other[:, rows])

    def _vision(self, case: Case) -> None:
        everything, per_call = slice(None), self._shapes.images
        prefill = self._torch.stages['prefill'].inputs
        for start in range(0, len(case.images), per_call):
            rows = slice(start, start + per_call)
            made = self._compare('vision', {'features': everything, 'deepstack': everything},
                                 {'images': case.images[rows]})
            prefill['features'][rows] = made['features']
            prefill['deepstack'][:, rows] = made['deepstack']

    def _prefill(self, case: Case) -> int:
        """Return the length of the prompt without its guess."""
        given = self._torch.stages['prefill'].inputs
        rows, end = slice(0, case.guessed + 1), len(case.ids)
        self._torch.shared.positions[:, :end] = case.positions
        self._compare('prefill', {'logits': rows}, {
            'ids': case.ids, 'positions': case.positions, 'length': end,
            'guess_length': case.guessed, 'features': given['features'],
            'deepstack': given['deepstack']}, slice(0, end))
        tail = self._shapes.tail
        self._compare_taps('prefill', end, 0, max(0, end - tail - case.guessed) if tail else 0)
        return end - case.guessed

    def _draft(self, case: Case, length: int) -> list[int]:
        """Return the anchor and what the draft proposes; B forbidden-free ids without one."""
        best = int(self._torch.stages['prefill'].outputs['best'][0])
        tokens = self._torch.shared.tokens
        tokens[:length] = case.ids[:length]
        tokens[length] = best
        if 'draft' not in self._torch.stages:
            return [best]
        made = self._compare('draft', {'logits': slice(None)}, {
            'start': length, 'since': 0, 'length': length, 'rope_delta': case.rope_delta})
        return [best, *made['proposals'].tolist()]

    def _verify(self, case: Case, length: int, block: list[int]) -> None:
        end = length + len(block)
        self._compare('verify', {'logits': slice(None)}, {
            'ids': torch.tensor(block), 'start': length, 'rope_delta': case.rope_delta},
            slice(length, end))
        self._compare_taps('verify', end, length, length)
        found = self._graph.stages['verify'].outputs if 'verify' in self._names else {}
        for name, value in self._accepted(block, found).items():
            self.errors.exact('verify', name, found[name], torch.tensor([value]))

    def _accepted(self, block: list[int], found: Mapping[str, Tensor]) -> dict[str, int]:
        """Return what the host's rule says of the graph's own choices."""
        if not found:
            return {}
        taken = accept(block, found['best'].tolist(), self._cfg.tokens.stop_ids, len(block))
        return {'committed': len(taken.committed), 'matched': taken.matched,
                'anchor': taken.committed[-1]}

    def _flow(self, case: Case, length: int) -> None:
        rows = slice(length, length + self._cfg.action_space.n_waypoints)
        for t in case.times:
            self._compare('flow_step', {'velocity': slice(None)}, {
                'noisy': case.noisy, 't': t, 'length': length, 'rope_delta': case.rope_delta},
                rows if self._shapes.samples == 1 else None)


def random_case(cfg: ProfileConfig, stages: StageSet, seed: int) -> Case:
    """Return a frame of random pixels, words and positions, its length and guess drawn too."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    cameras, shapes, tokens = cfg.cameras, stages.shapes, cfg.tokens
    images = len(cameras.names) * cameras.frames
    visual = images * cfg.tokens_per_image
    room = shapes.prompt - shapes.guess - visual
    before, after = (1 + int(integers(0, max(1, room // 2), 1)) for _ in range(2))
    guessed = int(integers(0, shapes.guess + 1, 1))
    words = [integers(tokens.im_end + 1, tokens.forbidden_start, count)
             for count in (before, after + guessed)]
    words = [torch.where(part == tokens.image_pad, tokens.pad, part) for part in words]
    ids = torch.cat((words[0], torch.full((visual,), tokens.image_pad), words[1]))
    size = (images, cameras.height, cameras.width, 3)
    return Case(integers(0, 256, *size).to(torch.uint8), ids,
                integers(0, 200, 3, len(ids)), guessed, -int(integers(0, visual // 2, 1)),
                *_actions(cfg, shapes.samples, generator))


def real_case(cfg: ProfileConfig, stages: StageSet, tokenizer: TextTokenizer,
              observation: Observation, guess: tuple[int, ...], seed: int) -> Case:
    """Return the frame of an observation; guess: tokens that ride behind the prompt."""
    prompt = build_prompt(cfg, tokenizer, observation.ego_poses, observation.navigation_text)
    guess = guess[:stages.shapes.guess]
    behind = torch.arange(prompt.length, prompt.length + len(guess)) + prompt.rope_delta
    positions = torch.cat((torch.from_numpy(prompt.positions), behind.expand(3, -1)), dim=1)
    ids = torch.cat((torch.from_numpy(prompt.token_ids), torch.tensor(guess, dtype=torch.int64)))
    images = torch.from_numpy(observation.images).flatten(0, 1)
    return Case(images, ids, positions, len(guess), prompt.rope_delta,
                *_actions(cfg, stages.shapes.samples, torch.Generator().manual_seed(seed)))


def _actions(cfg: ProfileConfig, samples: int,
             generator: torch.Generator) -> tuple[Tensor, tuple[float, ...]]:
    """Return noisy actions and the times of three flow steps."""
    noisy = torch.randn((samples, cfg.action_space.n_waypoints, 2), generator=generator)
    return noisy, (0.0, 1 / cfg.flow.num_steps, float(torch.rand(1, generator=generator)))
