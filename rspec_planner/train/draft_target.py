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
Run a frozen target over rendered clips and keep what drafts are trained on.

Render workers fill shared memory, the device reads clips in batches of equal prompt length.
Forwards are fp32 without tf32, like the deployed planner: a label that differs from what the
planner says would count as a rejection for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import os
import sys

import numpy as np
import torch
from torch import Tensor

from rspec_planner.errors import InputError, RspecError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.flow import euler_sample
from rspec_planner.model.image import patchify
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache, place_visual
from rspec_planner.planner.prompt import build_prompt, Prompt
from rspec_planner.planner.tokenizer import TextTokenizer
from rspec_planner.train.draft_data import (
    CacheOptions,
    CLIP_DIMENSION,
    clip_names,
    exact_products,
    TargetCache,
)
from rspec_planner.train.examples import history_poses
from rspec_planner.train.farm import pair_jobs, PairJob, RenderFarm
from rspec_planner.world.clip import Clip, ClipSpec
from rspec_planner.world.splits import extra_spec

Progress = Callable[[int, int], None]
#: a clip of these splits that cannot be made is replaced by an extra one, any other is an error
REPLACEABLE = ('train', 'extra')
FIRST_SUBSTITUTE = 20_000_000
MAX_SUBSTITUTES = 50


