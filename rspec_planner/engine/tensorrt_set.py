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
Build the engines of a set folder, each with its manifest.

A set is one checkpoint in one precision: `onnx/` holds the exported graphs and stages.json, the
engines of every flavour lie above it, `runtime_cache/` is what one machine remembers.
An engine that is already there for the same ONNX file, library, host and GPUs is kept: plans
are not reproducible byte for byte, so the question is asked of the inputs and never of a plan.
What `rspec engine check` found of the same ONNX file goes into the manifest, whichever of the
two runs first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, UTC
import json
from pathlib import Path
import subprocess
from typing import Any

from rspec_planner.engine.engine_manifest import (
    bare,
    check_plan,
    check_ports,
    engine_path,
    EngineManifest,
    list_manifests,
    manifest_names,
    manifest_path,
    ONNX_FOLDER,
    read_engine,
    read_manifest,
    sha256_of,
    write_atomically,
    write_manifest,
)
from rspec_planner.engine.onnx_rules import check_graph
from rspec_planner.engine.stages import read_stages, StageFile, StageSet
from rspec_planner.engine.tensorrt_build import build_engine, Progress
from rspec_planner.engine.tensorrt_library import check_targets, host_name, Library, present_sm
from rspec_planner.errors import EngineError

#: what `rspec engine check` writes beside the graphs
CHECKS_NAME = 'checks.json'
#: shows a bar with a label while a stage is built
Bar = Callable[[str], AbstractContextManager[Progress]]


def build_set(library: Library, folder: str | Path, sms: Sequence[str],
              names: Sequence[str] = (), rebuild: bool = False,
              bar: Bar | None = None) -> list[dict[str, Any]]:
    """
    Build the stages `names`, or all, of a set folder; return one report per stage.

    sms: compute capabilities, '86' for 8.6. rebuild: build what is up to date as well.
    Raises ConfigurationError or EngineError at the first stage that cannot be built; engines
    that were complete by then stay.
    """
    root, stages = Path(folder), read_stages(Path(folder) / ONNX_FOLDER)
    targets = check_targets(library.flavour, sms, stages.precision, present_sm())
    chosen = [stages.stage(name) for name in names] or list(stages.stages)
    reports = []
    for stage in chosen:
        manifest = None if rebuild else _up_to_date(library, root, stages, stage, targets)
        reused = manifest is not None
        if manifest is None:
            manifest = _build(library, root, stages, stage, targets, bar)
        reports.append({**report(_with_numerics(root, manifest)), 'reused': reused})
    return reports


def record_numerics(folder: str | Path) -> list[str]:
    """
    Put what the check found into the manifests of a set folder; return their stages.

    EngineError for a manifest or a report of a check that is not readable.
    """
    root = Path(folder)
    return [_with_numerics(root, manifest).stage for manifest in list_manifests(root)]


def _with_numerics(folder: Path, manifest: EngineManifest) -> EngineManifest:
    """Return the manifest with the result of the check, written when that is new."""
    numerics = _numerics(folder, manifest.onnx_sha256)
    if manifest.numerics != numerics:
        manifest = replace(manifest, numerics=numerics)
        write_manifest(manifest, folder)
    return manifest


def _numerics(folder: Path, onnx_sha256: str) -> dict[str, Any]:
    """Return what the check found of this very ONNX file; empty when it was not checked."""
    path = folder / ONNX_FOLDER / CHECKS_NAME
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
        rows = [row for row in found['engines'] if row['sha256'] == onnx_sha256]
        return {**{key: rows[0][key] for key in ('checked', 'error', 'worst_output',
                                                 'tolerance')},
                'random_frames': found['random_frames'], 'world_frames': found['world_frames'],
                'loop': found['loop']} if rows else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f'{path} is no report of a check ({type(error).__name__}: {error}): '
                          'remove it, or run rspec engine check again') from error


