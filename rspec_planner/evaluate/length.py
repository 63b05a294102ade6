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
Accepted length and what it is worth, per split and draft, beside the floor.

L is strict (protocol section of arXiv 2606.31160): tokens are counted up to and including the
stop token, the bonus token counts, the first token belongs to no iteration, and the mean is
pooled over all iterations of a split. Author-style L adds the bonus token behind a stop that was
itself a proposal. Times are those of one run on one machine, paired clip by clip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rspec_planner.evaluate.intervals import (
    difference_interval,
    ratio_interval,
    statistic_interval,
)
from rspec_planner.evaluate.pairs import rotary_pairs, training_pairs
from rspec_planner.evaluate.reasoning_runs import EAGER, FLOOR, floor_name, PLAIN, Run
from rspec_planner.evaluate.survey import Taken
from rspec_planner.evaluate.tree_runs import Variant, variant_pairs
from rspec_planner.model.draft import DraftConfig

Floats = NDArray[np.float64]


def counts(runs: Sequence[Run]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return tokens committed by iterations, and iterations, of each clip (clips,)."""
    return (np.array([sum(run.stats.committed) for run in runs], np.int64),
            np.array([run.stats.iterations for run in runs], np.int64))


def stop_was_drafted(run: Run) -> bool:
    """Tell whether the stop token was a verified proposal: its row needed no closing forward."""
    return run.stats.iterations > 0 and run.stats.closing_forwards == 0


def acceptance_by_offset(runs: Sequence[Run], block: int) -> dict[str, list[Any]]:
    """
    Return `rate` and `tried` of offsets 1 .. B - 1.

    An offset is tried in every iteration that still has so many tokens to come, and right when
    all proposals up to it were.
    """
    tried, right = np.zeros(block - 1, np.int64), np.zeros(block - 1, np.int64)
    for run in runs:
        left = len(run.ids) - 1
        for index, committed in enumerate(run.stats.committed):
            last = index == len(run.stats.committed) - 1
            matched = committed - (not (last and stop_was_drafted(run)))
            tried[:min(left, block - 1)] += 1
            right[:matched] += 1
            left -= committed
    rate = [round(float(r / t), 5) if t else None for r, t in zip(right, tried)]
    return {'rate': rate, 'tried': tried.tolist()}


def per_iteration(runs: Sequence[Run], part: str) -> float:
    """Return the median over clips of 'draft_ms' or 'verify_ms' per iteration; 0 without any."""
    found = [getattr(run.stats, part) / run.stats.iterations for run in runs
             if run.stats.iterations]
    return float(np.median(found)) if found else 0.0


def speedups(length: float, kind: str, draft_ms: float, verify_ms: float,
             step_ms: float) -> dict[str, float]:
    """
    Return c = T_draft / T_step, the paper's S, and S with the measured width of the verify.

    DFlash: S = L / (1 + c), a verify counted as one step. EAGLE-3: S = L T_step / (T_draft +
    T_verify). The last is also given for every kind.
    """
    if step_ms <= 0.0:
        return {'c': 0.0, 'theoretical_speedup': 0.0, 'speedup_measured_verify': 0.0}
    cost = draft_ms / step_ms
    measured = length * step_ms / max(draft_ms + verify_ms, 1e-9)
    paper = measured if kind == 'eagle3' else length / (1.0 + cost)
    return {'c': round(cost, 5), 'theoretical_speedup': round(paper, 5),
            'speedup_measured_verify': round(measured, 5)}


def time_summary(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99 of milliseconds."""
    found = np.percentile(values, [50, 95, 99]) if len(values) else np.zeros(3)
    return {name: round(float(v), 4) for name, v in zip(('p50', 'p95', 'p99'), found)}


def clock(runs: Sequence[Run], reference: Sequence[Run], extra_ms: float = 0.0
          ) -> dict[str, Any]:
    """
    Return the paired ratio of reasoning times, the reference's over the draft's.

    mean, ci95: of the median over clips; p95: the ratio of both 95th percentiles; extra_ms: is
    added to every time of the draft's.
    """
    mine = np.array([run.ms for run in runs]) + extra_ms
    theirs = np.array([run.ms for run in reference])
    found = statistic_interval(theirs / mine, lambda v: np.median(v, axis=-1))
    tail = np.percentile(theirs, 95) / np.percentile(mine, 95)
    return {**found, 'p95': round(float(tail), 5)}


def breakdown(runs: Sequence[Run]) -> dict[str, float]:
    """Return the mean milliseconds of a reasoning step in drafts, verifies and the rest."""
    draft, verify = (float(np.mean([getattr(run.stats, part) for run in runs]))
                     for part in ('draft_ms', 'verify_ms'))
    rest = float(np.mean([run.ms for run in runs])) - draft - verify
    return {'draft': round(draft, 5), 'verify': round(verify, 5), 'closing': round(rest, 5)}


def row(runs: dict[str, list[Run]], name: str, block: int, kind: str,
        extra_ms: float = 0.0) -> dict[str, Any]:
    """
    Return everything about one contender of one split.

    extra_ms: how much longer its deployed prefill takes than the plain one.
    """
    mine = runs[name]
    committed, iterations = counts(mine)
    length = ratio_interval(committed, iterations)
    mean = float(str(length['mean']))
    beyond = np.array([stop_was_drafted(run) for run in mine], np.int64)
    same, eager = clock(mine, runs[PLAIN]), clock(mine, runs[EAGER])
    draft_ms, verify_ms = per_iteration(mine, 'draft_ms'), per_iteration(mine, 'verify_ms')
    result: dict[str, Any] = {
        'block': block, 'accepted_length': length,
        'accepted_length_author_style': ratio_interval(committed + beyond, iterations),
        'routine_share': round((mean - 1.0) / mean, 5) if mean else 0.0,
        **speedups(mean, kind, draft_ms, verify_ms, per_iteration(runs[PLAIN], 'verify_ms')),
        'wall_clock_ratio_same_kernel': same['mean'],
        'wall_clock_ratio_eager': eager['mean'],
        'wall_clock': {'same_kernel': same, 'eager': eager,
                       'prefill_extra_ms': round(extra_ms, 5),
                       'same_kernel_with_prefill': clock(mine, runs[PLAIN], extra_ms),
                       'reasoning_ms': time_summary([run.ms for run in mine])},
        'draft_ms': round(draft_ms, 5), 'verify_ms': round(verify_ms, 5),
        'breakdown_ms': breakdown(mine),
        'iterations': round(float(iterations.mean()), 5),
        'iterations_histogram': np.bincount(iterations).tolist(),
        'acceptance_by_offset': acceptance_by_offset(mine, block),
        'closing_forwards': round(float(np.mean([r.stats.closing_forwards for r in mine])), 5)}
    if kind != FLOOR:
        floor = runs.get(floor_name(block))
        result['above_floor'] = None if floor is None else difference_interval(
            (committed, iterations), counts(floor))
    return result


def split_report(taken: Sequence[Taken], drafts: Mapping[str, DraftConfig],
                 found: Sequence[Variant], extra_ms: Mapping[str, float]) -> dict[str, Any]:
    """
    Return one split: the floors first, then every draft; greedy decoding's times beside them.

    drafts: configuration by name, in the order of the table, each compared with the floor of
    its own block; found: their variants, which come last; extra_ms: of each draft's deployed
    prefill beyond the plain one.
    """
    runs: dict[str, list[Run]] = {}
    for clip in taken:
        for name, run in clip.runs.items():
            runs.setdefault(name, []).append(run)
    blocks = sorted({cfg.block for cfg in drafts.values()})
    rows = {floor_name(block): row(runs, floor_name(block), block, FLOOR)
            for block in blocks if floor_name(block) in runs}
    rows.update({name: row(runs, name, cfg.block, cfg.kind, extra_ms.get(name, 0.0))
                 for name, cfg in drafts.items()})
    for variant in found:
        rows[variant.name] = {
            **row(runs, variant.name, variant.block, drafts[variant.base].kind,
                  extra_ms.get(variant.base, 0.0)),
            'base': variant.base, 'form': variant.form, 'nodes': variant.nodes}
    tokens = [len(run.ids) for run in runs[PLAIN]]
    return {'clips': len(taken), 'tokens': round(float(np.mean(tokens)), 4),
            'greedy': {name: {'reasoning_ms': time_summary([run.ms for run in runs[name]]),
                              'step_ms': round(per_iteration(runs[name], 'verify_ms'), 5),
                              'breakdown_ms': breakdown(runs[name])}
                       for name in (PLAIN, EAGER)},
            'drafts': rows, 'comparisons': comparisons(runs, drafts, found)}


def comparisons(runs: dict[str, list[Run]],
                drafts: Mapping[str, DraftConfig],
                found: Sequence[Variant]) -> dict[str, dict[str, object]]:
    """Return paired differences of L: flat minus mirror, post-trained minus before, trees."""
    pairs = [*rotary_pairs(drafts), *training_pairs(drafts), *variant_pairs(found, drafts)]
    return {f'{first} - {second}': difference_interval(counts(runs[first]), counts(runs[second]))
            for first, second in pairs}


def length_report(taken: Sequence[Taken], drafts: Mapping[str, DraftConfig],
                  found: Sequence[Variant] = (),
                  extra_ms: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the report of every split among the clips taken, see `split_report`."""
    splits = list(dict.fromkeys(clip.split for clip in taken))
    return {'splits': {split: split_report([clip for clip in taken if clip.split == split],
                                           drafts, found, extra_ms or {})
                       for split in splits}}