class CacheWriter:
    """Buffers for N clips and the target that fills them, one batch of equal prompts a time."""

    def __init__(self, target: Target, columns: int, clips: int, options: CacheOptions):
        """Allocate for `clips` prompts of up to `columns` tokens, see `prompt_columns`."""
        self.target, self.options, self.cfg = target, options, target.cfg
        self.columns = columns
        self.layers = options.layers or tuple(range(self.cfg.text.num_layers))
        self.below = tuple(layer for layer in self.layers if layer < self.cfg.text.num_layers - 1)
        self.prompts: dict[int, Prompt] = {}  # one of each length
        shape = (self.cfg.action_space.n_waypoints, 2)
        generator = torch.Generator().manual_seed(options.seed)
        self.noise = torch.randn(shape, generator=generator).to(target.device)
        self.tensors = self._allocate(clips)

    def _allocate(self, clips: int) -> dict[str, Tensor]:
        text, options, device = self.cfg.text, self.options, self.target.device
        taps, depth = torch.bfloat16, len(self.layers)
        rows = options.tail + options.max_tokens
        whole: dict[str, Tensor] = {
            'ids': torch.full((clips, options.max_tokens), -1, device=device),
            'lengths': torch.zeros(clips, dtype=torch.int64, device=device),
            'prompt_lengths': torch.zeros(clips, dtype=torch.int64, device=device),
            'prompt_ids': torch.full((clips, self.columns), self.cfg.tokens.pad,
                                     dtype=torch.int32, device=device),
            'tail_taps': torch.zeros((depth, clips, rows, text.hidden_size), dtype=taps,
                                     device=device)}
        if options.full:
            whole['full_taps'] = torch.zeros(
                (len(self.below), clips, self.columns, text.hidden_size), dtype=taps,
                device=device)
        if options.prefix:
            whole['prefix'] = torch.zeros(
                (clips, text.num_layers, 2, text.num_kv_heads, self.columns, text.head_dim),
                dtype=options.prefix_dtype, device=device)
        if options.actions:
            whole['actions'] = torch.zeros((clips, *self.noise.shape), device=device)
        return whole

    @torch.no_grad()
    def write(self, rows: Sequence[int], prompts: Sequence[Prompt], images: Tensor) -> None:
        """
        Read B clips and store them at these rows.

        prompts: B of one length; images: (B, V, H, W, 3) uint8 on the target's device.
        """
        first = prompts[0]
        self.prompts.setdefault(first.length, first)
        at = torch.tensor(rows, device=self.target.device)
        ids = torch.from_numpy(np.stack([p.token_ids for p in prompts])).to(at.device)
        self.tensors['prompt_lengths'][at] = first.length
        self.tensors['prompt_ids'][at, self.columns - first.length:] = ids.int()
        with exact_products():
            cache, hidden = self._prefill(at, first, ids, images)
            lengths = self._generate(at, first, cache, hidden)
            if self.options.actions:
                self.tensors['actions'][at] = self._act(first, cache, lengths)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        text = self.cfg.text
        return mrope_cos_sin(positions, text.head_dim, text.rope_theta, text.mrope_section)

    def _prefill(self, at: Tensor, prompt: Prompt, ids: Tensor,
                 images: Tensor) -> tuple[KVCache, Tensor]:
        """Store taps and K/V of the prompt; return the cache and the last hidden row (B, H)."""
        text, options = self.target.text, self.options
        features, deepstack = encode_images(self.target, images)
        cos, sin = self._rotary(torch.from_numpy(prompt.positions.copy()).to(at.device))
        visual = ids == self.cfg.tokens.image_pad
        cache = KVCache(self.cfg.text, len(ids), prompt.length + options.max_tokens + 1,
                        self.target.dtype, at.device)
        hidden, taps = text(place_visual(text.embed(ids), visual, features), cos, sin,
                            cache=cache, visual_mask=visual, deepstack=deepstack,
                            taps=self.layers)
        for row, tapped in enumerate(taps):
            self.tensors['tail_taps'][row, at, :options.tail] = \
                tapped[:, -options.tail:].bfloat16()
            if options.full and row < len(self.below):
                self.tensors['full_taps'][row, at, self.columns - prompt.length:] = \
                    tapped.bfloat16()
        if options.prefix:
            both = torch.stack((cache.keys, cache.values), dim=1)[..., :prompt.length, :]
            self.tensors['prefix'][at, ..., :prompt.length, :] = \
                both.movedim(2, 0).to(options.prefix_dtype)
        return cache, hidden[:, -1]

    def _generate(self, at: Tensor, prompt: Prompt, cache: KVCache, hidden: Tensor) -> Tensor:
        """Store ids and taps of the greedy text; return the context rows of each clip (B,)."""
        tokens, text, options = self.cfg.tokens, self.target.text, self.options
        stops = torch.tensor(tokens.stop_ids, device=at.device)
        lengths = torch.zeros_like(at)
        alive = torch.ones_like(at, dtype=torch.bool)
        for step in range(options.max_tokens + 1):
            logits = text.logits(hidden).float()
            logits[:, tokens.forbidden_start:tokens.forbidden_end] = float('-inf')
            chosen = logits.argmax(-1)
            closing = step == options.max_tokens  # the expert needs its anchor in any case
            if closing or step + 1 == options.end_at:
                chosen = torch.full_like(chosen, tokens.traj_future_start)
            row = prompt.length + step
            cos, sin = self._rotary(torch.full((3, 1), row + prompt.rope_delta,
                                               device=at.device))
            hidden, taps = text(text.embed(chosen)[:, None], cos, sin, cache=cache, start=row,
                                taps=self.layers)
            hidden = hidden[:, 0]
            if not closing:
                self.tensors['ids'][at, step] = torch.where(alive, chosen, -1)
                kept = torch.cat(taps, dim=1).transpose(0, 1) * alive[:, None]
                self.tensors['tail_taps'][:, at, options.tail + step] = kept.bfloat16()
                self.tensors['lengths'][at] += alive
            lengths += alive
            alive = alive & ~torch.isin(chosen, stops)
            if not bool(alive.any()):
                break
        return lengths + prompt.length

    def _act(self, prompt: Prompt, cache: KVCache, lengths: Tensor) -> Tensor:
        """Return the trajectory (B, W, 2) of each clip under the common noise."""
        rows, expert = int(lengths.max()), self.target.expert
        visible = torch.arange(rows, device=lengths.device) < lengths[:, None]
        context = expert.prepare(cache.keys[:, :, :, :rows], cache.values[:, :, :, :rows],
                                 None if bool(visible.all()) else visible)
        step = torch.arange(len(self.noise), device=lengths.device)
        position = lengths[:, None] + prompt.rope_delta + step
        cos, sin = self._rotary(position[:, None].expand(-1, 3, -1))
        noise = self.noise.expand(len(lengths), -1, -1) * self.cfg.flow.noise_scale
        return euler_sample(lambda x, t: expert.velocity(x, t, context, cos, sin), noise,
                            self.cfg.flow.num_steps)

    def finish(self, names: Sequence[str], splits: Sequence[str], families: Sequence[str],
               digest: str) -> TargetCache:
        """
        Return the cache of the first len(names) rows; texts are cut at the longest one.

        names, splits, families: of each clip. digest: of the target's weights.
        """
        device, count = self.target.device, len(names)
        tensors = {name: value.narrow(CLIP_DIMENSION[name], 0, count)
                   for name, value in self.tensors.items()}
        longest = max(int(tensors['lengths'].max()), 1)
        tensors['ids'] = tensors['ids'][:, :longest]
        tensors['tail_taps'] = tensors['tail_taps'][:, :, :self.options.tail + longest]
        known = sorted(self.prompts)
        lengths = torch.tensor(known, device=device)
        layouts = torch.searchsorted(lengths, tensors['prompt_lengths'])
        positions = torch.zeros((len(known), 3, self.columns), dtype=torch.int64)
        history = torch.zeros((len(known), 2), dtype=torch.int64)
        for i, length in enumerate(known):
            prompt, start = self.prompts[length], self.columns - length
            positions[i, :, start:] = torch.from_numpy(prompt.positions.copy())
            opened, closed = (int(np.flatnonzero(prompt.token_ids == token)[-1]) for token in (
                self.cfg.tokens.traj_history_start, self.cfg.tokens.traj_history_end))
            history[i] = torch.tensor((start + opened + 1, start + closed))
        deltas = torch.tensor([self.prompts[length].rope_delta for length in known])
        return TargetCache(
            profile=self.cfg, digest=digest, names=tuple(names), splits=tuple(splits),
            families=tuple(families), layers=self.options.layers, layouts=layouts,
            layout_lengths=lengths, positions=positions.to(device),
            rope_delta=deltas.to(device), history=history.to(device),
            noise=self.noise if self.options.actions else None, **tensors)


