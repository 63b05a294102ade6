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
Check the fp8 kernels on the GPU at hand, tune them, and time what may stand in for what.

Every answer that a later run needs comes out of one: which wide product works and how fast, with
and without sums in the matrix units, how far each is from exact sums, which rows a narrow product
should read, and what a prefill, a verify and the flow take with each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
import gc
from pathlib import Path
from typing import Any, cast, TypeVar

import torch
from torch import Tensor

from rspec_planner.engine.cuda_fp8 import (
    FASTEST,
    Fp8Kernels,
    Fp8Weights,
    REFERENCE8,
    ROWS,
    WIDE,
    WideProducts,
)
from rspec_planner.engine.cuda_rows import LayerWeights, MATRICES
from rspec_planner.engine.kernels.fp8_reference import E4M3
from rspec_planner.evaluate.bench import hardware
from rspec_planner.evaluate.bench_decode import Bed, BUDGET, repeat
from rspec_planner.evaluate.bench_workload import bench_prompt

#: largest relative error of a kernel against its reference: bf16 results, sums of e4m3 products
TOLERANCE = 0.02


def bench_fp8(profile: str = 'tiny', device: str = 'cpu', *, plans: Path | None = None,
              limit: int = 6) -> dict[str, Any]:
    """
    Return checks, plans and times; milliseconds unless a key says otherwise.

    plans: a file that receives the fastest plans of the narrow products and the fastest rows in
    front of them, both used from now on; None tunes nothing.
    `ok` is False where a kernel differs from its reference.
    """
    place = torch.device(device)
    bed = Bed.make(profile, device)
    bed.begin(bench_prompt(bed.target.cfg, 0), BUDGET)
    before = {'memory_gb': memory_gb(place), **times(bed)}
    bed = bed.quantised()
    gc.collect()
    bed.begin(bench_prompt(bed.target.cfg, 0), BUDGET)
    assert bed.fp8 is not None
    checks = {'passes': check_passes(bed), 'narrow': check_narrow(bed)}
    tried: list[dict[str, object]] = []
    tuned = plans is not None and place.type == 'cuda'
    if tuned:
        from rspec_planner.engine.cuda_fp8_tune import tune
        try:
            tried = tune(narrow_products(bed), limit)
        except Exception as reason:  # the compiler's own kinds; the other rows may still run
            tried = [{'refused': said(reason)}]
    found = variants(bed)
    if tuned:
        from rspec_planner.engine.cuda_fp8_tune import save_plans
        FASTEST.update(fastest(found))
        save_plans(cast('Path', plans))
    errors = [error for found in checks.values() for error in found.values()]
    return {'ok': all(error < TOLERANCE for error in errors), 'profile': profile,
            'device': device, 'hardware': hardware(place), 'torch': torch.__version__,
            'weights': 'random', 'fp8': bed.fp8.report(), 'checks': checks, 'tuned': tried,
            'wide_products': wide_products(bed), 'passes_us': pass_times(bed),
            'unquantised': before,
            'quantised': {'memory_gb': memory_gb(place), 'fastest': fastest(found), **found}}


def memory_gb(device: torch.device) -> float:
    """Return the allocated device memory, 0 without a GPU."""
    return round(torch.cuda.memory_allocated(device) / 1e9, 2) if device.type == 'cuda' else 0.0


def times(bed: Bed) -> dict[str, float]:
    """Return the medians of a prefill, a verify and the flow."""
    frame, found = bed.frame, {'prefill_ms': prefill_ms(bed)}
    with torch.inference_mode():
        frame.kernels.begin(frame.frame.numbers, frame.frame.tokens, None, frame.verify.ids,
                            (-1, -1))
    return {**found, 'verify_ms': repeat(bed, frame.verify, 20)['p50'],
            'flow_ms': repeat(bed, frame.flow, 8)['p50']}


def prefill_ms(bed: Bed) -> float:
    """Return the median of a prefill, which begins the same frame every time."""
    numbers, prefill = bed.frame.frame.numbers, bed.frame.prefill
    begun = numbers.clone()

    def run() -> None:
        numbers.copy_(begun)
        prefill()

    with torch.inference_mode():
        return repeat(bed, run, 10)['p50']


def variants(bed: Bed) -> dict[str, Any]:
    """Return the times with each kind of narrow rows, and of a prefill by each wide product."""
    assert bed.fp8 is not None
    found: dict[str, Any] = {}
    for rows in ROWS:
        found[f'narrow rows {rows}'] = attempt(
            partial(times, rebuilt(bed, replace(bed.fp8, rows=(rows, rows)))))
    for mode in WIDE:
        if mode in bed.fp8.wide.refused or (mode == WIDE[-1] and bed.fp8.wide.mode != mode):
            continue
        for fast in (True, False):
            wide = WideProducts(bed.fp8.parts, bed.target.device, bed.target.dtype, mode, fast)
            each = rebuilt(bed, replace(bed.fp8, wide=wide))
            name = f'prefill_ms, {mode}{"" if fast else ", fp32 sums"}'
            found[name] = attempt(partial(prefill_ms, each))
    return found


