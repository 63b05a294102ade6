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
What a profile needs of a machine, on paper: memory, and the least time of a frame.

Counted from shapes alone: arithmetic of encode and prefill, weights that every decoding forward
and every flow step reads. The least times divide these by what the device reaches in a copy and
in one large matrix product; the expected ones multiply them by how far this code was from the
least times where it was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from rspec_planner.model.config import ProfileConfig, TextConfig

#: mean length of a reasoning (arXiv 2606.31160)
TOKENS = 18
#: text of a prompt beside its images, longest navigation text included
TEXT_ROOM = 128
#: measured time over least time, by stage. 'cuda': one H200, bf16, R1 shapes, tuned plans
#: (docs/performance.md). 'cpu': tiny profile, fp32, one core, both measured in one run; there the
#: number of operations counts more than their size
MEASURED_OVER_LEAST = {
    'cuda': {'encode': 2.0, 'prefill': 1.15, 'decode': 1.33, 'action': 2.4},
    'cpu': {'encode': 1.9, 'prefill': 1.2, 'decode': 6.5, 'action': 3.4},
}
STAGES = ('encode', 'prefill', 'decode', 'action')
MIB = 1024 ** 2


@dataclass(frozen=True)
class Rates:
    """What a device reaches."""

    bytes_per_s: float  # a large copy, read and written
    flops: float  # per second, one large matrix product


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that planning one frame holds at a time."""

    weights: int
    cache: int
    work: int  # features of all images and the widest intermediate results

    @property
    def total(self) -> int:
        """Return all of them."""
        return self.weights + self.cache + self.work


def prompt_rows(profile: ProfileConfig) -> int:
    """Return about how many tokens a prompt of the profile has."""
    images = len(profile.cameras.names) * profile.cameras.frames
    return images * (profile.tokens_per_image + 2) + TEXT_ROOM


def memory_need(profile: ProfileConfig, parameters: int, itemsize: int,
                samples: int = 1) -> MemoryNeed:
    """
    Return the bytes that planning needs beside the process itself.

    parameters: number of weights; itemsize: bytes of a weight, a cached value and an activation.
    """
    text, vision = profile.text, profile.vision
    rows = prompt_rows(profile) + profile.max_reasoning_tokens
    per_row = 2 * text.num_layers * text.num_kv_heads * text.head_dim
    cache = (rows + profile.action_space.n_waypoints) * per_row * (1 if samples == 1
                                                                   else samples + 1)
    images = len(profile.cameras.names) * profile.cameras.frames
    kept = images * profile.tokens_per_image * text.hidden_size \
        * (1 + len(vision.deepstack_layers))
    # features in the prefill's buffers, the vision cache's copies, and one set while encoding
    features = 2 * kept + kept // max(profile.cameras.frames, 1)
    # joined gate and up, their product and the residual, of every row of the prompt
    widest = rows * (3 * text.intermediate_size + 4 * text.hidden_size)
    patches = profile.patch_grid[0] * profile.patch_grid[1] * len(profile.cameras.names)
    tower = patches * (2 * vision.intermediate_size + 6 * vision.hidden_size)
    logits = 33 * text.vocab_size * 4  # fp32, of the last row and a guess of 32
    return MemoryNeed(parameters * itemsize, cache * itemsize,
                      (features + max(widest, tower)) * itemsize + 2 * logits)


def _layer_weights(text: TextConfig, hidden: int, heads: int, intermediate: int) -> int:
    """Return the weights of one decoder layer that a product reads."""
    attention = hidden * text.head_dim * (2 * heads + 2 * text.num_kv_heads)
    return attention + 3 * hidden * intermediate


def _text_weights(text: TextConfig) -> int:
    return text.num_layers * _layer_weights(text, text.hidden_size, text.num_heads,
                                            text.intermediate_size)


def layer_weights(profile: ProfileConfig) -> int:
    """Return the weights of the layers of decoder and expert, what fp8 halves."""
    text, expert = profile.text, profile.expert
    return _text_weights(text) + text.num_layers * _layer_weights(
        text, expert.hidden_size, expert.num_heads, expert.intermediate_size)


def _encode_flops(profile: ProfileConfig, images: int) -> float:
    vision = profile.vision
    patches = profile.patch_grid[0] * profile.patch_grid[1]
    block = 4 * vision.hidden_size ** 2 + 2 * vision.hidden_size * vision.intermediate_size
    joined = vision.hidden_size * vision.spatial_merge_size ** 2
    merger = joined * joined + joined * vision.out_hidden_size
    mergers = (1 + len(vision.deepstack_layers)) * merger * profile.tokens_per_image
    attention = 2 * patches ** 2 * vision.hidden_size * vision.depth
    return 2.0 * images * (patches * vision.depth * block + attention + mergers)


def _prefill_flops(profile: ProfileConfig) -> float:
    text, rows = profile.text, prompt_rows(profile)
    attention = text.num_layers * rows ** 2 * text.num_heads * text.head_dim  # half is masked
    return 2.0 * (rows * _text_weights(text) + attention)


def least_ms(profile: ProfileConfig, itemsize: int, rates: Rates, *, new_images: int = 0,
             iterations: float = TOKENS) -> dict[str, float]:
    """
    Return the least milliseconds of each stage.

    new_images: images that are not kept from the last frame, 0 for one a camera. iterations:
    target forwards of the decoding, one a token without a draft.
    """
    text = profile.text
    images = new_images or len(profile.cameras.names)
    head = text.hidden_size * text.vocab_size
    decode = iterations * (_text_weights(text) + head) * itemsize / rates.bytes_per_s
    action = profile.flow.num_steps * _flow_step(profile, itemsize, rates)
    found = {'encode': _encode_flops(profile, images) / rates.flops,
             'prefill': _prefill_flops(profile) / rates.flops, 'decode': decode,
             'action': action}
    return {name: 1e3 * seconds for name, seconds in found.items()}


def _flow_step(profile: ProfileConfig, itemsize: int, rates: Rates) -> float:
    """Return the least seconds of one step: read weights and context, or multiply with them."""
    text, expert = profile.text, profile.expert
    weights = text.num_layers * _layer_weights(text, expert.hidden_size, expert.num_heads,
                                               expert.intermediate_size)
    rows, dim = prompt_rows(profile) + TOKENS, text.num_layers * text.head_dim
    context = 2 * rows * text.num_kv_heads * dim
    products = weights + 2 * rows * expert.num_heads * dim
    return max((weights + context) * itemsize / rates.bytes_per_s,
               2.0 * profile.action_space.n_waypoints * products / rates.flops)


def expected_ms(least: dict[str, float], kind: str) -> dict[str, float]:
    """Return what stages probably take on a device of a kind, 'cuda' or 'cpu'."""
    return {name: value * MEASURED_OVER_LEAST[kind][name] for name, value in least.items()}


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return what a device reaches; takes about a second."""
    cuda = device.type == 'cuda'
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else list
    source = torch.zeros((1024 if cuda else 128) * MIB, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    side = 8192 if cuda else 1024
    # zeros let a GPU clock higher than work does
    left = torch.randn((side, side), device=device).to(dtype)
    copied = _best(lambda: into.copy_(source), wait)
    multiplied = _best(lambda: left @ left, wait)
    return Rates(2 * source.numel() / copied, 2.0 * side ** 3 / multiplied)


def _best(work: Callable[[], object], wait: Callable[[], object], repeats: int = 5) -> float:
    """Return the least seconds of `repeats` runs, one before them not counted."""
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            wait()
            started = perf_counter()
            work()
            wait()
            times.append(perf_counter() - started)
    return min(times[1:])
