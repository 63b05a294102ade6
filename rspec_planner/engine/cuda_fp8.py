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
Weights in e4m3 with one factor for each output channel, and the products that read them.

Off by default. Whoever quantises a target gives its bf16 matrices up: they are freed layer by
layer, so that both copies never lie in memory together. Embedding, head, norms, action
projections, mergers of the tower and the draft stay as they are, and so does the KV cache.

Rows are quantised too, each with its own factor, in the pass in front of a product. A row's
result therefore never depends on its neighbours, and speculative decoding stays exact: it says
what the same weights say one token a forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn, Tensor

from rspec_planner.engine.cuda_rows import LayerWeights, quantise
from rspec_planner.engine.kernels import fp8_reference
from rspec_planner.engine.kernels.fp8_reference import E4M3
from rspec_planner.engine.kernels.select import Kernel, Kernels
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.layer import DecoderLayer
from rspec_planner.model.target import Target
from rspec_planner.model.vision import VisionBlock

#: rows in front of a narrow product: quantised; quantised behind a norm, whose pass does it; or
#: as they are. Where they are not, weights are converted in the loop.
ROWS = ('e4m3', 'normed', 'plain')
#: rows of ROWS that `rspec bench fp8` found fastest: for up to FEW rows, and for more
FASTEST = {'few': 'e4m3', 'many': 'e4m3'}
FEW = 32
#: most rows of a narrow product, `linear.MAX_ROWS`
NARROW = 128
#: products of many rows, the first that works is used
WIDE = ('row-wise', 'tensor-wise', 'dequantised')
#: the plans of narrow products, beside those of `cuda_tune`
PLANS_FILE = 'plans_fp8.json'
#: sizes that the library's scaled product takes are multiples of this
_GRAIN = 16
#: largest relative error of a product that counts as working: bf16 output, fp8 sums
_TOLERANCE = 0.02


@dataclass(frozen=True)
class Fp8Kernels:
    """One implementation of the fp8 kernels; meaning and signatures: `fp8_reference`."""

    norm8: Kernel
    gate8: Kernel
    gelu8: Kernel
    rescale: Kernel
    turn: Kernel
    product8: Kernel


REFERENCE8 = Fp8Kernels(fp8_reference.norm8, fp8_reference.gate8, fp8_reference.gelu8,
                        fp8_reference.rescale, fp8_reference.turn, fp8_reference.product8)


def triton_fp8_kernels() -> Fp8Kernels:
    """Return the Triton kernels; Triton must be installed, see `select.triton_kernels`."""
    from rspec_planner.engine.kernels import fp8, fp8_linear
    return Fp8Kernels(fp8.norm8, fp8.gate8, fp8.gelu8, fp8.rescale, fp8.turn,
                      fp8_linear.product8)


def quantised(x: Tensor, parts: Fp8Kernels, **options: Any) -> tuple[Tensor, Tensor]:
    """Return x (M, N) as e4m3 and its factors (M,), see `fp8_reference.norm8`."""
    small = torch.empty(x.shape, dtype=E4M3, device=x.device)
    factors = torch.empty(len(x), device=x.device)
    parts.norm8(x, small, factors, **options)
    return small, factors


