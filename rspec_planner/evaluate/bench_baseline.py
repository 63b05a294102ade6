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
The original planner's way through a frame: transformers, eager, one token a forward.

Text stack, vision tower and expert are transformers' Qwen3-VL modules with the target's own
weights, as the released planner builds them; scaled-dot-product attention, dynamic cache. Where
the published `dflash` package is installed its loop is timed on the same text weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor

from rspec_planner.errors import EngineError
from rspec_planner.evaluate.bench_workload import BenchPrompt
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.flow import euler_sample
from rspec_planner.model.image import patchify
from rspec_planner.model.target import Target


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise EngineError('transformers is not installed and the eager baseline needs it: pip '
                          'install -r requirements-dev.txt, or leave it out (--no-eager)'
                          ) from None
    return transformers


@contextmanager
def _as(target: Target) -> Iterator[None]:
    """Make modules in the target's dtype on its device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(target.dtype)
    try:
        with target.device:
            yield
    finally:
        torch.set_default_dtype(before)


def _text_options(target: Target, **over: Any) -> dict[str, Any]:
    """Return transformers' names of the text shapes."""
    text = target.cfg.text
    return {'vocab_size': text.vocab_size, 'hidden_size': text.hidden_size,
            'intermediate_size': text.intermediate_size, 'num_hidden_layers': text.num_layers,
            'num_attention_heads': text.num_heads, 'num_key_value_heads': text.num_kv_heads,
            'head_dim': text.head_dim, 'rms_norm_eps': text.rms_norm_eps,
            'attention_bias': False, 'tie_word_embeddings': False,
            'max_position_embeddings': 262_144, **over}


def _adopt(module: nn.Module, weights: dict[str, Tensor]) -> Any:
    """Let a module use weights without a copy; return it for inference."""
    module.load_state_dict(weights, strict=False, assign=True)
    return module.eval().requires_grad_(False)


class Original:
    """The stages of one frame in eager transformers."""

    def __init__(self, target: Target) -> None:
        config = _transformers().Qwen3VLConfig
        from transformers.models.qwen3_vl import modeling_qwen3_vl as modules
        self.target = target
        text, vision = target.cfg.text, target.cfg.vision
        rope = {'rope_parameters': {'rope_type': 'default', 'rope_theta': text.rope_theta,
                                    'mrope_section': list(text.mrope_section),
                                    'mrope_interleaved': True}}
        whole = config(
            text_config=_text_options(target, **rope),
            vision_config={
                'depth': vision.depth, 'hidden_size': vision.hidden_size,
                'intermediate_size': vision.intermediate_size, 'num_heads': vision.num_heads,
                'patch_size': vision.patch_size, 'out_hidden_size': vision.out_hidden_size,
                'num_position_embeddings': vision.num_position_embeddings,
                'deepstack_visual_indexes': list(vision.deepstack_layers)})
        expert = target.cfg.expert
        narrow = config(text_config=_text_options(
            target, **rope, vocab_size=8, hidden_size=expert.hidden_size,
            intermediate_size=expert.intermediate_size, num_attention_heads=expert.num_heads))
        for part in (whole, narrow):
            part.text_config._attn_implementation = 'sdpa'
            part.vision_config._attn_implementation = 'sdpa'
        with _as(target):
            models = (modules.Qwen3VLTextModel(whole.text_config),
                      modules.Qwen3VLVisionModel(whole.vision_config),
                      modules.Qwen3VLTextModel(narrow.text_config))
        states = (target.text.state_dict(), target.vision.state_dict(),
                  target.expert.state_dict())
        self.text, self.vision, self.expert = map(_adopt, models, states)

    def encode(self, images: Tensor) -> None:
        """Run the tower on images (N, H, W, 3) uint8."""
        vision = self.target.cfg.vision
        patches = patchify(images, vision.patch_size, vision.temporal_patch_size,
                           vision.spatial_merge_size)
        grid = torch.tensor([[1, *self.target.cfg.patch_grid]] * len(images),
                            device=images.device)
        self.vision(patches.flatten(0, 1).to(self.target.dtype), grid_thw=grid)

    def prefill(self, prompt: BenchPrompt, features: Tensor, deepstack: Tensor) -> tuple[Any, int]:
        """Return the cache and the first token."""
        device = self.target.device
        ids = prompt.ids.to(device)[None]
        visual = ids == self.target.cfg.tokens.image_pad
        embeds = self.target.text.embed(ids).masked_scatter(visual[..., None], features)
        cache = _transformers().DynamicCache()
        out = self.text(inputs_embeds=embeds, position_ids=prompt.positions.to(device)[:, None],
                        past_key_values=cache, use_cache=True, visual_pos_masks=visual,
                        deepstack_visual_embeds=list(deepstack))
        return cache, self._choose(out.last_hidden_state[:, -1])

    def _choose(self, hidden: Tensor) -> int:
        tokens = self.target.cfg.tokens
        logits = self.target.text.logits(hidden).float()
        logits[:, tokens.forbidden_start:tokens.forbidden_end] = float('-inf')
        return int(logits.argmax(-1))

    def decode(self, cache: Any, first: int, tokens: int, rope_delta: int) -> list[int]:
        """Return a text of `tokens` tokens; its last one is in the cache."""
        device, said = self.target.device, [first]
        for _ in range(tokens):  # one forward more than tokens that are chosen
            position = torch.full((3, 1, 1), cache.get_seq_length() + rope_delta, device=device)
            out = self.text(inputs_embeds=self.target.text.embed(
                torch.tensor([[said[-1]]], device=device)), position_ids=position,
                past_key_values=cache, use_cache=True)
            said.append(self._choose(out.last_hidden_state[:, -1]))
        return said[:tokens]

    def act(self, cache: Any, rope_delta: int, steps: int) -> Tensor:
        """Return the actions (1, W, 2) of one sample."""
        expert, length = self.target.expert, cache.get_seq_length()
        waypoints, device = expert.waypoints, self.target.device
        mask = torch.zeros((1, 1, waypoints, length + waypoints), dtype=self.target.dtype,
                           device=device)
        positions = (torch.arange(waypoints, device=device) + length + rope_delta).expand(
            3, 1, -1)

        def velocity(noisy: Tensor, t: Tensor) -> Tensor:
            out = self.expert(inputs_embeds=expert.action_in_proj(noisy, t),
                              position_ids=positions, attention_mask=mask,
                              past_key_values=cache, use_cache=True)
            cache.crop(-waypoints)
            found: Tensor = expert.action_out_proj(out.last_hidden_state).float()
            return found

        made: Tensor = euler_sample(velocity, torch.randn((1, waypoints, 2), device=device), steps)
        return made


