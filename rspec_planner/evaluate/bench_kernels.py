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
Check the kernels of the device-resident frame on the GPU at hand, tune and time them one by one.

The check comes first and costs seconds: the launches of a whole small frame, and one verify at
the profile's shapes, through the Triton kernels and through their PyTorch references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel, SDPBackend

from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_random import random_draft, random_target
from rspec_planner.engine.cuda_rows import LayerWeights, Rows
from rspec_planner.engine.kernels.frame import Slot
from rspec_planner.engine.kernels.select import kernels_for, REFERENCE
from rspec_planner.evaluate.bench import hardware
from rspec_planner.evaluate.bench_decode import Bed, BUDGET, profile_config, repeat
from rspec_planner.evaluate.bench_workload import bench_prompt

#: largest relative difference of tapped states between two ways of rounding bf16
TOLERANCE = 0.05


def bench_kernels(profile: str = 'tiny', device: str = 'cpu', *, plans: Path | None = None,
                  limit: int = 7) -> dict[str, Any]:
    """
    Return the check, the plans tried for each product, and microseconds of single kernels.

    plans: a file that receives the fastest plans; None tunes nothing. `ok` is False where a
    kernel differs from its reference.
    """
    place = torch.device(device)
    small = small_frames(place)
    bed = Bed.make(profile, device)
    bed.begin(bench_prompt(bed.target.cfg, 0), BUDGET)
    check = verify_check(bed)
    tried: list[dict[str, object]] = []
    if plans is not None and place.type == 'cuda':
        from rspec_planner.engine.cuda_tune import save_plans, tune
        tried = tune(products(bed), limit)
        save_plans(plans)
    return {'ok': small['equal'] and check['error'] < TOLERANCE, 'profile': profile,
            'device': device, 'hardware': hardware(place), 'torch': torch.__version__,
            'small_frames': small, 'verify_check': check, 'tuned': tried,
            'kernels_us': kernel_times(bed), 'prefill_attention_us': prefill_attention(bed)}


def small_frames(device: torch.device) -> dict[str, Any]:
    """Decode the tiny shapes in fp32 through the device's kernels and through the references."""
    target = random_target(profile_config('tiny'), device, torch.float32)
    draft = random_draft(target, block=8, vocabulary=0)
    prompt = bench_prompt(target.cfg, 0)
    results = []
    for kernels in (kernels_for(device), REFERENCE):
        results.append(_small_frame(DeviceFrame(
            target, prompt_rows=len(prompt.ids) + 3, budget=8, draft=draft, guess_room=2,
            kernels=kernels)))
    (said, actions), (expected, wanted) = results
    return {'equal': said == expected, 'said': list(said), 'expected': list(expected),
            'actions_apart': float((actions - wanted).abs().max())}


def _small_frame(frame: DeviceFrame) -> tuple[tuple[int, ...], Tensor]:
    prompt = bench_prompt(profile_config('tiny'), 0)
    frame.begin(prompt.ids, prompt.positions, prompt.rope_delta, 8, (1, 2))
    generator = torch.Generator().manual_seed(0)
    frame.frame.noise.copy_(torch.randn(frame.frame.noise.shape, generator=generator))
    frame.run()
    if frame.frame.device.type == 'cuda':
        torch.cuda.synchronize()
    result = frame.frame.result()
    return result.generated, result.actions


def verify_check(bed: Bed) -> dict[str, Any]:
    """Return how one verify at the profile's shapes differs from its reference."""
    frame, verify = bed.frame, bed.frame.verify
    generator = torch.Generator().manual_seed(3)
    verify.ids.copy_(torch.randint(1000, verify.ids.shape, generator=generator))
    taps, best = [], []
    with torch.inference_mode():
        frame.prefill()
        frame.frame.at(Slot.START).copy_(frame.frame.at(Slot.P))
        frame.frame.at(Slot.ANGLE).copy_(
            frame.frame.at(Slot.P) + frame.frame.at(Slot.ROPE_DELTA))
        start = int(frame.frame.numbers[Slot.START])
        for kernels in (frame.kernels, REFERENCE):
            verify.use(kernels)
            frame.taps.rows[start:start + len(verify.ids)] = float('nan')
            verify()
            taps.append(frame.taps.rows[start:start + len(verify.ids)].double())
            best.append(verify.best.clone())
        verify.use(frame.kernels)
    apart = (taps[0] - taps[1]).norm() / taps[1].norm()
    return {'error': float(apart) if bool(apart.isfinite()) else float('inf'),
            'choices_equal': int((best[0] == best[1]).sum()), 'choices': len(best[0])}


