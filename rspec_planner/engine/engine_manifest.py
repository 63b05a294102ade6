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
What an engine file is, written beside it, and the checks before anybody deserialises it.

`verify.tensorrt_rtx.engine` has the manifest `verify.tensorrt_rtx.json`. A plan is machine code:
it is read only when its hash, library version, host, GPU, weights and ports are the expected
ones. Every refusal is one line with the remedy; there is no fallback and no rebuild.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from rspec_planner.engine.stages import Port, Weight
from rspec_planner.engine.tensorrt_library import FLAVOURS
from rspec_planner.errors import EngineError
from rspec_planner.model.bounded import read_bounded

SCHEMA = 1
#: where the graphs and stages.json of a set folder lie; its engines lie above
ONNX_FOLDER = 'onnx'
#: how a plan file starts, and where its own size stands as a little-endian 64-bit number
#: (read off plans of TensorRT-RTX 1.7.1); full TensorRT documents neither
_RTX_MAGIC = b'vtrt'
_RTX_SIZE = slice(16, 24)


@dataclass(frozen=True)
class EngineManifest:
    """
    What was built, from what, with what, for which GPUs.

    targets: compute capabilities, '86' for 8.6. host: see `host_name`. checkpoints: 'target'
    and 'draft' -> digest of the weights that it is for; the plan itself holds none of them.
    inputs, outputs: what to bind, in the engine's order. numerics: result of the check of the
    same ONNX file against PyTorch (checked, error, worst_output, tolerance, the frames compared
    and the loop), empty when it was not run. build: seconds, peak_mib,
    warnings, flags. created: ISO 8601, UTC.
    """

    stage: str
    profile: str
    precision: str
    flavour: str
    version: str
    targets: tuple[str, ...]
    host: str
    file: str
    bytes: int
    sha256: str
    onnx_sha256: str
    checkpoints: Mapping[str, str]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    numerics: Mapping[str, Any]
    build: Mapping[str, Any]
    revision: str
    created: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready content of the manifest file."""
        return {'schema': SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> EngineManifest:
        """Return the manifest; ValueError names the first field that is missing or wrong."""
        names = [field.name for field in fields(cls)]
        for name in names:
            if name not in content:
                raise ValueError(f'"{name}" is missing')
        surplus = sorted(set(content) - {*names, 'schema'})
        if surplus:
            raise ValueError(f'"{surplus[0]}" is not a known field')
        values = {name: content[name] for name in names}
        for name, kind in cls.__annotations__.items():
            wanted = {'str': str, 'int': int}.get(kind, dict if 'Mapping' in kind else list)
            if not isinstance(values[name], wanted):
                raise ValueError(f'"{name}" is {values[name]!r}')
        values['targets'] = tuple(map(str, values['targets']))
        for side in ('inputs', 'outputs'):
            values[side] = tuple(_port(entry, side) for entry in values[side])
        return cls(**values)

    @property
    def ports(self) -> tuple[Port, ...]:
        """Return inputs, then outputs."""
        return self.inputs + self.outputs


def _port(entry: Any, side: str) -> Port:
    try:
        weight = entry['weight']
        return Port(str(entry['name']), str(entry['dtype']), tuple(map(int, entry['shape'])),
                    None if weight is None else Weight(**weight), str(entry['alias']))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f'"{side}" holds {entry!r}') from error


@dataclass(frozen=True)
class Expectation:
    """
    What a process needs of an engine: its own library and GPU, and what it will bind.

    sm: compute capability of the GPU, '86' for 8.6. checkpoints: 'target', 'draft' -> digest of
    the loaded weights; what is not named may be any. ports: inputs, then outputs.
    """

    flavour: str
    version: str
    sm: str
    host: str
    precision: str
    checkpoints: Mapping[str, str]
    ports: tuple[Port, ...]


def engine_path(folder: str | Path, stage: str, flavour: str) -> Path:
    """Return where an engine lies; its manifest has the suffix .json instead."""
    return Path(folder) / f'{stage}.{flavour}.engine'


def manifest_path(folder: str | Path, stage: str, flavour: str) -> Path:
    """Return where the manifest of an engine lies."""
    return engine_path(folder, stage, flavour).with_suffix('.json')


def sha256_of(data: bytes | memoryview) -> str:
    """Return the sha256 of a buffer, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write a file so that readers see the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'.{path.name}.{os.getpid()}.partial')
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_manifest(manifest: EngineManifest, folder: str | Path) -> Path:
    """Write the manifest beside its engine, which must be complete by then; return the path."""
    path = manifest_path(folder, manifest.stage, manifest.flavour)
    write_atomically(path, (json.dumps(manifest.to_dict(), indent=2) + '\n').encode())
    return path


