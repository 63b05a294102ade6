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
"""Settings of a draft's training: which network, which data, how it is optimised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.draft import dflash_config, DraftConfig, eagle3_config, KINDS
from rspec_planner.train.draft_batch import CONTEXTS
from rspec_planner.train.draft_objective import LossOptions
from rspec_planner.train.settings import read_settings


@dataclass(frozen=True)
class DraftSettings:
    """Everything that `rspec train dflash` and `rspec train eagle3` can be told."""

    kind: str = 'dflash'
    # network
    layers: int = 2  # of a dflash draft
    block: int = 16  # the anchor and block - 1 proposals
    window: int = 8  # context rows, 0 = the whole prompt
    rotary: str = 'flat'  # or 'mirror'
    taps: str = ''  # target layers such as '0,1,2'; empty: the rule of the kind
    reduced_vocab: bool = False  # head over the ids of the training texts
    warm_start: bool = True  # copy what fits from the target's layers
    context: str = 'all'  # 'text' hides image columns from a draft without a window
    # data
    seed: int = 0
    workers: int = 0  # render processes; 0: processors minus two
    train_clips: int = 0  # 0: the whole train split
    extra_clips: int = 0  # clips beyond the split
    drive_share: float = 0.5  # of the training pairs: seen in mid-manoeuvre, see world/onward
    test_clips: int = 0  # of each of val, on-shelf and off-shelf; 0: the whole split
    batch_clips: int = 64  # of one step, over all processes
    # optimisation
    epochs: float = 20.0
    minutes: float = 0.0  # 0: no limit; else the schedule also ends by this training time
    learning_rate: float = 2e-3
    warmup_fraction: float = 0.04
    final_lr_fraction: float = 0.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    ema_decay: float = 0.0  # 0: no average of the weights
    precision: str = 'bf16'  # products in training; evaluation is fp32
    graph: bool = True  # capture the step as a CUDA graph
    evaluate_epochs: float = 2.0
    checkpoint_s: float = 120.0
    keep_state: bool = True  # write OUT/state.pt, 20 bytes a weight, from which --resume goes on
    # loss, see draft_objective.LossOptions
    gamma: float = 0.0
    decay: float = 0.8
    unroll: int = 0
    first_weight: float = 1.0
    soft_weight: float = 0.0
    confidence: float = 0.0
    random_masks: bool = False
    partial_blocks: bool = True  # False: only anchors with a whole block of text behind them
    tap_noise: float = 0.0

    def __post_init__(self) -> None:
        """Check ranges that would otherwise fail late; raise ConfigurationError."""
        for name, allowed in (('kind', KINDS), ('context', CONTEXTS),
                              ('precision', ('bf16', 'fp32'))):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f'{name}={getattr(self, name)!r}: choose one of '
                                         f'{", ".join(allowed)}')
        if not 0.0 <= self.drive_share <= 1.0:
            raise ConfigurationError(f'drive_share={self.drive_share}: choose a share from 0 to '
                                     '1, such as 0.5')
        for name in ('batch_clips', 'epochs', 'learning_rate', 'evaluate_epochs'):
            if getattr(self, name) <= 0:
                raise ConfigurationError(
                    f'{name}={getattr(self, name)}: must be positive; correct the config')
        if not 0.0 <= self.ema_decay < 1.0:
            raise ConfigurationError(f'ema_decay={self.ema_decay}: choose 0 for none, or a value '
                                     'below 1 such as 0.998')
        self.tap_layers()

    def tap_layers(self) -> tuple[int, ...]:
        """Return the chosen target layers, empty for the rule of the kind."""
        try:
            return tuple(int(part) for part in self.taps.split(',') if part.strip())
        except ValueError:
            raise ConfigurationError(f'taps={self.taps!r}: give layer numbers such as '
                                     "'0,1,2'") from None

    def draft_config(self, profile: ProfileConfig,
                     vocabulary: Sequence[int] | None = None) -> DraftConfig:
        """Return the network; `vocabulary` are the ids of a reduced head."""
        over: dict[str, Any] = {'block': self.block, 'window': self.window,
                                'rotary': self.rotary}
        layers = profile.text.num_layers
        if self.tap_layers():
            over['taps'] = self.tap_layers()
            if max(self.tap_layers()) >= layers:
                raise ConfigurationError(f'taps={self.taps!r}: the target has layers 0 .. '
                                         f'{layers - 1}; choose among them')
        elif not self.window:
            # the last layer runs for a few rows only: its states do not exist for a whole prompt
            over['taps'] = whole_prompt_taps(layers)
        if self.reduced_vocab:
            over['draft_vocab'] = len(vocabulary or ())
        if self.kind == 'eagle3':
            return eagle3_config(profile, **over)
        return dflash_config(profile, num_layers=self.layers, **over)

    def loss_options(self) -> LossOptions:
        """Return the part that the objective reads."""
        return LossOptions(gamma=self.gamma, decay=self.decay, unroll=self.unroll,
                           first_weight=self.first_weight, soft_weight=self.soft_weight,
                           confidence=self.confidence, random_masks=self.random_masks,
                           partial_blocks=self.partial_blocks, tap_noise=self.tap_noise)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


def whole_prompt_taps(layers: int) -> tuple[int, ...]:
    """Return up to three of the layers below the last, evenly, (0, 1, 2) at N = 4."""
    last = max(layers - 2, 0)
    count = min(3, last + 1)
    return tuple(round(last * i / max(count - 1, 1)) for i in range(count))


def load_draft_settings(kind: str, path: str | Path | None, **overrides: Any) -> DraftSettings:
    """
    Return the settings of a YAML file with overrides; None values are not overrides.

    Raises ConfigurationError for an unreadable file, an unknown key or a wrong type.
    """
    return DraftSettings(**{**read_settings(DraftSettings, path, overrides), 'kind': kind})
