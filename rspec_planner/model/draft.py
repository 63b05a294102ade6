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
What both kinds of draft share: configuration, rotary tables, fused features, head.

A draft reads hidden states of chosen target layers ("taps"), fuses them into one vector per
position and proposes the next tokens. Its embedding and its head are the target's, frozen. The
rotary of a draft is free: flat (one running index, FlatRoPE) or a mirror of the target's three
axes; the network is the same, only the cosine and sine table differs (speculative decoding for
driving planners, arXiv 2606.31160).
"""

from __future__ import annotations

from collections.abc import Sequence
import copy
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.backbone import BackboneConfig, SaidIds
from rspec_planner.model.config import TextConfig
from rspec_planner.model.layer import RmsNorm
from rspec_planner.model.rope import flat_cos_sin, mrope_cos_sin
from rspec_planner.model.text import TextDecoder

KINDS = ('dflash', 'eagle3')
ROTARIES = ('flat', 'mirror')
#: from this depth on a target has the published tap rules; below, evenly over all layers
DEEP = 12
#: below this width the MLP is 1.5 times the width: four layers stay below 2 M at width 256
WIDE = 1024


@dataclass(frozen=True)
class DraftConfig:
    """Everything that fixes a draft; widths, rotary base and vocabulary are the target's."""

    kind: str  # 'dflash' or 'eagle3'
    block: int  # the anchor and block - 1 proposals
    window: int  # context rows that a block sees, 0 = all
    rotary: str  # 'flat' or 'mirror'
    taps: tuple[int, ...]  # target layers whose output is read
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    rms_norm_eps: float
    draft_vocab: int  # rows of the reduced head, 0 = the whole head
    target_vocab: int
    name: str = ''
    correction_rank: int = 0  # dflash: rank of the left-to-right correction, 0 = none
    mrope_interleaved: bool = True  # the target's, see `TextConfig`; read by 'mirror'
    qk_norm: bool = True  # RMSNorm on each query and key head; eagle3 of Llama layout has none
    own_head: bool = False  # a head of its own in place of rows of the target's
    layout: str = ''  # the public layout that it was converted from

    def __post_init__(self) -> None:
        """Raise ConfigurationError for the first value that cannot be."""
        for name, value, known in (('kind', self.kind, KINDS), ('rotary', self.rotary, ROTARIES)):
            if value not in known:
                raise ConfigurationError(f'draft {name} is {value!r}: use one of {known}')
        for name, low in (('block', 2), ('window', 0), ('num_layers', 1), ('draft_vocab', 0),
                          ('correction_rank', 0)):
            if getattr(self, name) < low:
                raise ConfigurationError(f'draft {name} is {getattr(self, name)}: '
                                         f'use {low} or more')
        if self.kind == 'eagle3' and (self.num_layers, self.correction_rank) != (1, 0):
            raise ConfigurationError(f'an eagle3 draft has one layer, not {self.num_layers}, and '
                                     f'no correction of rank {self.correction_rank}: set '
                                     'num_layers to 1 and correction_rank to 0')
        if self.kind == 'dflash' and (self.own_head or not self.qk_norm):
            raise ConfigurationError('a dflash draft uses the head of its target and QK-norm: set '
                                     'own_head to false and qk_norm to true')
        if self.draft_vocab > self.target_vocab:
            raise ConfigurationError(f'draft_vocab {self.draft_vocab} exceeds the vocabulary '
                                     f'of {self.target_vocab} ids: use 0 for the whole head')
        if not self.taps or tuple(sorted(set(self.taps))) != self.taps:
            raise ConfigurationError(f'draft taps are {self.taps}: give rising layer numbers')

    @property
    def text(self) -> TextConfig:
        """Return the shapes of the draft's own layers as a decoder's."""
        return TextConfig(self.target_vocab, self.hidden_size, self.num_layers, self.num_heads,
                          self.num_kv_heads, self.head_dim, self.intermediate_size,
                          self.mrope_section, self.rope_theta, self.rms_norm_eps,
                          qk_norm=self.qk_norm)

    @property
    def label(self) -> str:
        """Return the systematic name, such as dflash-l2-b16-w8-flat or eagle3-b8-wall-flat-rv."""
        layers = f'-l{self.num_layers}' if self.kind == 'dflash' else ''
        reduced = '-rv' if self.draft_vocab else ''
        corrected = f'-c{self.correction_rank}' if self.correction_rank else ''
        return (f'{self.kind}{layers}-b{self.block}-w{self.window or "all"}-{self.rotary}'
                f'{reduced}{corrected}')

    @property
    def head_rows(self) -> int:
        """Return V_d, the number of ids that the draft can propose among."""
        return self.draft_vocab or self.target_vocab

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; `from_dict` reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> DraftConfig:
        """Build a configuration from `to_dict` output; ConfigurationError if it does not fit."""
        try:
            values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value
                                      for key, value in data.items()}
            return DraftConfig(**values)
        except TypeError as error:
            raise ConfigurationError(f'not a draft configuration ({error}): '
                                     'write it with DraftConfig.to_dict') from error


