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
"""`rspec engine`: export the stages, build engines from them and check both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rspec_planner.cli_report import CONTEXT, reports, share

CHECKPOINT = click.option('--profile', 'checkpoint', default='tiny', show_default=True,
                          metavar='NAME|FOLDER', help="'tiny', a checkpoint folder, or "
                          "'alpamayo-r1' for its shapes without weights.")
DRAFT = click.option('--draft', default='default', show_default=True,
                     help="An embedded name, a folder, or 'none'.")
PRECISION = click.option('--precision', default='fp16', show_default=True,
                         type=click.Choice(('fp32', 'fp16', 'bf16')))


@click.group(context_settings=CONTEXT)
def engine() -> None:
    """Export the stages to ONNX, build TensorRT engines from them, check both."""


def _exported(report: Any) -> Iterator[str]:
    """Yield one line per stage, then the folder."""
    for stage in report['stages']:
        yield (f'{stage["stage"]:10} {stage["bytes"] / 2**20:7.2f} MiB  {stage["inputs"]} inputs, '
               f'{stage["weights"]} of them weights, {stage["nodes"]} nodes')
    yield f'{report["profile"]} {report["precision"]} -> {report["folder"]}'


@engine.command('export')
@CHECKPOINT
@DRAFT
@PRECISION
@click.option('--samples', type=click.IntRange(1, 32), default=1, show_default=True,
              help='Trajectories per flow step.')
@click.option('--stage', 'stages', multiple=True, help='Only this stage. Repeatable.')
@click.option('--out', type=click.Path(path_type=Path),
              help='Folder for the graphs. Default: engines/<profile>-<precision>/onnx.')
@reports(_exported)
def export(checkpoint: str, draft: str, precision: str, samples: int, stages: Sequence[str],
           out: Path | None) -> Mapping[str, Any]:
    """Write vision, prefill, draft, verify and flow_step as ONNX graphs without weights."""
    from rspec_planner.engine.export import export_stages
    from rspec_planner.engine.stages import STAGE_NAMES
    from rspec_planner.planner.staging import read_source
    source = read_source(checkpoint, precision, draft, samples)
    folder = out or default_folder(source.target.cfg.name, precision)
    with share('exporting') as show:
        made = export_stages(source.target, source.draft, source.shapes, precision,
                             source.checkpoints, folder, names=stages or STAGE_NAMES,
                             progress=show)
    return {'profile': made.profile, 'precision': precision, 'folder': folder,
            'stages': [{'stage': stage.name, 'file': stage.file, 'sha256': stage.sha256,
                        'bytes': stage.bytes, 'inputs': len(stage.inputs),
                        'weights': len(stage.weights), 'nodes': sum(stage.operators.values())}
                       for stage in made.stages]}


def default_folder(profile: str, precision: str) -> Path:
    """Return where the graphs of a profile land unless told otherwise."""
    return Path('engines') / f'{profile}-{precision}' / 'onnx'
