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
"""Settings of a training run: one YAML file, every key checked, overrides on top."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
import difflib
from pathlib import Path
from typing import Any

import yaml

from rspec_planner.errors import ConfigurationError


@dataclass(frozen=True)
class TargetSettings:
    """
    Everything that `rspec train target` can be told.

    Times are wall clock from the start of the process; counts are per GPU.
    """

    # time
    minutes: float = 8.5  # the whole run, rendering start-up and final evaluation included
    reserve_s: float = 25.0  # kept free at the end for evaluation and export
    warmup_s: float = 20.0  # of the learning rate, from the first step
    checkpoint_every_s: float = 120.0
    evaluate_every_s: float = 60.0
    report_every_s: float = 10.0
    max_steps: int = 0  # 0: until the time is over
    # data
    seed: int = 0
    workers: int = 0  # 0: processors of this process minus two, at most 14
    pool_clips: int = 20_000  # 3.5 MB each; on the GPU when there is one
    start_clips: int = 1_500  # training starts when so many are rendered
    train_clips: int = 0  # 0: the whole train split
    extra_clips: bool = True  # after the split go on with unlimited extra clips
    extra_offset: int = 0  # first extra pair; move it when a run is continued
    val_clips: int = 300
    drive_share: float = 0.5  # of the training pairs: seen in mid-manoeuvre, see world/onward
    val_drive_clips: int = 200  # of the validation split, the same way
    # optimisation
    batch_clips: int = 64  # both twins of a pair sit in the same batch
    learning_rate: float = 2e-3
    final_lr_fraction: float = 0.02
    matrix_optimizer: str = 'muon'  # 'adamw' or 'muon' for the matrices of the blocks
    muon_learning_rate: float = 0.02
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    ema_decay: float = 0.998
    precision: str = 'bf16'  # 'bf16' or 'fp32'; bf16 needs a GPU to be fast
    compile: bool = False
    # losses
    deliberative_weight: float = 3.0  # of a token that only the images determine
    flow_weight: float = 1.0
    flow_samples: int = 6  # noise samples and times per clip that share one K/V cache
    quiet_samples: int = 0  # of them, with their noise made smaller
    path_weight: float = 0.0  # of the metres that velocity errors add up to
    noise_scale: float = 1.0  # of the noise from which the planner samples; 0: always the same
    expert_gradient: float = 0.2  # 0: K/V detached from the flow loss, as published
    decision_weight: float = 0.5  # auxiliary head on pooled vision features
    object_weight: float = 0.5  # auxiliary head: what stands in each merged patch
    # augmentation
    pitch_deg: float = 1.2
    yaw_deg: float = 0.4
    shift_px: int = 2
    brightness: float = 0.12
    contrast: float = 0.15
    noise: float = 0.02

    def __post_init__(self) -> None:
        """Check ranges that would otherwise fail late; raise ConfigurationError."""
        for name in ('minutes', 'batch_clips', 'pool_clips', 'learning_rate', 'flow_samples'):
            if getattr(self, name) <= 0:
                raise ConfigurationError(
                    f'{name}={getattr(self, name)}: must be positive; correct the training config')
        if self.batch_clips % 2:
            raise ConfigurationError(
                f'batch_clips={self.batch_clips}: twins share a batch; choose an even number')
        if not 0 <= self.quiet_samples <= self.flow_samples:
            raise ConfigurationError(f'quiet_samples={self.quiet_samples}: choose 0 to '
                                     f'flow_samples={self.flow_samples}')
        if not 0.0 <= self.noise_scale <= 1.0:
            raise ConfigurationError(f'noise_scale={self.noise_scale}: choose 0 to 1')
        if not 0.0 <= self.drive_share <= 1.0:
            raise ConfigurationError(f'drive_share={self.drive_share}: choose a share from 0 to '
                                     '1, such as 0.5')
        choices = {'matrix_optimizer': ('adamw', 'muon'), 'precision': ('bf16', 'fp32')}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(
                    f'{name}={getattr(self, name)!r}: choose one of {", ".join(allowed)}')

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


def load_settings(path: str | Path | None, **overrides: Any) -> TargetSettings:
    """Return the settings of a YAML file with overrides, see `read_settings`."""
    return TargetSettings(**read_settings(TargetSettings, path, overrides))


def add_options(parser: argparse.ArgumentParser, kind: Any, leave_out: str = '') -> None:
    """Give a parser one option for each field of a settings dataclass but `leave_out`."""
    group = parser.add_argument_group('settings (override the config file)')
    for field in fields(kind):
        name = '--' + field.name.replace('_', '-')
        if field.name == leave_out:
            continue
        if isinstance(field.default, bool):
            group.add_argument(name, action=argparse.BooleanOptionalAction, default=None)
        else:
            group.add_argument(name, type=type(field.default), metavar=str(field.default))


def read_settings(kind: Any, path: str | Path | None,
                  overrides: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return checked values for a dataclass of settings; None values are not overrides.

    Raises ConfigurationError for an unreadable file, an unknown key or a wrong type.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values.update(_read_yaml(Path(path)))
    values.update({key: value for key, value in overrides.items() if value is not None})
    return _checked(kind, values)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise ConfigurationError(
            f'{path}: cannot be read ({error.strerror}); give --config an existing file') from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f'{path}: not YAML ({str(error).splitlines()[0]}); '
                                 'correct the file') from None
    if not isinstance(data, Mapping):
        raise ConfigurationError(f'{path}: holds no mapping; write one `key: value` a line')
    return dict(data)


def _checked(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(kind)}
    result: dict[str, Any] = {}
    for key, value in values.items():
        if key not in defaults:
            near = difflib.get_close_matches(str(key), list(defaults), n=1)
            hint = f'did you mean {near[0]}?' if near else 'remove it'
            raise ConfigurationError(f'{key}: unknown training setting; {hint}')
        result[key] = _cast(key, value, type(defaults[key]))
    return result


def _cast(key: str, value: Any, kind: type) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return value
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float('nan')
        if number == number and (kind is float or number == int(number)):
            return kind(number)
    raise ConfigurationError(f'{key}={value!r}: must be of type {kind.__name__}')