class WideProducts:
    """
    Products of many e4m3 rows, through the library's scaled product where it works.

    mode: one of WIDE. refused: why those before it are not used. odd: (N, K) of products whose
    sizes the library does not take, which are dequantised.
    """

    def __init__(self, parts: Fp8Kernels, device: torch.device, dtype: torch.dtype,
                 mode: str = '', fast: bool = True) -> None:
        """
        Take `mode`, or try what works.

        fast: let the matrix units keep the running sum, which has fewer bits than fp32. Raises
        ConfigurationError for an unknown mode.
        """
        if mode and mode not in WIDE:
            raise ConfigurationError(f"fp8 product '{mode}': use one of {', '.join(WIDE)}")
        self._parts, self._dtype, self.fast = parts, dtype, fast
        self._one = torch.ones((), device=device)
        self.refused: dict[str, str] = {}
        self.odd: set[tuple[int, int]] = set()
        self.mode = mode or self._first_working(device)

    def _first_working(self, device: torch.device) -> str:
        if device.type != 'cuda' or self._dtype != torch.bfloat16:
            self.refused['row-wise'] = self.refused['tensor-wise'] = \
                f'{device.type} in {str(self._dtype).split(".")[-1]}, made for cuda in bfloat16'
            return WIDE[-1]
        for mode in WIDE[:-1]:
            reason = self._try(mode, device)
            if not reason:
                return mode
            self.refused[mode] = reason
        return WIDE[-1]

    def _try(self, mode: str, device: torch.device) -> str:
        """Return why a product cannot be used, or nothing."""
        try:
            error = self._probe(mode, device)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as reason:
            return str(reason).splitlines()[0][:200]
        return '' if error < _TOLERANCE else f'relative error {error:.3g}'

    def _probe(self, mode: str, device: torch.device) -> float:
        """Return the relative error of a small product."""
        x, weight = (torch.randn(size, device=device) for size in ((144, 512), (384, 512)))
        x, weight = x.to(E4M3), weight.to(E4M3)
        rows, columns = (torch.rand(len(m), device=device) + 0.5 for m in (x, weight))
        found = self._product(mode, x, rows, weight, columns).double()
        expected = x.double() @ weight.double().t() * rows[:, None] * columns
        return float((found - expected).norm() / expected.norm())

    def __call__(self, x: Tensor, rows: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
        """Return (M, N) of x (M, K) e4m3 and weight (N, K) e4m3 with their factors."""
        mode = self.mode
        if mode != WIDE[-1] and (x.shape[1] % _GRAIN or len(weight) % _GRAIN):
            self.odd.add((len(weight), x.shape[1]))
            mode = WIDE[-1]
        return self._product(mode, x, rows, weight, columns)

    def _product(self, mode: str, x: Tensor, rows: Tensor, weight: Tensor,
                 columns: Tensor) -> Tensor:
        if mode == 'row-wise':
            return torch._scaled_mm(x, weight.t(), scale_a=rows[:, None],
                                    scale_b=columns[None], out_dtype=self._dtype,
                                    use_fast_accum=self.fast)
        if mode == 'tensor-wise':
            product = torch._scaled_mm(x, weight.t(), scale_a=self._one, scale_b=self._one,
                                       out_dtype=self._dtype, use_fast_accum=self.fast)
        else:  # e4m3 numbers are bf16 numbers; sums of their products exceed fp16
            between = torch.float32 if self._dtype == torch.float16 else self._dtype
            product = torch.mm(x.to(between), weight.to(between).t())
        self._parts.rescale(product, rows, columns)
        return product.to(self._dtype)

    def report(self) -> dict[str, Any]:
        """Return what runs and why."""
        return {'wide_products': self.mode, 'refused': dict(self.refused),
                'fast_accumulation': self.fast, 'dequantised_sizes': sorted(self.odd)}


class Fp8Linear:
    """`reference.linear` that quantises its rows where the weight is e4m3."""

    def __init__(self, plain: Kernels, parts: Fp8Kernels, wide: WideProducts,
                 rows: tuple[str, str] = (ROWS[0], ROWS[0])) -> None:
        """rows: one of ROWS for up to FEW rows, and one for more."""
        for name in rows:
            if name not in ROWS:
                raise ConfigurationError(f"fp8 rows '{name}': use one of {', '.join(ROWS)}")
        self._plain, self._parts, self._wide, self.rows = plain, parts, wide, rows

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, *, norm: Tensor | None = None,
                 eps: float = 0.0, residual: Tensor | None = None, gated: bool = False,
                 scale: Tensor | None = None, width: int = 0, **hints: Any) -> None:
        """Fill out (M, N); hints: options of the plain product that change no result."""
        most = max(len(x), width)
        rows = self.rows[most > FEW]
        kept = rows == 'plain' or (rows == 'normed' and norm is None)
        if scale is None or (kept and most <= NARROW):
            self._plain.linear(x, weight, out, norm=norm, eps=eps, residual=residual,
                               gated=gated, scale=scale, width=width, **hints)
            return
        small, factors = quantised(x, self._parts, weight=norm, eps=eps)
        if most <= NARROW:
            self._parts.product8(small, factors, weight, scale, out, residual=residual,
                                 gated=gated, width=width)
            return
        product = self._wide(small, factors, weight, scale)
        if gated:
            self._plain.gate(product, out)
        else:
            out.copy_(product if residual is None else product.add_(residual))


