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
What the target is trained on: its words, its trajectory, and two auxiliary heads.

The forward passes use the target's own layers, but place the images by fixed indices: the
layout of the visual tokens is the same in every clip of a batch, and a masked scatter would
make the host wait for the device at every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.model.flow import interpolate, sample_time
from rspec_planner.model.image import patchify
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.model.text import attend
from rspec_planner.train.augment import (
    augment_patches,
    Augmentation,
    draw_shifts,
    shift_images,
)
from rspec_planner.train.examples import ExampleEncoder, MAX_WORDS
from rspec_planner.train.labels import OBJECT_CLASSES
from rspec_planner.train.pool import Batch
from rspec_planner.world.rig import Rig

#: metres of displacement that count as one, at 0.1 s, 0.2 s, ... 4 s; the expert passes at 0.6 m
_ACROSS_M = tuple(0.1 + 0.015 * step for step in range(1, 41))
_ALONG_M = tuple(0.2 + 0.05 * step for step in range(1, 41))


@dataclass(frozen=True)
class LossWeights:
    """Weights of the summed losses; see `TargetSettings`."""

    flow: float = 1.0
    decision: float = 0.5
    objects: float = 0.5
    expert_gradient: float = 0.2
    flow_samples: int = 6
    path: float = 0.0
    quiet_samples: int = 0  # of flow_samples


