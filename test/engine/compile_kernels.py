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
Compile every kernel launch of a frame at the R1 shapes for sm_90, on a machine without a GPU.

A program of its own, because a process that interprets Triton kernels cannot compile them:
python test/engine/compile_kernels.py prints one line a launch, the registers that spill last;
with `fused`, those of `select.fuse` instead;
with `widths`, nothing is compiled: one line says what each launch of a verify would compile.
"""

from dataclasses import replace
from pathlib import Path
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import jit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from rspec_planner.engine.cuda_loop import DeviceFrame
from rspec_planner.engine.cuda_random import random_target
from rspec_planner.engine.kernels import linear
from rspec_planner.engine.kernels.launch import overlapped
from rspec_planner.engine.kernels.select import fuse, FUSIBLE, triton_kernels
from rspec_planner.model.config import alpamayo_r1

NAMES = {torch.bfloat16: 'bf16', torch.float32: 'fp32', torch.int64: 'i64', torch.int32: 'i32',
         torch.float8_e4m3fn: 'fp8e4nv'}
BF16, EPS = torch.bfloat16, 1e-6
CUOBJDUMP = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'


def compile_launch(kernel, arguments, keywords):
    """Return shared bytes, stack bytes and registers of what one launch would compile."""
    bound = dict(zip(kernel.arg_names, arguments))
    bound.update({name: value for name, value in keywords.items() if name in kernel.arg_names})
    options = {name: value for name, value in keywords.items() if name not in bound}
    runtime = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    constant = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = bound[name]
        if isinstance(value, torch.Tensor):
            signature[name] = '*' + NAMES[value.dtype]
            attributes[index,] = [['tt.divisibility', 16]]
        elif name in constant or value is None or (value == 1 and name not in runtime):
            signature[name], constexprs[index,] = 'constexpr', value
        else:
            signature[name] = 'fp32' if isinstance(value, float) else 'i32'
            if isinstance(value, int) and value % 16 == 0 and name not in runtime:
                attributes[index,] = [['tt.divisibility', 16]]
    made = triton.compile(ASTSource(kernel, signature, constexprs, attributes),
                          target=GPUTarget('cuda', 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(made.asm['cubin'])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, '-res-usage', file.name], capture_output=True,
                               text=True, check=True).stdout
    return (made.metadata.shared, int(re.search(r'STACK:(\d+)', usage)[1]),
            int(re.search(r'REG:(\d+)', usage)[1]))


def intercept(kernel, grid):
    def launch(*arguments, **keywords):
        shared, stack, registers = compile_launch(kernel, arguments, keywords)
        print(f'{kernel.fn.__name__} grid {grid} shared {shared} stack {stack} '
              f'registers {registers}', flush=True)
    return launch


def name_launch(kernel, grid):
    """Print what decides the machine code of a launch, and its grid along the columns."""
    def launch(*arguments, **keywords):
        bound = {**dict(zip(kernel.arg_names, arguments)), **keywords}
        told = []
        for parameter in kernel.params:
            value = bound.pop(parameter.name)
            if isinstance(value, torch.Tensor):
                told.append(f'{parameter.name}={NAMES[value.dtype]}')
            elif parameter.is_constexpr or value is None:
                told.append(f'{parameter.name}={value}')
            elif not parameter.do_not_specialize and isinstance(value, int):
                told.append(f'{parameter.name}={(value == 1, value % 16 == 0)}')
        print(WIDTH[0], kernel.fn.__name__, *told, *sorted(bound.items()), flush=True)
    return launch


#: block of the draft and rows of the verify that `widths` is at
WIDTH = ['']


def verifies(kernels):
    """Launch a verify of every width beside the widest, at the R1 shapes with two layers."""
    cfg = alpamayo_r1()
    cfg = replace(cfg, text=replace(cfg.text, num_layers=2))
    target = random_target(cfg, torch.device('meta'), BF16)
    for block in (16, 24):
        frame = DeviceFrame(target, prompt_rows=3072, budget=32, kernels=kernels, width=block)
        for width in (1, 7, block):
            WIDTH[0] = f'{block} {width}'
            frame.plain(target, width).verify()


def meta(*sizes, dtype=BF16):
    return torch.empty(sizes, dtype=dtype, device='meta')


def whole(size=1):
    return meta(size, dtype=torch.int64)


def fused_launches(kernels):
    """Call the launches that do the work of two with the shapes of a verify and a flow step."""
    cache, table = meta(8, 3200, 128), meta(3200, 64, dtype=torch.float32)
    norms, tables = (meta(128), meta(128)), (table, table)
    for rows, hidden, heads, middle in ((16, 4096, 32, 12288), (64, 2048, 16, 8256)):
        own = (meta(1, 8, 64, 128),) * 2 if rows == 64 else None
        view = {'start': whole(), 'cache': (cache, cache), 'own': own, 'causal': own is None}
        qkv, out = meta(1, 1, rows, heads + 16, 128, dtype=torch.float32), meta(rows, heads * 128)
        kernels.attend(meta(1, rows, heads, 128), out, **view)
        kernels.mix(qkv, norms, tables, whole(), whole(), out, EPS, **view)
        fuse(triton_kernels(), ['turn']).mix(qkv, norms, tables, whole(), whole(), out, EPS,
                                             **view)
        x, room = meta(rows, hidden), meta(8, rows, hidden, dtype=torch.float32)
        for depth in (heads * 128, middle):
            for norm in (None, meta(hidden)):
                kernels.close(meta(rows, depth), meta(hidden, depth), room, x, x, norm, x, EPS)


def launches(kernels):
    """Call every kernel with the shapes of a verify, a flow step, a draft and a prefill."""
    cache, table = meta(8, 3200, 128), meta(3200, 64, dtype=torch.float32)
    for rows, hidden, heads, middle in ((16, 4096, 32, 12288), (64, 2048, 16, 8256)):
        x, out = meta(rows, hidden), meta(rows, (heads + 16) * 128)
        behind = meta(hidden, heads * 128)
        joined, down = meta(2 * middle, hidden), meta(hidden, middle)
        kernels.linear(x, meta(out.shape[1], hidden), out, norm=meta(hidden), eps=EPS)
        kernels.linear(meta(rows, heads * 128), behind, x, residual=x)
        parts = meta(8, rows, hidden, dtype=torch.float32)
        count = kernels.product(meta(rows, heads * 128), behind, parts)
        kernels.gather(parts[:count], x, x, meta(hidden), x, EPS)
        kernels.linear(x, joined, meta(rows, middle), norm=meta(hidden), eps=EPS, gated=True)
        kernels.linear(meta(rows, middle), down, x, residual=x)
        q = meta(1, rows, heads, 128)
        own = (meta(1, 8, 64, 128),) * 2 if rows == 64 else None
        kernels.rotate(out.view(1, rows, -1, 128), (meta(128), meta(128)), (table, table),
                       whole(), whole(), q, cache[None], cache[None], EPS)
        kernels.attend(q, meta(rows, heads * 128), start=whole(), cache=(cache, cache), own=own,
                       causal=own is None)
    wide = meta(128, 2048)  # two candidates
    kernels.linear(wide, meta(4096, 2048), meta(128, 4096), norm=meta(2048), eps=EPS)
    kernels.linear(wide, meta(16_512, 2048), meta(128, 8256), gated=True)
    kernels.linear(meta(384, 2048), meta(2048, 2048), meta(384, 2048))  # six: the library's
    large = linear.Plan(128, 128, 1, 7, 8)  # fits no GPU as it stands
    linear.linear(wide, meta(4096, 2048), meta(128, 4096), plan=large)
    x = meta(16, 4096)
    kernels.linear(x, meta(6144, 4096, dtype=torch.float8_e4m3fn), meta(16, 6144),
                   norm=meta(4096), eps=EPS, scale=meta(6144, dtype=torch.float32))
    kernels.attend(meta(1, 16, 32, 128), x, start=whole(), own=(meta(1, 8, 24, 128),) * 2,
                   causal=False, own_low=whole())
    kernels.choose(x, meta(155_697, 4096), whole(16), norm=meta(4096), eps=EPS,
                   forbidden=(151_669, 155_669))
    kernels.norm(x, meta(4096), x, EPS)
    kernels.gate(meta(16, 24_576), meta(16, 12_288))
    kernels.add_rows(meta(3006, 4096), whole(2880), meta(2880, 4096))
    patches = meta(2880, 1152)
    kernels.add_norm(patches, patches, meta(1152), meta(1152), patches, EPS)
    turned = meta(4, 720, 16, 72)
    kernels.turn(meta(4, 720, 3, 16, 72), (meta(720, 72, dtype=torch.float32),) * 2, turned,
                 turned)
    kernels.begin(whole(17), whole(4000), whole(15), whole(16), (155_678, 155_681))
    kernels.accept(whole(17), whole(4000), whole(16), whole(16), whole(3), whole(64))
    kernels.replay(whole(17), whole(64), whole(64), whole(15), 5)


if __name__ == '__main__':
    named = 'widths' in sys.argv
    jit.KernelInterface.__getitem__ = jit.JITFunction.__getitem__ = (
        name_launch if named else intercept)
    fused = 'fused' in sys.argv
    with overlapped('pdl' in sys.argv):
        (verifies if named else fused_launches if fused else launches)(
            fuse(triton_kernels(), FUSIBLE if fused else ()))
