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
Read typed fields of somebody else's config.json; a wrong one is named in one line.

Nothing is imported or executed: a Hydra `_target_`, a Python import path, only chooses among the
classes that the caller knows, by its last component.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
import math
from pathlib import Path
from typing import Any

from rspec_planner.errors import EngineError
from rspec_planner.model.bounded import read_bounded

RESTORE = 'download it again, or correct it by hand'
#: counts and sizes beyond these are no model of a released kind; what they would make is counted
#: layer by layer and multiplied, so that an edited file could cost hours, or overflow
_MOST = {
    **dict.fromkeys(('num_hidden_layers', 'depth'), 256), 'num_enc_layers': 32,
    **dict.fromkeys(('hidden_size', 'intermediate_size', 'out_hidden_size', 'head_dim',
                     'num_position_embeddings', 'num_fourier_feats'), 2 ** 17),
    **dict.fromkeys(('num_attention_heads', 'num_key_value_heads', 'num_heads', 'n_waypoints',
                     'num_inference_steps'), 1024),
    **dict.fromkeys(('patch_size', 'temporal_patch_size', 'spatial_merge_size', 'in_channels'),
                    64),
    'vocab_size': 2 ** 24, 'draft_vocab_size': 2 ** 24, 'min_pixels': 2 ** 26,
    'max_pixels': 2 ** 26,
}
#: numbers whose logarithm or root is taken
_POSITIVE = ('max_freq', 'rope_theta', 'rms_norm_eps')


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; EngineError names the file and what is wrong with it."""
    try:
        found = json.loads(read_bounded(path))
    except OSError as error:
        raise EngineError(f'{path} cannot be read ({error.strerror}): {RESTORE}') from None
    except (ValueError, RecursionError) as error:
        reason = ' '.join(str(error).split())
        raise EngineError(f'{path} is not valid JSON ({reason}): {RESTORE}') from None
    if not isinstance(found, dict):
        raise EngineError(f'{path} holds no JSON object: {RESTORE}')
    return found


class Fields:
    """One object of a config file, with the path of its fields for messages."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        """origin: file and, behind a colon, the path of this object, for messages."""
        self._values, self._origin = values, origin

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def fail(self, name: str, reason: str) -> EngineError:
        """Return the error for one field."""
        return EngineError(f'{self._origin}{name} {reason}: {RESTORE}')

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.fail(name, 'is missing')
        return value

    def child(self, name: str) -> Fields:
        """Return an object inside this one."""
        value = self._get(name, None)
        if not isinstance(value, dict):
            raise self.fail(name, f'is {_short(value)}, must be an object')
        return Fields(value, f'{self._origin}{name}.')

    def optional(self, name: str) -> Fields:
        """Return an object inside this one, an empty one where there is none."""
        return self.child(name) if name in self else Fields({}, f'{self._origin}{name}.')

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number of at least `least`, and no larger than any model has."""
        value = self._get(name, default)
        most = _MOST.get(name, 2 ** 31 - 1)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fail(name, f'is {_short(value)}, must be a whole number from {least} to '
                            f'{most}')
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) \
                or not math.isfinite(value):
            raise self.fail(name, f'is {_short(value)}, must be a finite number')
        if name in _POSITIVE and value <= 0:
            raise self.fail(name, f'is {_short(value)}, must be above zero')
        return float(value)

    def numbers(self, name: str, count: int, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return `count` finite numbers."""
        value = self._get(name, list(default))
        if not isinstance(value, list) or len(value) != count:
            raise self.fail(name, f'is {_short(value)}, must be a list of {count} numbers')
        listed = Fields({str(i): entry for i, entry in enumerate(value)},
                        f'{self._origin}{name}.')
        return tuple(listed.number(str(i)) for i in range(count))

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers from 0."""
        value = self._get(name, None)
        if not isinstance(value, list):
            raise self.fail(name, f'is {_short(value)}, must be a list')
        listed = Fields({str(i): entry for i, entry in enumerate(value)},
                        f'{self._origin}{name}.')
        return tuple(listed.integer(str(i), least=0) for i in range(len(value)))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings, () where there is none."""
        value = self._values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.fail(name, f'is {_short(value)}, must be a list of strings')
        return tuple(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.fail(name, f'is {_short(value)}, must be a string')
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, f'is {_short(value)}, must be true or false')
        return value

    def target(self, known: str) -> None:
        """Refuse a `_target_` whose last component is not the class that we have for it."""
        path = self.text('_target_', known)
        if path.rsplit('.', 1)[-1] != known:
            raise self.fail('_target_', f'is {_short(path)}, only {known} is known here')


def _short(value: Any) -> str:
    """Return a value as one short line."""
    line = ' '.join(repr(value).split())
    return line if len(line) <= 60 else f'{line[:57]}...'
