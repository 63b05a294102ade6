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
Load a released Alpamayo folder into a target: strict on weights, tolerant on buffers.

Shards are memory-mapped and copied tensor by tensor into weights that already lie where they
will be used, joined projections included, so that the peak is the weights and one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import math
from pathlib import Path
import threading
from typing import Any

from safetensors import safe_open, SafetensorError
import torch
from torch import nn, Tensor
from tqdm import tqdm

from rspec_planner.errors import EngineError
from rspec_planner.model.action import FourierEncoder
from rspec_planner.model.config import ActionSpaceConfig, ProfileConfig
from rspec_planner.model.layer import DecoderLayer
from rspec_planner.model.target import Target
from rspec_planner.model.upstream_folder import examine_folder, fingerprint, FolderReport

#: dtypes that a target can be loaded in
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: shards that are read at a time onto a GPU: each thread fills its own staging buffer
_READERS = 4
#: scalars of the action space that upstream keeps as buffers
_ROUNDED = ('accel_mean', 'accel_std', 'curvature_mean', 'curvature_std')


def upstream_digest(folder: str | Path) -> str:
    """Return what identifies the weights of a released folder, see `fingerprint`."""
    return fingerprint(_loadable(folder))


def _loadable(folder: str | Path) -> FolderReport:
    """Return the report of a folder that can be loaded; EngineError with the first problem."""
    report = examine_folder(folder)
    if report.problems:
        more = len(report.problems) - 1
        first = report.problems[0]
        start = '' if first.startswith(str(report.folder)) else f'{report.folder}: '
        raise EngineError(start + first + (
            f' (and {more} more; rspec doctor --checkpoint lists them)' if more else ''))
    return report


def load_upstream(folder: str | Path, device: torch.device | str = 'cpu',
                  dtype: torch.dtype = torch.bfloat16, *, bf16_constants: bool = False) -> Target:
    """
    Return a packed target for inference from a released folder.

    bf16_constants: also round the action space's normalisation as upstream does when it builds
    its modules in bf16; exact constants are the better choice unless bits are compared.
    EngineError names the first file, field or tensor at fault and counts the others.
    """
    if dtype not in DTYPES:
        raise EngineError(f'{folder}: weights are loaded as float32, bfloat16 or float16, not '
                          f'{dtype}; fp8 is made from bfloat16 where it is used')
    report = _loadable(folder)
    assert report.config is not None
    place, profile = torch.device(device), report.config.profile
    if bf16_constants:
        profile = replace(profile, action_space=_rounded(profile.action_space))
    _require_room(report, place, dtype)
    try:
        target = empty_target(profile, place, dtype)
        _fill(target, report)
    except torch.OutOfMemoryError as error:
        reason = str(error).split('. ')[0]
        raise EngineError(f'{report.folder}: {reason}: rspec doctor --checkpoint says what is '
                          'needed') from None
    except (SafetensorError, OSError) as error:  # headers were read a moment ago
        raise EngineError(f'{report.folder}: a shard changed while it was read '
                          f'({" ".join(str(error).split())}): try again') from None
    _set_frequencies(target, report)
    return target.eval().requires_grad_(False).pack()


