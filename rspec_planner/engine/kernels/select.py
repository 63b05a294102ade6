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

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import torch

from rspec_planner.engine.kernels import reference
from rspec_planner.errors import ConfigurationError, EngineError

Kernel = Callable[..., None]
#: launches of a layer that the one before can do, see `fuse`
FUSIBLE = ('join', 'turn', 'sums')


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
    mix: Kernel | None = None  # rotate and attend at once
    close: Kernel | None = None  # product and gather at once


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


def fuse(kernels: Kernels, launches: Collection[str]) -> Kernels:
    """
    Return kernels with fewer launches a layer; ConfigurationError for an unknown name.

    launches: of FUSIBLE. 'join': the last blocks of an attention join its parts. 'turn': the
    attention turns queries and keys and writes keys and values. 'sums': the last blocks of a
    product add its parts and the residual up and norm the sum, which `rows.gather` by as many
    warps as the product has does bit for bit.
    """
    unknown = sorted(set(launches) - set(FUSIBLE))
    if unknown:
        raise ConfigurationError(f"launch '{unknown[0]}': use some of {', '.join(FUSIBLE)}")
    if not launches:
        return kernels
    made = (reference.attend, reference.mix, reference.close)
    if kernels.attend is not reference.attend:
        from rspec_planner.engine.kernels import close, mix
        made = mix.attend, mix.mix, close.close
    joined = 'join' in launches
    return replace(kernels, attend=made[0] if joined else kernels.attend,
                   mix=partial(made[1], joined=joined) if 'turn' in launches else None,
                   close=made[2] if 'sums' in launches else None)
