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
Examine a checkpoint folder before 22 GB are read: will it run here, and if not, why.

Everything comes from names, config and headers; weights are not read, nothing is executed, and
files that could be executed are named and left closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
import json
import math
from pathlib import Path
from typing import Any

import torch

from rspec_planner.doctor import Check
from rspec_planner.doctor_autovla import examine_autovla, is_autovla
from rspec_planner.errors import ConfigurationError, EngineError, RspecError
from rspec_planner.evaluate.bench import hardware
from rspec_planner.evaluate.roofline import (
    expected_ms,
    layer_weights,
    least_ms,
    measure_rates,
    memory_need,
    MemoryNeed,
    prompt_rows,
    TOKENS,
)
from rspec_planner.model.checkpoint import read_files, read_manifest
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.target import Target
from rspec_planner.model.upstream_checkpoint import free_bytes
from rspec_planner.model.upstream_folder import (
    examine_folder,
    existing_folder,
    FolderReport,
    is_upstream,
)
from rspec_planner.model.upstream_hashes import differing, recorded_sums, SUMS_NAME
from rspec_planner.planner.checkpoints import (
    chosen_draft,
    open_tokenizer,
    refuse_unknown_prompt,
)
from rspec_planner.planner.drafts import EMBEDDED, EMBEDDED_NAMES

#: problems that are listed; the others are counted
LISTED = 20
#: what PyTorch, its libraries and a CUDA context take beside the tensors
PROCESS_BYTES = {'cpu': 400 * 1024 ** 2, 'cuda': 800 * 1024 ** 2}
#: accepted lengths for which a frame with a draft is told
WITH_DRAFT = 4.6
GB = 1e9


def examine_checkpoint(checkpoint: str, device: str = '', hashes: bool = False
                       ) -> dict[str, Any]:
    """
    Return {'ok', 'checks', 'problems', ...} of a folder or an embedded name.

    device: '' takes a GPU where there is one. hashes: also read all shards of a released folder
    and compare them with the sums of the download. Raises ConfigurationError for an unknown
    device and EngineError for a folder that does not exist; everything else is a finding.
    """
    place = _device(device)
    folder = existing_folder(EMBEDDED / checkpoint if checkpoint in EMBEDDED_NAMES
                             else checkpoint)
    if is_upstream(folder):
        return _released(folder, place, hashes)
    return _ours(folder, place)


def _device(name: str) -> torch.device:
    cuda = torch.cuda.is_available()
    try:
        device = torch.device(name or ('cuda' if cuda else 'cpu'))
    except RuntimeError:
        raise ConfigurationError(f"device '{name}' is unknown; use cpu or cuda") from None
    if device.type not in PROCESS_BYTES or device.type == 'cuda' and not cuda:
        raise ConfigurationError(f"device '{name}': PyTorch sees none here; use cpu")
    return device


def _released(folder: Path, device: torch.device, hashes: bool) -> dict[str, Any]:
    """Examine a folder of the released layout."""
    if is_autovla(folder):
        return _verdict(*examine_autovla(folder))
    report = examine_folder(folder)
    checks = [_config(report), _files(report), _weights(report)]
    if hashes:
        checks.append(_hashes(report))
    if report.ignored:
        checks.append(Check('ignored', True, f'never opened: {", ".join(report.ignored)}'))
    found: dict[str, Any] = {'kind': 'released', 'model_type': None, 'profile': None}
    if report.config is not None:
        profile = report.config.profile
        parameters = sum(math.prod(shape) for _, shape in report.table.values())
        found |= {'model_type': report.config.model_type, 'profile': profile.name}
        checks += [_prompt(report), _tokenizer(folder, profile), _draft(folder)]
        more, numbers = _machine(profile, parameters, device)
        checks += more
        found |= numbers
    return _verdict(checks, found, list(report.problems))