def _require_room(report: FolderReport, device: torch.device, dtype: torch.dtype) -> None:
    """
    Raise EngineError when the weights alone do not fit the memory that is free.

    A CPU's memory is promised before it is there; the process would be killed without a word.
    """
    need = dtype.itemsize * sum(math.prod(shape) for _, shape in report.table.values())
    free = free_bytes(device)
    if free is not None and need > free:
        raise EngineError(
            f'{report.folder}: {need / 1e9:.1f} GB of weights in '
            f'{str(dtype).removeprefix("torch.")}, {free / 1e9:.1f} GB are free on {device}: '
            'rspec doctor --checkpoint says what is needed')


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on a device, None where nobody can tell."""
    if device.type == 'cuda':
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path('/proc/meminfo').read_text(encoding='ascii').splitlines()
        [line] = [line for line in lines if line.startswith('MemAvailable:')]
        return 1024 * int(line.split()[1])
    except (OSError, ValueError):
        return None


def empty_target(profile: ProfileConfig, device: torch.device, dtype: torch.dtype) -> Target:
    """Return a target whose weights are allocated and hold anything; see `DecoderLayer.pack`."""
    with torch.device('meta'):
        target = Target(profile)
    for module in target.modules():
        if isinstance(module, DecoderLayer):
            attention, mlp = module.self_attn, module.mlp
            _adjoin([attention.q_proj, attention.k_proj, attention.v_proj], device, dtype)
            _adjoin([mlp.gate_proj, mlp.up_proj], device, dtype)
    for module in target.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_meta:
                setattr(module, name, _parameter(torch.empty(weight.shape, dtype=dtype,
                                                             device=device)))
    target.expert.reset_frequencies(device)
    return target


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _adjoin(linears: list[nn.Linear], device: torch.device, dtype: torch.dtype) -> None:
    """Allocate the weights of linears with one input behind each other."""
    rows = [linear.out_features for linear in linears]
    stack = torch.empty((sum(rows), linears[0].in_features), dtype=dtype, device=device)
    for linear, part in zip(linears, torch.split(stack, rows)):
        linear.weight = _parameter(part)


def _fill(target: Target, report: FolderReport) -> None:
    """Copy every weight of the folder into the target."""
    slots = target.state_dict()
    total = sum(slot.nbytes for slot in slots.values())
    cuda = target.device.type == 'cuda'
    lock = threading.Lock()
    with tqdm(total=total, unit='B', unit_scale=True, disable=None, leave=False,
              desc=f'loading {report.folder.name}') as bar, \
            ThreadPoolExecutor(_READERS if cuda else 1) as pool:
        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        jobs = [pool.submit(_fill_from, report, name, slots, advance) for name in report.shards]
        for job in jobs:
            job.result()


def _fill_from(report: FolderReport, name: str, slots: dict[str, Tensor],
               advance: Callable[[int], None]) -> None:
    """Copy the weights of one shard."""
    with torch.inference_mode(), safe_open(report.folder / name, framework='pt') as shard:
        for theirs in shard.keys():
            if theirs in report.table:
                slot = slots[report.table[theirs][0]]
                slot.copy_(shard.get_tensor(theirs))
                advance(slot.nbytes)


def _set_frequencies(target: Target, report: FolderReport) -> None:
    """Give the Fourier features the file's frequencies, else what the model was trained with."""
    assert report.config is not None
    for name, module in target.named_modules():
        if not isinstance(module, FourierEncoder):
            continue
        stored = _stored_frequencies(report, name.removeprefix('expert.'), module)
        if stored is not None:
            module.freqs = stored
        elif report.config.family.rounds_frequencies:
            module.freqs = module.freqs.to(torch.bfloat16).float()


def _stored_frequencies(report: FolderReport, name: str, module: FourierEncoder
                        ) -> Tensor | None:
    for theirs in (f'{name}.freqs', f'expert.{name}.freqs'):
        if theirs in report.tensors:
            stored = report.tensors[theirs]
            if stored.shape != tuple(module.freqs.shape):
                raise EngineError(f'{report.folder / stored.file}: buffer {theirs} has shape '
                                  f'{list(stored.shape)}, config.json needs '
                                  f'{list(module.freqs.shape)}: download the folder again')
            with safe_open(report.folder / stored.file, framework='pt') as shard:
                values: Tensor = shard.get_tensor(theirs)
            return values.to(module.freqs.device, torch.float32)
    return None


def _rounded(cfg: ActionSpaceConfig) -> ActionSpaceConfig:
    """Return the constants as bf16 holds them."""
    values: dict[str, Any] = {
        name: float(torch.tensor(getattr(cfg, name), dtype=torch.bfloat16)) for name in _ROUNDED}
    return replace(cfg, **values)
