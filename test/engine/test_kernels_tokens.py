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
"""The kernels around the forwards against the host's rules in decode/accept.py and loop.py."""

import os

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ['TRITON_INTERPRET'] = '1'
pytest.importorskip('triton', reason='Triton is not installed: requirements-cuda.txt')

from rspec_planner.decode.accept import accept, apply_follow  # noqa: E402
from rspec_planner.engine.cuda_guess import guess as guess_reference  # noqa: E402
from rspec_planner.engine.kernels.frame import Slot  # noqa: E402
from rspec_planner.engine.kernels.guess import guess as guess_kernel  # noqa: E402
from rspec_planner.engine.kernels.select import REFERENCE, triton_kernels  # noqa: E402

DEVICE = 'cuda' if CUDA else 'cpu'
KERNELS = pytest.mark.parametrize('kernels', [REFERENCE, triton_kernels()],
                                  ids=['reference', 'triton'])
HERALD, STOP, OTHER_STOP = 7, 8, 9
WORDS = st.integers(5, 9)  # few, so that proposals match and heralds and stops are frequent


def device(values):
    return torch.tensor(list(values), dtype=torch.int64, device=DEVICE)


def framed(**values):
    frame = torch.zeros(Slot.SIZE, dtype=torch.int64, device=DEVICE)
    for name, value in values.items():
        frame[getattr(Slot, name)] = value
    return frame


def read(frame, *names):
    return tuple(int(frame[getattr(Slot, name)]) for name in names)