def _ours(folder: Path, device: torch.device) -> dict[str, Any]:
    """Examine a folder that this package wrote: every hash, then as above."""
    checks: list[Check] = []
    found: dict[str, Any] = {'kind': 'own', 'model_type': None, 'profile': None}
    problems = []
    try:
        files = read_files(folder)
        size = sum(map(len, files.values()))
        checks.append(Check('files', True, f'{len(files)} files, {size / GB:.3f} GB, all hashes '
                            'match'))
        profile = ProfileConfig.from_dict(json.loads(files['config.json']))
    except (RspecError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(' '.join(str(error).split()))
        checks.append(Check('files', False, problems[0], 'restore the folder from a good copy'))
        return _verdict(checks, found, problems)
    with torch.device('meta'):
        parameters = Target(profile).num_parameters()
    found |= {'profile': profile.name, 'revision': str(read_manifest(folder).get('revision', ''))}
    checks += [_tokenizer(folder, profile), _draft(folder)]
    more, numbers = _machine(profile, parameters, device)
    return _verdict([*checks, *more], found | numbers, problems)


def _verdict(checks: Sequence[Check], found: dict[str, Any],
             problems: list[str]) -> dict[str, Any]:
    return {'ok': all(check.ok for check in checks), **found,
            'checks': [asdict(check) for check in checks], 'problems': problems}


def _listed(problems: Sequence[str]) -> str:
    more = len(problems) - LISTED
    return '; '.join(problems[:LISTED]) + (f'; and {more} more' if more > 0 else '')


def _config(report: FolderReport) -> Check:
    if report.config is None:
        return Check('config', False, _listed(report.config_problems),
                     'give a folder of Alpamayo R1 or 1.5 as released')
    profile = report.config.profile
    return Check('config', True, f'{report.config.model_type}: {profile.text.num_layers} layers '
                 f'of {profile.text.hidden_size}, expert {profile.expert.hidden_size}, '
                 f'{len(profile.cameras.ids)} cameras, {profile.cameras.width}x'
                 f'{profile.cameras.height} pixels from 16:9')


def _files(report: FolderReport) -> Check:
    if report.file_problems:
        return Check('files', False, _listed(report.file_problems), 'download the folder again')
    size = sum((report.folder / name).stat().st_size for name in report.shards)
    return Check('files', True, f'{len(report.shards)} safetensors, {size / GB:.3f} GB, headers '
                 'describe them to the byte; contents were not read')


def _weights(report: FolderReport) -> Check:
    if report.config is None or report.file_problems:
        return Check('weights', False, 'not compared: see above',
                     'correct what is above, then ask again')
    if report.weight_problems:
        return Check('weights', False, _listed(report.weight_problems),
                     'download the folder again, or correct config.json')
    kinds = sorted({stored.kind for stored in report.tensors.values()})
    surplus = len(report.tensors) - len(report.table)
    return Check('weights', True, f'all {len(report.table)} tensors, {", ".join(kinds)}'
                 + (f', {surplus} buffers' if surplus else ''))


def _hashes(report: FolderReport) -> Check:
    """Compare the shards with the sums that came with them."""
    sums = recorded_sums(report.folder, report.shards)
    lost = [name for name in report.shards if name not in sums]
    if lost or not sums:
        return Check('hashes', False, f'no sum is recorded for {lost[0] if lost else "any shard"}',
                     f'write the sums of the hub into {SUMS_NAME}, as sha256sum does, or '
                     'download with: hf download --local-dir')
    wrong = differing(report.folder, sums)
    if wrong:
        return Check('hashes', False, _listed(wrong), 'download these files again')
    return Check('hashes', True, f'{len(sums)} shards have the sha256 of the download')


def _prompt(report: FolderReport) -> Check:
    assert report.config is not None
    try:
        refuse_unknown_prompt(report.folder, report.config)
    except EngineError as error:
        return Check('prompt', False, str(error), 'load it for its arithmetic only')
    prompt = report.config.profile.prompt
    told = [name for name, on in (('camera names', prompt.camera_names),
                                  ('frame numbers', prompt.frame_numbers),
                                  ('navigation', prompt.navigation)) if on]
    return Check('prompt', True, f'with {", ".join(told)}' if told else 'plain, as R1')


def _tokenizer(folder: Path, profile: ProfileConfig) -> Check:
    try:
        tokenizer = open_tokenizer(folder, profile)
    except RspecError as error:
        return Check('tokenizer', False, str(error),
                     'copy tokenizer.json of Qwen/Qwen3-VL-8B-Instruct into the folder')
    return Check('tokenizer', True, f'{tokenizer.vocab_size} ids, as config.json says')


def _draft(folder: Path) -> Check:
    try:
        found = chosen_draft('default', folder)
    except RspecError as error:
        return Check('draft', True, f'none: {error}')
    return Check('draft', True, 'none: one target forward a token' if found is None
                 else str(found))


def _machine(profile: ProfileConfig, parameters: int, device: torch.device
             ) -> tuple[list[Check], dict[str, Any]]:
    """Return whether the device holds it and how long a frame takes, and both as numbers."""
    dtype = torch.bfloat16 if device.type == 'cuda' else torch.float32
    need = memory_need(profile, parameters, dtype.itemsize)
    total = need.total + PROCESS_BYTES[device.type]
    free, name = _free(device)
    kind = str(dtype).removeprefix('torch.')
    small = _fp8_peak(profile, need) + PROCESS_BYTES[device.type]
    remedy = f'give a device with {math.ceil(total / GB)} GB free'
    if device.type == 'cuda' and small <= free:
        remedy = f'set model.precision: fp8, which needs {small / GB:.3g} GB, or {remedy}'
    memory = Check(
        'memory', total <= free, f'{total / GB:.3g} GB in {kind}: weights '
        f'{need.weights / GB:.3g}, cache {need.cache / GB:.2g}, work {need.work / GB:.2g}; '
        f'{free / GB:.3g} GB free on {name}', '' if total <= free else remedy)
    rates = measure_rates(device, dtype)
    least = {way: least_ms(profile, dtype.itemsize, rates, iterations=count)
             for way, count in (('no_draft', float(TOKENS)), ('draft', TOKENS / WITH_DRAFT))}
    expected = {way: expected_ms(value, device.type) for way, value in least.items()}
    plain, drafted = (sum(expected[way].values()) for way in ('no_draft', 'draft'))
    time = Check(
        'frame_time', True, f'about {plain:.0f} ms a frame of {TOKENS} words, at least '
        f'{sum(least["no_draft"].values()):.0f} ms by shapes; with a draft of accepted length '
        f'{WITH_DRAFT} about {drafted:.0f} ms. Measured here: copy '
        f'{rates.bytes_per_s / GB:.0f} GB/s, products {rates.flops / 1e12:.2f} TFLOP/s')
    return [memory, time], {
        'parameters': parameters, 'prompt_tokens': prompt_rows(profile),
        'device': {'name': name, 'dtype': kind, 'free_bytes': free,
                   'bytes_per_s': rates.bytes_per_s, 'flops': rates.flops},
        'memory_bytes': {'weights': need.weights, 'cache': need.cache, 'work': need.work,
                         'process': PROCESS_BYTES[device.type], 'total': total,
                         'fp8_total': small},
        'frame_ms': {'least': least, 'expected': expected,
                     'expected_total': {'no_draft': plain, 'draft': drafted}}}


def _fp8_peak(profile: ProfileConfig, need: MemoryNeed) -> int:
    """Return the bytes with the layers in e4m3: loaded in bf16 first, or while planning."""
    return max(need.weights, need.total - layer_weights(profile))


def _free(device: torch.device) -> tuple[int, str]:
    """Return the bytes that are free on a device, and its name."""
    name = hardware(device)
    return free_bytes(device) or 0, name if device.type == 'cuda' else f'CPU ({name})'
