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
The stages that the planner deploys, fed with the frames of a stand.

A stand's own prefill keeps every tap row of all drafts at once, which no planner does. What is
deployed keeps the tail that one draft reads, or nothing for greedy decoding; this is what is
timed here, so that the cost of the taps is known beside the gain of the reasoning step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rspec_planner.evaluate.intervals import statistic_interval
from rspec_planner.evaluate.reasoning_runs import Frame, PLAIN, Stand
from rspec_planner.evaluate.survey import Taken
from rspec_planner.planner.pipeline import Stages, torch_stages
from rspec_planner.planner.prompt import Prompt
from rspec_planner.planner.reasoner import tapped_tail
from rspec_planner.world.clip import Clip

#: at least so many clips of a survey time the prefill
PREFILL_CLIPS = 40


def deployed_stages(stand: Stand, draft: str | None = None) -> Stages:
    """Return the planner's stages over a cache of their own; draft: one of the stand's."""
    return torch_stages(stand.target, stand.capacity, 1, stand.budget,
                        None if draft is None else stand.drafts[draft])


def hand_over(stand: Stand, stages: Stages, prompt: Prompt) -> None:
    """Copy the frame that lies in the stand's prefill buffers to deployed ones, no guess."""
    given, taking = stand.prefill_stage.inputs, stages.prefill.inputs
    for name in ('features', 'deepstack', 'ids', 'positions'):
        taking[name].copy_(given[name])
    taking['length'].fill_(prompt.length)
    taking['guess_length'].fill_(0)


def timed_prefill(stand: Stand, stages: Stages) -> float:
    """Run a prefill whose inputs are in place; return its milliseconds."""
    stand.wait()
    started = perf_counter()
    stages.prefill.enqueue()
    stand.wait()
    return 1e3 * (perf_counter() - started)


class PrefillProbe:
    """Times the deployed prefill of greedy decoding and of every draft, see `survey.Probe`."""

    def __init__(self, stand: Stand, drafts: Sequence[str], every: int = 1) -> None:
        """Time every `every`-th clip, all contenders in rotating order."""
        self._stages: dict[str, Stages] = {PLAIN: deployed_stages(stand)}
        self._stages.update({name: deployed_stages(stand, name) for name in drafts})
        self._tails = {name: tapped_tail(stand.drafts[name], stand.target)
                       for name in drafts}
        self._every, self._seen = every, 0
        self.ms: dict[str, list[float]] = {name: [] for name in self._stages}

    @torch.inference_mode()
    def take(self, stand: Stand, frame: Frame, clip: Clip, taken: Taken) -> None:
        """Time one frame; the first one is also the warm-up."""
        self._seen += 1
        if (self._seen - 1) % self._every:
            return
        names, turn = list(self._stages), len(self.ms[PLAIN])
        for stages in self._stages.values():
            hand_over(stand, stages, frame.prompt)
            if not turn:
                stages.prefill.enqueue()
        for step in range(len(names)):
            name = names[(turn + step) % len(names)]
            self.ms[name].append(timed_prefill(stand, self._stages[name]))

    def report(self) -> dict[str, Any]:
        """Return medians in ms, and how much more than the plain prefill each draft's takes."""
        plain = np.array(self.ms[PLAIN])
        return {'clips': len(plain), 'plain_ms': _median(self.ms[PLAIN]),
                'drafts': {name: {'tail': tail, 'ms': _median(self.ms[name]),
                                  'extra_ms': statistic_interval(
                                      np.array(self.ms[name]) - plain,
                                      lambda v: np.median(v, axis=-1))}
                           for name, tail in self._tails.items()}}


def extra_ms(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the median milliseconds that each draft's prefill takes beyond the plain one."""
    return {name: float(row['extra_ms']['mean']) for name, row in report['drafts'].items()}


def _median(values: Sequence[float]) -> float:
    return round(float(np.median(values)), 5) if values else 0.0
