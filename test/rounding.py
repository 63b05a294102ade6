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
Reference kernels that round as a GPU's do, but so coarsely that every near tie falls otherwise.

A GPU's narrow products round by the tile that their rows are padded to, and the library's wide
ones by the number of rows. Here each tile and each number of rows has an error of its own,
large and the same for every row: two ways of computing a frame say the same words only where
the same tiles do the same work.
"""

from dataclasses import replace

import torch

from rspec_planner.engine.kernels.linear import MAX_ROWS, row_tile
from rspec_planner.engine.kernels.select import REFERENCE

ERROR = 1.0


def _errors(tile, columns):
    generator = torch.Generator().manual_seed(1000 * tile + columns % 997)
    return 1.0 + ERROR * torch.randn(columns, generator=generator)


def _off(out, rows, width=0):
    """Give rows (..., columns) the error of their tile."""
    most = max(rows, width)
    out.mul_(_errors(row_tile(most) if most <= MAX_ROWS else most, out.shape[-1]))


def linear(x, weight, out, *, width=0, **options):
    REFERENCE.linear(x, weight, out, width=width, **options)
    _off(out, len(x), width)


def product(x, weight, parts, *, width=0, **options):
    count = REFERENCE.product(x, weight, parts, width=width, **options)
    _off(parts[:count], len(x), width)
    return count


def norm(x, weight, out, eps):
    """Norm; the rows of a prefill, whose products are the library's, get their error here."""
    REFERENCE.norm(x, weight, out, eps)
    if len(x) > MAX_ROWS:
        _off(out, len(x))


def choose(x, weight, best, *, width=0, **options):
    moved = x.clone()
    _off(moved, len(x), width)
    REFERENCE.choose(moved, weight, best, width=width, **options)


#: the references with these errors
ROUNDING = replace(REFERENCE, linear=linear, product=product, norm=norm, choose=choose)
