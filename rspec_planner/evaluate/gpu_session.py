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
Everything that is measured on a GPU, in one process and in an order that loses little.

The check comes first and stops the rest when it fails. Every step writes its own file as soon as
it is done, a step that fails is reported and the next one goes on, and no step begins that would
probably outlast the time given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import gc
import json
from pathlib import Path
import sys
from time import perf_counter
import traceback
from typing import Any

import torch

from rspec_planner.engine.cuda_fp8 import PLANS_FILE as FP8_PLANS
from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.bench_decode import bench_decode
from rspec_planner.evaluate.bench_device_frame import bench_device_frame
from rspec_planner.evaluate.bench_drafts import bench_drafts
from rspec_planner.evaluate.bench_fp8 import bench_fp8
from rspec_planner.evaluate.bench_kernels import bench_kernels
from rspec_planner.evaluate.gpu_goals import goal_table, lines
from rspec_planner.evaluate.gpu_state import watched


@dataclass(frozen=True)
class Step:
    """One measurement, and about how many seconds it takes at the R1 shapes."""

    name: str
    seconds: float
    run: Callable[[], dict[str, Any]]


def steps(profile: str, device: str, out: Path, tune: bool,
          trace: Path | None = None) -> list[Step]:
    """Return the steps in their order."""
    plans = out / 'plans.json' if tune and device != 'cpu' else None
    few = 2 if device == 'cpu' else 0

    def decode(frames: int, **options: Any) -> Callable[[], dict[str, Any]]:
        return lambda: bench_decode(profile, device, few or frames, **options)

    def frame(frames: int, eager: int = 0, **options: Any) -> Callable[[], dict[str, Any]]:
        return lambda: bench_device_frame(profile, device, few or frames, eager=eager, **options)

    return [
        Step('check', 40, lambda: bench_kernels(profile, device)),
        Step('sync', 20, decode(5, loops=() if few else ('sync',), lengths=(4.6,), eager=0)),
        Step('kernels', 120, lambda: bench_kernels(profile, device, plans=plans)),
        Step('decode', 80, decode(60, eager=1 if few else 3, trace=trace)),
        Step('drafts', 40, lambda: bench_drafts(profile, device)),
        Step('decode_pdl', 40, decode(20, loops=() if few else ('while',), eager=0, pdl=not few)),
        Step('frame', 60, frame(160, eager=0 if few else 3, trace=trace)),
        Step('frame1000', 160, frame(1000, eager=0 if few else 3, trace=trace)),
        Step('frame_reuse_prefill', 30, frame(48, reuse_in='prefill', lengths=(4.6,))),
        Step('frame_pdl', 40, frame(60, pdl=not few)),
        Step('fp8', 120, lambda: bench_fp8(profile, device, limit=5, plans=out / FP8_PLANS)),
        Step('decode_fp8', 60, decode(20, loops=() if few else ('while',), eager=0, fp8=True)),
        Step('frame_fp8', 60, frame(160, fp8=True, trace=trace)),
        Step('frame_block24', 40, frame(60, block=24)),
        Step('frame_samples6', 40, frame(40, samples=6, lengths=(4.6,))),
    ]


def run_session(profile: str, device: str, out: Path, seconds: float,
                only: Sequence[str] = (), tune: bool = True,
                trace: Path | None = None) -> dict[str, Any]:
    """
    Run the steps within about `seconds`; return what each said in short, and the goals.

    only: names of steps, none for all. Raises ConfigurationError for an unknown name.
    """
    planned = steps(profile, device, out, tune, trace)
    known = [step.name for step in planned]
    if unknown := [name for name in only if name not in known]:
        raise ConfigurationError(f"step '{unknown[0]}': use some of {', '.join(known)}")
    out.mkdir(parents=True, exist_ok=True)
    started, said = perf_counter(), dict[str, Any]()
    for step in planned:
        spent = perf_counter() - started
        if only and step.name not in only:
            continue
        if spent + step.seconds > seconds:
            said[step.name] = f'left out: {spent:.0f} s are spent'
            continue
        said[step.name] = _run(step, out, device)
        print(f'{step.name}: {json.dumps(said[step.name])}', file=sys.stderr, flush=True)
        if step.name == 'check' and not said[step.name].get('ok', False):
            break
    table = goal_table(out, profile, device)
    print('\n'.join(lines(table)), file=sys.stderr, flush=True)
    return {'profile': profile, 'device': device, 'out': str(out), 'steps': said,
            'goals': table, 'seconds': round(perf_counter() - started, 1),
            'ok': all(isinstance(value, str) or value['ok'] for value in said.values())}


def _run(step: Step, out: Path, device: str) -> dict[str, Any]:
    """Run one step and write its file; return the numbers that matter."""
    started = perf_counter()
    try:
        with watched(device) as state:
            found = step.run()
        found.setdefault('gpu_state', state)
    except Exception as error:  # one step must not take the others' numbers with it
        found = {'ok': False, 'error': f'{type(error).__name__}: {error}',
                 'traceback': traceback.format_exc()}
    found.setdefault('ok', True)
    found['seconds'] = round(perf_counter() - started, 1)
    (out / f'{step.name}.json').write_text(json.dumps(found, indent=1, default=str) + '\n',
                                           encoding='utf-8')
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return brief(found)


#: what the summary repeats of a step's file
_BRIEF = ('ok', 'error', 'seconds', 'weight_floor_ms', 'verify16_ms', 'verify_over_floor',
          'target_step_ms', 'draft_block_ms', 'c', 'flow_ms', 'flow_floor_ms', 'p50', 'p99',
          'allocations_after_warmup', 'nondeterministic_frames', 'repeated_frames',
          'token_mismatches', 'ways_with_other_actions', 'host_syncs_per_frame',
          'frame_speedup_vs_original', 'gpu_state', 'reasoning_speedup_vs_eager',
          'reasoning_speedup_vs_graphed_ar', 'kernels_us', 'prefill_attention_us',
          'small_frames', 'verify_check', 'fp8', 'checks', 'fp8_difference', 'unquantised',
          'quantised', 'drafts')


def brief(found: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a report that a summary repeats."""
    kept = {name: found[name] for name in _BRIEF if name in found}
    if 'prefill_ms' in found:
        kept['prefill_ms'] = found['prefill_ms']['p50']
    if isinstance(found.get('eager'), dict):
        kept['eager'] = {name: value for name, value in found['eager'].items()
                         if name.endswith('_ms')}
    for name, way in found.get('ways', {}).items():
        kept.setdefault('ways', {})[name] = {key: way[key] for key in (
            'p50', 'p99', 'accepted_length', 'iterations_per_frame', 'token_mismatches')
            if key in way}
    return kept