def _timed(target: Target, work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return wall milliseconds of work, the device's included, and what it returned."""
    wait: Callable[[], Any] = torch.cuda.synchronize if target.device.type == 'cuda' else list
    wait()
    started = perf_counter()
    found = work(*arguments)
    wait()
    return 1e3 * (perf_counter() - started), found


def measure_original(target: Target, prompt: BenchPrompt, tokens: int, repeats: int = 3
                     ) -> dict[str, Any]:
    """Return medians of the original planner's stages, milliseconds, and what it said."""
    cfg, original, times = target.cfg, Original(target), []
    count = len(cfg.cameras.names) * cfg.cameras.frames
    images = torch.randint(256, (count, cfg.cameras.height, cfg.cameras.width, 3),
                           dtype=torch.uint8, device=target.device)
    delta, said = prompt.rope_delta, list[int]()
    with torch.inference_mode():
        inputs = features_of(target)
        for _ in range(repeats + 1):
            encode, _ = _timed(target, original.encode, images)
            prefill, (cache, first) = _timed(target, original.prefill, prompt, *inputs)
            decode, said = _timed(target, original.decode, cache, first, tokens, delta)
            action, _ = _timed(target, original.act, cache, delta, cfg.flow.num_steps)
            times.append((encode, prefill, decode, action))
    encode, prefill, decode, action = (float(x) for x in np.median(times[1:], axis=0))
    return {'encode_ms': encode, 'prefill_ms': prefill, 'decode_ms': decode,
            'per_token_ms': decode / tokens, 'action_ms': action, 'tokens': tokens,
            'frame_ms': encode + prefill + decode + action, 'generated': said}


def features_of(target: Target) -> tuple[Tensor, Tensor]:
    """Return features (N * T, H) and deepstack (D, N * T, H) of all images, always the same."""
    cameras = target.cfg.cameras
    rows = len(cameras.names) * cameras.frames * target.cfg.tokens_per_image
    shape = (rows, target.cfg.text.hidden_size)
    taps = len(target.cfg.vision.deepstack_layers)
    generator = torch.Generator(device=target.device).manual_seed(0)
    drawn = torch.randn((taps + 1, *shape), generator=generator, device=target.device)
    return drawn[0].to(target.dtype), drawn[1:].to(target.dtype)


def measure_dflash(target: Target, draft: Dflash, prompt: BenchPrompt, tokens: int
                   ) -> dict[str, Any]:
    """
    Return the milliseconds of one iteration of the published dflash package's loop.

    Its target is a plain text model, so that the prompt's images are words to it; random drafts
    are never right, so each iteration commits one token. Where it does not run: why.
    """
    try:
        from dflash.model import dflash_generate, DFlashDraftModel
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        return {'ran': False, 'reason': f'not importable: {error}'}
    cfg = draft.cfg
    rope = {'rope_parameters': {'rope_type': 'default', 'rope_theta': cfg.rope_theta}}
    routine = Qwen3Config(**_text_options(
        target, **rope, num_hidden_layers=cfg.num_layers, num_target_layers=36,
        dflash_config={'target_layer_ids': list(cfg.taps), 'mask_token_id': 151_662 % cfg
                       .target_vocab, 'block_size': cfg.block}))
    try:
        with _as(target):
            model = Qwen3ForCausalLM(Qwen3Config(**_text_options(target, **rope)))
            theirs = DFlashDraftModel(routine).eval()
        text = {f'model.{name}': weight for name, weight in target.text.state_dict().items()}
        text['lm_head.weight'] = text.pop('model.lm_head.weight')
        _adopt(model, text)
        ids = prompt.ids.to(target.device)[None]
        runs = []
        with torch.inference_mode():
            for _ in range(3):
                stats = dflash_generate(theirs, model, ids, tokens, None, return_stats=True)
                spent = stats.time_per_output_token * stats.num_output_tokens
                runs.append(1e3 * spent / max(len(stats.acceptance_lengths), 1))
    except Exception as error:  # somebody else's package on somebody else's shapes
        return {'ran': False, 'reason': f'{type(error).__name__}: {error}'}
    return {'ran': True, 'iteration_ms': float(np.median(runs[1:]))}
