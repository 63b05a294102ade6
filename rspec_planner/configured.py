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
"""What exists between configure and cleanup of the node, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
import time
from typing import Any

from diagnostic_msgs.msg import DiagnosticStatus

from rspec_planner.cycle import CycleResult, CycleStatistics, PlanningCycle
from rspec_planner.diagnostics import (
    inference_status,
    InputFacts,
    inputs_status,
    latency_status,
    PlanFacts,
    speculation_status,
)
from rspec_planner.inputs import StreamState
from rspec_planner.output_check import OutputCheck
from rspec_planner.outputs import Outputs
from rspec_planner.parameters import NodeParameters
from rspec_planner.planner.buffers import ObservationBuffer
from rspec_planner.subscriptions import InputSubscriptions


@dataclass
class Configured:
    """One configuration of the node: the planner, its inputs and outputs, and their statistics."""

    planner: Any
    buffer: ObservationBuffer
    inputs: InputSubscriptions
    outputs: Outputs
    cycle: PlanningCycle
    camera_streams: tuple[str, ...]  # 'image0', ... in the order of cameras.ids
    check: OutputCheck | None
    statistics: CycleStatistics = field(default_factory=CycleStatistics)
    last: CycleResult | None = None
    last_planned: CycleResult | None = None  # the newest one that was not skipped
    published_s: float | None = None
    rivals: Sequence[str] = ()

    def restart(self) -> None:
        """Count afresh, at activation."""
        self.statistics = CycleStatistics()
        self.last = self.last_planned = self.published_s = None
        if self.check is not None:
            self.check.restart()

    def statuses(self, now_ns: int, streams: Sequence[StreamState], config: NodeParameters,
                 last_reset: str) -> list[DiagnosticStatus]:
        """Return the tasks inputs, inference_status, latency and speculation."""
        silence = None if self.published_s is None else time.monotonic() - self.published_s
        inputs = InputFacts(
            now_ns, streams, self.inputs.enabled, self.inputs.publishers(), self.inputs.faults,
            self.inputs.notes, self.last, dict(self.statistics.skipped), last_reset,
            self.inputs.counts)
        plans = PlanFacts(self.statistics, self.last_planned, silence, self.cycle.busy_s,
                          self.rivals, self.outputs.hold_ups)
        return [inputs_status(inputs), inference_status(plans),
                latency_status(self.statistics, self.last_planned, config),
                speculation_status(self.statistics, self.last_planned,
                                   config.speculation.min_accepted_length,
                                   None if self.check is None else self.check.state)]
