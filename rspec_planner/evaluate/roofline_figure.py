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
The roofline of an H200 and where the parts of a frame lie beneath it, as a picture.

python -m rspec_planner.evaluate.roofline_figure docs/data/gpu_h200.json docs/figures/roofline.png
"""

from __future__ import annotations

from dataclasses import dataclass
import json
from pathlib import Path
import sys
from typing import Any

import numpy as np

from rspec_planner.evaluate.roofline import (
    _encode_flops,
    _flow_step,
    _prefill_flops,
    _text_weights,
    Rates,
)
from rspec_planner.model.config import alpamayo_r1, ProfileConfig

#: the largest bf16 product of this GPU (8192 cubed, random data), operations a second
PEAK = 790e12


@dataclass(frozen=True)
class Part:
    """One part of a frame: operations, bytes that it must read, and the milliseconds it took."""

    name: str
    flops: float
    bytes: float
    ms: float

    @property
    def intensity(self) -> float:
        """Return operations for each byte."""
        return self.flops / self.bytes

    @property
    def reached(self) -> float:
        """Return operations a second."""
        return self.flops / (1e-3 * self.ms)


def parts(measured: dict[str, Any], profile: ProfileConfig) -> list[Part]:
    """Return the parts of a frame in bf16 from what `bench gpu` wrote."""
    decode, frame = measured['decode'], measured['frame1000']['ways']['trace']['stages']
    text, unit = _text_weights(profile.text), Rates(1.0, float('inf'))
    verify = text + profile.text.hidden_size * profile.text.vocab_size
    steps, waypoints = profile.flow.num_steps, profile.action_space.n_waypoints
    flow = steps * _flow_step(profile, 2, unit)
    cameras = len(profile.cameras.names)
    vision = 2.0 * sum((profile.vision.depth * (4 * profile.vision.hidden_size ** 2 +
                        2 * profile.vision.hidden_size * profile.vision.intermediate_size),))
    return [
        Part('one token', 2.0 * verify, 2.0 * verify, decode['target_step_ms']),
        Part('verify, 16 rows', 32.0 * verify, 2.0 * verify, decode['verify16_ms']),
        Part('flow, 10 steps', waypoints * flow, flow, decode['flow_ms']),
        Part('encode, 4 images', _encode_flops(profile, cameras), vision, frame['encode']['p50']),
        Part('prefill', _prefill_flops(profile), 2.0 * text,
             decode['prefill_ms']['p50'])]


def draw(measured: dict[str, Any], into: Path) -> None:
    """Write the picture."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    speed = float(measured['decode']['copy_bytes_per_s'])
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    reach = np.geomspace(0.5, 2e4, 200)
    axes.loglog(reach, np.minimum(reach * speed, PEAK) / 1e12, color='black', linewidth=1.5)
    for part in parts(measured, alpamayo_r1()):
        roof = min(part.intensity * speed, PEAK)
        dot, = axes.loglog([part.intensity], [part.reached / 1e12], 'o', markersize=8)
        axes.vlines(part.intensity, part.reached / 1e12, roof / 1e12, colors=dot.get_color(),
                    linestyles=':')
        left = part.intensity > 500
        axes.annotate(f'{part.name}\n{part.ms:.1f} ms, {part.reached / roof:.0%} of the roof',
                      (part.intensity, part.reached / 1e12), textcoords='offset points',
                      xytext=(-10, -26) if left else (10, -12), ha='right' if left else 'left',
                      fontsize=9)
    axes.text(1.0, 1.6 * speed / 1e12, f'{speed / 1e12:.1f} TB/s, a large copy', rotation=36,
              fontsize=9)
    axes.text(2.5e3, 1.08 * PEAK / 1e12, f'{PEAK / 1e12:.0f} TFLOP/s', fontsize=9)
    axes.set(xlabel='operations for each byte that must be read',
             ylabel='TFLOP/s', title='Alpamayo-R1 shapes, bf16, one H200, random weights')
    axes.set_ylim(1, 2e3)
    axes.grid(True, which='major', alpha=0.3)
    figure.tight_layout()
    into.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(into)
    pyplot.close(figure)


if __name__ == '__main__':
    draw(json.loads(Path(sys.argv[1]).read_text(encoding='utf-8')), Path(sys.argv[2]))
