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
"""Which kernels a device runs: Triton on CUDA, plain PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rspec_planner.engine.kernels import reference
from rspec_planner.errors import EngineError

Kernel = Callable[..., None]


@dataclass(frozen=True)
class Kernels:
    """One implementation of every kernel; signatures and meaning are those of `reference`."""

    linear: Kernel
    product: Callable[..., int]
    gather: Kernel
    rotate: Kernel
    attend: Kernel
    norm: Kernel
    gate: Kernel
    add_norm: Kernel
    add_rows: Kernel
    turn: Kernel
    choose: Kernel
    begin: Kernel
    accept: Kernel
    replay: Kernel


REFERENCE = Kernels(reference.linear, reference.product, reference.gather, reference.rotate,
                    reference.attend, reference.norm, reference.gate, reference.add_norm,
                    reference.add_rows, reference.turn, reference.choose, reference.begin,
                    reference.accept, reference.replay)


def triton_kernels() -> Kernels:
    """Return the Triton kernels; EngineError where Triton is not installed."""
    try:
        from rspec_planner.engine.kernels import attention, linear, rows, tokens, vision
    except ModuleNotFoundError as error:
        raise EngineError(f"Python module '{error.name}' is missing and the CUDA kernels need "
                          'it: pip install -r requirements-cuda.txt') from None
    return Kernels(linear.linear, linear.product, rows.gather, attention.rotate,
                   attention.attend, rows.norm, rows.gate, vision.add_norm, rows.add_rows,
                   vision.turn,
                   tokens.choose, tokens.begin, tokens.accept, tokens.replay)


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels of a device."""
    return triton_kernels() if device.type == 'cuda' else REFERENCE
