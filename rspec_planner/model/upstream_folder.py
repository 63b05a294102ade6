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
What lies in a released checkpoint folder, from names and headers alone.

The index and the headers are not trusted: a shard must be a plain file name inside the folder, a
header must describe its file to the byte. Pickles and scripts are named, never opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open, SafetensorError

from rspec_planner.errors import EngineError
from rspec_planner.model.upstream_config import (
    CONFIG_NAME,
    read_upstream_config,
    UpstreamConfig,
)
from rspec_planner.model.upstream_fields import read_json
from rspec_planner.model.upstream_keys import key_table, Shape, Stored, weight_problems

INDEX_NAME = 'model.safetensors.index.json'
SINGLE_NAME = 'model.safetensors'
MANIFEST_NAME = 'manifest.json'
#: endings of files that run code when they are opened as Python's or PyTorch's loaders do
PICKLES = ('.bin', '.pt', '.pth', '.ckpt', '.pkl', '.pickle', '.npy', '.npz')
#: how much of each tensor the fingerprint reads
_SAMPLE_BYTES = 4096
RESTORE = 'download the folder again'
Table = dict[str, tuple[str, Shape]]


@dataclass(frozen=True)
class FolderReport:
    """Everything that headers say about a folder."""

    folder: Path
    config: UpstreamConfig | None
    table: Table  # released name -> (our name, shape)
    tensors: dict[str, Stored]
    shards: tuple[str, ...]  # those that could be read
    config_problems: tuple[str, ...]
    file_problems: tuple[str, ...]
    weight_problems: tuple[str, ...]
    ignored: tuple[str, ...]  # pickles and scripts

    @property
    def problems(self) -> tuple[str, ...]:
        """Return why the weights cannot be loaded, the first cause first."""
        return (*self.config_problems, *self.file_problems, *self.weight_problems)


def existing_folder(folder: str | Path) -> Path:
    """Return the path of a checkpoint folder; EngineError when there is none."""
    place = Path(folder)
    if not place.is_dir():
        raise EngineError(f'checkpoint folder {place} does not exist: give the folder that holds '
                          f'{CONFIG_NAME} and the weights')
    return place


def is_upstream(folder: str | Path) -> bool:
    """
    Return whether a folder is to be read as a released checkpoint.

    Ours have a manifest, and a config.json that is a profile; a folder with neither that has a
    config, an index or a shard is somebody else's.
    """
    place = Path(folder)
    if not place.is_dir() or (place / MANIFEST_NAME).is_file() or _is_profile(place):
        return False
    return any((place / name).is_file() for name in (CONFIG_NAME, INDEX_NAME)) \
        or any(place.glob('*.safetensors'))


def _is_profile(folder: Path) -> bool:
    try:
        return {'vision', 'text', 'tokens'} <= set(read_json(folder / CONFIG_NAME))
    except EngineError:
        return False


def examine_folder(folder: str | Path) -> FolderReport:
    """Read config, index and headers of a folder; nothing raises but a missing folder."""
    place = existing_folder(folder)
    config, table = None, Table()
    config_problems, file_problems = list[str](), list[str]()
    try:
        config = read_upstream_config(place)
        table = key_table(config.profile, config.family.layout)
    except EngineError as error:
        config_problems.append(str(error))
    tensors, shards, mapped = read_headers(place, file_problems)
    complete = not file_problems
    if complete:
        file_problems += index_problems(place, mapped, tensors)
    # names missing because their shard is missing are no findings of their own
    problems = weight_problems(tensors, table, config.profile) if config and complete else []
    return FolderReport(place, config, table, tensors, tuple(shards), tuple(config_problems),
                        tuple(file_problems), tuple(problems), _ignored(place))


def read_headers(folder: Path, problems: list[str]
                 ) -> tuple[dict[str, Stored], list[str], dict[str, str]]:
    """
    Return the tensors of a folder, the shards that could be read, and what the index maps.

    What is wrong with them is appended to problems; nothing raises.
    """
    tensors, shards = dict[str, Stored](), list[str]()
    try:
        wanted, mapped = _wanted(folder)
    except EngineError as error:
        problems.append(str(error))
        return tensors, shards, {}
    for name in wanted:
        try:
            tensors.update(_header(folder / name, tensors, mapped))
            shards.append(name)
        except EngineError as error:
            problems.append(str(error))
    return tensors, shards, mapped


