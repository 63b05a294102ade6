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
How the persistent kernel is cut, how its weights are laid out, and its machine code.

`persistent.cu` says what it does. Everything that depends on shapes is a macro of it, chosen here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rspec_planner.engine.kernels.driver import driver_result
from rspec_planner.errors import ConfigurationError, EngineError

_FOLDER = Path(__file__).parent
SOURCES = ('persistent_ptx.cuh', 'persistent.cu')
THREADS = 384  # eight warps that multiply; four that stream, and leave them their registers
HEAD_DIM = 128
#: shared memory of a block on sm_90, less what aligning it and the barriers take
SHARED, _ASIDE = 232_448, 2048
WIDTHS = (192, 128, 64)  # columns of a tile of weights
TALL = (16, 64)  # rows of a tile
_KEY_BYTES = 2 * HEAD_DIM + 16
MAX_KEY_PARTS = 32


@dataclass(frozen=True)
class Cut:
    """How a product is cut: columns of a tile, parts of its depth."""

    wide: int
    split: int


def cut_of(columns: int, depth: int, rows: int, blocks: int, most: int = 8) -> Cut:
    """
    Return the cut with the least traffic of the busiest block, one tile and part to a block.

    ConfigurationError where no cut gives each of the blocks at most one.
    """
    deep, found = depth // 64, dict[Cut, int]()
    for wide in WIDTHS:
        for split in range(1, min(most, deep) + 1):
            if columns % wide == 0 and columns // wide * split <= blocks:
                found[Cut(wide, split)] = -(-deep // split) * (wide + rows)
    if not found or depth % 64:
        raise ConfigurationError(f'a product of {columns} columns and depth {depth} has no cut '
                                 f'for {blocks} multiprocessors: run the layers one by one')
    return min(found, key=lambda cut: (found[cut], -cut.wide))


@dataclass(frozen=True)
class PersistentPlan:
    """Every size that is compiled into the kernel."""

    rows: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    causal: bool
    blocks: int
    parts: int  # of the keys, one block each
    qkv: Cut
    out: Cut
    up: Cut
    down: Cut
    row_slots: int

    @staticmethod
    def of(rows: int, hidden: int, heads: int, kv_heads: int, intermediate: int, causal: bool,
           blocks: int) -> PersistentPlan:
        """
        Return the plan of `rows` rows on a GPU of so many multiprocessors.

        Raises ConfigurationError for shapes that the kernel does not take.
        """
        tall = next((tall for tall in TALL if rows <= tall), 0)
        queries = tall * heads // kv_heads
        if queries not in (16, 32, 64, 128) or blocks < kv_heads:
            raise ConfigurationError(
                f'{rows} rows of {heads} query and {kv_heads} KV heads: the persistent kernel '
                'takes 16, 32, 64 or 128 queries a KV head')
        parts = min(blocks // kv_heads, MAX_KEY_PARTS * queries // 128)
        columns = (heads + 2 * kv_heads) * HEAD_DIM
        wide = heads * HEAD_DIM
        return PersistentPlan(
            tall, hidden, heads, kv_heads, intermediate, causal, blocks,
            parts - parts % 16 if parts > 16 else parts,
            cut_of(columns, hidden, tall, blocks), cut_of(hidden, wide, tall, blocks),
            cut_of(2 * intermediate, hidden, tall, blocks, 1),
            cut_of(hidden, intermediate, tall, blocks), 8 if tall == 16 else 5)

    @property
    def slot(self) -> int:
        """Return the bytes of a slot of the weights' ring."""
        return 128 * max(cut.wide for cut in (self.qkv, self.out, self.up, self.down))

    @property
    def queries(self) -> int:
        """Return the queries of one KV head."""
        return self.rows * self.heads // self.kv_heads

    @property
    def key_parts(self) -> int:
        """Return the parts of the keys, of which warps of one block may take two or more."""
        return self.parts * (128 // self.queries)

    def macros(self, trace: bool = False, free: bool = False) -> dict[str, int]:
        """Return what the source is compiled with, see `machine_code`."""
        rows = self.row_slots * self.rows * 128
        return {
            'THREADS': THREADS, 'TRACE': int(trace), 'FREE': int(free),
            'ROWS': self.rows, 'HIDDEN': self.hidden, 'HEADS': self.heads,
            'KV': self.kv_heads, 'INTER': self.intermediate, 'GRID': self.blocks,
            'CAUSAL': int(self.causal), 'PARTS': self.parts,
            'KEYS': min(64, self.slot // _KEY_BYTES // 16 * 16), 'SLOT': self.slot,
            'WEIGHT_SLOTS': (SHARED - _ASIDE - rows) // self.slot, 'ROW_SLOTS': self.row_slots,
            'QKV_C': self.qkv.wide, 'QKV_S': self.qkv.split, 'OUT_C': self.out.wide,
            'OUT_S': self.out.split, 'UP_C': self.up.wide, 'DOWN_C': self.down.wide,
            'DOWN_S': self.down.split}

    def source(self, trace: bool = False, free: bool = False) -> str:
        """Return the CUDA C++ source, see `machine_code`."""
        macros = ''.join(f'#define {name} {value}\n'
                         for name, value in self.macros(trace, free).items())
        return macros + ''.join((_FOLDER / name).read_text(encoding='utf-8') for name in SOURCES)


def packed(weight: Tensor, wide: int, gated: bool = False) -> Tensor:
    """
    Return weight (N, K) as the kernel streams it: (N / wide, K / 64, wide, 64), swizzled.

    gated: weight is gate above up; eight rows of one and eight of the other then take turns, so
    that one thread holds both factors of a result. Piece c (16 bytes) of row r of a tile lies at
    place c ^ (r % 8), the 128-byte swizzle of matrix descriptors (PTX ISA, wgmma).
    """
    columns, depth = weight.shape
    if gated:
        weight = weight.view(2, columns // 16, 8, depth).transpose(0, 1)
    tiles = weight.reshape(columns // wide, wide, depth // 64, 8, 8).transpose(1, 2)
    place = torch.arange(8, device=weight.device)
    piece = place[None, :] ^ (torch.arange(wide, device=weight.device)[:, None] % 8)
    swizzled = torch.take_along_dim(tiles, piece.view(1, 1, wide, 8, 1), dim=3)
    return swizzled.reshape(columns // wide, depth // 64, wide, 64).contiguous()


def bindings() -> tuple[Any, Any]:
    """Return the driver and NVRTC modules of cuda-bindings; EngineError without them."""
    try:
        from cuda.bindings import driver, nvrtc
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the second one: no library to load
        raise EngineError('NVRTC or cuda-bindings is missing and the persistent kernel needs '
                          f'both: pip install -r requirements-cuda.txt ({error})') from None
    return driver, nvrtc


def done(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver or of NVRTC gave; EngineError with its code otherwise."""
    return driver_result(result, 'the persistent kernel cannot run here; run the layers one by '
                         'one')


def machine_code(plan: PersistentPlan, trace: bool = False,
                 free: bool = False) -> tuple[bytes, str]:
    """
    Return the kernel for sm_90a and the compiler's report of registers and spills.

    trace: the first block writes cycle counts of every phase. free: no block waits for another
    one, which says what the barriers cost; the results are noise. Raises EngineError with the
    compiler's log where it refuses the source.
    """
    _, nvrtc = bindings()
    source = plan.source(trace, free).encode()
    program = done(nvrtc.nvrtcCreateProgram(source, b'persistent.cu', 0, [], []))
    options = [b'--gpu-architecture=sm_90a', b'--std=c++17', b'--ptxas-options=-v']
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    log = b' ' * int(done(nvrtc.nvrtcGetProgramLogSize(program)))
    done(nvrtc.nvrtcGetProgramLog(program, log))
    said = log.decode(errors='replace').strip('\0 \n')
    if int(code) != 0:
        raise EngineError(f'NVRTC refused the persistent kernel: {said}')
    made = b' ' * int(done(nvrtc.nvrtcGetCUBINSize(program)))
    done(nvrtc.nvrtcGetCUBIN(program, made))
    return made, said
