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
Prefill and verify of the device-resident frame.

A prefill runs a fixed number of rows, more than the prompt has; what the rows behind the prompt
write is overwritten before anything sees it, as after a rejected block. Its products are the
library's, which are bound by arithmetic; everything between them is one pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel, SDPBackend

from rspec_planner.engine.cuda_frame import FrameBuffers
from rspec_planner.engine.cuda_rows import half_tables, LayerWeights, Rows, RowShape
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.select import Kernels
from rspec_planner.model.rope import axis_of_angle, inverse_frequencies
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache

#: library kernels in the order of their speed at the R1 prefill, H200: 169 and 326 us a layer
PREFILL_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
                     SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class DeviceTaps:
    """
    Tapped states of every cache position, those of one position side by side.

    rows: (capacity, n_f, H), see `model.taps.TapBuffer`.
    """

    def __init__(self, layers: tuple[int, ...], capacity: int, hidden: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.layers = layers
        self.rows = torch.zeros((capacity, len(layers), hidden), dtype=dtype, device=device)

    def staging(self, rows: int) -> Tensor:
        """Return a buffer (rows, n_f, H) into which layers write their output directly."""
        return torch.zeros((rows, *self.rows.shape[1:]), dtype=self.rows.dtype,
                           device=self.rows.device)

    def column(self, layer: int) -> int | None:
        """Return where a layer's states lie, None for a layer that is not tapped."""
        return self.layers.index(layer) if layer in self.layers else None


class _Text:
    """What prefill and verify share."""

    def __init__(self, target: Target, kernels: Kernels, frame: FrameBuffers, cache: KVCache,
                 taps: DeviceTaps, layers: Sequence[LayerWeights] | None = None) -> None:
        text = target.cfg.text
        self.cfg, self.kernels, self.frame, self.cache = text, kernels, frame, cache
        self.taps = taps
        self.layers = list(layers) if layers is not None else [
            LayerWeights.of(layer) for layer in target.text.layers]
        self.embedding = target.text.embed_tokens.weight.detach()
        self.norm = target.text.norm.weight.detach()
        self.head = target.text.lm_head.weight.detach()
        self.forbidden = (target.cfg.tokens.forbidden_start, target.cfg.tokens.forbidden_end)
        self.tables = half_tables(cache.capacity, text.head_dim, text.rope_theta, target.device)
        self.dtype, self.device = target.dtype, target.device

    def rows(self, count: int, width: int = 0) -> Rows:
        """Return the buffers of `count` rows, which round as `width` rows do."""
        return Rows(RowShape.of(self.cfg, count, width), self.kernels, self.tables, self.dtype)

    def choose(self, hidden: Tensor, best: Tensor, width: int = 0) -> None:
        """Fill best with the target's choices behind hidden."""
        self.kernels.choose(hidden, self.head, best, norm=self.norm, eps=self.cfg.rms_norm_eps,
                            forbidden=self.forbidden, width=width)


class Verify(_Text):
    """Reads `ids` (B,) at the frame's start; writes K/V, taps and the choices `best` (B,)."""

    def __init__(self, target: Target, kernels: Kernels, frame: FrameBuffers, cache: KVCache,
                 taps: DeviceTaps, width: int,
                 layers: Sequence[LayerWeights] | None = None, widest: int = 0) -> None:
        """
        Make the buffers of `width` rows.

        layers: others than the target's own, such as fp8 copies. widest: the widest verify whose
        choices must equal these bit for bit.
        """
        super().__init__(target, kernels, frame, cache, taps, layers)
        self.ids, self.best = (torch.zeros(width, dtype=torch.int64, device=target.device)
                               for _ in range(2))
        self.widest = max(width, widest)
        self.runner = self.rows(width, self.widest)
        self._staged = taps.staging(width)
        self._index = torch.arange(width, device=target.device)
        self._slots = torch.zeros_like(self._index)

    def use(self, kernels: Kernels) -> None:
        """Run other kernels from now on."""
        self.kernels = self.runner.kernels = kernels

    def __call__(self) -> None:
        """Enqueue one forward."""
        start, angle = self.frame.at(Slot.START), self.frame.at(Slot.ANGLE)
        x = self.runner.hidden
        torch.index_select(self.embedding, 0, self.ids, out=x)
        for index, weights in enumerate(self.layers):
            column = self.taps.column(index)
            out = self.runner.hidden if column is None else self._staged[:, column]
            held = self.cache.keys[index], self.cache.values[index]
            behind = self.layers[index + 1] if index + 1 < len(self.layers) else None
            self.runner.layer(weights, x, out, start, angle, held,
                              {'start': start, 'cache': (held[0][0], held[1][0])}, behind,
                              ready=index > 0)
            x = out
        self.choose(x, self.best, self.widest)
        if self.taps.layers:
            torch.add(self._index, start, out=self._slots)
            self.taps.rows.index_copy_(0, self._slots, self._staged)


class Prefill(_Text):
    """Reads the frame's tokens and images; commits the first token and the guess's right part."""

    def __init__(self, target: Target, kernels: Kernels, frame: FrameBuffers, cache: KVCache,
                 taps: DeviceTaps, guess: int, tail: int,
                 layers: Sequence[LayerWeights] | None = None) -> None:
        """
        Take up to `guess` guessed tokens; tap the last layer for `tail` last prompt rows.

        layers: others than the target's own, see `Verify`.
        """
        super().__init__(target, kernels, frame, cache, taps, layers)
        cfg, device = target.cfg, target.device
        images = len(cfg.cameras.names) * cfg.cameras.frames
        shape = (images * cfg.tokens_per_image, cfg.text.hidden_size)
        self.features = torch.zeros(shape, dtype=target.dtype, device=device)
        self.deepstack = torch.zeros((len(cfg.vision.deepstack_layers), *shape),
                                     dtype=target.dtype, device=device)
        self.best = torch.zeros(guess + 1, dtype=torch.int64, device=device)
        self._tail = max(tail, 1)
        text = cfg.text
        self._axis = axis_of_angle(text.head_dim // 2, text.mrope_section, device)
        self._frequencies = inverse_frequencies(text.head_dim, text.rope_theta, device)
        self._end = self.rows(self._tail + guess)
        self._index = torch.arange(self._tail + guess, device=device)

    def __call__(self) -> None:
        """Enqueue the forward and the acceptance of the guess."""
        frame, count = self.frame, self.frame.prompt_rows
        angles = frame.positions.float().index_select(0, self._axis).t() * self._frequencies
        tables = angles.cos().contiguous(), angles.sin().contiguous()
        hidden = self.embedding.index_select(0, frame.tokens[:count])
        if frame.visual_rows is not None:
            hidden.index_copy_(0, frame.visual_rows, self.features)
        for index, weights in enumerate(self.layers[:-1]):
            q = self._project(weights, hidden, tables, index)
            hidden = self._finish(weights, hidden, self._mix(q, index))
            if index < len(self.deepstack) and frame.visual_rows is not None:
                self.kernels.add_rows(hidden, frame.visual_rows, self.deepstack[index])
            column = self.taps.column(index)
            if column is not None:
                self.taps.rows[:count, column] = hidden
        self._conclude(hidden, tables)

    @property
    def last_states(self) -> Tensor:
        """Return the states (guess + 1, H) of the last prompt row and of guessed rows."""
        return self._end.hidden[self._tail - 1:]

    def _project(self, weights: LayerWeights, hidden: Tensor, tables: tuple[Tensor, Tensor],
                 index: int) -> Tensor:
        """Write keys and values of all rows; return the queries (1, S, heads, d)."""
        cfg, zero = self.cfg, self.frame.at(Slot.ZERO)
        normed = torch.empty_like(hidden)
        self.kernels.norm(hidden, weights.input_norm, normed, cfg.rms_norm_eps)
        qkv = torch.mm(normed, weights.qkv.t()).view(1, len(hidden), -1, cfg.head_dim)
        q = qkv.new_empty((1, len(hidden), cfg.num_heads, cfg.head_dim))
        self.kernels.rotate(qkv, weights.norms, tables, zero, zero, q, self.cache.keys[index],
                            self.cache.values[index], cfg.rms_norm_eps)
        return q

    def _mix(self, q: Tensor, index: int) -> Tensor:
        """Return the causal attention (S, heads * d) of the prompt's rows."""
        count = q.shape[1]
        with sdpa_kernel(PREFILL_ATTENTION, set_priority=True):
            mixed = functional.scaled_dot_product_attention(
                q.transpose(1, 2), self.cache.keys[index][:, :, :count],
                self.cache.values[index][:, :, :count], is_causal=True,
                enable_gqa=self.cfg.num_heads != self.cfg.num_kv_heads)
        return mixed.transpose(1, 2).reshape(count, -1)

    def _finish(self, weights: LayerWeights, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output (S, H), in the place of its input."""
        middle = hidden.addmm_(mixed, weights.out.t())
        normed = torch.empty_like(middle)
        self.kernels.norm(middle, weights.post_norm, normed, self.cfg.rms_norm_eps)
        joined = torch.mm(normed, weights.gate_up.t())
        gated = joined.new_empty((len(joined), joined.shape[1] // 2))
        self.kernels.gate(joined, gated)
        return middle.addmm_(gated, weights.down.t())

    def _conclude(self, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> None:
        """Run the last layer for the last rows only, and decide what they say."""
        last = len(self.layers) - 1
        self._end_with(hidden, self._project(self.layers[last], hidden, tables, last))

    def _end_with(self, hidden: Tensor, q: Tensor) -> None:
        """Run what follows the last layer's projection for the last rows, and decide."""
        last, frame = len(self.layers) - 1, self.frame
        first = frame.at(Slot.P) - (self._tail - 1)
        slots = self._index + first
        held = self.cache.keys[last][0], self.cache.values[last][0]
        self.kernels.attend(q.index_select(1, slots), self._end.mixed, start=first, cache=held)
        x = hidden.index_select(0, slots)
        self._end.finish(self.layers[last], x, self._end.hidden)
        column = self.taps.column(last)
        if column is not None:
            self.taps.rows[:, column].index_copy_(0, slots, self._end.hidden)
        self.choose(self._end.hidden[self._tail - 1:], self.best)
        block = frame.tokens.index_select(0, slots[self._tail - 1:])
        self.kernels.accept(frame.numbers, frame.tokens, block, self.best, frame.stops,
                            proposed=frame.at(Slot.GUESS))