def fastest(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows with which a verify, and those with which the flow, took least."""
    ran = {rows: each for rows in ROWS
           if isinstance(each := found[f'narrow rows {rows}'], Mapping)} or {ROWS[0]: {}}
    return {name: min(ran, key=lambda rows: float(ran[rows].get(key, 0.0)))
            for name, key in (('few', 'verify_ms'), ('many', 'flow_ms'))}


def rebuilt(bed: Bed, weights: Fp8Weights) -> Bed:
    """Return a bed over the same weights, run otherwise."""
    made = Bed._over(bed.target, bed.draft, bed.frame.frame.noise.shape[0], weights)
    made.begin(bench_prompt(made.target.cfg, 0), BUDGET)
    return made


Measured = TypeVar('Measured')


def attempt(measure: Callable[[], Measured]) -> Measured | str:
    """Return a measurement, or why there is none: one refusal must not take the others along."""
    try:
        return measure()
    except Exception as reason:  # the library's RuntimeError, the compiler's own kinds
        return said(reason)


def said(reason: Exception) -> str:
    """Return the kind and the first line of an error."""
    return f'{type(reason).__name__}: {(str(reason).splitlines() or [""])[0][:200]}'


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the relative error; infinity for anything that is not finite."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(error) if bool(error.isfinite()) else float('inf')


def check_passes(bed: Bed) -> dict[str, float]:
    """Return the relative error of each quantising pass at the profile's widths."""
    assert bed.fp8 is not None
    text, vision, device = bed.target.cfg.text, bed.target.cfg.vision, bed.target.device

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device).to(bed.target.dtype)

    x, delta, weight = drawn(33, text.hidden_size), drawn(33, text.hidden_size), drawn(
        text.hidden_size)
    joined = drawn(33, 2 * text.intermediate_size)
    hidden, bias = drawn(33, vision.hidden_size), drawn(vision.hidden_size)
    wide, shift = drawn(33, vision.intermediate_size), drawn(vision.intermediate_size)
    half = vision.hidden_size // vision.num_heads // 2
    qkv, qkv_bias = drawn(36, 3 * vision.hidden_size), drawn(3 * vision.hidden_size)
    angles = torch.randn((12, half), device=device).repeat(1, 2)
    cases: dict[str, Callable[[Fp8Kernels], Tensor]] = {
        'norm8': lambda parts: _passed(x, lambda a, s: parts.norm8(x, a, s, weight=weight,
                                                                   eps=1e-6)),
        'norm8 with a sum': lambda parts: _passed(x, lambda a, s: parts.norm8(
            x.clone(), a, s, weight=weight, eps=1e-6, delta=delta)),
        'norm8 of nothing': lambda parts: _passed(x, lambda a, s: parts.norm8(x, a, s)),
        'gate8': lambda parts: _passed(joined[:, ::2], lambda a, s: parts.gate8(joined, a, s)),
        'norm8 of a tower': lambda parts: _passed(hidden, lambda a, s: parts.norm8(
            hidden.clone(), a, s, weight=bias, bias=bias, eps=1e-6, delta=hidden, shift=bias)),
        'gelu8': lambda parts: _passed(wide, lambda a, s: parts.gelu8(wide, shift, a, s)),
        'turn': lambda parts: _turned(parts, qkv, qkv_bias, angles, vision.num_heads)}
    return {name: apart(case(bed.fp8.parts), case(REFERENCE8)) for name, case in cases.items()}


def _passed(like: Tensor, run: Callable[[Tensor, Tensor], None]) -> Tensor:
    out = torch.empty(like.shape, dtype=E4M3, device=like.device)
    scale = torch.empty(len(like), device=like.device)
    run(out, scale)
    return out.float() * scale[:, None]


def _turned(parts: Fp8Kernels, qkv: Tensor, shift: Tensor, angles: Tensor, heads: int) -> Tensor:
    out = qkv.clone()
    parts.turn(out, shift, (angles.cos(), angles.sin()), heads)
    return out


