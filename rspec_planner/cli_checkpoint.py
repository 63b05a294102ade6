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
"""The `rspec bench checkpoint` subcommand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rspec_planner.cli_report import reports


@click.command('checkpoint')
@click.option('--profile', default='alpamayo-r1', show_default=True,
              help='alpamayo-r1 or alpamayo-1.5; 22 GB are written.')
@click.option('--device', default='cuda', show_default=True)
@click.option('--out', type=click.Path(path_type=Path), default=Path('out/checkpoint'),
              show_default=True, help='Receives the folder, on a disk with 23 GB free.')
@click.option('--seconds', type=float, default=235.0, show_default=True,
              help='No step begins that would probably end later.')
@click.option('--loop', default='', help='while, sync, pipelined, eager or host.')
@click.option('--keep', is_flag=True, help='Leave the folder for other commands.')
@reports()
def bench_checkpoint(profile: str, device: str, out: Path, seconds: float, loop: str,
                     keep: bool) -> Mapping[str, Any]:
    """
    Prove that a released folder of full size loads, drives and computes what transformers does.

    Weights are random. Load time, peak memory, whole frames, relative errors.
    """
    from rspec_planner.evaluate.bench_checkpoint import bench_checkpoint as measure
    return measure(profile, device, out, seconds=seconds, loop=loop, keep=keep)
