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
How long a plan takes in the closed loop, from measured stage times.

A latency is fixed milliseconds (images, prefill, flow) plus milliseconds a decoding step times the
steps of that very text: its tokens without a draft, its iterations with one.
"""

from __future__ import annotations

from dataclasses import dataclass
import math
import re

from rspec_planner.errors import ConfigurationError

_FORM = re.compile(r'(?P<name>[a-z][a-z0-9_]*)=(?P<fixed>\d+(\.\d+)?)'
                   r'(\+(?P<step>\d+(\.\d+)?)(/(?P<accepted>\d+(\.\d+)?))?)?')


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one plan: fixed + step * ceil(tokens / accepted)."""

    name: str
    fixed_ms: float
    step_ms: float = 0.0
    accepted: float = 1.0  # tokens a step commits

    def seconds(self, tokens: int) -> float:
        """Return the latency of a plan whose reasoning has so many tokens."""
        return (self.fixed_ms + self.step_ms * math.ceil(tokens / self.accepted)) / 1e3

    def to_dict(self) -> dict[str, float | str]:
        """Return what a report says about it."""
        return {'fixed_ms': self.fixed_ms, 'step_ms': self.step_ms,
                'tokens_per_step': self.accepted}


#: one H200 at the shapes of Alpamayo-R1, random weights, bf16, medians of docs/performance.md:
#: eager transformers; one token a forward in graphs; a draft at a forced L of 7.4
MEASURED = (Latency('speculative', 101.0, 5.43, 7.4), Latency('graphed', 101.0, 4.88),
            Latency('original', 573.0, 37.5))


def parse_latency(text: str) -> Latency:
    """
    Return a latency from NAME=FIXED, NAME=FIXED+STEP or NAME=FIXED+STEP/TOKENS, milliseconds.

    Raises ConfigurationError for another form or a plan that commits less than a token a step.
    """
    found = _FORM.fullmatch(text)
    accepted = float(found['accepted'] or 1.0) if found else 0.0
    if found is None or accepted < 1.0:
        raise ConfigurationError(f'latency {text!r} is not NAME=FIXED[+STEP[/TOKENS]] in ms with '
                                 '1 or more tokens a step, for example graphed=115+6.3')
    return Latency(found['name'], float(found['fixed']), float(found['step'] or 0.0), accepted)
