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
The stages of a target as PyTorch executors: vision, prefill, verify, tree_verify, flow_step.

All stages of one target share one KV cache, which no buffer list repeats: prefill and verify
write its rows, flow_step reads them. The same holds for the taps that a draft reads. Shapes are
fixed at construction; where the CPU gains from shorter rows (prompt length, context length) the
body slices the fixed buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rspec_planner.model.action import ExpertContext
from rspec_planner.model.backbone import Backbone
from rspec_planner.model.image import patchify
from rspec_planner.model.rope import flat_cos_sin, mrope_cos_sin
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache, place_visual

Body = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


class TorchExecutor:
    """Runs `body(inputs, outputs)`, which fills the output buffers in place."""

    def __init__(self, body: Body, inputs: Mapping[str, Tensor],
                 outputs: Mapping[str, Tensor]) -> None:
        self._body = body
        self._inputs = dict(inputs)
        self._outputs = dict(outputs)

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that the caller fills in place."""
        return self._inputs

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that `enqueue` overwrites."""
        return self._outputs

    def enqueue(self, stream: torch.cuda.Stream | None = None) -> None:
        """Run the body on `stream`, or on the current stream (the CPU: at once)."""
        with torch.inference_mode(), torch.cuda.stream(stream) if stream else nullcontext():
            self._body(self._inputs, self._outputs)