def check_narrow(bed: Bed) -> dict[str, float]:
    """Return the relative error of every narrow product of a verify and of a flow step."""
    assert bed.fp8 is not None
    found = {}
    for stack, layers, rows in _stacks(bed):
        for name in MATRICES:
            weight, scale = getattr(layers[0], name), layers[0].scales[name]
            gated = name == 'gate_up'
            x = torch.randn((rows, weight.shape[1]), device=weight.device).to(E4M3)
            factors = torch.rand(rows, device=weight.device) + 0.5
            outs = [torch.empty((rows, len(weight) // (1 + gated)), dtype=bed.target.dtype,
                                device=weight.device) for _ in range(2)]
            error = attempt(partial(_product_error, bed.fp8.parts, (x, factors, weight, scale),
                                    outs, gated))
            found[f'{stack} {name}'] = error if isinstance(error, float) else float('inf')
    return found


def _product_error(parts: Fp8Kernels, operands: tuple[Tensor, ...], outs: Sequence[Tensor],
                   gated: bool) -> float:
    for each, out in zip((parts, REFERENCE8), outs):
        each.product8(*operands, out, gated=gated)
    return apart(*outs)


def _stacks(bed: Bed) -> list[tuple[str, list[LayerWeights], int]]:
    flow = bed.target.cfg.action_space.n_waypoints
    return [('text', bed.frame.verify.layers, bed.draft.cfg.block),
            ('expert', bed.frame.flow.layers, flow)]


def narrow_products(bed: Bed) -> list[Any]:
    """Return every kind of narrow fp8 product of a frame."""
    from rspec_planner.engine.cuda_fp8_tune import Fp8Product
    return [Fp8Product(f'{stack} {name}', [getattr(layer, name) for layer in layers],
                       [layer.scales[name] for layer in layers], rows, name == 'gate_up')
            for stack, layers, rows in _stacks(bed) for name in MATRICES]


def wide_products(bed: Bed) -> dict[str, Any]:
    """
    Return, for each product of a prefill, microseconds and TFLOP/s by every way that works.

    error: relative to exact sums of the same operands, on eight rows; it is what sums in the
    matrix units cost, beside the bf16 of the result.
    """
    assert bed.fp8 is not None
    count, device, dtype = bed.frame.frame.prompt_rows, bed.target.device, bed.target.dtype
    layer, found = bed.frame.prefill.layers[0], {}
    for name in MATRICES:
        weight, scale = getattr(layer, name), layer.scales[name]
        x = torch.randn((count, weight.shape[1]), device=device)
        small, factors = torch.empty(x.shape, dtype=E4M3, device=device), torch.empty(
            count, device=device)
        bed.fp8.parts.norm8(x.to(dtype), small, factors)
        exact = (small[:8].double() @ weight.double().t()) * factors[:8, None] * scale
        plain = (weight.float() * scale[:, None]).to(dtype)
        flops = 2.0 * count * weight.numel()
        rows: dict[str, Any] = {}
        us = 1e3 * repeat(bed, partial(_multiply, x.to(dtype), plain.t()), 10)['p50']
        rows[str(dtype).split('.')[-1]] = {'us': us, 'tflops': flops / us / 1e6 if us else 0.0}
        for mode in WIDE[:-1]:
            for fast in (True, False):
                wide = WideProducts(bed.fp8.parts, device, dtype, mode, fast)
                rows[f'{mode}{"" if fast else ", fp32 sums"}'] = _timed(
                    bed, wide, (small, factors, weight, scale), exact, flops)
        found[name] = rows
    return found


def _timed(bed: Bed, wide: WideProducts, operands: tuple[Tensor, Tensor, Tensor, Tensor],
           exact: Tensor, flops: float) -> dict[str, Any]:
    """Return time, speed and error of one way, or why there is none."""
    try:
        error = apart(wide(*operands)[:8], exact)
        us = 1e3 * repeat(bed, partial(_multiply_small, wide, operands), 10)['p50']
    except Exception as reason:
        return {'refused': said(reason)}
    return {'us': us, 'tflops': flops / us / 1e6 if us else 0.0, 'error': error}


def _multiply(x: Tensor, weight: Tensor) -> None:
    torch.mm(x, weight)


def _multiply_small(wide: WideProducts, operands: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    wide(*operands)


def pass_times(bed: Bed) -> dict[str, float]:
    """Return the microseconds of each pass of a prefill."""
    assert bed.fp8 is not None
    parts, text = bed.fp8.parts, bed.target.cfg.text
    count, device, dtype = bed.frame.frame.prompt_rows, bed.target.device, bed.target.dtype
    x = torch.randn((count, text.hidden_size), device=device).to(dtype)
    delta, weight = x.clone(), x[0].clone()
    joined = torch.randn((count, 2 * text.intermediate_size), device=device).to(dtype)
    small = torch.empty(x.shape, dtype=E4M3, device=device)
    gated = torch.empty((count, text.intermediate_size), dtype=E4M3, device=device)
    factors = torch.empty(count, device=device)
    works: dict[str, Callable[[], None]] = {
        'quantise': lambda: parts.norm8(x, small, factors),
        'norm, quantise': lambda: parts.norm8(x, small, factors, weight=weight, eps=1e-6),
        'add, norm, quantise': lambda: parts.norm8(x, small, factors, weight=weight, eps=1e-6,
                                                   delta=delta),
        'gate, quantise': lambda: parts.gate8(joined, gated, factors)}
    return {name: 1e3 * repeat(bed, work, 10)['p50'] for name, work in works.items()}
