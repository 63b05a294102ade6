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
`rspec eval all`: measure everything, keep the numbers, write docs/results.md and its figures.

The numbers go to docs/data/evaluation.json; tables and figures are made from that file and from
the training comparisons beside it, so both can be written again without measuring.
"""

from __future__ import annotations

import json
from pathlib import Path
import time
from typing import Any

from rspec_planner.errors import InputError
from rspec_planner.evaluate.driving import evaluate_driving
from rspec_planner.evaluate.grids import aarl_section, ablation_section, curves, read_grids
from rspec_planner.evaluate.report import Bars, evaluate_reasoning, no_bars, QUESTIONS, Subject
from rspec_planner.evaluate.results import write_driving, write_section
from rspec_planner.evaluate.tables import (
    attention_section,
    exactness_section,
    length_section,
    reuse_section,
    routing_section,
    sampling_section,
)

DATA_FILE = 'evaluation.json'
RESULTS_FILE = 'results.md'
FIGURES = 'figures'


def evaluate_everything(subject: Subject, *, driving: bool = True, data: Path = Path('docs/data'),
                        docs: Path = Path('docs'), redraw: bool = False,
                        bars: Bars = no_bars) -> dict[str, Any]:
    """
    Measure (unless redraw), write DATA/evaluation.json, the sections and the figures.

    Returns the reports and the paths written. InputError when there is nothing to redraw.
    """
    import matplotlib  # noqa: F401, before minutes of measuring: a missing package stops here
    path = data / DATA_FILE
    started = time.monotonic()
    if redraw:
        result = _kept(path)
    else:
        result = evaluate_reasoning(QUESTIONS, subject, bars)
        if driving:
            with bars('driving') as show:
                result['driving'] = evaluate_driving(
                    subject.split, clips=subject.clips, checkpoint=subject.checkpoint,
                    device=subject.device, progress=show)
        result['seconds'] = round(time.monotonic() - started, 1)
        data.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1, default=str) + '\n', encoding='utf-8')
    written = write_everything(result, data, docs)
    return {**result, 'data': str(path), **written}


def _kept(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise InputError(f'{path}: cannot be read ({error}); run rspec eval all without '
                         '--redraw first') from None
    return content


def write_everything(result: dict[str, Any], data: Path, docs: Path) -> dict[str, Any]:
    """Write the sections and figures of a result; return their paths."""
    target, figures = docs / RESULTS_FILE, docs / FIGURES
    drafts, aarl = read_grids(data)
    drawn = draw(result, aarl, figures)
    if 'driving' in result:
        write_driving(result['driving'], target)
    sections = {'drafts': length_section(result), 'exactness': exactness_section(result),
                'attention': attention_section(result), 'routing': routing_section(result),
                'reuse': reuse_section(result)}
    if 'sampled' in result['length']:
        sections['sampling'] = sampling_section(result['length']['sampled'])
    if drafts:
        sections['ablations'] = ablation_section(drafts)
    if aarl:
        sections['aarl'] = aarl_section(aarl)
    for name, body in sections.items():
        write_section(name, body, target)
    return {'results': str(target), 'figures': [str(path) for path in drawn]}


def draw(result: dict[str, Any], aarl: list[Any], folder: Path) -> list[Path]:
    """Draw every figure that the numbers allow."""
    from rspec_planner.evaluate import figures
    length = result['length']
    drawn = [figures.length_figure(length, folder), figures.offset_figure(length, folder),
             figures.clock_figure(length, result.get('reuse'), folder),
             figures.attention_figure(result['attention'], folder),
             figures.routing_figure(result['routing'], folder)]
    runs = curves(aarl)
    if runs:
        drawn.append(figures.curves_figure(runs, folder))
    return drawn
