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
The node of `rspec bench faults`: the real one, with a planner that fails when it is told to.

The planner plans straight on, in no time; the word in the file named by RSPEC_FAULT_FILE says how
the next plans fail. A checkpoint folder is loaded and verified as always, then left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import os
from pathlib import Path
import time
from typing import Any

import numpy as np

from rspec_planner.live.bench_processes import InstantPlanner
from rspec_planner.model.config import CameraConfig
from rspec_planner.node import RspecPlanner
from rspec_planner.parameters import NodeParameters
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plan import Plan, Verdict
from rspec_planner.process import run_node
from rspec_planner.signals import leave

VARIABLE = 'RSPEC_FAULT_FILE'
#: small, so that the machine is busy with faults and not with pixels
CAMERAS = CameraConfig(height=96, width=192)


def _raise(error: BaseException) -> None:
    raise error


def _out_of_memory() -> None:
    import torch
    raise torch.OutOfMemoryError(  # type: ignore[no-untyped-call]
        'CUDA out of memory. Tried to allocate 2.00 GiB (injected)')


#: what happens before a plan is made
BEFORE: dict[str, Callable[[], None]] = {
    'exception': lambda: _raise(RuntimeError('CUDA error: an illegal memory access (injected)')),
    'out_of_memory': _out_of_memory,
    'host_memory': lambda: _raise(MemoryError('injected')),
    'thread_death': lambda: _raise(SystemExit(3)),
}
#: how long a plan takes, at most: a healed device finishes what it was doing
DELAYS = {'hang': 30.0, 'slow': 1.3}


def _spoiled(plan: Plan, fault: str) -> Plan:
    """Return the plan that a broken engine would return."""
    if fault == 'nan_logits':
        return replace(plan, poses=plan.poses * np.nan, speeds=plan.speeds * np.nan)
    if fault == 'nan_candidate':
        return replace(plan, candidates=np.full_like(plan.candidates, np.nan))
    if fault == 'old_stamp':
        return replace(plan, t0_ns=plan.t0_ns - 100_000_000)
    if fault == 'jump':
        return replace(plan, poses=plan.poses + (np.arange(65) > 30)[:, None] * [0.0, 12.0, 0, 0])
    if fault == 'behind':
        return replace(plan, poses=plan.poses - (np.arange(65) > 0)[:, None] * [10.6, 0.0, 0, 0])
    if fault == 'wild_curvature':
        return replace(plan, curvatures=np.full_like(plan.curvatures, 0.9))
    if fault == 'short':
        return replace(plan, poses=plan.poses[:12])
    if fault == 'endless_reasoning':
        return replace(plan, verdict=Verdict(False, 'reasoning_incomplete', 'injected'))
    return plan


class FaultyPlanner(InstantPlanner):
    """Plans straight on unless the fault file holds a word."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.profile = replace(self.profile, cameras=CAMERAS)
        self._path = path

    def _fault(self) -> str:
        return self._path.read_text(encoding='utf-8').strip()

    def plan(self, observation: Observation) -> Plan:
        """Return the plan, or fail as told."""
        fault, started = self._fault(), time.monotonic()
        while time.monotonic() - started < DELAYS.get(fault, 0.0) and fault == self._fault():
            time.sleep(0.02)
        if fault in BEFORE:
            BEFORE[fault]()
        return _spoiled(super().plan(observation), fault)


def load(parameters: NodeParameters) -> Any:
    """Return the planner; a checkpoint folder must be intact."""
    if parameters.model.checkpoint != 'tiny':
        from rspec_planner.model.checkpoint import load_target
        load_target(parameters.model.checkpoint)
    return FaultyPlanner(Path(os.environ[VARIABLE]))


if __name__ == '__main__':
    leave(run_node(lambda full: RspecPlanner(load, arguments=full), None))