@KERNELS
@given(anchor=WORDS, proposals=st.lists(WORDS, min_size=1, max_size=9), p=st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_begin_applies_the_proposal_rule(kernels, anchor, proposals, p):
    tokens = device([1] * p + [anchor] + [3] * 20)
    frame = framed(P=p, CACHED=p, ROPE_DELTA=-4, END_ID=STOP)
    ids = device([0] * (len(proposals) + 1))
    kernels.begin(frame, tokens, device(proposals), ids, (HERALD, STOP))
    assert ids.tolist() == apply_follow([anchor, *proposals], {HERALD: STOP})
    assert read(frame, 'START', 'ANGLE') == (p, p - 4)


@KERNELS
@pytest.mark.parametrize(('cached', 'expected'), [(4, [14, 15, 8, 8]), (5, [15, 8, 8, 8])])
def test_begin_of_a_complete_text_reads_the_missing_rows(kernels, cached, expected):
    frame = framed(P=5, CACHED=cached, DONE=1, END_ID=STOP)
    ids = device([0] * 4)
    kernels.begin(frame, device(range(10, 30)), device([1, 2, 3]), ids, (HERALD, STOP))
    assert ids.tolist() == expected
    assert read(frame, 'START') == (cached,)


@KERNELS
def test_begin_without_a_draft_is_the_anchor(kernels):
    ids = device([0])
    kernels.begin(framed(P=2, CACHED=2), device([5, 6, 7]), None, ids, (HERALD, STOP))
    assert ids.tolist() == [7]


@KERNELS
@given(block=st.lists(WORDS, min_size=1, max_size=10), data=st.data(),
       room=st.integers(1, 12), proposed=st.integers(0, 9) | st.none())
@settings(max_examples=80, deadline=None)
def test_accept_commits_what_the_host_commits(kernels, block, data, room, proposed):
    width, p, before = len(block), 3, 2
    best = data.draw(st.lists(WORDS, min_size=width, max_size=width))
    # a target that agrees for a while
    agreeing = data.draw(st.integers(0, width - 1))
    best[:agreeing] = block[1:agreeing + 1]
    seen = block if proposed is None else block[:proposed + 1]
    expected = accept(seen, best[:len(seen)], (STOP, OTHER_STOP), room)
    tokens, counts = device([0, 1, 2, block[0]] + [-1] * 20), device([0] * 4)
    frame = framed(P=p, CACHED=p, GENERATED=before, LIMIT=before + room, END_ID=STOP,
                   ITERATION=1, ROPE_DELTA=5)
    kernels.accept(frame, tokens, device(block), device(best), device([STOP, OTHER_STOP, -1]),
                   counts, proposed=None if proposed is None else device([proposed]))
    said = len(expected.committed)
    ended = expected.stopped or said == room
    appended = ended and expected.committed[-1] != STOP
    last = p + said + appended
    wanted = [*expected.committed, STOP] if appended else [*expected.committed]
    assert tokens.tolist()[p + 1:last + 1] == wanted
    assert set(tokens.tolist()[last + 1:]) == {-1}
    assert read(frame, 'P', 'CACHED', 'GENERATED', 'STOPPED', 'DONE') == (
        last, p + 1 + expected.matched, before + said, expected.stopped, ended)
    assert read(frame, 'ACTIVE') == (not ended or p + 1 + expected.matched <= last,)
    assert read(frame, 'CONTEXT', 'CONTEXT_ANGLE', 'ITERATION') == (last + 1, last + 6, 2)
    assert counts.tolist() == [0, said, 0, 0]


@KERNELS
@pytest.mark.parametrize(('cached', 'width', 'rows', 'active', 'closing'), [
    (4, 4, 6, 0, 1), (4, 1, 5, 1, 1), (5, 1, 6, 0, 1), (6, 4, 6, 0, 0)])
def test_accept_of_a_complete_text_only_counts_rows(kernels, cached, width, rows, active,
                                                    closing):
    tokens, counts = device(range(10)), device([4, 0])
    frame = framed(P=5, CACHED=cached, DONE=1, GENERATED=3, LIMIT=9, ITERATION=1, END_ID=STOP)
    kernels.accept(frame, tokens, device([1] * width), device([1] * width), device([STOP]),
                   counts)
    assert tokens.tolist() == list(range(10))
    assert counts.tolist() == [4, 0]
    assert read(frame, 'P', 'CACHED', 'ACTIVE', 'CLOSING', 'GENERATED', 'ITERATION') == (
        5, rows, active, closing, 3, 1)


@KERNELS
def test_accept_of_a_prefill_is_no_iteration(kernels):
    frame = framed(P=2, CACHED=2, LIMIT=9, END_ID=STOP)
    tokens = device([1, 2, 3] + [0] * 8)
    kernels.accept(frame, tokens, device([3, 5, 6, 5]), device([5, 6, 6, 5]), device([STOP]),
                   proposed=device([2]))
    assert tokens.tolist()[:7] == [1, 2, 3, 5, 6, 6, 0]
    assert read(frame, 'GENERATED', 'ITERATION', 'CACHED', 'ACTIVE') == (3, 0, 5, 1)


@KERNELS
@pytest.mark.parametrize(('generated', 'turn', 'expected'), [
    (1, 0, [11, 12, 99, 99]), (4, 1, [14, 15, 15, 15]), (0, 7, [10, 11, 12, 13])])
def test_replay_is_right_as_often_as_told(kernels, generated, turn, expected):
    proposals = device([0] * 4)
    kernels.replay(framed(GENERATED=generated, ITERATION=turn), device([10, 11, 12, 13, 14, 15]),
                   device([2, 4]), proposals, 99)
    assert proposals.tolist() == expected


@pytest.mark.parametrize('guess', [guess_reference, guess_kernel], ids=['reference', 'triton'])
@given(said=st.lists(st.integers(5, 6), max_size=7), text=st.lists(st.integers(5, 6), max_size=6),
       width=st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_a_guess_is_proposed_while_the_text_repeats_it(guess, said, text, width):
    prompt, room = 4, 6
    tokens = device([1] * prompt + said + [9] * (12 - prompt - len(said)))
    frame = framed(P=prompt + len(said) - 1, GENERATED=len(said))
    proposals = device(range(20, 19 + width))
    guess(frame, tokens, device(text + [0] * (room - len(text)) + [len(text)]), proposals)
    follows = text[len(said):][:width - 1] if text[:len(said)] == said[:len(text)] else []
    expected = follows + list(range(20, 19 + width))[len(follows):]
    assert proposals.tolist() == expected
