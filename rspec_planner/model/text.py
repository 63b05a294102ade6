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
Text decoder of the target and its static KV cache.

Structure of the Qwen3-VL decoder (arXiv 2511.21631): grouped-query attention with RMSNorm on
each query and key head before the rotary, SwiGLU, untied embedding and head, and DeepStack
features added to the visual rows after the first layers. With the options of `TextConfig` it is
the Qwen2.5-VL decoder (arXiv 2502.13923), which has no DeepStack.
Module names give the state-dict keys of `vlm.model.language_model.*` in released checkpoints;
`lm_head` sits beside the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, Tensor

from rspec_planner.model.config import TextConfig
from rspec_planner.model.layer import attend, DecoderLayer, fold_mask, RmsNorm, runners

__all__ = ['KVCache', 'TextDecoder', 'Window', 'add_visual', 'attend', 'place_visual']


class KVCache:
    """
    Keys and values of every layer in fixed buffers.

    keys, values: (L, B, kv_heads, capacity, head_dim), keys after norm and rotary.
    Rows are written at explicit positions. What lies beyond a query's position is never read,
    so rejected rows need no clearing.
    """

    def __init__(self, cfg: TextConfig, batch: int, capacity: int,
                 dtype: torch.dtype = torch.float32,
                 device: torch.device | str = 'cpu') -> None:
        shape = (cfg.num_layers, batch, cfg.num_kv_heads, capacity, cfg.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = list(zip(self.keys.unbind(0), self.values.unbind(0)))

    @property
    def capacity(self) -> int:
        """Return the number of rows."""
        return self.keys.shape[3]

    def write(self, layer: int, k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Store the rows of one layer; return the keys and values that the window reads."""
        keys, values = self._layers[layer]
        if window.slots is None:
            keys[:, :, window.start:window.end] = k
            values[:, :, window.start:window.end] = v
        else:
            keys.index_copy_(2, window.slots, k.to(keys.dtype))
            values.index_copy_(2, window.slots, v.to(values.dtype))
        return keys[:, :, :window.end], values[:, :, :window.end]

    def gather(self, start: int, path: Sequence[int]) -> None:
        """
        Move rows start + path[i] of every layer to start + i: an accepted path of a tree.

        Keys need no new rotary: a node is turned by its depth, which is its index on the path.
        """
        if list(path) == list(range(len(path))):
            return
        source = torch.tensor(path, device=self.keys.device) + start
        for buffer in (self.keys, self.values):
            buffer[:, :, :, start:start + len(path)] = buffer.index_select(3, source)


@dataclass(frozen=True)
class Window:
    """Where a forward writes and what it reads; one per forward, shared by all layers."""

    start: int
    end: int  # rows [0, end) of the cache are read
    slots: Tensor | None  # (S,) rows to write when the start is a device scalar
    mask: Tensor | None  # additive, see `attend`
    causal: bool  # rows see only themselves: no cache content is read


class TextDecoder(nn.Module):
    """Embedding, decoder layers, final norm and head."""

    def __init__(self, cfg: TextConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(cfg, cfg.hidden_size, cfg.num_heads, cfg.intermediate_size)
            for _ in range(cfg.num_layers))
        self.norm = RmsNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        if cfg.tied_head:
            self.lm_head.weight = self.embed_tokens.weight

    def embed(self, ids: Tensor) -> Tensor:
        """Return (..., hidden) of integer ids."""
        out: Tensor = self.embed_tokens(ids)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (..., vocab) of hidden states after the final norm."""
        out: Tensor = self.lm_head(hidden)
        return out

    def _window(self, hidden: Tensor, cache: KVCache | None, start: int | Tensor,
                attn_mask: Tensor | None) -> Window:
        """Decide rows, mask and the causal fast path of one forward."""
        rows, device = hidden.shape[1], hidden.device
        group = self.cfg.num_heads // self.cfg.num_kv_heads
        dtype = hidden.dtype if cache is None else cache.keys.dtype
        if isinstance(start, Tensor):
            if cache is None:
                raise ValueError('a start on the device needs a cache')
            end, first = cache.capacity, 0
            slots = start.view(1) + torch.arange(rows, device=device)
            visible = torch.arange(end, device=device) <= slots[:, None]
        else:
            end, first, slots = start + rows, start, None
            if cache is not None and end > cache.capacity:
                raise ValueError(f'rows {start}..{end} exceed the cache of {cache.capacity}')
            if attn_mask is None:
                if start == 0:
                    return Window(0, end, None, None, causal=True)
                mask = lower_right_mask(rows, end, group, dtype, device)
                return Window(start, end, None, mask, causal=False)
            position = torch.arange(end, device=device)
            visible = position <= position[start:, None]
        visible = visible[None, None]
        if attn_mask is not None:
            visible = visible & attn_mask
        return Window(first, end, slots, fold_mask(visible, group, dtype), causal=False)

    def _last_mask(self, window: Window, q: Tensor, rows: int) -> Tensor | None:
        """Return the folded mask of the last `rows` queries of a window."""
        group = self.cfg.num_heads // self.cfg.num_kv_heads
        if window.mask is None:
            keys = q.shape[2] if window.causal else window.end
            return lower_right_mask(rows, keys, group, q.dtype, q.device)
        split = window.mask.view(*window.mask.shape[:2], group, -1, window.mask.shape[-1])
        return split[:, :, :, -rows:].flatten(2, 3)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None,
                start: int | Tensor = 0, visual_mask: Tensor | None = None,
                deepstack: Sequence[Tensor] | None = None, attn_mask: Tensor | None = None,
                taps: tuple[int, ...] = (), return_kv: bool = False,
                last_rows: int = 0) -> Any:
        """
        Run all layers over rows start .. start + S - 1.

        hidden: (B, S, H). cos, sin: (S, d) or (B, S, d) fp32 of these rows.
        cache: receives the keys and values of the rows; without one the rows are the whole
        sequence (training, right padding needs no mask).
        start: int, or a 0-d or 1-element int64 tensor on the device (fixed shapes, for graphs).
        With start = 0 and no mask the rows see only themselves, whatever the cache holds.
        visual_mask: (B, S) bool, rows that hold images; deepstack: features (.., T, H) in the
        order of the mask's rows, added after layers 0, 1, ...
        attn_mask: bool, broadcastable to (B, 1, S, keys), further restricts "keys at positions
        <= the query's", keys being start + S, or the capacity when start is a tensor.
        taps: layers whose output rows are wanted (residual stream, DeepStack included).
        last_rows: n > 0 returns only the last n rows (B, n, H), sparing the other rows most of
        the last layer, whose tap then has n rows too; keys and values of all rows are still
        written. A model with DeepStack features for its last layer takes no image there.

        Returns (B, S, H) after the final norm; with taps, (hidden, [(B, S, H), ...]); with
        return_kv also keys and values (L, B, kv_heads, S, d) of these rows, appended.
        """
        window = self._window(hidden, cache, start, attn_mask)
        tapped: dict[int, Tensor] = {}
        rows: list[tuple[Tensor, Tensor]] = []
        layers, sin = runners(self.layers, sin)
        for index, layer in enumerate(layers):
            q, k, v = layer.project(hidden, cos, sin)
            if return_kv:
                rows.append((k, v))
            if cache is not None:
                keys, values = cache.write(index, k, v, window)
                if not window.causal:
                    k, v = keys, values
            mask, causal = window.mask, window.causal
            if 0 < last_rows < hidden.shape[1] and index == len(layers) - 1:
                mask, causal = self._last_mask(window, q, last_rows), False
                hidden, q = hidden[:, -last_rows:], q[:, :, -last_rows:]
                visual_mask = None
            hidden = layer.finish(hidden, attend(q, k, v, mask, causal))
            if deepstack is not None and visual_mask is not None and index < len(deepstack):
                hidden = add_visual(hidden, visual_mask, deepstack[index])
            if index in taps:
                tapped[index] = hidden
        tap_rows = [[tapped[index] for index in taps]] if taps else []
        out = [self.norm(hidden), *tap_rows, *(torch.stack(part) for part in zip(*rows))]
        return out[0] if len(out) == 1 else tuple(out)


def lower_right_mask(rows: int, keys: int, group: int, dtype: torch.dtype,
                     device: torch.device) -> Tensor | None:
    """
    Return the folded mask of the last `rows` of `keys` positions, each seeing up to itself.

    (1, 1, group * rows, keys), see `fold_mask`; None when there is nothing to hide.
    """
    if rows == 1:
        return None
    mask = torch.zeros((1, 1, group, rows, keys), dtype=dtype, device=device)
    hidden = torch.full((rows, rows), float('-inf'), dtype=dtype, device=device)
    mask[..., keys - rows:] = hidden.triu(1)
    return mask.flatten(2, 3)


def place_visual(hidden: Tensor, visual_mask: Tensor, features: Tensor) -> Tensor:
    """Return hidden (B, S, H) with the masked rows replaced by features (.., T, H) in order."""
    return hidden.masked_scatter(visual_mask[..., None], features.to(hidden.dtype))


def add_visual(hidden: Tensor, visual_mask: Tensor, features: Tensor) -> Tensor:
    """Return hidden (B, S, H) with features (.., T, H) added to the masked rows in order."""
    return hidden + place_visual(torch.zeros_like(hidden), visual_mask, features)
