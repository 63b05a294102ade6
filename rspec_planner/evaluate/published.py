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
Published numbers that ours stand beside.

[P] arXiv 2606.31160 as reported in abstracts and summaries; [R] read in its code release
(github.com/dungdinhanh/spec_auto, commit 29ddd48); [L] other literature.
"""

from __future__ import annotations

#: accepted length by split; val and on-shelf [R], off-shelf DFlash [R], EAGLE-3 [P]
LENGTHS: dict[str, dict[str, float]] = {
    'DFlash (paper)': {'val': 5.00, 'on-shelf': 4.75, 'off-shelf': 5.15},
    'EAGLE-3 (paper)': {'val': 5.51, 'on-shelf': 5.34, 'off-shelf': 7.41},
}
#: theoretical speed-up off-shelf [P]
SPEEDUPS = {'DFlash (paper)': 4.21, 'EAGLE-3 (paper)': 4.36}
#: gains of mean L [P, R]
FLATROPE_GAIN = 0.06
AARL_GAINS = {'val': 0.020, 'on-shelf': 0.017, 'off-shelf': -0.11}
#: share of committed tokens that came from the draft at L = 4.6 [P]
ROUTINE_SHARE = 0.78
#: attention of one block, first draft layer, one clip [P]
ATTENTION: dict[str, dict[str, float]] = {
    'FlatRoPE': {'visual': 0.708, 'text_and_history': 0.084, 'generated': 0.208,
                 'entropy': 0.540},
    '3D mirror': {'visual': 0.845, 'text_and_history': 0.071, 'generated': 0.084,
                  'entropy': 0.404},
}
