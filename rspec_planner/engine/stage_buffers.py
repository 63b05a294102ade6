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
What surrounds exported graphs so that they take the place of the PyTorch stages.

The graphs take weights, caches and rotary tables as inputs; the planner fills positions and
lengths. Here are the buffers that the stages share and the few device operations that turn the
one into the other, for every kind of executor that runs the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rspec_planner.engine.executor import Executor
from rspec_planner.engine.stage_narrow import narrow_inputs
from rspec_planner.engine.stages import StageFile, StageSet
from rspec_planner.model.config import ProfileConfig, TextConfig
from rspec_planner.model.draft import Draft, DraftConfig, DraftRotary
from rspec_planner.model.rope import flat_cos_sin, mrope_cos_sin
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache

#: makes the executor of one graph with these tensors bound, weights and caches among them
Maker = Callable[[StageFile, Mapping[str, Tensor]], Executor]


@dataclass(frozen=True)
class SharedBuffers:
    """What several stages read or write; every stage binds its part of it by name."""

    cache: KVCache
    taps: TapBuffer | None
    tokens: Tensor  # (C,) int64, the committed text
    positions: Tensor  # (3, S) int64, the prompt's, before the tables are made of them
    weights: Mapping[str, Tensor]  # by port name

    def named(self) -> dict[str, Tensor]:
        """Return the buffers under the names of the ports."""
        rows = {f'{kind}{i}': layer for kind, held in (('k', self.cache.keys),
                                                       ('v', self.cache.values))
                for i, layer in enumerate(held.unbind(0))}
        taps = {} if self.taps is None else {f'tap{j}': rows[None]
                                             for j, rows in enumerate(self.taps.rows.unbind(0))}
        return {**rows, **taps, 'tokens': self.tokens, **self.weights}


def shared_buffers(stages: StageSet, target: Target, draft: Draft | None,
                   tokens: Tensor | None = None) -> SharedBuffers:
    """Return buffers of the sizes that the graphs were exported for; tokens: (C,) if held."""
    shapes, text, device = stages.shapes, target.cfg.text, target.device
    taps = TapBuffer(shapes.taps, 1, shapes.capacity, text.hidden_size, target.dtype,
                     device) if shapes.taps else None
    if tokens is None:
        tokens = torch.zeros(shapes.capacity, dtype=torch.int64, device=device)
    weights = dict(target.state_dict())
    if draft is not None:
        weights.update({f'draft.{name}': value for name, value in draft.state_dict().items()})
    weights = narrow_inputs(weights, stages.precision)
    return SharedBuffers(KVCache(text, 1, shapes.capacity, target.dtype, device), taps, tokens,
                         torch.zeros((3, shapes.prompt), dtype=torch.int64, device=device),
                         weights)


def make_stage(stage: StageFile, stages: StageSet, shared: SharedBuffers,
               make: Maker) -> Executor:
    """Return a stage with the inputs and outputs of its PyTorch counterpart."""
    names = {port.name for port in stage.inputs}
    bound = {name: tensor for name, tensor in shared.named().items() if name in names}
    text = ProfileConfig.from_dict(dict(stages.config)).text
    if stage.name in ('verify', 'flow_step'):
        bound.update(_flat_tables(text, stages.shapes.capacity, shared.tokens.device))
    executor = make(stage, bound)
    if stage.name == 'verify':
        executor.inputs['limit'].fill_(stages.shapes.block)
    if stage.name == 'prefill':
        return PrefillTables(executor, text, shared.positions)
    if stage.name == 'draft':
        return DraftTables(executor, DraftConfig.from_dict(dict(stages.draft or {})),
                           shared.positions)
    return executor


def _flat_tables(text: TextConfig, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Return cos and sin (rows, d / 2) fp32 of positions 0 .. rows - 1."""
    index = torch.arange(rows, device=device)
    tables = flat_cos_sin(index, text.head_dim, text.rope_theta)
    return {name: _half(table) for name, table in zip(('cos', 'sin'), tables)}


def _half(table: Tensor) -> Tensor:
    """Return the first half of a table (.., d): the second repeats it."""
    return table[..., :table.shape[-1] // 2].contiguous()


class _Surrounded:
    """An executor with something to do before it."""

    def __init__(self, executor: Executor, extra: Mapping[str, Tensor]) -> None:
        self._executor = executor
        self._inputs = {**executor.inputs, **extra}

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that the caller fills in place."""
        return self._inputs

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that `enqueue` overwrites."""
        return self._executor.outputs

    def enqueue(self, stream: torch.cuda.Stream | None = None) -> None:
        """Prepare the tables, then run the stage."""
        with torch.inference_mode():
            self.prepare()
        self._executor.enqueue(stream)

    def prepare(self) -> None:
        """Turn what the caller filled into what the graph takes."""
        raise NotImplementedError

    def _lay(self, cos: Tensor, sin: Tensor) -> None:
        """Put tables (S, d) into the graph's inputs."""
        for name, table in (('cos', cos), ('sin', sin)):
            self._executor.inputs[name].copy_(_half(table))


class PrefillTables(_Surrounded):
    """Prefill with input 'positions' (3, S) int64 in place of cosine and sine."""

    def __init__(self, executor: Executor, text: TextConfig, positions: Tensor) -> None:
        super().__init__(executor, {'positions': positions})
        self._text, self._positions = text, positions

    def prepare(self) -> None:
        """Make the three-axis tables of the prompt."""
        text = self._text
        self._lay(*mrope_cos_sin(self._positions, text.head_dim, text.rope_theta,
                                 text.mrope_section))


class DraftTables(_Surrounded):
    """
    Draft with inputs 'since', 'length' and 'rope_delta' (1,) int64, as the loop fills them.

    since = 0 begins a frame: the tables of a mirror draft then change with the prompt. Those of
    a flat draft are made once.
    """

    def __init__(self, executor: Executor, cfg: DraftConfig, positions: Tensor) -> None:
        device = positions.device
        super().__init__(executor, {name: torch.zeros(1, dtype=torch.int64, device=device)
                                    for name in ('since', 'length', 'rope_delta')})
        self._cfg, self._positions = cfg, positions
        self._index = torch.arange(len(executor.inputs['tokens']), device=device)
        if cfg.rotary == 'flat':
            self._lay(*DraftRotary.tables(cfg, self._index))

    def prepare(self) -> None:
        """Make the tables of a new frame."""
        if self._cfg.rotary == 'flat' or int(self.inputs['since']):
            return
        positions = DraftRotary.sequence_positions(
            self._positions, self.inputs['length'][0], self.inputs['rope_delta'][0],
            len(self._index))
        self._lay(*DraftRotary.tables(self._cfg, self._index, positions))