def examine_set(folder: str | Path) -> list[dict[str, Any]]:
    """Return the report of every engine in a set folder, with 'fault', empty when intact."""
    found = []
    for stage, flavour in manifest_names(folder):
        row = {**_UNKNOWN, 'stage': stage, 'flavour': flavour}
        try:
            manifest = read_manifest(folder, stage, flavour)
            row = report(manifest)
            read_engine(folder, manifest)
            fault = ''
        except EngineError as error:
            fault = str(error)
        found.append({**row, 'fault': fault})
    return found


#: what `report` says of an engine whose manifest cannot be read
_UNKNOWN: dict[str, Any] = {
    'stage': '', 'precision': '?', 'flavour': '', 'version': '?', 'sm': [], 'file': '', 'bytes': 0,
    'sha256': '', 'seconds': None, 'cpu_seconds': None, 'peak_mib': None, 'checked': False}


def report(manifest: EngineManifest) -> dict[str, Any]:
    """Return what the command line tells of an engine."""
    return {'stage': manifest.stage, 'precision': manifest.precision,
            'flavour': manifest.flavour, 'version': manifest.version,
            'sm': list(manifest.targets), 'file': manifest.file, 'bytes': manifest.bytes,
            'sha256': manifest.sha256, 'seconds': manifest.build.get('seconds'),
            'cpu_seconds': manifest.build.get('cpu_seconds'),
            'peak_mib': manifest.build.get('peak_mib'),
            'checked': bool(manifest.numerics.get('checked'))}


def _up_to_date(library: Library, folder: Path, stages: StageSet, stage: StageFile,
                targets: tuple[str, ...]) -> EngineManifest | None:
    """Return the manifest of an intact engine built from the same things; None without one."""
    flavour = library.flavour.name
    if not manifest_path(folder, stage.name, flavour).exists():
        return None
    try:
        found = read_manifest(folder, stage.name, flavour)
        read_engine(folder, found)
    except EngineError:
        return None  # damaged: building it again is what the user asked for
    same = ((found.onnx_sha256, found.version, found.host, found.targets)
            == (stage.sha256, library.version, host_name(), targets)
            and dict(found.checkpoints) == dict(stages.checkpoints))
    return found if same else None


def _build(library: Library, folder: Path, stages: StageSet, stage: StageFile,
           targets: tuple[str, ...], bar: Bar | None) -> EngineManifest:
    source = folder / ONNX_FOLDER / stage.file
    check_graph(source, stage, stages.precision)
    cache = folder / 'runtime_cache' / f'timing.{library.flavour.name}.{targets[0]}.cache'
    if bar is None:
        built = build_engine(library, source, targets, cache)
    else:
        with bar(f'building {stage.name}') as progress:
            built = build_engine(library, source, targets, cache, progress)
    check_ports(built.ports, bare(stage.inputs + stage.outputs), str(source))
    path = engine_path(folder, stage.name, library.flavour.name)
    check_plan(built.plan, library.flavour.name, str(source))
    manifest_path(folder, stage.name, library.flavour.name).unlink(missing_ok=True)
    write_atomically(path, built.plan)
    manifest = EngineManifest(
        stage=stage.name, profile=stages.profile, precision=stages.precision,
        flavour=library.flavour.name, version=library.version, targets=targets,
        host=host_name(), file=path.name, bytes=len(built.plan), sha256=sha256_of(built.plan),
        onnx_sha256=stage.sha256, checkpoints=dict(stages.checkpoints), inputs=stage.inputs,
        outputs=stage.outputs, numerics={}, revision=source_revision(),
        build={'seconds': round(built.seconds, 2),
               'cpu_seconds': round(built.cpu_seconds, 2), 'peak_mib': built.peak_mib,
               'flags': list(built.flags), 'warnings': list(built.warnings)},
        created=datetime.now(UTC).isoformat(timespec='seconds'))
    write_manifest(manifest, folder)
    return manifest


def source_revision() -> str:
    """Return the git revision of this package; '' when it does not lie in a repository."""
    try:
        done = subprocess.run(['git', '-C', str(Path(__file__).parent), 'describe', '--always',
                               '--dirty', '--abbrev=40'], capture_output=True, text=True,
                              timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ''
    return done.stdout.strip() if done.returncode == 0 else ''
