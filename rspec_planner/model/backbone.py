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
What decoding needs of a model, whichever it is: a text decoder, and how its prompt is laid out.

`Target` (Alpamayo) and `AutoVla` both are backbones. Executors of prefill and verify, and the
drafts, are written against this, so that one loop serves both.
"""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import nn

from rspec_planner.model.config import TextConfig
from rspec_planner.model.layer import DecoderLayer
from rspec_planner.model.text import TextDecoder

#: spread of the tables of tokens and positions before training
EMBEDDING_STD = 0.02


class SaidIds(Protocol):
    """Ids that decide what can be said, and where images stand."""

    @property
    def image_pad(self) -> int:
        """Return the id of the prompt's slots that visual features fill."""

    @property
    def forbidden_start(self) -> int:
        """Return the first id that is never said."""

    @property
    def forbidden_end(self) -> int:
        """Return the first id behind those that are never said."""


class VisualConfig(Protocol):
    """What a decoder must know of its vision tower."""

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Return the tower's blocks whose output is added inside the decoder."""


class BackboneConfig(Protocol):
    """Shapes and ids of a backbone."""

    @property
    def text(self) -> TextConfig:
        """Return the shapes of the text decoder."""

    @property
    def tokens(self) -> SaidIds:
        """Return the ids by name."""

    @property
    def vision(self) -> VisualConfig:
        """Return the shapes of the vision tower."""

    @property
    def num_images(self) -> int:
        """Return how many images, or pairs of video frames, a prompt holds."""

    @property
    def tokens_per_image(self) -> int:
        """Return the visual tokens of one of them."""


class Backbone(Protocol):
    """A model that reads a prompt and says tokens."""

    @property
    def cfg(self) -> BackboneConfig:
        """Return shapes and ids."""

    @property
    def text(self) -> TextDecoder:
        """Return the decoder."""

    @property
    def device(self) -> torch.device:
        """Return where the weights live."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""


class BackboneModel(nn.Module):
    """What the networks that are a `Backbone` share."""

    text: TextDecoder

    def pack(self) -> Self:
        """Join projections for inference, see `DecoderLayer.pack`; call it after any move."""
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                module.pack()
        return self

    @property
    def device(self) -> torch.device:
        """Return where the weights live."""
        return self.text.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return self.text.embed_tokens.weight.dtype

    def num_parameters(self) -> int:
        """Return the number of weights, a tied table counted once."""
        return sum(weight.numel() for weight in self.parameters())
