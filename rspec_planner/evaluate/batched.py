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
The planner's reasoning and trajectories for many clips at once.

One pass does what `Planner.plan` does frame by frame: encode, prefill, greedy decoding, flow
sampling. `evaluate.driving` compares the two on a sample before it trusts these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rspec_planner.model.flow import euler_sample, start_noise
from rspec_planner.model.image import patchify
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache, place_visual
from rspec_planner.model.unicycle import UnicycleActionSpace
from rspec_planner.planner.prompt import Prompt
from rspec_planner.planner.tokenizer import Tokenizer

#: what the cameras show: 'camera' the images, 'black' black images, 'none' no visual features
SIGHTS = ('camera', 'black', 'none')


@dataclass(frozen=True)
class Answers:
    """Reasoning and trajectories of N clips."""

    token_ids: list[tuple[int, ...]]  # generated ids, stop token included
    texts: list[str]
    actions: np.ndarray  # (N, K, 64, 2) float32, normalised
    xy: np.ndarray  # (N, K, 64, 2) float32, ego frame at t0, metres
    speeds: np.ndarray  # (N, K, 64) float32, m/s
    confidences: np.ndarray  # (N,) float32, see `decode.confidence`


class BatchedPlanner:
    """Run one target over batches of clips with equal prompt length."""

    def __init__(self, target: Target, tokenizer: Tokenizer, *,
                 max_reasoning_tokens: int | None = None, flow_steps: int | None = None):
        self.target, self.tokenizer, self.cfg = target, tokenizer, target.cfg
        self.budget = max_reasoning_tokens or target.cfg.max_reasoning_tokens
        self.flow_steps = flow_steps or target.cfg.flow.num_steps
        self.space = UnicycleActionSpace(target.cfg.action_space)

    @torch.no_grad()
    def encode(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return features and DeepStack features (B, V * T, H) of (B, V, H, W, 3) uint8."""
        vision = self.cfg.vision
        patches = patchify(images.flatten(0, 1), vision.patch_size, 1,
                           vision.spatial_merge_size)
        features, deepstack = self.target.vision(patches, self.cfg.patch_grid)
        batch = images.shape[0]
        return (features.unflatten(0, (batch, -1)).flatten(1, 2),
                [f.unflatten(0, (batch, -1)).flatten(1, 2) for f in deepstack])

    @torch.no_grad()
    def answer(self, prompts: list[Prompt], images: Tensor | None, history: np.ndarray,
               noise: Tensor, sight: str = 'camera') -> Answers:
        """
        Plan B clips.

        prompts: B of one length; images: (B, V, H, W, 3) uint8 on the target's device, needed
        for 'camera' only; history: (B, 16, 4) x, y, z, yaw; noise: (B, K, 64, 2) fp32.
        """
        return self.answer_encoded(prompts, self.features(images, len(prompts), sight), history,
                                   noise)

    @torch.no_grad()
    def answer_encoded(self, prompts: list[Prompt], features: tuple[Tensor, list[Tensor]],
                       history: np.ndarray, noise: Tensor) -> Answers:
        """Plan B clips whose images are encoded: features as `encode` returns them."""
        cache, hidden = self._prefill(prompts, *features)
        generated, lengths, sure = self._decode(prompts[0], cache, hidden)
        actions = self._act(prompts[0], cache, lengths, noise)
        return self._assemble(generated, sure, actions, history)

    def features(self, images: Tensor | None, batch: int,
                 sight: str) -> tuple[Tensor, list[Tensor]]:
        """Return the features (B, V * T, H) that a sight of SIGHTS gives."""
        if sight == 'camera' and images is not None:
            return self.encode(images)
        cameras, device = self.cfg.cameras, self.target.device
        black = torch.zeros((1, len(cameras.names) * cameras.frames, cameras.height,
                             cameras.width, 3), dtype=torch.uint8, device=device)
        features, deepstack = self.encode(black)
        if sight == 'none':
            features, deepstack = features * 0.0, [f * 0.0 for f in deepstack]
        return features.expand(batch, -1, -1), [f.expand(batch, -1, -1) for f in deepstack]

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        text = self.cfg.text
        return mrope_cos_sin(positions, text.head_dim, text.rope_theta, text.mrope_section)

    def _prefill(self, prompts: list[Prompt], features: Tensor,
                 deepstack: list[Tensor]) -> tuple[KVCache, Tensor]:
        """Return the filled cache and the last hidden row (B, H)."""
        device, text = self.target.device, self.target.text
        ids = torch.from_numpy(np.stack([p.token_ids for p in prompts])).to(device)
        cos, sin = self._rotary(torch.from_numpy(prompts[0].positions.copy()).to(device))
        visual = ids == self.cfg.tokens.image_pad
        hidden = place_visual(text.embed(ids), visual, features)
        dtype = torch.get_autocast_dtype('cuda') if torch.is_autocast_enabled('cuda') \
            else self.target.dtype
        cache = KVCache(self.cfg.text, len(prompts), ids.shape[1] + self.budget + 2, dtype,
                        device)
        hidden = text(hidden, cos, sin, cache=cache, visual_mask=visual, deepstack=deepstack)
        return cache, hidden[:, -1]

    def _decode(self, prompt: Prompt, cache: KVCache,
                hidden: Tensor) -> tuple[list[list[int]], Tensor, Tensor]:
        """Return the generated ids of each clip, its rows in the cache and log p (B,)."""
        tokens, text = self.cfg.tokens, self.target.text
        generated: list[list[int]] = [[] for _ in range(hidden.shape[0])]
        lengths = torch.full((hidden.shape[0],), prompt.length, device=hidden.device)
        open_rows = torch.ones_like(lengths, dtype=torch.bool)
        sure = torch.zeros(len(lengths), device=hidden.device)
        for step in range(self.budget + 1):
            logits = text.logits(hidden).float()
            logits[:, tokens.forbidden_start:tokens.forbidden_end] = float('-inf')
            chosen = logits.argmax(-1)
            closing = step == self.budget  # the expert needs an anchor behind any reasoning
            if closing:
                chosen = torch.full_like(chosen, tokens.traj_future_start)
            else:
                sure += torch.where(open_rows, logits.amax(-1) - logits.logsumexp(-1), 0.0)
            chosen = torch.where(open_rows, chosen, tokens.pad)
            for row, (token, alive) in enumerate(zip(chosen.tolist(), open_rows.tolist())):
                if alive and not closing:
                    generated[row].append(token)
            lengths += open_rows
            ended = torch.zeros_like(open_rows)
            for stop in tokens.stop_ids:
                ended |= chosen == stop
            position = prompt.length + step + prompt.rope_delta
            cos, sin = self._rotary(torch.full((3, 1), position, device=hidden.device))
            hidden = text(text.embed(chosen)[:, None], cos, sin, cache=cache,
                          start=prompt.length + step)[:, 0]
            open_rows = open_rows & ~ended
            if not bool(open_rows.any()):
                break
        return generated, lengths, sure

    def _act(self, prompt: Prompt, cache: KVCache, lengths: Tensor, noise: Tensor) -> Tensor:
        """Return (B, K, 64, 2) normalised actions."""
        batch, samples, waypoints, _ = noise.shape
        rows = int(lengths.max())
        keys = cache.keys[:, :, :, :rows].repeat_interleave(samples, 1)
        values = cache.values[:, :, :, :rows].repeat_interleave(samples, 1)
        lengths = lengths.repeat_interleave(samples)
        visible = torch.arange(rows, device=lengths.device) < lengths[:, None]
        step = torch.arange(waypoints, device=lengths.device)
        position = lengths[:, None] + prompt.rope_delta + step
        cos, sin = self._rotary(position[:, None].expand(-1, 3, -1))
        expert = self.target.expert
        context = expert.prepare(keys, values, None if bool(visible.all()) else visible)
        actions = euler_sample(
            lambda x, t: expert.velocity(x, t, context, cos, sin),
            start_noise(noise, self.cfg.flow.noise_scale).reshape(batch * samples, waypoints, 2),
            self.flow_steps)
        return actions.view(batch, samples, waypoints, 2)

    def _assemble(self, generated: list[list[int]], sure: Tensor, actions: Tensor,
                  history: np.ndarray) -> Answers:
        batch, samples = actions.shape[:2]
        past = torch.from_numpy(np.asarray(history, np.float32)).to(actions.device)
        v0 = self.space.initial_speed(past[:, :, :2], past[:, :, 3])
        xy, _, speed = self.space.integrate(actions.flatten(0, 1),
                                            v0.repeat_interleave(samples), floor_at_zero=True)
        end = self.cfg.tokens.cot_end
        texts = [self.tokenizer.decode(ids[:ids.index(end)] if end in ids else ids)
                 for ids in generated]
        shape = (batch, samples, -1)
        return Answers([tuple(ids) for ids in generated], texts, actions.cpu().numpy(),
                       xy.view(*shape, 2).cpu().numpy(), speed.view(shape).cpu().numpy(),
                       sure.exp().cpu().numpy())
