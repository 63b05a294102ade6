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
One interface for every network: fixed input and output buffers, and `enqueue`.

The decoding loop and the planner compose executors and do not know which kind they hold:
PyTorch here, ONNX Runtime or TensorRT elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor


class Executor(Protocol):
    """
    One stage with fixed I/O buffers.

    Fill `inputs` in place, call `enqueue`, read `outputs`; the tensors are the same objects for
    the executor's whole life. `enqueue` neither allocates outputs nor waits for the device.
    """

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that the caller fills in place."""

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """Return the buffers that `enqueue` overwrites."""

    def enqueue(self, stream: torch.cuda.Stream | None = None) -> None:
        """Run the stage on `stream`, or on the current stream (the CPU: at once)."""