@dataclass(frozen=True)
class Matrix:
    """A linear in e4m3: weight (N, K), factors (N,) fp32 and bias (N,)."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    @staticmethod
    def take(linear: nn.Linear) -> Matrix:
        """Return a linear in e4m3 and free its own weight; EngineError where it has none left."""
        if linear.weight.numel() == 0:
            raise EngineError('the tower was quantised before and has no matrices left: load the '
                              'target anew')
        weight, scale = quantise(linear.weight.detach())
        free([linear])
        return Matrix(weight, scale, linear.bias.detach())


@dataclass(frozen=True)
class Block:
    """One block of the tower."""

    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    qkv: Matrix
    proj: Matrix
    fc1: Matrix
    fc2: Matrix
    heads: int

    @staticmethod
    def take(block: VisionBlock) -> Block:
        """Return a block in e4m3 and free its own matrices."""
        attention, mlp = block.attn, block.mlp
        return Block((block.norm1, block.norm2), Matrix.take(attention.qkv),
                     Matrix.take(attention.proj), Matrix.take(mlp.linear_fc1),
                     Matrix.take(mlp.linear_fc2), attention.num_heads)


@dataclass(frozen=True)
class Fp8Weights:
    """The layers of a quantised target, which no longer has them, and how they are run."""

    text: tuple[LayerWeights, ...]
    expert: tuple[LayerWeights, ...]
    parts: Fp8Kernels
    wide: WideProducts
    rows: tuple[str, str] = (ROWS[0], ROWS[0])  # see `Fp8Linear`
    vision: tuple[Block, ...] = ()  # of the tower, where it is quantised

    def kernels(self, plain: Kernels) -> Kernels:
        """Return kernels whose `linear` reads these weights."""
        return replace(plain, linear=Fp8Linear(plain, self.parts, self.wide, self.rows))

    def report(self) -> dict[str, Any]:
        """Return how the products run, for a report."""
        return {**self.wide.report(), 'narrow_rows': list(self.rows), 'vision': bool(self.vision),
                'weight_bytes': sum(map(layer_bytes, (*self.text, *self.expert)))}


def layer_bytes(weights: LayerWeights) -> int:
    """Return the bytes of the matrices of a layer, factors included."""
    tensors = [weights.qkv, weights.out, weights.gate_up, weights.down, *weights.scales.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fp8_parts(device: torch.device) -> Fp8Kernels:
    """Return the fp8 kernels of a device."""
    return triton_fp8_kernels() if device.type == 'cuda' else REFERENCE8


def quantise_target(target: Target, *, rows: str = '', vision: bool = False,
                    parts: Fp8Kernels | None = None, wide: str = '', fast: bool = True
                    ) -> Fp8Weights:
    """
    Return the layers of text and expert in e4m3; the target gives its own up.

    vision: the tower's blocks too; it then runs as `cuda_fp8_vision.Fp8Tower` only. rows: one of
    ROWS, empty for the fastest. wide: one of WIDE, empty to try them. parts: other kernels than
    the device's own. fast: see `WideProducts`. Raises EngineError for a target that was
    quantised before or is not packed.
    """
    chosen = parts or fp8_parts(target.device)
    products = WideProducts(chosen, target.device, target.dtype, wide, fast)
    text, expert = (tuple(take(cast('DecoderLayer', layer)) for layer in stack)
                    for stack in (target.text.layers, target.expert.layers))
    blocks = tuple(Block.take(cast('VisionBlock', block)) for block in target.vision.blocks) \
        if vision else ()
    return Fp8Weights(text, expert, chosen, products,
                      (rows, rows) if rows else (FASTEST['few'], FASTEST['many']), blocks)


def take(layer: DecoderLayer) -> LayerWeights:
    """Return one layer in e4m3 and free its own matrices."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
               mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if linears[0].weight.numel() == 0:
        raise EngineError('the target was quantised before and has no matrices left: load it anew')
    made = LayerWeights.of(layer).fp8()
    layer.packed = None
    free(linears)
    return made


def free(linears: Iterable[nn.Linear]) -> None:
    """Give the weights of linears up."""
    for linear in linears:
        linear.weight.data = linear.weight.data.new_empty(0)
