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
"""Settings of the action-aware post-training of drafts, one YAML file like the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rspec_planner.errors import ConfigurationError
from rspec_planner.train.settings import read_settings

STARTS = ('rejected', 'geometric')
ANCHORS = ('static', 'live', 'none', 'weighted_all')


@dataclass(frozen=True)
class AarlSettings:
    """
    Everything that `rspec train aarl` can be told; counts are per process.

    A step takes batch_clips clips, one block of each.
    """

    # run
    seed: int = 0
    max_steps: int = 600
    minutes: float = 0.0  # wall clock from the first step, checked at checkpoints; 0: no limit
    checkpoint_every: int = 50  # steps between validations
    clips: int = 0  # of the train split in the cache; 0: all
    keep_state: bool = True  # write OUT/state.pt, from which --resume goes on
    drift_clips: int = 512  # training clips whose right positions are counted at checkpoints
    # policy
    batch_clips: int = 64
    samples: int = 5  # K rollouts of a block
    positions: int = 3  # N: first wrong positions of a block that are sampled
    start: str = 'rejected'  # or 'geometric', see `choose_starts`
    # reward
    trajectory_weight: float = 1.0
    text_weight: float = 0.5
    noise_draws: int = 2
    flow_steps: int = 0  # 0: as many as the planner
    reward_precision: str = 'bf16'  # of the planning target on a GPU; 'fp32'
    normalise: bool = True  # advantages over max(standard deviation, std_floor)
    std_floor: float = 0.05
    reward_rows: int = 512  # plans made at once; bounds the memory of a step
    # what was right already
    anchors: str = 'static'  # 'live', 'none', 'weighted_all', see `anchor_weights`
    kl_weight: float = 0.02
    # optimisation
    learning_rate: float = 3e-5
    warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        """Check ranges that would otherwise fail late; raise ConfigurationError."""
        least = {'max_steps': 1, 'checkpoint_every': 1, 'batch_clips': 1, 'samples': 2,
                 'positions': 1, 'noise_draws': 1, 'reward_rows': 1, 'clips': 0,
                 'drift_clips': 1, 'warmup_steps': 0, 'flow_steps': 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigurationError(
                    f'{name}={getattr(self, name)}: use {low} or more in the training config')
        for name in ('learning_rate', 'std_floor', 'grad_clip'):
            if getattr(self, name) <= 0.0:
                raise ConfigurationError(
                    f'{name}={getattr(self, name)}: must be positive; correct the training config')
        choices = {'start': STARTS, 'anchors': ANCHORS, 'reward_precision': ('bf16', 'fp32')}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(
                    f'{name}={getattr(self, name)!r}: choose one of {", ".join(allowed)}')

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


def load_aarl_settings(path: str | Path | None, **overrides: Any) -> AarlSettings:
    """Return the settings of a YAML file with overrides, see `read_settings`."""
    return AarlSettings(**read_settings(AarlSettings, path, overrides))