def vision_executor(target: Target, images: int,
                    tower: Callable[[Tensor], tuple[Tensor, list[Tensor]]] | None = None
                    ) -> TorchExecutor:
    """
    Return the stage that encodes `images` images per call.

    inputs: 'images' (N, H, W, 3) uint8 RGB.
    outputs: 'features' (N, T, hidden), 'deepstack' (D, N, T, hidden).
    An image's features do not depend on the other images of the call. tower: patches to features
    and DeepStack features in place of the target's own tower, see `cuda_vision.Tower`.
    """
    cfg = target.cfg
    shape = (images, cfg.cameras.height, cfg.cameras.width, 3)
    inputs = {'images': torch.zeros(shape, dtype=torch.uint8, device=target.device)}
    outputs = feature_buffers(target, images)

    def body(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        patches = patchify(inputs['images'], cfg.vision.patch_size, 1,
                           cfg.vision.spatial_merge_size)
        features, deepstack = tower(patches) if tower is not None else target.vision(
            patches, cfg.patch_grid)
        outputs['features'].copy_(features)
        for row, part in zip(outputs['deepstack'], deepstack):
            row.copy_(part)

    return TorchExecutor(body, inputs, outputs)


def feature_buffers(target: Backbone, images: int) -> dict[str, Tensor]:
    """Return 'features' (N, T, hidden) and 'deepstack' (D, N, T, hidden) for N images."""
    cfg = target.cfg
    shape = (images, cfg.tokens_per_image, cfg.text.hidden_size)
    taps = len(cfg.vision.deepstack_layers)
    return {'features': torch.zeros(shape, dtype=target.dtype, device=target.device),
            'deepstack': torch.zeros((taps, *shape), dtype=target.dtype, device=target.device)}


def prefill_executor(target: Backbone, cache: KVCache, capacity: int,
                     taps: TapBuffer | None = None, guess: int = 0,
                     tail: int = 1) -> TorchExecutor:
    """
    Return the stage that reads a prompt of up to `capacity` tokens into cache rows 0 .. S - 1.

    Up to `guess` tokens that may follow the prompt ride along and are verified here.
    inputs: 'ids' (capacity,) int64, 'positions' (3, capacity) int64, 'length' (1,) int64 rows
    of prompt and guess together, 'guess_length' (1,) int64 of them guessed, 'features' and
    'deepstack' of all images in prompt order.
    outputs: 'best' (guess + 1,) int64 and 'logits' (guess + 1, V) fp32, forbidden ids at -inf:
    row g belongs to the last prompt token and g guessed ones; rows behind are stale.
    taps: receives all rows of its layers, but of the last layer only the last `tail` prompt
    rows (0: all) and the guessed ones.
    """
    cfg, device = target.cfg, target.device
    inputs = {'ids': torch.zeros(capacity, dtype=torch.int64, device=device),
              'positions': torch.zeros((3, capacity), dtype=torch.int64, device=device),
              'length': torch.zeros(1, dtype=torch.int64, device=device),
              'guess_length': torch.zeros(1, dtype=torch.int64, device=device),
              **feature_buffers(target, cfg.num_images)}
    text = cfg.text

    def body(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        length, guessed = int(inputs['length']), int(inputs['guess_length'])
        if not 0 <= guessed <= guess:
            raise ValueError(f'guess_length {guessed} is outside 0..{guess}')
        ids = inputs['ids'][None, :length]
        cos, sin = mrope_cos_sin(inputs['positions'][:, :length], text.head_dim,
                                 text.rope_theta, text.mrope_section, text.mrope_interleaved)
        visual = ids == cfg.tokens.image_pad
        visual[:, length - guessed:] = False  # a generated <|image_pad|> is a word, not an image
        hidden = place_visual(target.text.embed(ids), visual, inputs['features'])
        hidden = _run(target, hidden, cos, sin, cache, 0, taps, visual_mask=visual,
                      deepstack=list(inputs['deepstack']),
                      last_rows=tail + guessed if tail else 0)
        _choose(target, hidden[0, -1 - guessed:], outputs)

    return TorchExecutor(body, inputs, _choice_buffers(target, guess + 1))


def verify_executor(target: Backbone, cache: KVCache, width: int,
                    taps: TapBuffer | None = None) -> TorchExecutor:
    """
    Return the stage that reads `width` tokens at cache rows start .. start + width - 1.

    inputs: 'ids' (width,) int64, 'start' (1,) int64, 'rope_delta' (1,) int64.
    outputs: 'best' (width,) int64, the target's choice after each row, and 'logits' (width, V)
    fp32, forbidden ids at -inf. K/V and taps of all rows are written.
    """
    inputs = _block_buffers(target, width)
    cos, sin = _flat_table(target, cache.capacity)

    def body(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        start = int(inputs['start'])
        first = start + int(inputs['rope_delta'])
        hidden = _run(target, target.text.embed(inputs['ids'][None]), cos[first:first + width],
                      sin[first:first + width], cache, start, taps)
        _choose(target, hidden[0], outputs)

    return TorchExecutor(body, inputs, _choice_buffers(target, width))


def tree_verify_executor(target: Backbone, cache: KVCache, width: int,
                         taps: TapBuffer | None = None) -> TorchExecutor:
    """
    Return the stage that reads a tree of `width` nodes, node 0 the anchor.

    inputs: those of `verify_executor`, 'depths' (width,) int64 with 0 for the anchor, and
    'ancestors' (width, width) bool: row i sees these nodes, itself included, no later ones.
    outputs: those of `verify_executor`, one row per node. K/V and taps of node i are written at
    row start + i, turned to its depth; `gather` of both makes an accepted path contiguous.
    """
    device = target.device
    inputs = {**_block_buffers(target, width),
              'depths': torch.zeros(width, dtype=torch.int64, device=device),
              'ancestors': torch.zeros((width, width), dtype=torch.bool, device=device)}
    cos, sin = _flat_table(target, cache.capacity)

    def body(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        start = int(inputs['start'])
        position = inputs['depths'] + (start + int(inputs['rope_delta']))
        visible = torch.ones((width, start + width), dtype=torch.bool, device=device)
        visible[:, start:] = inputs['ancestors']
        hidden = _run(target, target.text.embed(inputs['ids'][None]), cos[position],
                      sin[position], cache, start, taps, attn_mask=visible[None, None])
        _choose(target, hidden[0], outputs)

    return TorchExecutor(body, inputs, _choice_buffers(target, width))


def flow_step_executor(target: Target, cache: KVCache, samples: int) -> TorchExecutor:
    """
    Return the stage that computes one velocity for `samples` trajectories of one frame.

    inputs: 'noisy' (N, W, 2) fp32, 't' (1,) fp32, 'length' (1,) int64 context rows,
    'rope_delta' (1,) int64. outputs: 'velocity' (N, W, 2) fp32.
    A step at t = 0 lays out the context of a new frame; later steps of the frame reuse it.
    """
    device = target.device
    waypoints = target.cfg.action_space.n_waypoints
    inputs = {'noisy': torch.zeros((samples, waypoints, 2), device=device),
              't': torch.zeros(1, device=device),
              'length': torch.zeros(1, dtype=torch.int64, device=device),
              'rope_delta': torch.zeros(1, dtype=torch.int64, device=device)}
    outputs = {'velocity': torch.zeros((samples, waypoints, 2), device=device)}
    cos, sin = _flat_table(target, cache.capacity)
    held: list[ExpertContext] = []

    def body(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        length = int(inputs['length'])
        first = length + int(inputs['rope_delta'])
        if float(inputs['t']) == 0.0:
            held[:] = [_context(target, cache, samples, length)]
        outputs['velocity'].copy_(target.expert.velocity(
            inputs['noisy'], inputs['t'].expand(samples), held[0],
            cos[first:first + waypoints], sin[first:first + waypoints]))

    return TorchExecutor(body, inputs, outputs)


def _context(target: Target, cache: KVCache, samples: int, length: int) -> ExpertContext:
    """
    Return keys and values of rows 0 .. length - 1 with room for the waypoints behind them.

    One sample works inside the cache itself: its scratch rows lie behind the text, where the
    next prefill or verify overwrites whatever it reads. More samples need a copy each.
    """
    if samples == 1:
        end = length + target.cfg.action_space.n_waypoints
        return ExpertContext(cache.keys[:, :, :, :end], cache.values[:, :, :, :end], None, length)
    wide = [x[:, :, :, :length].expand(-1, samples, -1, -1, -1)
            for x in (cache.keys, cache.values)]
    return target.expert.prepare(*wide)


def _flat_table(target: Backbone, rows: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions 0 .. rows - 1, equal on all three axes."""
    text = target.cfg.text
    return flat_cos_sin(torch.arange(rows, device=target.device), text.head_dim,
                        text.rope_theta)


def _run(target: Backbone, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, start: int,
         taps: TapBuffer | None, **options: Any) -> Tensor:
    """Run the decoder over rows start .. of the cache; return hidden states, store the taps."""
    if taps is None:
        plain: Tensor = target.text(hidden, cos, sin, cache, start, **options)
        return plain
    out, parts = target.text(hidden, cos, sin, cache, start, taps=taps.layers, **options)
    taps.write(parts, start, hidden.shape[1])
    chosen: Tensor = out
    return chosen


def _block_buffers(target: Backbone, width: int) -> dict[str, Tensor]:
    """Return what every verify reads: 'ids' (width,), 'start' (1,), 'rope_delta' (1,)."""
    sizes = {'ids': width, 'start': 1, 'rope_delta': 1}
    return {name: torch.zeros(size, dtype=torch.int64, device=target.device)
            for name, size in sizes.items()}


def _choice_buffers(target: Backbone, rows: int) -> dict[str, Tensor]:
    """Return 'best' (rows,) and 'logits' (rows, V); forbidden ids stay at -inf for good."""
    logits = torch.full((rows, target.cfg.text.vocab_size), float('-inf'), device=target.device)
    return {'best': torch.zeros(rows, dtype=torch.int64, device=target.device),
            'logits': logits}


def _choose(target: Backbone, hidden: Tensor, outputs: Mapping[str, Tensor]) -> None:
    """
    Write logits and the most likely id of each row of hidden (S, H) into the first S rows.

    Forbidden ids never win, so the head skips their rows: at the tiny profile most of it.
    """
    tokens, weight = target.cfg.tokens, target.text.lm_head.weight
    logits, best = outputs['logits'][:len(hidden)], outputs['best'][:len(hidden)]
    last = len(weight)
    if tokens.forbidden_end < last:
        behind = slice(tokens.forbidden_end, last)
        logits[:, behind] = functional.linear(hidden, weight[behind])
    else:
        last = tokens.forbidden_start
    front = slice(0, tokens.forbidden_start)
    logits[:, front] = functional.linear(hidden, weight[front])
    torch.argmax(logits[:, :last], dim=-1, out=best)