def spread(count: int, first: int, last: int) -> tuple[int, ...]:
    """Return `count` whole numbers evenly from first to last, rounded; one: the last."""
    if count == 1:
        return (last,)
    step = (last - first) / (count - 1)
    return tuple(int(first + step * i + 0.5) for i in range(count))


def dflash_taps(layers: int) -> tuple[int, ...]:
    """
    Return the tapped layers of a DFlash draft for a target of that many layers.

    Deep targets: five layers evenly from 1 to N - 3 (arXiv 2602.06036), (1, 9, 17, 25, 33) at
    N = 36. Shallow ones: up to three layers evenly from 1 to the last, (1, 2, 3) at N = 4.
    """
    if layers >= DEEP:
        return spread(5, 1, layers - 3)
    return spread(min(3, layers - 1), 1, layers - 1) if layers > 1 else (0,)


def eagle3_taps(layers: int) -> tuple[int, ...]:
    """
    Return the tapped layers of an EAGLE-3 draft: low, middle and high.

    Deep targets: the inputs of layers 2, N / 2 and N - 3 (arXiv 2503.01840), which are the
    outputs of (1, 17, 32) at N = 36. Shallow ones: as `dflash_taps`.
    """
    if layers >= DEEP:
        return (1, layers // 2 - 1, layers - 4)
    return dflash_taps(layers)


def _config(profile: BackboneConfig, values: dict[str, Any], over: dict[str, Any]) -> DraftConfig:
    text = profile.text
    middle = text.intermediate_size if text.hidden_size >= WIDE else text.hidden_size * 3 // 2
    shared = {'hidden_size': text.hidden_size, 'num_heads': text.num_heads,
              'num_kv_heads': text.num_kv_heads, 'head_dim': text.head_dim,
              'intermediate_size': middle, 'rope_theta': text.rope_theta,
              'mrope_section': text.mrope_section, 'rms_norm_eps': text.rms_norm_eps,
              'mrope_interleaved': text.mrope_interleaved,
              'draft_vocab': 0, 'target_vocab': text.vocab_size}
    cfg = DraftConfig.from_dict({**shared, **values, **over})
    return cfg if cfg.name else replace(cfg, name=cfg.label)


def dflash_config(profile: BackboneConfig, **over: Any) -> DraftConfig:
    """Return a DFlash draft for a profile: 2 layers, block 16, window 8, flat, whole head."""
    values = {'kind': 'dflash', 'block': 16, 'window': 8, 'rotary': 'flat', 'num_layers': 2,
              'taps': dflash_taps(profile.text.num_layers)}
    return _config(profile, values, over)


def eagle3_config(profile: BackboneConfig, **over: Any) -> DraftConfig:
    """Return an EAGLE-3 draft for a profile: block 8 (gamma 7), window 8, flat, whole head."""
    values = {'kind': 'eagle3', 'block': 8, 'window': 8, 'rotary': 'flat', 'num_layers': 1,
              'taps': eagle3_taps(profile.text.num_layers)}
    return _config(profile, values, over)


class DraftRotary:
    """The rotary of a draft; flat and mirror differ in these tables and nowhere else."""

    @staticmethod
    def tables(cfg: DraftConfig, flat_index: Tensor,
               positions3: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """
        Return cos and sin (..., S, head_dim) fp32.

        flat_index: (..., S) running index, every image token counted as one; read by 'flat'.
        positions3: (..., 3, S) axes T, H, W as `sequence_positions` returns; read by 'mirror'.
        """
        if cfg.rotary == 'flat':
            return flat_cos_sin(flat_index, cfg.head_dim, cfg.rope_theta)
        if positions3 is None:
            raise ValueError('a mirror draft needs three-axis positions')
        return mrope_cos_sin(positions3, cfg.head_dim, cfg.rope_theta, cfg.mrope_section,
                             cfg.mrope_interleaved)

    @staticmethod
    def sequence_positions(prompt: Tensor, length: int | Tensor, rope_delta: int | Tensor,
                           rows: int) -> Tensor:
        """
        Return the target's three-axis positions of indexes 0 .. rows - 1, (..., 3, rows).

        prompt: (..., 3, P) int64; its first `length` columns are the prompt's. From there on
        all axes are index + rope_delta. length, rope_delta: ints or (...) tensors.
        """
        index = torch.arange(rows, device=prompt.device)
        if isinstance(length, Tensor):
            length = length[..., None, None]
        if isinstance(rope_delta, Tensor):
            rope_delta = rope_delta[..., None, None]
        known = functional.pad(prompt, (0, rows - prompt.shape[-1]))
        return torch.where(index < length, known, index + rope_delta)


@dataclass(frozen=True)
class Shared:
    """Frozen matrices of the target that a draft uses, all without gradient."""

    embedding: Tensor  # (V, H)
    head: Tensor  # (V, H), of every id
    rows: tuple[Tensor, ...]  # views or copies of head rows, in draft order, without the gap
    gap: tuple[int, int]  # draft ids that are never proposed lie in [gap[0], gap[1])
    forbidden: tuple[int, int]  # target ids that never appear in a CoC


class Draft(nn.Module):
    """Base of both kinds. Its parameters are its own; `bind` lends it the target's tables."""

    draft_ids: Tensor | None

    def __init__(self, cfg: DraftConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.fc = nn.Linear(len(cfg.taps) * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.norm = RmsNorm(cfg.hidden_size, cfg.rms_norm_eps)
        ids = torch.arange(cfg.draft_vocab) if cfg.draft_vocab else None
        self.register_buffer('draft_ids', ids)
        self.own_head = nn.Parameter(torch.zeros(cfg.head_rows, cfg.hidden_size)) \
            if cfg.own_head else None
        self._lent: Shared | None = None

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights and, with a reduced head, its ids."""
        out = super().load_state_dict(*args, **kwargs)
        self._slice_head()
        return out

    def twin(self) -> Self:
        """Return a copy with weights of its own and the same tables of the target."""
        return copy.deepcopy(self, {id(self._lent): self._lent})

    def num_parameters(self) -> int:
        """Return the number of the draft's own weights."""
        return sum(weight.numel() for weight in self.parameters())

    def bind(self, text: TextDecoder, tokens: SaidIds) -> Self:
        """
        Lend the draft the target's embedding and head; call it after any move of either.

        ConfigurationError when width, vocabulary or rotary of the target are others.
        """
        cfg, found = self.cfg, text.cfg
        wanted: list[tuple[str, Any]] = [
            ('hidden_size', cfg.hidden_size), ('vocab_size', cfg.target_vocab)]
        # what is trained here has the target's base; another one would be a lost setting
        wanted += [] if cfg.layout else [('rope_theta', cfg.rope_theta)]
        if cfg.rotary == 'mirror':
            wanted += [('head_dim', cfg.head_dim), ('mrope_section', cfg.mrope_section),
                       ('mrope_interleaved', cfg.mrope_interleaved)]
        for name, value in wanted:
            if getattr(found, name) != value:
                raise ConfigurationError(f'draft {cfg.name} was made for a target of {name} '
                                         f'{value}, not {getattr(found, name)}: train another')
        if cfg.taps[-1] >= found.num_layers:
            raise ConfigurationError(f'draft {cfg.name} taps layer {cfg.taps[-1]} of a target '
                                     f'of {found.num_layers} layers: train another')
        self._lent = Shared(text.embed_tokens.weight.detach(), text.lm_head.weight.detach(),
                            (), (0, 0), (tokens.forbidden_start, tokens.forbidden_end))
        self._slice_head()
        return self

    @property
    def shared(self) -> Shared:
        """Return what `bind` lent; EngineError before."""
        if self._lent is None:
            raise EngineError(f'draft {self.cfg.name} has no target: call bind first')
        return self._lent

    def set_vocabulary(self, ids: Sequence[int] | Tensor) -> None:
        """Choose the target ids (V_d, rising) of a reduced head."""
        chosen = torch.as_tensor(ids, dtype=torch.int64)
        if self.draft_ids is None or chosen.shape != self.draft_ids.shape:
            raise ConfigurationError(f'{len(chosen)} ids for a head of {self.cfg.draft_vocab} '
                                     'rows: draft_vocab must be their number')
        outside = chosen[0] < 0 or chosen[-1] >= self.cfg.target_vocab
        if outside or bool((chosen.diff() <= 0).any()):
            raise ConfigurationError('the ids of a reduced head must rise and lie in 0 .. '
                                     f'{self.cfg.target_vocab - 1}')
        self.draft_ids.copy_(chosen)
        self._slice_head()

    def _slice_head(self) -> None:
        """Lay out the head's rows for the current vocabulary."""
        lent = self._lent
        if lent is None:
            return
        first, last = lent.forbidden
        rows: tuple[Tensor, ...]
        if self.draft_ids is None:
            gap = (first, last)
            rows = (lent.head[:first], lent.head[last:])
        else:
            gap = (self.cfg.draft_vocab,) * 2
            rows = (lent.head[self.draft_ids] if self.own_head is None else self.own_head,)
            if bool(((self.draft_ids >= first) & (self.draft_ids < last)).any()):
                raise ConfigurationError(f'the reduced head of {self.cfg.name} holds ids in '
                                         f'{first} .. {last - 1}, which no CoC has: drop them')
        self._lent = replace(lent, rows=rows, gap=gap)

    def embed(self, ids: Tensor) -> Tensor:
        """Return (..., H), the target's embedding of target ids."""
        return functional.embedding(ids, self.shared.embedding).to(self.fc.weight.dtype)

    def fuse(self, taps: Tensor) -> Tensor:
        """Return one feature (Bt, S, H) per position from tapped states (n_f, Bt, S, H)."""
        joined = torch.cat(taps.unbind(0), dim=-1).to(self.fc.weight.dtype)
        out: Tensor = self.fc(joined)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """
        Return logits (..., V_d) of normed states (..., H) through the target's head.

        Ids that never appear in a CoC get -inf.
        """
        shared = self.shared
        parts = [functional.linear(hidden.to(rows.dtype), rows) for rows in shared.rows]
        if shared.gap[1] > shared.gap[0]:
            shape = (*hidden.shape[:-1], shared.gap[1] - shared.gap[0])
            parts.insert(1, parts[0].new_full(shape, float('-inf')))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def target_ids(self, chosen: Tensor) -> Tensor:
        """Return the target ids of head rows (...) int64."""
        return chosen if self.draft_ids is None else self.draft_ids[chosen]

    def draft_index(self, ids: Tensor) -> Tensor:
        """Return the head rows (...) int64 of target ids, -1 where the head has none."""
        if self.draft_ids is None:
            return ids
        at = torch.searchsorted(self.draft_ids, ids).clamp_(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[at] == ids, at, -1)

    def _normal(self, generator: torch.Generator, depth: int) -> None:
        """Draw every matrix with std fan_in^-1/2, those that end a residual branch smaller."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = (2 * depth) ** -0.5 if name.endswith(('o_proj.weight',
                                                              'down_proj.weight')) else 1.0
                drawn = torch.randn(weight.shape, generator=generator)
                weight.data.copy_(drawn * scale * weight.shape[1] ** -0.5)
            elif name.endswith('norm.weight'):
                weight.data.fill_(1.0)

    def _average_taps(self) -> None:
        """Let the fused feature begin as the mean of the tapped states, plus what was drawn."""
        count, size = len(self.cfg.taps), self.cfg.hidden_size
        mean = torch.eye(size, device=self.fc.weight.device).repeat(1, count) / count
        self.fc.weight.data.mul_(0.1).add_(mean)


def copy_matching(source: nn.Module, destination: nn.Module) -> list[str]:
    """Copy the weights of equal name and shape; return their names."""
    given = dict(source.named_parameters())
    copied = []
    for name, weight in destination.named_parameters():
        if name in given and given[name].shape == weight.shape:
            weight.data.copy_(given[name].detach())
            copied.append(name)
    return copied
