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
"""Splits: exact counts, twins side by side, seeds that never meet."""

import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError
from rspec_planner.world.scenarios import FAMILIES
from rspec_planner.world.scenarios.base import held_out, VEHICLES, WEATHERS
from rspec_planner.world.splits import (
    extra_spec,
    OFF_SHELF_PARTS,
    seed_of,
    split_specs,
    SPLITS,
)


def test_counts():
    assert {s: len(split_specs(s)) for s in SPLITS} == {
        'train': 11_655, 'val': 300, 'on-shelf': 200, 'off-shelf': 290}
    parts = [spec.variant for spec in split_specs('off-shelf')]
    assert {p: parts.count(p) for p in OFF_SHELF_PARTS} == OFF_SHELF_PARTS


@pytest.mark.parametrize('split', SPLITS)
def test_twins_are_adjacent_and_specs_unique(split):
    specs = split_specs(split)
    assert len(set(specs)) == len(specs)
    for a, b in zip(specs[::2], specs[1::2]):
        assert a.pair_id == b.pair_id and a.event and not b.event
    assert {s.family for s in specs if s.variant in ('', 'combination')} == set(FAMILIES)


def test_seeds_are_disjoint():
    pairs = [s for split in SPLITS for s in split_specs(split) if s.event]
    pairs += [extra_spec(2 * i) for i in range(5000)]
    assert len({seed_of(s) for s in pairs}) == len(pairs)


def test_scaling_keeps_the_shares():
    specs = split_specs('off-shelf', 2900)
    assert len(specs) == 2900
    for part, size in OFF_SHELF_PARTS.items():
        assert sum(s.variant == part for s in specs) == 10 * size
    assert split_specs('on-shelf', 40) == split_specs('on-shelf')[:40]


def test_extra_stream_has_twins_of_every_family():
    specs = [extra_spec(i) for i in range(400)]
    assert all(a.pair_id == b.pair_id for a, b in zip(specs[::2], specs[1::2]))
    assert {s.family for s in specs} == set(FAMILIES)


def test_each_family_keeps_back_one_combination_per_sign():
    for family in FAMILIES:
        for sign in (-1, 0, 1):
            kept = [(w, v) for w in WEATHERS for v in VEHICLES if held_out(family, w, v, sign)]
            assert len(kept) == 1


def test_unknown_split_is_named():
    with pytest.raises(ConfigurationError, match="split 'dev' is unknown"):
        split_specs('dev')
    with pytest.raises(ConfigurationError, match='too small'):
        split_specs('val', 0)


def test_the_free_road_comes_about_twice_as_often_and_evenly():
    places = [i for i in range(2400) if extra_spec(2 * i).family == 'free_road']
    others = [i for i in range(2400) if extra_spec(2 * i).family == 'parked']
    assert 2.0 <= len(places) / len(others) <= 2.5
    assert 4 < np.diff(places).min() and np.diff(places).max() < 24
