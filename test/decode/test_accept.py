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
"""Acceptance: prefix, bonus, first stop, limit."""

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from rspec_planner.decode.accept import accept, apply_follow

STOP = {9}


@pytest.mark.parametrize(('block', 'best', 'committed', 'stopped'), [
    ([1], [2], (2,), False),  # B = 1: greedy
    ([1], [9], (9,), True),
    ([1, 2, 3, 4], [2, 3, 4, 5], (2, 3, 4, 5), False),  # all accepted, bonus behind
    ([1, 2, 3, 4], [7, 3, 4, 5], (7,), False),  # nothing accepted: the bonus alone
    ([1, 2, 8, 4], [2, 3, 4, 5], (2, 3), False),  # a match behind a mismatch counts nothing
    ([1, 2, 9, 4], [2, 9, 4, 5], (2, 9), True),  # stop inside the block: the rest is dropped
    ([1, 2, 3, 9], [2, 3, 9, 5], (2, 3, 9), True),
    ([1, 2, 3], [2, 3, 9], (2, 3, 9), True),  # stop as bonus
    ([1, 9, 3], [2, 9, 3], (2,), False),  # a proposed stop that the target rejects
])
def test_cases(block, best, committed, stopped):
    taken = accept(block, best, STOP, limit=100)
    assert taken.committed == committed
    assert taken.stopped is stopped


@pytest.mark.parametrize(('block', 'best', 'limit', 'matched'), [
    ([1], [2], 9, 0),
    ([1, 2, 3, 4], [2, 3, 4, 5], 9, 3),  # the bonus is no proposal
    ([1, 2, 8, 4], [2, 3, 4, 5], 9, 1),
    ([1, 7, 3, 4], [2, 3, 4, 5], 9, 0),
    ([1, 2, 9, 4], [2, 9, 4, 5], 9, 2),  # a proposed stop: its row is written
    ([1, 2, 8, 4], [2, 9, 4, 5], 9, 1),  # a stop as bonus: it is not
    ([1, 2, 3, 4], [2, 3, 4, 5], 2, 2),  # the limit falls on a proposal
    ([1, 2, 8, 4], [2, 3, 4, 5], 2, 1),  # the limit falls on the bonus
])
def test_matched_counts_the_proposals_among_the_committed(block, best, limit, matched):
    assert accept(block, best, STOP, limit).matched == matched


def test_follow_dictates_what_stands_behind_a_token():
    assert apply_follow([1, 5, 6, 7], {5: 9}) == [1, 5, 9, 7]
    assert apply_follow([5, 6, 7], {5: 9}) == [5, 9, 7]  # the anchor counts
    assert apply_follow([1, 6, 5], {5: 9}) == [1, 6, 5]
    assert apply_follow([1, 5, 6, 6], {5: 8, 8: 9}) == [1, 5, 8, 9]
    assert apply_follow([5], {5: 9}) == [5]


def test_limit_cuts_the_block():
    taken = accept([1, 2, 3, 4], [2, 3, 4, 5], STOP, limit=2)
    assert taken.committed == (2, 3)
    assert not taken.stopped
    assert accept([1, 2, 9, 4], [2, 9, 4, 5], STOP, limit=2).stopped


@given(st.lists(st.integers(0, 9), min_size=1, max_size=16), st.data())
@settings(max_examples=300, deadline=None)
def test_against_the_definition(best, data):
    block = [0] + data.draw(st.lists(st.integers(0, 9), min_size=len(best) - 1,
                                     max_size=len(best) - 1))
    if data.draw(st.booleans()):
        agree = data.draw(st.integers(0, len(best) - 1))
        block[1:agree + 1] = best[:agree]
    m = 0
    while m + 1 < len(block) and block[m + 1] == best[m]:
        m += 1
    expected = [*block[1:m + 1], best[m]]
    if 9 in expected:
        expected = expected[:expected.index(9) + 1]
    taken = accept(block, best, STOP, limit=100)
    assert list(taken.committed) == expected
    assert taken.stopped == (9 in expected)
    assert taken.matched == min(m, len(expected))
