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
"""Train the tiny AutoVLA on the answers of clips: cross entropy of words and actions alike."""

from __future__ import annotations

from dataclasses import dataclass
import math
from pathlib import Path
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rspec_planner.model.autovla import AutoVla
from rspec_planner.model.autovla_config import AutoVlaConfig
from rspec_planner.model.checkpoint import read_weights, write_weights
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.text import place_visual
from rspec_planner.model.window_vision import patchify_pairs
from rspec_planner.train.autovla_data import Examples, IGNORED
from rspec_planner.train.optimizer import build_optimizers, set_learning_rate, WeightAverage

HEAD = 'text.lm_head.weight'


@dataclass(frozen=True)
class TargetSettings:
    """How the target is trained."""

    clips: int = 16_000
    val_clips: int = 384
    batch: int = 128
    steps: int = 6000
    minutes: float = 2.0  # the schedule also ends by this training time
    learning_rate: float = 1e-3
    muon_learning_rate: float = 0.02
    weight_decay: float = 0.01
    ema_decay: float = 0.998
    seed: int = 0


def hidden_states(target: AutoVla, examples: Examples, index: Tensor, ids: Tensor,
                  features: Tensor | None = None, **options: Any) -> Any:
    """Return what the decoder makes of ids (B, L) for the clips `index`, see `TextDecoder`."""
    cfg = target.cfg
    if features is None:
        features = encode(target, examples.pairs[index])
    text, columns = cfg.text, ids.shape[1]
    visual = (ids == cfg.tokens.video_pad) & (
        torch.arange(columns, device=ids.device) < examples.prompts[index, None])
    cos, sin = mrope_cos_sin(examples.positions[index, :, :columns], text.head_dim,
                             text.rope_theta, text.mrope_section, text.mrope_interleaved)
    hidden = place_visual(target.text.embed(ids), visual, features)
    return target.text(hidden, cos, sin, **options)


def encode(target: AutoVla, pairs: Tensor) -> Tensor:
    """Return features (B * P, T, H) of frame pairs (B, P, 2, H, W, 3)."""
    vision = target.cfg.vision
    patches = patchify_pairs(pairs.flatten(0, 1), vision.patch_size, vision.spatial_merge_size)
    out: Tensor = target.vision(patches, target.cfg.patch_grid)
    return out


def answer_loss(target: AutoVla, examples: Examples, index: Tensor) -> Tensor:
    """Return the mean cross entropy of the answers' tokens."""
    ids, labels = examples.ids[index], examples.labels[index]
    hidden = hidden_states(target, examples, index, ids[:, :-1])
    wanted = labels[:, 1:]
    kept = wanted != IGNORED
    return functional.cross_entropy(target.text.logits(hidden[kept]).float(), wanted[kept])


def train_target(target: AutoVla, examples: Examples, settings: TargetSettings,
                 device: torch.device) -> list[float]:
    """Train in place; return the loss every hundred steps. The average is what remains."""
    optimizers = build_optimizers(
        target, learning_rate=settings.learning_rate, betas=(0.9, 0.95),
        weight_decay=settings.weight_decay, matrix_optimizer='muon',
        muon_learning_rate=settings.muon_learning_rate)
    average = WeightAverage(target, settings.ema_decay)
    generator = torch.Generator().manual_seed(settings.seed)
    target.train()
    started, curve, running = time.monotonic(), [], torch.zeros((), device=device)
    for step in range(settings.steps):
        progress = max(step / settings.steps,
                       (time.monotonic() - started) / (60.0 * settings.minutes))
        if progress >= 1.0:
            break
        set_learning_rate(optimizers, min(1.0, (step + 1) / 100) * 0.5 * (
            1.0 + math.cos(math.pi * progress)))
        index = torch.randint(len(examples), (settings.batch,), generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            loss = answer_loss(target, examples, index)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        average.update()
        running += loss.detach()
        if step % 100 == 99:
            curve.append(round(float(running) / 100, 4))
            running.zero_()
            print(f'step {step + 1} loss {curve[-1]} {time.monotonic() - started:.0f} s',
                  file=sys.stderr, flush=True)
    average.swap()
    target.eval().requires_grad_(False)
    return curve


def save_autovla(target: AutoVla, folder: Path, manifest: dict[str, Any]) -> None:
    """Write weights and config; tokenizer and codebook follow from the profile's name."""
    tensors = {name: tensor for name, tensor in target.state_dict().items() if name != HEAD}
    write_weights(tensors, target.cfg.to_dict(), folder, manifest)


def load_saved(folder: str | Path, device: torch.device | str = 'cpu') -> AutoVla:
    """Return a packed target that `save_autovla` wrote, fp32."""
    tensors, config = read_weights(folder, device)
    target = AutoVla(AutoVlaConfig.from_dict(config)).to(device)
    target.load_state_dict({**tensors, HEAD: tensors['text.embed_tokens.weight']})
    return target.eval().requires_grad_(False).pack()
