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
"""Optimisers, weight averaging and gradient exchange of a training run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn, Tensor
import torch.distributed as dist

#: quintic Newton-Schulz coefficients that push singular values towards one (Muon, 2024)
_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Return a stack of matrices (n, a, b) with singular values moved close to one."""
    a, b, c = _SCHULZ
    x = update.bfloat16() if update.is_cuda else update
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x if wide else x.mT).to(update.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """
    Momentum whose matrix updates are orthogonalised; matrices of one shape go in one batch.

    The step of a matrix (out, in) is scaled by sqrt(max(1, out / in)).
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95,
                 weight_decay: float = 0.0):
        super().__init__(list(params), {'lr': lr, 'momentum': momentum,
                                        'weight_decay': weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group['params']:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                self._step_shape(group, shape, params)

    def _step_shape(self, group: dict[str, Any], shape: torch.Size, params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        for p in params:
            if 'momentum' not in self.state[p]:
                self.state[p]['momentum'] = torch.zeros_like(p)
        buffers = [self.state[p]['momentum'] for p in params]
        torch._foreach_lerp_(buffers, grads, 1.0 - group['momentum'])
        looked_ahead = torch._foreach_lerp(grads, buffers, group['momentum'])
        update = orthogonalise(torch.stack(list(looked_ahead)))
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_mul_(params, 1.0 - group['lr'] * group['weight_decay'])
        torch._foreach_add_(params, list(update.unbind()), alpha=-group['lr'] * scale)


def build_optimizers(model: nn.Module, *, learning_rate: float, betas: tuple[float, float],
                     weight_decay: float, matrix_optimizer: str,
                     muon_learning_rate: float) -> list[torch.optim.Optimizer]:
    """
    Return the optimisers; each group keeps its peak rate under 'peak_lr'.

    Weight decay acts on the matrices of the blocks only, never on embeddings, output layers,
    norms and biases; with 'muon' those matrices get orthogonalised updates.
    """
    matrices, rest, tables = [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.dim() < 2:
            rest.append(p)
        elif (p.dim() != 2 or min(p.shape) < 16
              or any(word in name for word in ('embed', 'lm_head', 'logits'))):
            tables.append(p)
        else:
            matrices.append(p)
    fused = next(model.parameters()).is_cuda
    groups: list[dict[str, Any]] = [{'params': rest, 'weight_decay': 0.0},
                                    {'params': tables, 'weight_decay': 0.0}]
    optimizers: list[torch.optim.Optimizer] = []
    if matrix_optimizer == 'muon':
        optimizers.append(Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay))
    else:
        groups.append({'params': matrices, 'weight_decay': weight_decay})
    optimizers.append(torch.optim.AdamW([g for g in groups if g['params']], lr=learning_rate,
                                        betas=betas, eps=1e-8, fused=fused))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['peak_lr'] = group['lr']
    return optimizers


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every group to its peak rate times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['lr'] = group['peak_lr'] * factor


class WeightAverage:
    """Exponential moving average of the parameters, what a checkpoint exports."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.updates = 0
        self._live = list(model.parameters())
        self.values = [p.detach().clone() for p in self._live]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average; early on it forgets faster, so that the start has no weight."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.values, [p.detach() for p in self._live], 1.0 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the live parameters; call twice to undo."""
        for value, live in zip(self.values, self._live):
            kept = live.detach().clone()
            live.copy_(value)
            value.copy_(kept)


def average_gradients(params: list[nn.Parameter]) -> None:
    """Replace every gradient by its mean over all processes; missing ones count as zero."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    grads = [p.grad for p in params if p.grad is not None]
    bucket = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    parts = torch.split(bucket, [g.numel() for g in grads])
    torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads)])


def share_parameters(model: nn.Module) -> None:
    """Give every process the parameters of rank 0."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for p in model.parameters():
            dist.broadcast(p.data, 0)
