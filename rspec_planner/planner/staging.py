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
For which networks and sizes the stages of a checkpoint are exported.

A checkpoint is a folder, an embedded one by name, or the name of a profile without weights:
its shapes alone, for builds and latency work. `alpamayo-r1-slice2` is a profile cut to two layers
of every stack; with random weights it is small enough to compute on a CPU at true width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
import hashlib
from pathlib import Path
import re

import torch

from rspec_planner.engine.stage_narrow import round_weights
from rspec_planner.engine.stages import PRECISIONS, StageShapes
from rspec_planner.engine.tensorrt_memory import available_bytes
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.config import alpamayo_1_5, alpamayo_r1, ProfileConfig
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config, Draft
from rspec_planner.model.draft_checkpoint import load_draft, target_digest
from rspec_planner.model.target import Target
from rspec_planner.planner.checkpoints import (
    chosen_draft,
    folder_profile,
    open_checkpoint,
    open_tokenizer,
)
from rspec_planner.planner.drafts import checkpoint_folder
from rspec_planner.planner.prompt import max_prompt_length
from rspec_planner.planner.reasoner import GUESS_ROOM, tapped_tail
from rspec_planner.planner.tokenizer import TextTokenizer

#: profiles whose shapes are known without a checkpoint
SHAPES_ONLY = {'alpamayo-r1': alpamayo_r1, 'alpamayo-1.5': alpamayo_1_5}
#: text around the images and the history of a prompt whose tokenizer is not at hand
TEXT_ROOM = 192
_BUCKET = 64
#: memory of a comparison beside 1.5 times its weights: the slice of R1 in fp32, 9.3 GB of weights,
#: took 15.9 GB at most
COMPARISON_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Source:
    """What is exported: networks in one precision, their sizes and the digests of both."""

    target: Target
    draft: Draft | None
    shapes: StageShapes
    checkpoints: dict[str, str]  # 'target', 'draft' -> digest of the weights, '' for shapes only


def stage_shapes(profile: ProfileConfig, draft: Draft | None, prompt: int, *, tail: int,
                 samples: int = 1, budget: int | None = None) -> StageShapes:
    """Return the sizes for prompts of up to `prompt` rows, as the planner lays out its cache."""
    budget = profile.max_reasoning_tokens if budget is None else budget
    block = draft.cfg.block if draft is not None else 1
    guess = min(budget, GUESS_ROOM)
    rows = prompt + budget + block + samples * profile.action_space.n_waypoints
    return StageShapes(capacity=rows + -rows % _BUCKET, prompt=prompt + guess, guess=guess,
                       block=block, images=len(profile.cameras.names), samples=samples,
                       taps=draft.cfg.taps if draft is not None else (), tail=tail)


def known_profile(name: str) -> ProfileConfig | None:
    """Return the profile that a name without a checkpoint stands for, None if it is another."""
    sliced = re.fullmatch(r'(.+)-slice([1-9]\d*)', name)
    base = SHAPES_ONLY.get(sliced[1] if sliced else name)
    if base is None or sliced is None:
        return None if base is None else base()
    profile, layers = base(), int(sliced[2])
    vision = replace(profile.vision, depth=layers, deepstack_layers=tuple(
        range(min(layers, len(profile.vision.deepstack_layers)))))
    return replace(profile, name=name, vision=vision,
                   text=replace(profile.text, num_layers=layers))


def read_source(checkpoint: str, precision: str, draft: str = 'default', samples: int = 1,
                weights: bool = False) -> Source:
    """
    Return what a checkpoint folder, an embedded name or a profile name stands for.

    draft: see `checkpoints.chosen_draft`, or 'none'. weights: an export needs none of the
    target's, so that a large checkpoint costs neither memory nor time; a comparison does. They
    are read from a folder, drawn at random for a slice of a profile and refused for a whole one;
    projections are rounded where the precision says so, see `stage_narrow`.
    EngineError and ConfigurationError name what is missing.
    """
    if precision not in PRECISIONS:
        raise ConfigurationError(f'precision {precision!r}: use one of {", ".join(PRECISIONS)}')
    dtype = getattr(torch, PRECISIONS[precision])
    profile = known_profile(checkpoint)
    if profile is not None:
        source = _shapes_only(profile, dtype, draft != 'none', samples)
        if weights:
            _draw_weights(source, sliced=checkpoint not in SHAPES_ONLY)
        return _rounded(source, precision)
    folder = checkpoint_folder(checkpoint)
    target, tokenizer = (open_checkpoint(folder, torch.device('cpu'), dtype) if weights
                         else _described(folder, dtype))
    chosen = _chosen_draft(draft, folder)
    routine = None if chosen is None else load_draft(chosen, target, 'cpu', dtype,
                                                     checkpoint=folder)
    digests = source_digests(checkpoint, draft)
    prompt = max_prompt_length(target.cfg, tokenizer)
    return _rounded(Source(target, routine, _sized(target, routine, prompt, samples), digests),
                    precision)


