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
"""The quality subcommands of `rspec`: driving, drafts, and everything into docs/results.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rspec_planner.cli_report import CONTEXT, reports, share

#: the training split's size; repeated here so that --help needs no NumPy
FLOOR_CLIPS = 11_655
#: node budgets of `rspec eval all`
TREES = (16, 32, 64)


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
@click.option('--closed-loop', is_flag=True, help='Let the plans drive; see the options below.')
@click.option('--plan-hz', type=float, default=10.0, show_default=True,
              help='Closed loop: plans a second at most.')
@click.option('--latency', 'latencies', multiple=True, metavar='NAME=MS[+STEP[/TOKENS]]',
              help='Closed loop: how long a plan takes, fixed + STEP per TOKENS of its text. '
              'Repeatable, the first one counts. Default: measured on an H200.')
@click.option('--drafts', default='', metavar='NAME,...',
              help='Closed loop: drafts compared with greedy decoding. Default: all embedded.')
@click.option('--iso-runs', type=click.IntRange(0), default=8, show_default=True,
              help='Closed loop: runs of each split per draft in that comparison.')
@click.option('--iso-hz', type=click.FloatRange(0.1, 10.0), default=None,
              help='Closed loop: plans a second in that comparison. Default: 2, or 3.3 for a '
              'checkpoint that knows caution.')
@click.option('--batch', type=click.IntRange(1), default=16, show_default=True,
              help='Closed loop: runs planned in one pass.')
@click.option('--out', type=click.Path(path_type=Path),
              help='Closed loop: folder that keeps finished runs and pictures of failures.')
@click.option('--live-runs', type=click.IntRange(0), default=0, show_default=True,
              help='Closed loop: also drive so many runs of each split through a live node.')
@reports()
def evaluate_driving(split: str, clips: int | None, checkpoint: str, device: str,
                     workers: int | None, write_results: bool, closed_loop: bool,
                     **options: Any) -> Mapping[str, Any]:
    """Drive the splits: trajectory error and decisions, or --closed-loop what plans lead to."""
    if closed_loop:
        return _closed_loop(split, clips, write_results, checkpoint=checkpoint, device=device,
                            workers=workers, **options)
    from rspec_planner.evaluate.driving import evaluate_driving as evaluate_it
    with share('driving') as show:
        return evaluate_it(split, clips=clips, checkpoint=checkpoint, device=device,
                           workers=workers, write_results=write_results, progress=show)


def _closed_loop(split: str, runs: int | None, write_results: bool, *, drafts: str,
                 latencies: Sequence[str], out: Path | None, live_runs: int, **options: Any
                 ) -> Mapping[str, Any]:
    from rspec_planner.evaluate.closed_latency import MEASURED, parse_latency
    from rspec_planner.evaluate.closed_loop import (
        ClosedOptions,
        evaluate_closed_loop,
        RUNS,
        SPLITS,
    )
    from rspec_planner.evaluate.closed_results import write_closed_loop
    chosen = ClosedOptions(
        splits=SPLITS if split == 'all' else (split,), runs=runs or RUNS, folder=out,
        latencies=tuple(parse_latency(text) for text in latencies) or MEASURED,
        drafts=tuple(filter(None, drafts.split(','))), **options)
    with share('closed loop') as show:
        result = evaluate_closed_loop(chosen, show)
        if live_runs:
            from rspec_planner.live.closed_live import compare_live
            result['live'] = compare_live(chosen, live_runs, show)
    return {**result, 'results': str(write_closed_loop(result))} if write_results else result


_TREES = click.option('--tree', 'trees', multiple=True, type=click.IntRange(2, 256),
                      metavar='NODES', help='Also verify the first draft of each kind as trees '
                      'of so many nodes. Repeatable.')


def subject_options(split: str = 'all', clips: int | None = None
                    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give an evaluation of drafts its --draft, --split, --clips, --checkpoint and --device."""
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((
                click.option('--draft', 'drafts', multiple=True, metavar='NAME|FOLDER',
                             help='Repeatable. Default: all embedded drafts.'),
                click.option('--split', default=split, show_default=True,
                             help='val, on-shelf, off-shelf or all.'),
                click.option('--clips', type=int, default=clips, show_default=clips is not None,
                             help='Evaluate fewer clips of each split.'),
                click.option('--checkpoint', default='tiny', show_default=True),
                click.option('--device', default='cpu', show_default=True))):
            function = option(function)
        return function
    return decorate