def read_manifest(folder: str | Path, stage: str, flavour: str) -> EngineManifest:
    """Return the manifest of an engine; EngineError names the file, the fault and the remedy."""
    path = manifest_path(folder, stage, flavour)
    remedy = 'build the engine again: rspec engine build'
    try:
        content = json.loads(read_bounded(path))
    except FileNotFoundError as error:
        raise EngineError(f'{path} does not exist, so there is no {stage} engine for {flavour}: '
                          f'{_build_line(stage, flavour)}') from error
    except OSError as error:
        raise EngineError(f'{path} cannot be read ({error.strerror}): check its '
                          'permissions') from error
    except (ValueError, RecursionError) as error:
        raise EngineError(f'{path} is not valid JSON ({error}): {remedy}') from error
    schema = content.get('schema') if isinstance(content, dict) else None
    if not isinstance(schema, int):
        raise EngineError(f'{path} names no schema, so it is no engine manifest: {remedy}')
    if schema > SCHEMA:
        raise EngineError(f'{path} has schema {schema}, this version reads up to {SCHEMA}: '
                          'update rspec_planner, or build the engine again with this version')
    try:
        manifest = EngineManifest.from_dict(content)
    except ValueError as error:
        raise EngineError(f'{path}: {error}: {remedy}') from error
    if (manifest.stage, manifest.flavour) != (stage, flavour):
        raise EngineError(f'{path} describes stage {manifest.stage} for {manifest.flavour}: the '
                          f'files were renamed or swapped; {remedy}')
    return manifest


def list_manifests(folder: str | Path) -> list[EngineManifest]:
    """Return the manifests in a folder by stage; EngineError for one that is not readable."""
    return [read_manifest(folder, *name) for name in manifest_names(folder)]


def manifest_names(folder: str | Path) -> list[tuple[str, str]]:
    """Return stage and flavour of every manifest in a folder, readable or not."""
    if not Path(folder).is_dir():
        raise EngineError(f'engine folder {folder} does not exist: rspec engine build --out '
                          f'{folder} makes it')
    names = sorted(path.stem.split('.') for path in Path(folder).glob('*.*.json'))
    return [(name[0], name[1]) for name in names if len(name) == 2]


def read_engine(folder: str | Path, manifest: EngineManifest) -> bytes:
    """Return an engine file whose size and sha256 are those of its manifest."""
    path = Path(folder) / manifest.file
    build = _build_line(manifest.stage, manifest.flavour)
    if path.name != manifest.file:
        raise EngineError(f'{manifest_path(folder, manifest.stage, manifest.flavour)} names '
                          f'{manifest.file}, which is no plain file name: {build}')
    try:
        size = path.stat().st_size  # a link to a device has none
        data = path.read_bytes() if size == manifest.bytes else b''
    except FileNotFoundError as error:
        raise EngineError(f'{path} does not exist but its manifest does: {build}') from error
    except OSError as error:
        raise EngineError(f'{path} cannot be read ({error.strerror}): check its '
                          'permissions') from error
    if size != manifest.bytes:
        raise EngineError(f'{path} has {size} bytes, its manifest says {manifest.bytes}: it '
                          f'was truncated or replaced; copy it again, or {build}')
    found = sha256_of(data)
    if found != manifest.sha256:
        raise EngineError(f'{path} has sha256 {found[:12]}..., its manifest says '
                          f'{manifest.sha256[:12]}...: copy it again, or {build}')
    return data


def check_plan(data: bytes | memoryview, flavour: str, origin: str) -> None:
    """Raise EngineError when a plan of TensorRT-RTX does not have the form of one."""
    if flavour != 'tensorrt_rtx':
        return
    head = bytes(data[:_RTX_SIZE.stop])
    if head[:4] != _RTX_MAGIC or int.from_bytes(head[_RTX_SIZE], 'little') != len(data):
        raise EngineError(f'{origin} is no complete plan of {flavour}: build it again')


