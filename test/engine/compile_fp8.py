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
Compile every fp8 launch at the R1 shapes for sm_90, see `compile_kernels`.

python test/engine/compile_fp8.py prints one line a launch and then the matrix instructions of
its products; with `widths`, what each launch of a verify would compile.
"""

from dataclasses import replace
from pathlib import Path
import re
import sys

import torch
from triton.runtime import jit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compile_kernels
from compile_kernels import BF16, intercept, meta, name_launch, triton

from rspec_planner.engine.cuda_fp8 import quantise_target, triton_fp8_kernels
from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_random import random_target
from rspec_planner.engine.kernels.launch import overlapped
from rspec_planner.engine.kernels.select import triton_kernels
from rspec_planner.model.config import alpamayo_r1

E4M3, FP32, EPS = torch.float8_e4m3fn, torch.float32, 1e-6
PROMPT, PATCHES = 3072, 2880


def telling(compile_it):
    """Print the matrix instructions of what is compiled."""
    def run(*arguments, **keywords):
        made = compile_it(*arguments, **keywords)
        found = re.findall(r'(?:wgmma\.mma_async|mma)\.sync\.aligned\.\w+[\w.]*', made.asm['ptx'])
        for name in sorted(set(found)):
            print('instruction', name)
        return made
    return run


def launches():
    """Call every fp8 kernel with the shapes of a prefill, a tower, a verify and a flow step."""
    parts = triton_fp8_kernels()
    factors = meta(PROMPT, dtype=FP32)
    x, small = meta(PROMPT, 4096), meta(PROMPT, 4096, dtype=E4M3)
    parts.norm8(x, small, factors)
    parts.norm8(x, small, factors, weight=meta(4096), eps=EPS)
    parts.norm8(x, small, factors, weight=meta(4096), eps=EPS, delta=x)
    parts.gate8(meta(PROMPT, 24_576), meta(PROMPT, 12_288, dtype=E4M3), factors)
    parts.rescale(meta(PROMPT, 6144), factors, meta(6144, dtype=FP32))
    x, small = meta(PATCHES, 1152), meta(PATCHES, 1152, dtype=E4M3)
    parts.norm8(x, small, factors, weight=meta(1152), bias=meta(1152), eps=EPS)
    parts.norm8(x, small, factors, weight=meta(1152), bias=meta(1152), eps=EPS, delta=x,
                shift=meta(1152))
    parts.gelu8(meta(PATCHES, 4304), meta(4304), meta(PATCHES, 4304, dtype=E4M3), factors)
    table = meta(720, 72, dtype=FP32)
    parts.turn(meta(PATCHES, 3456), meta(3456), (table, table), 16)
    for rows, hidden, heads, middle in ((16, 4096, 32, 12_288), (64, 2048, 16, 8256)):
        for columns, depth, gated in (((heads + 16) * 128, hidden, False),
                                      (hidden, heads * 128, False), (middle, hidden, True),
                                      (hidden, middle, False)):
            weight = meta(columns * (1 + gated), depth, dtype=E4M3)
            out = meta(rows, columns)
            parts.product8(meta(rows, depth, dtype=E4M3), factors, weight,
                           meta(len(weight), dtype=FP32), out, gated=gated,
                           residual=None if gated else out)
    wide = meta(128, 2048, dtype=E4M3)  # two candidates
    parts.product8(wide, factors, meta(4096, 2048, dtype=E4M3), meta(4096, dtype=FP32),
                   meta(128, 4096))


def verifies():
    """Launch a verify of every width beside the widest, at the R1 shapes with two layers."""
    cfg = alpamayo_r1()
    cfg = replace(cfg, text=replace(cfg.text, num_layers=2))
    target = random_target(cfg, torch.device('meta'), BF16)
    weights = quantise_target(target, parts=triton_fp8_kernels())
    for block in (16, 24):
        frame = DeviceFrame(target, prompt_rows=3072, budget=32, kernels=triton_kernels(),
                            width=block, fp8=weights)
        for width in (1, 7, block):
            compile_kernels.WIDTH[0] = f'{block} {width}'
            frame.plain(target, width).verify()


if __name__ == '__main__':
    named = 'widths' in sys.argv
    triton.compile = telling(triton.compile)
    jit.KernelInterface.__getitem__ = jit.JITFunction.__getitem__ = (
        name_launch if named else intercept)
    with overlapped('pdl' in sys.argv):
        (verifies if named else launches)()
