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
"""The generated tables of docs/reliability.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rspec_planner.evaluate.results import table, write_section

PATH = Path('docs') / 'reliability.md'
_LONGEST = 90


def _named(text: str) -> str:
    """Return a diagnostic shortened for a table."""
    plain = text.replace('|', '\\|').replace('\n', ' ')
    return f'`{plain[:_LONGEST]}{"..." if len(plain) > _LONGEST else ""}`' if plain else \
        'nothing to say: plans go on'


def faults_section(result: Mapping[str, Any]) -> str:
    """Return the fault matrix in Markdown."""
    rows = [[verdict['name'].replace('_', ' '), verdict['what'], _named(verdict['named']),
             str(verdict['plans_during']), f'{verdict["since_heal_s"]:.2f}',
             f'{verdict["recovery_s"]:.2f}'] for verdict in result['verdicts']]
    head = (f'`rspec bench faults --write-docs`: {result["faults"]} faults, '
            f'{result["crashes"]} crashes, {result["invalid_plans"]} invalid plans, '
            f'{result["relabelled_plans"]} relabelled plans, {result["unnamed"]} unnamed, '
            f'{len(result["named_without_fault"])} named without a fault, longest recovery '
            f'{result["recovery_s"]["max"]:.2f} s, exit code {result["exit_code"]}.')
    return '\n\n'.join([head, table(['fault', 'what happens', 'named as', 'plans meanwhile',
                                     'first plan after, s', 'recovery, s'], rows)])


def soak_section(result: Mapping[str, Any]) -> str:
    """Return the soak's numbers in Markdown."""
    rows = [[name, f'{row["first"]:.3f}', f'{row["last"]:.3f}', f'{row["growth"]:+.2%}']
            for name, row in result['windows'].items()]
    head = (f'`rspec bench soak --minutes {result["minutes"]:g} --planner {result["planner"]}`: '
            f'{result["plans"]} plans, {result["skipped"]} skipped, {result["failed"]} failed; '
            f'first and last {result["window_s"]:.0f} s after {result["settled_s"]:.0f} s.')
    return '\n\n'.join([head, table(['', 'first window', 'last window', 'change'], rows)])


def write_faults(result: Mapping[str, Any], path: Path | None = None) -> Path:
    """Replace the fault matrix."""
    return write_section('faults', faults_section(result), path or PATH)


def write_soak(result: Mapping[str, Any], path: Path | None = None) -> Path:
    """Replace the soak's table."""
    return write_section('soak', soak_section(result), path or PATH)
