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
What an export folder holds: `<stage>.onnx` files and stages.json, which describes them.

stages.json is the contract between export, check, build and execution: every tensor a stage
reads or writes, with what it is for. Weights are inputs, so a folder is small and holds no
weights; each weight input names the tensor of the checkpoint that has to be bound to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
import hashlib
import json
from pathlib import Path
from typing import Any

from rspec_planner.errors import EngineError
from rspec_planner.model.bounded import read_bounded

STAGES_NAME = 'stages.json'
SCHEMA = 1
#: in the order in which a frame runs them
STAGE_NAMES = ('vision', 'prefill', 'draft', 'verify', 'flow_step')
#: precision of a folder -> dtype name of caches, activations and all weights but those of eight
#: bits, see `stage_narrow`
PRECISIONS = {'fp32': 'float32', 'fp16': 'float16', 'bf16': 'bfloat16', 'fp8': 'bfloat16',
              'int8': 'bfloat16'}
#: precision -> dtype name of its weights of eight bits
NARROW = {'fp8': 'float8_e4m3fn', 'int8': 'int8'}
#: every dtype a port may have, as PyTorch calls it
DTYPES = ('float32', 'float16', 'bfloat16', 'int64', 'uint8', 'bool', *NARROW.values())
REMEDY = 'export again: rspec engine export'


@dataclass(frozen=True)
class Weight:
    """
    Which stored tensor a weight input takes, as it is stored but in the port's dtype.

    A weight of eight bits takes two inputs, its codes and the scales of its rows.
    """

    checkpoint: str  # 'target' or 'draft'
    tensor: str  # its name in that checkpoint folder
    part: str = ''  # 'scale' for the scales of `stage_narrow`


@dataclass(frozen=True)
class Port:
    """
    One input or output of a graph, of fixed shape.

    An input is a weight (`weight` is set), a state that an output updates in place (some
    output's `alias` names it), or plain data. None of them is read by the host.
    """

    name: str
    dtype: str  # see DTYPES
    shape: tuple[int, ...]
    weight: Weight | None = None
    alias: str = ''  # outputs: the input whose buffer must be bound here as well


@dataclass(frozen=True)
class StageFile:
    """One exported graph."""

    name: str  # of STAGE_NAMES
    file: str  # file name within the folder
    sha256: str
    bytes: int
    opset: int
    inputs: tuple[Port, ...]  # in graph order: data and state, then weights
    outputs: tuple[Port, ...]
    operators: Mapping[str, int] = field(default_factory=dict)  # op type -> count

    @property
    def weights(self) -> tuple[Port, ...]:
        """Return the inputs that take stored tensors."""
        return tuple(port for port in self.inputs if port.weight is not None)

    @property
    def aliases(self) -> dict[str, str]:
        """Return output -> input of what is updated in place."""
        return {port.name: port.alias for port in self.outputs if port.alias}

    @property
    def data(self) -> tuple[Port, ...]:
        """Return the inputs that are neither weights nor updated in place."""
        states = set(self.aliases.values())
        return tuple(port for port in self.inputs
                     if port.weight is None and port.name not in states)


@dataclass(frozen=True)
class StageShapes:
    """The sizes that all stages of one folder share."""

    capacity: int  # C, rows of the KV cache, the tapped states and the flat cos, sin tables
    prompt: int  # rows of a prefill, prompt and guess together
    guess: int  # guessed tokens that a prefill can verify
    block: int  # B, rows of a verify; 1 without a draft
    images: int  # images per call of the vision stage
    samples: int  # trajectories per flow step
    taps: tuple[int, ...]  # target layers whose output a draft reads
    tail: int  # last prompt rows that a prefill carries through the last layer, 0 = all


@dataclass(frozen=True)
class StageSet:
    """The content of stages.json."""

    profile: str  # name of the profile
    config: Mapping[str, Any]  # ProfileConfig.to_dict()
    draft: Mapping[str, Any] | None  # DraftConfig.to_dict(), None without a draft
    precision: str  # of PRECISIONS
    shapes: StageShapes
    checkpoints: Mapping[str, str]  # 'target', 'draft' -> digest of its weights, '' if none
    toolchain: Mapping[str, str]  # package -> version
    stages: tuple[StageFile, ...]
    schema: int = SCHEMA

    def stage(self, name: str) -> StageFile:
        """Return one stage; EngineError when the folder lacks it."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise EngineError(f'{STAGES_NAME} has no stage {name}, only '
                          f'{", ".join(stage.name for stage in self.stages)}: {REMEDY}')


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    with path.open('rb') as stream:
        return hashlib.file_digest(stream, 'sha256').hexdigest()


def write_stages(stages: StageSet, folder: str | Path) -> Path:
    """Write stages.json, last of all files and in one step; return its path."""
    path = Path(folder) / STAGES_NAME
    part = path.with_suffix('.part')
    part.write_text(json.dumps(asdict(stages), indent=1) + '\n', encoding='utf-8')
    part.replace(path)
    return path


def _port(data: Mapping[str, Any]) -> Port:
    weight = data['weight']
    return Port(data['name'], data['dtype'], tuple(data['shape']),
                None if weight is None else Weight(**weight), data['alias'])


def _ports(data: Sequence[Mapping[str, Any]]) -> tuple[Port, ...]:
    return tuple(_port(entry) for entry in data)


def _parse(data: Mapping[str, Any]) -> StageSet:
    shapes = StageShapes(**{**data['shapes'], 'taps': tuple(data['shapes']['taps'])})
    stages = tuple(StageFile(**{**entry, 'inputs': _ports(entry['inputs']),
                                'outputs': _ports(entry['outputs'])})
                   for entry in data['stages'])
    return StageSet(**{**data, 'shapes': shapes, 'stages': stages})


def read_stages(folder: str | Path, verify: bool = True) -> StageSet:
    """
    Return the content of stages.json, every file checked against its sha256 unless told not to.

    EngineError names the file at fault: missing, unreadable, of another schema, or changed.
    """
    path = Path(folder) / STAGES_NAME
    try:
        data = json.loads(read_bounded(path))
        if data['schema'] != SCHEMA:
            raise EngineError(f'{path} has schema {data["schema"]}, this version reads {SCHEMA}: '
                              f'{REMEDY}')
        stages = _parse(data)
    except OSError as error:
        raise EngineError(f'{path} cannot be read ({error.strerror}): {REMEDY}') from error
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f'{path} is not an export ({type(error).__name__}: {error}): '
                          f'{REMEDY}') from error
    for stage in stages.stages if verify else ():
        _check_file(Path(folder) / stage.file, stage.sha256)
    return stages


def _check_file(path: Path, digest: str) -> None:
    try:
        found = file_sha256(path)
    except OSError as error:
        raise EngineError(f'{path} cannot be read ({error.strerror}): {REMEDY}') from error
    if found != digest:
        raise EngineError(f'{path} has sha256 {found[:12]}..., {STAGES_NAME} says '
                          f'{digest[:12]}...: {REMEDY}')