def sampling_options(temperature: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give an evaluation of drafts its --temperature, --top-p and --seed."""
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((
                click.option('--temperature', type=float, default=temperature, show_default=True,
                             help='Also sample, by both exact rules. 0: greedy alone.'),
                click.option('--top-p', type=float, default=0.98, show_default=True),
                click.option('--seed', type=click.IntRange(0, 2 ** 31 - 1), default=0,
                             show_default=True, help='Of the sampling.'))):
            function = option(function)
        return function
    return decorate


def _sampled(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the three of `sampling_options` as what they stand for."""
    from rspec_planner.evaluate.sampled_runs import Sampling
    values = [options.pop(name) for name in ('temperature', 'top_p', 'seed')]
    return {**options, 'sampling': Sampling(*values) if values[0] else None}


def _ask(question: str, drafts: Sequence[str], **options: Any) -> Mapping[str, Any]:
    from rspec_planner.evaluate.report import evaluate_one, Subject
    return evaluate_one(question, Subject(drafts=tuple(drafts), **options), share)


@evaluate.command('length')
@subject_options()
@click.option('--floor-clips', type=int, default=FLOOR_CLIPS, show_default=True,
              help='Training texts that the image-blind floor reads.')
@_TREES
@sampling_options(0.0)
@reports()
def evaluate_length(**options: Any) -> Mapping[str, Any]:
    """Measure accepted length and speed of drafts, beside the floor and greedy decoding."""
    return _ask('length', **_sampled(options))


@evaluate.command('exactness')
@subject_options()
@click.option('--drives', type=int, default=3, show_default=True,
              help='On which the deployed planner is compared; 3 at most.')
@click.option('--frames', type=int, default=40, show_default=True,
              help='Of each drive; 40 at most.')
@_TREES
@reports()
def evaluate_exactness(**options: Any) -> Mapping[str, Any]:
    """Compare tokens and trajectories of drafts and the deployed planner with greedy decoding."""
    report = _ask('exactness', **options)
    pairs = (report, report['deployed'])
    return {**report, 'ok': not any(pair['token_mismatches'] or pair['trajectory_mismatches']
                                    for pair in pairs)}


@evaluate.command('attention')
@subject_options('val', 120)
@reports()
def evaluate_attention(**options: Any) -> Mapping[str, Any]:
    """Show where drafts look, in every layer, and what controls at test time cost."""
    return _ask('attention', **options)


@evaluate.command('routing')
@subject_options()
@reports()
def evaluate_routing(**options: Any) -> Mapping[str, Any]:
    """Count which tokens the draft supplies; disturb the ego history."""
    return _ask('routing', **options)


@evaluate.command('reuse')
@click.option('--draft', 'drafts', multiple=True, metavar='NAME|FOLDER',
              help='The first one counts. Default: the embedded default.')
@click.option('--drives', type=int, default=5, show_default=True)
@click.option('--frames', type=int, default=60, show_default=True, help='Of each drive.')
@click.option('--checkpoint', default='tiny', show_default=True)
@click.option('--device', default='cpu', show_default=True)
@reports()
def evaluate_reuse(**options: Any) -> Mapping[str, Any]:
    """Verify the last reasoning inside the prefill of the next frame, on drives."""
    return _ask('reuse', **options)


@evaluate.command('caution')
@click.option('--split', default='val', show_default=True, help='val, on-shelf or off-shelf.')
@click.option('--clips', 'runs', type=click.IntRange(1), default=200, show_default=True)
@click.option('--share', 'part', type=float, default=0.04, show_default=True,
              help='Of the plans that may be slowed at most.')
@click.option('--checkpoint', default='tiny', show_default=True)
@click.option('--device', default='cpu', show_default=True)
@click.option('--workers', type=click.IntRange(0), default=0, show_default=True,
              help='Processes that step the world.')
@click.option('--batch', type=click.IntRange(1), default=16, show_default=True,
              help='Runs planned in one pass.')
@click.option('--write', is_flag=True, help='Put the thresholds into the checkpoint.')
@reports()
def evaluate_caution(split: str, part: float, write: bool, **options: Any) -> Mapping[str, Any]:
    """Choose below which confidence in its own words a target is driven more slowly."""
    from rspec_planner.evaluate.caution import evaluate_caution as evaluate_it
    from rspec_planner.evaluate.closed_loop import ClosedOptions
    with share('caution') as show:
        return evaluate_it(ClosedOptions(splits=(split,), **options), part, write, show)


@evaluate.command('fp8')
@click.option('--split', default='val', show_default=True, help='val, on-shelf or off-shelf.')
@click.option('--clips', type=int, default=100, show_default=True)
@click.option('--checkpoint', default='tiny', show_default=True)
@click.option('--device', default='cpu', show_default=True)
@click.option('--workers', type=click.IntRange(0), default=0, show_default=True,
              help='Processes that render clips.')
@reports()
def evaluate_fp8(**options: Any) -> Mapping[str, Any]:
    """Compare what the target says and drives with what it would in fp8."""
    from rspec_planner.evaluate.fp8_quality import evaluate_fp8 as evaluate_it
    with share('fp8') as show:
        return evaluate_it(**options, progress=show)


@evaluate.command('all')
@subject_options()
@click.option('--attention-draft', 'readers', multiple=True, metavar='NAME|FOLDER',
              help='More drafts whose attention is looked at. Repeatable.')
@click.option('--floor-clips', type=int, default=FLOOR_CLIPS, show_default=True)
@click.option('--drives', type=int, default=5, show_default=True)
@click.option('--frames', type=int, default=60, show_default=True)
@_TREES
@sampling_options(0.6)
@click.option('--driving/--no-driving', default=True, show_default=True,
              help='Also repeat the open-loop driving tables.')
@click.option('--data', type=click.Path(path_type=Path), default=Path('docs/data'),
              show_default=True, help='Keeps the numbers; training comparisons lie there.')
@click.option('--docs', type=click.Path(path_type=Path), default=Path('docs'),
              show_default=True, help='Receives results.md and figures/.')
@click.option('--redraw', is_flag=True,
              help='Measure nothing: write tables and figures from the kept numbers.')
@reports()
def evaluate_all(drafts: Sequence[str], readers: Sequence[str], driving: bool, data: Path,
                 docs: Path, redraw: bool, **options: Any) -> Mapping[str, Any]:
    """Measure everything and write the sections and figures of docs/results.md."""
    from rspec_planner.evaluate.everything import evaluate_everything
    from rspec_planner.evaluate.report import Subject
    options['trees'] = tuple(options['trees']) or TREES
    subject = Subject(drafts=tuple(drafts), readers=tuple(readers), **_sampled(options))
    return evaluate_everything(subject, driving=driving, data=data, docs=docs, redraw=redraw,
                               bars=share)
