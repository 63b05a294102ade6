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
Checkpoint folders: config.json, safetensors shards and a manifest that vouches for both.

Shards stay below 8 MB each. manifest.json holds {"files": {name: sha256}} beside
whatever the writer wants to remember (data seed, metrics). Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as format_safetensors
import torch
from torch import Tensor

from rspec_planner.errors import EngineError
from rspec_planner.model.bounded import read_bounded
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.target import Target
from rspec_planner.model.upstream_checkpoint import load_upstream
from rspec_planner.model.upstream_folder import existing_folder, is_upstream

MAX_SHARD_BYTES = 8_000_000
HEADER_BYTES = 64 * 1024  # room for the safetensors header within the limit
CONFIG_NAME = 'config.json'
MANIFEST_NAME = 'manifest.json'
REMEDY = 'restore the folder from a good copy or train it again'

#: what building a network of wrong numbers or types raises
_NO_PROFILE = (TypeError, KeyError, AttributeError, ValueError, IndexError, ArithmeticError,
               AssertionError, RuntimeError)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + '\n').encode()


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield groups of tensors that fit one shard; a tensor larger than that sits alone."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > MAX_SHARD_BYTES - HEADER_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def write_weights(tensors: Mapping[str, Tensor], config: Mapping[str, Any],
                  directory: str | Path, manifest: Mapping[str, Any],
                  dtype: torch.dtype = torch.float16,
                  extra_files: Mapping[str, bytes] | None = None) -> None:
    """
    Write named tensors, their config and a manifest; earlier shards are removed.

    manifest: extra JSON-ready entries; the key "files" is ours. extra_files: name to content
    of files to keep beside the weights and under the same checks, such as a tokenizer.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob('model-*-of-*.safetensors'):
        old.unlink()
    stored = {name: tensor.detach().to('cpu', dtype, copy=True).contiguous()
              for name, tensor in tensors.items()}
    shards = list(_shards(stored))
    files = {CONFIG_NAME: _json_bytes(config)}
    for number, shard in enumerate(shards, start=1):
        files[f'model-{number:05d}-of-{len(shards):05d}.safetensors'] = format_safetensors(shard)
    files.update(extra_files or {})
    for name, data in files.items():
        (folder / name).write_bytes(data)
    content = {**manifest, 'files': {name: _sha256(data) for name, data in files.items()}}
    (folder / MANIFEST_NAME).write_bytes(_json_bytes(content))


def replace_config(directory: str | Path, **entries: Any) -> None:
    """Put JSON-ready entries into a folder's config, and its hash into the manifest."""
    folder, manifest = Path(directory), read_manifest(directory)
    config = _json_bytes({**json.loads((folder / CONFIG_NAME).read_bytes()), **entries})
    manifest['files'][CONFIG_NAME] = _sha256(config)
    (folder / CONFIG_NAME).write_bytes(config)
    (folder / MANIFEST_NAME).write_bytes(_json_bytes(manifest))


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder; EngineError when there is none."""
    folder = existing_folder(directory)
    path = folder / MANIFEST_NAME
    try:
        manifest = json.loads(read_bounded(path))
    except OSError as error:
        raise EngineError(f'{path} cannot be read ({error.strerror}): {REMEDY}') from error
    except (ValueError, RecursionError) as error:
        raise EngineError(f'{path} is not valid JSON ({error}): {REMEDY}') from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get('files'), dict):
        raise EngineError(f'{path} lists no "files": {REMEDY}')
    return manifest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EngineError(f'{path} cannot be read ({error.strerror}): {REMEDY}') from error


def read_files(directory: str | Path) -> dict[str, bytes]:
    """Return every file of the manifest, checked against its sha256."""
    folder = Path(directory)
    files: dict[str, bytes] = {}
    for name, digest in read_manifest(folder)['files'].items():
        if not name or Path(name).name != name or '\0' in name:
            raise EngineError(f'{folder / MANIFEST_NAME} lists {name!r}, which is no plain file '
                              f'name: {REMEDY}')
        files[name] = _read(folder / name)
        found = _sha256(files[name])
        if found != digest:
            raise EngineError(f'{folder / name} has sha256 {found[:12]}..., the manifest says '
                              f'{str(digest)[:12]}...: {REMEDY}')
    if CONFIG_NAME not in files:
        raise EngineError(f'{folder / MANIFEST_NAME} does not list {CONFIG_NAME}: {REMEDY}')
    return files


def read_weights(directory: str | Path,
                 device: torch.device | str = 'cpu',
                 dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the config of a checkpoint folder, all files verified."""
    folder = Path(directory)
    tensors: dict[str, Tensor] = {}
    files = read_files(folder)
    for name, data in files.items():
        if not name.endswith('.safetensors'):
            continue
        try:
            shard = parse_safetensors(data)
        except SafetensorError as error:
            raise EngineError(f'{folder / name} is not safetensors ({error}): {REMEDY}') from error
        tensors.update({key: value.to(device, dtype) for key, value in shard.items()})
    try:
        config: dict[str, Any] = json.loads(files[CONFIG_NAME])
    except (ValueError, RecursionError) as error:
        raise EngineError(f'{folder / CONFIG_NAME} is not valid JSON ({error}): '
                          f'{REMEDY}') from error
    return tensors, config


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor],
                  origin: str | Path) -> None:
    """Raise EngineError for the first missing, surplus or misshaped tensor."""
    for name, tensor in expected.items():
        if name not in found:
            raise EngineError(f'{origin} lacks tensor {name}: {REMEDY}')
        if found[name].shape != tensor.shape:
            raise EngineError(f'{origin}: tensor {name} has shape {tuple(found[name].shape)}, '
                              f'{CONFIG_NAME} needs {tuple(tensor.shape)}: {REMEDY}')
    for name in found:
        if name not in expected:
            raise EngineError(f'{origin} holds surplus tensor {name}: {REMEDY}')


def save_target(target: Target, directory: str | Path, manifest: Mapping[str, Any],
                dtype: torch.dtype = torch.float16,
                extra_files: Mapping[str, bytes] | None = None) -> None:
    """Write a target and its manifest, see `write_weights`."""
    write_weights(target.state_dict(), target.cfg.to_dict(), directory, manifest, dtype,
                  extra_files)


def load_target(directory: str | Path, device: torch.device | str = 'cpu',
                dtype: torch.dtype = torch.float32) -> Target:
    """
    Return a packed target for inference; EngineError names the file or tensor at fault.

    The folder is one of ours, or a released one, see `upstream_checkpoint`.
    """
    if is_upstream(directory):
        return load_upstream(directory, device, dtype)
    tensors, config = read_weights(directory, device, dtype)
    try:
        profile = ProfileConfig.from_dict(config)
        with torch.device('meta'):  # no time spent on random weights
            target = Target(profile)
    except _NO_PROFILE as error:
        reason = ' '.join(str(error).split())
        raise EngineError(f'{Path(directory) / CONFIG_NAME} is not a profile ({reason}): '
                          f'{REMEDY}') from error
    check_tensors(tensors, target.state_dict(), directory)
    target.load_state_dict(tensors, assign=True)
    target.expert.reset_frequencies(torch.device(device))
    return target.eval().pack()