def _wanted(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the shards of a folder and, where there is an index, tensor name -> shard."""
    index = folder / INDEX_NAME
    if not index.is_file():
        found = sorted(path.name for path in folder.glob('*.safetensors'))
        if found == [SINGLE_NAME]:
            return found, {}
        raise EngineError(f'{index} is missing, and so is a single {SINGLE_NAME}: {RESTORE}')
    mapped = read_json(index).get('weight_map')
    if not isinstance(mapped, dict) or not mapped:
        raise EngineError(f'{index} has no "weight_map": {RESTORE}')
    for tensor, name in mapped.items():
        if not _is_plain(name):
            raise EngineError(f'{index} maps tensor {tensor[:80]} to {str(name)[:80]!r}, which is '
                              f'no file name inside the folder; nothing was opened: {RESTORE}')
    return sorted(set(mapped.values())), mapped


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and name.endswith('.safetensors') and '\0' not in name \
        and not any(mark in name for mark in '/\\:')


def _header(path: Path, known: dict[str, Stored], mapped: dict[str, str]
            ) -> dict[str, Stored]:
    """Return the tensors of one shard; the library compares the header with the file's size."""
    if not path.is_file():
        lost = [tensor for tensor, file in mapped.items() if file == path.name]
        raise EngineError(f'{path.parent / INDEX_NAME} names {path.name}, which is not in the '
                          f'folder; {len(lost)} tensors are lost, {lost[0]} the first: {RESTORE}')
    try:
        with safe_open(path, framework='pt') as shard:
            found = {}
            for name in shard.keys():
                part = shard.get_slice(name)
                found[name] = Stored(part.get_dtype(), tuple(part.get_shape()), path.name)
    except SafetensorError as error:
        reason = ' '.join(str(error).split())
        raise EngineError(f'{path} is damaged or cut off ({reason}): {RESTORE}') from None
    except OSError as error:
        raise EngineError(f'{path} cannot be read ({error.strerror or error}): '
                          f'{RESTORE}') from None
    twice = sorted(set(found) & set(known))
    if twice:
        raise EngineError(f'{path} holds tensor {twice[0]}, which {known[twice[0]].file} holds '
                          f'as well: {RESTORE}')
    return found


def index_problems(folder: Path, mapped: dict[str, str],
                    tensors: dict[str, Stored]) -> list[str]:
    """Return where the index and the shards disagree."""
    wrong = []
    for name, file in mapped.items():
        if name in tensors and tensors[name].file != file:
            wrong.append(f'{folder / INDEX_NAME} maps tensor {name} to {file}, it is in '
                         f'{tensors[name].file}: {RESTORE}')
    return wrong


def _ignored(folder: Path) -> tuple[str, ...]:
    """Return the names of files that nothing here ever opens."""
    return tuple(sorted(path.name for path in folder.iterdir()
                        if path.suffix.lower() in (*PICKLES, '.py')))


def fingerprint(report: FolderReport, shards: Sequence[str] = ()) -> str:
    """
    Return what identifies the weights of a folder, a sha256 in hex.

    It covers name, kind, shape and the first 4 kB of every tensor, whatever shard it lies in:
    the released folders have no manifest, and reading 22 GB to tell two checkpoints apart would
    cost more than loading one. It tells checkpoints apart; it does not prove that they are whole.
    """
    digest = hashlib.sha256()
    samples = {}
    for name in shards or report.shards:
        path = report.folder / name
        with path.open('rb') as file:
            for tensor, (start, end) in _offsets(path).items():
                file.seek(start)
                samples[tensor] = file.read(min(end - start, _SAMPLE_BYTES))
    for tensor in sorted(samples):
        stored = report.tensors[tensor]
        digest.update(repr((tensor, stored.kind, stored.shape)).encode())
        digest.update(samples[tensor])
    return digest.hexdigest()


def _offsets(path: Path) -> dict[str, tuple[int, int]]:
    """Return where each tensor lies in a file whose header has been checked, in bytes."""
    with path.open('rb') as file:
        size = int.from_bytes(file.read(8), 'little')
        header = json.loads(file.read(size))
    header.pop('__metadata__', None)
    return {name: (8 + size + part['data_offsets'][0], 8 + size + part['data_offsets'][1])
            for name, part in header.items()}
