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
What a proposal of every kind of draft costs on the device, beside the verify of its block.

Random weights of a profile's shapes and a reduced head; see `bench_decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_random import random_chain, random_draft
from rspec_planner.evaluate.bench import hardware
from rspec_planner.evaluate.bench_decode import Bed, BUDGET, repeat
from rspec_planner.evaluate.bench_workload import bench_prompt, BenchPrompt
from rspec_planner.model.draft import Draft
from rspec_planner.model.target import Target

KINDS: tuple[Callable[[Target], Draft], ...] = (
    random_draft, lambda target: random_draft(target, window=0),
    lambda target: random_draft(target, window=0, rotary='mirror'), random_chain,
    lambda target: random_chain(target, window=0))


def bench_drafts(profile: str = 'tiny', device: str = 'cpu') -> dict[str, Any]:
    """
    Return for each kind, by label, the milliseconds of a proposal and what it costs per frame.

    block_ms: all proposals of a block. c: block_ms over one token of the target. verify_ms: of
    its block. prompt_ms: what a draft of the whole context makes of the prompt once a frame.
    """
    bed = Bed.make(profile, device)
    target, prompt = bed.target, bench_prompt(bed.target.cfg, 0)
    bed.begin(prompt, BUDGET)
    plain = bed.frame.plain(target)
    with torch.inference_mode():
        bed.frame.prefill()
        plain.kernels.begin(plain.frame.numbers, plain.frame.tokens, None, plain.verify.ids,
                            (-1, -1))
    step = repeat(bed, plain.verify)['p50']
    rows = bed.frame.frame.prompt_rows
    del bed.frame, plain
    found = {}
    for make in KINDS:
        draft = make(target)
        times = _measure(bed, draft, rows, prompt)
        found[draft.cfg.label] = {**times, 'c': times['block_ms'] / step}
    return {'profile': profile, 'device': device, 'hardware': hardware(target.device),
            'torch': torch.__version__, 'weights': 'random', 'prompt_tokens': len(prompt.ids),
            'target_step_ms': step, 'drafts': found}


def _measure(bed: Bed, draft: Draft, rows: int, prompt: BenchPrompt) -> dict[str, float]:
    """Return the times of one draft over a frame of its own."""
    frame = DeviceFrame(bed.target, prompt_rows=rows, budget=BUDGET, draft=draft)
    frame.begin(prompt.ids, prompt.positions, prompt.rope_delta, BUDGET)
    with torch.inference_mode():
        frame.open()
        frame.iterate()
    assert frame.draft is not None
    return {'block_ms': repeat(bed, frame.draft)['p50'],
            'verify_ms': repeat(bed, frame.verify)['p50'],
            'prompt_ms': 0.0 if draft.cfg.window else repeat(bed, frame.draft.open, 8)['p50']}