def products(bed: Bed) -> list[Any]:
    """Return every kind of small product of a frame."""
    from rspec_planner.engine.cuda_tune import Product
    block = bed.draft.cfg.block
    waypoints = bed.target.cfg.action_space.n_waypoints
    found = []
    for name, layers, rows in (('text', bed.target.text.layers, block),
                               ('expert', bed.target.expert.layers, waypoints)):
        weights = [LayerWeights.of(layer) for layer in layers]
        found += [Product(f'{name} qkv', [w.qkv for w in weights], rows, apart=True),
                  Product(f'{name} out', [w.out for w in weights], rows, apart=True),
                  Product(f'{name} gate_up', [w.gate_up for w in weights], rows, gated=True),
                  Product(f'{name} down', [w.down for w in weights], rows, apart=True)]
    fc = bed.draft.fc.weight.detach()
    found.append(Product('draft fc', [fc, fc.clone()], bed.draft.cfg.window))
    return found


def kernel_times(bed: Bed) -> dict[str, float]:
    """Return the median microseconds of each kernel of a verify and of a flow step."""
    frame, verify, flow = bed.frame, bed.frame.verify, bed.frame.flow
    numbers, cache = frame.frame, frame.cache
    start, angle, zero = (numbers.at(slot) for slot in (Slot.START, Slot.ANGLE, Slot.ZERO))
    numbers.at(Slot.CONTEXT).copy_(numbers.at(Slot.P) + 1)
    turned = numbers.at(Slot.CONTEXT) + numbers.at(Slot.ROPE_DELTA)
    found = layer_times(bed, verify.runner, verify.layers, (start, angle), [
        (cache.keys[index], cache.values[index]) for index in range(len(verify.layers))], [
        {'start': start, 'cache': (cache.keys[index, 0], cache.values[index, 0])}
        for index in range(len(verify.layers))])
    found['head + argmax'] = 1e3 * repeat(
        bed, lambda: verify.choose(verify.runner.hidden, verify.best), 10)['p50']
    found['accept'] = 1e3 * repeat(bed, lambda: frame.kernels.accept(
        numbers.numbers, numbers.tokens, verify.ids, verify.best, numbers.stops,
        numbers.counts), 10)['p50']
    count = len(flow.layers)
    of_flow = layer_times(bed, flow.rows, flow.layers, (zero, turned), [flow.own] * count,
                          [flow.view(index) for index in range(count)])
    return {**found, **{f'flow, {name}': value for name, value in of_flow.items()}}


def layer_times(bed: Bed, rows: Rows, layers: Sequence[LayerWeights],
                at: tuple[Tensor, Tensor], held: Sequence[tuple[Tensor, Tensor]],
                views: Sequence[dict[str, Any]]) -> dict[str, float]:
    """
    Return the median microseconds of each launch of a layer, over the layers in turn.

    They are those of `Rows.layer`: a product in parts is timed with the kernel that adds them up.
    """
    def each(work: Callable[[int], None]) -> Callable[[], None]:
        def run() -> None:
            for index in range(len(layers)):
                work(index)
        return run

    hidden = rows.hidden
    works: dict[str, Callable[[int], None]] = {
        'norm + qkv': lambda index: rows.project(layers[index], hidden),
        'rotary + K/V write': lambda index: rows.rotate(layers[index], *at, held[index]),
        'attention': lambda index: rows.attend(views[index]),
        'out + gated mlp': lambda index: rows.finish(layers[index], hidden, hidden)}
    if rows.in_parts(layers[0]):
        works = {
            'qkv + rotary + K/V write': lambda index: rows.enter(layers[index], *at, held[index]),
            'attention': works['attention'],
            'out + sum + norm': lambda index: rows.leave(layers[index], hidden),
            'gate and up': lambda index: rows.widen(layers[index]),
            'down + sum + norm': lambda index: rows.narrow(layers[index], hidden, layers[index])}
    return {name: 1e3 * repeat(bed, each(work), 10)['p50'] / len(layers)
            for name, work in works.items()}


def prefill_attention(bed: Bed) -> dict[str, float]:
    """Return the microseconds of one layer's prefill attention under each library kernel."""
    if bed.target.device.type != 'cuda':
        return {}
    text, rows = bed.target.cfg.text, bed.frame.frame.prompt_rows
    q = torch.randn((1, rows, text.num_heads, text.head_dim), device=bed.target.device,
                    dtype=bed.target.dtype).transpose(1, 2)
    keys, values = (x[0][:, :, :rows] for x in (bed.frame.cache.keys, bed.frame.cache.values))
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for grouped in (True, False):
            group = 1 if grouped else text.num_heads // text.num_kv_heads
            k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (keys, values))
            name = f'{backend.name.lower()}{"" if grouped else ", heads repeated"}'
            try:
                with sdpa_kernel(backend):
                    found[name] = 1e3 * repeat(bed, partial(_attend, q, k, v, grouped), 10)['p50']
            except RuntimeError:  # not for these shapes
                found[name] = float('nan')
    return found


def _attend(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> None:
    functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
