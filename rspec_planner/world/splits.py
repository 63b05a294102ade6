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
Which clips belong to which split.

Twins share a split. Seeds are blake2(split, family, index): disjoint by construction, and a
changed catalogue does not shift the clips of other families.
"""

from __future__ import annotations

import hashlib

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.clip import ClipSpec
from rspec_planner.world.scenarios import DOUBLES, FAMILIES, OFF_SHELF

SIZES = {'train': 11_655, 'val': 300, 'on-shelf': 200, 'off-shelf': 290}
SPLITS = tuple(SIZES)
#: clips of each off-shelf part, in order
OFF_SHELF_PARTS = {'combination': 80, 'double': 60, 'family': 70, 'rig': 80}
#: people are the hardest to see, and the free road lasts longest: these come more often
_WEIGHTS = {'crosswalk': 5, 'dart_out': 4, 'right_turn': 5, 'person_and_sign': 5,
            'person_and_green': 5, 'parked_and_person': 5, 'free_road': 9}
_USUAL_WEIGHT = 4


def seed_of(spec: ClipSpec) -> int:
    """Return the 64-bit seed that both twins of a pair share."""
    text = f'{spec.split}/{spec.variant}/{spec.family}/{spec.index}'.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), 'big')


def _cycle(families: tuple[str, ...]) -> list[str]:
    """Return the families in a repeating order, each as often as its weight, evenly spread."""
    turns = []
    for rank, family in enumerate(families):
        weight = _WEIGHTS.get(family, _USUAL_WEIGHT)
        turns += [((turn + rank / len(families)) / weight, family) for turn in range(weight)]
    return [family for _, family in sorted(turns, key=lambda item: item[0])]


def _pairs(split: str, families: tuple[str, ...], clips: int, variant: str = ''
           ) -> list[ClipSpec]:
    """Return `clips` specs, twins adjacent, the last one single if the count is odd."""
    order = _cycle(families)
    used = dict.fromkeys(families, 0)
    specs: list[ClipSpec] = []
    while len(specs) < clips:
        family = order[(len(specs) // 2) % len(order)]
        index = used[family]
        used[family] += 1
        specs += [ClipSpec(split, family, index, event, variant) for event in (True, False)]
    return specs[:clips]


def split_specs(split: str, clips: int | None = None) -> list[ClipSpec]:
    """
    Return the specs of a split, twins adjacent; `clips` scales it (default: SIZES).

    Raises ConfigurationError for an unknown split or a count below 1.
    """
    if split not in SIZES:
        raise ConfigurationError(f'split {split!r} is unknown; use one of {", ".join(SPLITS)}, '
                                 'or extra_spec(i) for unlimited training clips')
    count = SIZES[split] if clips is None else clips
    if count < 1:
        raise ConfigurationError(f'clips {count} is too small; ask for at least 1')
    if split != 'off-shelf':
        return _pairs(split, FAMILIES, count)
    specs: list[ClipSpec] = []
    total = sum(OFF_SHELF_PARTS.values())
    shares = {part: 2 * round(size * count / total / 2) for part, size in OFF_SHELF_PARTS.items()}
    shares['combination'] += count - sum(shares.values())
    for part, families in (('combination', FAMILIES), ('double', tuple(DOUBLES)),
                           ('family', tuple(OFF_SHELF)), ('rig', FAMILIES)):
        specs += _pairs(split, families, max(0, shares[part]), part)
    return specs


def extra_spec(i: int) -> ClipSpec:
    """
    Return the i-th clip of an endless stream like the training split, with other seeds.

    Clips 2k and 2k + 1 are twins. Raises ConfigurationError for a negative index.
    """
    if i < 0:
        raise ConfigurationError(f'extra clip {i} is negative; use 0 or more')
    order = _cycle(FAMILIES)
    pair = i // 2
    return ClipSpec('extra', order[pair % len(order)], pair, i % 2 == 0)
