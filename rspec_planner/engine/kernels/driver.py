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
"""What calls of the CUDA driver and of NVRTC through cuda-bindings give."""

from __future__ import annotations

from typing import Any

from rspec_planner.errors import EngineError


def driver_result(result: tuple[Any, ...], refused: str) -> Any:
    """Return what a call gave; EngineError with its code and `refused` otherwise."""
    code, *values = result
    if int(code) != 0:
        raise EngineError(f'{code}: {refused}')
    return values[0] if len(values) == 1 else tuple(values)