def _described(folder: Path, dtype: torch.dtype) -> tuple[Target, TextTokenizer]:
    """Return the target of a checkpoint folder without its weights, and the tokenizer."""
    profile = folder_profile(folder)
    return _bare(profile, dtype), open_tokenizer(folder, profile)


def _bare(profile: ProfileConfig, dtype: torch.dtype) -> Target:
    """Return a target on the meta device; what is computed and not stored has values."""
    with torch.device('meta'):
        target = Target(profile).to(dtype).eval().requires_grad_(False)
    target.expert.reset_frequencies(torch.device('cpu'))
    return target


def _rounded(source: Source, precision: str) -> Source:
    """Round weights of eight bits in place, so that PyTorch computes what the graphs do."""
    for model in (source.target, source.draft):
        if model is not None:
            round_weights(model, precision)
    return source


def source_digests(checkpoint: str, draft: str = 'default') -> dict[str, str]:
    """
    Return 'target', 'draft' -> digest of the weights, '' for shapes only; nothing is loaded.

    There is no entry of a draft where none is used.
    """
    if known_profile(checkpoint) is not None:
        return dict.fromkeys(('target',) if draft == 'none' else ('target', 'draft'), '')
    folder = checkpoint_folder(checkpoint)
    digests, chosen = {'target': target_digest(folder)}, _chosen_draft(draft, folder)
    if chosen is not None:
        digests['draft'] = target_digest(chosen)
    return digests


def config_digest(checkpoint: str) -> str:
    """Return the sha256 of a checkpoint's config.json, '' where there is none."""
    if known_profile(checkpoint) is not None:
        return ''
    path = checkpoint_folder(checkpoint) / 'config.json'
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ''


def _chosen_draft(draft: str, folder: Path) -> Path | None:
    """Return the folder of a draft, None for 'none' and where 'default' stands for none."""
    return chosen_draft(None if draft == 'none' else draft, folder)


def _shapes_only(profile: ProfileConfig, dtype: torch.dtype, drafted: bool,
                 samples: int) -> Source:
    """Return networks without weights: the profile's own and the default block draft."""
    target = _bare(profile, dtype)
    with torch.device('meta'):
        draft = Dflash(dflash_config(profile)).to(dtype).eval() if drafted else None
    if draft is not None:
        draft.requires_grad_(False).bind(target.text, profile.tokens)
    images = len(profile.cameras.names) * profile.cameras.frames
    prompt = (images * (profile.tokens_per_image + 2) + 3 * profile.history.num_poses
              + TEXT_ROOM)
    digests = source_digests(profile.name, 'default' if drafted else 'none')
    return Source(target, draft, _sized(target, draft, prompt, samples), digests)


def check_drawable(checkpoint: str, precision: str, draft: str = 'default') -> None:
    """Raise what `read_source` with weights would raise of a profile's name, at once."""
    profile = known_profile(checkpoint)
    if profile is not None:
        dtype = getattr(torch, PRECISIONS[precision])
        _check_drawable(_shapes_only(profile, dtype, draft != 'none', 1),
                        sliced=checkpoint not in SHAPES_ONLY)


def _check_drawable(source: Source, sliced: bool) -> None:
    """Raise ConfigurationError for a whole profile, EngineError where a slice does not fit."""
    name = source.target.cfg.name
    if not sliced:
        raise ConfigurationError(f'{name} has no weights here: give a checkpoint '
                                 f'folder, or {name}-slice2 for random ones')
    weights = sum(weight.nbytes for model in (source.target, source.draft) if model is not None
                  for weight in model.parameters())
    needed, free = weights + weights // 2 + COMPARISON_BYTES, available_bytes()
    if needed > free:
        raise EngineError(f'comparing {name} with random weights needs about {needed / 1e9:.1f} '
                          f'GB of memory and {free / 1e9:.1f} GB are free: end other programs, or '
                          'raise the limit of the container')


def _draw_weights(source: Source, sliced: bool) -> None:
    """Give networks on the meta device random weights, see `_check_drawable`."""
    _check_drawable(source, sliced)
    target, draft = source.target, source.draft
    generator = torch.Generator().manual_seed(0)
    for model in (target, *([] if draft is None else [draft])):
        model.to_empty(device='cpu')
        for weight in model.parameters():
            spread = 0.1 if weight.dim() == 1 else weight[0].numel() ** -0.5
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, spread, generator=generator)
    target.expert.reset_frequencies(torch.device('cpu'))
    if draft is not None:
        draft.bind(target.text, target.cfg.tokens)


def _sized(target: Target, draft: Draft | None, prompt: int, samples: int) -> StageShapes:
    tail = tapped_tail(draft, target) if draft is not None else 1
    return stage_shapes(target.cfg, draft, prompt, tail=tail, samples=samples)
