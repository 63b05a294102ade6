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
"""The research subcommands of `rspec`: train, eval and bench."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rspec_planner.cli_report import CONTEXT, reports, share


class TargetCommand(click.Command):
    """Adds one option for each training setting, read when the command is really used."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the declared options and those of TargetSettings."""
        from dataclasses import fields

        from rspec_planner.train.settings import TargetSettings
        names = {parameter.name for parameter in self.params}
        extra: list[click.Parameter] = []
        for field in fields(TargetSettings):
            flag = f'--{field.name.replace("_", "-")}'
            if field.name in names:
                continue
            if isinstance(field.default, bool):
                flag = f'{flag}/--no-{flag[2:]}'
                extra.append(click.Option([flag], default=None, help=f'[{field.default}]'))
            else:
                extra.append(click.Option([flag], type=type(field.default), default=None,
                                          help=f'[{field.default}]'))
        own = super().get_params(ctx)
        return [*own[:-1], *extra, own[-1]]  # --help stays last


@click.group(context_settings=CONTEXT)
def train() -> None:
    """Train networks; one process per GPU under torchrun."""


@train.command('target', cls=TargetCommand)
@click.option('--config', type=click.Path(path_type=Path), help='YAML of training settings.')
@click.option('--out', type=click.Path(path_type=Path), default=Path('runs/target'),
              show_default=True, help='Receives checkpoint/ and logs.')
@click.option('--state-dir', type=click.Path(path_type=Path), help='Default: --out.')
@click.option('--init-from', type=click.Path(path_type=Path), help='Start from these weights.')
@click.option('--resume', is_flag=True, help='Continue the saved state.')
@click.option('--smoke', is_flag=True, help='20 steps of a toy size.')
@click.option('--revision', default='', help='Git revision for the manifest.')
@reports()
def train_target(config: Path | None, out: Path, **options: Any) -> Mapping[str, Any]:
    """Train the target on the embedded world; options override --config."""
    from rspec_planner.train.target import train_target as train_it
    return train_it(config, out, **options)


@click.group('eval', context_settings=CONTEXT)
def evaluate() -> None:
    """Measure quality on the splits of the embedded world."""


@evaluate.command('driving')
@click.option('--split', default='all', show_default=True,
              help='val, on-shelf, off-shelf or all.')
@click.option('--clips', type=int, help='Evaluate fewer clips of each split.')
@click.option('--checkpoint', default='tiny', show_default=True)
@click.option('--device', default='cpu', show_default=True)
@click.option('--workers', type=int, help='Render processes. Default: by processors.')
@click.option('--write-results', is_flag=True, help='Replace the tables in docs/results.md.')
@reports()
def evaluate_driving(split: str, clips: int | None, checkpoint: str, device: str,
                     workers: int | None, write_results: bool) -> Mapping[str, Any]:
    """Open-loop driving: trajectory error, decisions, and both with black cameras."""
    from rspec_planner.evaluate.driving import evaluate_driving as evaluate_it
    with share('driving') as show:
        return evaluate_it(split, clips=clips, checkpoint=checkpoint, device=device,
                           workers=workers, write_results=write_results, progress=show)


@click.group(context_settings=CONTEXT)
def bench() -> None:
    """Measure latency on this machine."""


@bench.command('frame')
@click.option('--profile', default='tiny', show_default=True)
@click.option('--device', default='cpu', show_default=True)
@click.option('--frames', type=int, default=40, show_default=True,
              help='Measured frames, after five of warm-up.')
@click.option('--checkpoint', type=click.Path(path_type=Path),
              help="A folder in place of the profile's embedded weights.")
@click.option('--seed', type=int, default=0, show_default=True, help='Seed of the drive.')
@reports()
def bench_frame(profile: str, device: str, frames: int, checkpoint: Path | None,
                seed: int) -> Mapping[str, Any]:
    """Time whole frames stage by stage, streaming and without cached images."""
    from rspec_planner.evaluate.bench import bench_frame as measure
    return measure(profile, device, frames, checkpoint=checkpoint, seed=seed)