def check_expectation(manifest: EngineManifest, expected: Expectation, origin: str) -> None:
    """
    Raise EngineError for the first way in which an engine does not fit this process.

    In this order: version, host, compute capability, precision, weights, ports.
    """
    build = _build_line(manifest.stage, expected.flavour)
    if manifest.version != expected.version:
        raise EngineError(f'{origin} was built by {manifest.flavour} {manifest.version}, '
                          f'installed is {expected.version}: install that version, or {build}')
    if manifest.host != expected.host:
        raise EngineError(f'{origin} was built on {manifest.host}, this is {expected.host}: '
                          f'{build} here')
    if expected.sm not in manifest.targets:
        raise EngineError(f'{origin} was built for compute capability '
                          f'{", ".join(manifest.targets)}, this GPU has {expected.sm or "none"}: '
                          f'{_sm_remedy(manifest, expected)}')
    if manifest.precision != expected.precision:
        raise EngineError(f'{origin} is {manifest.precision}, {expected.precision} is asked for: '
                          f'ask for {manifest.precision}, or {build} --precision '
                          f'{expected.precision}')
    for name, digest in expected.checkpoints.items():
        found = manifest.checkpoints.get(name, '')
        if found != digest:
            raise EngineError(f'{origin} belongs to {name} weights {found[:12] or "none"}, loaded '
                              f'are {digest[:12] or "none"}: load that checkpoint, or {build}')
    check_ports(manifest.ports, expected.ports, origin)


def _build_line(stage: str, flavour: str) -> str:
    return f'rspec engine build --stage {stage} --flavour {flavour}'


def _sm_remedy(manifest: EngineManifest, expected: Expectation) -> str:
    """Return what helps when a GPU is not among the targets."""
    served = FLAVOURS[manifest.flavour].ahead_of_time
    if served and expected.sm not in served:
        return (f'{manifest.flavour} does not serve it, use engines of tensorrt or '
                'engine.backend torch')
    target = f' --sm {expected.sm}' if served else ' on this machine'
    return _build_line(manifest.stage, manifest.flavour) + target


def check_ports(found: Sequence[Port], expected: Sequence[Port], origin: str) -> None:
    """Raise EngineError for the first port that is missing, surplus or of another kind."""
    remedy = 'export and build it again: rspec engine build'
    have = {port.name: port for port in found}
    want = {port.name: port for port in expected}
    for name, port in want.items():
        if name not in have:
            raise EngineError(f'{origin} lacks {describe(port)}: {remedy}')
        if have[name] != port:
            raise EngineError(f'{origin} has {describe(have[name])}, needed is {describe(port)}: '
                              f'{remedy}')
    for name, port in have.items():
        if name not in want:
            raise EngineError(f'{origin} has a surplus {describe(port)}: {remedy}')


def bare(ports: Sequence[Port]) -> tuple[Port, ...]:
    """Return ports without what a library does not know of them: weights and aliases."""
    return tuple(Port(port.name, port.dtype, port.shape) for port in ports)


def describe(port: Port) -> str:
    """Return a port as one word for people: k0_out float16[1, 2, 64, 64] = k0."""
    bound = port.alias or (f'{port.weight.checkpoint} {port.weight.tensor}' if port.weight else '')
    return f'{port.name} {port.dtype}{list(port.shape)}' + (f' = {bound}' if bound else '')


def told_numerics(manifests: Sequence[EngineManifest]) -> str:
    """Return what a check found of several engines, in a few words."""
    unchecked = [one.stage for one in manifests if 'checked' not in one.numerics]
    failed = [one.stage for one in manifests if one.numerics.get('checked') is False]
    if failed:
        return f'failed: {", ".join(failed)}'
    if unchecked:
        return f'not checked: {", ".join(unchecked)}'
    return f'checked, largest error {max(one.numerics["error"] for one in manifests):.1e}'


def load_verified(folder: str | Path, stage: str,
                  expected: Expectation) -> tuple[EngineManifest, bytes]:
    """
    Return manifest and plan of an engine that this process may deserialise.

    Order: manifest, size and hash, version, host, compute capability, precision, weights,
    ports, form of the plan. The bytes returned are those that were hashed.
    """
    manifest = read_manifest(folder, stage, expected.flavour)
    data = read_engine(folder, manifest)
    origin = str(engine_path(folder, stage, expected.flavour))
    check_expectation(manifest, expected, origin)
    check_plan(data, expected.flavour, origin)
    return manifest, data
