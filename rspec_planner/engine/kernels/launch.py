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
"""How kernels are launched: programmatic dependent launch on GPUs that have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import os
from typing import Any

#: RSPEC_PDL=1 lets a kernel's prologue overlap the end of the one before it (sm_90 and later)
_STATE = {'pdl': os.environ.get('RSPEC_PDL', '0') == '1'}


def options() -> dict[str, Any]:
    """Return the launch options that all kernels share."""
    if _STATE['pdl']:
        return {'PDL': True, 'launch_pdl': True}
    return {'PDL': False}


@contextmanager
def overlapped(on: bool) -> Iterator[None]:
    """Launch, or capture, with or without programmatic dependent launch in this block."""
    before = _STATE['pdl']
    _STATE['pdl'] = on
    try:
        yield
    finally:
        _STATE['pdl'] = before
