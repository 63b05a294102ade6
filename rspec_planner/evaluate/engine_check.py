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
`rspec engine check`: an export folder against PyTorch, stage by stage and as a whole.

Each graph runs on ONNX Runtime beside its PyTorch stage, see `engine_numerics`. Then two
planners see the same clips, one over the graphs and one over PyTorch: they must say the same
words and drive the same path. The result is written beside the graphs and into the manifests of
the engines that were built from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rspec_planner.engine.engine_manifest import list_manifests, ONNX_FOLDER
from rspec_planner.engine.onnx_executor import OnnxExecutor
from rspec_planner.engine.onnx_rules import check_graph
from rspec_planner.engine.stage_buffers import Maker
from rspec_planner.engine.stages import read_stages, StageSet
from rspec_planner.engine.tensorrt_set import CHECKS_NAME, record_numerics
from rspec_planner.errors import EngineError
from rspec_planner.evaluate.clips import render_clips
from rspec_planner.evaluate.engine_numerics import (
    Case,
    check_stages,
    Errors,
    random_case,
    real_case,
    TOLERANCES,
)
from rspec_planner.planner.checkpoints import open_tokenizer
from rspec_planner.planner.engine_stages import graph_stages
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.pipeline import Planner
from rspec_planner.planner.staging import Source
from rspec_planner.planner.tokenizer import TextTokenizer
from rspec_planner.world.generate import clip_observation
from rspec_planner.world.splits import split_specs

SPLIT = 'val'
#: precision -> largest distance of two waypoints that counts as the same path, metres. In half
#: precision the two sides round at different places, and every flow step carries that on.
PATH_TOLERANCES_M = {'fp32': 1e-3, 'fp16': 0.05, 'bf16': 0.5, 'fp8': 0.5, 'int8': 0.5}
#: progress of a part: its name, then done and total
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Amount:
    """How much is compared."""

    random: int = 3  # frames of random inputs per stage
    frames: int = 2  # frames of the world per stage
    clips: int = 50  # clips that both planners plan


def check_folder(folder: Path, source: Source, checkpoint: Path | None, amount: Amount,
                 progress: Progress = lambda label, done, total: None) -> dict[str, Any]:
    """
    Check an export folder against the networks that it was exported for; return the report.

    checkpoint: folder of the target, with its tokenizer; without one (random weights) only
    random frames are compared. EngineError when the folder is of other weights or breaks a rule
    of `onnx_rules`; deviations are in the report, 'ok' false.
    """
    stages = read_stages(folder)
    if dict(stages.checkpoints) != source.checkpoints:
        raise EngineError(f'{folder} was exported for weights {_short(stages.checkpoints)}, '
                          f'given are {_short(source.checkpoints)}: export it again')
    if folder.name == ONNX_FOLDER:
        list_manifests(folder.parent)  # one that cannot take the result is told before the work
    for stage in stages.stages:
        check_graph(folder / stage.file, stage, stages.precision)
    if checkpoint is None:
        amount = replace(amount, frames=0, clips=0)
    tokenizer = None if checkpoint is None else open_tokenizer(checkpoint, source.target.cfg)
    errors = _stage_errors(folder, stages, source, tokenizer, amount, progress)
    loop = check_loop(stages, lambda stage, bound: OnnxExecutor(stage, folder, bound), source,
                      tokenizer, amount.clips, progress) if amount.clips and tokenizer else None
    rows = list(stage_rows(stages, errors))
    report = {'profile': stages.profile, 'precision': stages.precision, 'folder': str(folder),
              'random_frames': amount.random, 'world_frames': amount.frames, 'engines': rows,
              'loop': loop, 'ok': all(row['checked'] for row in rows)
              and (loop is None or loop['ok'])}
    (folder / CHECKS_NAME).write_text(json.dumps(report, indent=1) + '\n', encoding='utf-8')
    recorded = record_numerics(folder.parent) if folder.name == ONNX_FOLDER else []
    return {**report, 'manifests': recorded}


def _short(digests: Mapping[str, str]) -> str:
    return ', '.join(f'{name} {digest[:12] or "none"}' for name, digest in digests.items())


def stage_rows(stages: StageSet, errors: Errors) -> Iterator[dict[str, Any]]:
    """Yield the result of every stage."""
    tolerance = TOLERANCES[stages.precision]
    for stage in stages.stages:
        error, output = errors.worst.get(stage.name, (float('inf'), 'nothing compared'))
        yield {'stage': stage.name, 'precision': stages.precision, 'flavour': 'onnx', 'sm': [],
               'file': stage.file, 'bytes': stage.bytes, 'sha256': stage.sha256, 'error': error,
               'worst_output': output, 'tolerance': tolerance, 'checked': error <= tolerance}


def world_observations(source: Source, clips: int) -> Iterator[Observation]:
    """Yield the observations of held-out clips."""
    cameras = source.target.cfg.cameras
    for clip in render_clips(split_specs(SPLIT, clips), cameras.width, cameras.height, workers=0):
        yield clip_observation(clip)


def _stage_errors(folder: Path, stages: StageSet, source: Source, tokenizer: TextTokenizer | None,
                  amount: Amount, progress: Progress) -> Errors:
    """Return the errors of all stages over random and real frames."""
    total, done = amount.random + amount.frames, 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress('stages', done, total)

    return check_stages(stages, folder, source.target, source.draft,
                        check_cases(stages, source, tokenizer, amount), advance)


def check_cases(stages: StageSet, source: Source, tokenizer: TextTokenizer | None,
                amount: Amount) -> Iterator[Case]:
    """Yield random frames, then frames of the world."""
    cfg = source.target.cfg
    for seed in range(amount.random):
        yield random_case(cfg, stages, seed)
    if tokenizer is None:
        return
    guess = tuple(tokenizer.encode('steer left around the parked van because it blocks the lane.'))
    observed = world_observations(source, amount.frames) if amount.frames else iter(())
    for index, observation in enumerate(observed):
        # every second frame verifies a guess in its prefill
        yield real_case(cfg, stages, tokenizer, observation, guess if index % 2 else (), index)


def check_loop(stages: StageSet, make: Maker, source: Source, tokenizer: TextTokenizer, clips: int,
               progress: Progress = lambda label, done, total: None) -> dict[str, Any]:
    """
    Return how often two planners, over the graphs and over PyTorch, differ on clips.

    make: loads the executor of one graph.
    """
    def planner(**more: Any) -> Planner:
        return Planner(source.target, tokenizer, draft=source.draft, use_vision_cache=False,
                       caution=False, num_samples=stages.shapes.samples, **more)

    plain = planner()
    graphs = planner(make_stages=graph_stages(stages, make))
    tolerance = PATH_TOLERANCES_M[stages.precision]
    tokens = committed = paths = 0
    worst = 0.0
    for index, observation in enumerate(world_observations(source, clips), start=1):
        with torch.inference_mode():
            one, other = plain.plan(observation), graphs.plan(observation)
        said = one.reasoning.token_ids == other.reasoning.token_ids
        tokens += not said
        committed += one.reasoning.stats.committed != other.reasoning.stats.committed
        if said:  # another text drives another path
            apart = float(np.linalg.norm(one.poses[:, :2] - other.poses[:, :2], axis=-1).max())
            paths += apart > tolerance
            worst = max(worst, apart)
        progress('clips', index, clips)
    return {'clips': clips, 'token_mismatches': tokens, 'iteration_mismatches': committed,
            'trajectory_mismatches': paths, 'largest_deviation_m': worst,
            'tolerance_m': tolerance, 'ok': tokens == 0 and paths == 0}
