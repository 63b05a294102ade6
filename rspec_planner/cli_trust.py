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
"""The subcommands of `rspec bench` that break things and wait: faults and soak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rspec_planner.cli_report import reports, share


def add_to(bench: click.Group) -> None:
    """Register the subcommands."""
    for command in (bench_faults, bench_soak):
        bench.add_command(command)


@click.command('faults')
@click.option('--only', multiple=True, metavar='NAME', help='One fault; may be repeated.')
@click.option('--quick', is_flag=True, help='A handful, one of each kind.')
@click.option('--logs', type=click.Path(path_type=Path), help="Keeps the node's log.")
@click.option('--write-docs', is_flag=True, help='Replace the table in docs/reliability.md.')
@reports()
def bench_faults(only: Sequence[str], quick: bool, logs: Path | None, write_docs: bool
                 ) -> Mapping[str, Any]:
    """Break one thing after another around a live node; each must be survived by name."""
    from rspec_planner.live.bench_faults import bench_faults as measure
    with share('faults') as show:
        result = measure(only=only, quick=quick, log_folder=logs, progress=show)
    if write_docs:
        from rspec_planner.live.reliability import write_faults
        result['docs'] = str(write_faults(result))
    return result


@click.command('soak')
@click.option('--minutes', type=click.FloatRange(min=0.2), default=60.0, show_default=True)
@click.option('--planner', type=click.Choice(('tiny', 'none')), default='tiny',
              show_default=True, help="'none' plans in no time: the node alone.")
@click.option('--rate', type=click.FloatRange(0.5, 10.0), default=10.0, show_default=True,
              help='Frames a second.')
@click.option('--write-docs', is_flag=True, help='Replace the table in docs/reliability.md.')
@reports()
def bench_soak(minutes: float, planner: str, rate: float, write_docs: bool
               ) -> Mapping[str, Any]:
    """Run the node for long: memory, file handles, threads and latency must stay flat."""
    from rspec_planner.live.bench_soak import bench_soak as measure
    with share('soak, s') as show:
        result = measure(minutes, planner=planner, rate_hz=rate, progress=show)
    if write_docs:
        from rspec_planner.live.reliability import write_soak
        result['docs'] = str(write_soak(result))
    return result