class AuxiliaryHeads(nn.Module):
    """
    Heads on the vision features that shorten the way of the gradient; never exported.

    `words`: learned queries read all images and name the deliberative words of the text.
    `objects`: what stands in each merged patch.
    """

    def __init__(self, width: int, vocab_size: int, num_images: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.image_embed = nn.Parameter(torch.randn(num_images, 1, width) * 0.02)
        self.queries = nn.Parameter(torch.randn(MAX_WORDS, width) * width ** -0.5)
        self.norm = nn.LayerNorm(width)
        self.key_value = nn.Linear(width, 2 * width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                                 nn.Linear(2 * width, width), nn.LayerNorm(width))
        self.word_logits = nn.Linear(width, vocab_size)
        self.object_logits = nn.Linear(width, OBJECT_CLASSES)

    def words(self, features: Tensor) -> Tensor:
        """Return (B, MAX_WORDS, vocab) of features (B, images, T, width)."""
        batch = features.shape[0]
        x = self.norm(features + self.image_embed).flatten(1, 2)
        joined = self.key_value(x)
        key, value = joined.view(*joined.shape[:2], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        query = self.queries.view(MAX_WORDS, self.heads, -1).transpose(0, 1)
        mixed = functional.scaled_dot_product_attention(
            query.expand(batch, -1, -1, -1).to(key.dtype), key, value)
        pooled = mixed.transpose(1, 2).flatten(2)
        out: Tensor = self.word_logits(self.mlp(pooled) + pooled)
        return out

    def objects(self, features: Tensor) -> Tensor:
        """Return (B, images, T, classes)."""
        out: Tensor = self.object_logits(features)
        return out


class TargetObjective(nn.Module):
    """The target with its losses; `forward` returns the loss to minimise and its parts."""

    visual_index: Tensor
    focal_px: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, target: Target, encoder: ExampleEncoder, weights: LossWeights,
                 augmentation: Augmentation):
        super().__init__()
        cfg = target.cfg
        self.target, self.weights, self.augmentation = target, weights, augmentation
        self.heads = AuxiliaryHeads(cfg.text.hidden_size, cfg.text.vocab_size,
                                    len(cfg.cameras.names) * cfg.cameras.frames)
        #: share of the auxiliary heads' gradient that reaches the vision tower; 0 while new heads
        #: know nothing and the tower knows a lot
        self.head_gradient = 1.0
        self.rope_delta = encoder.rope_delta
        rig = Rig(width=cfg.cameras.width, height=cfg.cameras.height)
        focal = [rig.intrinsics[name][0, 0] for name in cfg.cameras.names]
        self.register_buffer('focal_px', torch.tensor(focal, dtype=torch.float32).
                             repeat_interleave(cfg.cameras.frames), persistent=False)
        self.register_buffer('visual_index', torch.from_numpy(encoder.visual_index),
                             persistent=False)
        cos, sin = self._rotary(torch.from_numpy(np.ascontiguousarray(encoder.positions)))
        self.register_buffer('cos', cos, persistent=False)
        self.register_buffer('sin', sin, persistent=False)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        text = self.target.cfg.text
        return mrope_cos_sin(positions, text.head_dim, text.rope_theta, text.mrope_section)

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar loss and detached parts."""
        features, deepstack = self.see(batch.images)
        hidden, keys, values = self.read(batch.token_ids, features, deepstack)
        error = self._flow_error(keys, values, batch)
        parts = {'text': self._text_loss(hidden, batch), 'flow': error.square().mean()}
        if self.weights.path:
            parts['path'] = self._path_loss(error, batch)
        seen = _with_gradient(features, self.head_gradient)
        if self.weights.decision:
            parts['decision'] = self._word_loss(seen, batch)
        if self.weights.objects:
            parts['objects'] = self._object_loss(seen, batch)
        scale = {'text': 1.0, 'flow': self.weights.flow, 'decision': self.weights.decision,
                 'objects': self.weights.objects, 'path': self.weights.path}
        total = torch.stack([scale[name] * value for name, value in parts.items()]).sum()
        return total, {name: value.detach() for name, value in parts.items()}

    def see(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return features and DeepStack features, each (B, images, T, H), of uint8 images."""
        cfg = self.target.cfg
        with torch.no_grad():
            if self.training:
                images = shift_images(images, draw_shifts(
                    images.shape[0], self.focal_px, self.augmentation))
            patches = patchify(images.flatten(0, 1), cfg.vision.patch_size, 1,
                               cfg.vision.spatial_merge_size)
            if self.training:
                patches = augment_patches(patches, images.shape[0], self.augmentation)
        features, deepstack = self.target.vision(patches, cfg.patch_grid)
        shape = (*images.shape[:2], *features.shape[1:])
        return features.view(shape), [f.view(shape) for f in deepstack]

    def read(self, token_ids: Tensor, features: Tensor,
             deepstack: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """
        Run the decoder over whole sequences (B, S).

        Returns the residual stream after the last layer (B, S, H), before the final norm, and
        the keys and values (B, kv_heads, S, d) of every layer.
        """
        text, rows = self.target.text, token_ids.shape[1]
        cos, sin = self.cos[:rows], self.sin[:rows]
        hidden = text.embed(token_ids)
        hidden = hidden.index_copy(1, self.visual_index, features.flatten(1, 2).to(hidden.dtype))
        keys, values = [], []
        layers: list[Any] = list(text.layers)
        for index, layer in enumerate(layers):
            q, k, v = layer.project(hidden, cos, sin)
            hidden = layer.finish(hidden, attend(q, k, v, causal=True))
            if index < len(deepstack):
                added = deepstack[index].flatten(1, 2).to(hidden.dtype)
                hidden = hidden.index_add(1, self.visual_index, added)
            keys.append(k)
            values.append(v)
        return hidden, keys, values

    def _text_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of the reasoning tokens; only their rows reach the head."""
        room = batch.token_weights.shape[1]
        offset = torch.arange(room, device=hidden.device)
        row = (batch.prompt_lengths[:, None] + offset).clamp(max=batch.token_ids.shape[1] - 1)
        wanted = batch.token_ids.gather(1, row)
        before = hidden.gather(1, (row - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = self.target.text.logits(self.target.text.norm(before)).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction='none')
        weight = batch.token_weights.flatten()
        return (loss * weight).sum() / weight.sum().clamp(min=1.0)

    def _flow_error(self, keys: list[Tensor], values: list[Tensor], batch: Batch) -> Tensor:
        """Return velocity errors (copies * B, 64, 2) of noise samples over one shared cache."""
        count, copies = batch.actions.shape[0], self.weights.flow_samples
        context = [self._shared(torch.stack(parts), copies) for parts in (keys, values)]
        device = batch.actions.device
        visible = torch.arange(batch.token_ids.shape[1], device=device) < batch.lengths[:, None]
        step = torch.arange(batch.actions.shape[1], device=device)
        position = batch.lengths[:, None] + self.rope_delta + step
        cos, sin = self._rotary(position[:, None].expand(-1, 3, -1))
        data = batch.actions.repeat(copies, 1, 1)
        noise = self._noise(data)
        t = sample_time(count * copies, device=device)
        velocity = self.target.expert(
            interpolate(data, noise, t), t, *context, cos.repeat(copies, 1, 1),
            sin.repeat(copies, 1, 1), visible.repeat(copies, 1))
        error: Tensor = velocity - (data - noise)
        return error

    def _noise(self, data: Tensor) -> Tensor:
        """
        Return noise like the data; of the quiet copies, each times a factor from 0 to 1.

        A planner that draws with a small `flow.noise_scale` starts where those copies start.
        """
        noise = torch.randn_like(data)
        quiet = len(data) * self.weights.quiet_samples // self.weights.flow_samples
        if quiet:
            noise[:quiet] *= torch.rand(quiet, 1, 1, device=data.device).square()
        return noise

    def _path_loss(self, error: Tensor, batch: Batch) -> Tensor:
        """
        Return the mean square of the metres that velocity errors amount to, in tolerances.

        Curvature integrates twice to a place beside the path, acceleration to one along it, both
        over the label's own steps. The map is linear, so the best velocity stays that of the
        plain loss; only what displaces the vehicle soon counts more than what averages out.
        """
        dt, horizon = self.target.cfg.action_space.dt, len(_ACROSS_M)
        points = functional.pad(batch.future[:, :horizon, :2], (0, 0, 1, 0))
        moved = torch.diff(points, dim=1).norm(dim=-1)  # (B, horizon) metres of each step
        copies = len(error) // len(moved)
        scale = error.new_tensor((self.target.cfg.action_space.accel_std,
                                  self.target.cfg.action_space.curvature_std))
        push, bend = (error[:, :horizon].float() * scale).unbind(-1)
        moved = moved.repeat(copies, 1)
        across = ((bend * moved).cumsum(1) * moved).cumsum(1)
        along = (push * dt).cumsum(1).mul(dt).cumsum(1)
        loss: Tensor = 0.5 * ((across / across.new_tensor(_ACROSS_M)).square()
                      + (along / along.new_tensor(_ALONG_M)).square()).mean()
        return loss

    def _shared(self, cache: Tensor, copies: int) -> Tensor:
        """Return the cache repeated over the batch, its gradient scaled."""
        cache = _with_gradient(cache, self.weights.expert_gradient)
        return cache.repeat(1, copies, 1, 1, 1)

    def _word_loss(self, features: Tensor, batch: Batch) -> Tensor:
        logits = self.heads.words(features).float()
        return functional.cross_entropy(logits.flatten(0, 1), batch.words.flatten(),
                                        ignore_index=-1)

    def _object_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy per patch; background, which is most of it, counts a fifth."""
        logits = self.heads.objects(features).float()
        weight = torch.ones(OBJECT_CLASSES, device=logits.device)
        weight[0] = 0.2
        return functional.cross_entropy(logits.flatten(0, 2), batch.objects.flatten().long(),
                                        weight=weight)


def _with_gradient(values: Tensor, scale: float) -> Tensor:
    """Return the same values, their gradient scaled."""
    if scale == 1.0:
        return values
    detached = values.detach()
    return detached if scale == 0.0 else detached + scale * (values - detached)