def build_cache(target: Target, tokenizer: TextTokenizer, specs: Sequence[ClipSpec], digest: str,
                options: CacheOptions | None = None, *, workers: int = 0,
                progress: Progress | None = None) -> TargetCache:
    """
    Render the clips of `specs`, run the target over them and return the cache in their order.

    target: fp32, packed or not, on the device that also keeps the cache. workers: render
    processes, 0 takes one per processor but two. Raises InputError when a prompt has no room.
    """
    options = options or CacheOptions()
    target = target.eval()
    writer = CacheWriter(target, prompt_columns(target.cfg, tokenizer, options.route_room),
                         len(specs), options)
    waiting: dict[int, list[tuple[int, Prompt, Tensor]]] = {}
    done = 0
    for row, clip, pixels in _rendered(list(specs), target, workers):
        prompt = build_prompt(target.cfg, tokenizer, history_poses(clip.history),
                              clip.navigation_text)
        if prompt.length > writer.columns:
            raise InputError(f'clip {clip.spec.pair_id}: prompt of {prompt.length} tokens, room '
                             f'for {writer.columns}; raise route_room')
        group = waiting.setdefault(prompt.length, [])
        group.append((row, prompt, torch.from_numpy(pixels).flatten(0, 1).to(
            target.device, copy=True)))
        if len(group) == options.batch:
            done += _flush(writer, waiting.pop(prompt.length))
            if progress is not None:
                progress(done, len(specs))
    for group in waiting.values():
        done += _flush(writer, group)
    if progress is not None:
        progress(done, len(specs))
    return writer.finish(clip_names(specs), [split_name(spec) for spec in specs],
                         [spec.family for spec in specs], digest)


def split_name(spec: ClipSpec) -> str:
    """Return the split of a clip; held-out clips in mid-manoeuvre are one of their own."""
    return f'{spec.split}-drive' if spec.drive and spec.split not in REPLACEABLE else spec.split


def prompt_columns(cfg: ProfileConfig, tokenizer: TextTokenizer, route_room: int) -> int:
    """Return the columns that hold a prompt with a route block of `route_room` tokens."""
    still = build_prompt(cfg, tokenizer, history_poses(np.zeros((cfg.history.num_poses, 4))))
    return padded_columns(still.length + route_room)


def padded_columns(length: int) -> int:
    """Return the next multiple of 16."""
    return -(-length // 16) * 16


@torch.no_grad()
def encode_images(target: Target, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return features and DeepStack features (B, V * T, H) of (B, V, H, W, 3) uint8."""
    vision, batch = target.cfg.vision, images.shape[0]
    patches = patchify(images.flatten(0, 1), vision.patch_size, 1, vision.spatial_merge_size)
    features, deepstack = target.vision(patches, target.cfg.patch_grid)
    return (features.unflatten(0, (batch, -1)).flatten(1, 2),
            [f.unflatten(0, (batch, -1)).flatten(1, 2) for f in deepstack])


def _flush(writer: CacheWriter, group: list[tuple[int, Prompt, Tensor]]) -> int:
    rows, prompts, images = zip(*group)
    writer.write(rows, prompts, torch.stack(images))
    return len(group)


def _rendered(specs: list[ClipSpec], target: Target,
              workers: int) -> Iterator[tuple[int, Clip, np.ndarray]]:
    """Yield row, clip and pixels (4, 4, H, W, 3), which are valid until the next step."""
    place = {(spec.pair_id, spec.event): row for row, spec in enumerate(specs)}
    jobs = pair_jobs(specs)
    # a substitute has another name: what counts is whose place it takes
    rows = {ordinal: [place[spec.pair_id, spec.event] for spec in
                      sorted(group, key=lambda spec: not spec.event)] for ordinal, group in jobs}
    cameras = target.cfg.cameras
    shape = (len(cameras.names), cameras.frames, cameras.height, cameras.width, 3)
    count = workers or max(len(os.sched_getaffinity(0)) - 2, 1)
    farm = RenderFarm(iter(jobs), workers=min(count, len(jobs)), image_shape=shape,
                      substitute=_Substitutes())
    farm.start()
    try:
        left = len(jobs)
        while left:
            for pair in farm.poll(64, timeout_s=1.0):
                yield from zip(rows[pair.ordinal], pair.clips, farm.pixels[pair.slot])
                farm.release(pair.slot)
                left -= 1
    finally:
        farm.close()


class _Substitutes:
    """Replaces training pairs that cannot be made."""

    def __init__(self) -> None:
        self.used = 0

    def __call__(self, job: PairJob, message: str) -> PairJob:
        ordinal, specs = job
        self.used += 1
        if specs[0].split not in REPLACEABLE or self.used > MAX_SUBSTITUTES:
            raise RspecError(message)
        print(f'{message}; an extra pair takes its place', file=sys.stderr, flush=True)
        index = FIRST_SUBSTITUTE + 2 * self.used
        return ordinal, (extra_spec(index), extra_spec(index + 1))
