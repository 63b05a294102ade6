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
Where the numbers of one frame lie in its device buffer.

All of them live in one int64 tensor that the kernels read and write, so that no step of a frame
asks the host for a position. They are those of `decode.state.DecodeState`.
"""

from __future__ import annotations


class Slot:
    """Index of each number in the frame buffer (SIZE,) int64."""

    P = 0  # index of the anchor
    CACHED = 1  # valid rows of K/V and taps
    GENERATED = 2  # tokens committed after the prompt
    LIMIT = 3  # the most that may be generated
    DONE = 4  # nothing more is committed; rows may still be missing
    STOPPED = 5  # a stop token was committed
    ACTIVE = 6  # another iteration is needed
    ITERATION = 7  # iterations that committed something
    CLOSING = 8  # forwards that only completed the context
    START = 9  # first row of the next verify
    ANGLE = 10  # its rotary position
    ROPE_DELTA = 11
    CONTEXT = 12  # rows that the action expert sees
    CONTEXT_ANGLE = 13  # rotary position behind them
    END_ID = 14  # the token that ends a context
    GUESS = 15  # guessed rows behind the prompt
    ZERO = 16  # always 0
    SIZE = 17
