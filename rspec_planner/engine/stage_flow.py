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
"""One Euler step of the action expert as a graph, inside the target's own cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from rspec_planner.engine.stage_decoder import cache_examples, table_examples
from rspec_planner.engine.stage_layers import (
    additive,
    blank,
    finish,
    IN_PLACE,
    norm,
    project,
    Stage,
    Tables,
)
from rspec_planner.engine.stage_ops import attention, kv_update
from rspec_planner.engine.stages import StageShapes
from rspec_planner.model.action import ActionInProj
from rspec_planner.model.layer import DecoderLayer, RmsNorm
from rspec_planner.model.target import Target


class FlowStage(Stage):
    """
    One velocity for N trajectories of one frame, see `torch_executor.flow_step_executor`.

    inputs: 'noisy' (N, W, 2) fp32, 't' (1,) fp32, 'length' (1,) int64 context rows, 'rope_delta'
    (1,) int64; 'cos', 'sin' (C, d / 2) fp32 of flat positions; k<i>, v<i>.
    outputs: 'velocity' (N, W, 2) fp32. The N * W action rows occupy the free cache rows behind
    `length`; rows of one trajectory see the context and each other.
    """

    name = 'flow_step'

    def __init__(self, target: Target, shapes: StageShapes) -> None:
        super().__init__()
        self.expert, self.cfg, self.shapes = target.expert, target.cfg, shapes

    def examples(self) -> dict[str, Tensor]:
        """Return the inputs, see `Stage.examples`."""
        shapes, cfg = self.shapes, self.cfg
        dtype = self.expert.action_out_proj.weight.dtype
        return {'noisy': blank(shapes.samples, self.expert.waypoints, 2, dtype=torch.float32),
                't': blank(1, dtype=torch.float32), 'length': blank(1), 'rope_delta': blank(1),
                **table_examples(shapes.capacity, cfg.text.head_dim),
                **cache_examples(cfg, shapes, dtype, taps=False)}

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, see the class."""
        noisy, length = inputs['noisy'], inputs['length']
        count, waypoints = noisy.shape[:2]
        x = _enter(self.expert.action_in_proj, noisy, inputs['t']).flatten(0, 1)[None]
        position = length + inputs['rope_delta'] + torch.arange(waypoints)
        tables = Tables.rows(inputs, position.repeat(count))
        mask = additive(self._visible(length), x.dtype)
        updated: dict[str, Tensor] = {}
        for index, module in enumerate(self.expert.layers):
            layer = cast('DecoderLayer', module)
            q, k, v = project(layer.self_attn, norm(layer.input_layernorm, x), tables)
            k = updated[f'k{index}{IN_PLACE}'] = kv_update(inputs[f'k{index}'], k, length)
            v = updated[f'v{index}{IN_PLACE}'] = kv_update(inputs[f'v{index}'], v, length)
            x = finish(layer, x, attention(q, k, v, mask))
        velocity = self.expert.action_out_proj(norm(self.expert.norm, x)).float()
        return {'velocity': velocity.view(count, waypoints, -1), **updated}

    def _visible(self, length: Tensor) -> Tensor:
        """Return who sees whom, (N * W, C) bool."""
        waypoints = self.expert.waypoints
        column = torch.arange(self.shapes.capacity)
        first = torch.arange(self.shapes.samples).repeat_interleave(waypoints) * waypoints
        own = (length + first)[:, None]
        return (column < length) | ((column >= own) & (column < own + waypoints))


def _enter(module: ActionInProj, noisy: Tensor, t: Tensor) -> Tensor:
    """Return (N, W, hidden) like `ActionInProj.forward`, its norms one node each."""
    parts = [encode(noisy[..., i]) for i, encode in enumerate(module.sinus)]
    time = module.timestep_fourier_encoder(t)[:, None].expand(*noisy.shape[:2], -1)
    x = torch.cat((*parts, time), dim=-1).to(module.norm.weight.dtype)
    for part in module.encoder.trunk:
        x = norm(part, x) if isinstance(part, RmsNorm) else part(x)
    out: Tensor = module.norm(x)
    return out
